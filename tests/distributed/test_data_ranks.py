"""Data-parallel ranks that share experts and step together: tokens of one rank, whatever the others do."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.ranks import pids_of, running
from tests.distributed.test_experts_of_ranks import ROOM
from tests.distributed.test_faults import HANG, second_node
from tests.helpers.checkpoints import UNTRAINED, make_checkpoint
from tests.helpers.engines import drain, prompt_of, run_requests
from tests.helpers.faulty_connector import OFFLOADING, FaultyConnector, connector
from tests.helpers.kernels import cpu_kernels
from tests.helpers.recording_device import RecordingDevice

from fleetfoot import EngineDeadError
from fleetfoot.assets import embedded_model_path
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.executor.worker import Worker
from fleetfoot.kv_transfer.base.connector import TransferContext, WorkerConnector
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import Agreement, SchedulerOutput
from fleetfoot.records.structured_outputs import StructuredOutputsParams
from fleetfoot.runner.graphs import CaptureTable
from fleetfoot.runner.v2 import runner as v2
from fleetfoot.runner.v2.runner import ModelRunnerV2

DATA: dict[str, Any] = {**ROOM, "data_parallel_size": 2, "enable_expert_parallel": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("experts")
    model_type, fields = UNTRAINED["qwen3-moe"]
    make_checkpoint(folder, model_type, **fields)
    return str(folder)


def params(max_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **others)


LIVES = {
    "one rank has nothing to do": {"alone": (prompt_of(9, 100, seed=1), params(12))},
    "one ends early": {
        "long": (prompt_of(5, 100, seed=2), params(30)),
        "short": (prompt_of(5, 100, seed=3), params(2)),
    },
    "prompts beside decodes": {
        str(length): (prompt_of(length, 100, seed=length), params(20 - length // 4)) for length in (3, 40, 7, 24, 50, 1)
    },
    "prompt logprobs": {
        "scored": (prompt_of(40, 100, seed=4), params(3, prompt_logprobs=1)),
        "beside": (prompt_of(30, 100, seed=5), params(9)),
    },
}


def tokens_of(engine: LLMEngine, requests: dict[str, Any]) -> dict[str, list[int]]:
    return {name: output.outputs[0].token_ids for name, output in run_requests(engine, requests).items()}


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, dict[str, list[int]]]:
    with running(**ROOM, model=model, model_runner="v1", max_num_seqs=8) as engine:
        return {name: tokens_of(engine, requests) for name, requests in LIVES.items()}


class GraphsConnector(FaultyConnector):
    """A worker process that makes it replays "graphs"."""

    @staticmethod
    def worker_side(context: TransferContext) -> WorkerConnector:
        v2.open_device = lambda *_: RecordingDevice(has_graphs=True)  # type: ignore[assignment]
        type(cpu_kernels().attention).is_capturable = True
        return FaultyConnector.worker_side(context)


def kinds_of(worker: Worker) -> tuple[dict[str, int], int]:
    """Steps by their graphs, and those of padding."""
    assert isinstance(worker.runner, ModelRunnerV2)
    device = worker.runner.device
    num_replays = device.counts["replay"] if isinstance(device, RecordingDevice) else 0
    return dict(worker.runner.graphs.num_steps), num_replays


def test_agreements() -> None:
    table = CaptureTable.of(
        device="cuda", enforce_eager=False, max_num_seqs=8, max_num_batched_tokens=512, num_drafts=1
    )
    decode, drafts = (
        SchedulerOutput(0, [0] * n, [1 + k] * n, n, n, n * (1 + k), num_drafts=k) for n, k in ((3, 0), (2, 1))
    )
    prompt, longer, huge = (SchedulerOutput(0, [0], [n], 0, 1, n) for n in (20, 70, 500))
    long_decode = SchedulerOutput(0, [0, 1], [1, 90], 1, 2, 91, longest_decode=10_000)
    more = SchedulerOutput(0, [0] * 6, [1] * 6, 6, 6, 6)
    found: list[tuple[tuple[SchedulerOutput, ...], tuple[int, str]]] = [
        ((decode,), (4, "decode")),
        ((decode, more), (8, "decode")),
        ((drafts, drafts), (4, "uniform")),
        ((decode, drafts), (4, "")),
        ((decode, longer), (96, "")),
        ((prompt, longer), (96, "mixed")),
        ((prompt, long_decode), (128, "mixed")),
        ((prompt, huge), (512, "mixed")),
    ]
    for outputs, agreement in found:
        assert table.agree(outputs, False) == Agreement(*agreement)
        shapes = [table.agreed(Agreement(*agreement), each.longest_decode) for each in (*outputs, decode)]
        assert all(shape in table.shapes and shape.num_tokens == agreement[0] for shape in shapes if shape is not None)
        assert (None in shapes) == (not agreement[1])
    assert table.agree((prompt, longer), True) == Agreement(96)


WAYS: dict[str, dict[str, Any]] = {
    "v1": {"model_runner": "v1"},
    "v2": {"model_runner": "v2", "async_scheduling": True},
    "v2, offloading": {"model_runner": "v2", "async_scheduling": True, "kv_transfer_config": OFFLOADING},
    "graphs": {
        "model_runner": "v2",
        "kv_transfer_config": connector("GraphsConnector", __name__, inner=OFFLOADING, faults={"rank": -1}),
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_one_rank(
    way: str, model: str, expected: dict[str, dict[str, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "graphs":
        of = CaptureTable.of.__func__  # type: ignore[attr-defined]
        monkeypatch.setattr(
            CaptureTable, "of", classmethod(lambda cls, **sizes: of(cls, **{**sizes, "device": "cuda"}))
        )
    with running(**DATA, **WAYS[way], model=model, max_num_seqs=4) as engine:
        for name, requests in LIVES.items():
            assert tokens_of(engine, requests) == expected[name], name
            engine.check_integrity()
        before = engine.core.scheduler.stats()
        assert before.num_running == before.num_waiting == 0 and not engine.core.has_work
        if "kv_transfer_config" not in WAYS[way]:
            assert engine.core.scheduler.schedule() is None
        if way == "graphs":
            kinds = [kinds for kinds, _ in engine.collective_rpc(kinds_of)]
            assert all(each["decode"] > 9 and each["mixed"] > 0 for each in kinds[:1])
            assert all(num > sum(each.values()) for each, num in engine.collective_rpc(kinds_of)[1:])  # padding too


def test_requests_go_where_their_prefix_is(model: str) -> None:
    """Else where there is least to do; the idle rank takes no step while nobody has work."""
    prompts = [prompt_of(50, 100, seed=seed) * 2 for seed in (1, 2)]
    with running(**{**DATA, "max_model_len": 120}, model=model, max_num_seqs=4) as engine:
        for round in range(3):
            for index, prompt in enumerate(prompts):
                engine.add_request(f"{round}-{index}", {"prompt_token_ids": [*prompt, round]}, params(2))
            ranks = engine.core.scheduler.ranks  # type: ignore[union-attr]
            assert [sorted(rank.requests) for rank in ranks] == [[f"{round}-0"], [f"{round}-1"]]
            drain(engine)
        assert [rank.stats().prefix_cache_hits for rank in ranks] == [200] * 2
        assert engine.stats().scheduler.prefix_cache_hits == 400


@pytest.mark.parametrize("drafts", [{}, {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}])
def test_grammars_on_each_rank(drafts: dict[str, Any], tmp_path: Path) -> None:
    """Masks go to the rank of their requests."""
    model_type, fields = UNTRAINED["qwen3-moe"]
    make_checkpoint(tmp_path, model_type, **fields, vocab_size=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_model_path() / name, tmp_path)
    patterns = {"letters": "[a-c]{9}", "none": None, "digits": "[0-9]{12}", "names": "(Tom|Lily)+ and (Ben|Anna)"}
    requests = {
        name: ("once upon", params(12, structured_outputs=pattern and StructuredOutputsParams(regex=pattern)))
        for name, pattern in patterns.items()
    }
    settings = {**ROOM, "model": str(tmp_path), "model_runner": "v2", "skip_tokenizer_init": False}
    found = []
    for ranks in ({}, DATA):
        with running(**{**settings, **ranks}, speculative_config=drafts or None, max_num_seqs=4) as engine:
            found.append({name: output.outputs[0].text for name, output in run_requests(engine, requests).items()})
    assert found[0] == found[1]
    assert re.fullmatch("[a-c]{9}", found[1]["letters"]) and re.fullmatch("[0-9]{12}", found[1]["digits"])


@pytest.mark.parametrize("on_error", ["raise", "restart"])
def test_a_dead_rank_ends_the_step_of_all(on_error: str, model: str, expected: dict[str, dict[str, list[int]]]) -> None:
    """With the first cause; or all are built again, and requests resume."""
    name = "prompts beside decodes"
    with running(**DATA, model=model, max_num_seqs=4, on_error=on_error) as engine:
        for request_id, (prompt, sampling) in LIVES[name].items():
            engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
        for _ in range(3):
            engine.step()
        pid = pids_of(engine)[1]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        if on_error == "raise":
            with pytest.raises(EngineDeadError, match=r"worker 1 .* was ended by SIGKILL"):
                drain(engine)
        else:
            outputs = {output.request_id: output.outputs[0].token_ids for output in drain(engine) if output.finished}
            assert outputs == expected[name]
            assert engine.stats().num_restarts == 1
            assert tokens_of(engine, LIVES[name]) == expected[name]


def test_ranks_on_two_machines(model: str, expected: dict[str, dict[str, list[int]]], port: int) -> None:
    """With experts that move between them."""
    eplb = {"step_interval": 8, "num_redundant_experts": 2}
    settings = {**DATA, "model": model, "enable_eplb": True}
    with second_node(port, **settings, eplb_config=json.dumps(eplb)) as command:
        with running(**settings, eplb_config=eplb, nnodes=2, master_port=port) as engine:
            assert len(pids_of(engine)) == 1
            assert {name: tokens_of(engine, requests) for name, requests in LIVES.items()} == expected
            balance = engine.core.stats.balance
            assert balance is not None and balance.num_rounds > 0
        assert command.wait(HANG) == 0

"""Experts that are spread over ranks: logits and tokens of one rank."""

import json
import math
import os
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.distributed.ranks import Turns, TurnsGroup, running
from tests.distributed.test_tensor_parallel import CPU, assert_close, assert_equal, run_steps
from tests.helpers.checkpoints import UNTRAINED, make_checkpoint
from tests.helpers.engines import prompt_of, run_requests
from tests.helpers.faulty_connector import InjectedError
from tests.helpers.kernels import cpu_kernels

from fleetfoot import EngineDeadError
from fleetfoot.config.parsing import load_model_config
from fleetfoot.config.sharding import ExpertSplit
from fleetfoot.distributed.groups import SINGLE_TENSOR_GROUP, ExpertGroup, Groups, TensorGroup
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.eplb import exchange
from fleetfoot.executor.worker import Worker
from fleetfoot.layers.context import ModelContext
from fleetfoot.models.interface import CausalLM
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.weights.loading import ModelLoader, reload_weights

SPLITS = {
    "qwen3-moe": ExpertSplit(2),
    "qwen2-moe": ExpertSplit(4, num_redundant=1),  # 7 slots of 6 experts
    "gpt-oss": ExpertSplit(4),  # stacked; two ranks have one expert
    "glm4-moe": ExpertSplit(2, num_redundant=5),
    "mixtral": ExpertSplit(4, num_redundant=6),
}


def context(group: TensorGroup = SINGLE_TENSOR_GROUP, split: ExpertSplit | None = None) -> ModelContext:
    kernels, groups = cpu_kernels(), Groups(group) if split is None else Groups(group, expert=group)
    return ModelContext(kernels, kernels.attention, torch.float32, CPU, groups=groups, expert_split=split)


def load(folder: Path, where: ModelContext, **options: Any) -> CausalLM:
    return ModelLoader(load_model_config(folder), where, folder, **options).load()


def on_ranks(split: ExpertSplit, function: Callable[[ModelContext], Any]) -> list[Any]:
    turns = Turns(split.num_ranks)
    return turns.run(lambda rank: function(context(TurnsGroup(turns, rank), split)))


@pytest.mark.parametrize("family", SPLITS)
def test_logits_equal_the_whole_models(family: str, tmp_path: Path) -> None:
    model_type, fields = UNTRAINED[family]
    make_checkpoint(tmp_path, model_type, **fields)
    split = SPLITS[family]

    def work(where: ModelContext) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = load(tmp_path, where)
        layer = next(layer for layer in model.model.layers.values() if layer.spec.experts is not None)
        count = layer.spec.experts.num_experts
        held = len(split.slots(where.groups.expert.rank, count))
        assert [len(stack) for stack in layer.mlp.experts.weight.stacks()] == [held] * (4 if family == "gpt-oss" else 2)
        loaded = run_steps(model)
        ModelLoader(model.config, where, None, "dummy", seed=5).fill(model)
        dummy = run_steps(model)
        reload_weights(model, where, tmp_path)
        assert_equal(run_steps(model), loaded)
        return loaded, dummy

    expected = run_steps(load(tmp_path, context())), run_steps(load(tmp_path, context(), load_format="dummy", seed=5))
    first, *others = on_ranks(split, work)
    for one, other in zip(first, expected, strict=True):
        assert_close(one, other)
    for logits in others:
        for one, other in zip(logits, first, strict=True):
            assert_equal(one, other)


PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
REQUESTS = {str(length): (prompt_of(length, 100, seed=length), PARAMS) for length in (30, 7, 1)}


ROOM: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 24, "max_model_len": 64}
PARALLEL = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


def tokens_of(engine: LLMEngine) -> dict[str, list[int]]:
    outputs = run_requests(engine, REQUESTS)
    return {name: output.outputs[0].token_ids for name, output in outputs.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("experts")
    model_type, fields = UNTRAINED["qwen3-moe"]
    make_checkpoint(folder, model_type, **fields)
    return str(folder)


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, list[int]]:
    with running(**ROOM, model=model, model_runner="v1") as engine:
        return tokens_of(engine)


def load_of(worker: Worker) -> list[int]:
    """Of each layer, how often experts were chosen."""
    assert worker.balancer is not None
    return worker.balancer._load.sum(dim=1).tolist()


DATA: dict[str, Any] = {"tensor_parallel_size": 1, "data_parallel_size": 2}


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("ranks", [{}, DATA], ids=["tensor", "data"])
def test_the_load_is_that_of_tokens_of_requests(
    runner: str, ranks: dict[str, Any], model: str, expected: dict[str, list[int]]
) -> None:
    """Not of padding, of the warm-up, or of idle steps; of replicas each has that of its own. In the last layer V2
    computes rows of logits alone, or all of a chunk without any beside another replica."""
    settings = {**ROOM, **PARALLEL, **ranks, "model": model, "model_runner": runner, "enable_eplb": True}
    with running(**settings, eplb_config={"step_interval": 10**6}) as engine:
        assert engine.collective_rpc(load_of) == [[0, 0]] * 2
        assert tokens_of(engine) == expected
        num_tokens, num_logits = sum(len(prompt) + 11 for prompt, _ in REQUESTS.values()), 12 * len(REQUESTS)
        last = num_tokens if runner == "v1" else num_logits + (24 if ranks else 0)
        loads = engine.collective_rpc(load_of)
        if ranks:
            first, second = loads
            loads = [[sum(layer) for layer in zip(first, second, strict=True)]] * 2
            assert min(*first, *second) > 0
        assert loads == [[2 * num_tokens, 2 * last]] * 2


# --- balancing ------------------------------------------------------------------------------------------------------

DTYPES = torch.bfloat16, torch.uint8
EXPERT = "model.layers.2.mlp.experts.{}.down_proj.weight"


def balances(engine: LLMEngine) -> list[tuple[int, dict[str, Any], list[list[int]]]]:
    """Of each rank."""
    return engine.collective_rpc(balance_of)


def balance_of(worker: Worker) -> tuple[int, dict[str, Any], list[list[int]]]:
    """Steps, what was moved, and where experts are."""
    assert worker.balancer is not None
    placements = [list(layer.experts) for layer in worker.balancer._layers.values()]
    report = worker.balance_report() or {}
    assert (report.pop("seconds") > 0) == (report["num_rounds"] > 0)
    return worker.balancer.num_steps, report, placements


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
WAYS: dict[str, dict[str, Any]] = {
    "v1": {"model_runner": "v1"},
    "data": {**DATA, "model_runner": "v2", "async_scheduling": True},
    "data of pipelines": {**DATA, "model_runner": "v2", "pipeline_parallel_size": 2, "speculative_config": NGRAM},
    "data of tensor ranks": {"model_runner": "v1", "data_parallel_size": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_balanced_experts(way: str, model: str, expected: dict[str, list[int]], tmp_path: Path) -> None:
    """Tokens are the same while experts move, live weights find every replica, and sleep and files go with it: these
    on two ranks, files also on those of pipelines."""
    eplb = {"window_size": 8, "step_interval": 8, "num_redundant_experts": 3, "save": str(tmp_path / "saved")}
    settings = {**ROOM, **PARALLEL, **WAYS[way], "model": model, "enable_eplb": True, "enable_sleep_mode": True}
    with running(**settings, eplb_config=eplb) as engine:
        before = engine.weight_checksums()
        for _ in range(4):
            assert tokens_of(engine) == expected
        found = balances(engine)
        stage_size = 2 if "pipeline" in way else 1
        stages = [found[stage::stage_size] for stage in range(stage_size)]
        assert len({steps for steps, _, _ in found}) == 1
        for first, *others in stages:
            assert others == [first] * len(others)
            _, report, placements = first
            assert report["num_rounds"] > 1 and report["num_moved"] > 0
            assert len(report["rank_loads"]) > 1 and sum(report["rank_loads"]) == pytest.approx(1)
            assert all(sorted({*experts}) == [*range(6)] and len(experts) == 9 for experts in placements)
        metrics = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
        assert 0 < metrics["fleetfoot:expert_moves"] <= report["num_moved"]
        assert 0 < metrics["fleetfoot:expert_balancedness_least"] <= metrics["fleetfoot:expert_balancedness"] <= 1
        assert engine.weight_checksums() == before
        for level in (1, 2) if " " not in way else ():
            engine.sleep(level=level)
            engine.wake_up()
            if level == 2:
                engine.reload_weights()
            assert tokens_of(engine) == expected
        # one matrix of each expert, where they are now, and back
        tensors = load_file(Path(model) / "model.safetensors")
        for factor in (-2, 1) if " " not in way else ():
            engine.reload_weights({EXPERT.format(index): factor * tensors[EXPERT.format(index)] for index in range(6)})
            changed = {name for name, checksum in engine.weight_checksums().items() if checksum != before[name]}
            assert changed == ({EXPERT.format(index) for index in range(6)} if factor != 1 else set())
            assert (tokens_of(engine) == expected) == (factor == 1)
    if "tensor" in way:
        return
    for file in (tmp_path / "saved").iterdir():  # of the same form, with a load that the first placement does not suit
        layers = json.loads(file.read_text())["layers"]
        assert all(sum(layer["load"]) > 0 and sorted({*layer["experts"]}) == [*range(6)] for layer in layers.values())
        skewed = {number: {**layer, "load": [1.0, 1.0, 1.0, 100.0, 1.0, 1.0]} for number, layer in layers.items()}
        file.write_text(json.dumps({"layers": skewed}))
    eplb = {"step_interval": 1000, "num_redundant_experts": 3, "load_initial": str(tmp_path / "saved")}
    with running(**settings, eplb_config=eplb) as engine:
        assert tokens_of(engine) == expected
        placements = [experts for _, _, layers in balances(engine) for experts in layers]
        assert all(experts.count(3) > 1 for experts in placements)


def break_mover(worker: Worker, rank: int, way: str, is_moving: bool) -> None:
    """Make the mover of a rank fail, or end its process, in the middle of the next move or at the end of a round."""

    def fail(*arguments: Any) -> None:
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise InjectedError("the mover", rank)

    if worker.rank == rank and worker.balancer is not None:
        if is_moving:
            worker.balancer._exchange.stage = fail  # type: ignore[method-assign]
        else:
            worker.balancer._due_after_agreement = fail  # type: ignore[method-assign]


def test_moves_through_the_memory_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks in one process; rows that are no whole words, too."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device, synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    slots, rows = [range(3), range(3, 5)], [(4, 6), (5,)]  # two stacks: 48 and 5 bytes an expert
    words = sum(exchange._words_of(torch.empty(*shape, dtype=kind)) for shape, kind in zip(rows, DTYPES, strict=True))
    buffers = [torch.zeros(3 * words, dtype=torch.int64) for _ in slots]
    memory: Any = SimpleNamespace(of_rank=buffers.__getitem__, local=buffers[0])
    ranks = [exchange.PeerExchange(ExpertGroup(rank, 2), slots, memory, words) for rank in range(2)]
    numbers = [torch.arange(5 * math.prod(shape)).view(5, *shape) for shape in rows]
    whole = [each.to(kind) for each, kind in zip(numbers, DTYPES, strict=True)]
    stacks = [[stack[own.start : own.stop].clone() for stack in whole] for own in slots]
    before, after = (0, 1, 2, 3, 4), (4, 1, 0, 2, 3)
    moves = exchange.moves_between(before, after, slots)
    for rank in ranks:
        rank.check()
    for rank, own in zip(ranks, stacks, strict=True):
        rank.stage(own, moves, nullcontext())
    for number, (rank, own) in enumerate(zip(ranks, stacks, strict=True)):
        rank.write(own, [move.target for move in moves if move.target_rank == number])
    for found, stack in zip(zip(*stacks, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(found), stack[[*after]])


def hold_mover(worker: Worker) -> None:
    """Stop the mover when it has copied the next experts to buffers, until `release_mover`."""
    assert worker.balancer is not None
    exchange = worker.balancer._exchange
    stage, has_staged, goes_on = exchange.stage, threading.Event(), threading.Event()

    def held(*arguments: Any) -> None:
        stage(*arguments)
        has_staged.set()
        goes_on.wait()

    exchange.stage = held  # type: ignore[method-assign]
    worker.held = has_staged, goes_on  # type: ignore[attr-defined]


def is_held(worker: Worker) -> bool:
    return worker.held[0].is_set()  # type: ignore[attr-defined, no-any-return]


def release_mover(worker: Worker) -> None:
    worker.held[1].set()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("ranks", "level"), [({"model_runner": "v2"}, 1), (WAYS["data"], 2)], ids=["tensor", "data"])
def test_sleep_in_the_middle_of_a_move(
    ranks: dict[str, Any], level: int, model: str, expected: dict[str, list[int]]
) -> None:
    """Experts that were staged before it are not mixed with those that are read after it."""
    eplb = {"step_interval": 8, "num_redundant_experts": 3}
    settings = {**ROOM, **PARALLEL, **ranks, "model": model, "enable_eplb": True, "eplb_config": eplb}
    with running(**settings, enable_sleep_mode=True) as engine:
        before = engine.weight_checksums()
        engine.collective_rpc(hold_mover)
        while not all(engine.collective_rpc(is_held)):
            assert tokens_of(engine) == expected
        engine.sleep(level=level)
        engine.wake_up()
        if level == 2:
            engine.reload_weights()
        engine.collective_rpc(release_mover)
        for _ in range(3):
            assert tokens_of(engine) == expected
        assert engine.weight_checksums() == before
        found = balances(engine)
        assert found == [found[0]] * 2 and found[0][1]["num_moved"] > 0


@pytest.mark.parametrize("way", ["raises", "killed"])
def test_a_mover_that_fails_is_an_error_of_the_engine(way: str, model: str) -> None:
    """After a restart all ranks are as equal as at the start, with the weights of updates before and after moves."""
    eplb = {"step_interval": 8, "num_redundant_experts": 3}
    settings = {**ROOM, **PARALLEL, "model": model, "enable_eplb": True, "eplb_config": eplb, "model_runner": "v2"}
    tensors = load_file(Path(model) / "model.safetensors")
    with running(**settings, on_error="restart") as engine:
        for number in range(2):
            names = [EXPERT.format(index) for index in range(3 * number, 3 * number + 3)]
            engine.reload_weights({name: -2 * tensors[name] for name in names})
            checksums = engine.weight_checksums()
            engine.collective_rpc(break_mover, args=(1, way, number == 0))
            changed = tokens_of(engine)
            while engine.stats().num_restarts == number:
                assert tokens_of(engine) == changed
            first_rank, second_rank = balances(engine)
            assert first_rank == second_rank
            assert engine.weight_checksums() == checksums
            for _ in range(3):
                assert tokens_of(engine) == changed
            assert balances(engine)[0][1]["num_moved"] > 0


def test_the_first_cause_reaches_the_user(model: str) -> None:
    settings = {**ROOM, **PARALLEL, "model": model, "enable_eplb": True, "eplb_config": {"step_interval": 8}}
    with running(**settings) as engine:
        engine.collective_rpc(break_mover, args=(1, "raises", True))
        with pytest.raises(EngineDeadError, match="has failed: injected at the mover on rank 1"):
            for _ in range(9):
                tokens_of(engine)

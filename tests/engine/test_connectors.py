"""KV connectors through the engine, on both runners: the same tokens as without, whatever happens to the transfers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.engine.test_contributing import Page
from tests.helpers import faulty_connector, prefill_decode
from tests.helpers.commands import shrink_peak_rates
from tests.helpers.engines import drain, make_engine, prompt_of, run_requests
from tests.helpers.faulty_connector import SCHEDULER_POINTS, WORKER_POINTS, Faults, InjectedError, connector, faulty
from tests.helpers.kv_bench import InlineJobs
from tests.helpers.prefill_decode import ROOMY, SIZE, VOCAB, Tokens, settle, tokens_of

from fleetfoot import LLMEngine, SamplingParams
from fleetfoot.cli.main import main
from fleetfoot.cli.plan import plan_report
from fleetfoot.config.env import USE_V2_MODEL_RUNNER
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.kv_transfer.blockstore import worker
from fleetfoot.records.kv_layout import TOKEN_MAJOR_NHD, KVLayout
from fleetfoot.scheduler.stats import TransferStats

PROMPTS = prefill_decode.PROMPTS
PARAMS = {**prefill_decode.PARAMS, "tiny": replace(prefill_decode.PARAMS["tiny"], prompt_logprobs=1)}
REQUESTS = {name: (PROMPTS[name], PARAMS[name]) for name in PROMPTS}
NUM_CACHED = {"alone": 16, "one": 28, "two": 24, "tiny": 0, "long": 36}
"""Tokens of full blocks without the last token, which an engine that has computed nothing yet can load."""


Start = Callable[..., LLMEngine]
Configs = dict[str, dict[str, Any]]


OFFLOAD = connector("OffloadingConnector", num_cpu_blocks=200)


@pytest.fixture(autouse=True)
def own_connector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The connector of the room's page, which keeps blocks in a dictionary."""
    return Page(tmp_path, monkeypatch).add_module("own_connector", "connector")


@pytest.fixture
def configs(tmp_path: Path) -> Configs:
    files = connector("SharedStorageConnector", shared_storage_path=str(tmp_path / "kv"))
    parts = [connector("OffloadingConnector", num_cpu_blocks=5), files]
    several, own = connector("MultiConnector", connectors=parts), connector("DictConnector", "own_connector")
    return {"offload": OFFLOAD, "files": files, "multi": several, "own": own}


@pytest.fixture
def start(runner: str, text_model: Path) -> Start:
    """Starts an engine with a connector, and by default with a cache that is too small for all requests."""

    def start_engine(config: dict[str, Any] | None, **settings: Any) -> LLMEngine:
        settings = {"model_runner": runner, **SIZE, **settings}
        engine = make_engine(text_model, kv_transfer_config=config, **settings)
        assert engine.runner_name == settings["model_runner"]
        return engine

    return start_engine


def close(engine: LLMEngine) -> TransferStats:
    """End an engine after its last transfer, with every block back; what was transferred."""
    settle(engine)
    stats = engine.stats().transfers
    engine.shutdown()
    return stats


@pytest.mark.parametrize("name", ["multi", "own"])
def test_tokens_are_as_without(start: Start, configs: Configs, name: str, no_connector: Tokens) -> None:
    engine = start(configs[name], enable_prefix_caching=False)
    for _ in range(2):  # the second time much of it is loaded
        assert tokens_of(run_requests(engine, REQUESTS)) == no_connector
    stats = close(engine)
    assert stats.loads_failed == 0
    assert stats.loads_done > 0 and stats.tokens_loaded > 0


@pytest.mark.parametrize("reset_connector", [False, True])
def test_reset_of_the_prefix_cache(start: Start, reset_connector: bool, no_connector: Tokens) -> None:
    engine = start(OFFLOAD)
    for _ in range(2):
        assert tokens_of(run_requests(engine, {"long": REQUESTS["long"]})) == {"long": no_connector["long"]}
        engine.reset_prefix_cache(reset_connector=reset_connector)
    assert close(engine).loads_done == (0 if reset_connector else 1)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", ["files", "own"])
def test_another_engine_finds_what_one_has_computed(
    start: Start, configs: Configs, depth: int, name: str, no_connector: Tokens, tmp_path: Path
) -> None:
    one = start(configs[name], model_runner="v1")
    assert tokens_of(run_requests(one, REQUESTS)) == no_connector
    close(one)
    assert bool(list(tmp_path.rglob("*.kv"))) == (name == "files")
    other = start(configs[name], **ROOMY, async_scheduling=bool(depth))
    outputs = run_requests(other, REQUESTS)
    assert tokens_of(outputs) == no_connector
    assert {name: output.num_cached_tokens for name, output in outputs.items()} == NUM_CACHED
    stats = close(other)
    assert (stats.loads_done, stats.tokens_loaded, stats.loads_failed) == (4, sum(NUM_CACHED.values()), 0)


def test_loaded_kv_is_used(start: Start, configs: Configs, no_connector: Tokens, own_connector: ModuleType) -> None:
    one = start(configs["own"])
    run_requests(one, REQUESTS)
    close(one)
    for block_hash, layers in own_connector.STORE.items():
        own_connector.STORE[block_hash] = [-layer for layer in layers]
    other = start(configs["own"])
    assert tokens_of(run_requests(other, {"long": REQUESTS["long"]}))["long"] != no_connector["long"]
    other.shutdown()


def test_a_connector_of_the_other_layout(
    text_model: Path, own_connector: Any, no_connector: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V1 keeps the layout that the connector accepts; a second engine loads what the first one has computed."""
    monkeypatch.delenv(USE_V2_MODEL_RUNNER, raising=False)

    class TokenMajorWorker(own_connector.DictWorker):
        def register_kv_caches(self, kv_caches: Any, layout: KVLayout) -> None:
            assert [tuple(kv_cache.shape) for kv_cache in kv_caches] == layout.tensor_shapes
            super().register_kv_caches([kv_cache.transpose(0, 1) for kv_cache in kv_caches], layout)

    class TokenMajorConnector(own_connector.DictConnector):
        accepted_kv_layouts = frozenset({TOKEN_MAJOR_NHD})

        @staticmethod
        def worker_side(context: object) -> Any:
            return TokenMajorWorker()

    monkeypatch.setattr(own_connector, "TokenMajorConnector", TokenMajorConnector, raising=False)
    for _ in range(2):
        engine = make_engine(text_model, kv_transfer_config=connector("TokenMajorConnector", "own_connector"), **SIZE)
        layout = engine.core.executor.layout
        assert (engine.runner_name, layout.name) == ("v1", TOKEN_MAJOR_NHD)
        shape = plan_report(engine.plan)["kv_layout"]["shape"]
        assert shape == list(layout.tensor_shapes[0]) and shape[0] == 2 < shape[1]
        assert tokens_of(run_requests(engine, REQUESTS)) == no_connector
        stats = close(engine)
    assert stats.loads_done > 0 and stats.loads_failed == 0


EXPECTED_CALLS = [
    "get_num_new_matched_tokens", "update_state_after_alloc",
    "build_connector_meta", *WORKER_POINTS[:3], "wait_for_progress", "save_kv", *WORKER_POINTS[-2:],
    "update_connector_output",
    "build_connector_meta", *WORKER_POINTS,
]  # fmt: skip
"""Of a request with KV that is loaded in an idle step, up to the end of its first step with a forward pass."""


def test_the_order_of_calls(start: Start, configs: Configs) -> None:
    """As in docs/kv_connectors.md."""
    for _ in range(2):  # the second engine loads
        faults = Faults()
        engine = start(faulty(configs["own"], faults), async_scheduling=False)
        run_requests(engine, {"alone": REQUESTS["alone"]})
        engine.shutdown()
    calls = faults.calls
    assert calls[0] == "register_kv_caches"
    begin = calls.index("get_num_new_matched_tokens")
    assert calls[begin : begin + len(EXPECTED_CALLS)] == EXPECTED_CALLS
    assert calls.count("bind_connector_metadata") == calls.count("clear_connector_metadata")
    assert calls.count("blocks_filled") > 0  # by generated tokens
    assert calls.index("request_finished") > calls.index("update_connector_output")
    assert calls[-2:] == ["shutdown", "shutdown"]  # the worker side first


def test_host_memory_holds_what_the_cache_does_not(start: Start) -> None:
    """Three prompts of which the KV cache holds one, asked in turn."""
    prompts = [prompt_of(40, VOCAB, seed=seed) for seed in range(3)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine = start(None, kv_offloading_size=0.01, num_gpu_blocks_override=12)
    rounds = []
    for _ in range(3):
        outputs = [run_requests(engine, {"r": (prompt, params)})["r"] for prompt in prompts]
        rounds.append([output.outputs[0].token_ids for output in outputs])
        cached = [output.num_cached_tokens for output in outputs]
    assert rounds[0] == rounds[1] == rounds[2]
    assert cached == [36, 36, 36]
    stats = close(engine)
    assert (stats.loads_done, stats.tokens_loaded, stats.loads_failed) == (6, 6 * 36, 0)


def test_a_conversation_goes_on_in_another_engine(start: Start, configs: Configs) -> None:
    """What was generated is saved too, at the latest when its request ends."""
    params = SamplingParams(temperature=0, max_tokens=11, ignore_eos=True)
    one = start(configs["files"])
    first = run_requests(one, {"r": (PROMPTS["alone"], params)})["r"].outputs[0].token_ids
    close(one)
    follow_up = [*PROMPTS["alone"], *first, 17, 18]
    plain, other = start(None), start(configs["files"])
    output = run_requests(other, {"r": (follow_up, params)})["r"]
    assert output.num_cached_tokens == 28  # all but the last token of 29 have KV, in seven blocks
    assert output.outputs[0].token_ids == run_requests(plain, {"r": (follow_up, params)})["r"].outputs[0].token_ids
    close(other)


@pytest.mark.parametrize("name", ["files", "multi"])
def test_an_engine_that_ends_has_saved_everything(start: Start, configs: Configs, name: str, tmp_path: Path) -> None:
    engine = start(configs[name])
    run_requests(engine, {"alone": REQUESTS["alone"]})
    engine.shutdown()
    assert len(list(tmp_path.rglob("*.kv"))) == 7  # all but the last of 30 tokens have KV


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_damaged_files(
    start: Start, configs: Configs, policy: str, tmp_path: Path, no_connector: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "IOThreads", lambda *_: InlineJobs())  # files are read before they are written again
    one = start(configs["files"])
    run_requests(one, REQUESTS)
    close(one)
    for path in tmp_path.rglob("*.kv"):
        content = bytearray(path.read_bytes())
        content[-7] ^= 16
        path.write_bytes(content)
    other = start({**configs["files"], "kv_load_failure_policy": policy})
    outputs = run_requests(other, REQUESTS)
    for name, output in outputs.items():
        completion = output.outputs[0]
        if policy == "recompute" or name == "tiny":  # which has no block to load
            assert completion.token_ids == no_connector[name]
        else:
            assert (completion.finish_reason, completion.token_ids) == ("error", [])
            assert "checksum is wrong" in str(completion.stop_reason)
    assert close(other).loads_failed >= 4
    if policy == "recompute":  # the files have been written again
        third = start(configs["files"])
        assert tokens_of(run_requests(third, REQUESTS)) == no_connector
        assert close(third).loads_done > 0


@pytest.mark.parametrize(("number", "point"), [*enumerate([*SCHEDULER_POINTS, *WORKER_POINTS])])
def test_an_error_at_any_point_ends_the_engine_and_nothing_hangs(
    start: Start, number: int, point: str, runner: str
) -> None:
    """At the first call of each point on one runner, at the second on the other."""
    faults = Faults(raise_at=point, on_call=1 + (number + (runner == "v1")) % 2)
    engine = start(faulty(OFFLOAD, faults))
    with pytest.raises(EngineDeadError, match=f"injected at {point}") as caught:
        for _ in range(3):
            run_requests(engine, REQUESTS)
    assert isinstance(caught.value.__cause__, InjectedError)
    num_bound, num_cleared = (faults.calls.count(f"{verb}_connector_metadata") for verb in ("bind", "clear"))
    num_open = int(point == "bind_connector_metadata")
    assert num_bound - num_cleared in (0, num_open) or point == "clear_connector_metadata"
    with pytest.raises(EngineDeadError):
        engine.step()
    engine.shutdown()


@pytest.mark.parametrize("point", ["build_connector_meta", "bind_connector_metadata", "flush", "get_finished"])
def test_both_sides_end_after_a_late_error(start: Start, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, ended = Faults(), []
    for side in (faulty_connector.FaultyScheduler, faulty_connector.FaultyWorker):
        monkeypatch.setattr(side, "shutdown", lambda self: ended.append(type(self)))
    engine = start(faulty(OFFLOAD, faults))
    run_requests(engine, {"alone": REQUESTS["alone"]})
    faults.raise_at, faults.on_call = point, faults.calls.count(point) + 1
    with pytest.raises(InjectedError, match=f"injected at {point}"):
        engine.shutdown()
    assert ended == [faulty_connector.FaultyWorker, faulty_connector.FaultyScheduler]


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def saved(start: Start, faults: Faults, no_connector: Tokens) -> Start:
    """Starts an engine with these faults, which has saved the KV of REQUESTS in host memory alone."""

    def start_saved(policy: str = "recompute", **settings: Any) -> LLMEngine:
        config = faulty(OFFLOAD, faults, kv_load_failure_policy=policy)
        engine = start(config, enable_prefix_caching=False, **settings)
        assert tokens_of(run_requests(engine, REQUESTS)) == no_connector
        return engine

    return start_saved


@pytest.mark.parametrize("loads", ["fail", "time_out", "corrupt"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_loads_that_fail(saved: Start, faults: Faults, loads: str, policy: str, no_connector: Tokens) -> None:
    engine = saved(policy)
    before = engine.stats().transfers
    faults.loads = loads
    outputs = run_requests(engine, REQUESTS)
    for name, output in outputs.items():
        completion = output.outputs[0]
        if completion.finish_reason == "error":
            assert policy == "fail" and f"injected: {loads}" in str(completion.stop_reason)
            assert completion.token_ids == no_connector[name][: len(completion.token_ids)]
        else:
            assert completion.token_ids == no_connector[name]
    assert (outputs["alone"].outputs[0].finish_reason == "error") == (policy == "fail")
    faults.loads = ""
    assert tokens_of(run_requests(engine, REQUESTS)) == no_connector
    stats = close(engine)
    assert stats.loads_failed - before.loads_failed >= 4
    assert bool(stats.loads_timed_out) == (loads == "time_out")


def test_a_slow_load_delays_no_other_request(saved: Start, faults: Faults, no_connector: Tokens) -> None:
    engine = saved(**ROOMY)
    faults.loads = "hold"
    engine.add_request("alone", *REQUESTS["alone"])
    engine.add_request("new", prompt_of(30, VOCAB, seed=99), PARAMS["alone"])
    finished = []
    for _ in range(60):
        finished += [output.request_id for output in engine.step() if output.finished]
        engine.check_integrity()
    assert finished == ["new"]
    faults.released.set()
    assert drain(engine)[-1].outputs[0].token_ids == no_connector["alone"]
    close(engine)


def test_bench_shows_what_was_loaded(
    text_model: Path, configs: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From files of an earlier run, which a run without a warm-up may find."""
    shrink_peak_rates(monkeypatch)
    results = []
    for number in range(2):
        output = tmp_path / f"{number}.json"
        flags = ["--num-prompts", "3", "--input-len", "40", "--output-len", "4", "--num-warmup", "0", "--device", "cpu"]
        config = json.dumps(configs["files"])
        arguments = ["--model", str(text_model), *flags, "--block-size", "4", "--kv-transfer-config", config]
        assert main(["bench", "throughput", *arguments, "--max-num-seqs", "8", "--output", str(output)]) == 0
        results.append(json.loads(output.read_text())["results"]["kv_transfer"])
    first, second = results
    assert first is None or first["loads_done"] == 0  # what is written behind its last step is not counted
    assert (second["loads_done"], second["loads_failed"], second["loaded_tokens"]) == (3, 0, 3 * 36)
    assert second["counters"]["blocks_loaded"] == 3 * 9


def test_statistics_since_a_moment() -> None:
    before = TransferStats(loads_started=3, loads_done=1, loads_failed=2, loads_timed_out=1, counters={"a": 5})
    now = TransferStats(1, 4, 9, 5, 3, 1, tokens_loaded=64, counters={"a": 7, "b": 1})
    assert now.since(before) == TransferStats(1, 4, 6, 4, 1, 0, tokens_loaded=64, counters={"a": 2, "b": 1})

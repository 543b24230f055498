"""KV connectors through the engine, on both runners: the same tokens as without, whatever happens to the transfers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.engine.test_contributing import Page
from tests.helpers import prefill_decode
from tests.helpers.commands import shrink_peak_rates
from tests.helpers.engines import make_engine, run_requests
from tests.helpers.faulty_connector import SCHEDULER_POINTS, WORKER_POINTS, Faults, InjectedError, connector, faulty
from tests.helpers.prefill_decode import SIZE, Tokens, settle, tokens_of

from fleetfoot import LLMEngine
from fleetfoot.cli.main import main
from fleetfoot.engine.errors import EngineDeadError
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

"""Connectors with vLLM's base class: `ExampleConnector`, and classes of users."""

import re
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fleetfoot.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from safetensors.torch import load_file
from tests.engine.test_connectors import NUM_CACHED, REQUESTS, close
from tests.helpers import vllm_connector
from tests.helpers.engines import drain, make_engine, prompt_of, run_requests
from tests.helpers.faulty_connector import Faults, InjectedError, connector
from tests.helpers.prefill_decode import PARAMS, ROOMY, SIZE, VOCAB, Tokens, tokens_of

from fleetfoot import LLMEngine, SamplingParams
from fleetfoot.config.env import USE_V2_MODEL_RUNNER
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.kv_transfer.base import registry
from fleetfoot.records.kv_layout import BLOCK_CONTIGUOUS_HND, TOKEN_MAJOR_NHD

HELPERS = vllm_connector.__name__
PAGE = Path(__file__).parents[2] / "docs" / "kv_connectors.md"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(USE_V2_MODEL_RUNNER, raising=False)


def example(folder: Path, name: str = "ExampleConnector", **extra: Any) -> dict[str, Any]:
    """A kv_transfer_config."""
    module = None if name == "ExampleConnector" else HELPERS
    return connector(name, module, shared_storage_path=str(folder), **extra)


def start(model: Path, config: dict[str, Any] | None, **settings: Any) -> LLMEngine:
    return make_engine(model, kv_transfer_config=config, **{**SIZE, **settings})


def saved_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


@pytest.mark.parametrize("settings", [{}, {"enable_prefix_caching": False}, {"async_scheduling": True}])
def test_one_engine_saves_and_another_loads(
    text_model: Path, tmp_path: Path, no_connector: Tokens, settings: dict[str, Any]
) -> None:
    """Prompts in chunks, preemption, and a cache that is too small for all requests."""
    one = start(text_model, example(tmp_path), **{"num_gpu_blocks_override": 16, **settings})
    assert (one.runner_name, one.core.executor.layout.name) == ("v1", TOKEN_MAJOR_NHD)
    assert tokens_of(run_requests(one, REQUESTS)) == no_connector
    assert one.stats().scheduler.num_preemptions > 0
    close(one)
    assert len(saved_files(tmp_path)) == len(REQUESTS) - 1  # one prompt has no full block
    other = start(text_model, example(tmp_path), **{**ROOMY, **settings})
    outputs = run_requests(other, REQUESTS)
    assert tokens_of(outputs) == no_connector
    assert {name: output.num_cached_tokens for name, output in outputs.items()} == NUM_CACHED
    stats = close(other)
    assert (stats.loads_done, stats.loads_failed, stats.tokens_loaded) == (4, 0, sum(NUM_CACHED.values()))


def test_roles(text_model: Path, tmp_path: Path) -> None:
    """A consumer saves nothing, and a producer loads nothing."""
    for role, num_files, num_loads in (("consumer", 0, 0), ("producer", 1, 0), ("producer", 1, 0), ("consumer", 1, 1)):
        engine = start(text_model, {**example(tmp_path), "kv_role": f"kv_{role}"})
        run_requests(engine, {"alone": REQUESTS["alone"]})
        assert (close(engine).loads_done, len(saved_files(tmp_path))) == (num_loads, num_files)


def test_a_longer_prompt_finds_a_shorter_one(text_model: Path, tmp_path: Path) -> None:
    """Not with another salt; and no engine loads what another model, dtype or layout has saved."""
    prompt, params = prompt_of(40, VOCAB, seed=6), SamplingParams(temperature=0, max_tokens=2)
    engine = start(text_model, example(tmp_path))
    run_requests(engine, {"short": (prompt[:22], params)})
    salted: Any = {"prompt_token_ids": prompt, "cache_salt": "s"}
    engine.reset_prefix_cache()
    found = run_requests(engine, {"salted": (salted, params), "long": (prompt, params)})
    assert {name: output.num_cached_tokens for name, output in found.items()} == {"salted": 0, "long": 20}
    engine.reset_prefix_cache(reset_connector=True)
    assert run_requests(engine, {"r": (prompt, params)})["r"].num_cached_tokens == 0
    close(engine)
    for settings in ({"dtype": "bfloat16"}, {"block_size": 8}):
        other = start(text_model, example(tmp_path), **settings)
        assert run_requests(other, {"r": (prompt, params)})["r"].num_cached_tokens == 0
        close(other)
    either = example(tmp_path, "EitherExample")
    for runner, layout, num_cached in (("v1", BLOCK_CONTIGUOUS_HND, 0), ("v2", BLOCK_CONTIGUOUS_HND, 36)):
        other = start(text_model, either, model_runner=runner)
        assert other.core.executor.layout.name == layout
        output = run_requests(other, {"r": (prompt, params)})["r"]
        assert output.num_cached_tokens == num_cached  # nothing of the other layout, then that of the first engine
        close(other)


def test_the_example_of_the_documentation(
    text_model: Path, tmp_path: Path, no_connector: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a name that is registered, beside another connector."""
    module = ModuleType("prompt_store")
    (source,) = re.findall(r"<!-- example: vllm_connector -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, "prompt_store", module)
    monkeypatch.setattr(registry, "_REGISTERED", {})
    KVConnectorFactory.register_connector("Prompts", "prompt_store", "PromptStore")
    with pytest.raises(ValueError, match="'Prompts' is registered already"):
        KVConnectorFactory.register_connector("Prompts", "prompt_store", "PromptStore")
    assert KVConnectorFactory.get_connector_class_by_name("Prompts") is module.PromptStore
    parts = [example(tmp_path, "EitherExample"), connector("Prompts")]
    several = connector("MultiConnector", connectors=parts)
    for config, num_loaded in ((connector("Prompts"), 0), (several, 4)):
        engine = start(text_model, config, **ROOMY)
        assert (engine.runner_name, engine.plan.kv_layout) == ("v1", TOKEN_MAJOR_NHD)
        assert tokens_of(run_requests(engine, REQUESTS)) == no_connector
        engine.reset_prefix_cache(reset_connector=True)  # it has no `reset_cache`
        assert tokens_of(run_requests(engine, REQUESTS)) == no_connector
        assert close(engine).loads_done == num_loaded
    assert len(module.STORE) == 4


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_files_that_cannot_be_loaded(text_model: Path, tmp_path: Path, policy: str, no_connector: Tokens) -> None:
    config = {**example(tmp_path), "kv_load_failure_policy": policy}
    one = start(text_model, config, **ROOMY)
    run_requests(one, REQUESTS)
    close(one)
    for path in saved_files(tmp_path):
        path.write_bytes(path.read_bytes()[:-8])
    other = start(text_model, config, **ROOMY)
    for name, output in run_requests(other, REQUESTS).items():
        if policy == "recompute" or name == "tiny":
            assert output.outputs[0].token_ids == no_connector[name]
        else:
            assert output.outputs[0].finish_reason == "error"
            assert "ExampleConnector could not load the blocks" in str(output.outputs[0].stop_reason)
    assert close(other).loads_failed == 4
    third = start(text_model, config, **ROOMY)  # invalid files are gone, and with `recompute` written again
    assert tokens_of(run_requests(third, REQUESTS)) == no_connector
    stats = close(third)
    assert (stats.loads_done, stats.loads_failed) == (4 if policy == "recompute" else 0, 0)


def test_asynchronous_loads(text_model: Path, tmp_path: Path, no_connector: Tokens) -> None:
    """They delay no other request, may be aborted, and may fail."""
    faults = Faults()
    config = example(tmp_path, "FaultyExample", faults=faults, asynchronous=True)
    engine = start(text_model, config, **ROOMY, enable_prefix_caching=False)
    assert tokens_of(run_requests(engine, REQUESTS)) == no_connector
    faults.loads = "hold"
    for name in ("alone", "long"):
        engine.add_request(name, *REQUESTS[name])
    engine.add_request("new", prompt_of(30, VOCAB, seed=99), PARAMS["alone"])
    finished = []
    for step in range(60):
        finished += [output.request_id for output in engine.step() if output.finished]
        engine.check_integrity()
        if step == 20:
            engine.abort_request(["long"])
    assert finished == ["new", "long"] and engine.stats().transfers.num_loading == 1
    faults.released.set()
    assert drain(engine)[-1].outputs[0].token_ids == no_connector["alone"]
    faults.loads = "fail"
    assert tokens_of(run_requests(engine, REQUESTS)) == no_connector
    stats = close(engine)
    assert (stats.loads_done, stats.loads_failed) == (1, 4)


@pytest.mark.parametrize("overlapped", [False, True])
def test_the_steps_that_a_connector_sees_fit_together(
    text_model: Path, tmp_path: Path, no_connector: Tokens, overlapped: bool
) -> None:
    """With loads and preemption: each request is new once, begins again after it was preempted, and has blocks for its
    tokens, which no step leaves out."""
    steps: list[Any] = []
    config = example(tmp_path, "RecordingExample", steps=steps)
    settings = {"num_gpu_blocks_override": 16, "enable_prefix_caching": False, "async_scheduling": overlapped}
    engine = start(text_model, config, **settings)
    for _ in range(2):
        num_steps = len(steps)
        assert tokens_of(run_requests(engine, REQUESTS)) == no_connector
    assert engine.stats().scheduler.num_preemptions > 0 and close(engine).loads_done >= 4
    known: dict[str, tuple[int, list[int]]] = {}  # request -> computed tokens, blocks
    seen, preempted, loaded = set[str](), set[str](), set[str]()
    for step in steps[num_steps:]:
        cached, scheduled = step.scheduled_cached_reqs, step.num_scheduled_tokens
        preempted |= step.preempted_req_ids
        begun = {new.req_id: (new.num_computed_tokens, new.block_ids[0]) for new in step.scheduled_new_reqs}
        assert not seen & begun.keys()
        seen |= begun.keys()
        for i, name in enumerate(cached.req_ids):
            computed, blocks = cached.num_computed_tokens[i], (cached.new_block_ids[i] or [[]])[0]
            if name in cached.resumed_req_ids:
                preempted.remove(name)
                begun[name] = computed, blocks
                assert cached.all_token_ids[name][: len(REQUESTS[name][0])] == REQUESTS[name][0]
            else:
                assert computed == known[name][0]
                known[name] = computed, known[name][1] + blocks
        known |= begun
        loaded |= {name for name, count in scheduled.items() if count == 0 and known[name][0] > 0}
        assert sum(scheduled.values()) == step.total_num_scheduled_tokens
        assert scheduled.keys() == {*cached.req_ids, *begun} and not scheduled.keys() & preempted
        for name, count in scheduled.items():
            known[name] = known[name][0] + count, known[name][1]
            assert known[name][0] <= len(known[name][1]) * engine.plan.config.block_size
        for name in step.finished_req_ids & known.keys():
            assert known.pop(name)[0] >= len(REQUESTS[name][0])
    assert seen == REQUESTS.keys() and loaded == REQUESTS.keys() - {"tiny"}


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks(
    text_model: Path, tmp_path: Path, no_connector: Tokens, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    """In processes of their own, which know a registered name by its class. Each rank has its files; one of them is
    removed."""
    monkeypatch.setattr(registry, "_REGISTERED", {})
    KVConnectorFactory.register_connector("Registered", "fleetfoot.kv_transfer.example", "ExampleConnector")
    config = {**connector("MultiConnector", connectors=[{**example(tmp_path), "kv_connector": "Registered"}])}
    engine = start(text_model, config, **ROOMY, **sizes)
    assert tokens_of(run_requests(engine, REQUESTS)) == no_connector
    files = saved_files(tmp_path)
    assert len(files) == 8 and len({path.name for path in files}) == 2
    first, second = (load_file(path) for path in files[:2])
    assert (first.keys() == second.keys()) == ("tensor_parallel_size" in sizes)
    files[0].write_bytes(b"")
    engine.reset_prefix_cache()
    assert tokens_of(run_requests(engine, REQUESTS)) == no_connector
    stats = close(engine)
    assert (stats.loads_done, stats.loads_failed) == (3, 1)


@pytest.mark.parametrize("point", vllm_connector.POINTS)
def test_an_error_at_any_point_ends_the_engine(text_model: Path, tmp_path: Path, point: str) -> None:
    faults = Faults(raise_at=point, on_call=1 if point == "update_connector_output" else 2)
    config = example(tmp_path, "FaultyExample", faults=faults)
    engine = start(text_model, config, enable_prefix_caching=False)
    with pytest.raises(EngineDeadError, match=f"injected at {point}") as caught:
        for _ in range(2):
            run_requests(engine, {name: REQUESTS[name] for name in ("alone", "long")})
    assert isinstance(caught.value.__cause__, InjectedError)
    num_bound, num_cleared = (faults.calls.count(f"{verb}_connector_metadata") for verb in ("bind", "clear"))
    assert num_bound == num_cleared
    engine.shutdown()


def test_what_the_methods_get(text_model: Path) -> None:
    """The attributes are vLLM's: of the settings, of each step in the life of requests, and of its KV."""
    records: list[tuple[str, Any]] = []
    released = threading.Event()
    config = connector("Recorder", HELPERS, records=records, released=released)
    engine = start(text_model, config)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, extra_args={"kv_transfer_params": {"a": 1}})
    prompt = prompt_of(40, VOCAB, seed=6)
    outputs = run_requests(engine, {"r": (prompt, params)})
    assert outputs["r"].kv_transfer_params == {"seen": {"a": 1}}
    assert engine.has_transfers()  # its blocks are held
    released.set()
    close(engine)
    (worker, worker_cache), (scheduler, scheduler_cache) = (dict(records)[role] for role in ("WORKER", "SCHEDULER"))
    for settings in (worker, scheduler):
        assert settings.cache_config.block_size == 4 and settings.parallel_config.world_size == 1
        assert settings.model_config.dtype is torch.float32 and settings.model_config.get_head_size() == 16
        assert settings.model_config.get_num_layers(settings.parallel_config) == 2
        assert settings.kv_transfer_config.engine_id == engine.plan.engine_id and len(settings.compute_hash()) == 32
        with pytest.raises(AttributeError, match="Facts has no 'swap_space' here; it has block_size"):
            _ = settings.cache_config.swap_space
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(2)]
    assert worker_cache.kv_cache_groups[0].layer_names == scheduler_cache.kv_cache_groups[0].layer_names == names
    assert dict(records)["kv_caches"] == dict.fromkeys(names, (2, 24, 4, 2, 16))

    steps = [step for name, step in records if name == "step"]
    (first,) = steps[0].scheduled_new_reqs
    assert (first.req_id, first.prompt_token_ids, first.num_computed_tokens) == ("r", prompt, 0)
    (block_ids,) = first.block_ids
    assert len(block_ids) == 10 and steps[0].num_scheduled_tokens == {"r": 32}
    running = [step.scheduled_cached_reqs for step in steps[1:4]]
    assert [request.num_computed_tokens for request in running] == [[32], [40], [41]]
    assert [step.num_scheduled_tokens for step in steps[1:4]] == [{"r": 8}, {"r": 1}, {"r": 1}]
    no_blocks, (((appended,),),), _ = [request.new_block_ids for request in running]
    assert no_blocks == [None]
    block_ids = [*block_ids, appended]
    assert any(step.finished_req_ids == {"r"} for step in steps)
    slots = [slots for name, slots in records if name == "slots"]
    positions = [range(32), range(32, 40), range(40, 41), range(41, 42)]
    assert slots[:4] == [[block_ids[i // 4] * 4 + i % 4 for i in step] for step in positions]
    ((_, status, tokens, held),) = [value for name, value in records if name == "finished"]
    assert (status, tokens, held) == ("FINISHED_LENGTH_CAPPED", prompt + outputs["r"].outputs[0].token_ids, block_ids)
    name, blocks, num_external = dict(records)["allocated"]
    assert (name, blocks.get_block_ids(), num_external) == ("r", (block_ids[:10],), 0)

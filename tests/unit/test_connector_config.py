"""From settings to connectors: the class, its settings and role, and the fingerprint of the engine."""

import dataclasses
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from tests.helpers.specs import changed, ropes_of

from fleetfoot.assets import embedded_model_path
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.config.model import RopeConfig
from fleetfoot.engine.building import make_connectors
from fleetfoot.executor.worker import make_connector as worker_connector
from fleetfoot.kv_transfer.base import registry
from fleetfoot.kv_transfer.base.registry import connector_layouts, find_connector, part_configs
from fleetfoot.kv_transfer.blockstore import connector
from fleetfoot.kv_transfer.blockstore.connector import SharedStorageConnector
from fleetfoot.kv_transfer.example import ExampleConnector
from fleetfoot.kv_transfer.multi import MultiScheduler
from fleetfoot.kv_transfer.vllm.adapter import VllmScheduler
from fleetfoot.kv_transfer.vllm.base import KVConnectorBase_V1
from fleetfoot.plan.connector import resolve_connector
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.plan import EnginePlan, engine_fingerprint, transfer_context
from fleetfoot.plan.resolve import resolve_plan
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.weights import WeightError
from fleetfoot.runner.capabilities import KV_LAYOUTS
from fleetfoot.runner.step_connector import StepConnector
from fleetfoot.weights.identity import FileState, WeightsIdentity, hash_file

GIB = 1 << 30
CPU = Machine(16 * GIB)
SHARED = {"kv_connector": "SharedStorageConnector", "kv_role": "kv_both"}
OFFLOAD = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"num_cpu_blocks": 3}}


class NotAConnector:
    """A class that exists but is not a connector."""


def plan_of(**settings: Any) -> EnginePlan:
    return resolve_plan(EngineConfig(**{"device": "cpu", **settings}), CPU, environ={})


def active_config(**settings: Any) -> KVTransferConfig:
    connector = resolve_connector(EngineConfig(**settings))
    assert connector is not None
    return connector.config


def layout_of(plan: EnginePlan) -> KVLayout:
    return KVLayout.of(plan.model, 8, plan.config.block_size, plan.dtype)


@pytest.mark.parametrize("name", [name for name in registry.CONNECTORS if name != "ExampleConnector"])
def test_connectors_accept_the_layout_of_v2(name: str) -> None:
    assert find_connector(KVTransferConfig(name, "kv_both")).accepted_kv_layouts == set(KV_LAYOUTS["v2"])


def test_connector_of_another_module() -> None:
    config = KVTransferConfig("SharedStorageConnector", "kv_both", "fleetfoot.kv_transfer.blockstore.connector")
    assert find_connector(config) is SharedStorageConnector
    assert connector_layouts(config, EngineConfig()).accepted == SharedStorageConnector.accepted_kv_layouts


@pytest.mark.parametrize(
    ("name", "module_path", "message"),
    [
        ("SharedStorage", None, "is not known; did you mean 'SharedStorageConnector'"),
        ("Mine", None, "give its module as kv_connector_module_path"),
        ("Mine", "no.such.module", "kv_connector 'Mine' cannot be imported from no.such.module"),
        ("Mine", __name__, f"the module {__name__} has nothing of that name"),
        ("NotAConnector", __name__, "is no connector; it must be a class derived from"),
        ("plan_of", __name__, "is no connector; it must be a class derived from"),
    ],
)
def test_invalid_names(name: str, module_path: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_connector(KVTransferConfig(name, "kv_both", module_path))


class Unfinished(KVConnectorBase_V1): ...


class Handshakes(ExampleConnector):
    def get_handshake_metadata(self) -> None: ...


@pytest.mark.parametrize(
    ("name", "path", "extra", "message"),
    [
        ("ExampleConnector", None, {}, "shared_storage_path is None; it must be a folder"),
        (
            "ExampleConnector",
            None,
            {"shared_storage_path": "kv", "paht": 1},
            "ExampleConnector has paht; it has shared",
        ),
        ("Unfinished", __name__, {}, "the KV connector Unfinished has no build_connector_meta, get_num_new_matched_"),
        ("Handshakes", __name__, {}, "Handshakes has get_handshake_metadata, which is not called here: workers"),
    ],
)
def test_refused_connectors_of_vllm(name: str, path: str | None, extra: dict[str, Any], message: str) -> None:
    config = KVTransferConfig(name, "kv_both", path, extra)
    with pytest.raises((ValueError, TypeError), match=message):
        plan_of(kv_transfer_config=config)


class Matches(Unfinished):
    """Matches ``answer``, and records what is allocated."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.allocated = blocks.get_block_ids()[0], blocks.get_unhashed_block_ids(), num_external_tokens

    answer: tuple[int | None, bool] = 0, False


@pytest.mark.parametrize(
    ("answer", "num_usable", "allocated"),
    [
        ((8, False), 8, ([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 8)),
        ((11, False), 8, ([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 11)),
        ((9, True), 8, ([0, 1, 2, 3], [1, 2, 3], 9)),  # the others follow when they are loaded
        ((18, True), 16, ([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 18)),  # all tokens
        ((3, True), 0, None),
        ((0, False), 0, None),
        ((-4, False), 0, None),
        ((None, False), None, None),
    ],
)
def test_numbers_of_tokens_of_a_connector_of_vllm(answer: Any, num_usable: int | None, allocated: Any) -> None:
    """Of a prompt of 22 tokens in blocks of 4, of which 4 are in the prefix cache."""
    Matches.__abstractmethods__ = frozenset()  # the other methods are not called
    context = transfer_context(plan_of(kv_transfer_config=KVTransferConfig("Matches", "kv_both", __name__)))
    scheduler = find_connector(context.config).scheduler_side(context)
    assert isinstance(scheduler, VllmScheduler)
    matches: Any = scheduler.connector
    scheduler.block_size, matches.answer = 4, answer
    request = Request("r", list(range(22)), SamplingParams(), max_tokens=1, seed=0)
    scheduler.check_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 4) == num_usable
    assert scheduler.has_pending == (num_usable is None)
    if num_usable:
        request.block_ids = [0, 1, 2, 3, 4, 5]
        scheduler.update_state_after_alloc(request, 4, num_usable)
        assert matches.allocated == allocated
    scheduler.request_finished(request)
    assert not scheduler.has_pending


def test_fields_that_connectors_of_vllm_do_not_use(caplog: pytest.LogCaptureFixture) -> None:
    extra = {"shared_storage_path": "kv"}
    plan_of(
        kv_transfer_config=KVTransferConfig("ExampleConnector", "kv_both", None, extra, None, 1, kv_transfer_timeout=5)
    )
    expected = [
        f"kv_transfer_config: {name} has no meaning for ExampleConnector" for name in ("kv_transfer_timeout", "kv_rank")
    ]
    assert caplog.messages == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_load_failure_policy": "ignore"}, "kv_load_failure_policy is 'ignore'; it can be recompute, fail"),
        ({"kv_transfer_timeout": 0}, "kv_transfer_timeout is 0; it must be a number of seconds above 0"),
        ({"kv_transfer_timeout": "soon"}, "kv_transfer_timeout is 'soon'"),
        ({"kv_transfer_timeout": True}, "kv_transfer_timeout is True"),
        ({"kv_transfer_timeout": float("inf")}, "kv_transfer_timeout is inf"),
    ],
)
def test_invalid_transfer_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVTransferConfig.parse({**SHARED, **settings})


def test_offloading_implies_its_connector() -> None:
    plan = plan_of(kv_offloading_size=0.25)
    assert plan.connector is not None
    config = plan.connector.config
    assert (config.kv_connector, config.kv_role) == ("OffloadingConnector", "kv_both")
    scheduler = make_connectors(plan)[0]
    assert isinstance(scheduler, connector.BlockStoreScheduler) and isinstance(scheduler.index, connector.HostIndex)
    assert scheduler.index.pools.num_blocks == GIB // 4 // layout_of(plan).bytes_per_block
    assert type(worker_connector(plan, 0)) is StepConnector


def test_size_of_host_memory_is_given_once() -> None:
    named = {"kv_connector": "OffloadingConnector", "kv_role": "kv_producer", "kv_load_failure_policy": "fail"}
    config = active_config(kv_offloading_size=1, kv_transfer_config=named)
    assert config.kv_connector_extra_config == {"cpu_bytes_to_use": GIB}
    assert (config.kv_role, config.kv_load_failure_policy) == ("kv_producer", "fail")
    named["kv_connector_extra_config"] = {"num_cpu_blocks": 5}
    with pytest.raises(ValueError, match="kv_offloading_size is 1, and kv_transfer_config has settings"):
        active_config(kv_offloading_size=1, kv_transfer_config=named)


@pytest.mark.parametrize("depth", [1, 2])
def test_one_offloading_connector_only(depth: int) -> None:
    transfer: dict[str, Any] = OFFLOAD
    for _ in range(depth):
        extra = {"connectors": [SHARED, transfer]}
        transfer = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    message = "kv_offloading_size is 1, and kv_transfer_config has OffloadingConnector among"
    with pytest.raises(ValueError, match=message):
        active_config(kv_offloading_size=1, kv_transfer_config=transfer)
    assert active_config(kv_transfer_config=transfer).kv_connector == "MultiConnector"


def test_offloading_beside_another_connector(tmp_path: Path) -> None:
    extra = {"shared_storage_path": str(tmp_path)}
    fields = {"engine_id": "me", "kv_transfer_timeout": 7, "kv_load_failure_policy": "fail"}
    transfer = {**SHARED, **fields, "kv_role": "kv_consumer", "kv_connector_extra_config": extra}
    plan = plan_of(kv_offloading_size=0.01, kv_transfer_config=transfer)
    assert plan.connector is not None
    config = plan.connector.config
    assert config.kv_connector == "MultiConnector"
    offload, shared = part_configs(config)
    assert (offload.kv_connector, offload.kv_role) == ("OffloadingConnector", "kv_both")
    assert shared == plan.config.kv_transfer_config
    for part in (config, offload, shared):
        assert (part.engine_id, part.kv_transfer_timeout, part.kv_load_failure_policy) == ("me", 7, "fail")
    assert isinstance(make_connectors(plan)[0], MultiScheduler)
    worker_connector(plan, 0).shutdown()


def multi(*parts: Any, role: str | None = "kv_both", **settings: Any) -> KVTransferConfig:
    extra = {"connectors": list(parts)}
    return KVTransferConfig(kv_connector="MultiConnector", kv_role=role, kv_connector_extra_config=extra, **settings)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (multi(), "needs kv_connector_extra_config"),
        (multi(SHARED, role="kv_consumer"), "connector 0 of MultiConnector has kv_role 'kv_both', and the whole has"),
        (multi(OFFLOAD, {"kv_role": "kv_both"}), "connector 1 of MultiConnector has no kv_connector"),
        (multi({**SHARED, "kv_load_failure_policy": "fail"}), "the policy is one for all"),
        (multi({**SHARED, "kv_roll": 1}), "unknown keyword 'kv_roll'"),
        (multi(*[{"kv_connector": "NixlConnector"}] * 2), "has NixlConnector twice; configure it once"),
        (multi(5), "connector 0 of MultiConnector is 5; it must be an object"),
        (multi("OffloadingConnector"), "connector 0 of MultiConnector is 'OffloadingConnector'; it must be an object"),
        (
            dataclasses.replace(multi(), kv_connector_extra_config={"connectors": [SHARED], "path": 1}),
            "accepts 'connectors' only, and kv_connector_extra_config also has path",
        ),
    ],
)
def test_invalid_parts(config: KVTransferConfig, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        part_configs(config)


def test_joined_connectors_keep_unused_fields_once() -> None:
    config = registry.joined(KVTransferConfig.parse(OFFLOAD), KVTransferConfig.parse({**SHARED, "kv_port": 5}))
    assert config.kv_port is None and [part.kv_port for part in part_configs(config)] == [None, 5]


def test_equal_engines_have_equal_fingerprints() -> None:
    assert engine_fingerprint(plan_of()) == engine_fingerprint(plan_of(max_num_seqs=3, model_runner="v1", seed=9))
    assert len(engine_fingerprint(plan_of())) == 32


def test_settings_in_the_fingerprint() -> None:
    dummy: dict[str, Any] = {"load_format": "dummy"}
    different = [{}, {"block_size": 32}, {"dtype": "float16"}, dummy, {**dummy, "seed": 1}]
    assert len({engine_fingerprint(plan_of(**settings)) for settings in different}) == len(different)


def test_model_fields_in_the_fingerprint() -> None:
    plan = plan_of()
    model, mixer = plan.model, plan.model.layers[0].mixer
    changes: list[dict[str, Any]] = [
        {"architecture": "Other"},
        {"num_layers": model.num_layers + 1},
        {"num_kv_heads": mixer.num_kv_heads + 1},
        {"head_dim": mixer.head_dim + 1},
        {"rms_norm_eps": 1.0},
        {"layer_windows": (8,) * model.num_layers},
        {"qk_norm": not mixer.qk_norm},
        {"layer_ropes": (*ropes_of(model)[1:], RopeConfig(theta=3.0))},
        {"layer_ropes": (*ropes_of(model)[1:], None)},
    ]
    plans = [dataclasses.replace(plan, model=changed(model, **change)) for change in ({}, *changes)]
    assert len({engine_fingerprint(plan) for plan in plans}) == len(plans)


@pytest.fixture
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fleetfoot" / "weights"


def later() -> int:
    """A clock on which all files are old."""
    return time.time_ns() + 10**10


def test_hashes_of_files_are_kept(tmp_path: Path, user_cache: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"content")
    state, digest = hash_file(file)
    assert digest == blake3(b"content").hexdigest() and not user_cache.exists()  # it may change with the same times
    assert hash_file(file, clock=later) == (state, digest)
    (kept,) = user_cache.iterdir()
    kept.write_text(kept.read_text().replace(digest, "0" * 64))
    assert hash_file(file, clock=later) == (state, "0" * 64)
    for damaged in ("", "1 2 3", "\0" * 9):
        kept.write_text(damaged)
        assert hash_file(file, clock=later) == (state, digest)
    file.write_bytes(b"CONTENT")
    os.utime(file, ns=(0, state.mtime_ns))
    assert hash_file(file, clock=later)[1] == blake3(b"CONTENT").hexdigest()
    assert [path.name for path in user_cache.iterdir()] == [kept.name]  # one for a file


def test_a_cache_that_cannot_be_written(tmp_path: Path, user_cache: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    file = tmp_path / "a"
    file.write_bytes(b"content")
    assert hash_file(file, clock=later)[1] == blake3(b"content").hexdigest()


def test_a_file_that_changes_while_it_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"content")
    states, original = [], FileState.of

    def replaced(path: Path) -> FileState:
        states.append(original(path))
        return dataclasses.replace(states[0], inode=len(states))

    monkeypatch.setattr(FileState, "of", replaced)
    with pytest.raises(WeightError, match=f"{file} was replaced or changed while it was loaded"):
        hash_file(file)


def test_an_identity_that_was_pickled_is_computed_again() -> None:
    identity = WeightsIdentity([embedded_model_path()], drawn="x")
    identity.start()
    copy = pickle.loads(pickle.dumps(identity))
    assert copy.value() == identity.value() != WeightsIdentity([embedded_model_path()]).value()
    with pytest.raises(WeightError, match=r"no \*.safetensors in"):
        identity.with_folder(Path("/nowhere")).value()

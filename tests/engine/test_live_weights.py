"""Weights that change in a running engine, against an engine that starts with them: tokens, checksums, versions."""

import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.distributed.ranks import pids_of
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import drain, make_engine, prompt_of, run_requests
from tests.helpers.prefill_decode import settle
from tests.helpers.processes import HANG

from fleetfoot import EngineDeadError, RequestOutput, SamplingParams
from fleetfoot.engine import kept_weights
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.records.weights import WeightError
from fleetfoot.runner.v1.runner import ModelRunnerV1
from fleetfoot.weights import store as weight_store
from fleetfoot.weights.checksums import tensor_checksum
from fleetfoot.weights.patches import SparseWeightPatch
from fleetfoot.weights.store import WeightStore
from fleetfoot.weights.transfer import (
    GlooWeightTransferEngine,
    NCCLTrainerSendWeightsArgs,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
    update_info_of,
)

Tensors = dict[str, torch.Tensor]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "merged": ("phi3", {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
}
"""Also: one KV head that two ranks share, packed matrices, and merged projections with rows in another order."""
TP, PP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{runner} {model}": (model, {"model_runner": runner}) for model in MODELS for runner in ("v1", "v2")},
    "v2 tensor parallel, merged": ("merged", {**TP, "model_runner": "v2"}),
    "v1 pipeline, tied": ("tied", {**PP, "model_runner": "v1"}),
    "v2 pipeline": ("untied", {**PP, "model_runner": "v2", "async_scheduling": True}),
}
SIZE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "block_size": 4,
    "max_model_len": 64,
    "num_gpu_blocks_override": 64,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [prompt_of(length, 101, seed=length) for length in (21, 9)]


def tokens(engine: LLMEngine) -> list[list[int]]:
    """Twice, so that the second run hits what the first has cached."""
    for _ in range(2):
        outputs = run_requests(engine, {str(index): (prompt, GREEDY) for index, prompt in enumerate(PROMPTS)})
    assert outputs["0"].num_cached_tokens == 20
    return [outputs[str(index)].outputs[0].token_ids for index in range(len(PROMPTS))]


def patched(tensors: Tensors) -> tuple[list[dict[str, Any]], Tensors]:
    """Patches of a tenth of all elements, the outermost ones included, and the tensors that they make."""
    patches, after = [], {}
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        chosen = torch.randperm(tensor.numel(), generator=generator)[: tensor.numel() // 10]
        indices = torch.cat((chosen, torch.tensor([0, tensor.numel() - 1]))).unique()
        values = torch.randn(len(indices), generator=generator) * 0.2
        after[name] = tensor.flatten().index_copy(0, indices, values).view_as(tensor)
        patches.append({"name": name, "indices": indices, "values": values, "shape": tuple(tensor.shape)})
    return patches, after


class Versions:
    """Three checkpoints of a model, and the tokens of engines that start with them; ``patches`` lead to the last."""

    def __init__(self, folder: Path, name: str) -> None:
        kind, config = MODELS[name]
        self.folders = [folder / f"{name}-{version}" for version in range(3)]
        for seed in (0, 1):
            make_checkpoint(self.folders[seed], kind, seed=seed, **config)
        shutil.copytree(self.folders[1], self.folders[2])
        self.tensors = [load_file(path / "model.safetensors") for path in self.folders[:2]]
        self.patches, after = patched(self.tensors[1])
        self.tensors.append(after)
        save_file(after, self.folders[2] / "model.safetensors", metadata={"format": "pt"})
        self.engines = [make_engine(path, model_runner="v1", **SIZE) for path in self.folders]
        self.tokens = [tokens(engine) for engine in self.engines]
        assert self.tokens[0] != self.tokens[1] != self.tokens[2]

    def greedy(self, version: int, prompt: list[int], count: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        return run_requests(self.engines[version], {"r": (prompt, params)})["r"].outputs[0].token_ids

    def checksums(self, version: int) -> dict[str, str]:
        return {name: tensor_checksum(tensor) for name, tensor in self.tensors[version].items()}


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Versions]]:
    folder = tmp_path_factory.mktemp("versions")
    made: dict[str, Versions] = {}

    def get(name: str) -> Versions:
        if name not in made:
            made[name] = Versions(folder, name)
        return made[name]

    yield get
    for known in made.values():
        for engine in known.engines:
            engine.shutdown()


@pytest.mark.parametrize("case", CASES)
def test_an_engine_with_new_weights_is_one_that_starts_with_them(case: str, versions: Any) -> None:
    model, settings = CASES[case]
    engine = make_engine(versions(model).folders[0], **SIZE, **settings)
    try:
        check_updates(engine, versions(model))
    finally:
        engine.shutdown()


def check_updates(engine: LLMEngine, known: Versions) -> None:
    """From the first checkpoint to the second, to the third, and back; then an update that does not fit."""
    assert tokens(engine) == known.tokens[0]
    assert engine.weight_checksums() == known.checksums(0)
    for update, version in (
        (partial(engine.reload_weights, known.folders[1]), 1),
        (partial(engine.apply_sparse_weight_patches, known.patches), 2),
        (partial(engine.reload_weights, iter(known.tensors[0].items())), 0),
    ):
        assert update() == engine.weight_version
        assert tokens(engine) == known.tokens[version]
        assert engine.weight_checksums() == known.checksums(version)
    wrong = [*known.patches[:-1], known.patches[-1] | {"indices": [10**6], "values": [0.0], "shape": None}]
    with pytest.raises(WeightError, match="index 1000000 is out of range"):
        engine.apply_sparse_weight_patches(wrong)
    assert engine.weight_checksums() == known.checksums(0) and engine.weight_version == 3
    engine.check_integrity()


@pytest.fixture(scope="module")
def two_ranks(versions: Any) -> Iterator[LLMEngine]:
    """V1 with the first checkpoint of "untied", which every test of it restores."""
    engine = make_engine(versions("untied").folders[0], model_runner="v1", **TP, **SIZE)
    yield engine
    engine.shutdown()


def test_tensor_ranks_on_v1(two_ranks: LLMEngine, versions: Any) -> None:
    check_updates(two_ranks, versions("untied"))


def failing_on_the_last(worker: Any) -> int:
    if worker.rank:
        raise LookupError(f"on rank {worker.rank}")
    return worker.rank


def test_calls_of_workers_in_other_processes(two_ranks: LLMEngine) -> None:
    assert [parts["ranks"]["tensor"] for parts in two_ranks.collective_rpc("parts")] == [2, 2]
    with pytest.raises(LookupError, match="on rank 1") as caught:
        two_ranks.collective_rpc(failing_on_the_last)
    assert "failing_on_the_last" in str(caught.value.__cause__)
    with pytest.raises(ValueError, match="method is 'nothing', which a worker does not have"):
        two_ranks.collective_rpc("nothing")
    with pytest.raises(ValueError, match="cannot be sent to the workers, which run in other processes"):
        two_ranks.collective_rpc(lambda worker: 1)
    assert len(two_ranks.collective_rpc("parts", None, ())) == 2 and tokens(two_ranks)


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(versions: Any) -> Iterator[LLMEngine]:
    engine = make_engine(versions("tied").folders[0], model_runner="v2", **SIZE)
    yield engine
    engine.shutdown()


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
ONES = torch.ones(48)


def patch(**fields: Any) -> list[dict[str, Any]]:
    """A good patch, and one with other fields."""
    good = {"name": EMBEDDING, "indices": [3], "values": [9.0]}
    return [good, {"name": NORM, "indices": [1, 2], "values": [1.0, 2.0], **fields}]


BAD_PATCHES: dict[str, tuple[Any, str]] = {
    "name": (patch(name="model.nrom.weight"), "model.nrom.weight is unknown: the model has no such tensor"),
    "index": (patch(indices=[1, 48]), f"{NORM}: index 48 is out of range; the tensor has 48 elements"),
    "negative": (patch(indices=[-1, 2]), f"{NORM}: index -1 is out of range"),
    "twice": (patch(indices=[2, 2]), f"{NORM}: index 2 occurs more than once"),
    "shape": (patch(shape=(2, 24)), rf"{NORM} has shape \[48\], and the patch is of \[2, 24\]"),
    "lengths": (patch(values=[1.0]), r"patches\[1\] \(model.norm.weight\): indices have shape \[2\] and values \[1\]"),
    "float indices": (patch(indices=[1.0, 2.0]), r"patches\[1\].*indices have dtype torch.float32, expected integers"),
    "integers": (patch(values=[1, 2]), f"{NORM} has values of dtype torch.int64, expected float"),
    "nan": (patch(values=[1.0, float("nan")]), f"{NORM} has the value nan; check_finite refuses that"),
    "too large": (
        patch(values=torch.tensor([1.0, 1e300], dtype=torch.float64)),
        rf"{NORM} has the value 1e\+300, which is infinite in float32",
    ),
    "field": ([{"name": NORM, "indices": []}], r"patches\[0\] has no values; a patch has name, indices, values, shape"),
    "unknown field": (patch(index=1), r"patches\[1\] got an unknown keyword 'index'; did you mean 'indices'"),
    "no list": ({"name": NORM}, "patches is a dict; it must be a list of patches"),
}


def one_buffer() -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the same memory with other values."""
    buffer = torch.ones(48)
    yield NORM, buffer
    yield "model.layers.0.input_layernorm.weight", buffer.add_(1)


BAD_WEIGHTS: dict[str, tuple[Any, str]] = {
    "name": ([("norm", ONES), (NORM, 2 * ONES)], "norm is unknown"),
    "shape": ({NORM: torch.ones(47)}, rf"{NORM} has shape \[47\], expected \[48\]"),
    "integers": ({NORM: torch.ones(48, dtype=torch.int8)}, f"{NORM} has values of dtype integer, expected float"),
    "float8": ({NORM: ONES.to(torch.float8_e4m3fn)}, "has values of dtype fp8, expected float"),
    "nan": ({NORM: ONES * float("inf")}, f"{NORM} has the value inf; check_finite refuses that"),
    "too large": ({NORM: ONES.double() * -1e300}, rf"{NORM} has the value -1e\+300, which is infinite in float32"),
    "twice": ([(NORM, ONES), ("norm.weight", 2 * ONES)], "norm.weight differs from another tensor of the update"),
    "none": ([], "weights has no tensors"),
    "no pairs": (["abc"], "weights has 'abc'; it must be a folder, or pairs of a name and a tensor"),
    "a buffer": (one_buffer(), f"{NORM} was overwritten before all had been read"),
    "folder": ("/nowhere/at/all", "no such folder"),
}


@pytest.mark.parametrize("bad", [*(("patch", name) for name in BAD_PATCHES), *(("load", name) for name in BAD_WEIGHTS)])
def test_an_update_that_does_not_fit_changes_nothing(bad: tuple[str, str], engine: LLMEngine) -> None:
    before, version = engine.weight_checksums(), engine.weight_version
    is_patch = bad[0] == "patch"
    given, message = (BAD_PATCHES if is_patch else BAD_WEIGHTS)[bad[1]]
    update = engine.apply_sparse_weight_patches if is_patch else engine.reload_weights
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
        update(given, check_finite=True)
    assert engine.weight_checksums() == before and engine.weight_version == version


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_check_finite_looks_at_what_will_be_stored(runner: str, versions: Any, tmp_path: Path) -> None:
    """70000 fits into float32, and is infinite in float16; in a packed matrix, too."""
    known = versions("untied")
    name = "model.layers.1.mlp.down_proj.weight"
    large = known.tensors[0][name].clone()
    large[2, 3] = 70000.0
    save_file({**known.tensors[0], name: large}, tmp_path / "model.safetensors")
    patch = {"name": name, "indices": [2 * large.shape[1] + 3], "values": [70000.0]}
    engine = make_engine(known.folders[0], model_runner=runner, dtype="float16", **SIZE)
    before = engine.weight_checksums()
    for update in (
        partial(engine.apply_sparse_weight_patches, [patch]),
        partial(engine.reload_weights, {name: large}),
        partial(engine.reload_weights, tmp_path),
    ):
        with pytest.raises(WeightError, match=f"{name} has the value 70000.0, which is infinite in float16"):
            update(check_finite=True)
        assert (engine.weight_checksums(), engine.weight_version) == (before, 0)
    patch["values"] = [65504.0]
    assert engine.apply_sparse_weight_patches([patch], check_finite=True) == 1
    engine.shutdown()


def test_arguments_of_updates(engine: LLMEngine, versions: Any) -> None:
    known: Versions = versions("tied")
    version = engine.weight_version
    for wrong in (version, True, "5"):
        with pytest.raises(ValueError, match=r"weight_version is .*; it must be an integer above the current one"):
            engine.reload_weights(weight_version=wrong)
    with pytest.raises(ValueError, match="give weights once"):
        engine.reload_weights(known.folders[0], weights_path=known.folders[0])
    with pytest.raises(WeightError, match=r"names has nothing\.weight; the model has no such tensor"):
        engine.weight_checksums(["nothing.weight", NORM])
    # vLLM's way, with its keywords, and both names of a tied matrix
    assert engine.collective_rpc("reload_weights", kwargs={"weights_path": str(known.folders[1])}) == [version + 1]
    assert tokens(engine) == known.tokens[1]
    both = {"lm_head.weight": known.tensors[1][EMBEDDING], **known.tensors[1]}
    assert engine.reload_weights(weights_iterator=both.items(), weight_version=100) == 100
    assert engine.weight_checksums(["lm_head.weight"]) == {"lm_head.weight": known.checksums(1)[EMBEDDING]}
    assert tokens(engine) == known.tokens[1]


def test_no_patches_change_nothing(engine: LLMEngine) -> None:
    """Neither the version nor what is cached."""
    version, prompt = engine.weight_version, list(range(3, 3 + 32))
    for name in ("a", "b"):
        engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(max_tokens=1))
        (output,) = [output for output in drain(engine) if output.finished]
        assert engine.apply_sparse_weight_patches([]) == version
        assert engine.apply_sparse_weight_patches((), weight_version=version) == version
    assert output.num_cached_tokens > 0
    assert engine.weight_version == version
    with pytest.raises(ValueError, match=f"weight_version is {version + 1}, but patches is empty"):
        engine.apply_sparse_weight_patches([], weight_version=version + 1)


def test_settings_that_can_change(engine: LLMEngine, versions: Any) -> None:
    known: Versions = versions("tied")
    with pytest.raises(ValueError, match=r"^block_size, seed cannot change while the engine runs; what can: load_f"):
        engine.update_config({"block_size": 8, "seed": 1, "max_logprobs": 3})
    for name, value, message in (
        ("load_format", "gguf", "load_format is 'gguf'"),
        ("max_num_batched_tokens", 4, "max_num_batched_tokens"),
        ("max_num_batched_tokens", 10**6, "max_num_batched_tokens is 1000000; the engine was started for up to 2048"),
        ("model", "/nowhere", "no such folder"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            engine.update_config({"max_logprobs": 3, name: value})
    assert engine.input_processor.max_logprobs == 20
    engine.update_config({"load_config": {"load_format": "dummy"}, "max_num_batched_tokens": 16, "max_logprobs": 3})
    engine.reload_weights()
    assert tokens(engine) not in known.tokens and engine.core.scheduler.config.max_num_batched_tokens == 16
    override = {"temperature": 0.0, "max_new_tokens": 3}
    engine.collective_rpc("update_config", args=({"model": str(known.folders[2]), "load_format": "auto"},))
    engine.update_config({"override_generation_config": override})
    engine.reload_weights()
    assert tokens(engine) == known.tokens[2]
    assert engine.get_default_sampling_params().max_tokens == 3


# --- requests that run meanwhile --------------------------------------------------------------------------------------


def run_over_an_update(engine: LLMEngine, update: Callable[[], object]) -> list[RequestOutput]:
    """Two requests, of which one runs, and one more that comes after the update."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine.add_request("first", PROMPTS[0], params)
    for _ in range(5):
        engine.step()
    engine.add_request("second", PROMPTS[0], params)
    update()
    engine.add_request("third", PROMPTS[0], params)
    return sorted((output for output in drain(engine) if output.finished), key=lambda output: output.request_id)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("mode", ["drain", "wait", "keep", "abort"])
def test_running_requests(mode: str, overlaps: bool, versions: Any) -> None:
    known: Versions = versions("untied")
    runner = "v2" if overlaps == (mode in ("drain", "keep")) else "v1"
    engine = make_engine(known.folders[0], model_runner=runner, max_num_seqs=1, async_scheduling=overlaps, **SIZE)
    update = partial(engine.reload_weights, known.folders[1], mode=mode)
    first, second, third = (output.outputs[0] for output in run_over_an_update(engine, update))
    after, before = known.greedy(1, PROMPTS[0], 12), known.greedy(0, PROMPTS[0], 12)
    assert third.token_ids == after and (third.weight_version, third.weight_versions) == (1, None)
    if mode == "abort":
        assert (first.finish_reason, second.finish_reason) == ("abort", "abort")
        assert first.token_ids == before[: len(first.token_ids)] and first.weight_version == 0 and not second.token_ids
        return
    assert second.token_ids == after and second.weight_version == 1
    if mode == "drain":
        assert first.token_ids == before and (first.weight_version, first.weight_versions) == (0, None)
        return
    assert first.weight_version == 1 and first.weight_versions is not None
    count = first.weight_versions.count(0)
    assert 2 <= count < 12 and first.weight_versions == [0] * count + [1] * (12 - count)
    assert first.token_ids[:count] == before[:count]
    if mode == "wait":  # its KV is that of the new weights too
        assert first.token_ids[count:] == known.greedy(1, [*PROMPTS[0], *before[:count]], 12 - count)


def test_blocks_of_mixed_versions_are_never_cached(versions: Any) -> None:
    """A request that keeps KV of old weights ends; a prompt that goes on from its tokens finds none of its blocks."""
    known: Versions = versions("untied")
    engine = make_engine(known.folders[0], kv_offloading_size=0.01, **SIZE)
    update = partial(engine.apply_sparse_weight_patches, known.patches, mode="keep")
    engine.add_request("kept", PROMPTS[0], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    for _ in range(5):
        engine.step()
    assert engine.reload_weights(known.folders[1], mode="keep") == 1
    kept = [*PROMPTS[0], *drain(engine)[-1].outputs[0].token_ids]
    fresh, reused = (run_requests(each, {"r": (kept, GREEDY)})["r"] for each in (known.engines[1], engine))
    assert reused.num_cached_tokens == 0 and reused.outputs[0].token_ids == fresh.outputs[0].token_ids
    assert update() == 2


def change_first_eighths(source: Path, target: Path) -> None:
    """A copy in which the first eighth of every matrix differs: of the same size, and with the same times."""
    shutil.copytree(source, target)
    path = target / "model.safetensors"
    tensors = load_file(path)
    for tensor in tensors.values():
        if tensor.dim() == 2:
            tensor[: max(1, len(tensor) // 8)] += 0.5
    save_file(tensors, path, metadata={"format": "pt"})
    times = (source / path.name).stat()
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size


def test_engines_exchange_kv_of_equal_weights_only(versions: Any, tmp_path: Path) -> None:
    """Through files; whatever way the weights came, and whatever their version."""
    known: Versions = versions("untied")
    first, second = known.folders[:2]
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(second, copy)
    change_first_eighths(second, other)
    tensor = "model.layers.0.mlp.up_proj.weight"
    one = {tensor: known.tensors[2][tensor]}
    patch = [each for each in known.patches if each["name"] == tensor]
    ways: list[tuple[str, Path, list[tuple[str, Any]]]] = [
        ("second", second, []),
        ("second", copy, []),
        ("second", first, [("reload_weights", second)]),
        ("second", first, [("reload_weights", {tensor: 2 * one[tensor]}), ("reload_weights", copy)]),
        ("other", other, []),
        ("first", first, []),
        ("tensors", first, [("reload_weights", known.tensors[1])]),
        ("tensors", other, [("apply_sparse_weight_patches", patch), ("reload_weights", known.tensors[1])]),
        ("one", second, [("reload_weights", one)]),
        ("one", copy, [("apply_sparse_weight_patches", patch)]),
        ("one", first, [("reload_weights", copy), ("apply_sparse_weight_patches", patch)]),
        ("one of the first", first, [("reload_weights", one)]),
    ]
    files = {
        "kv_connector": "SharedStorageConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")},
    }
    identities: dict[str, str] = {}
    for name, start, updates in ways:
        engine = make_engine(start, kv_transfer_config=files, enable_prefix_caching=False, **SIZE)
        for method, given in updates:
            getattr(engine, method)(given)
        run_requests(engine, {"r": (PROMPTS[0], GREEDY)})
        assert engine.stats().transfers.tokens_loaded == (20 if name in identities else 0), (name, start)
        assert engine.weights_identity() == identities.setdefault(name, engine.weights_identity())
        settle(engine)
        engine.shutdown()
    assert len(set(identities.values())) == len(identities)


def test_a_file_that_is_replaced_while_it_is_loaded(versions: Any, tmp_path: Path, monkeypatch: Any) -> None:
    known: Versions = versions("untied")
    folder, original = tmp_path / "model", WeightStore.add
    shutil.copytree(known.folders[0], folder)

    def replace_files(*args: Any, **kwargs: Any) -> None:
        shutil.copy2(known.folders[1] / "model.safetensors", tmp_path / "new")
        (tmp_path / "new").replace(folder / "model.safetensors")
        original(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(WeightStore, "add", replace_files)
        with pytest.raises(WeightError, match=r"model/model.safetensors was replaced or changed while it was loaded"):
            make_engine(folder, **SIZE)
    engine = make_engine(folder, **SIZE)
    shutil.copy2(known.folders[2] / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(WeightError, match=r"model.safetensors was replaced or changed"):
        engine.weights_identity()
    engine.shutdown()


def test_an_error_while_weights_are_written_ends_the_engine(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known: Versions = versions("untied")
    engine = make_engine(known.folders[0], **SIZE)
    store = engine.core.executor.runner.weights  # type: ignore[attr-defined]
    monkeypatch.setattr(store, "commit", lambda version: 1 / 0)
    with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
        engine.reload_weights(known.folders[1])
    with pytest.raises(EngineDeadError):
        engine.step()


class FailingSteps:
    """Lets the next step of Model Runner V1 fail, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forward, self.errors = ModelRunnerV1._forward, list[Exception]()

        def fail_once(runner: Any, step: Any) -> None:
            if self.errors:
                raise self.errors.pop()
            forward(runner, step)

        monkeypatch.setattr(ModelRunnerV1, "_forward", fail_once)

    def restart(self, engine: LLMEngine) -> list[list[int]]:
        """Returns the tokens."""
        self.errors.append(RuntimeError("once"))
        before, sums, identity = engine.stats().num_restarts, engine.weight_checksums(), engine.weights_identity()
        found = tokens(engine)
        assert engine.stats().num_restarts == before + 1 and engine.weight_checksums() == sums
        assert engine.weights_identity() == identity
        return found


@pytest.fixture
def leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], dict[str, int]]]:
    """Files of kept weights, in memory and on disk, as bytes."""
    places = {"memory": tmp_path / "memory", "disk": tmp_path / "disk"}
    for place in places.values():
        place.mkdir()
    monkeypatch.setattr(kept_weights, "_MEMORY", places["memory"])
    monkeypatch.setattr(tempfile, "tempdir", str(places["disk"]))
    yield lambda: {
        name: sum(path.stat().st_size for path in place.rglob("*.safetensors")) for name, place in places.items()
    }
    assert not list(tmp_path.glob("*/fleetfoot-weights-*"))


@pytest.mark.parametrize(("limit", "model"), [*zip((4.0, 0.0, 4.0), MODELS, strict=True)])  # in memory, and on a disk
def test_restarted_workers(
    model: str, limit: float, versions: Any, monkeypatch: pytest.MonkeyPatch, leftovers: Callable[[], dict[str, int]]
) -> None:
    """They get the weights in use: files, tensors, patches of these, and what was updated since."""
    known: Versions = versions(model)
    settings = {"weight_transfer_config": {"restart_memory_gb": limit}, "on_error": "restart", "max_restarts": 20}
    engine = make_engine(known.folders[0], model_runner="v1", **SIZE, **settings)
    steps = FailingSteps(monkeypatch)
    assert steps.restart(engine) == known.tokens[0] and engine.weight_version == 0
    engine.reload_weights(known.folders[1])
    assert steps.restart(engine) == known.tokens[1] and engine.weight_version == 1
    engine.apply_sparse_weight_patches(known.patches)
    assert steps.restart(engine) == known.tokens[2] and engine.weight_version == 2
    assert leftovers()["memory"] == 0 and (limit == 0) == (leftovers()["disk"] > 0)  # patches alone are in memory
    assert steps.restart(engine) == known.tokens[2]
    size = sum(tensor.nbytes for tensor in known.tensors[0].values())
    for version in (0, 1, 0, 1):
        engine.reload_weights(known.tensors[version])
        used, unused = ("disk", "memory") if limit == 0 else ("memory", "disk")
        assert size <= leftovers()[used] < 1.2 * size and not leftovers()[unused]  # that of before is removed
    assert steps.restart(engine) == known.tokens[1]
    some = dict(list(known.tensors[0].items())[::2])
    for _ in range(5):
        engine.reload_weights(some)
    assert sum(leftovers().values()) < 2.2 * size
    engine.apply_sparse_weight_patches(known.patches)
    after = tokens(engine)
    assert steps.restart(engine) == after != known.tokens[2] and engine.weight_version == 12
    engine.reload_weights(known.folders[0])
    assert not any(leftovers().values())
    assert steps.restart(engine) == known.tokens[0]
    engine.shutdown()


def test_a_restart_with_files_that_have_changed(versions: Any, tmp_path: Path, monkeypatch: Any) -> None:
    known: Versions = versions("untied")
    folder = tmp_path / "model"
    shutil.copytree(known.folders[0], folder)
    engine = make_engine(folder, model_runner="v1", on_error="restart", **SIZE)
    steps = FailingSteps(monkeypatch)
    engine.weights_identity()
    (folder / "model.safetensors").touch()
    assert steps.restart(engine) == known.tokens[0]  # the content is the same
    shutil.copy2(known.folders[1] / "model.safetensors", folder / "model.safetensors")
    steps.errors.append(RuntimeError("once"))
    with pytest.raises(EngineDeadError, match=r"model.safetensors was replaced or changed"):
        tokens(engine)


@pytest.mark.parametrize("level", [1, 2])
def test_kept_weights_and_sleep(level: int, versions: Any, leftovers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that keeps weights for restarts reads them after sleep, too."""
    known: Versions = versions("tied")
    engine = make_engine(
        known.folders[1], model_runner="v1", on_error="restart", enable_sleep_mode=True, max_restarts=9, **SIZE
    )
    steps = FailingSteps(monkeypatch)
    engine.apply_sparse_weight_patches(known.patches)
    engine.sleep(level)
    engine.wake_up()
    assert tokens(engine) == known.tokens[2] == steps.restart(engine)
    engine.reload_weights(known.tensors[0])
    engine.sleep(level)
    engine.wake_up()
    assert tokens(engine) == known.tokens[0] == steps.restart(engine)
    engine.shutdown()


def test_kept_weights_that_cannot_be_written(
    versions: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known: Versions = versions("untied")
    engine = make_engine(known.folders[0], model_runner="v1", on_error="restart", **SIZE)
    steps = FailingSteps(monkeypatch)

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_store, "save_file", fail)
    engine.reload_weights(known.tensors[1])
    assert tokens(engine) == known.tokens[1] and "cannot be kept, and a restart would lose them" in caplog.text
    steps.errors.append(RuntimeError("once"))
    with pytest.raises(EngineDeadError, match=r"could not be kept: .*No space left on device"):
        tokens(engine)


def test_killed_ranks(versions: Any, leftovers: Any, port: int) -> None:
    """Each rank has its part of the tensors again, given or received, and patches of them."""
    known: Versions = versions("merged")
    engine = make_engine(known.folders[1], model_runner="v1", on_error="restart", max_restarts=9, **TP, **SIZE)

    def kill() -> list[list[int]]:
        engine.add_request("r", PROMPTS[0], SamplingParams(max_tokens=4))
        engine.step()
        os.kill(pids_of(engine)[1], signal.SIGKILL)
        drain(engine)
        return tokens(engine)

    engine.apply_sparse_weight_patches(known.patches)
    identity = engine.weights_identity()
    assert kill() == known.tokens[2] and engine.weights_identity() == identity
    engine.reload_weights(known.tensors[0])
    assert kill() == known.tokens[0] and engine.weight_version == 2
    address = {"master_address": "127.0.0.1", "master_port": port, "world_size": 3}
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(GlooWeightTransferEngine.trainer_init, address)
        engine.init_weight_transfer_engine(address)
        items = list(known.tensors[1].items())
        sent = pool.submit(GlooWeightTransferEngine.trainer_send_weights, items, group=made.result(HANG))
        engine.update_weights(update_info_of(items))
        sent.result(HANG)
    assert leftovers()["memory"] > 0
    assert kill() == known.tokens[1] and engine.stats().num_restarts == 3
    engine.shutdown()


# --- drafters ---------------------------------------------------------------------------------------------------------


def make_head(folder: Path, target: Path) -> None:
    """An EAGLE head with the target's first layer and a copy of its embedding."""
    config, tensors = json.loads((target / "config.json").read_text()), load_file(target / "model.safetensors")
    names = [name for name in tensors if ".layers.0." in name and "input_layernorm" not in name]
    head = {name.removeprefix("model."): tensors[name] for name in [*names, EMBEDDING]}
    folder.mkdir()
    save_file({**head, "fc.weight": torch.randn(48, 96) * 0.1}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))


def copied_embedding(worker: Any) -> torch.Tensor | None:
    """Of a drafter on a rank that does not have the target's."""
    drafter = worker.runner._draft_settings.drafter
    embedding = None if drafter is None else drafter._head.embed_tokens
    return None if embedding is None else embedding.weight


@pytest.mark.parametrize(("method", "settings"), [("eagle", {}), ("draft_model", {}), ("eagle", PP)])
def test_drafters(method: str, settings: dict[str, Any], versions: Any, tmp_path: Path) -> None:
    known: Versions = versions("untied")
    folder, name = known.folders[0], "model.layers.0.mlp.up_proj.weight"
    if method == "eagle":
        folder = tmp_path / "head"
        make_head(folder, known.folders[0])
        name = name.removeprefix("model.")
    drafts = {"model": str(folder), "method": method, "num_speculative_tokens": 2}
    engine = make_engine(known.folders[0], speculative_config=drafts, **SIZE, **settings)
    try:
        assert tokens(engine) == known.tokens[0]
        engine.reload_weights(known.folders[1])
        assert tokens(engine) == known.tokens[1]
        up = known.tensors[1]["model.layers.0.mlp.up_proj.weight"]
        engine.reload_weights({f"drafter.{name}": up})
        assert engine.weight_checksums([f"drafter.{name}"]) == {f"drafter.{name}": tensor_checksum(up)}
        more = {"name": f"drafter.{name}", "indices": [5], "values": [1.0]}
        engine.apply_sparse_weight_patches([*known.patches, more])
        assert tokens(engine) == known.tokens[2]
        assert engine.stats().scheduler.drafts.num_drafted > 0
        if settings is PP:
            first, last = engine.collective_rpc(copied_embedding)
            assert first is None and torch.equal(last, known.tensors[2][EMBEDDING])
    finally:
        engine.shutdown()


# --- from a trainer ---------------------------------------------------------------------------------------------------


def test_a_trainer_sends_weights(two_ranks: LLMEngine, versions: Any, port: int) -> None:
    """Over gloo, to two ranks: whole tensors, received one by one or first all of them, and sparse patches."""
    engine, known = two_ranks, versions("untied")
    version = engine.weight_version
    address = {"master_address": "127.0.0.1", "master_port": port, "world_size": 3}
    info, sparse = update_info_of(known.tensors[1].items()), [SparseWeightPatch(**patch) for patch in known.patches]
    send = GlooWeightTransferEngine.trainer_send_weights
    with pytest.raises(WeightError, match="call init_weight_transfer_engine first"):
        engine.update_weights(info)
    for wrong in ({"world_size": 2}, {"rank_offset": 0}):
        with pytest.raises(ValueError, match=r"init_info: rank_offset \d and 2 workers do not fit"):
            engine.init_weight_transfer_engine({"rank_offset": 1, **address, **wrong})
    with ThreadPoolExecutor(1) as pool:
        trainer = pool.submit(GlooWeightTransferEngine.trainer_init, address)
        engine.init_weight_transfer(WeightTransferInitRequest({**address, "rank_offset": 1}))
        group = trainer.result(HANG)

        sent = pool.submit(send, known.tensors[1].items(), NCCLTrainerSendWeightsArgs(group))
        assert engine.update_weights(WeightTransferUpdateRequest(info)) == version + 1
        assert sent.result(HANG) is None and tokens(engine) == known.tokens[1]

        flat = {"num_updates_list": [len(patch.indices) for patch in sparse]}
        sent = pool.submit(GlooWeightTransferEngine.trainer_send_patches, sparse, group=group)
        assert engine.update_weights({"update_info": {**info, **flat}}) == version + 2
        assert sent.result(HANG) is None and tokens(engine) == known.tokens[2]

        sent = pool.submit(send, known.tensors[1].items(), group=group)
        with pytest.raises(WeightError, match="nrom is unknown"):
            engine.update_weights({**info, "names": ["nrom", *info["names"][1:]]})
        with pytest.raises(RuntimeError, match=r"refuses the weights: no weight was changed.*\n  nrom is unknown"):
            sent.result(HANG)
        nan = {**known.tensors[0], NORM: known.tensors[0][NORM] * torch.nan}
        sent = pool.submit(send, nan.items(), group=group)
        with pytest.raises(WeightError, match=f"{NORM} has the value nan"):
            engine.update_weights(update_info_of(nan.items()), check_finite=True)
        sent.result(HANG)
        assert engine.weight_checksums() == known.checksums(2) and engine.weight_version == version + 2

        engine.start_weight_update()  # in two halves, which make one version
        items = list(known.tensors[0].items())
        for half in (items[::2], items[1::2]):
            sent = pool.submit(send, half, group=group)
            assert engine.update_weights(update_info_of(half), check_finite=True) == version + 3
            sent.result(HANG)
        assert engine.finish_weight_update() == version + 3 and tokens(engine) == known.tokens[0]


def test_update_infos_that_are_refused(engine: LLMEngine) -> None:
    for given, message in (
        ({"names": [NORM], "shapes": [[48]]}, "update_info: dtype_names has 0 entries for 1 names"),
        ({"names": [NORM], "shapes": [[48]], "dtype_names": ["float7"]}, "dtype_names has 'float7'"),
        ({"names": [NORM], "ipc_handles": []}, "ipc_handles has 0 entries for 1 names"),
        ({"names": [NORM], "ipc_handles": [{}]}, "ipc_handles, which are of a GPU, and this engine runs on a CPU"),
        ({"nmes": []}, "update_info got an unknown keyword 'nmes'; did you mean 'names'"),
        (None, "update_info is None; it must be a dictionary, or a WeightTransferUpdateInfo"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            engine.update_weights(given)
    with pytest.raises(WeightError, match="no update has started; call start_weight_update first"):
        engine.finish_weight_update()


# --- examples ---------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


def test_the_example_of_the_docs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "live_weights.md").read_text(), re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["text"] == found["first"].text != found["second"].text

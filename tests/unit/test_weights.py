"""Checkpoints on disk: every layout that is read, a rank's part of one, dummy weights, and finding the folder."""

import dataclasses
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.helpers.kernels import cpu_kernels, reference_kernels
from tests.helpers.paged_models import Rank
from tests.helpers.specs import model_config

from fleetfoot.config.model import ModelConfig
from fleetfoot.distributed.groups import Groups
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.kernels.native_ops import NativeLinear
from fleetfoot.layers.context import ModelContext
from fleetfoot.models.interface import CausalLM
from fleetfoot.native.loading import native_problem
from fleetfoot.records.weights import Rows, WeightError, WeightSpec, slices_of
from fleetfoot.weights.checkpoint import Checkpoint, load_safetensors
from fleetfoot.weights.dummy import fill_dummy
from fleetfoot.weights.hub import ModelNotFoundError, resolve_model
from fleetfoot.weights.loading import ModelLoader, reload_weights

Patch, LogCapture = pytest.MonkeyPatch, pytest.LogCaptureFixture
Tensors = dict[str, torch.Tensor]

CONTEXT = ModelContext(reference_kernels(), SDPABackend(), torch.float32, torch.device("cpu"))
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
UP = "model.layers.2.mlp.up_proj.weight"
"""Beyond the last layer."""
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


def config(*, tied: bool = False) -> ModelConfig:
    return model_config("LlamaForCausalLM", 11, 8, 12, 2, 2, 1, 4, 32, tie_word_embeddings=tied)


def weights(model: CausalLM) -> Tensors:
    """A copy of the specs' tensors, as the checkpoint has them."""
    values = {}
    for spec in model.weight_specs():
        values[spec.name] = spec.destination().new_full(spec.shape, float("nan"))
        put_part(values, spec)
    model.process_weights_after_loading()
    return values


def parts(spec: WeightSpec) -> Iterator[tuple[tuple[slice, ...], slice]]:
    """Where each run of rows lies in the checkpoint and in the destination."""
    rows, *columns = spec.part or (slice(0, spec.shape[0]),)
    begin = 0
    for run in slices_of(rows):
        end = begin + run.stop - run.start
        yield (run, *(slices_of(column)[0] for column in columns)), slice(begin, end)
        begin = end


def put_part(tensors: Tensors, spec: WeightSpec) -> None:
    for place, span in parts(spec):
        tensors[spec.name][place] = spec.destination()[span]


def random_tensors(*, tied: bool = False, seed: int = 0) -> Tensors:
    return weights(ModelLoader(config(tied=tied), CONTEXT, None, "dummy", seed).load())


def save(folder: Path, tensors: Tensors, file: str = ONE) -> None:
    # Each tensor in memory of its own: safetensors refuses those that share.
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / file)


def load(folder: Path, *, tied: bool = False, layers: range | None = None) -> Tensors:
    return weights(ModelLoader(config(tied=tied), CONTEXT, folder, layers=layers).load())


def assert_same(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=0)


def save_sharded(folder: Path, tensors: Tensors, *, index: bool = True) -> None:
    names = list(tensors)
    shards = {f"model-0000{i}-of-00003.safetensors": names[i - 1 :: 3] for i in (1, 2, 3)}
    for file, members in shards.items():
        save(folder, {name: tensors[name] for name in members}, file)
    if index:
        weight_map = {name: file for file, members in shards.items() for name in members}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("layout", [ONE, "weights.safetensors", "index", "no index"])
def test_files(layout: str, tmp_path: Path) -> None:
    tensors = random_tensors()
    save(tmp_path, {"other": torch.ones(1)}, "consolidated.safetensors")  # another layout of the same weights
    if layout.endswith("index"):
        save_sharded(tmp_path, tensors, index=layout == "index")
    else:
        save(tmp_path, tensors, layout)
    assert_same(load(tmp_path), tensors)


def test_a_tied_matrix_under_either_name_or_both(tmp_path: Path) -> None:
    tensors = random_tensors(tied=True)
    assert HEAD not in tensors
    renamed = {HEAD if name == EMBEDDING else name: tensor for name, tensor in tensors.items()}
    for saved in ({**tensors, HEAD: tensors[EMBEDDING]}, renamed):
        save(tmp_path, saved)
        assert_same(load(tmp_path, tied=True), tensors)
    save(tmp_path, {**tensors, HEAD: tensors[EMBEDDING] + 1})
    with pytest.raises(WeightError, match=f"{HEAD} differs from {EMBEDDING}, although tie_word_embeddings is true"):
        load(tmp_path, tied=True)
    tensors[EMBEDDING][0, 0] = float("nan")  # which equals a NaN in the copy
    save(tmp_path, {**tensors, HEAD: tensors[EMBEDDING]})
    assert load(tmp_path, tied=True)[EMBEDDING].isnan().sum() == 1


def test_an_export_of_the_base_model(tmp_path: Path) -> None:
    for tied in (False, True):
        tensors = random_tensors(tied=tied)
        save(tmp_path, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
        assert_same(load(tmp_path, tied=tied), tensors)
    with pytest.raises(WeightError, match=rf"1 missing\n  missing {HEAD}: expected \[11, 8\]\n\(no output head"):
        load(tmp_path)


def test_a_checkpoint_that_does_not_fit_leaves_the_old_weights(tmp_path: Path) -> None:
    old, new = random_tensors(seed=1), random_tensors(seed=2)
    save(tmp_path, old)
    model = ModelLoader(config(), CONTEXT, tmp_path).load()
    save(tmp_path, {name: tensor for name, tensor in new.items() if name != NORM})
    with pytest.raises(WeightError, match="1 missing"):
        reload_weights(model, CONTEXT, tmp_path)
    assert_same(weights(model), old)
    save(tmp_path, new)
    reload_weights(model, CONTEXT, tmp_path)
    assert_same(weights(model), new)


def test_missing_misshapen_and_unexpected_tensors_are_all_named(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors[Q], tensors[NORM]
    tensors |= {K: torch.zeros(4, 7), UP: torch.zeros(2)}
    save(tmp_path, tensors)
    with pytest.raises(WeightError) as caught:
        load(tmp_path)
    assert str(caught.value).splitlines() == [
        f"the tensors in {tmp_path} do not fit its config.json: 2 missing, 1 misshapen, 1 unexpected",
        f"  missing {Q}: expected [8, 8]",
        f"  misshapen {K}: found [4, 7], expected [4, 8]",
        f"  missing {NORM}: expected [8]",
        f"  unexpected {UP}: found [2], expected nothing of that name",
    ]
    save(tmp_path, {EMBEDDING: tensors[EMBEDDING]})
    with pytest.raises(WeightError, match="20 missing") as caught:
        load(tmp_path)
    lines = str(caught.value).splitlines()
    assert (len(lines), lines[-1]) == (12, "  and 10 more")


def test_integers_and_floats_are_not_mixed_up(tmp_path: Path) -> None:
    packed = torch.arange(-4, 4, dtype=torch.int32)
    save(tmp_path, {"packed": packed, "scale": torch.ones(2)})
    kinds: tuple[tuple[Literal["float", "integer"], Literal["float", "integer"], str], ...] = (
        ("integer", "float", ""),
        ("float", "float", r"1 quantized\n  quantized packed: found I32, expected one of BF16, F16, F32, F64"),
        ("integer", "integer", r"1 unquantized\n  unquantized scale: found F32, expected one of I8, U8"),
    )
    for kind, scale_kind, message in kinds:
        held, scale = torch.zeros(8, dtype=torch.int32), torch.zeros(2)
        specs = [
            WeightSpec("packed", (8,), lambda held=held: held, kind=kind),
            WeightSpec("scale", (2,), lambda scale=scale: scale, kind=scale_kind),
        ]
        with pytest.raises(WeightError, match=message) if message else nullcontext():
            load_safetensors(specs, tmp_path)
        assert torch.equal(held, packed) != bool(message)


SAME = {Q: torch.zeros(8, 8)}
NOT_WHOLE = r"model.safetensors is not a whole safetensors file"
BROKEN: dict[str, tuple[dict[str, bytes | Tensors], str]] = {
    "empty": ({ONE: b""}, rf"{NOT_WHOLE} \(0 bytes"),
    "garbage": ({ONE: b"\xff" * 100}, rf"{NOT_WHOLE} \(100 bytes; an interrupted download"),
    "pointer": ({ONE: b"version https://git-lfs.github.com/spec/v1\n"}, "a Git LFS pointer .run git lfs pull"),
    "nothing": ({}, r"no \*.safetensors in .*; use load_format dummy"),
    "pickles": ({"model.bin": b""}, r"holds model.bin but no \*.safetensors, the only format that is read"),
    "absent": (
        {INDEX: b'{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}', "a.safetensors": {}},
        "names 1 of 2 files that are absent: b.safetensors",
    ),
    **{
        f"index {content!r}": ({INDEX: content}, f"{INDEX} has no weight_map from tensor to file")
        for content in (b"{}", b'{"weight_map": []}', b'{"weight_map": 3}', b'{"weight_map": {"a": 3}}')
    },
    **{
        f"outside {name}": ({INDEX: json.dumps({"weight_map": {"a": name}}).encode()}, f"outside its folder.*{name}")
        for name in ("/etc/passwd", "../a.safetensors", "part/../../a.safetensors", "..")
    },
    "cut off": ({INDEX: b"{"}, f"{INDEX} cannot be read as JSON"),
    "too deep": ({INDEX: b"[" * 100_000}, f"{INDEX} cannot be read as JSON: maximum recursion"),
    "too long": ({INDEX: json.dumps({"weight_map": {"a": "x" * 5000}}).encode()}, "names 1 of 1 files that are absent"),
    "a list": ({INDEX: b"[]"}, f"{INDEX} holds a JSON list, not an object"),
    "twice": ({"a.safetensors": SAME, "b.safetensors": SAME}, rf"tensor {Q} is in .*b.safetensors and in another file"),
    "int8": ({ONE: {Q: torch.ones(8, 8, dtype=torch.int8)}}, f"quantized {Q}: found I8, expected one of BF16"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoints(case: str, tmp_path: Path) -> None:
    files, message = BROKEN[case]
    for file, content in files.items():
        if isinstance(content, bytes):
            (tmp_path / file).write_bytes(content)
        else:
            save(tmp_path, content, file)
    with pytest.raises(WeightError, match=message):
        load(tmp_path)


@pytest.mark.skipif(bool(native_problem()), reason="reads of a file that was cut end the process")
@pytest.mark.parametrize("left", [-1, 3 * 4096 + 8], ids=["last-page", "middle"])
def test_a_file_that_is_cut_while_it_is_open(left: int, tmp_path: Path) -> None:
    tensors = {f"w{number}": torch.ones(64, 64) for number in range(4)}
    save_file(tensors, path := tmp_path / ONE)
    with pytest.raises(WeightError, match=rf"{ONE}: {'w3' if left < 0 else 'w0'} "), Checkpoint(tmp_path) as checkpoint:
        os.truncate(path, path.stat().st_size + left if left < 0 else left)
        assert checkpoint.tensor("w3").sum() <= 4096
    save_file(tensors, path)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensor("w3").sum() == 4096


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_changed_and_cut_files_are_read_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzzed"
    folder.mkdir(exist_ok=True)
    save_file({"a": torch.ones(4, 3), "b": torch.ones(2, dtype=torch.int8), "c": torch.ones(0)}, folder / "whole")
    content = bytearray((folder / "whole").read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.sampled_from([*b'0123456789{}[]",:', 0, 255]))
    (folder / ONE).write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        with Checkpoint(folder / ONE) as checkpoint:
            sizes = [checkpoint.tensor(name).nbytes for name in checkpoint.names()]
    except WeightError:
        return
    assert sum(sizes) <= len(content)


def test_load_formats(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="load_format is 'gguf'; expected one of auto, safetensors, dummy"):
        ModelLoader(config(), CONTEXT, tmp_path, "gguf").load()
    with pytest.raises(ValueError, match="'auto' reads a folder and none was given; use dummy"):
        ModelLoader(config(), CONTEXT, None).load()


SHARED = model_config("LlamaForCausalLM", 40, 16, 24, 2, 4, 2, 4, 32, qkv_bias=True, o_bias=True, mlp_bias=True)


def load_rank(config: ModelConfig, folder: Path | None, rank: int, size: int, *more: Any) -> CausalLM:
    return ModelLoader(config, dataclasses.replace(CONTEXT, groups=Groups(Rank(rank, size))), folder, *more).load()


def save_shared(folder: Path, config: ModelConfig = SHARED, *, tied: bool = False) -> tuple[ModelConfig, Tensors]:
    shared = dataclasses.replace(config, tie_word_embeddings=tied)
    whole = ModelLoader(shared, CONTEXT, None, "dummy").load()
    for spec in whole.weight_specs():  # biases and norms are made to differ too
        spec.destination().normal_()
    tensors = weights(whole)
    save(folder, tensors)
    return shared, tensors


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("layers", [None, range(1), range(1, 2)])
def test_a_rank_reads_only_its_bytes(size: int, layers: range | None, tmp_path: Path, monkeypatch: Patch) -> None:
    shared, tensors = save_shared(tmp_path, tied=False)
    read: dict[str, int] = {}
    whole_tensor = Checkpoint.tensor

    def counted(self: Checkpoint, name: str, part: tuple[Rows, ...] = ()) -> torch.Tensor:
        tensor = whole_tensor(self, name, part)
        read[name] = read.get(name, 0) + tensor.nbytes
        return tensor

    monkeypatch.setattr(Checkpoint, "tensor", counted)
    total, everything = 0, sum(tensor.nbytes for tensor in tensors.values())
    for rank in range(size):
        read.clear()
        model = load_rank(shared, tmp_path, rank, size, "auto", 0, layers)
        assert read == {spec.name: spec.destination().nbytes for spec in model.weight_specs()}
        numbers = {int(name.split(".")[2]) for name in read if name.startswith("model.layers.")}
        assert numbers == set(layers or range(2))
        total += sum(read.values())
    if layers is None:  # norms are read by every rank, and a KV head by every rank that has it
        assert everything <= total < everything * 1.25
    else:
        assert total < everything * 0.8


def test_a_part_is_a_view_of_the_file(tmp_path: Path) -> None:
    """Of a copy, the rows would lie side by side."""
    matrix = torch.arange(60.0).view(6, 10)
    save(tmp_path, {"matrix": matrix})
    with Checkpoint(tmp_path) as checkpoint:
        rows = checkpoint.tensor("matrix", (slice(2, 4), slice(0, 10)))
        columns = checkpoint.tensor("matrix", (slice(0, 6), slice(5, 10)))
        assert torch.equal(rows, matrix[2:4]) and torch.equal(columns, matrix[:, 5:])
        assert columns.stride() == (10, 1)
        assert checkpoint.tensor("matrix", (slice(6, 6), slice(0, 10))).shape == (0, 10)


def test_one_layer_at_a_time_is_in_memory_twice(tmp_path: Path) -> None:
    """Where weights are packed. An embedding and its tied head have one matrix if its rows can be read."""
    ops, tensors = cpu_kernels(), random_tensors(tied=True)
    save(tmp_path, tensors)
    model = ModelLoader(config(tied=True), dataclasses.replace(CONTEXT, ops=ops), tmp_path).load()
    embedding: Any = model.model.embed_tokens
    plain: list[Any] = []
    for spec in model.weight_specs():
        spec.destination()[:] = tensors[spec.name]
        spec.filled()
        assert spec.name != EMBEDDING or embedding.is_open != isinstance(embedding.prepared, NativeLinear)
        plain += [name for name, module in model.named_modules() if _plain_weight(module) is not None]
    packed_parts = {"qkv_proj": 2, "gate_up_proj": 1}  # of a layer of several parts, all but the last
    assert Counter(name.rpartition(".")[2] for name in plain) == {name: 2 * n for name, n in packed_parts.items()}
    model.process_weights_after_loading()
    assert torch.equal(embedding(torch.arange(11)), tensors[EMBEDDING])
    stored = sum(size for _, size in model.stored_weights())
    model.process_weights_after_loading()
    assert sum(size for _, size in model.stored_weights()) == stored
    assert_same(weights(model), tensors)


def _plain_weight(module: Any) -> torch.Tensor | None:
    return getattr(getattr(module, "weight", None), "_plain", None)


@pytest.mark.parametrize("tied", [False, True])
def test_padding_of_the_vocabulary_is_zero(tied: bool, tmp_path: Path) -> None:
    shared, tensors = save_shared(tmp_path, tied=tied)
    for rank, size in enumerate((16, 16, 8, 0)):
        model = load_rank(shared, tmp_path, rank, 4)
        (embedding,) = [spec for spec in model.weight_specs() if spec.name == EMBEDDING]
        assert len(embedding.destination()) == size
        head: Any = model.lm_head
        logits = (model.model.embed_tokens.prepared if tied else head.weight._prepared).weight()
        assert logits.shape == (16, 16)
        assert not logits[size:].any()
        assert torch.equal(logits[:size], tensors[EMBEDDING if tied else HEAD][16 * rank :][:16])


def test_dummy_weights() -> None:
    big = model_config("Qwen3ForCausalLM", 500, 64, 96, 2, 4, 2, 16, 32, qk_norm=True, qkv_bias=True)

    def dummy(seed: int, layers: range | None = None) -> Tensors:
        return weights(ModelLoader(big, CONTEXT, None, "dummy", seed, layers).load())

    whole, other = dummy(0), dummy(1)
    assert_same(dummy(0), whole)
    assert_same({**dummy(0, range(1)), **dummy(0, range(1, 2))}, whole)
    for name, tensor in whole.items():
        assert bool((tensor == 1).all()) if "norm" in name else not torch.equal(tensor, other[name])
    assert whole[EMBEDDING].std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(whole["model.layers.0.mlp.up_proj.weight"], whole["model.layers.1.mlp.up_proj.weight"])
    integers = torch.zeros(100, dtype=torch.int8)
    fill_dummy([WeightSpec("packed", (100,), lambda: integers, kind="integer")], seed=0)
    assert len(integers.unique()) > 10


def test_local_folders_are_taken_as_they_are(tmp_path: Path, monkeypatch: Patch, caplog: LogCapture) -> None:
    assert resolve_model(tmp_path) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    assert resolve_model("~/mine") == tmp_path / "mine"
    monkeypatch.chdir(tmp_path)
    assert resolve_model("mine") == Path("mine")
    with caplog.at_level(logging.WARNING):
        assert resolve_model("mine", revision="v2") == Path("mine")
    assert "'mine' is a local folder: revision 'v2' has no effect" in caplog.text


def test_a_path_that_is_absent_never_goes_to_the_hub(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was called"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "file").touch()
    gone = (str(tmp_path / "gone"), "./gone", "../gone", "~/gone", "~nobody-at-all/gone", "models/gone", "a/b/c")
    messages: dict[str | Path, str] = {name: f"model '{name}': no such folder" for name in gone}
    messages[Path("owner/name")] = "no such folder"
    messages[""] = "model '': give a folder or a Hugging Face hub id"
    messages["file"] = "'file' is a file; give the folder"
    for name, message in messages.items():
        with pytest.raises(ModelNotFoundError, match=re.escape(message)):
            resolve_model(name)


def test_a_hub_id_is_downloaded_or_the_error_lists_what_was_tried(tmp_path: Path, monkeypatch: Patch) -> None:
    calls = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str], **_: object) -> str:
        calls.append((name, revision))
        assert {"*.json", "*.safetensors", "*.jinja"} <= set(allow_patterns)
        if revision == "main":
            raise huggingface_hub.errors.LocalEntryNotFoundError("outgoing traffic has been disabled")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name") == resolve_model("name", revision="v2") == tmp_path
    assert calls == [("owner/name", None), ("name", "v2")]
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("owner/nmae", revision="main")
    for part in (f"no folder {tmp_path}/owner/nmae", "'owner/nmae' at revision 'main'", "traffic", "HF_HUB_OFFLINE"):
        assert part in str(caught.value)
    monkeypatch.undo()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for name in ("own er/na me", "owner/--x..y"):
        with pytest.raises(ModelNotFoundError, match="HFValidationError"):
            resolve_model(name)

"""GGUF files: headers, valid and hostile; types of blocks; products in C; tokenizers."""

from __future__ import annotations

import gc
import json
import os
import platform
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.gguf_files import paired, random_blocks, write_gguf
from tests.helpers.interpreter import interpreted
from tests.helpers.kernels import triton_kernels

from fleetfoot.kernels.native_blocks import block_linear_native
from fleetfoot.kernels.quantized import block_form
from fleetfoot.kernels.quantized.block_matrices import empty_matrix, write_blocks
from fleetfoot.kernels.quantized.blocks import BlockLinear, BlockRows, dequantize
from fleetfoot.kernels.quantized.packed import PackedMatrix
from fleetfoot.kernels.quantized.scaled import ScaledMatrix
from fleetfoot.native.loading import load_library, native_problem
from fleetfoot.native.mappings import CutFileError
from fleetfoot.quantization.base import LinearShape
from fleetfoot.quantization.gguf import MatrixWeight
from fleetfoot.records.weights import BLOCK_TYPES_BY_NAME
from fleetfoot.tokenizer.tokenizer import Tokenizer
from fleetfoot.weights.gguf import GGUFError, GGUFModel, read_gguf
from fleetfoot.weights.gguf_config import config_of
from fleetfoot.weights.gguf_tensors import GGUFTensors
from fleetfoot.weights.gguf_tokenizer import tokenizer_files

QUANTIZED = [name for name, each in BLOCK_TYPES_BY_NAME.items() if not each.is_float]
STORY = Path("src/fleetfoot/assets/story-llama")


@pytest.mark.parametrize("kind", QUANTIZED)
def test_values_of_blocks_are_those_of_the_gguf_package(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    blocks = random_blocks(kind, (5, 512), np.random.default_rng(0))
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    found = dequantize(BLOCK_TYPES_BY_NAME[kind].number, torch.from_numpy(blocks))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(bool(native_problem()), reason="the C kernels are not there")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*QUANTIZED, "F16"])
def test_products_in_c_are_the_reference_of_quantized_inputs(kind: str, dtype: torch.dtype) -> None:
    """27 outputs of one type and 9 of another, a bias; and the bits of a row do not depend on the batch."""
    rng, size = np.random.default_rng(1), 512
    first = rng.standard_normal((27, size)).astype(np.float16).view(np.uint8) if kind == "F16" else None
    data = [random_blocks(kind, (27, size), rng) if first is None else first, random_blocks("Q8_0", (9, size), rng)]
    parts = [
        BlockRows(BLOCK_TYPES_BY_NAME[each].number, torch.from_numpy(blocks))
        for each, blocks in zip((kind, "Q8_0"), data, strict=True)
    ]
    bias = torch.randn(36, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = torch.from_numpy(rng.standard_normal((13, size)).astype(np.float32)).to(dtype)
    linear = block_linear_native(load_library(), parts, size, dtype, bias)
    found, expected = linear.unrounded(x), BlockLinear(parts, size, dtype, bias).unrounded(x)
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 0.01 * expected.norm()  # codes of 8 bits
    for begin, end in ((0, 1), (3, 5), (2, 6), (5, 12)):
        assert torch.equal(linear.unrounded(x[begin:end]), found[begin:end])
    one = block_linear_native(load_library(), parts[:1], size, dtype)
    index = torch.tensor([26, 0, 3])
    assert torch.equal(one.rows(index), BlockLinear(parts[:1], size, dtype).rows(index))
    with pytest.raises(IndexError):
        one.rows(torch.tensor([27]))
    x[2, 7] = float("nan")
    assert linear.unrounded(x)[2].isnan().all()
    assert torch.equal(linear.unrounded(x)[3:], found[3:])


@pytest.mark.parametrize("kind", QUANTIZED)
def test_matrices_of_a_gpu_have_the_values_of_blocks(kind: str) -> None:
    """Codes of 4 bits with scales in 16 bits; int8 exactly, or within its own rounding; groups with a scale of 0."""
    number, blocks = BLOCK_TYPES_BY_NAME[kind].number, random_blocks(kind, (7, 512), np.random.default_rng(3))
    if kind in ("Q4_1", "Q4_0"):
        blocks[2, :2] = 0
    data, device = torch.from_numpy(blocks), torch.device("cpu")
    matrix = empty_matrix(block_form(number), 9, 512, torch.bfloat16, device, None)
    write_blocks(matrix, 1, number, data)
    assert isinstance(matrix, PackedMatrix | ScaledMatrix)
    found, expected = matrix.dequantized()[1:8], dequantize(number, data)
    tolerance = 2**-8 if isinstance(matrix, PackedMatrix) else 0.0 if kind in ("Q8_0", "Q5_0") else 1 / 254
    largest = expected.unflatten(1, (-1, 32)).abs().amax(2).repeat_interleave(32, 1)
    if kind in ("Q4_K", "Q4_1"):  # of what the minimum is subtracted from
        largest = largest * 4
    assert ((found - expected).abs() <= tolerance * largest * 1.01).all()
    assert matrix.dequantized()[[0, 8]].abs().max() == 0


@interpreted
@pytest.mark.parametrize("kind", ["Q4_K", "Q4_1", "Q6_K", "Q8_0", "MXFP4"])
def test_a_gpus_products_of_blocks(kind: str) -> None:
    """A matrix of two forms, its bias, and numbers of rows for each kind of kernel."""
    rng, kinds = np.random.default_rng(4), (kind, kind, "Q5_K")
    sizes, types = (20, 12, 16), [BLOCK_TYPES_BY_NAME[each] for each in kinds]
    shape = LinearShape(
        512, (("q", 20), ("k", 12), ("v", 16)), tuple(slice(0, size) for size in sizes), slice(0, 512), has_bias=True
    )
    weight = MatrixWeight(types, shape, triton_kernels(), torch.bfloat16, torch.device("cpu"))
    values, generator = [], torch.Generator().manual_seed(0)
    for spec in weight.weight_specs("m."):
        if spec.kind == "blocks":
            data = torch.from_numpy(random_blocks(kinds[len(values)], (spec.shape[0], 512), rng))
            assert spec.adopt is not None
            spec.adopt(data)
            values.append(dequantize(types[len(values)].number, data))
        else:
            spec.destination().normal_(generator=generator)
    weight.process_weights_after_loading()
    bias = torch.cat([spec.destination() for spec in weight.weight_specs("m.") if spec.kind == "float"]).float()
    for num_rows in (1, 3, 20):
        x = torch.randn(num_rows, 512, generator=generator).bfloat16()
        expected = x.float() @ torch.cat(values).T + bias
        assert (weight.apply(x).float() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.kernels
@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("cc"), reason="needs a C compiler")
@pytest.mark.parametrize("flags", ["-msse4.2 -mpopcnt", "-mavx2 -mfma -mbmi -mbmi2 -mf16c"])
def test_random_blocks_and_shapes_under_sanitizers(flags: str, tmp_path: Path) -> None:
    """Addresses and undefined behaviour; a row alone has the bits that it has in a batch (`fuzz_blocks.c`)."""
    if "avx2" in flags and not load_library().variant.startswith(("avx", "amx")):
        pytest.skip("the processor has no AVX2")
    native, program = Path("src/fleetfoot/native"), tmp_path / "fuzz"
    sources = ["tests/helpers/fuzz_blocks.c", *(str(native / name) for name in ("blocks.c", "threads.c", "mappings.c"))]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    options = ["-std=gnu11", "-O1", "-w", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread"]
    command = ["cc", *options, *sanitizers, *flags.split(), f"-I{native}", *sources, "-lm", "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([str(program), "1", "400"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- headers ----------------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(fields: list[bytes], tensors: list[bytes], counts: tuple[int, int] | None = None, version: int = 3) -> bytes:
    num_tensors, num_fields = counts or (len(tensors), len(fields))
    content = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields) + b"".join(fields + tensors)
    return content + b"\0" * (-len(content) % 32)


GOOD = (
    header([field("general.name", 8, text("x"))], [tensor("a", (32, 2), 8, 0), tensor("b", (4,), 0, 96)]) + b"\1" * 112
)
HOSTILE = {
    "magic": b"GGUB" + GOOD[4:],
    "version": header([], [], version=1),
    "tensor_count": header([], [], counts=(1 << 60, 0)),
    "metadata_kv_count": header([], [], counts=(0, 1 << 40)),
    "a text": header([field("a text", 8, struct.pack("<Q", 1 << 50))], []),
    "an array": header([field("an array", 9, struct.pack("<IQ", 4, 1 << 61))], []),
    "an array of arrays": header([field("an array of arrays", 9, struct.pack("<IQ", 9, 1))], []),
    "a type": header([field("a type", 77, b"")], []),
    "twice": header([field("twice", 0, b"\1")] * 2, []),
    "general.alignment": header([field("general.alignment", 4, struct.pack("<I", 3))], []),
    "dimensions": header([], [tensor("dimensions", (1,) * 5, 0, 0)]),
    "long": header([], [tensor("long", (1 << 62,), 0, 0)]),
    "product": header([], [tensor("product", ((1 << 31), (1 << 31), (1 << 31)), 0, 0)]),
    "unknown": header([], [tensor("unknown", (32,), 99, 0)]) + b"\0" * 64,
    "rows": header([], [tensor("rows", (33,), 8, 0)]) + b"\0" * 64,
    "odd": header([], [tensor("odd", (4,), 0, 8)]) + b"\0" * 64,
    "over": header([], [tensor("a", (64,), 0, 0), tensor("over", (4,), 0, 32)]) + b"\0" * 512,
    "behind": header([], [tensor("behind", (64,), 0, 1 << 40)]) + b"\0" * 512,
    "around": header([], [tensor("around", (64,), 0, (1 << 64) - 32)]) + b"\0" * 512,
    "split.count": header([field("split.count", 2, struct.pack("<H", 3))], []),
}


def test_a_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(GOOD)
    model = read_gguf(path)
    assert model.metadata == {"general.name": "x"}
    assert [(name, each.shape, each.type.name, each.num_bytes) for name, each in model.tensors.items()] == [
        ("a", (2, 32), "Q8_0", 68), ("b", (4,), "F32", 16),
    ]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_by_the_field(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(GGUFError) as caught:
        read_gguf(path)
    assert caught.value.field == name


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_changed_and_cut_headers_are_read_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        model = read_gguf(path)
    except GGUFError:
        return
    assert all(each.offset + each.num_bytes <= path.stat().st_size for each in model.tensors.values())


@pytest.mark.skipif(bool(native_problem()), reason="files are copied")
@pytest.mark.parametrize("left", [-1, 1_000_000], ids=["last-page", "middle"])
def test_a_file_that_is_cut_while_it_is_mapped(left: int, tmp_path: Path) -> None:
    """Products raise an error that names file and tensor, until the mapping is gone; others work after that."""
    pytest.importorskip("gguf")
    path = write_gguf(STORY, tmp_path / "story.gguf")
    model, file, name = read_gguf(path), GGUFTensors(path), "model.layers.0.mlp.down_proj.weight"
    x = torch.ones(3, file.shape(name)[1])

    def linear(tensors: GGUFTensors) -> BlockLinear:
        parts = [BlockRows(BLOCK_TYPES_BY_NAME["Q8_0"].number, tensors.blocks(name))]
        return block_linear_native(load_library(), parts, x.shape[1], torch.float32)

    first, whole, size = linear(file), path.read_bytes(), path.stat().st_size
    expected = first(x)
    os.truncate(path, size + left if left < 0 else left)
    with pytest.raises(CutFileError) as caught:
        first(x)
    assert caught.value.filename == str(path)
    assert caught.value.size == path.stat().st_size
    place = model.tensors[caught.value.field]
    assert place.offset <= caught.value.size < place.offset + place.num_bytes
    del first, file, caught  # the traceback has them, too
    gc.collect()
    path.write_bytes(whole)
    assert torch.equal(linear(GGUFTensors(path))(x), expected)


def test_the_header_is_that_of_the_gguf_package(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = write_gguf(STORY, tmp_path / "story.gguf")
    theirs, ours = gguf.GGUFReader(path), read_gguf(path)
    assert {each.name: each.data_offset for each in theirs.tensors} == {n: t.offset for n, t in ours.tensors.items()}
    assert {
        name: value.contents() for name, value in theirs.fields.items() if "." in name and name[:5] != "GGUF."
    } == dict(ours.metadata)


def test_parts_are_one_model(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    whole = read_gguf(write_gguf(STORY, tmp_path / "whole.gguf"))
    first = write_gguf(STORY, tmp_path / "part.gguf", split=20)
    assert read_gguf(first).tensors.keys() == whole.tensors.keys()
    second = sorted(tmp_path.glob("part-00002-*"))[0]
    with pytest.raises(GGUFError) as caught:
        read_gguf(second)
    assert caught.value.field == "split.no"
    second.unlink()
    with pytest.raises(GGUFError) as caught:
        read_gguf(first)
    assert caught.value.field == "split.count"


# --- config and tokenizer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"general.architecture": "mamba"}, "general.architecture"),
        ({"llama.block_count": 1 << 30}, "llama.block_count"),
        ({"llama.embedding_length": None}, "llama.embedding_length"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type"),
        ({"llama.attention.head_count_kv": [1, 2]}, "llama.attention.head_count_kv"),
    ],
)
def test_a_config_is_refused_by_the_field(changed: dict[str, object], named: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = read_gguf(write_gguf(STORY, tmp_path / "story.gguf"))
    metadata = {name: value for name, value in {**model.metadata, **changed}.items() if value is not None}
    with pytest.raises(GGUFError) as caught:
        config_of(GGUFModel(model.files, metadata, model.tensors))
    assert caught.value.field == named


TEXTS = [
    "Hello, world! It's 12345 o'clock.\n\n  We'll see  \tÄpfel naïve 東京 🙂🙂 don't STOP",
    "def f(x):\n    return x ** 2  # HTTPServer2\r\n", "<|im_start|>user\nhi<|im_end|>", "  leading", "",
]  # fmt: skip


@pytest.mark.parametrize(("name", "pre"), [("qwen3", "qwen2"), ("llama3_1", "llama-bpe"), ("gptoss", "gpt-4o")])
def test_tokens_are_those_of_the_models_own_tokenizer(name: str, pre: str, tmp_path: Path) -> None:
    folder = Path(f"tests/assets/tokenizer-{name}")
    own = Tokenizer.from_path(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    by_id = {index: token for token, index in own.get_vocab().items()}
    special = {token["id"]: token["special"] for token in content["added_tokens"]}
    indices = range(max(by_id) + 1)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [by_id.get(index, f"[PAD{index}]") for index in indices],
        "tokenizer.ggml.token_type": [{None: 1, True: 3, False: 4}[special.get(index)] for index in indices],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
    }
    found = _tokenizer(metadata, tmp_path)
    for each in TEXTS:
        assert found.encode(each, add_special_tokens=False) == own.encode(each, add_special_tokens=False)
        assert found.decode(found.encode(each)) == own.decode(found.encode(each))


def test_pieces_with_scores_are_merged_in_their_order(tmp_path: Path) -> None:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "ab",
        "▁ab",
        "ba",
        "▁a",
    ]
    types = [2, 3, 3, *[6] * 256, *[1] * 7]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -2.0, -1.0, -4.0, -3.0]
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ bos_token }}",
    }  # fmt: skip
    found = _tokenizer(metadata, tmp_path)
    ids = {piece: index for index, piece in enumerate(pieces)}
    assert found.encode("ab aba") == [1, ids["▁ab"], ids["▁ab"], ids["a"]]
    assert found.encode("é", add_special_tokens=False) == [ids["▁"], ids["<0xC3>"], ids["<0xA9>"]]
    assert found.decode(found.encode("ab é"), skip_special_tokens=True) == "ab é"
    assert found.chat_template == "{{ bos_token }}"


def test_an_unknown_tokenizer_is_refused_by_the_field(tmp_path: Path) -> None:
    for changed in (
        {"tokenizer.ggml.model": "t5"},
        {"tokenizer.ggml.pre": "chameleon"},
        {"tokenizer.ggml.scores": [1.0]},
    ):
        metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], **changed}
        with pytest.raises(GGUFError) as caught:
            _tokenizer(metadata, tmp_path)
        assert caught.value.field == next(iter(changed))


def _tokenizer(metadata: dict[str, object], folder: Path) -> Tokenizer:
    for name, content in tokenizer_files(GGUFModel((Path("x.gguf"),), metadata, {})).items():
        (folder / name).write_text(json.dumps(content))
    return Tokenizer.from_path(folder)


def test_rows_of_llamas_heads_are_put_in_order() -> None:
    from fleetfoot.weights.gguf_tensors import _unpaired

    weight = torch.arange(2 * 8 * 3).view(16, 3)
    assert torch.equal(_unpaired(torch.from_numpy(paired(weight.numpy(), 2).copy()), 2), weight)

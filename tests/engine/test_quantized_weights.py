"""Quantized checkpoints: files that other tools wrote, and logits beside those of these tools."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoints import QUANTIZED, QUANTIZED_TOKENS, make_checkpoint
from tests.helpers.engines import make_engine, run_requests
from tests.helpers.kernels import reference_kernels
from tests.helpers.paged_models import PagedCache, context, run

from fleetfoot import LLMEngine, SamplingParams
from fleetfoot.config.parsing import load_model_config
from fleetfoot.config.quantization import QUANTIZED_WHILE_LOADING, WeightFormat
from fleetfoot.kernels.quantized.scaled import ScaledMatrix, scaled_linear_torch
from fleetfoot.quantization.base import LinearShape
from fleetfoot.quantization.methods import linear_methods
from fleetfoot.quantization.packed import Packed, PackedWeight, ScaledInWords
from fleetfoot.quantization.scaled import Scaled, ScaledWeight
from fleetfoot.records.weights import WeightError, slices_of
from fleetfoot.weights.checksums import part_of
from fleetfoot.weights.loading import ModelLoader

FILES = sorted(path.name for path in QUANTIZED.iterdir() if path.is_dir())


def logits(folder: Path, **changes: Any) -> torch.Tensor:
    """Of QUANTIZED_TOKENS, by the references in float32."""
    config = load_model_config(folder)
    methods = linear_methods(config.quantization, has_tied_head=config.tie_word_embeddings)
    model = ModelLoader(config, context(linear_methods=methods, **changes), folder).load()
    return run(model, PagedCache(config, 4), {0: QUANTIZED_TOKENS})[0]


@pytest.mark.parametrize("name", FILES)
def test_files_of_other_tools(name: str) -> None:
    expected = load_file(QUANTIZED / name / "reference.safetensors")["logits"]
    found = logits(QUANTIZED / name)
    # where a sum is rounded differently, a value of 8 bits may be the next one
    error = (found - expected).norm() / expected.norm()
    is_exact = load_model_config(QUANTIZED / name).quantization.formats[0].activations == ""
    assert error < (1e-5 if is_exact else 5e-3)


def make(form: WeightFormat, rows: tuple[slice, ...], columns: slice, padding: int = 0) -> ScaledWeight:
    shape = LinearShape(160, (("q", 96), ("k", 40)), rows, columns, padding=padding)
    weight = Scaled(form).make_weight(shape, reference_kernels(), torch.float32, torch.device("cpu"))
    assert isinstance(weight, ScaledWeight)
    return weight


def fill(weight: ScaledWeight, tensors: dict[str, torch.Tensor]) -> ScaledMatrix:
    for spec in weight.weight_specs(""):
        whole = tensors[spec.name]
        assert spec.has_shape(tuple(whole.shape))
        destination = spec.destination()
        destination.copy_(part_of(whole, spec.part).reshape(destination.shape))
        spec.filled()
    weight.process_weights_after_loading()
    return weight._matrix


SPLITS = {
    "whole": ((slice(0, 96), slice(0, 40)), slice(0, 160), 0),
    "on borders": ((slice(32, 64), slice(32, 40)), slice(64, 160), 8),
    "within blocks": ((slice(40, 96), slice(0, 20)), slice(48, 160), 0),
    "in another order": ((slice(16, 32), slice(20, 40)), slice(80, 160), 4),
}


@pytest.mark.parametrize("block", [(0, 0), (1, 0), (32, 32), (16, 64)])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_a_rank_has_its_part(split: tuple[tuple[slice, ...], slice, int], block: tuple[int, int]) -> None:
    """q and k in one product, with scales of their own, divided on borders of blocks or within them."""
    rows, columns, padding = split
    form, generator = WeightFormat("fp8", "plain", block), torch.Generator().manual_seed(1)
    tensors, expected = {}, []
    for (name, size), part in zip((("q", 96), ("k", 40)), rows, strict=True):
        counts = [1 if each == 0 else -(-length // each) for each, length in zip(block, (size, 160), strict=True)]
        values = torch.randn(size, 160, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.rand(*counts, generator=generator) + 0.5
        tensors |= {f"{name}.weight": values, f"{name}.weight_scale": scales}
        row, column = (
            torch.arange(length) // (each or length) for each, length in zip(block, (size, 160), strict=True)
        )
        expected.append((values.float() * scales[row][:, column])[part, columns])
    whole = torch.cat([*expected, torch.zeros(padding, columns.stop - columns.start)])
    assert torch.equal(fill(make(form, rows, columns, padding), tensors).dequantized(), whole)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_weights_are_quantized_while_they_are_loaded(name: str) -> None:
    """One part after the other, to the nearest value; what is not changed later stays bit by bit."""
    plain = {f"{part}.weight": torch.randn(size, 160) for part, size in (("q", 96), ("k", 40))}
    weight = make(QUANTIZED_WHILE_LOADING[name], *SPLITS["whole"][:2])
    for spec in weight.weight_specs(""):
        spec.destination().copy_(plain[spec.name])
        assert len(weight._open) == 1
        spec.filled()
    matrix = fill(weight, plain)
    whole = torch.cat([*plain.values()])
    step = whole.abs().amax(dim=1, keepdim=True) / (14 if name == "fp8" else 127)  # the largest distance of two values
    assert ((matrix.dequantized() - whole).abs() <= step * 0.52).all()
    before = matrix.values.view(torch.uint8).clone()
    q, k = weight.weight_specs("")
    k.destination()[3] += 1.0
    _ = q.destination()
    weight.process_weights_after_loading()
    changed = (matrix.values.view(torch.uint8) != before).any(dim=1).nonzero().flatten()
    assert changed.tolist() == [99]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("activations", ["", "token", "group", "static"])
def test_inputs_are_quantized(activations: str, dtype: torch.dtype) -> None:
    """The product is that of the rounded inputs, each row alone."""
    generator = torch.Generator().manual_seed(2)
    values = (torch.randn(24, 96, generator=generator) * 20).to(dtype)
    scales = torch.rand(3, 3, generator=generator)
    matrix = ScaledMatrix(values, scales, 8, 32, activations, torch.tensor([0.01]), torch.randn(24))
    x = torch.randn(5, 96, generator=generator)
    x[:, 40] *= 30
    found = scaled_linear_torch(x, matrix)
    torch.testing.assert_close(scaled_linear_torch(x[2:3], matrix), found[2:3], rtol=1e-5, atol=1e-4)
    exact = x @ matrix.dequantized().T + matrix.bias
    error = ((found - exact).norm() / exact.norm()).item()
    limits = {"": (0.0, 1e-5), "token": (1e-3, 0.1), "group": (1e-3, 0.1), "static": (0.1, 1.0)}  # clipped at 0.01
    assert limits[activations][0] <= error < limits[activations][1]


# --- AWQ and GPTQ -----------------------------------------------------------------------------------------------------
# Decoders written from the formats' descriptions, value by value: AWQ's GEMM files (AutoAWQ, github.com/casper-hansen),
# GPTQ's (AutoGPTQ), both with 8 codes in an int32, or 4 of 8 bits.


def code(packed: torch.Tensor, row: int, column: int, place: int, bits: int = 4) -> int:
    return (int(packed[row, column]) >> (bits * place)) & ((1 << bits) - 1)


def decoded(tensors: dict[str, torch.Tensor], kind: str, group: int, bits: int) -> torch.Tensor:
    """``[out, in]``"""
    count = 32 // bits
    qweight, qzeros, scales = tensors["qweight"], tensors["qzeros"], tensors["scales"]
    num_outputs = scales.shape[1]
    num_inputs = qweight.shape[0] * (1 if kind == "awq" else count)
    weight = torch.empty(num_outputs, num_inputs)
    for k in range(num_inputs):
        of = int(tensors["g_idx"][k]) if "g_idx" in tensors else k // group
        for n in range(num_outputs):
            if kind == "awq":
                place = [0, 4, 1, 5, 2, 6, 3, 7][n % 8]
                value, zero = code(qweight, k, n // 8, place), code(qzeros, of, n // 8, place)
            else:
                value = code(qweight, k // count, n, k % count, bits)
                zero = code(qzeros, of, n // count, n % count, bits)
                zero = (zero + 1) % (1 << bits) if kind == "gptq" else zero
            weight[n, k] = (value - zero) * float(scales[of, n])
    return weight


def random_words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int64).to(torch.int32)


def file_of(
    kind: str, num_outputs: int, num_inputs: int, group: int, order: torch.Tensor | None, bits: int = 4
) -> dict[str, Any]:
    groups, count = -(-num_inputs // group), 32 // bits
    zeros = random_words(groups, num_outputs // count)
    tensors = {
        "qweight": random_words(
            *((num_inputs, num_outputs // 8) if kind == "awq" else (num_inputs // count, num_outputs))
        ),
        "qzeros": zeros if bits == 4 else zeros.fill_(0x7F7F7F7F if kind == "gptq" else -0x7F7F7F80),
        "scales": torch.rand(groups, num_outputs) + 0.5,
    }
    if kind != "awq":
        tensors["g_idx"] = (torch.arange(num_inputs) // group if order is None else order // group).to(torch.int32)
    return tensors


PARTS = (("q", 32), ("k", 16))
FOUR_BITS = {
    "whole": ((slice(0, 32), slice(0, 16)), slice(0, 96), 0),
    "on borders": ((slice(16, 32), slice(8, 16)), slice(32, 96), 8),
    "within groups": ((slice(4, 20), slice(0, 12)), slice(40, 96), 4),
    "in another order": (((slice(8, 16), slice(0, 8)), slice(0, 16)), slice(48, 64), 0),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("split", FOUR_BITS)
@pytest.mark.parametrize("kind", ["awq", "gptq", "gptq_v2", "gptq desc_act", "gptq 8", "gptq_v2 8"])
@pytest.mark.parametrize("group", [32, 0])
def test_files_of_awq_and_gptq(kind: str, split: str, group: int) -> None:
    """A rank has its part of what the formats' descriptions say, and gives it back as it came."""
    rows, columns, padding = FOUR_BITS[split]
    layout, _, variant = kind.partition(" ")
    is_ordered, bits = variant == "desc_act", 8 if variant == "8" else 4
    if is_ordered and (split != "whole" or not group):
        return
    form = WeightFormat(f"int{bits}", layout, (1, group), has_zeros=True, is_ordered=is_ordered)
    order = torch.randperm(96) if is_ordered else None
    files = {name: file_of(layout, size, 96, group or 96, order, bits) for name, size in PARTS}
    shape = LinearShape(96, PARTS, rows, columns, padding=padding)
    method = (Packed if bits == 4 else ScaledInWords)(form)
    weight = method.make_weight(shape, reference_kernels(), torch.float32, torch.device("cpu"))
    assert isinstance(weight, PackedWeight)
    for spec in weight.weight_specs(""):
        name, _, suffix = spec.name.partition(".")
        destination = spec.destination()
        destination.copy_(part_of(files[name][suffix], spec.part))
        spec.filled()
    assert not weight._open
    expected = [decoded(files[name], layout, group or 96, bits) for name, _ in PARTS]
    parts = [
        torch.cat([whole[run, columns] for run in slices_of(each)]) for whole, each in zip(expected, rows, strict=True)
    ]
    matrix = weight._matrix
    found = matrix.dequantized()
    if is_ordered:
        found = found[:, matrix.order.argsort()]
    assert torch.equal(found, torch.cat([*parts, torch.zeros(padding, columns.stop - columns.start)]))
    if split in ("whole", "on borders"):
        for spec in weight.weight_specs(""):
            name, _, suffix = spec.name.partition(".")
            assert torch.equal(spec.destination(), part_of(files[name][suffix], spec.part)), spec.name
    weight.process_weights_after_loading()
    assert torch.equal(matrix.dequantized(), weight._matrix.dequantized())


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("wrong", [-1, 3, 1])
def test_groups_that_are_not_there_or_in_another_order(is_ordered: bool, wrong: int) -> None:
    form = WeightFormat("int4", "gptq", (1, 32), has_zeros=True, is_ordered=is_ordered)
    shape = LinearShape(96, PARTS[:1], (slice(0, 32),), slice(0, 96))
    weight = Packed(form).make_weight(shape, reference_kernels(), torch.float32, torch.device("cpu"))
    files = file_of("gptq", 32, 96, 32, None)
    files["g_idx"][5] = wrong
    with pytest.raises(WeightError, match=r"q\.g_idx"):
        for spec in weight.weight_specs(""):
            spec.destination().copy_(files[spec.name.partition(".")[2]])
            spec.filled()


def test_ranks_cannot_share_inputs_in_another_order() -> None:
    form = WeightFormat("int4", "gptq", (1, 32), has_zeros=True, is_ordered=True)
    shape = LinearShape(96, PARTS, (slice(0, 32), slice(0, 16)), slice(0, 48))
    with pytest.raises(ValueError, match="q, k: the inputs 0 to 48 of a rank are those of groups in another order"):
        Packed(form).make_weight(shape, reference_kernels(), torch.float32, torch.device("cpu"))


def test_weights_of_4_bits_are_made_while_they_are_loaded() -> None:
    weight = Packed(QUANTIZED_WHILE_LOADING["int4"]).make_weight(
        LinearShape(160, PARTS, (slice(0, 32), slice(0, 16)), slice(0, 160)),
        reference_kernels(),
        torch.float32,
        torch.device("cpu"),
    )
    assert isinstance(weight, PackedWeight)
    plain = {f"{name}.weight": torch.randn(size, 160) for name, size in PARTS}
    for spec in weight.weight_specs(""):
        spec.destination().copy_(plain[spec.name])
        assert len(weight._open) == 1
        spec.filled()
    whole = torch.cat([*plain.values()])
    groups = whole.abs().split(128, dim=1)
    step = torch.cat([each.amax(dim=1, keepdim=True).expand_as(each) / 8 for each in groups], dim=1)
    error = (weight._matrix.dequantized() - whole).abs()
    assert (error <= step * 1.001).all() and (
        error <= step * 0.501
    ).float().mean() > 0.99  # the largest may be cut by a step


# --- live updates -----------------------------------------------------------------------------------------------------


UP = "model.layers.1.mlp.up_proj.weight"


def checksums_of(folder: Path, **settings: Any) -> dict[str, str]:
    engine = make_engine(folder, skip_tokenizer_init=True, dtype="float32", **settings)
    return engine.weight_checksums()


@pytest.mark.parametrize("name", ["fp8-channel-token", "fp8-block-group", "fp8-tensor-static", "int8-channel-token"])
def test_floats_for_a_quantized_matrix_are_quantized(name: str, tmp_path: Path) -> None:
    """As a whole: it is what a new start with the values and scales of the same rounding has."""
    engine = make_engine(QUANTIZED / name, skip_tokenizer_init=True, dtype="float32")
    before = engine.weight_checksums()
    new = torch.randn(160, 64)
    engine.reload_weights(weights_iterator=[(UP, new)])
    after = engine.weight_checksums()
    scale = UP.replace("weight", "weight_scale")
    assert {key for key in after if after[key] != before[key]} == {UP, scale}
    shutil.copytree(QUANTIZED / name, tmp_path / "changed")
    tensors = load_file(tmp_path / "changed" / "model.safetensors")
    rows, columns = {"block": (32, 32), "channel": (1, 64), "tensor": (160, 64)}[name.split("-")[1]]
    largest = new.abs().unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax(dim=(1, 3))  # [blocks, blocks]
    scales = largest / (448 if name.startswith("fp8") else 127.5)
    values = new / scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    is_fp8 = name.startswith("fp8")
    tensors[UP] = values.to(torch.float8_e4m3fn) if is_fp8 else values.round().clamp(-128, 127).to(torch.int8)
    tensors[scale] = scales.reshape(tensors[scale].shape)
    save_file(tensors, tmp_path / "changed" / "model.safetensors")
    assert checksums_of(tmp_path / "changed") == after


@pytest.mark.parametrize("name", ["fp8-channel-token", "fp8-block-group", "fp8-tensor-static", "int8-channel-token"])
def test_a_patch_of_floats_quantizes_whole_blocks(name: str, tmp_path: Path) -> None:
    """Others stay; and it is what a new start with the changed checkpoint has."""
    engine = make_engine(QUANTIZED / name, skip_tokenizer_init=True, dtype="float32")
    shutil.copytree(QUANTIZED / name, tmp_path / "changed")
    tensors = load_file(tmp_path / "changed" / "model.safetensors")
    scale, is_fp8 = UP.replace("weight", "weight_scale"), name.startswith("fp8")
    rows, columns = {"block": (32, 32), "channel": (1, 64), "tensor": (160, 64)}[name.split("-")[1]]
    indices, new = torch.tensor([3, 40, 64 * 70 + 1]), torch.tensor([9.0, -0.5, 0.25], dtype=torch.bfloat16)
    engine.apply_sparse_weight_patches([{"name": UP, "indices": indices, "values": new}])

    grid = tensors[scale].float().reshape(160 // rows, 64 // columns)
    expanded = grid.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    plain = tensors[UP].float() * expanded
    plain.view(-1)[indices] = new.float()
    touched = {(int(index) // 64 // rows, int(index) % 64 // columns) for index in indices}
    for row, column in touched:
        block = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
        grid[row, column] = plain[block].abs().max() / (448 if is_fp8 else 127.5)
        values = plain[block] / grid[row, column]
        stored = values.to(torch.float8_e4m3fn) if is_fp8 else values.round().clamp(-128, 127).to(torch.int8)
        tensors[UP].view(torch.uint8)[block] = stored.view(torch.uint8)
    tensors[scale] = grid.reshape(tensors[scale].shape)
    save_file(tensors, tmp_path / "changed" / "model.safetensors")
    assert checksums_of(tmp_path / "changed") == engine.weight_checksums()


def test_ranks_that_share_blocks_refuse_a_patch_of_floats() -> None:
    weight = make(WeightFormat("fp8", "plain", (32, 32)), *SPLITS["within blocks"])
    for spec in weight.weight_specs(""):
        if spec.patch_problem is not None:
            indices = torch.tensor([1])
            assert "give it whole" in spec.patch_problem(indices, torch.tensor([1.0]))
            assert not spec.patch_problem(indices, torch.tensor([1.0]).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_weights_that_were_quantized_while_loading_take_updates(quantization: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "llama")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    settings = {"quantization": quantization, "skip_tokenizer_init": True, "dtype": "float32"}
    engine = make_engine(tmp_path / "plain", **settings)
    tensors[UP] = torch.randn_like(tensors[UP])
    tensors[UP][3, 5] = 9.0  # no other value of the row is rounded to the same
    engine.reload_weights(weights_iterator=[(UP, tensors[UP])])
    row = tensors[UP][3].abs().argsort()  # the last one has the largest magnitude
    patch = {"name": UP, "indices": (row[:2] + 3 * 48).sort().values, "values": torch.tensor([0.01, -0.02])}
    if quantization == "int4":
        with pytest.raises(WeightError, match=f"{UP} .*give it whole"):
            engine.apply_sparse_weight_patches([patch])
    else:
        engine.apply_sparse_weight_patches([patch])
        tensors[UP].view(-1)[patch["indices"]] = patch["values"]
        for value in (100.0, 0.0):  # the largest one is another, or smaller
            patch = {"name": UP, "indices": row[-1:] + 3 * 48, "values": torch.tensor([value])}
            with pytest.raises(WeightError, match=f"{UP} changes the largest value of 1 rows"):
                engine.apply_sparse_weight_patches([patch])
    shutil.copytree(tmp_path / "plain", tmp_path / "changed")
    save_file(tensors, tmp_path / "changed" / "model.safetensors", metadata={"format": "pt"})
    assert checksums_of(tmp_path / "changed", quantization=quantization) == engine.weight_checksums()


def test_files_of_4_bits_take_no_floats() -> None:
    engine = make_engine(QUANTIZED / "int4-group", skip_tokenizer_init=True)
    with pytest.raises(WeightError, match=f"{UP} is unknown"):
        engine.reload_weights(weights_iterator=[(UP, torch.randn(160, 64))])


# --- engines ----------------------------------------------------------------------------------------------------------


def greedy(engine: LLMEngine) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = {str(length): (QUANTIZED_TOKENS[:length], params) for length in (1, 5, 8)}
    return [output.outputs[0].token_ids for output in run_requests(engine, prompts).values()]


@pytest.mark.parametrize("name", ["fp8-block-group", "int4-group-zeros", "mxfp4"])
def test_two_ranks_and_sleep_change_no_token(name: str) -> None:
    """Ranks have halves of blocks and groups; what sleep drops is loaded again."""
    settings = {"skip_tokenizer_init": True, "dtype": "float32", "model_runner": "v2"}
    engine = make_engine(QUANTIZED / name, enable_sleep_mode=True, **settings)
    expected, checksums = greedy(engine), engine.weight_checksums()
    engine.sleep(level=2)
    engine.wake_up()
    engine.reload_weights()
    assert greedy(engine) == expected and engine.weight_checksums() == checksums
    ranks = make_engine(QUANTIZED / name, tensor_parallel_size=2, **settings)
    assert greedy(ranks) == expected and ranks.weight_checksums() == checksums
    ranks.shutdown()


KV_SCALES = {
    "compressed-tensors": ("{}_scale", {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}),
    "of heads": ("{}_scale", {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head"}}),
    "ModelOpt": ("{}_proj.{}_scale", {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}),
    "none": ("", {}),
}


@pytest.mark.parametrize("names", KV_SCALES)
def test_kv_in_fp8(names: str, tmp_path: Path) -> None:
    """Scales of the checkpoint are loaded and used; files with scales also load where KV stays in the model's dtype."""
    template, config = KV_SCALES[names]
    shutil.copytree(QUANTIZED / "fp8-channel-token", tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["quantization_config"] |= config
    (tmp_path / "config.json").write_text(json.dumps(fields))
    tensors = load_file(tmp_path / "model.safetensors")
    scales = {
        f"model.layers.0.self_attn.{template.format(*kind * 2)}": 0.25 + (kind == "v") for kind in "kv" if template
    }
    scales_of = {
        name: torch.tensor([[[scale / 2]], [[scale]]]) if names == "of heads" else torch.tensor([scale])
        for name, scale in scales.items()
    }  # [KV heads, 1, 1] as llm-compressor writes them
    save_file(tensors | scales_of, tmp_path / "model.safetensors")
    tokens = {}
    for dtype, runner in (("auto", "v2"), ("fp8", "v1"), ("fp8", "v2"), ("fp8_e5m2", "v2")):
        engine = make_engine(
            tmp_path, model_runner=runner, kv_cache_dtype=dtype, block_size=4, skip_tokenizer_init=True
        )
        layers = engine.core.executor.runner._model.model.layers
        found = [layer.self_attn.paged.rotary.kv_scales for layer in layers.values()]
        expected = [torch.tensor([0.25, 1.25]) if template else torch.ones(2), *[torch.ones(2)] * (len(found) - 1)]
        if dtype == "auto":
            assert found == [None] * len(found)
        else:
            assert torch.equal(torch.stack(found), torch.stack(expected))
        tokens[dtype, runner] = greedy(engine)
        size = 1 if dtype != "auto" else 4
        assert engine.core.executor.layout.bytes_per_block == size * sum(
            2 * spec.num_kv_heads * spec.head_dim * 4 for spec in engine.core.executor.layout.layers
        )
        engine.shutdown()
    assert tokens["fp8", "v1"] == tokens["fp8", "v2"]

"""The cluster kernels of decoder layers: their source on a CPU against the references in torch, and shapes they fit."""

import shutil
from dataclasses import dataclass

import pytest
import torch
from tests.helpers.cuda_on_cpu import LayerBlocksOnCpu

from fleetfoot.kernels.attention.rope_and_cache import rope_and_cache_torch
from fleetfoot.kernels.elementwise import rms_norm_torch, silu_and_mul_torch, sum_parts
from fleetfoot.kernels.interface import LayerParts
from fleetfoot.kernels_hopper.cluster.layer_blocks import (
    LayerShape,
    LayerTiling,
    LayerWeights,
    StepBuffers,
    defines,
    layer_arguments,
    misfit,
    rows_of,
    shared_bytes,
)
from fleetfoot.records.forward_context import AttentionMetadata, RotaryInputs

EPS = 1e-5
BLOCK_SIZE = 16
ALL = slice(None)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@dataclass(frozen=True)
class Case:
    shape: LayerShape
    tiling: LayerTiling
    lens: tuple[int, ...]
    """With the new token; 0: a padded row."""
    has_norm: bool

    @property
    def group(self) -> int:
        return self.shape.num_heads // self.shape.num_kv_heads


CASES = {
    "one row, two clusters of a KV head": Case(
        LayerShape(256, 2, 1, 128, 128, BLOCK_SIZE), LayerTiling(1, 2, 2, 2, 4, 4096), (150,), True
    ),
    "more blocks than rows, padding": Case(
        LayerShape(256, 4, 2, 64, 256, BLOCK_SIZE), LayerTiling(2, 2, 3, 4, 4, 4096), (70, 0), False
    ),
    "more rows than blocks, the first token": Case(
        LayerShape(256, 4, 2, 64, 192, BLOCK_SIZE), LayerTiling(4, 2, 5, 2, 4, 4096), (1, 17, 33), True
    ),
}


@pytest.fixture(scope="module", params=CASES)
def compiled(request, tmp_path_factory):
    case = CASES[request.param]
    return case, LayerBlocksOnCpu(case.shape, case.tiling, tmp_path_factory.mktemp("layer_blocks"))


class Layers:
    """Two layers with random weights, and a step."""

    def __init__(self, case: Case) -> None:
        shape, generator = case.shape, torch.Generator().manual_seed(3)

        def random(*size: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(size, generator=generator) * scale).bfloat16()

        def weight(outputs: int, inputs: int) -> torch.Tensor:
            return random(outputs, inputs, scale=inputs**-0.5)

        hidden, dim, rows = shape.hidden, shape.head_dim, len(case.lens)
        num_blocks = 40
        self.x = random(rows, hidden)
        angles = torch.arange(256)[:, None] * 0.7 ** torch.arange(dim // 2)
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        self.weights, self.parts = [], []
        for index in range(2):
            norms = [1 + random(size, scale=0.3) for size in (hidden, hidden, dim, dim)]
            rotary = RotaryInputs(cos_sin, *(norms[2:] if case.has_norm else (None, None)), 1e-6)
            weights = LayerWeights(
                weight((shape.num_heads + 2 * shape.num_kv_heads) * dim, hidden),
                weight(hidden, shape.num_heads * dim),
                weight(2 * shape.intermediate, hidden),
                weight(hidden, shape.intermediate),
            )
            products = [lambda x, w=w: (x.float() @ w.float().T).bfloat16() for w in
                        (weights.qkv, weights.o, weights.gate_up, weights.down)]  # fmt: skip
            self.weights.append(weights)
            self.parts.append(LayerParts(*norms[:2], EPS, *products, shape.num_heads, index, rotary, dim**-0.5, None))
        # A layout with other data between the layers' blocks; positions that no request has are NaN.
        caches = random(num_blocks, 2, 2, shape.num_kv_heads, BLOCK_SIZE, dim)
        lens = torch.tensor(case.lens, dtype=torch.int32)
        tables = torch.randperm(num_blocks, generator=generator)[: rows * 10].view(rows, 10).int()
        for row, length in enumerate(case.lens):
            for position in range(max(length - 1, 0), 160):
                caches[tables[row, position // BLOCK_SIZE], :, :, :, position % BLOCK_SIZE] = float("nan")
        self.caches = [caches[:, index] for index in range(2)]
        positions = (lens - 1).clamp(min=0).long()
        slots = tables[torch.arange(rows), positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        slots = torch.where(lens > 0, slots, -1)
        starts = torch.arange(rows + 1, dtype=torch.int32)
        self.metadata = AttentionMetadata(starts, lens, tables, slots, positions, rows, 1, max(case.lens))


def attend(query: torch.Tensor, cache: torch.Tensor, metadata: AttentionMetadata, group: int, scale: float):
    """``query [rows, heads, dim]`` of the last positions -> ``[rows, heads * dim]``."""
    result = torch.zeros(query.shape)
    for row, length in enumerate(metadata.seq_lens.tolist()):
        if length:
            blocks = cache[metadata.block_tables[row].long()].float()  # [blocks, 2, kv_heads, block_size, dim]
            k, v = (blocks[:, side].transpose(0, 1).flatten(1, 2)[:, :length] for side in range(2))
            k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            scores = torch.einsum("hd,htd->ht", query[row].float(), k) * scale
            result[row] = torch.einsum("ht,htd->hd", scores.softmax(-1), v)
    return result.flatten(1).bfloat16()


def run_reference(case: Case, layers: Layers) -> tuple[torch.Tensor, torch.Tensor]:
    """The branch still to be added and the residual, of plain torch operations."""
    hidden, residual = None, layers.x
    for parts, cache in zip(layers.parts, layers.caches, strict=True):
        residual = residual if hidden is None else hidden + residual
        qkv = parts.qkv(rms_norm_torch(residual, parts.input_norm, EPS))
        query = rope_and_cache_torch(qkv, cache, layers.metadata, parts.num_heads, parts.rotary)
        attended = attend(query, cache, layers.metadata, case.group, parts.scale)
        residual = parts.o(attended) + residual
        hidden = parts.down(silu_and_mul_torch(parts.gate_up(rms_norm_torch(residual, parts.mlp_norm, EPS))))
    return hidden, residual


def run_kernels(case: Case, layers: Layers, kernels: LayerBlocksOnCpu, rows: slice = ALL):
    """`run_reference` by the kernels, of some of the rows."""
    given, x = layers.metadata, layers.x[rows].contiguous()
    metadata = AttentionMetadata(
        given.query_start_loc, given.seq_lens[rows], given.block_tables[rows], given.slot_mapping[rows],
        given.positions[rows], len(x), 1, given.max_seq_len,
    )  # fmt: skip
    buffers = StepBuffers(len(x), case.shape.hidden, case.tiling, x.device)
    for index, (parts, weights) in enumerate(zip(layers.parts, layers.weights, strict=True)):
        first = None if index else x
        kernels(layer_arguments(parts, weights, layers.caches[index], metadata, buffers, first))
    return buffers.partials[1], buffers.residuals[1]


@needs_compiler
@pytest.mark.kernels
def test_equals_plain_layers(compiled):
    case, kernels = compiled
    expected, layers = Layers(case), Layers(case)
    hidden, residual = run_reference(case, expected)
    partials, kernel_residual = run_kernels(case, layers, kernels)
    # Rounded at other places than the plain norms: within two steps of bfloat16.
    torch.testing.assert_close(kernel_residual.float(), residual.float(), rtol=0.02, atol=0.03)
    torch.testing.assert_close(sum_parts(partials, kernel_residual).float(), hidden.float(), rtol=0.02, atol=0.03)
    for cache, expected_cache in zip(layers.caches, expected.caches, strict=True):
        torch.testing.assert_close(cache.float(), expected_cache.float(), rtol=0.02, atol=0.03, equal_nan=True)


@needs_compiler
@pytest.mark.kernels
def test_rows_do_not_depend_on_other_rows(compiled):
    case, kernels = compiled
    whole = run_kernels(case, Layers(case), kernels)
    for row in range(len(case.lens)):
        partials, residual = run_kernels(case, Layers(case), kernels, slice(row, row + 1))
        assert torch.equal(residual, whole[1][row : row + 1])
        if case.tiling.rows == 1 or case.lens[row] < 2:
            assert torch.equal(partials, whole[0][:, row : row + 1])


QWEN3_06B = LayerShape(1024, 16, 8, 128, 3072, 16)
LLAMA_1B = LayerShape(2048, 32, 8, 64, 8192, 16)
LLAMA_8B = LayerShape(4096, 32, 8, 128, 14336, 16)


@pytest.mark.parametrize(("shape", "rows"), [(QWEN3_06B, 1), (QWEN3_06B, 8), (LLAMA_1B, 4), (LLAMA_8B, 2)])
def test_two_blocks_fit_a_multiprocessor(shape, rows):
    tiling = LayerTiling(rows)
    assert misfit(shape, tiling) is None
    attention, mlp = (each + 1024 for each in shared_bytes(tiling))
    assert attention + mlp <= 228 * 1024 < 2 * mlp
    macros = dict(defines(shape, tiling))
    assert macros["HIDDEN"] % macros["IN_COLUMNS"] == 0
    assert min(macros["ATTENTION_STAGES"], macros["MLP_STAGES"]) >= 2


@pytest.mark.parametrize(
    ("shape", "rows", "reason"),
    [
        (LayerShape(1024, 14, 2, 64, 3072, 16), 1, "14 heads are not a multiple of 16"),
        (LayerShape(1024, 16, 8, 96, 3072, 16), 1, "head_dim 96 is not 64 or 128"),
        (LayerShape(1152, 16, 8, 128, 4096, 16), 1, "hidden size 1152 is not a multiple of 512"),
        (LayerShape(1024, 16, 8, 128, 3000, 16), 1, "intermediate size 3000 is not a multiple of 32"),
        (LayerShape(1024, 16, 8, 128, 3072, 8), 1, "KV blocks of 8 positions are not a multiple of 16"),
        (LLAMA_8B, 8, "8 rows of 4096 leave no shared memory for weights"),
    ],
)
def test_misfits_are_named(shape, rows, reason):
    assert misfit(shape, LayerTiling(rows)) == reason


def test_rows_of_a_kernel():
    assert [rows_of(count) for count in (1, 2, 3, 5, 8)] == [1, 2, 4, 8, 8]

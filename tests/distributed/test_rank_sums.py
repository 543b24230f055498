"""Sums over ranks within the kernel of a linear layer, and decoders that use them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run_world, shared_memory
from tests.helpers import paged_models
from tests.helpers.checkpoints import make_checkpoint, reference_logits
from tests.helpers.interpreter import HAS_TRITON  # also the ranks' interpreter
from tests.helpers.kernels import cpu_kernels, triton_kernels
from tests.helpers.paged_models import PagedCache

from fleetfoot.config.parsing import load_model_config
from fleetfoot.distributed import peer_memory, peer_memory_words
from fleetfoot.distributed.groups import CudaTensorGroup, Groups, TensorGroup
from fleetfoot.distributed.peer_memory import PeerMemory
from fleetfoot.fusion.decoder import fuse
from fleetfoot.kernels.elementwise import rms_norm_torch
from fleetfoot.kernels.linear.linear_triton import ChainedResidual
from fleetfoot.kernels.linear.rank_sums import RANK_SUM_ROWS, RankSums
from fleetfoot.kernels.linear.tilings import Tiling
from fleetfoot.kernels.runtime.gpu_limits import GPULimits
from fleetfoot.layers.linear import RowParallelLinear
from fleetfoot.weights.loading import ModelLoader

pytestmark = pytest.mark.kernels
CPU, DTYPE = torch.device("cpu"), torch.bfloat16
WIDTH, EPS = 128, 1e-5
CALLS = ((1, 128, 64), (8, 128, 128), (3, 64, 72), (1, 128, 64), (1, 128, 64), (5, 48, 64), (8, 128, 64))
"""Rows, outputs, and inputs of each rank, staged and streamed, in tiles of 16 outputs; some leave outputs out."""
SCALE = 0.5


def values(seed: int, *shape: int) -> torch.Tensor:
    """Whole eighths, so that products and their sums are exact in float32."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).div(8).to(DTYPE)


def case(call: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The input and the weight of a rank, the residual, and the next norm's weight."""
    rows, outputs, inputs = CALLS[call]
    seed = 100 * call
    own = values(seed + rank, rows, inputs), values(seed + 10 + rank, outputs, inputs)
    return *own, values(seed + 50, rows, outputs), values(seed + 60, outputs)


def run_sums(rank: int, size: int, memory: PeerMemory) -> list[tuple[torch.Tensor, ...]]:
    custom = peer_memory.CustomAllReduce(memory, rank, size, WIDTH, DTYPE, CPU)
    found = []
    for call in range(len(CALLS)):
        x, weight, residual, norm = case(call, rank)
        deferred = ChainedResidual(weight, None, scale=SCALE).add_and_norm(x, residual, norm, EPS, custom.rank_sums)
        assert deferred is not None
        found.append((deferred.total, deferred.weighted, deferred.squares.sum(0), deferred.finished()))
        if call % 2:  # the other transport in between
            found[-1] += (custom.all_reduce(x[:, :16]),)
    return found


interpreted = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton's interpreter")
Sums = dict[int, list[tuple[torch.Tensor, ...]]]
"""By the number of ranks: the first two, or all three."""
Logits = list[tuple[list[torch.Tensor], list[int]]]


def work_of_three(rank: int, folder: Path) -> tuple[Sums, Logits]:
    sums: Sums = {}
    for size in (2, 3):
        memory = shared_memory(folder / str(size), rank, size, peer_memory_words(size, WIDTH * 2))
        if rank < size:
            sums[size] = run_sums(rank, size, memory)
    two = dist.new_group([0, 1], backend="gloo")
    return sums, run_decoders(rank, two, folder)


@pytest.fixture(scope="module")
def references(folder: Path) -> list[torch.Tensor]:
    """Logits of each model, of which this writes the checkpoint."""
    logits = []
    for name in MODELS:
        model_type, fields = paged_models.MODELS[name]
        sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
        model = make_checkpoint(folder / name, model_type, **{**fields, **sizes})
        logits.append(reference_logits(model, paged_models.prompt(sum(STEPS))))
    return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("three")


@pytest.fixture(scope="module")
def three(folder: Path, references: list[torch.Tensor]) -> list[tuple[Sums, Logits]]:
    return run_world(folder, 3, work_of_three, folder, TRITON_INTERPRET="1")


@interpreted
@pytest.mark.parametrize("size", [2, 3])
def test_linear_layers_sum_over_the_ranks(three: list[tuple[Sums, Logits]], size: int) -> None:
    by_rank = [sums[size] for sums, _ in three[:size]]
    for call, found in enumerate(zip(*by_rank, strict=True)):
        cases = [case(call, rank) for rank in range(size)]
        product = sum(x.double() @ weight.double().t() for x, weight, _, _ in cases) * SCALE
        _, _, residual, norm = cases[0]
        expected = (product.float() + residual.float()).to(DTYPE)
        for others in zip(*found, strict=True):
            assert all(torch.equal(others[0], other) for other in others)
        total, weighted, squares, finished = found[0][:4]
        # the interpreter truncates to bfloat16, twice
        torch.testing.assert_close(total, expected, rtol=2**-6, atol=2**-6)
        torch.testing.assert_close(weighted, total * norm, rtol=2**-7, atol=1e-6)
        torch.testing.assert_close(squares, total.float().square().sum(1))
        torch.testing.assert_close(finished, rms_norm_torch(total, norm, EPS), rtol=2**-5, atol=2**-6)


# --- decoders -------------------------------------------------------------------------------------------------------

MODELS = {"llama": 4, "granite": 4, "llama-biases": 0}
"""Sums within linear layers in a step of few rows. Layers with a bias have none."""
STEPS = (8, 1, 1, 10, 1)
"""Tokens of one request, one step with too many rows in between."""


def run_decoders(rank: int, two: Any, folder: Path) -> Logits:
    """Logits of each model's steps, and the rows of the sums within its linear layers, on the first two ranks."""
    sums: list[int] = []
    add_and_norm = ChainedResidual.add_and_norm

    def counted(self: Any, x: torch.Tensor, *others: Any) -> Any:
        result = add_and_norm(self, x, *others)
        if result is not None:
            assert others[-1] is not None
            sums.append(len(x))
        return result

    ChainedResidual.add_and_norm = counted  # type: ignore[method-assign]
    found = []
    for name in MODELS:
        config = load_model_config(folder / name)
        memory = shared_memory(folder / name, rank, 2, peer_memory_words(2, config.hidden_size * 2))
        if rank == 2:
            continue
        custom = peer_memory.CustomAllReduce(memory, rank, 2, config.hidden_size, DTYPE, CPU)
        group = CudaTensorGroup(two, custom)
        kernels = {"ops": triton_kernels(), "attention": cpu_kernels().attention}
        context = paged_models.context(dtype=DTYPE, groups=Groups(group), **kernels)
        model = ModelLoader(config, context, folder / name).load()
        fuse(model.model.layers, context, (True, True))
        cache = PagedCache(config.with_mixers(num_kv_heads=config.layers[0].mixer.num_kv_heads // 2), 16)
        cache.kv_caches = [kv_cache.to(DTYPE) for kv_cache in cache.kv_caches]
        tokens, begin, logits = paged_models.prompt(sum(STEPS)), 0, []
        for count in STEPS:
            logits.append(paged_models.run(model, cache, {0: tokens[begin : begin + count]})[0])
            begin += count
        found.append((logits, sums.copy()))
        sums.clear()
    return found


@interpreted
def test_decoders_sum_in_their_linear_layers(three: list[tuple[Sums, Logits]], references: list[torch.Tensor]) -> None:
    ranks = [logits for _, logits in three[:2]]
    for (name, num_sums), exact, (one, sums), (other, others_sums) in zip(
        MODELS.items(), references, *ranks, strict=True
    ):
        assert sums == others_sums == [rows for rows in STEPS if rows <= RANK_SUM_ROWS for _ in range(num_sums)], name
        assert all(torch.equal(own, others) for own, others in zip(one, other, strict=True))
        error = (torch.cat(one).float() - exact).norm() / exact.norm()
        assert error < 0.04, name


# --- what is supported ------------------------------------------------------------------------------------------------


def sums_of(width: int, num_ranks: int = 2) -> RankSums:
    zeros = torch.zeros(num_ranks, dtype=torch.int64)
    return RankSums(zeros, zeros, torch.zeros(width, dtype=torch.int32), 0)


def test_what_sums_of_ranks_support() -> None:
    assert sums_of(64, 3).num_ranks == 3
    assert sums_of(64).fits(RANK_SUM_ROWS, 64)
    assert not sums_of(64).fits(RANK_SUM_ROWS + 1, 64) and not sums_of(64).fits(1, 65)
    x, weight, residual, norm = case(1, 0)
    biased = ChainedResidual(weight, norm)
    assert biased.add_and_norm(x, residual, norm, EPS, sums_of(WIDTH)) is None
    assert ChainedResidual(weight).add_and_norm(x, residual, norm, EPS, sums_of(WIDTH // 2)) is None
    wide = values(0, 4096, 128)  # 256 programs
    arguments = x, values(0, 8, 4096), values(0, 4096), EPS
    assert ChainedResidual(wide).add_and_norm(*arguments, sums_of(4096)) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_has_the_bias_of_a_sum(rank: int) -> None:
    group = TensorGroup()
    group.rank, group.size = rank, 2
    context = paged_models.context(groups=Groups(group))
    linear = RowParallelLinear(context, "o_proj", 64, 32, True, slice(32 * rank, 32 * rank + 32))
    specs = [*linear.own_weight_specs("", "")]
    assert [spec.name for spec in specs] == ["o_proj.weight", "o_proj.bias"][: 2 - rank]
    assert linear.has_bias  # of the sum: no rank adds within the kernel of its product
    specs[0].destination().zero_()
    linear.process_own_weights()
    output = linear.partial(torch.ones(3, 32))
    assert torch.equal(output, torch.zeros(3, 32))
    if rank == 0:
        specs[1].destination().fill_(2.0)
        assert torch.equal(linear.partial(torch.ones(3, 32)), output + 2.0)


def test_programs_that_fit_at_once() -> None:
    gpu = GPULimits(num_sms=132, shared_bytes=227 * 1024, capability=(9, 0))
    streamed = Tiling("streamed", 16, 128, 1, 6)
    assert streamed.fits_at_once(4096, gpu) and not streamed.fits_at_once(8192, gpu)
    assert not Tiling("streamed", 16, 128, 1, 8).fits_at_once(4096, gpu)  # 136 KiB each
    assert Tiling("staged", 16, 128, 1, 2, 8).fits_at_once(4096, gpu)
    assert not Tiling("staged", 16, 64, 1, 2, 16).fits_at_once(4096, gpu)  # registers of 512 threads


def test_all_reduce_in_other_dtypes_has_no_sums_of_ranks() -> None:
    for dtype in (torch.float32, torch.float16):
        words = torch.zeros(peer_memory_words(2, 64 * dtype.itemsize), dtype=torch.int64)
        memory = peer_memory.PeerMemory(words, torch.zeros(2, dtype=torch.int64))
        arguments: tuple[Any, ...] = memory, 0, 2, 64, dtype, CPU
        assert peer_memory.CustomAllReduce(*arguments).rank_sums is None

"""Fused decoder layers against the plain ones that they replace, and what a fused run may and may not keep."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers import paged_models
from tests.helpers.checkpoints import make_checkpoint, reference_logits
from tests.helpers.cuda_on_cpu import LayerBlocksOnCpu
from tests.helpers.engines import make_engine
from tests.helpers.interpreter import interpreted
from tests.helpers.kernels import cpu_kernels, reference_kernels, triton_kernels
from tests.helpers.paged_models import PagedCache, assert_close, checkpoint, context, prompt, run
from tests.helpers.runner_lives import STORY
from tests.helpers.specs import model_config

from fleetfoot.config.model import BranchNorms
from fleetfoot.config.parsing import load_model_config
from fleetfoot.executor.protocol import planned_parts
from fleetfoot.fusion import LayerFusion, plan_fusion
from fleetfoot.fusion.decoder import FusedDecoder, fuse
from fleetfoot.kernels.elementwise import DeferredRMSNorm, add_rms_norm_torch
from fleetfoot.kernels.interface import Kernels, LayerParts
from fleetfoot.kernels.linear.linear import PlainLinear
from fleetfoot.kernels.linear.roles import InputRole, OutputRole
from fleetfoot.kernels.runtime.cuda_source import CudaKernel
from fleetfoot.kernels_hopper.cluster import chain, fit
from fleetfoot.kernels_hopper.cluster.layer_blocks import LayerShape, LayerTiling
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.decoder import DecoderLayer, DecoderStack, GatedMLP
from fleetfoot.models.interface import CausalLM
from fleetfoot.models.llama import LlamaForCausalLM
from fleetfoot.records.forward_context import ForwardContext, IntermediateTensors, RotaryInputs
from fleetfoot.records.kv_layout import BLOCK_CONTIGUOUS_HND, TOKEN_MAJOR_NHD
from fleetfoot.weights.loading import ModelLoader

ALL = (True, True, True)
MIXES = [ALL, (False, True, True), (True, False, True), (True, True, False), (False, True, False)]
FAMILIES = ["llama", "llama-biases", "llama-tied", "mistral-window", "qwen2-tied-window", "qwen3-layer-types"]
CASES = [(family, ALL) for family in FAMILIES]
CASES += [(family, mix) for family in ("llama-biases", "qwen3-layer-types") for mix in MIXES[1:]]
CASES += [("granite-tied-biases", ALL), ("granite-tied-biases", MIXES[2]), ("smollm3-layers", ALL), ("phi3-long", ALL)]
SANDWICHED = ["gemma2", "gemma2-bias-untied", "gemma3", "olmo2", "olmo2-bias-tied"]
CASES += [(family, mix) for family in SANDWICHED for mix in (ALL, MIXES[2])]


class ChainedTorch(PlainLinear):
    """A linear layer of a chain that reads deferred norms of few rows, and counts what it does."""

    num_added = num_deferred = num_read = 0
    most_deferred = 8

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "") -> None:
        super().__init__(weight, bias)
        self._activation = activation

    def __call__(self, x: torch.Tensor | DeferredRMSNorm) -> torch.Tensor:
        if isinstance(x, DeferredRMSNorm):
            assert self.reads_deferred_norm(len(x.weighted))
            ChainedTorch.num_read += 1
            x = x.finished()
        product, kernels = super().__call__(x), reference_kernels()
        activations = {"silu": kernels.silu_and_mul, "gelu_tanh": kernels.gelu_and_mul}
        return activations[self._activation](product) if self._activation else product

    def rotate_and_cache(self, *arguments: Any) -> None: ...

    def makes_product(self, num_rows: int) -> bool:
        return False

    def reads_deferred_sum(self, num_rows: int) -> bool:
        return False

    def reads_deferred_norm(self, num_rows: int) -> bool:
        return num_rows <= self.most_deferred


class PlainGateUp(ChainedTorch):
    most_deferred = 0


class ChainedTorchResidual(ChainedTorch):
    """Defers norms of at most 8 rows, leaves up to 16 to the norm as partial sums, and adds more rows in place."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, scale: float) -> None:
        super().__init__(weight, bias)
        self._scale = scale

    def __call__(self, x: torch.Tensor | DeferredRMSNorm) -> torch.Tensor:
        product = super().__call__(x) * self._scale
        return product if len(product) > 16 else torch.stack((product * 0.25, product * 0.75)).float()

    def add_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, rank_sums: None = None
    ) -> DeferredRMSNorm | None:
        assert rank_sums is None
        if len(x) > 8:
            return None
        ChainedTorch.num_deferred += 1
        total = residual + PlainLinear.__call__(self, x) * self._scale
        squares = torch.stack([half.sum(dim=1) for half in total.square().chunk(2, dim=1)])
        return DeferredRMSNorm(total * norm_weight, squares, total, eps)

    def add_to(self, x: torch.Tensor, residual: torch.Tensor) -> bool:
        if len(x) <= 16:
            return False
        ChainedTorch.num_added += 1
        residual.add_(PlainLinear.__call__(self, x), alpha=self._scale)
        return True


def chain_ops(gate_up: type[ChainedTorch] = ChainedTorch) -> Kernels:
    """Torch's operations with weights as they are loaded, and a chain on them."""

    def chain(weight: torch.Tensor, bias: torch.Tensor | None, role: InputRole | OutputRole) -> Any:
        if isinstance(role, OutputRole):
            return ChainedTorchResidual(weight, bias, role.scale)
        return ChainedTorch(weight, bias) if role.kind == "qkv" else gate_up(weight, bias, role.activation)

    kernels = reference_kernels()
    return replace(kernels, prepare_linear=lambda weight, bias=None: PlainLinear(weight, bias), linear_chain=chain)


OPS = {"torch": reference_kernels, "native": cpu_kernels, "chain": chain_ops}


def counts() -> tuple[int, int, int]:
    return ChainedTorch.num_added, ChainedTorch.num_deferred, ChainedTorch.num_read


def make(folder: Path, model_context: ModelContext, fused: Sequence[bool] = (), **keywords: Any) -> CausalLM:
    """The checkpoint's model. ``fused``: for each of its layers; empty: none."""
    model = ModelLoader(load_model_config(folder), model_context, folder, **keywords).load()
    if fused:
        fuse(model.model.layers, model_context, fused)
    return model


SCHEDULE: list[tuple[dict[int, int], int | None]] = [
    ({0: 20, 1: 8}, None),
    ({1: 1, 0: 13, 2: 4}, 2),
    ({0: 1, 2: 21, 3: 30}, 3),
    ({3: 3}, 0),
    ({3: 1, 0: 1, 2: 1}, None),
    ({0: 6}, 1),
    ({3: 1}, None),
]
"""Tokens of each request in a step, those of one token first, and of how many requests the last row is read; None: all
rows are."""
LARGE_STEP = {request: 60 for request in range(4, 13)}, 3
"""More tokens than pass through a layer of C together."""


def outputs(model: CausalLM, cache: PagedCache, schedule: Sequence[tuple[dict[int, int], int | None]]) -> Any:
    """The logits of each step, ``[num_tokens or num_logits, vocab_size]``."""
    tokens, begin, logits = {request: prompt(60, seed=request) for request in range(13)}, [0] * 13, []
    for counts, num_read in schedule:
        batch = {request: tokens[request][begin[request] : begin[request] + n] for request, n in counts.items()}
        input_ids, ctx = cache.step(batch)
        if num_read is not None:  # the last token of each of the first requests
            indices = (ctx.attention.query_start_loc[1 : num_read + 1] - 1).tolist()
            ctx = replace(ctx, logits=paged_models.logits_metadata(ctx.attention, indices, list(range(num_read + 1))))
        hidden = model(input_ids, ctx)
        assert isinstance(hidden, torch.Tensor)
        logits.append(model.compute_logits(hidden))
        for request, n in counts.items():
            begin[request] += n
    return logits


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Within ``tolerance`` of the largest expected value, and NaN where that is."""
    assert actual.shape == expected.shape
    assert torch.equal(actual.isnan(), expected.isnan())
    if expected.numel():
        actual, expected = actual.nan_to_num().float(), expected.nan_to_num().float()
        assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Finds the checkpoint of a case, which is written once."""

    @cache
    def write(case: str) -> Path:
        checkpoint(folder := tmp_path_factory.mktemp(case), case)
        return folder

    return write


@pytest.mark.parametrize(
    ("case", "fused", "ops"),
    [(*case, ops) for i, case in enumerate(CASES) for j, ops in enumerate(OPS) if ops == "chain" or i % 2 == j],
    ids=str,
)
def test_fused_and_plain_layers_agree(
    case: str, fused: tuple[bool, ...], ops: str, folder_of: Callable[[str], Path]
) -> None:
    folder, model_context = folder_of(case), context(ops=OPS[ops](), attention=cpu_kernels().attention)
    config = load_model_config(folder)
    plain_cache, fused_cache = PagedCache(config, 4), PagedCache(config, 4)
    expected = outputs(make(folder, model_context), plain_cache, SCHEDULE)
    actual = outputs(make(folder, model_context, fused), fused_cache, SCHEDULE)
    for (_, num_read), one, other in zip(SCHEDULE, actual, expected, strict=True):
        assert num_read is None or len(one) == num_read
        assert_near(one, other, 1e-5)
    for one, other in zip(fused_cache.kv_caches, plain_cache.kv_caches, strict=True):
        assert_near(one, other, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["llama-biases", "mistral-window", "qwen3-layer-types", "granite-tied-biases"])
def test_layers_in_one_call_have_the_bits_of_single_ones(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    if cpu_kernels().layer_chain is None:
        pytest.skip("needs the C library")
    checkpoint(tmp_path, case, head_dim=16)
    config, found = load_model_config(tmp_path), []
    for ops in (cpu_kernels(), replace(cpu_kernels(), layer_chain=None)):
        model = make(tmp_path, context(ops=ops, attention=ops.attention, dtype=dtype), ALL)
        (run,) = model.model.layers._runs
        assert (run._chain is None) == (ops.layer_chain is None or case.startswith("granite"))  # has factors
        cache = PagedCache(config, 4, num_blocks=200)
        cache.kv_caches = [each.to(dtype) for each in cache.kv_caches]
        found.append([*outputs(model, cache, [*SCHEDULE, LARGE_STEP]), *cache.kv_caches])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_layers_in_one_call_refuse_other_tensors(tmp_path: Path) -> None:
    if cpu_kernels().layer_chain is None:
        pytest.skip("needs the C library")
    checkpoint(tmp_path, "llama", head_dim=16)
    model = make(tmp_path, context(ops=cpu_kernels(), attention=cpu_kernels().attention), ALL)
    cache = PagedCache(load_model_config(tmp_path), 4)
    input_ids, ctx = cache.step({0: [1, 2, 3]})
    with pytest.raises(ValueError, match="KV caches"):
        model(input_ids, replace(ctx, kv_caches=[each.bfloat16() for each in cache.kv_caches]))
    bad = replace(ctx.attention, slot_mapping=ctx.attention.slot_mapping + 1000)
    with pytest.raises(ValueError, match="decoder_layers: the step's metadata is invalid"):
        model(input_ids, replace(ctx, attention=bad))


class LayerBlocks:
    """The kernels of `ClusterLayers` for up to 2 rows, run on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        tiling, shape = (
            LayerTiling(2, clusters=2, mlp_clusters=2, ctas=2, slot_bytes=4096),
            LayerShape(128, 2, 1, 64, 64, 16),
        )
        self.functions = LayerBlocksOnCpu(shape, tiling, folder).kernels
        self.launched: list[bool] = []
        self.is_dry, self.fits = False, True
        for name, value in (("LayerTiling", lambda rows: tiling), ("load", self.load)):
            monkeypatch.setattr(chain, name, value)
        monkeypatch.setattr(chain, "add_rms_norm_triton", add_rms_norm_torch)
        monkeypatch.setattr(fit, "MOST_ROWS", 2)

    def load(self, kernel: CudaKernel, device: torch.device) -> Any:
        function = self.functions[kernel.function == "mlp_block"]

        def launch(num_ctas: int, arguments: bytes, *, dependent: bool) -> None:
            assert function(arguments, num_ctas, kernel.shared_bytes) == 0
            self.launched.append(dependent)

        return SimpleNamespace(launch=launch, is_dry=self.is_dry, fits=self.fits)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_layers_in_two_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute decodes of few rows that are all read. Where they do not fit, and for other steps, layers run as
    without them. As near to float32 as these."""
    model_type, fields = paged_models.MODELS["qwen3"]
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    make_checkpoint(tmp_path, model_type, **{**fields, **sizes})
    blocks, config = LayerBlocks(monkeypatch, tmp_path), load_model_config(tmp_path)
    schedule: list[tuple[dict[int, int], int | None]] = [({0: 20, 1: 8}, None), ({0: 1, 1: 1}, None), ({1: 1}, None)]
    schedule += [({0: 1}, 1), ({0: 1, 1: 1, 2: 1}, None), ({0: 2}, None)]

    def run_with(dtype: torch.dtype, ops: Kernels) -> list[torch.Tensor]:
        cache = PagedCache(config, 16)
        cache.kv_caches = [each.to(dtype) for each in cache.kv_caches]
        model_context = context(ops=ops, attention=cpu_kernels().attention, dtype=dtype)
        model = make(tmp_path, model_context, (True,) * config.num_layers)
        return [logits.float() for logits in outputs(model, cache, schedule)]

    plain = replace(reference_kernels(), prepare_linear=lambda weight, bias=None: PlainLinear(weight, bias))
    chained = replace(plain, layer_chain=chain.chain_layers)
    exact, single = run_with(torch.float32, chained), run_with(torch.bfloat16, plain)
    assert blocks.launched == []
    found = run_with(torch.bfloat16, chained)
    assert blocks.launched == [False, True, True, True] * 2  # in two steps
    for one, other, expected in zip(found, single, exact, strict=True):
        assert (one - expected).norm() <= 1.2 * (other - expected).norm()
    assert not any(torch.equal(one, other) for one, other in zip(found[1:3], single[1:3], strict=True))
    blocks.launched.clear()
    with monkeypatch.context() as patch:
        patch.setattr(fit, "MOST_POSITIONS", 20)
        run_with(torch.bfloat16, chained)
    assert blocks.launched == [False, True, True, True]  # 2 requests of 21 and 9 tokens are too many, one of 10 is not
    for name, value in (("is_dry", True), ("fits", False)):
        setattr(blocks, name, value)
        for one, other in zip(run_with(torch.bfloat16, chained), single, strict=True):
            assert torch.equal(one, other)


def test_layers_that_two_kernels_do_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(128, 128, dtype=torch.bfloat16)
    linear = PlainLinear(weight)
    rotary = RotaryInputs(torch.zeros(32, 64), weight[0], weight[0], 1e-6)
    parts = LayerParts(weight[0], weight[0], 1e-6, *[linear] * 4, 2, 0, rotary, 0.125, None)
    monkeypatch.setattr(fit, "MOST_ROWS", 0)
    assert chain.chain_layers([parts]) is None  # switched off
    monkeypatch.setattr(fit, "MOST_ROWS", 2)
    assert chain.chain_layers([parts]) is not None
    for changes in (
        {"window": 8},
        {"o": PlainLinear(weight, weight[0])},
        {"down": PlainLinear(weight.float())},
        {"qkv": linear.__call__},
        {"rotary": replace(rotary, norm_offset=1.0)},
        {"rotary": replace(rotary, k_norm=None)},
    ):
        assert chain.chain_layers([parts, replace(parts, **changes)]) is None, changes


FITTING = {
    "dtype": "bfloat16", "block_size": 16, "kv_layout": BLOCK_CONTIGUOUS_HND, "num_ranks": 1, "is_hopper": True,
    "num_sms": 132, "has_nvrtc": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "facts", "expected"),
    [
        ({}, {}, (4, "")),
        ({"hidden_size": 2560}, {}, (2, "")),
        (
            {},
            {"is_hopper": False, "num_sms": 108, "has_nvrtc": False},
            (0, "the GPU is not a Hopper, NVRTC, which compiles them, is "),
        ),
        ({}, {"num_sms": 114}, (0, "the GPU has 114 multiprocessors for their 128 thread blocks")),
        ({}, {"num_sms": 78, "num_ranks": 2}, (0, "the GPU has 78 multiprocessors for their 128 thread blocks, there")),
        (
            {"hidden_size": 16384},
            {"dtype": "float32", "num_ranks": 2},
            (0, "the dtype is float32, there are 2 ranks, the hi"),
        ),
        ({"qkv_bias": True, "layer_windows": (None, 8)}, {}, (0, "biases, windows")),
        ({"num_kv_heads": 4}, {}, (2, "")),
        ({}, {"kv_layout": TOKEN_MAJOR_NHD}, (0, "the KV layout is token-major-nhd")),
        ({"norm_offset": 1.0, "soft_cap": 9.0}, {}, (0, "norm weights around 1, a soft cap of scores")),
        ({"activation": "gelu_tanh"}, {}, (0, "an MLP other than SwiGLU")),
        ({"mlp_norms": BranchNorms(after=True)}, {}, (0, "norms elsewhere than before attention and MLP")),
        ({"num_heads": 14, "num_kv_heads": 2}, {}, (0, "14 heads are not a multiple of 16")),
        ({}, {"block_size": 8}, (0, "KV blocks of 8 positions")),
    ],
)
def test_models_with_layers_in_two_kernels(
    model: dict[str, Any], facts: dict[str, Any], expected: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_layers": 2, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "hidden_size": 1024}
    fields: dict[str, Any] = {**sizes, "intermediate_size": 3072, "vocab_size": 9, "max_position_embeddings": 64}
    config = model_config("Qwen3ForCausalLM", **{**fields, **model})
    monkeypatch.setattr(fit, "MOST_ROWS", 0)
    assert fit.plan_layer_chain(config, **FITTING) == fit.NO_LAYER_CHAIN  # switched off
    monkeypatch.setattr(fit, "MOST_ROWS", 4)
    monkeypatch.setattr(fit, "MOST_HIDDEN", 4096)
    plan = fit.plan_layer_chain(config, **{**FITTING, **facts})
    assert (plan.max_rows, plan.reason[: len(expected[1])]) == expected
    assert bool(plan.reason) == (plan.max_rows == 0)


@interpreted
@pytest.mark.parametrize(
    ("case", "fused", "expected_rows"),  # after attention and MLPs; at the end of a run only the sum is read
    [
        # in the last step, only the last layer has few rows: those that are read
        ("llama-biases", (True, True), [8] * 4 + [2] * 6),
        ("qwen3", (True, False, True), [8] * 4 + [2] * 6),
        ("granite", (True, True), [8] * 4 + [2] * 6),
        ("gemma2", (True, True), [2, 2, 2, 2]),  # sums, of one or two rows; a kernel makes the last one
        ("gemma3", (True, True), [2, 2, 2, 2]),
        ("olmo2", (True, True), []),
    ],
)
def test_the_triton_chain_in_bfloat16(
    case: str, fused: tuple[bool, ...], expected_rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows, so that norms are deferred, and tiles of 16 rows. Fused layers are as near to float32 as plain ones."""
    from fleetfoot.kernels.linear.linear_triton import ChainedResidual

    model_type, fields = paged_models.MODELS[case]
    fields = {**fields, "num_hidden_layers": len(fused), "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    make_checkpoint(tmp_path, model_type, **fields)
    deferred: list[int] = []

    def counted(method: Any) -> Any:
        def call(self: Any, x: torch.Tensor, *others: Any) -> Any:
            result = method(self, x, *others)
            deferred.extend([len(x)] * (result is not None))
            return result

        return call

    for method in (ChainedResidual.add_and_norm, ChainedResidual.with_squares):
        monkeypatch.setattr(ChainedResidual, method.__name__, counted(method))
    schedule: list[tuple[dict[int, int], int | None]] = [({0: 5, 1: 3}, None), ({0: 1, 1: 1}, None), ({1: 4, 2: 16}, 2)]
    config = load_model_config(tmp_path)
    expected = outputs(make(tmp_path, context()), PagedCache(config, 16), schedule)
    found = {}
    for name, mask in (("plain", ()), ("fused", fused)):
        model_context = context(ops=triton_kernels(), attention=cpu_kernels().attention, dtype=torch.bfloat16)
        cache = PagedCache(config, 16)
        cache.kv_caches = [kv_cache.to(torch.bfloat16) for kv_cache in cache.kv_caches]
        found[name] = outputs(make(tmp_path, model_context, mask), cache, schedule)
        assert deferred == (expected_rows if name == "fused" else [])
    for plain, actual, exact in zip(found["plain"], found["fused"], expected, strict=True):
        plain_error, error = ((each.float() - exact).norm() / exact.norm() for each in (plain, actual))
        assert plain_error < 0.03 and error < max(1.5 * plain_error, 0.01)


@pytest.mark.parametrize("case", ["llama-biases", "qwen3", "granite"])
@pytest.mark.parametrize("ends", [(20, 32, 60), (20, 24, 25, 40)], ids=str)
@pytest.mark.parametrize("gate_up", [ChainedTorch, PlainGateUp])
def test_residual_sums_within_a_chain(case: str, ends: Any, gate_up: type[ChainedTorch], tmp_path: Path) -> None:
    """Chunks of more than 16 tokens are added in place, and few tokens' norms deferred; the others are partial sums."""
    reference = checkpoint(tmp_path, case)
    config, model_context = load_model_config(tmp_path), context(ops=chain_ops(gate_up))
    tokens, sizes = prompt(ends[-1]), [end - begin for begin, end in pairwise((0, *ends))]
    expected = reference_logits(reference, tokens)
    model, cache = make(tmp_path, model_context, ALL), PagedCache(config, 16)
    before = counts()
    logits = [run(model, cache, {0: tokens[end - size : end]})[0] for end, size in zip(ends, sizes, strict=True)]
    # Norms are deferred behind each layer but the last, and between attention and MLP if that reads it. At the end of
    # the run the sum alone is read.
    num_added, num_few = sum(size > 16 for size in sizes), sum(size <= 8 for size in sizes)
    num_read = num_few * (config.num_layers - 1 + (config.num_layers if gate_up is ChainedTorch else 0))
    changes = [after - was for after, was in zip(counts(), before, strict=True)]
    assert changes == [2 * num_added * config.num_layers, num_read + num_few, num_read]
    assert_close(torch.cat(logits), expected)
    for length in (7, len(tokens)):
        assert_close(run_in_parts(tmp_path, model_context, tokens[:length]), expected[:length])


def run_in_parts(folder: Path, model_context: ModelContext, tokens: list[int]) -> torch.Tensor:
    """Logits of a fused model in two parts; between them is the residual stream of the plain one."""
    config = load_model_config(folder)
    (input_ids, ctx), plain_cache = (cache := PagedCache(config, 16)).step({0: tokens}), PagedCache(config, 16)
    parts = [range(1), range(1, config.num_layers)]
    first, last = (make(folder, model_context, [True] * len(part), layers=part) for part in parts)
    between = first(input_ids, replace(ctx, kv_caches=cache.kv_caches[:1]))
    plain = make(folder, model_context, layers=parts[0])(
        input_ids, ForwardContext(plain_cache.step({0: tokens})[1].attention, plain_cache.kv_caches[:1])
    )
    assert isinstance(between, IntermediateTensors) and isinstance(plain, IntermediateTensors)
    assert_near(between.hidden_states, plain.hidden_states, 1e-5)
    hidden = last(input_ids, replace(ctx, kv_caches=cache.kv_caches[1:]), between)
    assert isinstance(hidden, torch.Tensor)
    return last.compute_logits(hidden)


class DoubledMLP(GatedMLP):
    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return 2 * super().forward(x, ctx)


class DoubledLayer(DecoderLayer):
    mlp_class = DoubledMLP


class HastyLayer(DecoderLayer):
    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return x


def test_a_module_with_a_forward_of_its_own_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a run, where its branch has no other parts. A layer cannot be in a run then."""
    checkpoint(tmp_path, "gemma3")
    monkeypatch.setattr(LlamaForCausalLM, "layer_class", DoubledLayer)
    config, model_context = load_model_config(tmp_path), context(ops=chain_ops())
    plain, fused = (make(tmp_path, model_context, mask) for mask in ((), ALL))
    assert isinstance(fused.model.layers._runs[0], FusedDecoder)
    for one, other in zip(*(outputs(each, PagedCache(config, 4), SCHEDULE) for each in (plain, fused)), strict=True):
        assert_near(one, other, 1e-5)
    monkeypatch.setattr(LlamaForCausalLM, "layer_class", HastyLayer)
    with pytest.raises(TypeError, match="HastyLayer"):
        make(tmp_path, model_context, ALL)


def kinds(stack: DecoderStack) -> list[Any]:
    """Of each run: the numbers of its layers on the rank, in a list for a fused one."""
    layers = list(stack.values())
    return [
        [layers.index(layer) for layer in decoder.layers]
        if isinstance(decoder, FusedDecoder)
        else layers.index(decoder)
        for decoder in stack._runs
    ]


@pytest.mark.parametrize(
    ("runner", "plain", "built"),
    [
        ("v1", (), list(range(8))),
        ("v2", (), [list(range(8))]),
        ("v2", (2,), [[0, 1], 2, [3, 4, 5, 6, 7]]),
        ("v2", (0, 7), [0, [1, 2, 3, 4, 5, 6], 7]),
    ],
)
def test_workers_fuse_the_layers_that_the_plan_names(
    runner: str, plain: tuple[int, ...], built: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan_some(config: Any, runner: str) -> tuple[LayerFusion, ...]:
        planned = enumerate(plan_fusion(config, runner))
        return tuple(LayerFusion(False, "a test") if layer in plain else fusion for layer, fusion in planned)

    monkeypatch.setattr("fleetfoot.plan.resolve.plan_fusion", plan_some)
    eagle = {"method": "eagle", "num_speculative_tokens": 2}
    engine = make_engine(STORY, model_runner=runner, speculative_config=eagle)
    worker = engine.core.executor
    assert kinds(worker.runner._model.model.layers) == built
    fused = [layer for run in built if isinstance(run, list) for layer in run]
    build = worker.parts()  # type: ignore[attr-defined]
    assert list(build["fused_layers"]) == fused
    assert build["fused_drafter_layers"] == ((0,) if runner == "v2" and 0 not in plain else ())
    assert build == planned_parts(engine.plan, 0)
    for layer, fusion in enumerate(engine.plan.fusion):
        assert fusion.is_fused == (layer in fused)
        assert runner == "v2" or fusion.reason == "Model Runner V1 runs plain layers"
    engine.shutdown()

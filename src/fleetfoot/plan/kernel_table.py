"""Which kernel computes each matrix and attention, for every number of rows.

Kernels are chosen at each call, by the functions that are asked here in the order of `ChainedLinear`, of a fused layer
and of `TritonBackend`; a test compares the table with what those launch. The modules of the attention kernels import
torch and Triton, and so does this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from fleetfoot.config.model import DTYPE_BYTES, BranchNorms, LayerSpec
from fleetfoot.kernels.attention import AttentionInputs, decode_hopper, max_rows, prefill_hopper, triton_supports
from fleetfoot.kernels.attention.decode import MIN_ROWS, choose_decode_tiling
from fleetfoot.kernels.attention.prefill import choose_prefill_tiling
from fleetfoot.kernels.attention.triton_backend import (
    FUSED_HEAD_DIM,
    FUSED_PAIRS_PER_SM,
    HOPPER_FUSED_PAIRS_PER_SM,
    HOPPER_FUSED_REQUESTS,
    MAX_FUSED_QUERY_LEN,
    prompt_bucket,
)
from fleetfoot.kernels.experts.experts import ExpertSizes
from fleetfoot.kernels.experts.experts_triton import choose_few_tiling, choose_group_tiling, padded_few_rows
from fleetfoot.kernels.experts.routing_triton import FEW_ROWS
from fleetfoot.kernels.linear.product_tilings import (
    CHUNK,
    GatedTiling,
    ProductKind,
    ProductTiling,
    gated_tilings,
    product_tiling,
)
from fleetfoot.kernels.linear.tilings import MOST_SUMMED_ROWS, Tiling, choose_tiling
from fleetfoot.kernels.quantized.packed_triton import has_hopper_groups, packed_tiling
from fleetfoot.kernels.quantized.scaled_triton import FEW_ROWS as FEW_QUANTIZED_ROWS
from fleetfoot.kernels.quantized.scaled_triton import scaled_tiling
from fleetfoot.kernels.runtime.gpu_limits import GPULimits
from fleetfoot.kernels.runtime.triton_support import next_power_of_2
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.quantization.base import LinearMethod
from fleetfoot.quantization.experts import QuantizedExpertMethod
from fleetfoot.quantization.packed import Packed
from fleetfoot.quantization.scaled import Scaled
from fleetfoot.quantization.unquantized import UNQUANTIZED
from fleetfoot.records.kv_layout import KVLayout

_HOPPER_BYTES = 232448
"""Maximum shared memory of a thread block on Hopper."""
_LIBRARY = "library"
KernelTable = dict[str, list[tuple[int, int, str]]]
"""Operation -> its kernels: first and last number of rows, tokens or requests, and the kernel with its tiling."""


def kernel_table(plan: EnginePlan) -> KernelTable:
    """The kernels of a plan for one Hopper GPU, once they are compiled.

    Raises:
        ValueError: the plan is for another device, or for several ranks.
    """
    machine, model = plan.machine, plan.model
    if plan.device != "cuda" or not machine.is_hopper or plan.kernels["prepare_linear"] != "triton":
        raise ValueError(
            f"the table of kernels is that of the Triton kernels on a Hopper GPU, and the plan is for "
            f"{plan.device} ({machine.gpu_name}) with kernels of {plan.kernels['prepare_linear']} for linear layers; "
            "name a GPU, as by --gpu-name 'NVIDIA H100', or leave --kernels out"
        )
    if plan.config.world_size > 1:
        raise ValueError(
            f"the table of kernels is that of one rank, and the plan has {plan.config.world_size}; leave --kernels out"
        )
    limits = GPULimits(machine.num_sms, _HOPPER_BYTES, (9, 0))
    table: KernelTable = {}
    if plan.layer_chain.max_rows:
        table["whole layers, by requests"] = [*_chain_runs(plan)]
    kinds: dict[tuple[LayerSpec, bool], list[int]] = {}  # rotation and window select no other kernel
    for index, (spec, fusion) in enumerate(zip(model.layers, plan.fusion, strict=True)):
        if spec.attention is None:
            continue  # its kernels do not depend on the number of rows
        key = replace(spec, mixer=replace(spec.mixer, rope=None, window=None)), fusion.is_fused
        kinds.setdefault(key, []).append(index)
    rows, requests = plan.max_num_batched_tokens, plan.config.max_num_seqs
    for (spec, is_fused), layers in kinds.items():
        is_fused = is_fused and not spec.mixer.has_output_gate  # it offers nothing to the run
        is_chained = is_fused and not plan.model.quantization.method and plan.config.quantization is None
        layer = (_FusedLayer if is_chained else _PlainLayer)(plan, layers[0], limits)
        where = "" if len(kinds) == 1 else f" of layers {_ranges(layers)}"
        for name, (most, choose) in layer.operations(rows, requests).items():
            table[name.format(where)] = [*_runs(map(choose, range(1, most + 1)))]
    head = _Matrix(None, model.vocab_size, model.hidden_size, False, plan.dtype, limits, method=_head_method(plan))
    table[f"head {head.name}, by logits"] = [*_runs(map(head.alone, range(1, rows + 1)))]
    return table


def _head_method(plan: EnginePlan) -> LinearMethod:
    is_tied = plan.model.tie_word_embeddings
    return UNQUANTIZED.default if is_tied else plan.linear_methods.of(["lm_head"])


def _runs(choices: Iterable[str]) -> Iterator[tuple[int, int, str]]:
    first, before, last = 1, "", 0
    for last, choice in enumerate(choices, 1):
        if choice != before and last > 1:
            yield first, last - 1, before
            first = last
        before = choice
    yield first, last, before


def _ranges(layers: list[int]) -> str:
    ends = [index for index in layers if index + 1 not in layers]
    starts = [index for index in layers if index - 1 not in layers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _chain_runs(plan: EnginePlan) -> Iterator[tuple[int, int, str]]:
    first = 1
    for rows, context in plan.layer_chain.max_contexts:
        yield first, rows, f"attention_block + mlp_block rows={rows}, contexts up to {context}"
        first = rows + 1


@dataclass(eq=False)
class _Matrix:
    """A weight, and how `fleetfoot.kernels.linear.linear_triton` chooses its kernels. ``kind``: in a chain; None: it is
    alone."""

    kind: ProductKind | None
    num_rows: int
    """Rows of the weight."""
    num_inputs: int
    has_bias: bool
    dtype: str
    limits: GPULimits
    scale: float = 1.0
    head_dim: int = 0
    activation: str = "silu"
    """Activation of kind ``gated``."""
    method: LinearMethod = UNQUANTIZED.default

    def __post_init__(self) -> None:
        self.tiling, self.product = cache(self._tiling), cache(self._product)  # each is asked several times

    @property
    def name(self) -> str:
        return f"[{self.num_rows}, {self.num_inputs}]"

    @property
    def num_outputs(self) -> int:
        return self.num_rows // (2 if self.kind == "gated" else 1)

    def _tiling(self, rows: int) -> Tiling | None:
        """`TritonLinear` and the choice without norms."""
        if self.dtype not in ("bfloat16", "float16"):
            return None
        gated, may_split = self.kind == "gated", self.kind == "residual"
        hopper = not self.has_bias and self.scale == 1 and not (gated and self.activation != "silu")
        sizes = rows, self.num_outputs, self.num_inputs
        return choose_tiling(*sizes, gated=gated, may_split=may_split, limits=self.limits, hopper=hopper)

    def _product(self, rows: int) -> ProductTiling | GatedTiling | None:
        """The choice with norms on both sides."""
        if self.kind is None or self.dtype != "bfloat16" or self.scale != 1.0 or self.activation != "silu":
            return None
        if (self.has_bias and self.kind != "qkv") or (self.kind == "qkv" and self.head_dim not in (64, 128)):
            return None
        return product_tiling(rows, self.kind, self.num_rows, self.num_inputs, self.limits.num_sms)

    def reads_norm(self, rows: int) -> bool:
        tiling = self.tiling(rows)
        has_norms = (tiling is not None and tiling.supports_norms) or self.product(rows) is not None
        return has_norms and self.dtype == "bfloat16"

    def makes_norm(self, rows: int, is_read: bool) -> bool:
        """Whether the residual sum and the next norm are part of the product."""
        return is_read and self.reads_norm(rows)

    def has_sums(self, rows: int) -> bool:
        """Whether the product makes the squares of its output, or reads a deferred sum."""
        tiling = self.tiling(rows)
        is_few = rows <= MOST_SUMMED_ROWS and tiling is not None and tiling.supports_norms
        return is_few and self.kind is not None and self.dtype == "bfloat16"

    def alone(self, rows: int) -> str:
        """The kernel without norms before or after it."""
        sizes = rows, self.num_rows, self.num_inputs
        if isinstance(self.method, Scaled):
            block = self.method.form.block[1] or self.num_inputs
            return f"quantize_rows, {scaled_tiling(*sizes, block, self.limits.num_sms)}"
        if isinstance(self.method, Packed):
            hopper = has_hopper_groups(self.method.form.block[1] or self.num_inputs, self.num_inputs)
            num_outputs = (
                self.num_outputs if rows <= FEW_QUANTIZED_ROWS else self.num_rows
            )  # more rows: a product, then the gate
            return str(packed_tiling(rows, num_outputs, self.num_inputs, self.limits.num_sms, hopper=hopper))
        tiling = self.tiling(rows)
        return _LIBRARY if tiling is None else self._text(tiling)

    def with_norms(self, rows: int) -> str:
        """The kernel that makes a deferred norm, or reads one."""
        product = self.product(rows)
        if product is not None:
            return self._text(product)
        return f"{self.alone(rows)} {'with the next norm' if self.kind == 'residual' else 'after a norm'}"

    def gate_up(self, rows: int, follows: bool) -> str:
        if follows:
            return self.with_norms(rows)
        if not self.has_bias and self.dtype == "bfloat16":
            for wide in gated_tilings(rows, self.num_rows, self.num_inputs, self.limits.num_sms):
                return self._text(wide)
        if self.tiling(rows) is not None:
            return self.alone(rows)
        return f"{_LIBRARY}, {self.activation.removesuffix('_tanh')}_and_mul"

    def _text(self, tiling: Tiling | ProductTiling | GatedTiling) -> str:
        return tiling_text(tiling, self.num_inputs, self.head_dim if self.kind == "qkv" else 0)


def tiling_text(tiling: Tiling | ProductTiling | GatedTiling, num_inputs: int, head_dim: int = 0) -> str:
    """The kernel and its options, with the size of a tile: rows of the weight, inputs, rows of the input. ``head_dim``:
    of the heads that the kernel rotates."""
    if isinstance(tiling, GatedTiling):
        return f"gated_product {tiling.outputs}x{CHUNK}x{tiling.rows} stages={tiling.stages}"
    if isinstance(tiling, ProductTiling):
        options = {"stages": tiling.stages(num_inputs, head_dim), "splits": tiling.splits, "peers": tiling.peers}
        beside = " beside attention" if tiling.beside_attention else ""
        return f"decode_product {tiling.outputs}x{CHUNK}x{tiling.rows}{options_text(options)}{beside}"
    is_hopper = tiling.kernel == "hopper"
    name = "tiled_hopper" if is_hopper else tiling.kernel
    options = {"stages": tiling.stages, "warps": 1 if is_hopper else tiling.num_warps, "splits": tiling.splits}
    return f"{name} {tiling.outputs}x{tiling.inputs}x{tiling.row_tile}{options_text(options)}"


def options_text(options: dict[str, int]) -> str:
    """Those that are not 1."""
    return "".join(f" {name}={value}" for name, value in options.items() if value != 1)


Operations = dict[str, tuple[int, Callable[[int], str]]]
"""Operation, with a place for its layers -> the largest number, and the kernel for a number."""


class _PlainLayer:
    """Products, norms and attention one by one."""

    def __init__(self, plan: EnginePlan, index: int, limits: GPULimits) -> None:
        spec = plan.model.layers[index]
        self._plan, self._mixer, self._limits, self._index = plan, spec.mixer, limits, index
        layout = KVLayout.of(
            plan.model,
            2,
            plan.config.block_size,
            plan.dtype,
            name=plan.kv_layout,
            groups=plan.memory.groups,
            kv_dtype=plan.kv_dtype,
        ).with_layers(plan.drafter.kv_specs)
        self._empty = partial(torch.empty, dtype=getattr(torch, plan.dtype), device="meta")
        kv_cache = partial(torch.empty, dtype=getattr(torch, plan.kv_dtype), device="meta")
        self._kv_cache = layout.layer_views([*map(kv_cache, layout.tensor_shapes)])[index]
        kinds: tuple[ProductKind, ...] = ("qkv", "residual", "gated", "residual")
        linears = spec.linears(plan.model.hidden_size)
        matrices = (
            _Matrix(
                kind, rows, inputs, has_bias, plan.dtype, limits,
                scale=spec.residual_multiplier if kind == "residual" else 1.0,
                head_dim=0 if plan.model.norm_offset else spec.mixer.head_dim,
                activation=spec.mlp.activation if kind == "gated" else "silu",
                method=plan.linear_methods.of(f"model.layers.{index}.{part}" for part in parts),
            )
            for kind, (parts, rows, inputs, has_bias) in zip(kinds, linears, strict=False)
        )  # fmt: skip
        self.qkv, self.o, *mlp = matrices
        if spec.experts is None:
            self.gate_up, self.down = mlp
        self._spec = spec

    def operations(self, rows: int, requests: int) -> Operations:
        matrices = {"qkv": self.qkv, "o": self.o}
        if self._spec.experts is None:
            matrices |= {"gate_up": self.gate_up, "down": self.down}
        alone = {name: replace(matrix, kind=None, scale=1.0) for name, matrix in matrices.items()}
        products = {f"{name} {matrix.name}{{}}, by rows": (rows, matrix.alone) for name, matrix in alone.items()}
        return {**products, **self._of_experts(rows), **self._attention(rows, requests)}

    def _of_experts(self, rows: int) -> Operations:
        """Products of a mixture of experts in place of the MLP: the products of experts, and those of the MLP for all
        tokens."""
        spec, plan = self._spec, self._plan
        if spec.experts is None:
            return {}
        shared = (
            _Matrix(None, num_rows, inputs, has_bias, plan.dtype, self._limits)
            for _, num_rows, inputs, has_bias in spec.linears(plan.model.hidden_size)[3:]
        )
        experts, hidden = spec.experts, plan.model.hidden_size
        split = plan.config.expert_split
        held = experts.num_experts if split is None else split.most_slots(experts.num_experts)
        name = f"{held} experts [{2 * experts.intermediate_size}, {hidden}]{{}}, by rows"
        return {name: (rows, self._experts), **{f"shared {m.name}{{}}, by rows": (rows, m.alone) for m in shared}}

    def _experts(self, rows: int) -> str:
        """The products of experts, with the size of a tile of the first one: outputs, inputs, rows."""
        spec, plan, shared = self._spec.experts, self._plan, self._limits.shared_bytes
        assert spec is not None
        if plan.kernels["experts"] != "triton":
            return plan.kernels["experts"]
        element_size = DTYPE_BYTES[plan.dtype]
        method = plan.linear_methods.of_experts(f"model.layers.{self._index}.mlp.experts")
        form = "plain"
        if isinstance(method, QuantizedExpertMethod):
            form = "scaled" if method.form.has_8_bits else "packed"
        if rows <= FEW_ROWS:
            first, second = (
                choose_few_tiling(rows, form, element_size, shared, is_down=down) for down in (False, True)
            )
            tile = f"{first.outputs}x{first.inputs * first.slices}x{padded_few_rows(rows, form)}"
            return f"few {tile} stages={first.num_stages}, {second.num_stages}"
        split = plan.config.expert_split
        held = spec.num_experts if split is None else split.most_slots(spec.num_experts)
        sizes = ExpertSizes(held, plan.model.hidden_size, spec.intermediate_size)
        tiling = choose_group_tiling(rows * spec.num_chosen, sizes, form, element_size, shared)
        options = {"stages": tiling.num_stages, "warps": tiling.num_warps, "down": tiling.down_outputs}
        return f"grouped {tiling.outputs}x{tiling.inputs}x{tiling.rows}{options_text(options)}"

    def _attention(self, rows: int, requests: int) -> Operations:
        drafts = self._plan.capture_table.num_drafts
        of_drafts = {"attention{}, by requests with drafts": (requests, partial(self.decode, 1 + drafts))}
        return {
            "attention{}, by requests of a decode": (requests, partial(self.decode, 1)),
            **(of_drafts if drafts else {}),
            "attention{}, by tokens of a prompt": (rows, self.prompt),
            "attention{}, by decodes beside prompts": (requests, partial(self.cached, 1)),
        }

    def decode(self, query_len: int, requests: int) -> str:
        """Attention of requests with as many query tokens each, with what rotates and caches heads."""
        return f"rope_and_cache, {self.cached(query_len, requests)}"

    def prompt(self, num_tokens: int) -> str:
        """Attention of a prompt, with what rotates and caches heads."""
        query_len = prompt_bucket(num_tokens, self._inputs(1, 1).group, self._mixer.head_dim)
        return f"{'' if self._rotates(num_tokens) else 'rope_and_cache, '}{self.cached(query_len, 1)}"

    def _rotates(self, rows: int) -> bool:
        """Whether the product of q, k and v rotates and caches heads, in all layers but the first."""
        return False

    def cached(self, query_len: int, requests: int) -> str:
        """Attention alone."""
        inputs = self._inputs(query_len, requests)
        rows = query_len * inputs.group
        if self._plan.kernels["attention"] != "triton" or not triton_supports(self._mixer.head_dim, inputs.group):
            return "sdpa"
        if rows > max_rows(self._mixer.head_dim):
            return self._prefill(inputs)
        if decode_hopper.supports(inputs):
            return f"decode_hopper rows={max(8, next_power_of_2(rows))}"
        return self._decode_text(rows)

    def _prefill(self, inputs: AttentionInputs) -> str:
        if prefill_hopper.supports(inputs):
            return "prefill_hopper"
        sizes = inputs.group, max(16, next_power_of_2(self._mixer.head_dim)), inputs.query.element_size()
        tiling = choose_prefill_tiling(*sizes, self._limits.shared_bytes)
        options = {"stages": tiling.num_stages, "warps": tiling.num_warps}
        return f"prefill {tiling.tile}x{tiling.rows}{options_text(options)}"

    def _decode_text(self, rows: int, *, is_fused: bool = False) -> str:
        dtype = getattr(torch, self._plan.dtype)
        sizes = max(MIN_ROWS, next_power_of_2(rows)), max(16, next_power_of_2(self._mixer.head_dim)), dtype.itemsize
        tiling = choose_decode_tiling(*sizes, self._limits.shared_bytes, is_fused=is_fused)
        options = {"stages": tiling.num_stages, "warps": tiling.num_warps, "programs": tiling.programs_per_sm}
        return f"decode {tiling.tile}x{sizes[0]}{options_text(options)}"

    def _inputs(self, query_len: int, requests: int) -> AttentionInputs:
        mixer, lens = self._mixer, self._empty(requests)
        query = self._empty(1, mixer.num_heads, mixer.head_dim)
        sinks = lens if mixer.has_sinks else None
        shape = mixer.window, query_len, mixer.soft_cap, sinks
        return AttentionInputs(query, self._kv_cache, lens, lens, lens, 1.0, *shape)


class _FusedLayer(_PlainLayer):
    """A layer in a run of layers of its kind."""

    def operations(self, rows: int, requests: int) -> Operations:
        qkv, o = self.qkv, self.o
        if self._spec.experts is not None:
            of_attention: Operations = {
                f"qkv {qkv.name}{{}}, by rows": (rows, qkv.alone),
                f"o {o.name}{{}}, by rows": (rows, self._before_experts),
            }
            return {**of_attention, **self._of_experts(rows), **self._attention(rows, requests)}
        gate_up, down = self.gate_up, self.down
        matrices: tuple[tuple[str, _Matrix, Callable[[int], str]], ...] = (
            ("qkv of the first layer", qkv, qkv.alone),
            ("qkv of others", qkv, self._qkv),
            ("o", o, lambda n: self._residual(o, n, gate_up)),
            ("gate_up", gate_up, self._gate_up),
            ("down", down, lambda n: self._residual(down, n, qkv)),
            ("down of the last layer", down, lambda n: self._residual(down, n, None)),
        )
        products = {f"{name} {matrix.name}{{}}, by rows": (rows, choose) for name, matrix, choose in matrices}
        return {**products, **self._attention(rows, requests)}

    def _norms(self, matrix: _Matrix) -> BranchNorms:
        """Those of the branch that begins or ends with a matrix."""
        return self._spec.mixer_norms if matrix in (self.qkv, self.o) else self._spec.mlp_norms

    def _is_deferred(self, matrix: _Matrix, rows: int, reader: _Matrix | None) -> bool:
        """Whether the next norm is part of the product. ``reader``: of that norm; None: at the end, the sum is read."""
        is_read = reader is None or reader.reads_norm(rows)
        return not self._norms(matrix).after and matrix.makes_norm(rows, is_read)

    def _has_sums(self, matrix: _Matrix, rows: int, reader: _Matrix | None) -> bool:
        """Whether the product and its reader share the norms around a sum."""
        if reader is None or not self._norms(matrix).after or not self._norms(reader).before:
            return False
        is_chained = reader is not self.qkv or not self._mixer.qk_norm_over_heads
        return is_chained and matrix.has_sums(rows) and reader.has_sums(rows)

    def _follows(self, rows: int) -> bool:
        """Whether q, k and v follow a layer that makes a deferred norm."""
        return self._spec.experts is None and self._is_deferred(self.down, rows, self.qkv)

    def _before_experts(self, rows: int) -> str:
        """The output projection, whose sum the experts' branch reads."""
        alone = self.o.alone(rows)
        is_added = alone == _LIBRARY and not self.o.has_bias and not self._spec.mixer_norms.after
        return f"{alone}, added in place" if is_added else alone

    def _qkv(self, rows: int) -> str:
        if self._has_sums(self.down, rows, self.qkv):
            return f"{self.qkv.alone(rows)} after a sum"
        return self.qkv.with_norms(rows) if self._follows(rows) else self.qkv.alone(rows)

    def _gate_up(self, rows: int) -> str:
        if self._has_sums(self.o, rows, self.gate_up):
            return f"{self.gate_up.alone(rows)} after a sum"
        follows = self._is_deferred(self.o, rows, self.gate_up)
        return self.gate_up.gate_up(rows, follows)

    def _residual(self, matrix: _Matrix, rows: int, reader: _Matrix | None) -> str:
        alone = matrix.alone(rows)
        if self._has_sums(matrix, rows, reader):
            return f"{alone} with squares"
        if self._is_deferred(matrix, rows, reader):
            return matrix.with_norms(rows)
        is_added = alone == _LIBRARY and not matrix.has_bias and not self._norms(matrix).after
        return f"{alone}, added in place" if is_added else alone

    def _rotates(self, rows: int) -> bool:
        return self._follows(rows) and self.qkv.product(rows) is not None

    def decode(self, query_len: int, requests: int) -> str:
        """See `_PlainLayer.decode`; of all layers but the first, where the product rotates and caches heads."""
        rows, mixer, inputs = requests * query_len, self._mixer, self._inputs(query_len, requests)
        if self._rotates(rows):
            return self.cached(query_len, requests)
        pairs_per_sm = requests * mixer.num_kv_heads / self._limits.num_sms
        is_hopper = decode_hopper.supports(inputs)
        if (
            query_len <= MAX_FUSED_QUERY_LEN
            and mixer.head_dim <= FUSED_HEAD_DIM
            and query_len * inputs.group <= max_rows(mixer.head_dim)
            and pairs_per_sm <= (HOPPER_FUSED_PAIRS_PER_SM if is_hopper else FUSED_PAIRS_PER_SM)
            and not (is_hopper and requests > HOPPER_FUSED_REQUESTS)
            and self._plan.kernels["attention"] == "triton"
        ):
            return f"{self._decode_text(inputs.group * query_len, is_fused=True)} with rope_and_cache"
        return super().decode(query_len, requests)

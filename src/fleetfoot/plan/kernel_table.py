"""Which kernel computes each matrix and attention, for every number of rows.

Steps ask the same objects: `LinearChoices` of each layer's linear kernels, and the attention backend. A test compares
the table with what layers launch. The modules of the kernels import torch and Triton, and so does this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from fleetfoot.config.model import DTYPE_BYTES, BranchNorms, LayerSpec
from fleetfoot.kernels.attention import AttentionInputs
from fleetfoot.kernels.attention.triton_backend import TritonBackend, prompt_bucket
from fleetfoot.kernels.experts.experts import ExpertSizes
from fleetfoot.kernels.experts.tilings import (
    FEW_ROWS,
    choose_few_tiling,
    choose_group_tiling,
    choose_one_tiling,
    is_one,
    padded_few_rows,
)
from fleetfoot.kernels.linear.choices import LinearChoices, ProductKind
from fleetfoot.kernels.linear.linear_triton import TritonLinear
from fleetfoot.kernels.quantized import BLOCK_GROUP, block_form
from fleetfoot.kernels.quantized.packed_triton import has_hopper_groups, packed_tiling
from fleetfoot.kernels.quantized.scaled_hopper import has_hopper_form
from fleetfoot.kernels.quantized.scaled_triton import FEW_ROWS as FEW_QUANTIZED_ROWS
from fleetfoot.kernels.quantized.scaled_triton import scaled_tiling
from fleetfoot.kernels.registry import load_kernels
from fleetfoot.kernels.runtime.gpu_limits import HOPPER_LIMITS, GPULimits, absent_gpu
from fleetfoot.kernels.runtime.triton_support import options_text
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.experts import SparseMLP
from fleetfoot.models.interface import model_class
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.quantization.base import LinearMethod
from fleetfoot.quantization.experts import QuantizedExpertMethod
from fleetfoot.quantization.gguf import Matrices
from fleetfoot.quantization.packed import Packed
from fleetfoot.quantization.scaled import Scaled
from fleetfoot.quantization.unquantized import UNQUANTIZED
from fleetfoot.records.kv_layout import KVLayout

_LIBRARY = "library"
KernelTable = dict[str, list[tuple[int, int, str]]]
"""Operation -> its kernels: first and last number of rows, tokens or requests, and the kernel with its tiling."""


def kernel_table(plan: EnginePlan) -> KernelTable:
    """The kernels of a plan for one Hopper GPU, once they are compiled.

    Raises:
        ValueError: the plan is for another device, or for several ranks.
    """
    machine, model = plan.machine, plan.model
    if plan.device != "cuda" or not machine.is_hopper or plan.kernels["prepare_linear"] not in ("hopper", "triton"):
        raise ValueError(
            f"the table of kernels is that of a Hopper GPU, and the plan is for "
            f"{plan.device} ({machine.gpu_name}) with kernels of {plan.kernels['prepare_linear']} for linear layers; "
            "name a GPU, as by --gpu-name 'NVIDIA H100', or leave --kernels out"
        )
    if plan.config.world_size > 1:
        raise ValueError(
            f"the table of kernels is that of one rank, and the plan has {plan.config.world_size}; leave --kernels out"
        )
    limits = replace(HOPPER_LIMITS, num_sms=machine.num_sms)
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
    head = _Matrix(_choices(plan)(None, model.vocab_size, model.hidden_size, limits, plan.dtype), _head_method(plan))
    table[f"head {head.name}, by logits"] = [*_runs(map(head.text, range(1, rows + 1)))]
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


def _choices(plan: EnginePlan) -> type[LinearChoices]:
    """Those of the plan's linear layers."""
    linear: Any = load_kernels(plan.kernels).prepare_linear
    assert issubclass(linear, TritonLinear)
    return linear.Choices


class _Matrix:
    """A weight with a method."""

    def __init__(self, choices: LinearChoices, method: LinearMethod = UNQUANTIZED.default) -> None:
        self.choices, self._method = choices, method

    @property
    def name(self) -> str:
        return f"[{self.choices.num_rows}, {self.choices.num_inputs}]"

    def alone(self) -> _Matrix:
        """Outside a chain."""
        return _Matrix(replace(self.choices, kind=None, scale=1.0), self._method)

    def text(self, rows: int) -> str:
        """The kernel without norms before or after it."""
        sizes, num_sms = (rows, self.choices.num_rows, self.choices.num_inputs), self.choices.limits.num_sms
        if isinstance(self._method, Scaled):
            form, columns = self._method.form, self._method.form.block[1] or self.choices.num_inputs
            hopper = form.values == "fp8" and self.choices.dtype == "bfloat16"
            hopper = hopper and has_hopper_form(form.activations, columns, self.choices.num_inputs)
            tiling = scaled_tiling(*sizes, columns, num_sms, hopper=hopper)
            return str(tiling) if rows == 1 and tiling.kernel == "hopper" else f"quantize_rows, {tiling}"
        if isinstance(self._method, Packed):
            choices, few = self.choices, rows <= FEW_QUANTIZED_ROWS
            hopper = has_hopper_groups(self._method.form.block[1] or choices.num_inputs, choices.num_inputs)
            # more rows: a product, then the gate
            num_outputs = choices.num_outputs if few else choices.num_rows
            return str(packed_tiling(rows, num_outputs, choices.num_inputs, num_sms, hopper=hopper))
        if isinstance(self._method, Matrices):  # of a part, where they are several
            kinds = dict.fromkeys(block_form(each.number)[0] for each in self._method.types)
            return ", ".join(self._form_text(kind, rows, sizes, num_sms) for kind in kinds)
        return self.choices.text(rows)

    def _form_text(self, kind: str, rows: int, sizes: tuple[int, int, int], num_sms: int) -> str:
        if kind == "float":
            return "library"
        if kind == "int8":
            return str(scaled_tiling(*sizes, BLOCK_GROUP, num_sms, has_library=False))
        return str(packed_tiling(*sizes, num_sms, hopper=has_hopper_groups(BLOCK_GROUP, sizes[2])))


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
        self._choices, self._backend = _choices(plan), load_kernels(plan.kernels).attention
        matrices = (
            _Matrix(
                self._choices(
                    kind, rows, inputs, limits, plan.dtype, has_bias,
                    scale=spec.residual_multiplier if kind == "residual" else 1.0,
                    head_dim=0 if plan.model.norm_offset else spec.mixer.head_dim,
                    activation=spec.mlp.activation if kind == "gated" else "silu",
                ),
                plan.linear_methods.of(f"model.layers.{index}.{part}" for part in parts),
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
        products = {f"{name} {each.name}{{}}, by rows": (rows, each.alone().text) for name, each in matrices.items()}
        return {**products, **self._of_experts(rows), **self._attention(rows, requests)}

    def _of_experts(self, rows: int) -> Operations:
        """Products of a mixture of experts in place of the MLP: the products of experts, and those of the MLP for all
        tokens."""
        spec, plan = self._spec, self._plan
        if spec.experts is None:
            return {}
        shared = (
            _Matrix(self._choices(None, num_rows, inputs, self._limits, plan.dtype, has_bias))
            for _, num_rows, inputs, has_bias in spec.linears(plan.model.hidden_size)[3:]
        )
        experts, hidden = spec.experts, plan.model.hidden_size
        split = plan.config.expert_split
        held = experts.num_experts if split is None else split.most_slots(experts.num_experts)
        name = f"{held} experts [{2 * experts.intermediate_size}, {hidden}]{{}}, by rows"
        joins = self._mlp().joins if experts.shared_size else None

        def text(matrix: _Matrix, rows: int) -> str:
            return "with the experts" if joins is not None and joins(rows) else matrix.text(rows)

        products = {f"shared {each.name}{{}}, by rows": (rows, partial(text, each)) for each in shared}
        return {name: (rows, self._experts), **products}

    def _mlp(self) -> SparseMLP:
        """The mixture of experts, without memory."""
        plan, index, kernels = self._plan, self._index, load_kernels(self._plan.kernels)
        with absent_gpu(self._limits) as device:
            context = ModelContext(kernels, kernels.attention, getattr(torch, plan.dtype), device, 1)
            context = replace(context, linear_methods=plan.linear_methods)
            stage = model_class(plan.model)(plan.model, context, range(index, index + 1))
            stage.process_weights_after_loading()
        return cast("SparseMLP", stage.model.layers[str(index)].mlp)

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
        if is_one(rows, form):
            outputs = " and ".join(str(choose_one_tiling(is_down=down).outputs) for down in (False, True))
            return f"one, {outputs} outputs"
        if rows <= FEW_ROWS:
            first, second = (
                choose_few_tiling(rows, form, element_size, shared, is_down=down) for down in (False, True)
            )
            tile = f"{first.outputs}x{first.inputs * first.slices}x{padded_few_rows(rows)}"
            return f"few {tile} stages={first.num_stages}, {second.num_stages}"
        split = plan.config.expert_split
        held = spec.num_experts if split is None else split.most_slots(spec.num_experts)
        sizes = ExpertSizes(held, plan.model.hidden_size, spec.intermediate_size)
        if isinstance(method, QuantizedExpertMethod) and method.form.tensors == "mxfp4" and plan.dtype == "bfloat16":
            form = "e2m1"
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
        backend = self._backend
        if not isinstance(backend, TritonBackend):
            return backend.name
        return backend.text(self._inputs(query_len, requests), self._limits)

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
                f"qkv {qkv.name}{{}}, by rows": (rows, qkv.text),
                f"o {o.name}{{}}, by rows": (rows, partial(self._added, o)),
            }
            return {**of_attention, **self._of_experts(rows), **self._attention(rows, requests)}
        gate_up, down = self.gate_up, self.down
        matrices: tuple[tuple[str, _Matrix, Callable[[int], str]], ...] = (
            ("qkv of the first layer", qkv, qkv.text),
            ("qkv of others", qkv, lambda n: self._input(qkv, n, down)),
            ("o", o, lambda n: self._residual(o, n, gate_up)),
            ("gate_up", gate_up, lambda n: self._input(gate_up, n, o)),
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
        is_read = reader is None or reader.choices.reads_norm(rows)
        return not self._norms(matrix).after and is_read and matrix.choices.reads_norm(rows)

    def _has_sums(self, matrix: _Matrix, rows: int, reader: _Matrix | None) -> bool:
        """Whether the product and its reader share the norms around a sum."""
        if reader is None or not self._norms(matrix).after or not self._norms(reader).before:
            return False
        is_chained = reader is not self.qkv or not self._mixer.qk_norm_over_heads
        return is_chained and matrix.choices.reads_sum(rows) and reader.choices.reads_sum(rows)

    def _added(self, matrix: _Matrix, rows: int) -> str:
        """A product that is added to the residual stream by another kernel, or by the library."""
        text = matrix.text(rows)
        is_added = text == _LIBRARY and not matrix.choices.has_bias and not self._norms(matrix).after
        return f"{text}, added in place" if is_added else text

    def _input(self, matrix: _Matrix, rows: int, before: _Matrix) -> str:
        if self._has_sums(before, rows, matrix):
            return f"{matrix.text(rows)} after a sum"
        return matrix.choices.text_with_norms(rows) if self._is_deferred(before, rows, matrix) else matrix.text(rows)

    def _residual(self, matrix: _Matrix, rows: int, reader: _Matrix | None) -> str:
        if self._has_sums(matrix, rows, reader):
            return f"{matrix.text(rows)} with squares"
        if self._is_deferred(matrix, rows, reader):
            return matrix.choices.text_with_norms(rows)
        return self._added(matrix, rows)

    def _rotates(self, rows: int) -> bool:
        """Whether q, k and v follow a layer that makes a deferred norm, and the product rotates."""
        follows = self._spec.experts is None and self._is_deferred(self.down, rows, self.qkv)
        return follows and self.qkv.choices.rotates(rows)

    def decode(self, query_len: int, requests: int) -> str:
        """See `_PlainLayer.decode`; of all layers but the first, where the product rotates and caches heads."""
        if self._rotates(requests * query_len):
            return self.cached(query_len, requests)
        inputs = self._inputs(query_len, requests)
        if isinstance(self._backend, TritonBackend) and self._backend.fuses(inputs, self._limits):
            return f"{self._backend.decode_text(inputs, self._limits, is_fused=True)} with rope_and_cache"
        return super().decode(query_len, requests)

"""Layers without memory on an H200 that is not there: which kernels they launch, against the table of the plan.

Run as a module, without ``TRITON_INTERPRET``; prints a line of JSON, see `main`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fleetfoot.kernels.runtime import dependent_launch, gpu_limits

LIMITS = gpu_limits.GPULimits(num_sms=132, shared_bytes=232448, capability=(9, 0))
gpu_limits.gpu_limits = lambda device: LIMITS  # type: ignore[assignment]  # before others take it by its name
dependent_launch.can_overlap = lambda device: True  # type: ignore[assignment]

from fleetfoot.config.engine import EngineConfig  # noqa: E402
from fleetfoot.fusion.decoder import fuse  # noqa: E402
from fleetfoot.kernels.elementwise import GATES, DeferredRMSNorm, DeferredSum  # noqa: E402
from fleetfoot.kernels.linear import linear_triton  # noqa: E402
from fleetfoot.kernels.registry import load_kernels  # noqa: E402
from fleetfoot.kernels.runtime.triton_support import instead_of_launching, options_text  # noqa: E402
from fleetfoot.kernels_hopper.linear import decode_product, gated_product, tiled_hopper  # noqa: E402
from fleetfoot.kernels_hopper.linear import linear as hopper_linear  # noqa: E402
from fleetfoot.layers.context import ModelContext  # noqa: E402
from fleetfoot.models.interface import CausalLM, model_class  # noqa: E402
from fleetfoot.plan.kernel_table import KernelTable, kernel_table  # noqa: E402
from fleetfoot.plan.plan import EnginePlan  # noqa: E402
from fleetfoot.plan.resolve import resolve_plan  # noqa: E402
from fleetfoot.records.forward_context import AttentionMetadata, ForwardContext  # noqa: E402
from fleetfoot.records.kv_layout import KVLayout, kv_cache_specs  # noqa: E402
from tests.helpers.kernel_choices import H200, write_config  # noqa: E402

META = torch.device("meta")
empty = partial(torch.empty, dtype=torch.bfloat16, device=META)
TRIED = "qwen3-0.6b", "llama-3.1-8b", "llama-3.2-1b", "gemma-3-1b"
launched: list[str] = []


class Library(TorchFunctionMode):
    """Records products of the library."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            launched.append("library")
        if func is torch.Tensor.addmm_:
            launched.append("library, added in place")
            return args[0]
        return func(*args, **(kwargs or {}))


def record_launch(jit: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    def launch(*arguments: Any, **options: Any) -> None:
        name, stages, warps = jit.__name__, options.get("num_stages", 1), options.get("num_warps", 1)
        if name == "_paged_attention_decode_kernel" and (shape := options.get("shape")):
            sizes = options_text({"stages": stages, "warps": warps, "programs": shape.programs_per_sm})
            fused = " with rope_and_cache" if shape.is_fused else ""
            launched.append(f"decode {shape.tile}x{shape.rows}{sizes}{fused}")
        elif name == "_paged_attention_decode_kernel":
            launched.append(f"decode_hopper rows={options['rows']}")
        elif name == "_paged_attention_prefill_kernel" and "tile" in options:
            sizes = options_text({"stages": stages, "warps": warps})
            launched.append(f"prefill {options['tile']}x{options['rows']}{sizes}")
        elif name == "_paged_attention_prefill_kernel":
            launched.append("prefill_hopper")
        elif name.startswith("_rope_and_cache"):
            launched.append("rope_and_cache")
        elif name == "_activation_kernel" and launched[-1] == "library":
            launched[-1] += ", gelu_and_mul" if options["gate"] == GATES["gelu_tanh"] else ", silu_and_mul"

    return launch


def record_products() -> None:
    """Replaces what launches products by what records their tilings."""

    def launch_linear(
        output: Any, x: Any, weight: Any, bias: Any, gated: bool, tiling: Any, deferred: Any = None,
        add_norm: Any = None, squares_out: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        read = "" if deferred is None else " after a sum" if isinstance(deferred, DeferredSum) else " after a norm"
        made = " with the next norm" if add_norm is not None else "" if squares_out is None else " with squares"
        launched.append(tiling.text(x.shape[1]) + read + made)

    def launch_hopper(output: Any, x: Any, weight: Any, tiling: Any, num_sms: int) -> None:
        launched.append(tiling.text(x.shape[1]))

    def rotate_and_cache(
        x: Any, weight: Any, bias: Any, tiling: Any, kv_cache: Any, metadata: Any, num_heads: int, rotary: Any
    ) -> torch.Tensor:
        launched.append(tiling.text(weight.shape[1], kv_cache.shape[4]))
        return empty(len(x.weighted), num_heads, kv_cache.shape[4])

    def add_and_norm(x: Any, weight: Any, tiling: Any, residual: Any, norm: Any, eps: float) -> DeferredRMSNorm:
        launched.append(tiling.text(weight.shape[1]))
        return DeferredRMSNorm.empty(residual, len(weight) // tiling.outputs, eps)

    def multiply_gated(x: Any, weight: Any, tiling: Any, activation: str = "silu") -> torch.Tensor:
        launched.append(tiling.text(weight.shape[1]))
        return empty(len(x.weighted if isinstance(x, DeferredRMSNorm) else x), len(weight) // 2)

    hopper_linear.can_compile = lambda device: True
    linear_triton.launch_linear = launch_linear
    tiled_hopper.launch_linear_hopper = launch_hopper
    decode_product.rotate_and_cache = rotate_and_cache
    decode_product.add_and_norm = add_and_norm
    decode_product.multiply_gated = multiply_gated
    gated_product.multiply_gated_wide = multiply_gated


def make_model(plan: EnginePlan) -> tuple[CausalLM, list[torch.Tensor]]:
    """As the worker builds it, and its KV cache."""
    kernels = replace(load_kernels(plan.kernels), layer_chain=None)  # whole layers are not launched one by one
    context = ModelContext(kernels, kernels.attention, torch.bfloat16, META, max_positions=256)
    model = model_class(plan.model)(plan.model, context)
    for spec in model.weight_specs():
        spec.destination()
    model.process_weights_after_loading()
    fuse(model.model.layers, context, [layer.is_fused for layer in plan.fusion])
    layout = KVLayout(64, plan.config.block_size, plan.dtype, kv_cache_specs(plan.model, plan.dtype), plan.kv_layout)
    return model, layout.layer_views([empty(shape) for shape in layout.tensor_shapes])


def launch(model: CausalLM, kv_caches: list[torch.Tensor], num_reqs: int, query_len: int) -> list[str]:
    """What computes requests with as many tokens each: products and attention of all layers, and the head."""
    launched.clear()
    num_tokens = num_reqs * query_len
    index = partial(torch.empty, dtype=torch.int32, device=META)
    slots = torch.empty(num_tokens, dtype=torch.int64, device=META)
    metadata = AttentionMetadata(
        index(num_reqs + 1), index(num_reqs), index(num_reqs, 16), slots, slots,
        num_decodes=num_reqs if query_len == 1 else 0, max_query_len=query_len, max_seq_len=16384,
        has_prompts=query_len > 1,
    )  # fmt: skip
    model.model.layers(empty(num_tokens, model.config.hidden_size), ForwardContext(metadata, kv_caches))
    if query_len == 1:
        assert model.lm_head is not None
        model.lm_head(empty(num_tokens, model.config.hidden_size))
    merged: list[str] = []
    for text in launched:
        merged[-1:] = [f"rope_and_cache, {text}"] if merged[-1:] == ["rope_and_cache"] else [*merged[-1:], text]
    return merged


def expected(table: KernelTable, num_layers: int, num_reqs: int, query_len: int) -> Iterator[str]:
    """The same of the table; empty: attention of the first layer, which the table leaves out."""

    def look_up(operation: str, number: int) -> str:
        runs = next(runs for name, runs in table.items() if name.startswith(operation))
        return next(text for first, last, text in runs if first <= number <= last)

    rows = num_reqs * query_len
    of_decode = "attention, by requests of a decode", num_reqs
    attention = of_decode if query_len == 1 else ("attention, by tokens of a prompt", query_len)
    is_chained = any(name.startswith("qkv of others") for name in table)
    for layer in range(num_layers):
        qkv, down = ("qkv of others", "down [") if is_chained else ("qkv", "down")
        if is_chained and layer == 0:
            qkv = "qkv of the first"
        if is_chained and layer == num_layers - 1:
            down = "down of the last"
        yield look_up(qkv, rows)
        yield "" if is_chained and layer == 0 else look_up(*attention)
        yield from (look_up(name, rows) for name in ("o", "gate_up", down))
    if query_len == 1:
        yield look_up("head", rows)


def try_model(name: str) -> dict[str, Any]:
    """``steps``: how many were launched; ``differences``: steps, and what was launched in place of what."""
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(model=write_config(name, folder, num_hidden_layers=3))
        plan = resolve_plan(config, H200, environ={}, config_only=True)
    table = kernel_table(plan)
    model, kv_caches = make_model(plan)
    numbers = sorted({number for runs in table.values() for first, last, _ in runs for number in (first, last)})
    steps = [(number, 1) for number in numbers if number <= plan.config.max_num_seqs]
    steps += [(1, number) for number in numbers if number > 1]
    differences = []
    for step in steps:
        found, named = launch(model, kv_caches, *step), [*expected(table, 3, *step)]
        pairs = zip(found, named, strict=False)
        if len(found) != len(named) or any(text and text != other for other, text in pairs):
            differences.append([step, found, named])
    return {"steps": len(steps), "differences": differences}


def main() -> None:
    """For each model, see `try_model`."""
    record_products()
    instead_of_launching.set(record_launch)
    with Library():
        json.dump({name: try_model(name) for name in TRIED}, sys.stdout)


if __name__ == "__main__":
    main()

"""The kernel registry: every operation, its implementations, and what each of them needs.

Each operation has a reference in torch, which runs on every device and on CUDA without host synchronisation, and any
number of faster implementations. The plan picks one for each operation with `plan_kernels`; workers load what the plan
names with `load_kernels`. Listing an implementation imports nothing: its module is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from fleetfoot.config.model import ModelConfig
from fleetfoot.kernels.attention import triton_supports
from fleetfoot.kernels.interface import NO_LAYER_CHAIN, KernelPlan, Kernels, LayerChainPlan
from fleetfoot.native.loading import NativeUnavailableError


class KernelUnavailableError(RuntimeError):
    """An implementation that the plan names cannot be used in this process."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What implementations may require of a device."""

    device: str
    """``cpu``, ``cuda`` or another torch device type."""
    has_native: bool = False
    """The C library loads."""
    has_triton: bool = False
    """Triton is installed."""
    compiles_layers: bool = False
    """The plain layers are compiled by ``torch.compile``, which needs their operations in torch."""
    heads: frozenset[tuple[int, int]] = frozenset()
    """Head size and query heads per KV head of the attention layers, those of a drafter too."""
    has_hopper: bool = False
    """It is a Hopper GPU, and the kernels of `fleetfoot.kernels_hopper` are there."""
    has_layer_chain: bool = False
    """Those for whole layers compute the model's."""


_HOPPER = "kernels_hopper"
_REQUIREMENTS: Mapping[str, tuple[str | None, str | None]] = MappingProxyType(
    {
        "triton": ("cuda", "has_triton"),
        "hopper": ("cuda", "has_hopper"),
        "cuda": ("cuda", "has_layer_chain"),
        "native": ("cpu", "has_native"),
        "numpy": ("cpu", None),
        "cpu": ("cpu", None),
        "torch": (None, None),
        "plain": (None, None),
        "sdpa": (None, None),
    }
)
"""Implementation name -> the device that it needs, and the field of `DeviceFacts`; None: any."""

OPERATIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "attention": {
            "hopper": "kernels_hopper.attention.backend:HopperBackend",
            "triton": "attention.triton_backend:TritonBackend",
            "native": "native_ops:NativeBackend",
            "sdpa": "attention.sdpa_backend:SDPABackend",
        },
        # layers
        "rms_norm": {"triton": "elementwise", "native": "native_ops", "torch": "elementwise"},
        "add_rms_norm": {"triton": "elementwise", "native": "native_ops", "torch": "elementwise"},
        "silu_and_mul": {"triton": "elementwise", "native": "native_ops", "torch": "elementwise"},
        "gelu_and_mul": {"triton": "elementwise", "native": "native_ops", "torch": "elementwise"},
        "rope_and_cache": {
            "triton": "attention.rope_and_cache",
            "native": "native_ops",
            "torch": "attention.rope_and_cache",
        },
        "prepare_linear": {
            "hopper": "kernels_hopper.linear.linear:HopperLinear",
            "triton": "linear.linear_triton:TritonLinear",
            "native": "native_ops",
            "torch": "linear.linear",
            "plain": "linear.linear:PlainLinear",
        },
        "linear_chain": {
            "hopper": "kernels_hopper.linear.linear",
            "triton": "linear.linear_triton",
            "torch": "linear.linear:NO_CHAIN",
        },
        "quantized_chain": {"triton": "quantized.chain", "torch": "linear.linear:NO_CHAIN"},
        "packed_linear": {"triton": "quantized.packed_triton", "torch": "quantized.packed"},
        "block_linear": {
            "native": "native_blocks",
            **dict.fromkeys(("triton", "torch"), "quantized.blocks:block_linear_torch"),
        },
        "scaled_linear": {
            "triton": "quantized.scaled_triton",
            "native": "native_blocks",
            "torch": "quantized.scaled",
        },
        "layer_chain": {
            "cuda": "kernels_hopper.cluster.chain:chain_layers",
            "native": "native_layers:chain_layers",
            **dict.fromkeys(("triton", "torch"), "linear.linear:NO_CHAIN"),
        },
        "causal_conv": {"triton": "recurrent.conv_triton", "native": "native_recurrent", "torch": "recurrent.conv"},
        "recurrence": {
            "triton": "recurrent.recurrence_triton",
            "native": "native_recurrent",
            "torch": "recurrent.recurrence",
        },
        "route": {"triton": "experts.routing_triton", "torch": "experts.experts"},
        "local_routing": {"triton": "experts.routing_triton", "torch": "experts.experts"},
        "mul_sigmoid": {"triton": "elementwise", "torch": "elementwise"},
        "add_shared": {"triton": "experts.experts_triton", "torch": "experts.experts"},
        "experts": {
            "triton": "experts.experts_triton:TritonExperts",
            "native": "native_ops",
            "torch": "experts.experts:TorchExperts",
        },
        # sampling
        "sample": {
            "triton": "sampling.sample_triton",
            "native": "native_ops",
            "cpu": "sampling.sample",
            "torch": "sampling.sample",
        },
        "process_logits": {
            "triton": "sampling.logits_processors_triton",
            "cpu": "sampling.logits_processors",
            "torch": "sampling.logits_processors",
        },
        "mask_tokens": dict.fromkeys(("triton", "cpu", "torch"), "sampling.mask_tokens"),
        "token_logprobs": dict.fromkeys(("triton", "cpu", "torch"), "sampling.token_logprobs"),
        # step preparation
        "prepare_inputs": {"triton": "prepare.triton_kernels", "torch": "prepare.reference"},
        "prepare_decode": {
            "triton": "prepare.triton_kernels",
            "native": "prepare.reference",
            "torch": "prepare.reference",
        },
        "prepare_groups": {"triton": "prepare.triton_kernels", "torch": "prepare.reference"},
        "prepare_states": {"triton": "prepare.triton_kernels", "torch": "prepare.reference"},
        "accept_drafts": {"triton": "prepare.triton_kernels", "torch": "prepare.reference"},
        "post_update": {
            "triton": "prepare.triton_kernels",
            "native": "prepare.reference",
            "torch": "prepare.reference",
        },
        "propose_ngrams": dict.fromkeys(("triton", "numpy", "torch"), "prepare.ngram"),
        "apply_staged_writes": {
            "triton": "prepare.triton_kernels",
            "numpy": "prepare.reference",
            "torch": "prepare.reference",
        },
    }
)
"""Operation -> its implementations, the fastest first, each with its module, below ``fleetfoot.kernels`` or of the
room ``kernels_hopper``. Unless a name follows, the function is called ``operation_implementation``. `Kernels` documents
what an operation does."""

_COMPILED = dict.fromkeys(
    (
        *("rms_norm", "add_rms_norm", "silu_and_mul", "gelu_and_mul"),
        *("linear_chain", "layer_chain", "quantized_chain", "scaled_linear", "packed_linear"),
    ),
    "torch",
)
_COMPILED["prepare_linear"] = "plain"
"""Operations within layers, and the implementations that ``torch.compile`` can trace."""
_INSTANTIATED = frozenset({"attention"})
"""Operations with classes as implementations: a worker has one instance."""


def plan_kernels(facts: DeviceFacts) -> KernelPlan:
    """The fastest implementation of each operation with requirements that ``facts`` meet."""

    def is_met(name: str) -> bool:
        device, field = _REQUIREMENTS[name]
        return device in (None, facts.device) and (field is None or getattr(facts, field))

    fastest = {op: next(filter(is_met, implementations)) for op, implementations in OPERATIONS.items()}
    if fastest["attention"] in ("hopper", "triton") and not all(triton_supports(*heads) for heads in facts.heads):
        fastest["attention"] = "sdpa"  # graphs are captured with the kernels or not at all
    if facts.compiles_layers:
        fastest |= _COMPILED
    return KernelPlan(tuple(fastest.items()))


def has_hopper_room() -> bool:
    """Whether the kernels for Hopper GPUs are installed."""
    return find_spec(f"fleetfoot.{_HOPPER}") is not None


def module_path(module: str) -> str:
    """The import path of a module of `OPERATIONS`."""
    return f"fleetfoot.{module}" if module.startswith(f"{_HOPPER}.") else f"fleetfoot.kernels.{module}"


def plan_whole_layers(model: ModelConfig, **facts: Any) -> LayerChainPlan:
    """`fleetfoot.kernels_hopper.cluster.fit.plan_layer_chain`."""
    if not has_hopper_room():
        return NO_LAYER_CHAIN
    plan: LayerChainPlan = import_module(f"fleetfoot.{_HOPPER}.cluster.fit").plan_layer_chain(model, **facts)
    return plan


def load_kernels(plan: Mapping[str, str], *, native_variant: str | None = None) -> Kernels:
    """Import what ``plan`` names.

    Args:
        native_variant: instruction set of the C kernels; None: the best one for this processor.

    Raises:
        ValueError: the plan does not name a listed implementation for each operation.
        KernelUnavailableError: the plan names C kernels or Triton, which cannot be used in this process.
    """
    if plan.keys() != OPERATIONS.keys():
        raise ValueError(f"the kernel plan has {sorted(plan)}, and the operations are {sorted(OPERATIONS)}")
    loaded = {operation: _load(operation, name, native_variant) for operation, name in plan.items()}
    return Kernels(plan=KernelPlan(tuple(plan.items())), **loaded)


def _load(operation: str, name: str, native_variant: str | None) -> Any:
    implementations = OPERATIONS[operation]
    if name not in implementations:
        raise ValueError(f"{operation} has no implementation {name!r}; there are {', '.join(implementations)}")
    if name in ("hopper", "triton") and find_spec("triton") is None:
        raise KernelUnavailableError(f"the plan names {name!r} for {operation}, but Triton is not installed")
    module, _, attribute = implementations[name].partition(":")
    try:
        function = getattr(import_module(module_path(module)), attribute or f"{operation}_{name}")
        if operation in _INSTANTIATED:
            return function(native_variant) if name == "native" else function()
        if name == "native":
            from fleetfoot.native.loading import load_library

            return partial(function, load_library(native_variant))
    except NativeUnavailableError as error:
        raise KernelUnavailableError(
            f"the plan names {name!r} for {operation}, which cannot be loaded in this process: {error}"
        ) from error
    return function

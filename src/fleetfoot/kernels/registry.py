"""The kernel registry: every operation, its implementations, and what each of them needs.

Each operation has a reference in torch, which runs on every device and on CUDA without host synchronisation, and any
number of faster implementations. The plan picks one for each operation with `plan_kernels`; workers load what the plan
names with `load_kernels`. Listing an implementation imports nothing: it is named by module and function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from fleetfoot.kernels.interface import KernelPlan, Kernels
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


def _anything(facts: DeviceFacts) -> bool:
    return True


def _cpu(facts: DeviceFacts) -> bool:
    return facts.device == "cpu"


def _native(facts: DeviceFacts) -> bool:
    return facts.device == "cpu" and facts.has_native


def _triton(facts: DeviceFacts) -> bool:
    return facts.device == "cuda" and facts.has_triton


_REQUIREMENTS: Mapping[str, Callable[[DeviceFacts], bool]] = MappingProxyType(
    {"triton": _triton, "native": _native, "numpy": _cpu, "cpu": _cpu, "torch": _anything, "sdpa": _anything}
)
"""Implementation name -> what it requires. Names are listed from the fastest to the slowest."""


def _implementations(**targets: str) -> Mapping[str, str]:
    """Name -> ``module:function`` below ``fleetfoot.kernels``, the fastest first."""
    return MappingProxyType({name: targets[name] for name in _REQUIREMENTS if name in targets})


OPERATIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "attention": _implementations(
            sdpa="attention.sdpa_backend:SDPABackend",
            native="native_ops:NativeBackend",
            triton="attention.triton_backend:TritonBackend",
        ),
        # layers
        "rms_norm": _implementations(
            torch="elementwise:rms_norm_torch",
            native="native_ops:rms_norm_native",
            triton="elementwise:rms_norm_triton",
        ),
        "add_rms_norm": _implementations(
            torch="elementwise:add_rms_norm_torch",
            native="native_ops:add_rms_norm_native",
            triton="elementwise:add_rms_norm_triton",
        ),
        "silu_and_mul": _implementations(
            torch="elementwise:silu_and_mul_torch",
            native="native_ops:silu_and_mul_native",
            triton="elementwise:silu_and_mul_triton",
        ),
        "rope_and_cache": _implementations(
            torch="attention.rope_and_cache:rope_and_cache_torch",
            native="native_ops:rope_and_cache_native",
            triton="attention.rope_and_cache:rope_and_cache_triton",
        ),
        "prepare_linear": _implementations(
            torch="linear.linear:prepare_linear_torch",
            native="native_ops:prepare_linear_native",
            triton="linear.linear_triton:TritonLinear",
        ),
        "linear_chain": _implementations(torch="linear.linear:NO_CHAIN", triton="linear.linear_triton:TRITON_CHAIN"),
        # sampling
        "sample": _implementations(
            torch="sampling.sample:sample_torch",
            cpu="sampling.sample:sample_cpu",
            native="native_ops:sample_native",
            triton="sampling.sample_triton:sample_triton",
        ),
        "process_logits": _implementations(
            torch="sampling.logits_processors:process_logits_torch",
            cpu="sampling.logits_processors:process_logits_cpu",
            triton="sampling.logits_processors_triton:process_logits_triton",
        ),
        "token_logprobs": _implementations(
            torch="sampling.token_logprobs:token_logprobs_torch",
            cpu="sampling.token_logprobs:token_logprobs_cpu",
            triton="sampling.token_logprobs:token_logprobs_triton",
        ),
        # step preparation
        "prepare_inputs": _implementations(
            torch="prepare.reference:prepare_inputs_torch", triton="prepare.triton_kernels:prepare_inputs_triton"
        ),
        "prepare_decode": _implementations(
            torch="prepare.reference:prepare_decode_torch",
            native="prepare.reference:prepare_decode_native",
            triton="prepare.triton_kernels:prepare_decode_triton",
        ),
        "accept_drafts": _implementations(
            torch="prepare.reference:accept_drafts_torch", triton="prepare.triton_kernels:accept_drafts_triton"
        ),
        "post_update": _implementations(
            torch="prepare.reference:post_update_torch",
            native="prepare.reference:post_update_native",
            triton="prepare.triton_kernels:post_update_triton",
        ),
        "propose_ngrams": _implementations(
            torch="prepare.ngram:propose_ngrams_torch",
            numpy="prepare.ngram:propose_ngrams_numpy",
            triton="prepare.ngram:propose_ngrams_triton",
        ),
        "apply_staged_writes": _implementations(
            torch="prepare.reference:apply_staged_writes_torch",
            numpy="prepare.reference:apply_staged_writes_numpy",
            triton="prepare.triton_kernels:apply_staged_writes_triton",
        ),
    }
)
"""Operation -> its implementations, the fastest first. What an operation does stands at the fields of `Kernels`."""

_INSTANTIATED = frozenset({"attention"})
"""Operations whose implementations are classes: a worker has one instance."""


def plan_kernels(facts: DeviceFacts) -> KernelPlan:
    """The fastest implementation of each operation whose requirement ``facts`` meet."""

    def fastest(operation: str) -> str:
        return next(name for name in OPERATIONS[operation] if _REQUIREMENTS[name](facts))

    return KernelPlan(tuple((operation, fastest(operation)) for operation in OPERATIONS))


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
    if name == "triton" and find_spec("triton") is None:
        raise KernelUnavailableError(f"the plan names 'triton' for {operation}, but Triton is not installed")
    module, attribute = implementations[name].split(":")
    try:
        function = getattr(import_module(f"fleetfoot.kernels.{module}"), attribute)
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

"""Whether an engine fits in its device's memory, the longest max_model_len that fits, and settings that would fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fleetfoot.config.engine import EngineConfig
from fleetfoot.plan.memory import (
    CPU_KV_LIMIT,
    CPU_KV_SHARE,
    GIB,
    EngineShape,
    Footprint,
    MemoryPlan,
    is_kv_given,
    kv_block_bytes,
    share_out,
    state_block_bytes,
)

LEAST_CONTEXT = 256
"""The smallest max_model_len that is chosen if the settings have none."""
_MOST_UTILIZATION = 0.98
"""The largest gpu_memory_utilization in a suggestion."""
_LEAST_TOKENS = 256
"""The smallest max_num_batched_tokens in a suggestion."""

ShapeMaker = Callable[[EngineConfig, int], EngineShape]
"""The shape of an engine with these settings and a max_model_len."""


class MemoryPlanError(ValueError):
    """The model does not fit; the message has the bytes, and settings with which it fits."""


@dataclass(frozen=True, slots=True)
class Device:
    """The memory of each rank's device."""

    total: int
    """Bytes."""
    make_shape: ShapeMaker
    max_positions: int
    """The longest max_model_len that the model allows."""


def fit_engine(config: EngineConfig, device: Device) -> tuple[EngineShape, MemoryPlan]:
    """The engine's shape and its memory plan.

    A ``max_model_len`` in the settings must fit. Without one, it is the model's limit, or the longest that fits.

    Raises:
        MemoryPlanError: it does not fit.
    """
    shape, plan, problem = _try(config, device)
    if problem:
        remedies = "".join(f"\n  - {remedy}" for remedy in _remedies(config, device))
        raise MemoryPlanError(problem + ("; what would work:" + remedies if remedies else ""))
    return shape, plan


def _try(config: EngineConfig, device: Device) -> tuple[EngineShape, MemoryPlan, str]:
    """Shape, plan, and the reason why they do not fit; empty if they do."""
    length = config.max_model_len or _longest(config, device) or _least_context(device)
    shape = device.make_shape(config, length)
    return shape, *share_out(config, shape, device.total)


def _least_context(device: Device) -> int:
    return min(LEAST_CONTEXT, device.max_positions)


def _longest(config: EngineConfig, device: Device) -> int | None:
    """The longest max_model_len that the KV cache has space for; None: not even the smallest."""

    def fits(length: int) -> bool:
        return not share_out(config, device.make_shape(config, length), device.total)[1]

    most, size = device.max_positions, config.block_size
    if is_kv_given(config):
        given = share_out(config, device.make_shape(config, most), device.total)[0].num_tokens
        return min(most, given) or None
    if fits(most):
        return most
    # lengths in blocks: the first fits, the last does not
    low, high = -(-_least_context(device) // size), -(-most // size)
    if not fits(min(low * size, most)):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * size) else (low, middle)
    return min(low * size, most)


# --- suggestions -----------------------------------------------------------------------------------------------------


def _remedies(config: EngineConfig, device: Device) -> Iterator[str]:
    """Settings that each make it fit (or, if none does, several together), and the memory with which it fits."""
    shape = _try(config, device)[0]
    changes: list[tuple[str, Iterable[Any]]] = [
        ("num_gpu_blocks_override", _fewer_blocks(config, shape, device.total)),
        ("kv_cache_memory_bytes", _other_kv_sizes(config, shape, device.total)),
        ("gpu_memory_utilization", _higher_utilizations(config) if shape.device == "cuda" else ()),
        ("max_model_len", _shorter(config, device)),
        ("max_num_batched_tokens", _halves(shape.max_num_batched_tokens, _least_tokens(config, device, _LEAST_TOKENS))),
        ("max_num_seqs", _halves(shape.max_num_seqs, 1)),
        ("enforce_eager", (True,) if shape.capture_table.keys else ()),
    ]
    found = False
    for name, values in changes:
        for value in values:
            if not _try(replace(config, **{name: value}), device)[2]:
                found = True
                yield _setting(name, value)
                break
        if found and is_kv_given(config):
            break  # only the size of the KV cache is wrong
    if not found:
        yield from _together(config, shape, device)
    needed = _needed(config, shape)
    if needed is not None:
        is_shared = shape.tensor_parallel_size * shape.pipeline_parallel_size > 1
        memory = f"{'' if shape.device == 'cpu' else 'GPU '}memory{' for each rank' * is_shared}"
        yield f"{needed / GIB:.2f} GiB of {memory}, or more"


def _together(config: EngineConfig, shape: EngineShape, device: Device) -> Iterator[str]:
    """Settings with small sizes, added one by one until it fits; nothing if it never does."""
    chosen: list[str] = []
    little: list[tuple[str, list[Any]]] = [
        ("max_num_seqs", list(_halves(shape.max_num_seqs, 16))),
        ("max_num_batched_tokens", list(_halves(shape.max_num_batched_tokens, _least_tokens(config, device, 2048)))),
        ("gpu_memory_utilization", _higher_utilizations(config) if shape.device == "cuda" else []),
    ]
    for name, values in little:
        if values:
            config = replace(config, **{name: values[-1]})
            chosen.append(_setting(name, values[-1]))
        if not _try(config, device)[2]:
            yield " and ".join(chosen)
            return
        for length in _shorter(config, device):
            yield " and ".join([*chosen, _setting("max_model_len", length)])
            return


def _setting(name: str, value: Any) -> str:
    return f"{name}={value} (--{name.replace('_', '-')}{'' if value is True else f' {value}'})"


def _shorter(config: EngineConfig, device: Device) -> list[int]:
    """The longest max_model_len that fits, if the settings have a longer one."""
    if config.max_model_len is None or is_kv_given(config):
        return []
    longest = _longest(config, device)
    return [] if longest is None or longest >= config.max_model_len else [longest]


def _higher_utilizations(config: EngineConfig) -> list[float]:
    first = int(config.gpu_memory_utilization * 100) + 1
    return [percent / 100 for percent in range(first, int(_MOST_UTILIZATION * 100) + 1)]


def _fewer_blocks(config: EngineConfig, shape: EngineShape, total: int) -> list[int]:
    """The largest number of blocks that fits, if the settings have one."""
    if config.num_gpu_blocks_override is None:
        return []
    fitting = _fitting_blocks(shape, total)
    return [fitting] if fitting >= 1 else []


def _other_kv_sizes(config: EngineConfig, shape: EngineShape, total: int) -> list[int]:
    """The size for the longest request if it was too small, and the largest that fits if it was too large."""
    if config.num_gpu_blocks_override is not None:
        return []
    if config.kv_cache_memory_bytes is None and (shape.device == "cuda" or config.max_model_len is None):
        return []
    block, fitting = _largest_block(shape), _fitting_blocks(shape, total)
    longest = -(-shape.max_model_len // shape.block_size)
    is_too_small = config.kv_cache_memory_bytes is None or config.kv_cache_memory_bytes < block
    return [min(longest if is_too_small else fitting, fitting) * block] if fitting >= 1 else []


def _fitting_blocks(shape: EngineShape, total: int) -> int:
    """KV blocks that fit on every rank."""
    return min(
        (total - Footprint.of(stage).total) // (kv_block_bytes(stage) + state_block_bytes(stage))
        for stage in shape.stages()
    )


def _largest_block(shape: EngineShape) -> int:
    """Bytes of a KV block on the rank with the largest: kv_cache_memory_bytes is per rank."""
    return max(kv_block_bytes(stage) for stage in shape.stages())


def _halves(value: int, least: int) -> Iterator[int]:
    while (value := value // 2) >= least:
        yield value


def _least_tokens(config: EngineConfig, device: Device, least: int) -> int:
    """The smallest max_num_batched_tokens that the settings allow."""
    whole = 0 if config.enable_chunked_prefill else config.max_model_len or device.max_positions
    return max(least, config.max_decode_tokens, whole)


def _needed(config: EngineConfig, shape: EngineShape) -> int | None:
    """The memory of each rank with which it fits unchanged; None: no memory is enough."""
    blocks = config.num_gpu_blocks_override
    if blocks is None and config.kv_cache_memory_bytes is not None:
        blocks = config.kv_cache_memory_bytes // _largest_block(shape)
    if blocks is not None:
        return max(_with_blocks(stage, blocks) for stage in shape.stages()) if blocks else None
    blocks = -(-shape.max_model_len // shape.block_size)
    if shape.device == "cpu" and blocks * _largest_block(shape) > CPU_KV_LIMIT:
        return None
    return max(_needed_by_stage(config, stage, blocks) for stage in shape.stages())


def _needed_by_stage(config: EngineConfig, shape: EngineShape, blocks: int) -> int:
    """Without settings for the size of the KV cache."""
    needed = _with_blocks(shape, blocks)
    if shape.device == "cpu":
        return max(needed, Footprint.of(shape).weights + math.ceil(blocks * kv_block_bytes(shape) / CPU_KV_SHARE))
    return math.ceil(needed / config.gpu_memory_utilization)


def _with_blocks(shape: EngineShape, blocks: int) -> int:
    return Footprint.of(shape).total + blocks * (kv_block_bytes(shape) + state_block_bytes(shape))

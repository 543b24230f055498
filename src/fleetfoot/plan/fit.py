"""Whether an engine fits in its device's memory, the longest max_model_len that fits, and settings that would fit.

``total`` is the memory of each rank's device in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fleetfoot.config.sharding import tensor_parallel_sizes
from fleetfoot.plan import memory as parts

LEAST_CONTEXT = 256
"""The smallest max_model_len that is chosen if the settings have none."""
_MOST_UTILIZATION, _LEAST_TOKENS = 0.98, 256
"""The largest gpu_memory_utilization and the smallest max_num_batched_tokens in a suggestion."""


class MemoryPlanError(ValueError):
    """The model does not fit; the message has the bytes, and settings with which it fits."""


def fit_engine(shape: parts.EngineShape, total: int) -> tuple[parts.EngineShape, parts.MemoryPlan]:
    """The engine's shape with its max_model_len, and its memory plan.

    A ``max_model_len`` in the settings must fit. Without one, it is the model's limit, or the longest that fits. Raises
    MemoryPlanError if it does not fit.
    """
    shape, plan, problem = _try(shape, total)
    if problem:
        remedies = "".join(f"\n  - {remedy}" for remedy in _remedies(shape, total))
        raise MemoryPlanError(problem + ("; what would work:" + remedies if remedies else ""))
    return shape, plan


def _try(shape: parts.EngineShape, total: int, **settings: Any) -> tuple[parts.EngineShape, parts.MemoryPlan, str]:
    """Shape, plan, and the reason why they do not fit with these settings changed; empty if they do."""
    shape = replace(shape, config=replace(shape.config, **settings))
    least = min(LEAST_CONTEXT, shape.model.max_position_embeddings)
    shape = replace(shape, max_model_len=shape.config.max_model_len or _longest(shape, total) or least)
    return shape, *parts.share_out(shape, total)


def _longest(shape: parts.EngineShape, total: int) -> int | None:
    """The longest max_model_len that the KV cache has space for; None: not even the smallest."""

    def fits(length: int) -> bool:
        return not parts.share_out(replace(shape, max_model_len=length), total)[1]

    most, size = shape.model.max_position_embeddings, shape.config.block_size
    if parts.is_kv_given(shape.config):
        return min(most, parts.share_out(replace(shape, max_model_len=most), total)[0].num_tokens) or None
    if fits(most):
        return most
    # lengths in blocks: the first fits, the last does not
    low, high = -(-min(LEAST_CONTEXT, most) // size), -(-most // size)
    if not fits(min(low * size, most)):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * size) else (low, middle)
    return min(low * size, most)


def _remedies(shape: parts.EngineShape, total: int) -> Iterator[str]:
    """Settings that each make it fit (or, if none does, several together), and the memory with which it fits."""
    changes: list[tuple[str, Iterable[Any]]] = [
        *_other_kv_sizes(shape, total),
        ("gpu_memory_utilization", _higher_utilizations(shape)),
        ("max_model_len", _shorter(shape, total)),
        ("max_num_batched_tokens", _halves(shape.max_num_batched_tokens, _least_tokens(shape, _LEAST_TOKENS))),
        ("max_num_seqs", _halves(shape.config.max_num_seqs, 1)),
        ("enforce_eager", (True,) if shape.capture_table.shapes else ()),
        ("block_size", (16,) if shape.config.block_size > 256 else ()),
    ]
    found = False
    for name, values in changes:
        for value in values:
            if not _try(shape, total, **{name: value})[2]:
                found = True
                yield _setting(name, value)
                break
        if found and parts.is_kv_given(shape.config):
            break  # only the size of the KV cache is wrong
    if not found:
        yield from _together(shape, total)
    yield from _tensor_parallel(shape, total)
    needed, whole = _needed(shape), shape.config.max_model_len or shape.model.max_position_embeddings
    if needed is not None:
        is_shared = shape.config.world_size > 1
        memory = f"{'' if shape.device == 'cpu' else 'GPU '}memory{' for each rank' * is_shared}"
        more = None if parts.is_kv_given(shape.config) else _needed(replace(shape, max_model_len=whole))
        note = f", for requests of up to {shape.max_model_len:,} tokens; {_gib(more)} for {whole:,}" if more else ""
        yield f"{_gib(needed)} of {memory}, or more{note if more != needed else ''}"


def _gib(num_bytes: int) -> str:
    """Rounded up: as much is enough."""
    return f"{math.ceil(num_bytes / parts.GIB * 100) / 100:.2f} GiB"


def _together(shape: parts.EngineShape, total: int) -> Iterator[str]:
    """Settings with small sizes, added one by one until it fits; nothing if it never does."""
    chosen: dict[str, Any] = {}
    little: list[tuple[str, Sequence[Any]]] = [
        ("max_num_seqs", _halves(shape.config.max_num_seqs, 16)),
        ("max_num_batched_tokens", _halves(shape.max_num_batched_tokens, _least_tokens(shape, 2048))),
        ("gpu_memory_utilization", _higher_utilizations(shape)),
    ]
    for name, values in little:
        if values:
            chosen[name] = values[-1]
        changed, _, problem = _try(shape, total, **chosen)
        for length in _shorter(changed, total) if problem else ():
            chosen["max_model_len"], problem = length, ""
        if not problem:
            yield " and ".join(_setting(*item) for item in chosen.items())
            return


def _tensor_parallel(shape: parts.EngineShape, total: int) -> Iterator[str]:
    """The smallest tensor_parallel_size of GPUs of the same size that fits, and the smallest with the model's own
    max_model_len. The ranks of a CPU share its memory."""
    found, whole = False, shape.config.max_model_len or shape.model.max_position_embeddings
    shares_experts = shape.config.expert_split is None
    for size in tensor_parallel_sizes(shape.model, shares_experts=shares_experts) if shape.device == "cuda" else ():
        with suppress(ValueError):  # settings of processes that do not go together with this size
            changed, _, problem = _try(shape, total, tensor_parallel_size=size)
            is_whole = changed.max_model_len == whole
            if size > shape.config.tensor_parallel_size and not problem and (is_whole or not found):
                note = "" if is_whole else f"for requests of up to {changed.max_model_len:,} tokens, "
                yield note + _setting("tensor_parallel_size", size)
                if is_whole:
                    return
                found = True


def _setting(name: str, value: Any) -> str:
    return f"{name}={value} (--{name.replace('_', '-')}{'' if value is True else f' {value}'})"


def _shorter(shape: parts.EngineShape, total: int) -> list[int]:
    """The longest max_model_len that fits, if the settings have a longer one."""
    given = shape.config.max_model_len
    if given is None or parts.is_kv_given(shape.config):
        return []
    longest = _longest(shape, total)
    return [] if longest is None or longest >= given else [longest]


def _higher_utilizations(shape: parts.EngineShape) -> list[float]:
    first = int(shape.config.gpu_memory_utilization * 100) + 1
    percents = range(first, int(_MOST_UTILIZATION * 100) + 1) if shape.device == "cuda" else ()
    return [percent / 100 for percent in percents]


def _other_kv_sizes(shape: parts.EngineShape, total: int) -> Iterator[tuple[str, Iterable[int]]]:
    """Other values of the settings that determine the size of the KV cache.

    For num_gpu_blocks_override the largest that fits; for kv_cache_memory_bytes the size for the longest request if it
    was too small, and the largest that fits if it was too large.
    """
    config, block, kv_bytes = shape.config, _largest_block(shape), shape.config.kv_cache_memory_bytes
    fitting = min(
        (total - sum(parts.footprint(stage).values())) // (parts.kv_block_bytes(stage) + parts.state_block_bytes(stage))
        - stage.unused_blocks
        for stage in shape.stages()
    )
    fitting = min(fitting, *map(parts.addressable_blocks, shape.stages()))
    least = shape.least_blocks
    if fitting < least:
        return
    if config.num_gpu_blocks_override is not None:
        yield "num_gpu_blocks_override", [least, fitting] if config.num_gpu_blocks_override < least else [fitting]
    elif kv_bytes is not None or (shape.device == "cpu" and config.max_model_len is not None):
        is_too_small = kv_bytes is None or kv_bytes < (least + shape.unused_blocks) * block
        blocks = max(shape.longest_blocks, least) if is_too_small else fitting
        yield "kv_cache_memory_bytes", [(min(blocks, fitting) + shape.unused_blocks) * block]


def _largest_block(shape: parts.EngineShape) -> int:
    """Bytes of a KV block on the rank with the largest: kv_cache_memory_bytes is per rank."""
    return max(parts.kv_block_bytes(stage) for stage in shape.stages())


def _halves(value: int, least: int) -> list[int]:
    return [value >> shift for shift in range(1, value.bit_length()) if value >> shift >= least]


def _least_tokens(shape: parts.EngineShape, least: int) -> int:
    """The smallest max_num_batched_tokens that the settings allow."""
    config = shape.config
    whole = 0 if config.enable_chunked_prefill else config.max_model_len or shape.model.max_position_embeddings
    return max(least, config.max_decode_tokens, whole)


def _needed(shape: parts.EngineShape) -> int | None:
    """The memory of each rank with which it fits unchanged; None: no memory is enough."""
    config, blocks = shape.config, shape.config.num_gpu_blocks_override
    if blocks is None and config.kv_cache_memory_bytes is not None:
        blocks = config.kv_cache_memory_bytes // _largest_block(shape) - shape.unused_blocks
    if blocks is not None and blocks < shape.least_blocks:
        return None
    if (config.num_gpu_blocks_override or 0) > min(map(parts.addressable_blocks, shape.stages())):
        return None
    if blocks is None and shape.device == "cpu" and shape.longest_blocks * _largest_block(shape) > parts.CPU_KV_LIMIT:
        return None
    return max(_needed_by_stage(stage, blocks) for stage in shape.stages())


def _needed_by_stage(shape: parts.EngineShape, given_blocks: int | None) -> int:
    """``given_blocks``: None: the settings have no size of the KV cache."""
    blocks, sizes, block = given_blocks or shape.longest_blocks, parts.footprint(shape), parts.kv_block_bytes(shape)
    blocks += shape.unused_blocks
    needed = sum(sizes.values()) + blocks * (block + parts.state_block_bytes(shape))
    if given_blocks is not None:
        return needed
    if shape.device == "cpu":
        return max(needed, sizes["weights"] + math.ceil(blocks * block / parts.CPU_KV_SHARE))
    return math.ceil(needed / shape.config.gpu_memory_utilization)

"""How many KV blocks fit."""

from __future__ import annotations

from dataclasses import dataclass

from fleetfoot.config.model import DTYPE_BYTES
from fleetfoot.plan.plan import EnginePlan

GIB = 1 << 30
CPU_KV_SHARE = 0.4
"""Most of a CPU's free memory that the KV cache may come to take."""
CPU_KV_LIMIT = 4 * GIB
"""And never more than this, unless kv_cache_memory_bytes says so."""


@dataclass(frozen=True, slots=True)
class KVBudget:
    num_blocks: int
    num_bytes: int
    reason: str


def bytes_per_block(plan: EnginePlan) -> int:
    """Bytes of one KV block over all layers."""
    return plan.model.kv_bytes_per_token(plan.dtype) * plan.config.block_size


def kv_budget(plan: EnginePlan, free_bytes: int) -> KVBudget:
    """How many blocks the KV cache gets.

    Args:
        free_bytes: what weights and activations leave, within the share that the engine may use.

    Raises:
        ValueError: not even one block fits; the message has the bytes and the settings that would help.
    """
    config, block_bytes = plan.config, bytes_per_block(plan)
    if config.num_gpu_blocks_override is not None:
        blocks = config.num_gpu_blocks_override
        return KVBudget(blocks, blocks * block_bytes, "num_gpu_blocks_override")
    # more than every request at its longest can never be used
    useful = -(-plan.max_model_len // config.block_size) * config.max_num_seqs
    if config.kv_cache_memory_bytes is not None:
        free_bytes, reason = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif plan.device == "cpu":
        free_bytes, reason = min(int(free_bytes * CPU_KV_SHARE), CPU_KV_LIMIT), "a share of the free memory"
    else:
        reason = "what gpu_memory_utilization leaves"
    blocks = min(free_bytes // block_bytes, useful)
    if blocks < 1:
        raise ValueError(
            f"no KV block fits: one takes {block_bytes:,} bytes and {max(0, free_bytes):,} are left ({reason}); "
            f"set kv_cache_memory_bytes to at least {block_bytes * 64:,}, or raise gpu_memory_utilization "
            f"(now {config.gpu_memory_utilization})"
        )
    return KVBudget(blocks, blocks * block_bytes, reason)


def activation_bytes(plan: EnginePlan) -> int:
    """An upper estimate of what a step takes beside weights and KV: the widest layer's activations, and logits."""
    model = plan.model
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    per_token = 4 * model.hidden_size + 2 * heads + 3 * model.intermediate_size
    logits = 4 * plan.config.max_num_seqs * model.vocab_size * 4  # float32, and what sampling keeps beside them
    return plan.max_num_batched_tokens * per_token * DTYPE_BYTES[plan.dtype] * 2 + logits

"""The memory plan: the parts of each rank's device memory, and the number of KV blocks that fit on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleetfoot.config.engine import EngineConfig
from fleetfoot.plan.footprint import EngineShape, Footprint, kv_block_bytes, state_block_bytes

GIB = 1 << 30
CPU_KV_SHARE = 0.4
"""The largest part of a CPU's memory, without the weights, for the KV cache."""
CPU_KV_LIMIT = 4 * GIB
"""The largest KV cache on a CPU without kv_cache_memory_bytes."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes in bytes of the parts of an engine, on the rank with the least free memory."""

    total: int
    """The device's memory; on a CPU, a rank's share of the available memory."""
    budget: int
    """The memory that the engine may use: the share of gpu_memory_utilization; all on a CPU or with a set KV size."""
    footprint: Footprint
    num_blocks: int
    block_size: int
    """Tokens in a block."""
    bytes_per_block: int
    """KV of one block over all layers."""
    state_bytes_per_block: int
    kv_reason: str
    """The limit that determined ``num_blocks``."""
    stages: tuple[MemoryPlan, ...] = ()
    """The plan of each pipeline rank, where there are several. They have equally many blocks."""

    def stage(self, pipeline_rank: int) -> MemoryPlan:
        """The plan of one pipeline rank."""
        return self.stages[pipeline_rank] if self.stages else self

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.block_size

    @property
    def kv_cache(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def runner_state(self) -> int:
        return self.footprint.runner_state + self.num_blocks * self.state_bytes_per_block

    @property
    def left(self) -> int:
        """Unused bytes of the budget."""
        return self.budget - sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Every part by name; with `left` they add up to the budget."""
        footprint = self.footprint
        return {
            "weights": footprint.weights,
            "kv_cache": self.kv_cache,
            "graphs": footprint.graphs,
            "activations": footprint.activations,
            "runner_state": self.runner_state,
            "rotary_table": footprint.rotary_table,
            "sampling_scratch": footprint.sampling_scratch,
            "communication": footprint.communication,
            "driver": footprint.driver,
        }

    def fitting_blocks(self, taken: int) -> int:
        """How many blocks fit if ``taken`` bytes are in use once the weights are loaded."""
        still_to_come = self.footprint.total - self.footprint.taken_by_loading
        return (self.budget - taken - still_to_come) // (self.bytes_per_block + self.state_bytes_per_block)

    def concurrency(self, num_tokens: int, max_num_seqs: int) -> int:
        """How many requests of this length run at the same time without preemption."""
        return min(max_num_seqs, self.num_blocks // -(-num_tokens // self.block_size))


def share_out(config: EngineConfig, shape: EngineShape, total: int) -> tuple[MemoryPlan, str]:
    """Divide ``total`` bytes of each rank's device.

    Returns:
        The plan, and why it does not work; empty if it does.
    """
    shapes = shape.stages()
    stages = [_share_out_stage(config, stage, total) for stage in shapes]
    if len(stages) == 1:
        return stages[0], _problem(config, shape, stages[0])
    scarcest = min(stages, key=lambda stage: stage.num_blocks)
    even = [replace(stage, num_blocks=scarcest.num_blocks, kv_reason=scarcest.kv_reason) for stage in stages]
    problems = [_problem(config, shapes[rank], even[rank]) for rank in range(len(stages))]
    tightest = min(range(len(stages)), key=lambda rank: (not problems[rank], even[rank].left))
    problem = f"on pipeline rank {tightest}, {problems[tightest]}" if problems[tightest] else ""
    return replace(even[tightest], stages=tuple(even)), problem


def _share_out_stage(config: EngineConfig, shape: EngineShape, total: int) -> MemoryPlan:
    footprint = Footprint.of(shape)
    block, state = kv_block_bytes(shape), state_block_bytes(shape)
    # a KV cache with a set size may use all memory
    is_share = shape.device == "cuda" and not is_kv_given(config)
    budget = int(total * config.gpu_memory_utilization) if is_share else total
    room = budget - footprint.total
    blocks, reason = _num_blocks(config, shape, total, room)
    return MemoryPlan(total, budget, footprint, blocks, shape.block_size, block, state, reason)


def _problem(config: EngineConfig, shape: EngineShape, plan: MemoryPlan) -> str:
    """Why the plan does not work; empty if it does."""
    blocks, block, footprint = plan.num_blocks, plan.bytes_per_block, plan.footprint
    is_given = is_kv_given(config)
    if footprint.total > plan.budget or (blocks < 1 and not is_given):
        return (
            f"the model does not fit: {plan.budget:,} bytes can be used, its weights take {footprint.weights:,} and "
            f"what runs it {footprint.total - footprint.weights:,}, which leaves no room for KV (a block takes "
            f"{block:,})"
        )
    if blocks < 1:
        given = config.kv_cache_memory_bytes
        return f"no KV block fits: one takes {block:,} bytes and {given:,} are left ({plan.kv_reason})"
    if plan.left < 0:
        return (
            f"a KV cache of {blocks:,} blocks ({plan.kv_cache:,} bytes, from {plan.kv_reason}) does not fit: with all "
            f"else it would take {plan.budget - plan.left:,} bytes, and there are {plan.budget:,}"
        )
    if plan.num_tokens < shape.max_model_len and not is_given:
        wanted = "max_model_len is" if config.max_model_len is not None else "a request needs at least"
        return (
            f"{wanted} {shape.max_model_len:,}, but the KV cache has room for {plan.num_tokens:,} tokens "
            f"({plan.kv_cache:,} bytes, {plan.kv_reason})"
        )
    return ""


def is_kv_given(config: EngineConfig) -> bool:
    """Whether the settings determine the size of the KV cache."""
    return config.num_gpu_blocks_override is not None or config.kv_cache_memory_bytes is not None


def _num_blocks(config: EngineConfig, shape: EngineShape, total: int, room: int) -> tuple[int, str]:
    """Blocks of the KV cache, and the limit that determined them."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override, "num_gpu_blocks_override"
    # more than all requests of maximum length is never used
    useful = -(-shape.max_model_len // shape.block_size) * shape.max_num_seqs
    block = kv_block_bytes(shape)
    if config.kv_cache_memory_bytes is not None:
        return min(config.kv_cache_memory_bytes // block, useful), "kv_cache_memory_bytes"
    if shape.device == "cpu":
        share = min(int((total - Footprint.of(shape).weights) * CPU_KV_SHARE), CPU_KV_LIMIT)
        blocks, reason = min(share // block, room // (block + state_block_bytes(shape))), "a share of the free memory"
    else:
        blocks, reason = room // (block + state_block_bytes(shape)), "what gpu_memory_utilization leaves"
    if blocks >= useful:
        return useful, "as much as max_num_seqs requests of max_model_len can use"
    return max(0, blocks), reason

"""The memory plan: bytes of each part of an engine on each rank, and the KV blocks that fit on all ranks. No torch.

The owner of each buffer has its formula; this module adds them up. Weights, KV and the runner's state are exact.
Activations, scratch, graphs and the driver are upper estimates: on an H100, an 8B Llama's engine with the torch
operations reserved 2.6 GiB for its largest steps, and the estimate is 2.9.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.model import DTYPE_BYTES, ModelConfig
from fleetfoot.config.sharding import num_kv_heads, pipeline_layers, vocab_rows
from fleetfoot.distributed import pipeline_group_bytes, tensor_group_bytes
from fleetfoot.kernels.attention import sdpa_workspace_bytes
from fleetfoot.kernels.interface import KernelPlan
from fleetfoot.kernels.prepare.tables import row_table_bytes, staging_bytes, step_buffer_bytes, token_page_bytes
from fleetfoot.kernels.sampling import CHUNK_BYTES_PER_ELEMENT, MAX_ELEMENTS
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.runner.graphs import CaptureTable
from fleetfoot.sampling.shape import row_size
from fleetfoot.speculative.find import NO_DRAFTER, DrafterShape

MIB = 1 << 20
DRIVER_BYTES = 832 * MIB
"""A GPU's driver, torch's context, cuBLAS workspaces and compiled kernels, before any allocation."""

_INT32, _INT64, _FLOAT32 = 4, 8, 4


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The sizes that memory depends on."""

    model: ModelConfig
    dtype: str
    device: str
    runner: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    capture_table: CaptureTable
    kernels: KernelPlan
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pipeline_rank: int = 0
    """The pipeline stage that is counted. All ranks of a tensor group have the same."""
    drafter: DrafterShape = NO_DRAFTER

    @property
    def layers(self) -> range:
        """The decoder layers of the rank."""
        return pipeline_layers(self.model, self.pipeline_rank, self.pipeline_parallel_size)

    @property
    def is_first(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last(self) -> bool:
        return self.pipeline_rank == self.pipeline_parallel_size - 1

    @property
    def num_heads(self) -> int:
        """Query heads of the rank."""
        return self.model.num_heads // self.tensor_parallel_size

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the rank."""
        return num_kv_heads(self.model, self.tensor_parallel_size)

    def stages(self) -> tuple[EngineShape, ...]:
        """The shape of each pipeline stage."""
        return tuple(replace(self, pipeline_rank=rank) for rank in range(self.pipeline_parallel_size))


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on the device, without the KV cache and the state that grows with it."""

    driver: int
    communication: int
    """Buffers between ranks."""
    weights: int
    rotary_table: int
    runner_state: int
    """Rows, block tables, the inputs of a step and the staging buffer."""
    activations: int
    sampling_scratch: int
    graphs: int

    @classmethod
    def of(cls, shape: EngineShape) -> Footprint:
        return cls(
            driver=DRIVER_BYTES if shape.device == "cuda" else 0,
            communication=communication_bytes(shape),
            weights=weight_bytes(shape),
            rotary_table=_max_positions(shape) * shape.model.head_dim * _FLOAT32,
            runner_state=runner_state_bytes(shape),
            activations=activation_bytes(shape),
            sampling_scratch=sampling_scratch_bytes(shape),
            graphs=graph_bytes(shape),
        )

    @property
    def taken_by_loading(self) -> int:
        """Memory in use after loading the weights, before the KV cache is allocated."""
        return self.driver + self.communication + self.weights + self.rotary_table

    @property
    def total(self) -> int:
        return self.taken_by_loading + self.runner_state + self.activations + self.sampling_scratch + self.graphs


def kv_block_bytes(shape: EngineShape) -> int:
    """Bytes of one KV block over all layers of the rank, a drafter's included."""
    ranks, layers = shape.tensor_parallel_size, shape.layers
    layout = KVLayout.of(shape.model, 1, shape.block_size, shape.dtype, tensor_parallel_size=ranks, layers=layers)
    return (layout.with_layers(shape.drafter.kv_specs) if shape.is_last else layout).bytes_per_block


def state_block_bytes(shape: EngineShape) -> int:
    """Bytes of the runner's state for each KV block: V2 keeps the token id of every slot."""
    return token_page_bytes(shape.block_size) if shape.runner == "v2" else 0


def weight_bytes(shape: EngineShape) -> int:
    """Weights on one rank of a pipeline stage, with those of its drafter."""
    model, ranks = shape.model, shape.tensor_parallel_size
    matrix = vocab_rows(model.vocab_size, ranks) * model.hidden_size  # of the embedding, and of the logits head
    weights = len(shape.layers) * model.layer_parameters(ranks)
    table = 0
    if shape.is_first or (shape.is_last and model.tie_word_embeddings):
        weights += matrix
        if ranks > 1:  # a row of zeros, and the table of each token's row
            weights += model.hidden_size
            table = model.vocab_size * _INT64
    if shape.is_last:
        weights += model.hidden_size  # the final norm
        # a tied head is the embedding; on a CPU it is packed, which makes a copy
        weights += matrix if not model.tie_word_embeddings or shape.device == "cpu" else 0
    return weights * DTYPE_BYTES[shape.dtype] + table + (shape.drafter.weight_bytes if shape.is_last else 0)


def communication_bytes(shape: EngineShape) -> int:
    """NCCL's memory and the buffers between ranks."""
    row_bytes, on_gpu = shape.model.hidden_size * DTYPE_BYTES[shape.dtype], shape.device == "cuda"
    tensor = tensor_group_bytes(shape.tensor_parallel_size, row_bytes) if on_gpu else 0
    step_bytes = shape.max_num_batched_tokens * row_bytes
    rank, size = shape.pipeline_rank, shape.pipeline_parallel_size
    return tensor + pipeline_group_bytes(rank, size, step_bytes, on_gpu=on_gpu)


def runner_state_bytes(shape: EngineShape) -> int:
    """Rows, block tables, step buffers and the staged front of V2; the inputs of a step of V1."""
    reqs, max_blocks = shape.max_num_seqs, -(-_max_positions(shape) // shape.block_size)
    inputs = step_buffer_bytes(reqs, shape.max_num_batched_tokens, max_blocks)
    if shape.runner == "v1":
        return inputs + 2 * reqs * _INT32  # and query_start_loc and rows
    rows = row_table_bytes(reqs, max_blocks, shape.drafter.num_drafts)
    counts = 2 * reqs * _INT32  # of sampled and rejected tokens without drafts
    return inputs + rows + staging_bytes(reqs) + counts + reqs * row_size(shape.model.vocab_size) * _INT32


def activation_bytes(shape: EngineShape) -> int:
    """An upper estimate of a step's forward pass: the residual stream beside the widest part of a layer."""
    model, size, ranks = shape.model, DTYPE_BYTES[shape.dtype], shape.tensor_parallel_size
    query, kv = shape.num_heads * model.head_dim, shape.num_kv_heads * model.head_dim
    stream = 4 * model.hidden_size * size
    if ranks > 1 and shape.device == "cpu":  # all ranks' parts are gathered and summed
        stream += model.hidden_size * (ranks * size + 2 * _FLOAT32)
    attention = (3 * query + 2 * kv) * size
    # the reference of silu_and_mul computes in float32, with a tensor for each of its three steps
    product = 3 * _FLOAT32 if shape.kernels["silu_and_mul"] == "torch" else size
    mlp = model.intermediate_size // ranks * (2 * size + product)
    tokens = shape.max_num_batched_tokens
    return tokens * stream + max(tokens * mlp, tokens * attention + _attention_scratch_bytes(shape))


def sampling_scratch_bytes(shape: EngineShape) -> int:
    """Logits and their copies, and the temporaries of the rows that are processed at once."""
    at_once = min(_num_logits(shape), max(MAX_ELEMENTS[shape.device], shape.model.vocab_size))
    return _sampling_bytes(shape) + at_once * CHUNK_BYTES_PER_ELEMENT


def _num_logits(shape: EngineShape) -> int:
    """Elements of the logits of a step; 0 on ranks without them."""
    if not shape.is_last:
        return 0
    rows = min(shape.max_num_seqs * (1 + shape.drafter.num_drafts), shape.max_num_batched_tokens)
    return rows * shape.model.vocab_size


def _sampling_bytes(shape: EngineShape) -> int:
    """All logits in the model's dtype and processed in float32, and on a GPU an int32 for each: counts for penalties,
    then positions for filters."""
    num_logits, ranks = _num_logits(shape), shape.tensor_parallel_size
    size, scratch = DTYPE_BYTES[shape.dtype], _INT32 if shape.device == "cuda" else 0
    total = num_logits * (size + _FLOAT32 + scratch)
    if ranks > 1:  # a rank's own part, and all parts gathered
        rows = num_logits // shape.model.vocab_size
        total += rows * vocab_rows(shape.model.vocab_size, ranks) * (1 + ranks) * size
    return total


def graph_bytes(shape: EngineShape) -> int:
    """The captured graphs, and their memory pool: the activations and logits of the largest shape."""
    table = shape.capture_table
    if not table.keys:
        return 0
    largest = max(key.num_tokens for key in table.keys)
    share = largest / max(shape.max_num_batched_tokens, largest)
    graphs = table.num_bytes(len(shape.layers), shape.model.hidden_size * DTYPE_BYTES[shape.dtype])
    return graphs + int(activation_bytes(shape) * share) + _sampling_bytes(shape)


def _attention_scratch_bytes(shape: EngineShape) -> int:
    if shape.kernels["attention"] != "sdpa":
        return 0
    return sdpa_workspace_bytes(
        shape.num_heads, shape.num_kv_heads, shape.model.head_dim, shape.max_model_len, DTYPE_BYTES[shape.dtype]
    )


def _max_positions(shape: EngineShape) -> int:
    """Positions of a request's tables: drafts may lie beyond the longest sequence."""
    return shape.max_model_len + shape.drafter.num_drafts


# --- sharing out a device ---------------------------------------------------------------------------------------------

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

"""The memory plan: bytes of each part of an engine on each rank, and the KV blocks that fit on all ranks. No torch.

The owner of each buffer has its formula; this module adds them up. Weights, KV and the runner's state are exact.
Activations, scratch, graphs and the driver are upper estimates: on an H100, an 8B Llama's engine with the torch
operations reserved 2.6 GiB for its largest steps, and the estimate is 2.9.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from fleetfoot.config.engine import KV_DTYPES, EngineConfig
from fleetfoot.config.model import DTYPE_BYTES, AttentionSpec, ExpertsSpec, MLPSpec, ModelConfig, RecurrentSpec
from fleetfoot.config.sharding import num_kv_heads, pipeline_layers, vocab_rows
from fleetfoot.distributed import COLLECTIVE_BYTES, pipeline_group_bytes, tensor_group_bytes
from fleetfoot.kernels.attention import sdpa_workspace_bytes
from fleetfoot.kernels.interface import NO_LAYER_CHAIN, KernelPlan, LayerChainPlan
from fleetfoot.kernels.prepare.tables import (
    group_buffer_bytes,
    row_table_bytes,
    staging_bytes,
    state_table_bytes,
    step_buffer_bytes,
    token_page_bytes,
)
from fleetfoot.kernels.sampling import CHUNK_BYTES_PER_ELEMENT, MAX_ELEMENTS
from fleetfoot.quantization.base import LinearMethods
from fleetfoot.quantization.unquantized import UNQUANTIZED
from fleetfoot.records.forward_context import CHUNK
from fleetfoot.records.kv_layout import (
    ARENA,
    ONE_GROUP,
    KVGroup,
    KVLayout,
    kv_cache_specs,
    make_groups,
    most_tokens,
    slabs_of,
)
from fleetfoot.runner.graphs import CaptureTable
from fleetfoot.sampling.shape import grammar_mask_size, row_size
from fleetfoot.speculative.find import NO_DRAFTER, DrafterShape

DEFAULT_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
_CPU_PROMPT_STEP_S = 0.016
_LAUNCH_BOUND_PRODUCTS = 42 * 10**9
"""Weights times tokens that a GPU multiplies while the host launches a decoder layer's kernels one by one: 0.34 ms, or
2,700 tokens of Qwen3-0.6B, measured on an H100. Graphs pay up to about so many; beyond, padding to them costs more."""
_FULL_STEP_PRODUCTS = 4 * _LAUNCH_BOUND_PRODUCTS
"""The same for a full step, which is hardly padded: a slow host takes 1.6 times as long to launch, and its other work
on the step adds to that. 16 prompts of 512 tokens take Qwen3-0.6B on an H100 23.7 ms there, and 18.8 ms elsewhere."""
_DRIVER_BYTES = 832 << 20
"""A GPU's driver, torch's context, cuBLAS workspaces and compiled kernels, before any allocation."""
_INT32, _INT64, _FLOAT32 = 4, 8, 4


@dataclass(frozen=True)
class EngineShape:
    """Everything that memory depends on."""

    config: EngineConfig
    model: ModelConfig
    dtype: str
    device: str
    runner: str
    kernels: KernelPlan
    max_model_len: int
    drafter: DrafterShape = NO_DRAFTER
    linear_methods: LinearMethods = UNQUANTIZED
    pipeline_rank: int = 0
    """The pipeline stage that is counted. All ranks of a tensor group have the same."""
    layer_chain: LayerChainPlan = NO_LAYER_CHAIN
    kv_layout: str = ARENA
    frees_windows: bool = False
    """Whether KV before the windows of layers is freed."""

    @property
    def kv_dtype(self) -> str:
        """The dtype of the KV cache."""
        return KV_DTYPES.get(self.config.kv_cache_dtype, self.dtype)

    @cached_property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The groups of layers in the KV cache, the same on all ranks."""
        if not (self.frees_windows or self.model.has_states):
            return ONE_GROUP
        specs = kv_cache_specs(self.model, self.dtype, tensor_parallel_size=self.config.tensor_parallel_size)
        others = self.drafter.kv_specs
        slots = 1 + self.drafter.num_drafts
        return make_groups(specs, others, self.config.block_size, self.kv_dtype, self.max_model_len, slots)

    @property
    def num_queries(self) -> int:
        """Tokens of a request that steps in flight compute at once, at least; see `SchedulerConfig.most_tokens`."""
        queries = 2 * (1 + self.drafter.num_drafts) + self.drafter.num_drafts + self.config.block_size
        return queries if self.config.enable_chunked_prefill else max(queries, self.max_num_batched_tokens)

    @cached_property
    def max_num_batched_tokens(self) -> int:
        """Raises ValueError if a step must hold a whole prompt and cannot."""
        config = self.config
        budget = config.max_num_batched_tokens or max(DEFAULT_BATCHED_TOKENS[self.device], config.max_decode_tokens)
        if config.enable_chunked_prefill or budget >= self.max_model_len:
            return budget
        if config.max_num_batched_tokens is None:
            return self.max_model_len
        raise ValueError(
            f"max_num_batched_tokens is {budget}, but without chunked prefill a step must hold a whole prompt of "
            f"max_model_len {self.max_model_len}; raise it, lower max_model_len, or set enable_chunked_prefill=True"
        )

    @property
    def prompt_step_s(self) -> float | None:
        """See `EnginePlan.prompt_step_s`: the default of a CPU, where 2,048 tokens can take a second."""
        config = self.config
        is_default = config.max_num_batched_tokens is None and config.enable_chunked_prefill
        return _CPU_PROMPT_STEP_S if self.device == "cpu" and is_default else None

    @cached_property
    def capture_table(self) -> CaptureTable:
        """The batch shapes that are captured as graphs."""
        layer_weights = self.model.layer_parameters(self.config.tensor_parallel_size) // self.model.num_layers
        return CaptureTable.of(
            device=self.device,
            enforce_eager=self.config.enforce_eager or self.runner == "v1",
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_drafts=self.drafter.num_drafts,
            most_mixed_tokens=_LAUNCH_BOUND_PRODUCTS // layer_weights,
            most_full_tokens=_FULL_STEP_PRODUCTS // layer_weights,
            short_contexts=self.layer_chain.max_contexts,
        )

    @property
    def layers(self) -> range:
        """The decoder layers of the rank."""
        return pipeline_layers(self.model, self.pipeline_rank, self.config.pipeline_parallel_size)

    @property
    def is_first(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last(self) -> bool:
        return self.pipeline_rank == self.config.pipeline_parallel_size - 1

    @property
    def max_positions(self) -> int:
        """Positions of a request's tables: drafts may lie beyond the longest sequence."""
        return self.max_model_len + self.drafter.num_drafts

    @property
    def longest_blocks(self) -> int:
        """KV blocks, or slabs, of the longest request."""
        return slabs_of(self.kv_groups, self.config.block_size, self.max_model_len, self.num_queries)

    @property
    def least_blocks(self) -> int:
        """KV blocks, or slabs, of the shortest request."""
        return slabs_of(self.kv_groups, self.config.block_size, LEAST_TOKENS, self.num_queries)

    @property
    def useful_blocks(self) -> int:
        """KV blocks, or slabs, of all requests of maximum length, and of the prompts in two steps in flight."""
        chunks = 2 * self.max_num_batched_tokens // self.config.block_size
        windows = [group for group in self.kv_groups if group.window is not None]
        states = [group for group in self.kv_groups if group.is_state]
        # and for each request a state that it keeps, and two snapshots in the prefix cache
        snapshots = sum(3 * self.config.max_num_seqs // group.blocks_per_slab + 1 for group in states)
        longest = self.longest_blocks * self.config.max_num_seqs
        return longest + snapshots + sum(chunks // g.blocks_per_slab + 1 for g in windows)

    @property
    def unused_blocks(self) -> int:
        """Slabs that are there and never used."""
        return int(len(self.kv_groups) > 1)

    def stages(self) -> tuple[EngineShape, ...]:
        """The shape of each pipeline stage."""
        return tuple(replace(self, pipeline_rank=rank) for rank in range(self.config.pipeline_parallel_size))


def kv_block_bytes(shape: EngineShape) -> int:
    """Bytes of one KV block over all layers of the rank, a drafter's included; or of a slab."""
    layout = KVLayout.of(
        shape.model,
        1,
        shape.config.block_size,
        shape.dtype,
        tensor_parallel_size=shape.config.tensor_parallel_size,
        layers=shape.layers,
        groups=shape.kv_groups,
        kv_dtype=shape.kv_dtype,
    )
    return (layout.with_layers(shape.drafter.kv_specs) if shape.is_last else layout).bytes_per_block


def state_block_bytes(shape: EngineShape) -> int:
    """Bytes of the runner's state for each KV block, or slab: V2 keeps the token id of every slot."""
    blocks = shape.kv_groups[0].blocks_per_slab
    return blocks * token_page_bytes(shape.config.block_size) if shape.runner == "v2" else 0


def weight_bytes(shape: EngineShape) -> int:
    """Weights on one rank of a pipeline stage, with those of its drafter."""
    model, ranks, methods = shape.model, shape.config.tensor_parallel_size, shape.linear_methods
    size = DTYPE_BYTES[shape.dtype]
    total = methods.layer_bytes(model, shape.layers, shape.dtype, ranks, split=shape.config.expert_split)
    rows, hidden = vocab_rows(model.vocab_size, ranks), model.hidden_size
    if shape.is_first or (shape.is_last and model.tie_word_embeddings):
        total += methods.embedding_bytes("model.embed_tokens", rows, hidden, shape.dtype)
        if ranks > 1:  # a row of zeros, and the table of each token's row
            total += hidden * size + model.vocab_size * _INT64
    if shape.is_last:
        total += hidden * size + shape.drafter.weight_bytes  # the final norm
        if not model.tie_word_embeddings:
            total += methods.of(["lm_head"]).num_bytes(rows, hidden, shape.dtype)
        elif shape.device == "cpu" and not _looks_up_packed_rows(shape):
            total += rows * hidden * size  # the tied head is the embedding, packed, which makes a copy
    return total


def _looks_up_packed_rows(shape: EngineShape) -> bool:
    """Whether an embedding on a CPU reads the matrix of the tied head."""
    has_kernel = shape.kernels["prepare_linear"] == "native" and shape.dtype != "float16"
    return has_kernel and shape.config.tensor_parallel_size == 1


def graph_bytes(shape: EngineShape) -> int:
    """The captured graphs, and their memory pool: the activations and logits of the largest shape."""
    table = shape.capture_table
    if not table.shapes:
        return 0
    largest = table.most_tokens
    share = largest / max(shape.max_num_batched_tokens, largest)
    graphs = table.num_bytes(len(shape.layers), shape.model.hidden_size * DTYPE_BYTES[shape.dtype])
    return graphs + int(activation_bytes(shape) * share) + _logits_bytes(shape)


def activation_bytes(shape: EngineShape) -> int:
    """An upper estimate of a step's forward pass: the residual stream beside the widest part of a layer."""
    model, size, ranks = shape.model, DTYPE_BYTES[shape.dtype], shape.config.tensor_parallel_size
    stream = 4 * model.hidden_size * size
    if ranks > 1 and shape.device == "cpu":  # all ranks' parts are gathered and summed
        stream += model.hidden_size * (ranks * size + 2 * _FLOAT32)
    widest = max(max(_mixer_bytes(shape, layer.mixer), _mlp_bytes(shape, layer.mlp)) for layer in model.layers)
    return shape.max_num_batched_tokens * stream + widest + _workspace_bytes(shape)


def _workspace_bytes(shape: EngineShape) -> int:
    """What the product of a quantized matrix needs beside its input and output."""
    model, ranks = shape.model, shape.config.tensor_parallel_size
    found = (
        shape.linear_methods.of(f"model.layers.{index}.{part}" for part in linear.parts).workspace_bytes(
            linear.num_outputs, linear.num_inputs, shape.max_num_batched_tokens, shape.dtype
        )
        for index, layer in enumerate(model.layers)
        for linear in layer.linears(model.hidden_size, ranks)
    )
    return max(found, default=0)


def _mixer_bytes(shape: EngineShape, mixer: AttentionSpec | RecurrentSpec) -> int:
    size, ranks = DTYPE_BYTES[shape.dtype], shape.config.tensor_parallel_size
    if not isinstance(mixer, AttentionSpec):
        # projections, convolved and divided; in torch in float32, and a state before each chunk
        rows = sum(linear.num_outputs for linear in mixer.linears(shape.model.hidden_size, ranks))
        has_kernel = shape.kernels["recurrence"] == "triton"
        num_chunks = shape.max_num_batched_tokens // CHUNK + min(shape.config.max_num_seqs, CHUNK)
        states = num_chunks * mixer.states(ranks).num_recurrent * (size if has_kernel else 2 * _FLOAT32)
        return shape.max_num_batched_tokens * rows * (3 * size if has_kernel else size + 6 * _FLOAT32) + states
    query_heads, kv_heads = mixer.num_heads // ranks, num_kv_heads(mixer, ranks)
    # q and k of all ranks: gathered, divided and after their norms
    normed = 3 * (mixer.num_heads + mixer.num_kv_heads) * mixer.qk_norm_over_heads
    total = shape.max_num_batched_tokens * (3 * query_heads + 2 * kv_heads + normed) * mixer.head_dim * size
    if shape.kernels["attention"] == "sdpa":
        total += sdpa_workspace_bytes(query_heads, kv_heads, mixer.head_dim, shape.max_model_len, size)
    return total


def _mlp_bytes(shape: EngineShape, mlp: MLPSpec | ExpertsSpec) -> int:
    size = DTYPE_BYTES[shape.dtype]
    if isinstance(mlp, ExpertsSpec):
        # of each expert of a token: between the products, with its copies in float32 in torch, and the output
        part = mlp.intermediate_size
        if shape.config.expert_split is None:
            part //= shape.config.tensor_parallel_size
        between = part * (size if shape.kernels["experts"] == "triton" else 2 * size + 3 * _FLOAT32)
        of_expert = mlp.num_chosen * (between + shape.model.hidden_size * _FLOAT32)
        if (num_ranks := shape.config.num_data_ranks) > 1:  # tokens of all ranks, as they are sent and after that
            of_expert = num_ranks * (of_expert + 3 * shape.model.hidden_size * size)
        of_experts = shape.max_num_batched_tokens * of_expert
        return of_experts + (_mlp_bytes(shape, MLPSpec(mlp.shared_size)) if mlp.shared_size else 0)
    # the references of silu_and_mul and gelu_and_mul compute in float32, with a tensor for each of their three steps
    product = 3 * _FLOAT32 if shape.kernels["silu_and_mul"] == "torch" else size
    part = mlp.intermediate_size // shape.config.tensor_parallel_size
    return shape.max_num_batched_tokens * part * (2 * size + product)


def rotary_bytes(model: ModelConfig, layers: range, max_positions: int) -> int:
    """The tables of angles of the layers."""
    return sum(head_dim for _, head_dim in model.rotary_tables(layers)) * max_positions * _FLOAT32


def runner_state_bytes(shape: EngineShape) -> int:
    """Rows, block tables, step buffers and the staged front of V2; the inputs of a step of V1."""
    reqs, max_blocks = shape.config.max_num_seqs, -(-shape.max_positions // shape.config.block_size)
    # and for V1 query_start_loc and rows, for V2 the counts of sampled and rejected tokens without drafts
    inputs = step_buffer_bytes(reqs, shape.max_num_batched_tokens, max_blocks) + 2 * reqs * _INT32
    for group in shape.kv_groups[1:]:
        of_tables = reqs, shape.max_num_batched_tokens, max_blocks
        inputs += state_table_bytes(*of_tables, group.num_slots) if group.is_state else group_buffer_bytes(*of_tables)
    if shape.runner == "v1":
        return inputs
    rows = row_table_bytes(reqs, max_blocks, shape.drafter.num_drafts)
    grammar_masks = (1 + shape.drafter.num_drafts) * grammar_mask_size(shape.model.vocab_size)
    return inputs + rows + staging_bytes(reqs) + reqs * (row_size(shape.model.vocab_size) + grammar_masks) * _INT32


def sampling_scratch_bytes(shape: EngineShape) -> int:
    """Logits and their copies, and the temporaries of the rows that are processed at once."""
    vocab_size = shape.model.vocab_size
    at_once = min(_num_logits_rows(shape) * vocab_size, max(MAX_ELEMENTS[shape.device], vocab_size))
    return _logits_bytes(shape) + at_once * CHUNK_BYTES_PER_ELEMENT


def _num_logits_rows(shape: EngineShape) -> int:
    """Rows of the logits of a step; 0 on ranks without them."""
    most = shape.config.max_num_seqs * (1 + shape.drafter.num_drafts)
    return min(most, shape.max_num_batched_tokens) if shape.is_last else 0


def _logits_bytes(shape: EngineShape) -> int:
    """All logits of the head, processed in float32, and on a GPU an int32 for each: counts for penalties, then
    positions for filters."""
    vocab_size, ranks = shape.model.vocab_size, shape.config.tensor_parallel_size
    size, scratch = (DTYPE_BYTES[shape.dtype], _INT32) if shape.device == "cuda" else (_FLOAT32, 0)
    row = vocab_size * (size + _FLOAT32 + scratch)
    if ranks > 1:  # a rank's own part, and all parts gathered
        row += vocab_rows(vocab_size, ranks) * (1 + ranks) * size
    return _num_logits_rows(shape) * row


def communication_bytes(shape: EngineShape) -> int:
    """NCCL's memory and the buffers between ranks."""
    row_bytes, on_gpu = shape.model.hidden_size * DTYPE_BYTES[shape.dtype], shape.device == "cuda"
    tensor = tensor_group_bytes(shape.config.tensor_parallel_size, row_bytes) if on_gpu else 0
    if on_gpu and shape.config.num_data_ranks > 1:  # of the replicas, and of all ranks that share experts
        tensor += 2 * COLLECTIVE_BYTES
    step_bytes = shape.max_num_batched_tokens * row_bytes
    rank, size = shape.pipeline_rank, shape.config.pipeline_parallel_size
    return tensor + pipeline_group_bytes(rank, size, step_bytes, on_gpu=on_gpu) + on_gpu * _move_bytes(shape)


def _move_bytes(shape: EngineShape) -> int:
    """The buffers that experts move through: those of a layer on a rank."""
    split = shape.config.expert_split
    if split is None or not split.is_balanced:
        return 0
    return max(
        split.most_slots(spec.num_experts)
        * shape.linear_methods.of_experts(f"model.layers.{number}.mlp.experts").num_bytes(
            replace(spec, num_experts=1), shape.model.hidden_size, shape.dtype
        )
        for number in range(shape.model.num_layers)
        if (spec := shape.model.layers[number].experts) is not None
    )


_LOADED = ("weights", "rotary_table", "communication", "driver")
"""The parts that are there before the KV cache is allocated."""


def footprint(shape: EngineShape) -> dict[str, int]:
    """Bytes of each part on the device, without the KV cache and the state that grows with it."""
    model = shape.model
    return {
        "weights": weight_bytes(shape),
        "graphs": graph_bytes(shape),
        "activations": activation_bytes(shape),
        "runner_state": runner_state_bytes(shape),
        "rotary_table": rotary_bytes(model, shape.layers, shape.max_positions),
        "sampling_scratch": sampling_scratch_bytes(shape),
        "communication": communication_bytes(shape),
        "driver": _DRIVER_BYTES if shape.device == "cuda" else 0,
    }


GIB = 1 << 30
CPU_KV_SHARE = 0.4
"""The largest part of a CPU's memory, without the weights, for the KV cache."""
LEAST_TOKENS = 2
"""Least tokens of a request: one of the prompt, one of the output."""
CPU_KV_LIMIT = 4 * GIB
"""The largest KV cache on a CPU without kv_cache_memory_bytes."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes in bytes of the parts of an engine, on the rank with the least free memory."""

    total: int
    """The device's memory; on a CPU, a rank's share of the available memory."""
    budget: int
    """The memory that the engine may use: the share of gpu_memory_utilization; all on a CPU or with a set KV size."""
    footprint: Mapping[str, int]
    """See `footprint`."""
    num_blocks: int
    """KV blocks that can be used; with several groups of layers, slabs."""
    block_size: int
    """Tokens in a block."""
    bytes_per_block: int
    """KV of one block over all layers; with several groups, of a slab."""
    state_bytes_per_block: int
    kv_reason: str
    """The limit that determined ``num_blocks``."""
    groups: tuple[KVGroup, ...] = ONE_GROUP
    """The groups of layers in the KV cache."""
    num_queries: int = 1
    """See `EngineShape.num_queries`."""
    stages: tuple[MemoryPlan, ...] = ()
    """The plan of each pipeline rank, where there are several. They have equally many blocks."""

    def stage(self, pipeline_rank: int) -> MemoryPlan:
        """The plan of one pipeline rank."""
        return self.stages[pipeline_rank] if self.stages else self

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV cache holds of one request."""
        return self.longest_of(self.num_blocks)

    def longest_of(self, num_blocks: int) -> int:
        """Tokens of the longest request in so many blocks, or slabs."""
        return most_tokens(self.groups, self.block_size, num_blocks, self.num_queries)

    @property
    def num_allocated(self) -> int:
        """Blocks, or slabs, in memory: with several groups, one is never used."""
        return self.num_blocks + (len(self.groups) > 1)

    @property
    def kv_cache(self) -> int:
        return self.num_allocated * self.bytes_per_block

    @property
    def left(self) -> int:
        """Unused bytes of the budget."""
        return self.budget - sum(self.parts().values())

    @property
    def taken_by_loading(self) -> int:
        """Memory in use after loading the weights, before the KV cache is allocated."""
        return sum(self.footprint[name] for name in _LOADED)

    def parts(self) -> dict[str, int]:
        """Every part by name; with `left` they add up to the budget."""
        grown = self.footprint["runner_state"] + self.num_allocated * self.state_bytes_per_block
        parts = {"weights": 0, "kv_cache": self.kv_cache, **self.footprint}
        return {**parts, "runner_state": grown}

    def fitting_blocks(self, taken: int) -> int:
        """How many blocks fit if ``taken`` bytes are in use once the weights are loaded."""
        still_to_come = sum(self.footprint.values()) - self.taken_by_loading
        fitting = (self.budget - taken - still_to_come) // (self.bytes_per_block + self.state_bytes_per_block)
        return fitting - (len(self.groups) > 1)

    def concurrency(self, num_tokens: int, max_num_seqs: int) -> int:
        """How many requests of this length run at the same time without preemption."""
        slabs = sum(
            Fraction(group.most_blocks(num_tokens, self.num_queries, self.block_size), group.blocks_per_slab)
            for group in self.groups
            if group.has_layers
        )
        return min(max_num_seqs, math.floor(self.num_blocks / slabs))


def share_out(shape: EngineShape, total: int) -> tuple[MemoryPlan, str]:
    """Divide ``total`` bytes of each rank's device.

    Returns:
        The plan, and why it does not work; empty if it does.
    """
    shapes = shape.stages()
    stages = [_share_out_stage(stage, total) for stage in shapes]
    scarcest = min(stages, key=lambda stage: stage.num_blocks)
    even = [replace(stage, num_blocks=scarcest.num_blocks, kv_reason=scarcest.kv_reason) for stage in stages]
    problems = [_problem(*pair) for pair in zip(shapes, even, strict=True)]
    if len(even) == 1:
        return even[0], problems[0]
    tightest = min(range(len(even)), key=lambda rank: (not problems[rank], even[rank].left))
    problem = f"on pipeline rank {tightest}, {problems[tightest]}" if problems[tightest] else ""
    return replace(even[tightest], stages=tuple(even)), problem


def _share_out_stage(shape: EngineShape, total: int) -> MemoryPlan:
    config, sizes = shape.config, footprint(shape)
    block, state = kv_block_bytes(shape), state_block_bytes(shape)
    # a KV cache with a set size may use all memory
    is_share = shape.device == "cuda" and not is_kv_given(config)
    budget = int(total * config.gpu_memory_utilization) if is_share else total
    unused = shape.unused_blocks
    blocks, reason = (budget - sum(sizes.values())) // (block + state) - unused, "what gpu_memory_utilization leaves"
    if shape.device == "cpu":
        share = min(int((total - sizes["weights"]) * CPU_KV_SHARE), CPU_KV_LIMIT)
        blocks, reason = min(share // block - unused, blocks), "a share of the free memory"
    if config.kv_cache_memory_bytes is not None:
        blocks, reason = config.kv_cache_memory_bytes // block - unused, "kv_cache_memory_bytes"
    useful = shape.useful_blocks  # more is never used
    if blocks >= useful:
        blocks = useful
        if config.kv_cache_memory_bytes is None:
            reason = "as much as max_num_seqs requests of max_model_len can use"
    if blocks > (addressable := addressable_blocks(shape)):
        blocks, reason = addressable, "as much as tensor maps, which number rows of a head with 32 bits, can address"
    if config.num_gpu_blocks_override is not None:
        blocks, reason = config.num_gpu_blocks_override, "num_gpu_blocks_override"
    sizes_of_kv = max(0, blocks), config.block_size, block, state
    return MemoryPlan(total, budget, sizes, *sizes_of_kv, reason, shape.kv_groups, shape.num_queries)


def addressable_blocks(shape: EngineShape) -> int:
    """Most KV blocks, or slabs: on a GPU those that the Hopper kernels reach: a head is a row of a tensor map."""
    if shape.device != "cuda":
        return sys.maxsize
    head = min((mixer.head_dim for mixer in shape.model.attentions), default=1024) * DTYPE_BYTES[shape.kv_dtype]
    return max(1, (2**31 - 1) * head // kv_block_bytes(shape) - shape.unused_blocks)


def _problem(shape: EngineShape, plan: MemoryPlan) -> str:
    """Why the plan does not work; empty if it does."""
    config, blocks, block = shape.config, plan.num_blocks, plan.bytes_per_block
    is_given, needed, weights = is_kv_given(config), sum(plan.footprint.values()), plan.footprint["weights"]
    if needed > plan.budget or (blocks < 1 and not is_given):
        return (
            f"the model does not fit: {plan.budget:,} bytes can be used, its weights take {weights:,} and what runs it "
            f"{needed - weights:,}, which leaves no room for KV (a block takes {block:,})"
        )
    if blocks < 1:
        given = config.kv_cache_memory_bytes
        return f"no KV block fits: one takes {block:,} bytes and {given:,} are left ({plan.kv_reason})"
    if plan.num_tokens < LEAST_TOKENS:
        size = f"{plan.kv_reason}, block_size {plan.block_size}"
        return f"a request needs KV of at least {LEAST_TOKENS} tokens, and there is room for {plan.num_tokens} ({size})"
    if plan.left < 0:
        return (
            f"a KV cache of {blocks:,} blocks ({plan.kv_cache:,} bytes, from {plan.kv_reason}) does not fit: with all "
            f"else it would take {plan.budget - plan.left:,} bytes, and there are {plan.budget:,}"
        )
    if blocks > (most := addressable_blocks(shape)):
        return f"num_gpu_blocks_override is {blocks:,}; tensor maps, which number rows with 32 bits, address {most:,}"
    if plan.num_tokens < shape.max_model_len and not is_given:
        needs = "max_model_len is" if config.max_model_len is not None else "a request needs at least"
        return (
            f"{needs} {shape.max_model_len:,}, but the KV cache has room for {plan.num_tokens:,} tokens "
            f"({plan.kv_cache:,} bytes, {plan.kv_reason})"
        )
    return ""


def is_kv_given(config: EngineConfig) -> bool:
    """Whether the settings determine the size of the KV cache."""
    return config.num_gpu_blocks_override is not None or config.kv_cache_memory_bytes is not None

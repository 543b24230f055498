"""Bytes of each part of an engine on the device of a rank, from shapes alone. No torch.

The owner of each buffer has its formula; this module adds them up. Weights, KV and the runner's state are exact.
Activations, scratch, graphs and the driver are upper estimates: on an H100, an 8B Llama's engine with the torch
operations reserved 2.6 GiB for its largest steps, and the estimate is 2.9.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleetfoot.config.model import DTYPE_BYTES, ModelConfig
from fleetfoot.config.sharding import layer_parameters, num_kv_heads, pipeline_layers, vocab_rows
from fleetfoot.distributed import pipeline_group_bytes, tensor_group_bytes
from fleetfoot.kernels.attention import sdpa_workspace_bytes
from fleetfoot.kernels.interface import KernelPlan
from fleetfoot.kernels.prepare.tables import row_table_bytes, staging_bytes, step_buffer_bytes, token_page_bytes
from fleetfoot.kernels.sampling import CHUNK_BYTES_PER_ELEMENT, MAX_ELEMENTS
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.runner.capture_table import CaptureTable
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
    model, ranks = shape.model, shape.tensor_parallel_size
    matrix = vocab_rows(model.vocab_size, ranks) * model.hidden_size  # of the embedding, and of the logits head
    weights = len(shape.layers) * layer_parameters(model, ranks)
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

"""How many bytes each part of an engine takes on the device of a rank, from shapes alone. No torch.

Weights, KV and the runner's state are exact. Activations, scratch, graphs and the driver are upper estimates: on an
H100, an 8B Llama's engine with the torch operations reserved 2.6 GiB for its largest steps, where these say 2.9.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fleetfoot.config.model import DTYPE_BYTES, ModelConfig
from fleetfoot.config.sharding import layer_parameters, num_kv_heads, pipeline_layers, vocab_rows
from fleetfoot.kernels.interface import KernelPlan
from fleetfoot.kernels.sampling import CHUNK_BYTES_PER_ELEMENT, MAX_ELEMENTS
from fleetfoot.runner.capture_table import CaptureTable
from fleetfoot.sampling.shape import row_size
from fleetfoot.speculative.find import NO_DRAFTER, DrafterShape

if TYPE_CHECKING:
    pass

MIB = 1 << 20
DRIVER_BYTES = 832 * MIB
"""What a GPU's driver, torch's context, cuBLAS workspaces and compiled kernels take before anything is allocated."""

_INT32, _INT64, _FLOAT32 = 4, 8, 4
_STATE_FIELDS = 4
"""int32 in a row of V2's RequestState that the host writes."""
_SDPA_GATHERED, _SDPA_MASK = 1 << 22, 1 << 21
"""Most elements that the torch attention backend gathers of K for decodes, and of a piece of a prefill's mask."""
_GRAPH_BYTES_PER_LAYER = 96 * 1024
"""Of one captured graph: a dozen kernels a layer, each with its node and its arguments."""
_SAMPLING_VARIANTS = 3
"""Graphs of one shape that are counted: one for each way of sampling that it has been met with, of which an engine that
serves one kind of request sees one or two."""
_COLLECTIVE_BYTES, _POINT_TO_POINT_BYTES = 752 * MIB, 520 * MIB
"""What NCCL takes for a communicator that sums and gathers, and for one between two ranks, each with what its kernels
take of the driver: measured on two H200s, torch 2.11."""
_ONE_SHOT_ROWS, _ONE_SHOT_SETS = 128, 2
"""Rows and sets of words of `fleetfoot.distributed.custom_all_reduce`."""


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
    """Whose memory is counted. All ranks of a tensor group take the same."""
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
        """The same engine from the side of each pipeline rank."""
        return tuple(replace(self, pipeline_rank=rank) for rank in range(self.pipeline_parallel_size))


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on the device of everything but the KV cache and what grows with it."""

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
        """What is taken once the weights are loaded, before there is a KV cache."""
        return self.driver + self.communication + self.weights + self.rotary_table

    @property
    def total(self) -> int:
        return self.taken_by_loading + self.runner_state + self.activations + self.sampling_scratch + self.graphs


def kv_block_bytes(shape: EngineShape) -> int:
    """Bytes of one KV block over all layers of the rank, a drafter's included."""
    elements = len(shape.layers) * shape.num_kv_heads * shape.model.head_dim
    of_drafter = shape.drafter.kv_block_bytes(shape.dtype, shape.block_size) if shape.is_last else 0
    return 2 * elements * DTYPE_BYTES[shape.dtype] * shape.block_size + of_drafter


def state_block_bytes(shape: EngineShape) -> int:
    """Bytes of the runner's state that come with each KV block: V2 keeps the token id of every slot."""
    return _INT32 * shape.block_size if shape.runner == "v2" else 0


def weight_bytes(shape: EngineShape) -> int:
    model, ranks = shape.model, shape.tensor_parallel_size
    matrix = vocab_rows(model.vocab_size, ranks) * model.hidden_size  # of the embedding, and of the logits head
    weights = len(shape.layers) * layer_parameters(model, ranks)
    table = 0
    if shape.is_first or (shape.is_last and model.tie_word_embeddings):
        weights += matrix
        if ranks > 1:  # a row of zeros, and which row is each token's
            weights += model.hidden_size
            table = model.vocab_size * _INT64
    if shape.is_last:
        weights += model.hidden_size  # the final norm
        # a tied head is the embedding; on a CPU it is packed, which makes a copy
        weights += matrix if not model.tie_word_embeddings or shape.device == "cpu" else 0
    return weights * DTYPE_BYTES[shape.dtype] + table + (shape.drafter.weight_bytes if shape.is_last else 0)


def communication_bytes(shape: EngineShape) -> int:
    """NCCL's own memory, by estimate; the words of one-shot sums and the buffers of a pipeline, exactly."""
    size, ranks = DTYPE_BYTES[shape.dtype], shape.tensor_parallel_size
    on_gpu = shape.device == "cuda"
    total = 0
    if ranks > 1 and on_gpu:
        words = shape.model.hidden_size * size // 4
        total += _COLLECTIVE_BYTES + _ONE_SHOT_SETS * ranks * _ONE_SHOT_ROWS * words * _INT64
    if shape.pipeline_parallel_size > 1:
        step = 2 * shape.max_num_batched_tokens * shape.model.hidden_size * size
        # what arrives; on GPUs also where all ranks let others write, on a CPU what leaves
        num_buffers = (0 if shape.is_first else 1) + (1 if on_gpu or not shape.is_last else 0)
        num_peers = shape.pipeline_parallel_size  # neighbours, and the way of the packets
        total += num_buffers * step + (num_peers * _POINT_TO_POINT_BYTES if on_gpu else 0)
    return total


def runner_state_bytes(shape: EngineShape) -> int:
    reqs, tokens = shape.max_num_seqs, shape.max_num_batched_tokens
    table = reqs * -(-_max_positions(shape) // shape.block_size) * _INT32
    # input ids, positions and slots of each token; a row number too
    inputs = tokens * (3 * _INT64 + _INT32) + reqs * 3 * _INT32
    if shape.runner == "v1":
        return table + inputs
    # and the last sampled token, and drafts
    rows = reqs * (_STATE_FIELDS + 1) * _INT32 + (reqs + 1) * shape.drafter.num_drafts * _INT32
    staging = (2 * reqs + 1) * _INT32  # what is staged behind that stays on the host
    return 2 * table + inputs + rows + reqs * row_size(shape.model.vocab_size) * _INT32 + staging


def activation_bytes(shape: EngineShape) -> int:
    """An upper estimate of a step's forward pass: the residual stream beside the widest part of a layer."""
    model, size, ranks = shape.model, DTYPE_BYTES[shape.dtype], shape.tensor_parallel_size
    query, kv = shape.num_heads * model.head_dim, shape.num_kv_heads * model.head_dim
    stream = 4 * model.hidden_size * size
    if ranks > 1 and shape.device == "cpu":  # sums are made of everybody's parts
        stream += model.hidden_size * (ranks * size + 2 * _FLOAT32)
    attention = (3 * query + 2 * kv) * size
    # the torch twin of silu_and_mul computes in float32, a tensor for each of its three steps
    product = 3 * _FLOAT32 if shape.kernels["silu_and_mul"] == "torch" else size
    mlp = model.intermediate_size // ranks * (2 * size + product)
    tokens = shape.max_num_batched_tokens
    return tokens * stream + max(tokens * mlp, tokens * attention + _attention_scratch_bytes(shape))


def sampling_scratch_bytes(shape: EngineShape) -> int:
    """What sampling computes in, and the temporaries of rows that are worked on at once (a GPU sorts for very many
    logprobs alone)."""
    at_once = min(_num_logits(shape), max(MAX_ELEMENTS[shape.device], shape.model.vocab_size))
    return _sampling_bytes(shape) + at_once * CHUNK_BYTES_PER_ELEMENT


def _num_logits(shape: EngineShape) -> int:
    """Of a step, on the rank that has them."""
    if not shape.is_last:
        return 0
    rows = min(shape.max_num_seqs * (1 + shape.drafter.num_drafts), shape.max_num_batched_tokens)
    return rows * shape.model.vocab_size


def _sampling_bytes(shape: EngineShape) -> int:
    """Of all logits: as the model gives them; edited, in float32; and on a GPU what is noted of each, which is counts
    for penalties, and then places for filters."""
    num_logits, ranks = _num_logits(shape), shape.tensor_parallel_size
    size, noted = DTYPE_BYTES[shape.dtype], _INT32 if shape.device == "cuda" else 0
    total = num_logits * (size + _FLOAT32 + noted)
    if ranks > 1:  # a rank's own part, and everybody's as they arrive
        rows = num_logits // shape.model.vocab_size
        total += rows * vocab_rows(shape.model.vocab_size, ranks) * (1 + ranks) * size
    return total


def graph_bytes(shape: EngineShape) -> int:
    """Nodes of every captured shape, and the hidden states that it leaves behind. What they compute in is one pool, as
    large as the largest shape's activations and logits: all activations of a step, where full steps are captured."""
    keys = shape.capture_table.keys
    if not keys:
        return 0
    largest = max(key.num_tokens for key in keys)
    share = largest / max(shape.max_num_batched_tokens, largest)
    nodes = len(keys) * len(shape.layers) * _GRAPH_BYTES_PER_LAYER
    hidden = sum(key.num_tokens for key in keys) * shape.model.hidden_size * DTYPE_BYTES[shape.dtype]
    return _SAMPLING_VARIANTS * (nodes + hidden) + int(activation_bytes(shape) * share) + _sampling_bytes(shape)


def _attention_scratch_bytes(shape: EngineShape) -> int:
    """Of the torch backend: K and V of one sequence, gathered and repeated for each query head, and the scores of a
    piece of a prefill in float32 and as probabilities."""
    if shape.kernels["attention"] != "sdpa":
        return 0
    model, size = shape.model, DTYPE_BYTES[shape.dtype]
    gathered = 2 * (shape.num_heads + shape.num_kv_heads) * model.head_dim * shape.max_model_len * size
    scores = _SDPA_MASK * shape.num_heads * (_FLOAT32 + size)
    return max(gathered + scores, 4 * _SDPA_GATHERED * size)


def _max_positions(shape: EngineShape) -> int:
    """Positions that a request's tables have room for: drafts may reach beyond the longest sequence."""
    return shape.max_model_len + shape.drafter.num_drafts

"""How many bytes each part of an engine takes on its device, from shapes alone. No torch.

Weights, KV and the runner's state are exact. Activations, scratch and graphs are upper estimates.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetfoot.config.model import DTYPE_BYTES, ModelConfig
from fleetfoot.plan.graphs import CaptureTable

MIB = 1 << 20
DRIVER_BYTES = 640 * MIB
"""What a GPU's driver, torch's context, cuBLAS workspaces and compiled kernels take before anything is allocated."""

_INT32, _INT64, _FLOAT32 = 4, 8, 4
_STATE_FIELDS = 13
"""int32 in a row of V2's RequestState that the host writes: eleven fields and a seed of two."""
_NUM_SLOTS_OF_HEADER = 8
_SCRATCH_ELEMENTS = 1 << 24
"""Logits that sampling works on at once on a GPU (`fleetfoot.sampling.gumbel.rows_per_chunk`)."""
_SCRATCH_BYTES_PER_ELEMENT = 48
"""Of a chunk: sorted values, their indices, sums and masks, or the integers that noise is made of."""
_SDPA_ELEMENTS = 1 << 22
"""Gathered elements and mask entries of the torch attention backend, which works in pieces of this size."""
_GRAPH_BYTES_PER_LAYER = 96 * 1024
"""Of one captured graph: a dozen kernels a layer, each with its node and its arguments."""


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


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on the device of everything but the KV cache and what grows with it."""

    driver: int
    weights: int
    runner_state: int
    """Rows, block tables, the inputs of a step, the staging buffer and the rotary table."""
    activations: int
    sampling_scratch: int
    graphs: int

    @classmethod
    def of(cls, shape: EngineShape) -> Footprint:
        return cls(
            driver=DRIVER_BYTES if shape.device == "cuda" else 0,
            weights=weight_bytes(shape),
            runner_state=runner_state_bytes(shape),
            activations=activation_bytes(shape),
            sampling_scratch=sampling_scratch_bytes(shape),
            graphs=graph_bytes(shape),
        )

    @property
    def total(self) -> int:
        return (
            self.driver
            + self.weights
            + self.runner_state
            + self.activations
            + self.sampling_scratch
            + self.graphs
        )


def kv_block_bytes(shape: EngineShape) -> int:
    """Bytes of one KV block over all layers."""
    return shape.model.kv_bytes_per_token(shape.dtype) * shape.block_size


def state_block_bytes(shape: EngineShape) -> int:
    """Bytes of the runner's state that come with each KV block: V2 keeps the token id of every slot."""
    return _INT32 * shape.block_size if shape.runner == "v2" else 0


def weight_bytes(shape: EngineShape) -> int:
    model, size = shape.model, DTYPE_BYTES[shape.dtype]
    weights = model.num_parameters * size
    if model.tie_word_embeddings and shape.device == "cpu":
        weights += model.vocab_size * model.hidden_size * size  # the logits head is packed, a copy of the embedding
    return weights


def runner_state_bytes(shape: EngineShape) -> int:
    rotary = shape.max_model_len * shape.model.head_dim * _FLOAT32
    reqs, tokens = shape.max_num_seqs, shape.max_num_batched_tokens
    table = reqs * -(-shape.max_model_len // shape.block_size) * _INT32
    # input ids, positions and slots of each token; a row number too
    inputs = tokens * (3 * _INT64 + _INT32) + (reqs + 1) * 3 * _INT32
    if shape.runner == "v1":
        return rotary + table + inputs
    rows = reqs * _STATE_FIELDS * _INT32 + reqs * _INT32  # and the last sampled token
    max_writes = tokens + shape.max_model_len + reqs * (_STATE_FIELDS + 2)
    staging = (_NUM_SLOTS_OF_HEADER + 2 * reqs + 1 + 2 * max_writes) * _INT32
    return rotary + 2 * table + inputs + rows + staging


def activation_bytes(shape: EngineShape) -> int:
    """An upper estimate of a step's forward pass: the residual stream beside the widest part of a layer."""
    model, tokens = shape.model, shape.max_num_batched_tokens
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = 3 * query + 2 * kv + model.hidden_size
    mlp = 3 * model.intermediate_size + model.hidden_size
    stream = 3 * model.hidden_size  # the sum, a layer's input and its output
    step = tokens * (stream + max(attention, mlp)) * DTYPE_BYTES[shape.dtype]
    return step + _attention_scratch_bytes(shape)


def sampling_scratch_bytes(shape: EngineShape) -> int:
    """Logits as the model gives them and in float32, and the temporaries of the rows that are worked on at once."""
    logits = shape.max_num_seqs * shape.model.vocab_size
    at_once = min(logits, max(_SCRATCH_ELEMENTS, shape.model.vocab_size))
    return logits * (DTYPE_BYTES[shape.dtype] + _FLOAT32) + at_once * _SCRATCH_BYTES_PER_ELEMENT


def graph_bytes(shape: EngineShape) -> int:
    """Nodes of every captured shape; what they compute in is one pool, as large as the largest shape's activations."""
    keys = shape.capture_table.keys
    if not keys:
        return 0
    largest = max(key.num_tokens for key in keys)
    share = largest / max(shape.max_num_batched_tokens, largest)
    nodes = len(keys) * shape.model.num_layers * _GRAPH_BYTES_PER_LAYER
    return nodes + int(activation_bytes(shape) * share) + sampling_scratch_bytes(shape)


def _attention_scratch_bytes(shape: EngineShape) -> int:
    """Of the torch backend: K and V of one sequence gathered out of their blocks, and pieces of bounded size."""
    kv = 2 * shape.model.num_kv_heads * shape.model.head_dim * shape.max_model_len
    return (kv + 4 * _SDPA_ELEMENTS) * DTYPE_BYTES[shape.dtype]

"""How many bytes each part of an engine takes on its device, from shapes alone. No torch.

Weights, KV and the runner's state are exact. Activations, scratch, graphs and the driver are upper estimates: on an
H100, an 8B Llama's engine with the torch operations reserved 2.6 GiB for its largest steps, where these say 2.9.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetfoot.config.model import DTYPE_BYTES, ModelConfig
from fleetfoot.plan.backends import Backends
from fleetfoot.runner.capture_table import CaptureTable

MIB = 1 << 20
DRIVER_BYTES = 832 * MIB
"""What a GPU's driver, torch's context, cuBLAS workspaces and compiled kernels take before anything is allocated."""

_INT32, _INT64, _FLOAT32 = 4, 8, 4
_STATE_FIELDS = 13
"""int32 in a row of V2's RequestState that the host writes: eleven fields and a seed of two."""
_NUM_SLOTS_OF_HEADER = 8
_SCRATCH_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Logits that sampling works on at once (`fleetfoot.sampling.gumbel.rows_per_chunk`)."""
_SCRATCH_BYTES_PER_ELEMENT = 48
"""Of a chunk: sorted values, their indices, sums and masks, or the integers that noise is made of."""
_SDPA_GATHERED, _SDPA_MASK = 1 << 22, 1 << 21
"""Most elements that the torch attention backend gathers of K for decodes, and of a piece of a prefill's mask."""
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
    backends: Backends


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on the device of everything but the KV cache and what grows with it."""

    driver: int
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
            weights=weight_bytes(shape),
            rotary_table=shape.max_model_len * shape.model.head_dim * _FLOAT32,
            runner_state=runner_state_bytes(shape),
            activations=activation_bytes(shape),
            sampling_scratch=sampling_scratch_bytes(shape),
            graphs=graph_bytes(shape),
        )

    @property
    def taken_by_loading(self) -> int:
        """What is taken once the weights are loaded, before there is a KV cache."""
        return self.driver + self.weights + self.rotary_table

    @property
    def total(self) -> int:
        return self.taken_by_loading + self.runner_state + self.activations + self.sampling_scratch + self.graphs


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
    reqs, tokens = shape.max_num_seqs, shape.max_num_batched_tokens
    table = reqs * -(-shape.max_model_len // shape.block_size) * _INT32
    # input ids, positions and slots of each token; a row number too
    inputs = tokens * (3 * _INT64 + _INT32) + reqs * 3 * _INT32
    if shape.runner == "v1":
        return table + inputs
    rows = reqs * _STATE_FIELDS * _INT32 + reqs * _INT32  # and the last sampled token
    max_writes = tokens + shape.max_model_len + reqs * (_STATE_FIELDS + 2)
    staging = (_NUM_SLOTS_OF_HEADER + 2 * reqs + 1 + 2 * max_writes) * _INT32
    return 2 * table + inputs + rows + staging


def activation_bytes(shape: EngineShape) -> int:
    """An upper estimate of a step's forward pass: the residual stream beside the widest part of a layer."""
    model, size = shape.model, DTYPE_BYTES[shape.dtype]
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    stream = 4 * model.hidden_size * size
    attention = (3 * query + 2 * kv) * size
    # the torch twin of silu_and_mul computes in float32, a tensor for each of its three steps
    product = 3 * _FLOAT32 if shape.backends.ops == "torch" else size
    mlp = model.intermediate_size * (2 * size + product)
    tokens = shape.max_num_batched_tokens
    return tokens * stream + max(tokens * mlp, tokens * attention + _attention_scratch_bytes(shape))


def sampling_scratch_bytes(shape: EngineShape) -> int:
    """Logits as the model gives them and in float32, and the temporaries of the rows that are worked on at once."""
    logits = shape.max_num_seqs * shape.model.vocab_size
    at_once = min(logits, max(_SCRATCH_ELEMENTS[shape.device], shape.model.vocab_size))
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
    """Of the torch backend: K and V of one sequence, gathered and repeated for each query head, and the scores of a
    piece of a prefill in float32 and as probabilities."""
    if shape.backends.attention != "sdpa":
        return 0
    model, size = shape.model, DTYPE_BYTES[shape.dtype]
    gathered = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim * shape.max_model_len * size
    scores = _SDPA_MASK * model.num_heads * (_FLOAT32 + size)
    return max(gathered + scores, 4 * _SDPA_GATHERED * size)

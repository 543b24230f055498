"""Steps of a model over a paged KV cache, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fleetfoot.models.interface import CausalLM
from fleetfoot.records.forward_context import AttentionMetadata, ForwardContext

BLOCK_SIZE = 4
Queries = Sequence[tuple[int, int]]
"""Of a step's requests: the positions ``begin .. end - 1`` that are computed; those of one token come first."""


def kv_caches(model: CausalLM, num_blocks: int = 64) -> list[torch.Tensor]:
    """For the layers and heads of this part of a model. Nothing may be read that was not written: a NaN would show."""
    num_kv_heads = model.model.layers[str(model.layers[0])].self_attn.num_kv_heads
    shape = (num_blocks, 2, num_kv_heads, BLOCK_SIZE, model.config.head_dim)
    return [torch.full(shape, float("nan"), dtype=torch.float32) for _ in model.layers]


def step_metadata(queries: Queries, blocks_per_request: int = 16) -> AttentionMetadata:
    """Request ``i`` has blocks ``i * blocks_per_request``, ... ."""
    positions = torch.cat([torch.arange(begin, end) for begin, end in queries])
    request = torch.cat([torch.full((end - begin,), index) for index, (begin, end) in enumerate(queries)])
    lengths = [end - begin for begin, end in queries]
    tables = torch.arange(len(queries) * blocks_per_request, dtype=torch.int32).view(len(queries), -1)
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *lengths]).cumsum(0).int(),
        seq_lens=torch.tensor([end for _, end in queries], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=request * blocks_per_request * BLOCK_SIZE + positions,
        positions=positions,
        num_decodes=next((i for i, length in enumerate(lengths) if length != 1), len(lengths)),
        max_query_len=max(lengths),
        max_seq_len=max(end for _, end in queries),
    )


def step_inputs(queries: Queries, vocab_size: int) -> torch.Tensor:
    """Token ids that depend on request and position: ``[num_tokens]``."""
    tokens = [torch.arange(begin, end) * 7 + 13 * index + 3 for index, (begin, end) in enumerate(queries)]
    return torch.cat(tokens) % vocab_size


STEPS: tuple[Queries, ...] = (
    ((0, 20), (0, 3)),  # prompts
    ((20, 21), (3, 30)),  # a decode beside the rest of a prompt
    ((21, 22), (30, 31)),  # decodes
)


def run_steps(model: CausalLM) -> list[torch.Tensor]:
    """Logits ``[num_tokens, vocab_size]`` of each of STEPS."""
    caches, logits = kv_caches(model), []
    with torch.inference_mode():
        for queries in STEPS:
            metadata, input_ids = step_metadata(queries), step_inputs(queries, model.config.vocab_size)
            hidden = model(input_ids, ForwardContext(metadata, caches))
            assert isinstance(hidden, torch.Tensor)
            logits.append(model.compute_logits(hidden).clone())
    return logits

"""Forward passes of no request."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fleetfoot.kernels.recurrent.batch import make_state_batch
from fleetfoot.models.interface import CausalLM
from fleetfoot.records.forward_context import AttentionMetadata, ForwardContext, IntermediateTensors


def run_padding(
    model: CausalLM,
    kv_caches: Sequence[torch.Tensor],
    num_tokens: int,
    received: IntermediateTensors | None,
    rows_of_ranks: int = 0,
) -> torch.Tensor | IntermediateTensors:
    """Run ``num_tokens`` through the layers as one sequence, without writing KV or states. ``received``: as of
    `CausalLM`; ``rows_of_ranks``: as of `ForwardContext`."""
    device = kv_caches[0].device
    positions = torch.arange(num_tokens, device=device)  # [num_tokens]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        block_tables=torch.zeros(1, num_tokens, dtype=torch.int32, device=device),
        slot_mapping=torch.full_like(positions, -1),
        positions=positions,
        num_decodes=int(num_tokens == 1),
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
        is_warm_up=True,
    )
    no_slot = torch.full((1, 1), -1, dtype=torch.int32, device=device)
    states = make_state_batch(metadata.query_start_loc, torch.zeros_like(no_slot[0]), no_slot, num_tokens)
    ctx = ForwardContext(metadata, kv_caches, states=states, rows_of_ranks=rows_of_ranks)
    return model(torch.zeros_like(positions), ctx, received)

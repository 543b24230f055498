"""Steps of one or two tokens a request behind a batch: their inputs, made on the device, and their draws.

Nothing here asks the device for a value, and every shape follows from the number of requests, so that a graph can hold
all of it.
"""

from __future__ import annotations

import torch

from fleetfoot.kernels.interface import Sample
from fleetfoot.kernels.sampling.sample import RandomRows
from fleetfoot.records.attention import AttentionMetadata
from fleetfoot.speculative.drafter import DraftBatch


class DraftSteps:
    """What the short steps behind one `DraftBatch` have in common.

    Positions from a request's limit on are dead: they write no KV, and what is drafted there is never looked at. They
    are moved to the limit, for which there are rotary angles and block ids.

    Args:
        block_size: tokens in a block of the drafter's KV cache.
        sample: of the `Kernels`.
    """

    def __init__(self, batch: DraftBatch, block_size: int, sample: Sample) -> None:
        self._batch = batch
        self._block_size = block_size
        self._sample = sample
        self._limits = batch.limits.unsqueeze(1)  # [n, 1]
        self._is_padding = (batch.rows < 0).unsqueeze(1)  # [n, 1]
        self._iota = torch.arange(len(batch.rows) + 1, dtype=torch.int32, device=batch.rows.device)

    def singles(self, first: int, count: int) -> list[AttentionMetadata]:
        """Of ``count`` steps in which each request has one token, ``first`` behind its newest one and so on."""
        if count < 1:
            return []
        positions, slots = self._places(first, count)
        seq_lens = (positions + 1).to(torch.int32).t().contiguous()  # [count, n]
        positions, slots = positions.t().contiguous(), slots.t().contiguous()
        return [
            self._metadata(self._iota, seq_lens[step], slots[step], positions[step], query_len=1)
            for step in range(count)
        ]

    def pairs(self) -> AttentionMetadata:
        """Of a step in which each request has two tokens, of which the second is its newest one."""
        positions, slots = self._places(-1, 2)
        seq_lens = (positions[:, 1] + 1).clamp_(min=2).to(torch.int32)
        return self._metadata(self._iota * 2, seq_lens, slots.view(-1), positions.view(-1), query_len=2)

    def _places(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and slots, each ``[n, count]`` int64, of tokens from ``first`` behind the newest ones on."""
        batch, size = self._batch, self._block_size
        behind = torch.arange(first, first + count, device=self._limits.device)
        wanted = batch.positions.unsqueeze(1) + behind  # [n, count]
        positions = torch.minimum(wanted, self._limits).clamp_(min=0)
        slots = batch.block_tables.gather(1, positions // size).to(torch.int64) * size + positions % size
        return positions, slots.masked_fill_(self._is_padding | (wanted >= self._limits), -1)

    def _metadata(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        query_len: int,
    ) -> AttentionMetadata:
        return AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=self._batch.block_tables,
            slot_mapping=slots,
            positions=positions,
            num_decodes=len(seq_lens) if query_len == 1 else 0,
            max_query_len=query_len,
            max_seq_len=self._batch.max_seq_len,
        )

    def draw(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """A token for each request with its temperature and the noise that the target draws with there.

        The same noise makes both choose the same token wherever their distributions agree, and makes them agree about
        as often as any rule that looks at the two distributions apart: Daliri, Musco, Suresh, "Coupling without
        Communication and Drafter-Invariant Speculative Decoding", 2025.

        Args:
            logits: ``[n, vocab_size]``.
            positions: ``[n]``, of the tokens that are drawn.

        Returns ``[n]`` int64.
        """
        batch = self._batch
        return self._sample(logits, RandomRows(batch.temperatures, batch.seeds, positions, rows=batch.rows))


def as_drafts(tokens: list[torch.Tensor]) -> torch.Tensor:
    """``[n]`` int64 of each draft -> ``[n, k]`` int32."""
    return torch.stack(tokens, dim=1).to(torch.int32)

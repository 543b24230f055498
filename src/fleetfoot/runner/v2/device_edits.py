"""What rows want done to their logits before a token is chosen, in tables on the device that steps and graphs read.

The host fills a row's part when a request is admitted, through the staging buffer like everything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fleetfoot.kernels.sampling.allowed_tokens import keep_allowed_tokens
from fleetfoot.kernels.sampling.listed_tokens import edit_listed_tokens
from fleetfoot.kernels.sampling.paged_penalties import penalize
from fleetfoot.kernels.sampling.records import (
    LIST_CAPACITY,
    NUM_PLANES,
    AllowedTokens,
    ListedTokens,
    Penalties,
    TokenHistory,
)
from fleetfoot.records.step import NewRequest
from fleetfoot.runner.v2.row_lists import RowList, mask_words
from fleetfoot.kernels.prepare.staging import StagedWriteTensor, StagingBuffer

if TYPE_CHECKING:
    from fleetfoot.runner.v2.rows import BlockTables, RequestState


class RowEdits:
    """Masks, lists and penalties of all rows.

    A list that is longer than a row of the table lies in a table of its own, which graphs know nothing of: while such
    a request runs, steps sample behind their graphs.

    Args:
        lists: ``[max_num_seqs, 4, LIST_CAPACITY]``. masks: ``[max_num_seqs, ceil(vocab_size / 32)]``.
    """

    def __init__(
        self,
        lists: StagedWriteTensor,
        masks: StagedWriteTensor,
        requests: RequestState,
        block_tables: BlockTables,
        block_size: int,
    ) -> None:
        self._lists = lists
        self._masks = masks
        self._requests = requests
        self._allowed = AllowedTokens(requests.is_limited, masks.tensor)
        self._listed = ListedTokens(
            lists.tensor, requests.num_biases, requests.num_words, requests.num_stops, requests.min_tokens
        )
        self._penalties = Penalties(requests.repetition_penalty, requests.frequency_penalty, requests.presence_penalty)
        self._history = TokenHistory(block_tables.tensor, requests.token_pages, requests.prompt_lens, block_size)
        self._oversize: dict[int, ListedTokens] = {}

    @property
    def fit_graphs(self) -> bool:
        """Whether all that rows want is in the tables."""
        return not self._oversize

    def stage(self, request: NewRequest, listed: RowList, buffer: StagingBuffer) -> None:
        """Fill a row's list and mask, so far as there are any. The fields say how much of them counts."""
        row, allowed = request.row, request.params.allowed_token_ids
        self._oversize.pop(row, None)
        if listed.length > LIST_CAPACITY:
            self._oversize[row] = self._table_of(listed)
        else:
            for number, plane in enumerate(listed.planes):
                if len(plane):
                    first = self._lists.index(row, number * LIST_CAPACITY)
                    buffer.write(np.arange(first, first + len(plane)), plane, len(plane))
        if allowed is not None:
            words = mask_words(allowed, self._masks.row_stride)
            first = self._masks.index(row)
            buffer.write(np.arange(first, first + len(words)), words, len(words))

    def remove(self, row: int) -> None:
        """A row is given back."""
        self._oversize.pop(row, None)

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        """The logits as requests want them, in float32; those of padding mean nothing.

        Args:
            logits: ``[n, vocab]``, which stay as they are. rows: ``[n]`` int32, -1: padding. seq_lens: ``[n]``.
        """
        edited = keep_allowed_tokens(logits, rows, self._allowed)
        edit_listed_tokens(edited, rows, seq_lens, self._history, self._listed)
        for row, listed in self._oversize.items():
            edit_listed_tokens(edited, torch.where(rows == row, rows, -1), seq_lens, self._history, listed)
        penalize(edited, rows, seq_lens, self._history, self._penalties)
        return edited

    def _table_of(self, listed: RowList) -> ListedTokens:
        """A table that looks the same from every row."""
        planes = np.zeros((1, NUM_PLANES, listed.length), dtype=np.int32)
        for number, plane in enumerate(listed.planes):
            planes[0, number, : len(plane)] = plane
        min_tokens = self._requests.min_tokens
        sizes = torch.tensor([listed.num_biases, listed.num_words, listed.num_stops], dtype=torch.int32)
        num_rows, device = len(min_tokens), min_tokens.device
        num_biases, num_words, num_stops = sizes.to(device).unsqueeze(1).expand(3, num_rows).contiguous()
        everywhere = torch.from_numpy(planes).to(device).expand(num_rows, -1, -1)
        return ListedTokens(everywhere, num_biases, num_words, num_stops, min_tokens)

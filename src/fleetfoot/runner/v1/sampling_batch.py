"""The sampler's view of the running rows, rebuilt when the batch changes and refreshed when it does not."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator

import numpy as np
import torch

from fleetfoot.records.logprobs import RowLogprobs
from fleetfoot.records.step import NewRequest
from fleetfoot.runner.v1.host_state import HostState
from fleetfoot.sampling.metadata import SamplingMetadata, SamplingRow
from fleetfoot.sampling.sampler import SamplerOutput


class SamplingBatch:
    """Keeps a `SamplingRow` for each row of the host state, and the metadata of the last batch."""

    def __init__(self, host: HostState, device: torch.device) -> None:
        self._host = host
        self._device = device
        self._rows: list[tuple[NewRequest, SamplingRow] | None] = [None] * len(host.requests)
        self._last: tuple[list[SamplingRow], SamplingMetadata] | None = None

    def metadata(self, rows: np.ndarray, num_decodes: int, num_drafts: int) -> SamplingMetadata:
        """What the sampler must know about ``rows [num_sampled]``, in that order; for each of the first ``num_decodes``
        also about the tokens behind its ``num_drafts`` drafts."""
        batch: list[SamplingRow] = []
        for index, row in enumerate(rows.tolist()):
            known = self._row(row)
            batch.append(known)
            if num_drafts and index < num_decodes:
                batch += self._behind_drafts(known, row, num_drafts)
        if self._last is not None and len(self._last[0]) == len(batch) and all(map(operator.is_, self._last[0], batch)):
            metadata = self._last[1].refresh()
        else:
            metadata = SamplingMetadata.build(batch, self._device)
        self._last = (batch, metadata)
        return metadata

    def _row(self, row: int) -> SamplingRow:
        request, known = self._host.request(row), self._rows[row]
        if known is not None and known[0] is request:
            return known[1]
        made = SamplingRow(
            params=request.params,
            seed=request.seed,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            stop_token_ids=request.stop_token_ids,
            bad_words_token_ids=request.bad_words_token_ids,
        )
        self._rows[row] = (request, made)
        return made

    def _behind_drafts(self, known: SamplingRow, row: int, num_drafts: int) -> Iterator[SamplingRow]:
        """The request as it is if its first draft is right, its first two, ..."""
        begin = self._host.num_tokens[row]
        drafts = self._host.token_ids[row, begin : begin + num_drafts].tolist()  # as `place_drafts` put them there
        if known.is_penalized:
            known.prompt_tokens()  # the copies have them too
        for count in range(1, num_drafts + 1):
            behind = copy.copy(known)
            behind.token_ids = [*known.token_ids, *drafts[:count]]
            yield behind


def logprobs_of_rows(sampled: SamplerOutput, metadata: SamplingMetadata) -> dict[int, RowLogprobs]:
    """Row of the logits -> the entry of the token chosen there, for the rows that asked."""
    if sampled.logprobs is None or metadata.logprobs is None:
        return {}
    entries = sampled.logprobs.to_rows(metadata.logprobs.counts)
    return dict(zip(metadata.logprobs.indices, entries, strict=True))

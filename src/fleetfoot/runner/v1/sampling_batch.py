"""The sampler's view of the running rows, rebuilt when the batch changes and refreshed when it does not."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import torch

from fleetfoot.runner.contract import INVALID_MESSAGE
from fleetfoot.runner.v1.host_state import HostState
from fleetfoot.sampling.logprob import RowLogprobs
from fleetfoot.sampling.metadata import SamplingMetadata, SamplingRow
from fleetfoot.sampling.sampler import SamplerOutput
from fleetfoot.scheduler.output import NewRequest


class SamplingBatch:
    """Keeps a `SamplingRow` for each row of the host state, and the metadata of the last batch."""

    def __init__(self, host: HostState, device: torch.device) -> None:
        self._host = host
        self._device = device
        self._rows: list[tuple[NewRequest, SamplingRow] | None] = [None] * len(host.requests)
        self._last: tuple[list[SamplingRow], SamplingMetadata] | None = None

    def metadata(self, rows: np.ndarray) -> SamplingMetadata:
        """What the sampler must know about ``rows [num_sampled]``, in that order."""
        batch = [self._row(row) for row in rows.tolist()]
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

    def logprobs_of(self, sampled: SamplerOutput, metadata: SamplingMetadata) -> dict[int, list[RowLogprobs]]:
        """Batch index -> the entry of its new token, for the rows that asked."""
        if sampled.logprobs is None or metadata.logprobs is None:
            return {}
        entries = sampled.logprobs.to_rows(metadata.logprobs.counts)
        return {index: [entry] for index, entry in zip(metadata.logprobs.indices, entries, strict=True)}


def invalid_rows(sampled: SamplerOutput) -> dict[int, str]:
    """Batch index -> what is wrong with its logits."""
    indices: Sequence[int] = sampled.invalid.nonzero().flatten().tolist()
    return dict.fromkeys(indices, INVALID_MESSAGE)

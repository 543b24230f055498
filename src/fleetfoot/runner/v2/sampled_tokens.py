"""The messages of `SampledTokenSync` on the device."""

from __future__ import annotations

import torch

from fleetfoot.distributed.groups import PipelineGroup
from fleetfoot.kernels.interface import Kernels
from fleetfoot.models.model_state import ModelState
from fleetfoot.runner.base import SampledTokenSync
from fleetfoot.runner.v2.drafting import newest_tokens
from fleetfoot.runner.v2.input_batch import InputBatch
from fleetfoot.runner.v2.state import DeviceState
from fleetfoot.sampling.verification import DeviceSamples


class DeviceTokenSync(SampledTokenSync):
    """Sends and applies messages without waiting for the device."""

    def __init__(self, pipeline: PipelineGroup, state: DeviceState, kernels: Kernels, family: ModelState) -> None:
        super().__init__(pipeline, state.num_draft, state.arena.flat.device, self._apply_message)
        self._is_alone = pipeline.size == 1
        self._tables, self._post_update, self._family = state.tables, kernels.post_update, family

    def message(self, batch: InputBatch, samples: DeviceSamples) -> torch.Tensor | None:
        """The message of a step, after drafting, with rows of padding at its end; None without a pipeline."""
        if self._is_alone:
            return None
        # A step without new drafts leaves the old ones in its rows. They may be verified beside new drafts of other
        # requests, so all ranks need the same.
        drafts = self._tables.draft_tokens[batch.idx_mapping[: len(samples.token_ids)]]
        num_rejected = torch.where(samples.num_sampled > 0, samples.num_rejected, -1)
        return torch.cat((torch.stack((newest_tokens(samples), num_rejected), 1), drafts), 1).to(torch.int32)

    def _apply_message(self, rows: torch.Tensor, message: torch.Tensor, query_len: int) -> None:
        """Correct ``rows [n]`` on a rank that has not sampled."""
        has_new = message[:, 1] >= 0
        # the whole query was counted; a request without a new token is a decode that had reached its length
        num_rejected = torch.where(has_new, message[:, 1], query_len).contiguous()
        starts = torch.zeros(len(rows) + 1, dtype=torch.int32, device=rows.device)
        newest = message[:, :1].contiguous()
        self._post_update(rows, starts, self._tables, newest, has_new.to(torch.int32), num_rejected)
        self._family.reject(rows, num_rejected)
        if message.shape[1] > 2:
            self._tables.draft_tokens.index_copy_(0, rows.to(torch.int64), message[:, 2:].contiguous())

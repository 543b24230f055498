"""Where the requests of a step read and write their states."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch

from fleetfoot.records.forward_context import CHUNK, MAX_STEPS, StateBatch


def make_state_batch(
    query_start_loc: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    max_query_len: int,
    chunk_slots: torch.Tensor | None = None,
) -> StateBatch:
    """The batch, with its chunks; no host synchronisation. Raises ValueError: more than `MAX_STEPS` states of a request
    are to be kept."""
    if not 1 <= write_slots.shape[1] <= MAX_STEPS:
        raise ValueError(f"write_slots has {write_slots.shape[1]} columns; expected 1 to {MAX_STEPS}")
    chunk_starts = torch.zeros_like(query_start_loc)
    batch = StateBatch(query_start_loc, read_slots, write_slots, max_query_len, chunk_starts, chunk_slots)
    count_chunks(batch)
    return batch


def count_chunks(batch: StateBatch) -> None:
    """Fill ``chunk_starts``; no host synchronisation."""
    lengths = batch.query_start_loc.diff()  # [num_reqs]
    num_chunks = torch.where(lengths > MAX_STEPS, (lengths + CHUNK - 1) // CHUNK, 0)
    torch.cumsum(num_chunks, 0, dtype=torch.int32, out=batch.chunk_starts[1:])


def max_chunks(batch: StateBatch, num_tokens: int) -> int:
    """At least the chunks of a batch with this many tokens. A request with chunks has fewest tokens for each if it has
    one more than a chunk."""
    if batch.max_query_len <= MAX_STEPS:
        return 0
    return max(1, min(num_tokens // CHUNK + batch.num_reqs, 2 * num_tokens // (CHUNK + 1)))


def parts(batch: StateBatch) -> Iterator[Part]:
    """The batch for the references. On a CPU a part is consecutive requests with as many tokens each. Elsewhere lengths
    are on the device: a part is all requests, those of other lengths without tokens."""
    lengths = batch.query_start_loc.long().diff()
    if lengths.device.type != "cpu":
        is_long, requests = lengths > MAX_STEPS, slice(0, batch.num_reqs)
        yield Part(batch, requests, lengths.where(~is_long, 0), min(batch.max_query_len, MAX_STEPS))
        if batch.max_query_len > MAX_STEPS:
            yield Part(batch, requests, lengths.where(is_long, 0), batch.max_query_len)
        return
    first = 0
    for length, group in groupby(lengths.tolist()):
        requests = slice(first, first := first + len(list(group)))
        if length:
            yield Part(batch, requests, lengths[requests], length)


class Part:
    """Some requests of a batch, with their tokens padded to one length."""

    def __init__(self, batch: StateBatch, requests: slice, lengths: torch.Tensor, length: int) -> None:
        self.length, self.lengths = length, lengths
        """The padded length, and the tokens of each request, ``[num_reqs]`` int64."""
        position = torch.arange(length, device=lengths.device)
        self._is_token = position < lengths[:, None]  # [num_reqs, length]
        starts = batch.query_start_loc[requests].long()[:, None]
        self._tokens = torch.where(self._is_token, starts + position, 0)
        self._read, self._write = batch.read_slots[requests].long(), batch.write_slots[requests].long()
        self._chunk_starts, self._chunk_slots = batch.chunk_starts[requests].long(), batch.chunk_slots

    @property
    def is_long(self) -> bool:
        """Whether its requests have more than `MAX_STEPS` tokens."""
        return self.length > MAX_STEPS

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, ...]`` -> ``[num_reqs, length, ...]``; padding is 0."""
        return torch.where(_over(self._is_token, x.ndim + 1), x[self._tokens], 0)

    def scatter(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``values [num_reqs, length, ...]`` of tokens to ``out [num_tokens + 1, ...]``; padding goes to the last
        row."""
        out[torch.where(self._is_token, self._tokens, len(out) - 1)] = values.to(out.dtype)

    def read(self, states: torch.Tensor) -> torch.Tensor:
        """``states [num_slots, ...]`` before the tokens -> ``[num_reqs, ...]``"""
        return states[self._read]

    def keep(self, states: torch.Tensor, values: torch.Tensor, position: torch.Tensor | int) -> None:
        """Write ``values [num_reqs, ...]``, the states after the tokens at ``position``, an integer or ``[num_reqs]``,
        to their slots. What is not kept goes to slot 0, as zeros."""
        num_kept = self._write.shape[1]
        column = num_kept - self.lengths + position  # [num_reqs]
        slots = self._write.gather(1, column.clamp(0, num_kept - 1)[:, None])[:, 0]
        is_kept = (column >= 0) & (column < num_kept) & (slots >= 0) & (self.lengths > 0)
        _write(states, values, slots, is_kept)

    @property
    def has_snapshots(self) -> bool:
        """Whether states after chunks may be kept."""
        return self._chunk_slots is not None

    def keep_snapshot(self, states: torch.Tensor, values: torch.Tensor, chunk: int) -> None:
        """Write ``values [num_reqs, ...]``, the states after each request's ``chunk``, to the slots of snapshots."""
        if self._chunk_slots is not None:
            slots = self._chunk_slots[(self._chunk_starts + chunk).clamp(max=len(self._chunk_slots) - 1)].long()
            is_kept = (slots > 0) & (self.lengths > chunk * CHUNK)
            if is_kept.device.type != "cpu" or is_kept.any():
                _write(states, values, slots, is_kept)


def _write(states: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, is_kept: torch.Tensor) -> None:
    """What is not kept goes to slot 0, as zeros."""
    states[torch.where(is_kept, slots, 0)] = torch.where(_over(is_kept, values.ndim), values, 0).to(states.dtype)


def _over(mask: torch.Tensor, num_dims: int) -> torch.Tensor:
    """``mask`` with dimensions of size 1 after its own."""
    return mask.reshape(*mask.shape, *[1] * (num_dims - mask.ndim))

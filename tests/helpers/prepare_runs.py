"""Runs an implementation of a preparation operation on a batch, and checks that nothing else is written.

The same cases compare the references in torch with plain loops, and the other implementations, interpreted and
compiled, with the references.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.prepare.tables import RowTables, StepBuffers
from tests.helpers.prepare_cases import BATCHES, Batch, get_batch, int32, uniform_batches

Outputs = dict[str, torch.Tensor]

GUARD = 64
"""Elements around each output that must not change."""
SENTINEL = -77
"""Value of outputs before an operation runs."""


class GuardedOutputs:
    """Outputs that lie in larger buffers, so that a write next to one is seen."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.views: Outputs = {}
        self._buffers: dict[str, torch.Tensor] = {}

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, row_gap: int = 0) -> torch.Tensor:
        """``shape`` full of `SENTINEL`; rows of a matrix lie ``row_gap`` further apart than their length."""
        *leading, width = shape
        row_stride = width + row_gap
        size = row_stride * (leading[0] if leading else 1)
        buffer = torch.full((size + 2 * GUARD,), SENTINEL, dtype=dtype, device=self.device)
        self._buffers[name] = buffer
        self.views[name] = buffer.as_strided(shape, (row_stride, 1) if leading else (1,), GUARD)
        return self.views[name]

    def add_state(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor that the operation updates."""
        return self.add(name, tuple(values.shape), values.dtype).copy_(values)

    def check_guards(self) -> None:
        for name, buffer in self._buffers.items():
            around = buffer.clone()
            view = self.views[name]
            around.as_strided(view.size(), view.stride(), GUARD).fill_(SENTINEL)
            assert bool((around == SENTINEL).all()), f"{name}: written outside of the tensor"


def row_tables(batch: Batch, **updated: torch.Tensor) -> RowTables:
    """The rows of a batch, with ``updated`` in place of the batch's own tensors."""
    names = ("num_computed", "prefill_lens", "limits", "last_sampled", "draft_tokens", "block_table", "token_pages")
    tensors = {name: updated.get(name, getattr(batch, name)) for name in names}
    return RowTables(**tensors, block_size=batch.block_size)


def _call_inputs(implementation: Callable[..., None], batch: Batch, out: GuardedOutputs) -> None:
    tokens, requests = (batch.num_tokens,), (batch.num_reqs,)
    step = StepBuffers(
        batch.idx_mapping,
        batch.query_start_loc,
        positions=out.add("positions", tokens, torch.int64),
        seq_lens=out.add("seq_lens", requests, torch.int32),
        batch_index=out.add("batch_index", tokens, torch.int32),
        slots=out.add("slots", tokens, torch.int64),
        input_ids=out.add("input_ids", tokens, torch.int64),
        block_tables=out.add("block_tables", (batch.num_reqs, batch.table_width), torch.int32, row_gap=3),
    )
    implementation(step, row_tables(batch, token_pages=out.add_state("token_pages", batch.token_pages)))
    # Entries behind a request's blocks are undefined: make them comparable.
    used = (step.seq_lens + batch.block_size - 1) // batch.block_size  # [n]
    columns = torch.arange(batch.table_width, device=out.device)
    step.block_tables.masked_fill_(columns[None, :] >= used[:, None], 0)


def _call_post_update(implementation: Callable[..., None], batch: Batch, out: GuardedOutputs) -> None:
    updated = {name: out.add_state(name, getattr(batch, name)) for name in ("num_computed", "last_sampled")}
    sampling = (batch.sampled, batch.num_sampled, batch.num_rejected)
    implementation(batch.idx_mapping, batch.query_start_loc, row_tables(batch, **updated), *sampling)


def _call_accept(implementation: Callable[..., None], batch: Batch, out: GuardedOutputs) -> None:
    counts = out.add("counts", (3, batch.num_reqs), torch.int32, row_gap=2)
    implementation(batch.idx_mapping, batch.target_tokens, batch.invalid, row_tables(batch), counts)


def _call_writes(implementation: Callable[..., None], batch: Batch, out: GuardedOutputs) -> None:
    front = out.add("front", (batch.front_size,), torch.int32)
    implementation(batch.staged, front, out.add_state("target", batch.target), batch.num_writes)


def expected_inputs(batch: Batch) -> Outputs:
    starts, computed, limits = batch.query_start_loc.tolist(), batch.num_computed.tolist(), batch.limits.tolist()
    prefill_lens, pages = batch.prefill_lens.tolist(), batch.token_pages.tolist()
    last, drafts = batch.last_sampled.tolist(), batch.draft_tokens.tolist()
    positions, input_ids, seq_lens = [0] * batch.num_tokens, [0] * batch.num_tokens, [0] * batch.num_reqs
    batch_index, slots = [-1] * batch.num_tokens, [-1] * batch.num_tokens
    tables = torch.zeros(batch.num_reqs, batch.table_width, dtype=torch.int32)
    for request, row in enumerate(batch.idx_mapping.tolist()):
        if row < 0:
            continue
        seq_lens[request] = computed[row] + starts[request + 1] - starts[request]
        last_block = (limits[row] - 1) // batch.block_size
        for block in range(-(-seq_lens[request] // batch.block_size)):
            tables[request, block] = batch.block_table[row, min(block, last_block)]
        for offset, token in enumerate(range(starts[request], starts[request + 1])):
            positions[token], batch_index[token] = computed[row] + offset, request
            block, within = divmod(positions[token], batch.block_size)
            slot = int(batch.block_table[row, block]) * batch.block_size + within
            if block <= last_block:
                slots[token] = slot
            if positions[token] < prefill_lens[row]:
                input_ids[token] = pages[slot]
                continue
            input_ids[token] = max(0, last[row] if offset == 0 else drafts[row][offset - 1])
            if slots[token] >= 0:
                pages[slot] = input_ids[token]
    return {
        "positions": torch.tensor(positions, dtype=torch.int64),
        "seq_lens": int32(seq_lens),
        "batch_index": int32(batch_index),
        "slots": torch.tensor(slots, dtype=torch.int64),
        "input_ids": torch.tensor(input_ids, dtype=torch.int64),
        "block_tables": tables,
        "token_pages": int32(pages),
    }


def expected_accepted(batch: Batch) -> Outputs:
    room = (batch.limits - batch.num_computed).clamp(min=0).tolist()
    counts = []
    columns = (batch.idx_mapping.tolist(), batch.target_tokens.tolist(), batch.invalid.tolist())
    for row, sampled, invalid in zip(*columns, strict=True):
        drafts, count = batch.draft_tokens[row].tolist(), 0
        while count < len(drafts) and sampled[count] == drafts[count] and not invalid[count]:
            count += 1
        count = min(count + 1, room[row])
        found = (count, len(sampled) - count, sum(draft >= 0 for draft in drafts))
        counts.append(found if row >= 0 else (0, 0, 0))
    return {"counts": int32(counts).t()}


def expected_post_update(batch: Batch) -> Outputs:
    computed, last = batch.num_computed.tolist(), batch.last_sampled.tolist()
    query_lens, counts = batch.query_start_loc.diff().tolist(), batch.num_sampled.tolist()
    for request, row in enumerate(batch.idx_mapping.tolist()):
        if row < 0:
            continue
        computed[row] += query_lens[request]
        if request < len(counts):
            computed[row] -= int(batch.num_rejected[request])
            if counts[request] > 0:
                last[row] = int(batch.sampled[request, counts[request] - 1])
    return {"num_computed": int32(computed), "last_sampled": int32(last)}


def expected_writes(batch: Batch) -> Outputs:
    target, staged = batch.target.tolist(), batch.staged.tolist()
    pairs = staged[batch.front_size :]
    for write in range(batch.num_writes):
        target[pairs[2 * write]] = pairs[2 * write + 1]
    return {"front": int32(staged[: batch.front_size]), "target": int32(target)}


class Op(NamedTuple):
    call: Callable[[Callable[..., None], Batch, GuardedOutputs], None]
    expected: Callable[[Batch], Outputs]


OPS = {
    "prepare_inputs": Op(_call_inputs, expected_inputs),
    "prepare_decode": Op(_call_inputs, expected_inputs),
    "accept_drafts": Op(_call_accept, expected_accepted),
    "post_update": Op(_call_post_update, expected_post_update),
    "apply_staged_writes": Op(_call_writes, expected_writes),
}

CASES = [(op, name) for op in OPS for name in (uniform_batches() if op == "prepare_decode" else BATCHES)]
"""(operation, batch)"""


def run(
    kernels: Kernels, op: str, name: str, device: str = "cpu", mode: AbstractContextManager[Any] | None = None
) -> Outputs:
    """What ``op`` of some `Kernels` writes, after checking its inputs and the memory around its outputs."""
    batch = get_batch(name).to(device)
    before = batch.to(device).tensors()
    outputs = GuardedOutputs(device)
    with mode or nullcontext():
        OPS[op].call(getattr(kernels, op), batch, outputs)
    outputs.check_guards()
    for key, tensor in batch.tensors().items():
        assert torch.equal(tensor, before[key]), f"{op} wrote to its input {key}"
    return {key: value.cpu() for key, value in outputs.views.items()}


def assert_same(actual: Outputs, expected: Outputs) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype, key
        assert actual[key].tolist() == value.tolist(), key

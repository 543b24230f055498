"""Runs an implementation of a preparation op on a batch, and sees to it that nothing else is written.

The same cases hold the CPU twins against plain loops, and the Triton kernels, interpreted and compiled, against the
twins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fleetfoot.kernels.prepare import (
    accept_drafts,
    combine_sampled_and_draft_tokens,
    gather_block_tables,
    logits_indices,
    positions_and_seq_lens,
    post_update,
    prepare_decode,
    prepare_prefill_inputs,
    slot_mapping,
    take_in_writes,
)
from tests.helpers.prepare_cases import BATCHES, Batch, get_batch, uniform_batches
from tests.helpers.prepare_reference import (
    SENTINEL,
    Outputs,
    expected_accepted,
    expected_decode,
    expected_logits_indices,
    expected_positions,
    expected_post_update,
    expected_prefill_inputs,
    expected_sampled_and_drafts,
    expected_slots,
    expected_tables,
    expected_writes,
)

GUARD = 5
"""Elements before and behind each output that must stay as they were. An odd number: outputs are not aligned, too."""


class GuardedOutputs:
    """Outputs that lie in larger buffers, so that a write next to one is seen."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.views: Outputs = {}
        self._buffers: dict[str, torch.Tensor] = {}

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, row_gap: int = 0) -> None:
        """``shape`` full of `SENTINEL`; rows of a matrix lie ``row_gap`` further apart than their length."""
        *leading, width = shape
        row_stride = width + row_gap
        size = row_stride * (leading[0] if leading else 1)
        buffer = torch.full((size + 2 * GUARD,), SENTINEL, dtype=dtype, device=self.device)
        self._buffers[name] = buffer
        self.views[name] = buffer.as_strided(shape, (row_stride, 1) if leading else (1,), GUARD)

    def add_state(self, name: str, values: torch.Tensor) -> None:
        """A copy of a tensor that the op updates."""
        self.add(name, tuple(values.shape), values.dtype)
        self.views[name].copy_(values)

    def check_guards(self) -> None:
        for name, buffer in self._buffers.items():
            around = buffer.clone()
            view = self.views[name]
            around.as_strided(view.size(), view.stride(), GUARD).fill_(SENTINEL)
            assert bool((around == SENTINEL).all()), f"{name}: written outside of the tensor"


def _add_tokens(outputs: GuardedOutputs, batch: Batch, *names: str) -> None:
    for name in names:
        outputs.add(name, (batch.num_tokens,), torch.int32 if name == "batch_index" else torch.int64)


def _call_positions(implementation: Callable[..., None], batch: Batch, inputs: Outputs, out: GuardedOutputs) -> None:
    _add_tokens(out, batch, "positions", "batch_index")
    out.add("seq_lens", (batch.num_reqs,), torch.int32)
    implementation(batch.idx_mapping, batch.query_start_loc, batch.num_computed, **out.views)


def _call_slots(implementation: Callable[..., None], batch: Batch, inputs: Outputs, out: GuardedOutputs) -> None:
    _add_tokens(out, batch, "slots")
    implementation(
        inputs["positions"],
        inputs["batch_index"],
        batch.idx_mapping,
        batch.limits,
        batch.block_table,
        batch.block_size,
        **out.views,
    )


def _call_prefill(implementation: Callable[..., None], batch: Batch, inputs: Outputs, out: GuardedOutputs) -> None:
    _add_tokens(out, batch, "input_ids")
    implementation(
        inputs["slots"],
        inputs["positions"],
        inputs["batch_index"],
        batch.idx_mapping,
        batch.prefill_lens,
        batch.token_pages,
        **out.views,
    )


def _call_combine(implementation: Callable[..., None], batch: Batch, inputs: Outputs, out: GuardedOutputs) -> None:
    _add_tokens(out, batch, "input_ids")
    out.add_state("token_pages", batch.token_pages)
    implementation(
        inputs["slots"],
        inputs["positions"],
        inputs["batch_index"],
        batch.idx_mapping,
        batch.prefill_lens,
        batch.num_computed,
        batch.last_sampled,
        batch.draft_tokens,
        **out.views,
    )


def _add_tables(out: GuardedOutputs, batch: Batch) -> torch.Tensor:
    out.add("tables", (batch.num_reqs, batch.table_width), torch.int32, row_gap=3)
    return out.views["tables"]


def _clear_unused(tables: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> None:
    """What lies behind a request's blocks means nothing: make it comparable."""
    used = (seq_lens + block_size - 1) // block_size  # [n]
    columns = torch.arange(tables.shape[1], device=tables.device)
    tables.masked_fill_(columns[None, :] >= used[:, None], 0)


def _call_tables(implementation: Callable[..., None], batch: Batch, inputs: Outputs, out: GuardedOutputs) -> None:
    tables = _add_tables(out, batch)
    implementation(batch.block_table, batch.idx_mapping, inputs["seq_lens"], batch.block_size, out=tables)
    _clear_unused(tables, inputs["seq_lens"], batch.block_size)


def _call_decode(implementation: Callable[..., None], batch: Batch, inputs: Outputs, out: GuardedOutputs) -> None:
    _add_tokens(out, batch, "positions", "batch_index", "slots", "input_ids")
    out.add("seq_lens", (batch.num_reqs,), torch.int32)
    out.add_state("token_pages", batch.token_pages)
    views = dict(out.views)
    tables = _add_tables(out, batch)
    implementation(
        batch.idx_mapping,
        batch.num_computed,
        batch.prefill_lens,
        batch.last_sampled,
        batch.draft_tokens,
        batch.limits,
        batch.block_table,
        batch.block_size,
        block_tables=tables,
        **views,
    )
    _clear_unused(tables, out.views["seq_lens"], batch.block_size)


def _call_logits(implementation: Callable[..., None], batch: Batch, inputs: Outputs, out: GuardedOutputs) -> None:
    out.add("indices", (batch.num_logits_entries,), torch.int64)
    implementation(batch.query_start_loc, batch.cu_num_logits, out=out.views["indices"])


def _call_post_update(implementation: Callable[..., None], batch: Batch, inputs: Outputs, out: GuardedOutputs) -> None:
    out.add_state("num_computed", batch.num_computed)
    out.add_state("last_sampled", batch.last_sampled)
    implementation(
        batch.idx_mapping, batch.query_start_loc, batch.sampled, batch.num_sampled, batch.num_rejected, **out.views
    )


def _call_accept(implementation: Callable[..., None], batch: Batch, inputs: Outputs, out: GuardedOutputs) -> None:
    out.add("num_sampled", (batch.num_reqs,), torch.int32)
    out.add("num_rejected", (batch.num_reqs,), torch.int32)
    out.add("num_drafted", (batch.num_reqs,), torch.int32)
    implementation(
        batch.idx_mapping,
        batch.chosen,
        batch.invalid,
        batch.draft_tokens,
        batch.num_computed,
        batch.limits,
        **out.views,
    )


def _call_writes(implementation: Callable[..., None], batch: Batch, inputs: Outputs, out: GuardedOutputs) -> None:
    out.add("front", (batch.front_size,), torch.int32)
    out.add_state("target", batch.target)
    implementation(batch.staged, num_writes=batch.num_writes, **out.views)


@dataclass(frozen=True)
class Op:
    dispatch: Callable[..., None]
    triton: Callable[..., None]
    call: Callable[[Callable[..., None], Batch, Outputs, GuardedOutputs], None]
    expected: Callable[[str], Outputs]


OPS = {
    "take_in_writes": Op(
        take_in_writes.take_in_writes, take_in_writes.take_in_writes_triton, _call_writes, expected_writes
    ),
    "positions_and_seq_lens": Op(
        positions_and_seq_lens.positions_and_seq_lens,
        positions_and_seq_lens.positions_and_seq_lens_triton,
        _call_positions,
        expected_positions,
    ),
    "slot_mapping": Op(slot_mapping.slot_mapping, slot_mapping.slot_mapping_triton, _call_slots, expected_slots),
    "prepare_prefill_inputs": Op(
        prepare_prefill_inputs.prepare_prefill_inputs,
        prepare_prefill_inputs.prepare_prefill_inputs_triton,
        _call_prefill,
        expected_prefill_inputs,
    ),
    "combine_sampled_and_draft_tokens": Op(
        combine_sampled_and_draft_tokens.combine_sampled_and_draft_tokens,
        combine_sampled_and_draft_tokens.combine_sampled_and_draft_tokens_triton,
        _call_combine,
        expected_sampled_and_drafts,
    ),
    "gather_block_tables": Op(
        gather_block_tables.gather_block_tables,
        gather_block_tables.gather_block_tables_triton,
        _call_tables,
        expected_tables,
    ),
    "logits_indices": Op(
        logits_indices.logits_indices, logits_indices.logits_indices_triton, _call_logits, expected_logits_indices
    ),
    "post_update": Op(post_update.post_update, post_update.post_update_triton, _call_post_update, expected_post_update),
    "accept_drafts": Op(
        accept_drafts.accept_drafts, accept_drafts.accept_drafts_triton, _call_accept, expected_accepted
    ),
    "prepare_decode": Op(
        prepare_decode.prepare_decode, prepare_decode.prepare_decode_triton, _call_decode, expected_decode
    ),
}

CASES = [(op, name) for op in OPS for name in (uniform_batches() if op == "prepare_decode" else BATCHES)]
"""(op, batch)"""


def token_inputs(name: str, device: str) -> Outputs:
    """What the first two ops yield and the others read."""
    return {key: value.to(device) for key, value in (expected_positions(name) | expected_slots(name)).items()}


def run(implementation: Callable[..., None], op: str, name: str, device: str = "cpu") -> Outputs:
    """What an implementation writes, once its inputs and what lies around its outputs are found unchanged."""
    batch = get_batch(name).to(device)
    before = batch.to(device).tensors()
    outputs = GuardedOutputs(device)
    OPS[op].call(implementation, batch, token_inputs(name, device), outputs)
    outputs.check_guards()
    for key, tensor in batch.tensors().items():
        assert torch.equal(tensor, before[key]), f"{op} wrote to its input {key}"
    return {key: value.cpu() for key, value in outputs.views.items()}


def assert_same(actual: Outputs, expected: Outputs) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype, key
        assert actual[key].tolist() == value.tolist(), key

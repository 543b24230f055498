"""The linear recurrences in Triton: see `fleetfoot.kernels.recurrent.recurrence`.

Requests of up to `MAX_STEPS` tokens have a program for each head, or for some rows of its state, which reads the state
once, takes the tokens one after the other with the state in registers, and writes it once for each token after which it
is kept. With whole heads the gated norm is part of it. Longer requests are computed in chunks by tensor cores, in three
kernels: of the delta rule, the solution of each chunk's triangular system; then a program for some rows of a head's
state goes through the chunks of a request and writes the state before each; then the outputs of each chunk. (One kernel
for the last two needs more registers than there are, and what the compiler makes of it reads beyond shared memory.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fleetfoot.kernels.recurrent.batch import max_chunks
from fleetfoot.kernels.recurrent.conv_triton import find_chunk
from fleetfoot.kernels.recurrent.gated_norm import GatedNorm, gated_norm, gated_rms_norm_triton
from fleetfoot.kernels.recurrent.recurrence import Recurrence, RecurrenceInputs
from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import cdiv, compiles_slowly, next_power_of_2, search_steps, triton_kernel
from fleetfoot.records.forward_context import CHUNK, MAX_STEPS, StateBatch

if TYPE_CHECKING:
    import triton.language as tl


class Tiling(NamedTuple):
    """How a kernel is divided."""

    elements: int
    """The most elements of the state that a program has, all of some rows."""
    num_warps: int
    num_stages: int = 1


ONE, MANY = Tiling(128 * 128, 8), Tiling(32 * 128, 2)
"""The recurrent form of single tokens of a few heads, which are as many programs, and of any others, whose programs
share multiprocessors."""
_LEAST_TILE = 32
"""Elements of a head in a tile, at least: with 16 of keys, or of values, the chunked kernels had wrong sums in bfloat16
on an H100 and an H200, and with 32 they had not."""
MOST_OF_ONE = 264
"""Two for each multiprocessor of an H100."""
SOLVE, SOLVE_FLOAT32 = Tiling(0, 4), Tiling(0, 8)
SCAN, SCAN_FLOAT32 = Tiling(32 * 128, 4, 2), Tiling(16 * 128, 8)
OUTPUT, OUTPUT_FLOAT32 = Tiling(128 * 128, 8), Tiling(32 * 128, 8)
"""Within the chunks of a request, from one to the next, and within them again."""


def recurrence_triton(
    inputs: RecurrenceInputs, state: torch.Tensor, parameters: Recurrence, batch: StateBatch, norm: GatedNorm | None
) -> torch.Tensor:
    """See `recurrence_torch`. A head of ``state`` is contiguous, and the parameters are.

    Raises:
        ValueError: q, k and v have different strides.
    """
    num_tokens, num_heads, v_size = inputs.v.shape
    k_size = inputs.k.shape[2]
    if num_tokens > 1 and not inputs.q.stride(0) == inputs.k.stride(0) == inputs.v.stride(0):
        raise ValueError("recurrence: rows of q, k and v have different strides; make them parts of one tensor")
    out = inputs.v.new_empty(num_tokens, num_heads * v_size)
    beta = inputs.gate if inputs.beta is None else inputs.beta
    skip = parameters.step_bias if parameters.skip is None else parameters.skip
    tensors = inputs.q, inputs.k, inputs.v, inputs.gate, beta, parameters.log_decay, parameters.step_bias, skip
    strides = inputs.v.stride(0), inputs.gate.stride(0), beta.stride(0), state.stride(0)
    shape: dict[str, Any] = {
        "num_heads": num_heads, "group": num_heads // inputs.k.shape[1], "k_size": k_size, "v_size": v_size,
        "is_delta": inputs.beta is not None, "has_skip": parameters.skip is not None,
        "k_tile": max(_LEAST_TILE, next_power_of_2(k_size)), "scale": 1.0 if inputs.beta is None else k_size**-0.5,
    }  # fmt: skip
    is_short = batch.max_query_len <= MAX_STEPS
    tiling = ONE if batch.max_query_len == 1 and num_heads * batch.num_reqs <= MOST_OF_ONE else MANY
    rows = _rows(tiling, shape)
    is_by_head = norm is not None and norm.is_gate_last and norm.group_size == len(norm.weight) == v_size
    is_fused = is_by_head and is_short and rows >= v_size
    if batch.num_reqs and num_tokens:
        overlap, num_kept = can_overlap(out.device), batch.write_slots.shape[1]
        gate, weight, eps = (norm.gate, norm.weight, norm.eps) if norm is not None else (out, out, 0.0)
        _steps_kernel[(num_heads * cdiv(v_size, rows), batch.num_reqs)](
            out, *tensors, gate, weight, state, batch.query_start_loc, batch.read_slots, batch.write_slots,
            *strides, gate.stride(0), eps, num_kept,
            **shape, v_tile=rows, has_norm=is_fused, max_steps=MAX_STEPS, overlap=overlap,
            num_warps=tiling.num_warps, **launch_options(overlap),
        )  # fmt: skip
    if num_chunks := max_chunks(batch, num_tokens):
        _compute_chunks(out, tensors, strides, state, batch, shape, num_chunks)
    return out if norm is None or is_fused else gated_rms_norm_triton(out, norm)


def _rows(tiling: Tiling, shape: dict[str, Any]) -> int:
    """Rows of a head's state that a program has: a power of two."""
    return max(_LEAST_TILE, min(tiling.elements // shape["k_tile"], next_power_of_2(shape["v_size"])))


def _compute_chunks(
    out: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    strides: tuple[int, ...],
    state: torch.Tensor,
    batch: StateBatch,
    shape: dict[str, Any],
    num_chunks: int,
) -> None:
    (num_tokens, _), num_heads, num_kept = out.shape, shape["num_heads"], batch.write_slots.shape[1]
    is_float32 = out.dtype == torch.float32
    precision = "ieee" if is_float32 else "tf32"  # tf32x3 is compiled to reads beyond shared memory
    reads, updates, totals = out, out, out  # not read by Mamba-2
    states = out.new_empty(num_chunks, num_heads, shape["k_size"], shape["v_size"])  # before each chunk, transposed
    if shape["is_delta"]:
        k, v, gate, beta, log_decay, step_bias = (tensors[index] for index in (1, 2, 3, 4, 5, 6))
        reads = out.new_empty(num_tokens, num_heads, shape["k_size"])
        updates = out.new_empty(num_tokens, num_heads, shape["v_size"])
        totals = out.new_empty((num_tokens, num_heads), dtype=torch.float32)
        tiling = SOLVE_FLOAT32 if is_float32 else SOLVE
        _solve_chunks_kernel[(num_heads, num_chunks)](
            reads, updates, totals, k, v, gate, beta, log_decay, step_bias, batch.query_start_loc, batch.chunk_starts,
            *strides[:3], batch.num_reqs, search_steps(batch.num_reqs),
            num_heads=num_heads, group=shape["group"], k_size=shape["k_size"], v_size=shape["v_size"],
            k_tile=shape["k_tile"], v_tile=max(_LEAST_TILE, next_power_of_2(shape["v_size"])), chunk=CHUNK,
            precision=precision, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
        )  # fmt: skip
    starts = batch.query_start_loc, batch.chunk_starts
    options: dict[str, Any] = {**shape, "chunk": CHUNK, "precision": precision}
    tiling = SCAN_FLOAT32 if is_float32 else SCAN
    v_tile = _rows(tiling, shape)
    _scan_chunks_kernel[(num_heads * cdiv(shape["v_size"], v_tile), batch.num_reqs)](
        states, reads, updates, totals, *tensors[1:7], state, *starts, batch.read_slots, batch.write_slots,
        batch.chunk_starts if batch.chunk_slots is None else batch.chunk_slots, *strides, num_kept,
        has_snapshots=batch.chunk_slots is not None,
        **{name: value for name, value in options.items() if name not in ("scale", "has_skip")},
        v_tile=v_tile, max_steps=MAX_STEPS, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    tiling = OUTPUT_FLOAT32 if is_float32 else OUTPUT
    v_tile = _rows(tiling, shape)
    _output_chunks_kernel[(num_heads * cdiv(shape["v_size"], v_tile), num_chunks)](
        out, states, updates, totals, *tensors[:4], *tensors[5:], *starts, *strides[:2],
        batch.num_reqs, search_steps(batch.num_reqs),
        **options, v_tile=v_tile, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip


@triton_kernel()
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton_kernel()
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton_kernel(unspecialized=("num_kept",))
def _steps_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, gate_ptr, beta_ptr, log_decay_ptr, step_bias_ptr, skip_ptr,
    norm_gate_ptr, norm_weight_ptr, state_ptr, query_start_ptr, read_ptr, write_ptr,
    qkv_stride, gate_stride, beta_stride, slot_stride, norm_gate_stride, eps, num_kept,
    num_heads: tl.constexpr, group: tl.constexpr, k_size: tl.constexpr, v_size: tl.constexpr, is_delta: tl.constexpr,
    scale: tl.constexpr, has_skip: tl.constexpr, k_tile: tl.constexpr, v_tile: tl.constexpr, has_norm: tl.constexpr,
    max_steps: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    tiles: tl.constexpr = (v_size + v_tile - 1) // v_tile
    head = tl.program_id(0) // tiles
    request = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) % tiles * v_tile + tl.arange(0, v_tile)  # [v_tile], of v
    column = tl.arange(0, k_tile)  # [k_tile], of k
    in_row, in_column = row < v_size, column < k_size
    log_decay = tl.load(log_decay_ptr + head)
    step_bias = tl.load(step_bias_ptr + head)
    skip = 0.0
    if has_skip:
        skip = tl.load(skip_ptr + head)
    weight = tl.zeros((v_tile,), dtype=tl.float32)
    if has_norm:
        weight = tl.load(norm_weight_ptr + row, mask=in_row, other=0.0).to(tl.float32)
    start = tl.load(query_start_ptr + request)
    length = tl.load(query_start_ptr + request + 1) - start
    length = tl.where(length <= max_steps, length, 0)
    place = (head * v_size + row)[:, None] * k_size + column[None, :]  # [v_tile, k_tile]
    in_state = in_row[:, None] & in_column[None, :]
    old_ptr = state_ptr + tl.load(read_ptr + request).to(tl.int64) * slot_stride
    state = tl.load(old_ptr + place, mask=in_state & (length > 0), other=0.0).to(tl.float32)
    wait_for_inputs(overlap)  # no other kernel of the step writes the state
    k_place = head // group * k_size + column
    v_place = head * v_size + row
    for index in range(length):
        token = (start + index).to(tl.int64)
        q = tl.load(q_ptr + token * qkv_stride + k_place, mask=in_column, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + token * qkv_stride + k_place, mask=in_column, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + token * qkv_stride + v_place, mask=in_row, other=0.0).to(tl.float32)
        step = _softplus(tl.load(gate_ptr + token * gate_stride + head).to(tl.float32) + step_bias)
        state *= tl.exp(-tl.exp(log_decay) * step)
        update = v * step
        if is_delta:
            rate = _sigmoid(tl.load(beta_ptr + token * beta_stride + head).to(tl.float32))
            update = (v - tl.sum(state * k[None, :], axis=1)) * rate
        state += update[:, None] * k[None, :]
        value = tl.sum(state * q[None, :], axis=1) * scale  # [v_tile]
        if has_skip:
            value += skip * v
        if has_norm:
            gate = tl.load(norm_gate_ptr + token * norm_gate_stride + v_place, mask=in_row, other=0.0)
            value = value.to(out_ptr.dtype.element_ty).to(tl.float32)  # as where the norm is a kernel of its own
            value = gated_norm(value, gate, weight, v_size, eps, True, 0)
        tl.store(out_ptr + token * num_heads * v_size + v_place, value.to(out_ptr.dtype.element_ty), mask=in_row)
        kept = num_kept - length + index
        slot = tl.load(write_ptr + request * num_kept + kept, mask=kept >= 0, other=-1).to(tl.int64)
        new = state.to(state_ptr.dtype.element_ty)
        tl.store(state_ptr + slot * slot_stride + place, new, mask=in_state & (slot >= 0))


@compiles_slowly
@triton_kernel(unspecialized=("num_reqs", "search"))
def _solve_chunks_kernel(
    reads_ptr, updates_ptr, totals_ptr, k_ptr, v_ptr, gate_ptr, beta_ptr, log_decay_ptr, step_bias_ptr,
    query_start_ptr, chunk_starts_ptr, qkv_stride, gate_stride, beta_stride, num_reqs, search,
    num_heads: tl.constexpr, group: tl.constexpr, k_size: tl.constexpr, v_size: tl.constexpr, k_tile: tl.constexpr,
    v_tile: tl.constexpr, chunk: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """What one chunk and head needs: the updates that its values give, ``T (rate v)``, what they lose by the state
    before it, ``T (rate exp(total) k)``, with ``T`` the inverse of the unit triangular system, and the decay since its
    start."""
    _, first, num_rows, _ = find_chunk(query_start_ptr, chunk_starts_ptr, num_reqs, search, chunk)
    if num_rows <= 0:
        return
    head = tl.program_id(0)
    row = tl.arange(0, chunk)
    is_row = row < num_rows
    token = (first + row).to(tl.int64)  # [chunk]
    column = tl.arange(0, k_tile)
    in_k = is_row[:, None] & (column < k_size)[None, :]
    k = tl.load(k_ptr + (token * qkv_stride + head // group * k_size)[:, None] + column[None, :], mask=in_k, other=0.0)
    gate = tl.load(gate_ptr + token * gate_stride + head, mask=is_row, other=0.0).to(tl.float32)
    step = _softplus(gate + tl.load(step_bias_ptr + head))
    decay = tl.where(is_row, -tl.exp(tl.load(log_decay_ptr + head)) * step, 0.0)
    total = tl.cumsum(decay, axis=0)  # [chunk]
    rate = _sigmoid(tl.load(beta_ptr + token * beta_stride + head, mask=is_row, other=0.0).to(tl.float32))
    between = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
    is_later = row[:, None] > row[None, :]
    system = tl.dot(k, tl.trans(k), input_precision=precision) * between * rate[:, None]
    inverse = _unit_triangular_inverse(tl.where(is_later, system, 0.0), chunk, precision).to(k.dtype)  # [chunk, chunk]
    k_read = (k.to(tl.float32) * (rate * tl.exp(total))[:, None]).to(k.dtype)
    read = tl.dot(inverse, k_read, input_precision=precision)  # [chunk, k_tile]
    place = (token * num_heads + head) * k_size
    tl.store(reads_ptr + place[:, None] + column[None, :], read.to(reads_ptr.dtype.element_ty), mask=in_k)
    column = tl.arange(0, v_tile)
    in_v = is_row[:, None] & (column < v_size)[None, :]
    v = tl.load(v_ptr + (token * qkv_stride + head * v_size)[:, None] + column[None, :], mask=in_v, other=0.0)
    v = (v.to(tl.float32) * rate[:, None]).to(v.dtype)
    update = tl.dot(inverse, v, input_precision=precision)  # [chunk, v_tile]
    place = (token * num_heads + head) * v_size
    tl.store(updates_ptr + place[:, None] + column[None, :], update.to(updates_ptr.dtype.element_ty), mask=in_v)
    tl.store(totals_ptr + token * num_heads + head, total, mask=is_row)


@triton_kernel()
def _unit_triangular_inverse(system, chunk: tl.constexpr, precision: tl.constexpr):
    """``(I + system)^-1 [chunk, chunk]`` float32 of a strictly lower triangular ``system``.

    From the inverses X of the blocks on the diagonal follow those of twice their size: ``X - X L X``, with L the part
    of ``system`` between two blocks. No powers of ``system`` are made, which may be large and cancel.
    """
    index = tl.arange(0, chunk)
    row, column = index[:, None], index[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, system, 0.0)
    size = 2
    while size < chunk:
        is_between = (row // (2 * size) == column // (2 * size)) & (row // size != column // size)
        between = tl.dot(tl.where(is_between, system, 0.0), inverse, input_precision=precision)
        inverse -= tl.dot(inverse, between, input_precision=precision)
        size *= 2
    return inverse


@triton_kernel()
def _values(v_ptr, place, gate, log_decay, step_bias, is_row, mask):
    """What Mamba-2's tokens give: their values, how much each adds to the state, and the decay since the chunk's
    start."""
    value = tl.load(v_ptr + place, mask=mask, other=0.0).to(tl.float32)
    step = tl.where(is_row, _softplus(gate.to(tl.float32) + step_bias), 0.0)
    return value, value * step[:, None], tl.cumsum(-tl.exp(log_decay) * step, axis=0)


@compiles_slowly
@triton_kernel(unspecialized=("num_kept",))
def _scan_chunks_kernel(
    states_ptr, reads_ptr, updates_ptr, totals_ptr, k_ptr, v_ptr, gate_ptr, beta_ptr, log_decay_ptr, step_bias_ptr,
    state_ptr, query_start_ptr, chunk_starts_ptr, read_ptr, write_ptr, chunk_slots_ptr,
    qkv_stride, gate_stride, beta_stride, slot_stride, num_kept,
    num_heads: tl.constexpr, group: tl.constexpr, k_size: tl.constexpr, v_size: tl.constexpr, is_delta: tl.constexpr,
    k_tile: tl.constexpr, v_tile: tl.constexpr, chunk: tl.constexpr, max_steps: tl.constexpr, precision: tl.constexpr,
    has_snapshots: tl.constexpr,
):  # fmt: skip
    """The state before each chunk of a request and its last state, of some rows of a head's. Of the delta rule, what
    the state before a chunk makes the updates lose is subtracted from them, in place."""
    tiles: tl.constexpr = (v_size + v_tile - 1) // v_tile
    head = tl.program_id(0) // tiles
    request = tl.program_id(1).to(tl.int64)
    start = tl.load(query_start_ptr + request)
    length = tl.load(query_start_ptr + request + 1) - start
    if length <= max_steps:
        return
    row = tl.arange(0, chunk)
    k_column = tl.arange(0, k_tile)
    v_column = tl.program_id(0) % tiles * v_tile + tl.arange(0, v_tile)
    in_k, in_v = k_column < k_size, v_column < v_size
    in_state = in_k[:, None] & in_v[None, :]  # [k_tile, v_tile]
    place = k_column[:, None] + (head * v_size + v_column)[None, :] * k_size
    old_ptr = state_ptr + tl.load(read_ptr + request).to(tl.int64) * slot_stride
    state = tl.load(old_ptr + place, mask=in_state, other=0.0).to(tl.float32)  # transposed: the sum is over its rows
    log_decay = tl.load(log_decay_ptr + head)
    step_bias = tl.load(step_bias_ptr + head)
    dtype = k_ptr.dtype.element_ty
    first_chunk = tl.load(chunk_starts_ptr + request).to(tl.int64)
    states_ptr += (first_chunk * num_heads + head) * k_size * v_size
    states_place = k_column[:, None] * v_size + v_column[None, :]
    for begin in range(0, length, chunk):
        token = (start + begin + row).to(tl.int64)  # [chunk]
        is_row = begin + row < length
        k_place = (token * qkv_stride + head // group * k_size)[:, None] + k_column[None, :]
        in_qk = is_row[:, None] & in_k[None, :]
        k = tl.load(k_ptr + k_place, mask=in_qk, other=0.0)  # [chunk, k_tile]
        in_value = is_row[:, None] & in_v[None, :]
        before = state.to(dtype)
        tl.store(states_ptr + states_place, before, mask=in_state)
        states_ptr += num_heads * k_size * v_size
        if is_delta:
            total = tl.load(totals_ptr + token * num_heads + head, mask=is_row, other=0.0)
            head_place = (token * num_heads + head)[:, None]
            read = tl.load(reads_ptr + head_place * k_size + k_column[None, :], mask=in_qk, other=0.0)
            update_ptr = updates_ptr + head_place * v_size + v_column[None, :]
            update = tl.load(update_ptr, mask=in_value, other=0.0).to(tl.float32)
            update -= tl.dot(read, before, input_precision=precision)  # [chunk, v_tile]
            tl.store(update_ptr, update.to(dtype), mask=in_value)
        else:
            v_place = (token * qkv_stride + head * v_size)[:, None] + v_column[None, :]
            gate = tl.load(gate_ptr + token * gate_stride + head, mask=is_row, other=0.0)
            _, update, total = _values(v_ptr, v_place, gate, log_decay, step_bias, is_row, in_value)
        last = tl.minimum(length - begin, chunk) - 1
        whole = tl.sum(tl.where(row == last, total, 0.0), axis=0)  # the decay over the chunk
        rest = (update * tl.exp(tl.minimum(whole - total, 0.0))[:, None]).to(dtype)
        state = state * tl.exp(whole) + tl.dot(tl.trans(k), rest, input_precision=precision)
        if has_snapshots:
            slot = tl.load(chunk_slots_ptr + first_chunk + begin // chunk).to(tl.int64)
            if slot > 0:
                tl.store(state_ptr + slot * slot_stride + place, state.to(state_ptr.dtype.element_ty), mask=in_state)
    slot = tl.load(write_ptr + request * num_kept + num_kept - 1).to(tl.int64)
    new = state.to(state_ptr.dtype.element_ty)
    tl.store(state_ptr + slot * slot_stride + place, new, mask=in_state & (slot >= 0))


@compiles_slowly
@triton_kernel(unspecialized=("num_reqs", "search"))
def _output_chunks_kernel(
    out_ptr, states_ptr, updates_ptr, totals_ptr, q_ptr, k_ptr, v_ptr, gate_ptr, log_decay_ptr, step_bias_ptr, skip_ptr,
    query_start_ptr, chunk_starts_ptr, qkv_stride, gate_stride, num_reqs, search,
    num_heads: tl.constexpr, group: tl.constexpr, k_size: tl.constexpr, v_size: tl.constexpr, is_delta: tl.constexpr,
    scale: tl.constexpr, has_skip: tl.constexpr, k_tile: tl.constexpr, v_tile: tl.constexpr, chunk: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """The outputs of one chunk and head, or of some of the head's elements."""
    _, first, num_rows, _ = find_chunk(query_start_ptr, chunk_starts_ptr, num_reqs, search, chunk)
    if num_rows <= 0:
        return
    tiles: tl.constexpr = (v_size + v_tile - 1) // v_tile
    head = tl.program_id(0) // tiles
    row = tl.arange(0, chunk)
    is_row = row < num_rows
    token = (first + row).to(tl.int64)  # [chunk]
    k_column = tl.arange(0, k_tile)
    v_column = tl.program_id(0) % tiles * v_tile + tl.arange(0, v_tile)
    in_k, in_v = k_column < k_size, v_column < v_size
    in_qk, in_value = is_row[:, None] & in_k[None, :], is_row[:, None] & in_v[None, :]
    qk_place = (token * qkv_stride + head // group * k_size)[:, None] + k_column[None, :]
    q = tl.load(q_ptr + qk_place, mask=in_qk, other=0.0)  # [chunk, k_tile]
    k = tl.load(k_ptr + qk_place, mask=in_qk, other=0.0)
    out_place = (token * num_heads + head)[:, None] * v_size + v_column[None, :]
    if is_delta:
        total = tl.load(totals_ptr + token * num_heads + head, mask=is_row, other=0.0)
        update = tl.load(updates_ptr + out_place, mask=in_value, other=0.0)  # [chunk, v_tile]
        skipped = update  # not read
    else:
        v_place = (token * qkv_stride + head * v_size)[:, None] + v_column[None, :]
        gate = tl.load(gate_ptr + token * gate_stride + head, mask=is_row, other=0.0)
        log_decay, step_bias = tl.load(log_decay_ptr + head), tl.load(step_bias_ptr + head)
        skipped, update, total = _values(v_ptr, v_place, gate, log_decay, step_bias, is_row, in_value)
    scores = tl.dot(q, tl.trans(k), input_precision=precision)  # [chunk, chunk]
    between = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
    scores = tl.where(row[:, None] >= row[None, :], scores * between, 0.0)
    states_place = ((tl.program_id(1).to(tl.int64) * num_heads + head) * k_size + k_column)[:, None] * v_size
    in_state = in_k[:, None] & in_v[None, :]
    state = tl.load(states_ptr + states_place + v_column[None, :], mask=in_state, other=0.0)  # [k_tile, v_tile]
    value = tl.dot(q, state, input_precision=precision) * tl.exp(total)[:, None]
    value += tl.dot(scores.to(q.dtype), update.to(q.dtype), input_precision=precision)  # [chunk, v_tile]
    value *= scale
    if has_skip:
        value += tl.load(skip_ptr + head) * skipped
    tl.store(out_ptr + out_place, value.to(out_ptr.dtype.element_ty), mask=in_value)

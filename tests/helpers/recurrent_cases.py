"""Sequences for the operations of `fleetfoot.kernels.recurrent`, divided into steps in several ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from fleetfoot.kernels.recurrent.batch import make_state_batch
from fleetfoot.kernels.recurrent.recurrence import Recurrence, RecurrenceInputs
from fleetfoot.records.forward_context import StateBatch

SCHEDULES: dict[str, list[list[int]]] = {
    "decodes": [[1, 1, 1], [1, 1, 1]],
    "prompts": [[70, 1, 33], [34, 64, 1], [1, 0, 3]],
    "short": [[5, 0, 32], [3, 2, 1]],
}
"""Tokens of three requests in each step."""


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@dataclass(frozen=True)
class RecurrenceCase:
    """Shapes of a recurrence."""

    is_delta: bool
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int

    def parameters(self, device: str = "cpu") -> Recurrence:
        heads = self.num_v_heads
        skip = None if self.is_delta else random(heads, seed=3, device=device)
        log_decay = random(heads, seed=1, device=device) * 2 - 2
        return Recurrence(log_decay, random(heads, seed=2, device=device), skip)

    def inputs(self, num_tokens: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> RecurrenceInputs:
        """Keys are alike, as they are behind a SiLU; the rows of q, k and v are strided."""
        k_size, v_size = self.num_k_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        packed = random(num_tokens, 2 * k_size + v_size + 8, seed=4, device=device)
        q, k, v, _ = packed.split((k_size, k_size, v_size, 8), dim=1)
        q, k = (torch.nn.functional.silu(each.unflatten(1, (self.num_k_heads, -1)) + 0.5) for each in (q, k))
        if self.is_delta:
            q, k = (torch.nn.functional.normalize(each, dim=-1) for each in (q, k))
        packed = torch.cat((q.flatten(1), k.flatten(1), v, v[:, :8]), dim=1).to(dtype)
        q, k, v, _ = packed.split((k_size, k_size, v_size, 8), dim=1)
        heads = (random(num_tokens, 2 * self.num_v_heads, seed=5, device=device) * 2).to(dtype)
        gate, beta = heads.chunk(2, dim=1)
        q, k = (each.unflatten(1, (self.num_k_heads, -1)) for each in (q, k))
        v = v.unflatten(1, (self.num_v_heads, -1))
        return RecurrenceInputs(q, k, v, gate, beta if self.is_delta else None)

    def state(self, num_slots: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Garbage but for slot 0, strided as in an arena."""
        sizes = self.num_v_heads, self.head_v_dim, self.head_k_dim
        state = random(num_slots, 2, *sizes, seed=6, device=device).to(dtype)[:, 1]
        state[0] = 0
        return state


CASES = {
    "delta": RecurrenceCase(True, 2, 4, 32, 32),
    "delta-uneven": RecurrenceCase(True, 1, 3, 16, 24),
    "mamba": RecurrenceCase(False, 1, 4, 32, 16),
    "mamba-groups": RecurrenceCase(False, 2, 4, 16, 32),
}


def take(inputs: RecurrenceInputs, tokens: torch.Tensor) -> RecurrenceInputs:
    """The inputs of some tokens. q, k and v share a stride."""
    sizes = [each.shape[1:] for each in (inputs.q, inputs.k, inputs.v)]
    packed = torch.cat([each[tokens].flatten(1) for each in (inputs.q, inputs.k, inputs.v)], dim=1)
    parts = packed.split([size.numel() for size in sizes], dim=1)
    q, k, v = (part.unflatten(1, size) for part, size in zip(parts, sizes, strict=True))
    beta = None if inputs.beta is None else inputs.beta[tokens]
    return RecurrenceInputs(q, k, v, inputs.gate[tokens], beta)


Step = Callable[[torch.Tensor, StateBatch], torch.Tensor]
"""``(tokens [num_tokens] of the step, batch)`` -> outputs ``[num_tokens, ...]``"""


def run_schedule(step: Step, schedule: Sequence[Sequence[int]], device: str = "cpu") -> torch.Tensor:
    """Run requests, one after the other in the flat dimension, in the steps of ``schedule``: the tokens of each.

    Every second step writes the slots that it reads, others write new ones. Returns the outputs of all tokens.
    """
    totals = total_tokens(schedule)
    first_tokens, slots = list(accumulate([0, *totals[:-1]])), [0] * len(totals)
    outputs: dict[int, torch.Tensor] = {}
    for number, lengths in enumerate(schedule):
        tokens = [first + each for first, length in zip(first_tokens, lengths, strict=True) for each in range(length)]
        written = [number * len(totals) + index + 1 for index in range(len(totals))]
        if number % 2:
            written = [slot or new for slot, new in zip(slots, written, strict=True)]
        result = step(
            torch.tensor(tokens, device=device), make_batch(lengths, slots, [[slot] for slot in written], device)
        )
        outputs |= dict(zip(tokens, result, strict=True))
        slots = [new if length else slot for slot, new, length in zip(slots, written, lengths, strict=True)]
        first_tokens = [first + length for first, length in zip(first_tokens, lengths, strict=True)]
    return torch.stack([outputs[token] for token in sorted(outputs)])


def make_batch(
    lengths: Sequence[int], read: Sequence[int], write: Sequence[Sequence[int]], device: str = "cpu"
) -> StateBatch:
    """The batch of requests with ``lengths``, which read and write these slots."""
    starts, read_slots, write_slots = (
        torch.tensor(each, dtype=torch.int32, device=device) for each in (list(accumulate([0, *lengths])), read, write)
    )
    return make_state_batch(starts, read_slots, write_slots, max(lengths))


def total_tokens(schedule: Sequence[Sequence[int]]) -> list[int]:
    return [sum(lengths) for lengths in zip(*schedule, strict=True)]

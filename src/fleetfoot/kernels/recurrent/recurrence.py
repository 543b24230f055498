"""Linear recurrences over a matrix per head: the gated delta rule and Mamba-2's state space.

With a state ``S [head_v_dim, head_k_dim]``, a decay ``exp(-exp(log_decay) * step)`` and ``step = softplus(gate +
step_bias)``, a token with query q, key k and value v computes

- the gated delta rule (Yang et al. 2024, "Gated Delta Networks"): ``S = decay * S``, then ``S += sigmoid(beta) * (v - S
  k) k^T``, and the output ``S q / sqrt(head_k_dim)``;
- Mamba-2 (Dao and Gu 2024), where q, k and v are called C, B and x: ``S = decay * S + step * v k^T``, and the output
  ``S q + skip * v``.

There are two forms. The recurrent one takes a token at a time. The chunked one computes `CHUNK` tokens by matrix
products: within a chunk, the tokens' updates of the delta rule are the solution of a triangular system.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fleetfoot.kernels.recurrent.batch import Part, parts
from fleetfoot.kernels.recurrent.gated_norm import GatedNorm, gated_rms_norm_torch
from fleetfoot.records.forward_context import CHUNK, StateBatch


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A layer's parameters, float32."""

    log_decay: torch.Tensor
    """``[num_v_heads]``"""
    step_bias: torch.Tensor
    """``[num_v_heads]``"""
    skip: torch.Tensor | None = None
    """``[num_v_heads]``; None: the outputs have no part of the values."""


@dataclass(frozen=True, slots=True)
class RecurrenceInputs:
    """The tokens of a step. Rows may be strided; those of q, k and v have one stride."""

    q: torch.Tensor
    """``[num_tokens, num_k_heads, head_k_dim]``; a head of q and k serves consecutive heads of v."""
    k: torch.Tensor
    """Like q."""
    v: torch.Tensor
    """``[num_tokens, num_v_heads, head_v_dim]``"""
    gate: torch.Tensor
    """``[num_tokens, num_v_heads]``"""
    beta: torch.Tensor | None = None
    """``[num_tokens, num_v_heads]``: of the delta rule, before the sigmoid; None: the recurrence is Mamba-2's."""


def recurrence_torch(
    inputs: RecurrenceInputs, state: torch.Tensor, parameters: Recurrence, batch: StateBatch, norm: GatedNorm | None
) -> torch.Tensor:
    """Run the tokens of a step through a layer's recurrence.

    Args:
        state: ``[num_slots, num_v_heads, head_v_dim, head_k_dim]`` of any float dtype; written in place.
        norm: applied to each head of the output; None: none is.

    Returns:
        ``[num_tokens, num_v_heads * head_v_dim]`` in the dtype of the values; computed in float32.
    """
    out = inputs.v.new_zeros(len(inputs.v) + 1, *inputs.v.shape[1:])
    for part in parts(batch):
        form = chunked if part.is_long else recurrent
        part.scatter(form(_gathered(inputs, parameters, part), part, state), out)
    if norm is None:
        return out[:-1].flatten(1)
    return gated_rms_norm_torch(out[:-1].flatten(1), norm)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens of some requests, float32, with all that depends on a token alone. Padding changes no state."""

    q: torch.Tensor
    """``[num_reqs, num_v_heads, length, head_k_dim]``, scaled; a copy for each head of v."""
    k: torch.Tensor
    v: torch.Tensor
    """``[num_reqs, num_v_heads, length, head_v_dim]``"""
    decay: torch.Tensor
    """``[num_reqs, num_v_heads, length]``: its logarithm, at most 0."""
    rate: torch.Tensor
    """The same shape: the factor of the update."""
    is_delta: bool
    skip: torch.Tensor | None

    def with_skip(self, out: torch.Tensor) -> torch.Tensor:
        """``out [num_reqs, num_v_heads, length, head_v_dim]`` -> ``[num_reqs, length, num_v_heads, head_v_dim]``"""
        out = out if self.skip is None else out + self.skip[:, None, None] * self.v
        return out.transpose(1, 2)


def _gathered(inputs: RecurrenceInputs, parameters: Recurrence, part: Part) -> _Tokens:
    num_heads = inputs.v.shape[1]
    is_delta = inputs.beta is not None
    q, k, v = (part.gather(each).float().transpose(1, 2) for each in (inputs.q, inputs.k, inputs.v))
    q, k = (each.repeat_interleave(num_heads // each.shape[1], dim=1) for each in (q, k))
    step = F.softplus(inputs.gate.float() + parameters.step_bias)  # [num_tokens, num_v_heads]
    rate = step if inputs.beta is None else inputs.beta.float().sigmoid()
    decay = -parameters.log_decay.exp() * step
    decay, rate = (part.gather(each).transpose(1, 2) for each in (decay, rate))
    return _Tokens(q * q.shape[-1] ** -0.5 if is_delta else q, k, v, decay, rate, is_delta, parameters.skip)


def recurrent(tokens: _Tokens, part: Part, state: torch.Tensor) -> torch.Tensor:
    """One token at a time -> ``[num_reqs, length, num_v_heads, head_v_dim]``."""
    current = part.read(state).float()  # [num_reqs, num_v_heads, head_v_dim, head_k_dim]
    outputs = []
    for position in range(part.length):
        q, k, v = (each[:, :, position] for each in (tokens.q, tokens.k, tokens.v))
        current = current * tokens.decay[:, :, position, None, None].exp()
        value = v - (current @ k[..., None])[..., 0] if tokens.is_delta else v
        current = current + (tokens.rate[:, :, position, None] * value)[..., None] * k[..., None, :]
        outputs.append((current @ q[..., None])[..., 0])
        part.keep(state, current, position)
    return tokens.with_skip(torch.stack(outputs, dim=2))


def chunked(tokens: _Tokens, part: Part, state: torch.Tensor) -> torch.Tensor:
    """`CHUNK` tokens at a time -> ``[num_reqs, length, num_v_heads, head_v_dim]``."""
    current = part.read(state).float()
    padding = -part.length % CHUNK
    q, k, v = (F.pad(each, (0, 0, 0, padding)).unflatten(2, (-1, CHUNK)) for each in (tokens.q, tokens.k, tokens.v))
    decay, rate = (F.pad(each, (0, padding)).unflatten(2, (-1, CHUNK)) for each in (tokens.decay, tokens.rate))
    total = decay.cumsum(dim=-1)  # [num_reqs, num_v_heads, num_chunks, CHUNK], the logarithm since the chunk's start
    is_later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (total[..., :, None] - total[..., None, :]).where(is_later, -torch.inf).exp()  # [..., CHUNK, CHUNK]
    updates, read = rate[..., None] * v, None
    if tokens.is_delta:
        system = rate[..., None] * (k @ k.mT) * between  # its diagonal counts as 1
        read = torch.linalg.solve_triangular(
            system, (rate * total.exp())[..., None] * k, upper=False, unitriangular=True
        )
        updates = torch.linalg.solve_triangular(system, updates, upper=False, unitriangular=True)
    scores = (q @ k.mT) * between
    outputs = []
    for chunk in range(q.shape[2]):
        update = updates[:, :, chunk]  # [num_reqs, num_v_heads, CHUNK, head_v_dim]
        if read is not None:
            update = update - read[:, :, chunk] @ current.mT
        since = total[:, :, chunk, :, None]
        outputs.append(since.exp() * (q[:, :, chunk] @ current.mT) + scores[:, :, chunk] @ update)
        rest = (since[:, :, -1:] - since).exp()  # [num_reqs, num_v_heads, CHUNK, 1]
        current = since[:, :, -1:].exp() * current + (rest * update).mT @ k[:, :, chunk]
        part.keep_snapshot(state, current, chunk)
    part.keep(state, current, part.lengths - 1)
    return tokens.with_skip(torch.cat(outputs, dim=2)[:, :, : part.length])

"""Causal convolutions of a few taps over each channel, with the last inputs of a request as its state.

They come before the recurrences of gated delta nets and Mamba-2, and are the mixer of LFM2 (Liquid AI 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fleetfoot.kernels.recurrent.batch import Part, parts
from fleetfoot.records.forward_context import CHUNK, MAX_STEPS, StateBatch

L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class CausalConv:
    """A convolution of ``num_taps`` taps over ``channels``, and what is done to its outputs."""

    weight: torch.Tensor
    """``[num_taps, channels]``, contiguous: the newest token's tap is the last."""
    bias: torch.Tensor | None = None
    """``[channels]``"""
    has_silu: bool = False
    """Whether outputs go through SiLU."""
    is_gated: bool = False
    """Whether inputs are ``b``, ``c`` and ``x``, each ``[num_tokens, channels]``, side by side: ``b * x`` is convolved
    and the output multiplied by ``c`` (LFM2)."""
    norm_size: int = 0
    """Size of the heads whose outputs are divided by their L2 norm; 0: none is."""
    num_normed: int = 0
    """The first channels, which are these heads."""


def causal_conv_torch(x: torch.Tensor, state: torch.Tensor, conv: CausalConv, batch: StateBatch) -> torch.Tensor:
    """Convolve the tokens of a step with those before them, and keep the last inputs.

    Args:
        x: ``[num_tokens, channels]``, or three times as many where the convolution is gated; rows may be strided.
        state: ``[num_slots, num_taps - 1, channels]``: the inputs before, the oldest first; written in place.

    Returns:
        ``[num_tokens, channels]`` in the dtype of ``x``, computed in float32; a product of inputs is rounded.
    """
    num_taps, channels = conv.weight.shape
    inputs, gate = x, None
    if conv.is_gated:
        b, gate, value = x.split(channels, dim=1)
        inputs = b * value
    out = x.new_zeros(len(x) + 1, channels)
    for part in parts(batch):
        before = part.read(state).to(x.dtype)  # [num_reqs, num_taps - 1, channels]
        padded = torch.cat((before, part.gather(inputs)), dim=1)  # [num_reqs, num_taps - 1 + length, channels]
        taps = padded.float().unfold(1, num_taps, 1)  # [num_reqs, length, channels, num_taps]
        convolved = (taps * conv.weight.float().T).sum(dim=-1)
        if conv.bias is not None:
            convolved = convolved + conv.bias.float()
        part.scatter(_finished(convolved, conv, None if gate is None else part.gather(gate)), out)
        _keep(part, state, padded, num_taps - 1)
    return out[:-1]


def _finished(convolved: torch.Tensor, conv: CausalConv, gate: torch.Tensor | None) -> torch.Tensor:
    if conv.has_silu:
        convolved = F.silu(convolved)
    if gate is not None:
        convolved = convolved * gate.float()
    if not conv.norm_size:
        return convolved
    heads = convolved[..., : conv.num_normed].unflatten(-1, (-1, conv.norm_size))
    heads = heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + L2_EPS)
    return torch.cat((heads.flatten(-2), convolved[..., conv.num_normed :]), dim=-1)


def _keep(part: Part, state: torch.Tensor, padded: torch.Tensor, size: int) -> None:
    """Write the ``size`` inputs up to each token after which the state is kept; ``padded``: with those before."""
    for chunk in range(part.length // CHUNK if part.is_long and part.has_snapshots else 0):
        part.keep_snapshot(state, padded[:, (chunk + 1) * CHUNK :][:, :size], chunk)
    for back in range(1 if part.is_long else min(part.length, MAX_STEPS)):
        position = part.lengths - 1 - back  # [num_reqs]
        taps = position[:, None] + 1 + torch.arange(size, device=padded.device)
        index = taps.clamp(min=0)[..., None].expand(-1, -1, padded.shape[-1])
        part.keep(state, padded.gather(1, index), position)

"""The table of rotary angles (Su et al. 2021, "RoFormer") and its stretched variants, one per `RopeConfig.rope_type`.

Every step is computed in float32 and in the order of the reference implementation in ``transformers``: at position
100000 the last bit of a frequency is worth a whole percent of a turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from fleetfoot.config.model import RopeConfig
from fleetfoot.records.weights import Rows, join_rows


def rotary_table(rope: RopeConfig | None, head_dim: int, max_positions: int, device: torch.device) -> torch.Tensor:
    """``[max_positions, head_dim]`` float32: of every position the cosines of the ``head_dim / 2`` angles, then their
    sines, both times the attention factor where the type has one.

    The angles of elements that are not rotated are 0, and follow the others: see `stored_rows`. ``rope``: None: no
    element is rotated.
    """
    if device.type == "meta":  # torch.arange would import torch._dynamo, which takes a second
        return torch.empty(max_positions, head_dim, device=device)
    half = head_dim // 2
    table = torch.zeros(max_positions, head_dim, device=device)
    table[:, :half] = 1.0
    if rope is None:
        return table
    frequencies = inverse_frequencies(rope, head_dim).to(device)  # [num_angles]
    positions = torch.arange(max_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies  # [max_positions, num_angles]
    attention_factor, num_angles = rope.parameters.get("attention_factor", 1.0), len(frequencies)
    table[:, :num_angles] = angles.cos() * attention_factor
    table[:, half : half + num_angles] = angles.sin() * attention_factor
    return table


def stored_rows(rope: RopeConfig | None, head_dim: int, heads: slice, distance: int = 1) -> Rows:
    """The rows of q's or k's projection that ``heads`` have, in the order in which a layer stores them. ``distance``:
    of one head from the next, in heads.

    Kernels rotate element i of a head with element ``i + head_dim / 2``. A partial rotation pairs the two halves of the
    first elements alone, so each of them is stored at the beginning of a half of the head. Scores of attention stay
    the same, because q and k have the same order.
    """
    half, num_angles = head_dim // 2, -(-(head_dim if rope is None else rope.rotary_dim or head_dim) // 2)
    first, second = (0, num_angles), (num_angles, 2 * num_angles)
    middle = num_angles + half
    bounds = (first, (2 * num_angles, middle), second, (middle, head_dim))
    starts = range(heads.start * distance * head_dim, heads.stop * distance * head_dim, distance * head_dim)
    return join_rows(slice(start + begin, start + end) for start in starts for begin, end in bounds)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """``[num_angles]`` float32: radians per position, the fastest first. There are ``head_dim / 2`` of them, or half as
    many as rotated elements.

    ``dynamic`` (NTK scaling that grows with the sequence) changes nothing up to ``max_position_embeddings``, and the
    plan refuses longer sequences: it is the default here.
    """
    dim = rope.rotary_dim or head_dim
    wavelengths = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # over 2 pi
    if rope.rope_type in ("default", "dynamic"):
        return 1.0 / wavelengths
    if rope.rope_type == "linear":
        return 1.0 / wavelengths / rope.parameters["factor"]
    if rope.rope_type == "llama3":
        return _llama3(1.0 / wavelengths, rope.parameters)
    if rope.rope_type == "yarn":
        return _yarn(wavelengths, rope, dim)
    if rope.rope_type == "longrope":  # Ding et al. 2024, "LongRoPE"
        factors = rope.parameters["long_factor" if rope.parameters["is_long"] else "short_factor"]
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelengths)
    raise ValueError(f"rope type {rope.rope_type!r} is not one of: default, dynamic, linear, llama3, longrope, yarn")


def _llama3(frequencies: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: long wavelengths are slowed by the factor, short ones are kept, those between are blended."""
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    original = parameters["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / factor, blended)
    return torch.where(wavelengths < original / high, frequencies, stretched)


def _yarn(wavelengths: torch.Tensor, rope: RopeConfig, dim: int) -> torch.Tensor:
    """YaRN (Peng et al. 2023): a ramp over the dimensions from kept frequencies to slowed ones."""
    parameters = rope.parameters
    original = parameters["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        """The dimension with this many rotations over the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(parameters["beta_fast"]), dimension(parameters["beta_slow"])
    if parameters["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step rather than a division by zero
    ramp = ((torch.arange(len(wavelengths), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (parameters["factor"] * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept

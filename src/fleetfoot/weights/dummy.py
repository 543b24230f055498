"""Random weights, for runs in which only shapes and speed matter."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch

from fleetfoot.layers.slots import WeightSlot

_STD = 0.02  # what these models are initialised with before they are trained
# A CPU draws some hundred million values a second, and a model has billions: what is drawn is repeated after this many.
# A prime, so that no two rows of a matrix are alike.
_CPU_PERIOD = 1048573


def fill_dummy(slots: Iterable[WeightSlot], seed: int) -> None:
    """Fill norms with 1 and all else with normally distributed values, drawn on the device that holds them.

    The values of a tensor depend on the seed, its name, dtype and device type alone: a part of a model holds the same
    weights as the whole.
    """
    for slot in slots:
        destination = slot.destination()
        if slot.init == "ones":
            destination.fill_(1.0)
            continue
        generator = torch.Generator(destination.device)
        generator.manual_seed(zlib.crc32(slot.name.encode(), seed & 0xFFFFFFFF))
        flat = destination.view(-1)
        drawn = flat[:_CPU_PERIOD] if flat.device.type == "cpu" else flat
        drawn.normal_(0.0, _STD, generator=generator)
        for begin in range(len(drawn), len(flat), len(drawn)):
            rest = flat[begin : begin + len(drawn)]
            rest.copy_(drawn[: len(rest)])

"""Random weights, for runs in which only shapes and speed matter."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch

from fleetfoot.weights.slots import WeightSlot

_STD = 0.02  # what these models are initialised with before they are trained


def fill_dummy(slots: Iterable[WeightSlot], seed: int) -> None:
    """Fill norms with 1 and all else with a normal distribution, drawn on the device that holds it.

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
        destination.normal_(0.0, _STD, generator=generator)

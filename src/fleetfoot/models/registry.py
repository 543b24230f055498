"""The class that runs an architecture, imported when it is used. No torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fleetfoot.config.architectures import ARCHITECTURES

if TYPE_CHECKING:
    from fleetfoot.models.interface import CausalLM


def model_class(architecture: str) -> type[CausalLM]:
    """The class that ARCHITECTURES names.

    Raises:
        ValueError: the architecture is not supported; the message lists those that are.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    module, _, name = ARCHITECTURES[architecture].model.partition(":")
    return getattr(import_module(module), name)

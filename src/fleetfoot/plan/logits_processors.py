"""The logits processors of an engine: classes that its settings and installed packages name. No torch without any."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

from fleetfoot.config.engine import EngineConfig
from fleetfoot.utils.plugins import entry_points

if TYPE_CHECKING:
    from fleetfoot.sampling.custom_processors import LogitsProcessor

GROUP = "fleetfoot.logits_processors"
"""The entry points of packages; each one is a class."""


def listed_processors(config: EngineConfig) -> tuple[Any, ...]:
    """Classes, ``module:Class`` texts and entry points, in the order in which they run: packages' first."""
    return (*entry_points(group=GROUP), *config.logits_processors)


def load_processors(listed: Sequence[Any]) -> tuple[type[LogitsProcessor], ...]:
    """The classes. Raises ValueError: one cannot be imported, or is not a `LogitsProcessor`."""
    if not listed:
        return ()
    from fleetfoot.sampling.custom_processors import LogitsProcessor

    classes = []
    for item in listed:
        found = _import(item) if isinstance(item, str | EntryPoint) else item
        if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
            raise ValueError(
                f"logits_processors has {item!r}; it must be a class derived from "
                "fleetfoot.v1.sample.logits_processor.LogitsProcessor, or its name as 'module:Class'"
            )
        classes.append(found)
    return tuple(classes)


def _import(item: str | EntryPoint) -> Any:
    try:
        if isinstance(item, EntryPoint):
            return item.load()
        module, _, name = item.partition(":")
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"logits_processors has {item!r}, which cannot be imported ({error})") from error

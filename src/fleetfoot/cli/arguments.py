"""Flags of the engine, made from `EngineConfig`: a new field has its flag, its help and its default at once."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection
from types import NoneType
from typing import Any, get_args, get_type_hints

from fleetfoot.config.engine import EngineConfig

_OTHER_FLAGS = {"seed": "--engine-seed"}
"""Field -> flag, where it is not the field's name: ``--seed`` is the seed of what a command asks of the engine."""

_PREFIX = "engine."
"""Keeps the engine's settings apart from a command's own in the parsed arguments."""


def flag_of(name: str) -> str:
    """``max_model_len`` -> ``--max-model-len``."""
    return "--" + name.replace("_", "-")


def add_engine_arguments(parser: argparse.ArgumentParser, leave_out: Collection[str] = ()) -> None:
    """Add a flag for each field of `EngineConfig`, but for those in ``leave_out``."""
    group = parser.add_argument_group("engine")
    hints = get_type_hints(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        if field.name in leave_out:
            continue
        options: dict[str, Any] = {
            "dest": _PREFIX + field.name,
            "default": argparse.SUPPRESS,  # only what the user gives is passed on; EngineConfig has the defaults
            "help": help_text(field.metadata["help"], field.default),
        }
        value_type = _value_type(hints[field.name])
        if "record" in field.metadata:
            options |= {"type": str, "metavar": "JSON"}  # EngineConfig reads it
        elif value_type is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif "choices" in field.metadata:
            options["choices"] = field.metadata["choices"]
        else:
            options["type"] = value_type
            options["metavar"] = {int: "N", float: "X", str: "NAME"}[value_type]
        group.add_argument(_OTHER_FLAGS.get(field.name, flag_of(field.name)), **options)


class _OneModel(argparse.Action):
    """Stores the model, which may be given as an argument or as a flag."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest, value)
        if before != value:
            parser.error(f"two models are given, {before!r} and {value!r}; leave one out")
        setattr(namespace, self.dest, value)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """``MODEL`` as an argument, and as ``--model``: leave out the field ``model`` of `add_engine_arguments` then."""
    field = next(field for field in dataclasses.fields(EngineConfig) if field.name == "model")
    text = help_text(field.metadata["help"], field.default)
    options: dict[str, Any] = {"action": _OneModel, "default": argparse.SUPPRESS, "help": text}
    parser.add_argument(_PREFIX + field.name, nargs="?", metavar="MODEL", **options)
    parser.add_argument("--model", dest=_PREFIX + field.name, metavar="NAME", **options)


def engine_config(arguments: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """The settings that the user gave.

    Args:
        defaults: a command's own, for what the user did not give.

    Raises:
        ValueError, TypeError: a value is out of its range; the message names field and value.
    """
    return EngineConfig(**(defaults | given_settings(arguments)))


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of `EngineConfig` that the user gave, with their values."""
    return {name.removeprefix(_PREFIX): value for name, value in vars(arguments).items() if name.startswith(_PREFIX)}


def help_text(text: str, default: Any) -> str:
    """Help with the default, where there is one worth showing; a percent sign means itself."""
    if isinstance(default, bool):
        text += f" (default: {'on' if default else 'off'})"
    elif default is not None:
        text += f" (default: {default})"
    return text.replace("%", "%%")


def _value_type(hint: Any) -> type:
    """The one type of a hint, which may allow None beside it; a Literal's is that of its values."""
    types = [argument for argument in get_args(hint) if argument is not NoneType]
    if not types:
        assert isinstance(hint, type)
        return hint
    return types[0] if isinstance(types[0], type) else type(types[0])

"""Flags for the fields of `EngineConfig`, and `EngineArgs`: settings that are not checked yet."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import Field, fields, make_dataclass
from functools import partial
from typing import Any

from fleetfoot.compat.arguments import parse_value
from fleetfoot.compat.names import ENGINE_FLAGS, ENGINE_KEYWORDS
from fleetfoot.config.engine import UNSUPPORTED, EngineConfig, plain_value
from fleetfoot.utils.validation import checked_keywords

_VALUES: dict[str, tuple[type, str]] = {"int": (int, "N"), "float": (float, "X"), "str": (str, "NAME")}
"""Type of a field -> type and name of the flag's value."""


def flag_of(name: str) -> str:
    """``max_model_len`` -> ``--max-model-len``."""
    return "--" + name.replace("_", "-")


def help_text(text: str, default: Any) -> str:
    """Help with the default, if there is one to show. Percent signs are escaped for argparse."""
    if isinstance(default, bool):
        default = "on" if default else "off"
    return (text if default in (None, ()) else f"{text} (default: {default})").replace("%", "%%")


def flag_options(field: Field[Any]) -> dict[str, Any]:
    """Arguments of ``add_argument`` for a field of `EngineConfig`."""
    shown = help_text(field.metadata["help"], field.default)
    options: dict[str, Any] = {"help": argparse.SUPPRESS if field.name in UNSUPPORTED else shown}
    value_type = str(field.type).removesuffix(" | None")
    if "record" in field.metadata:
        options["metavar"] = getattr(field.metadata["record"], "metavar", "JSON")  # parsed by EngineConfig
    elif "choices" in field.metadata:
        options |= {"choices": field.metadata["choices"], "type": partial(plain_value, field.name)}
    elif value_type == "bool":
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["type"], options["metavar"] = _VALUES[value_type]
    return options


def add_setting_flags(group: Any, *, prefix: str = "", leave_out: Collection[str] = ()) -> None:
    """Add a flag for each field of `EngineConfig`, and hidden ones for vLLM's other keywords. What is not given is not
    in the parsed arguments. ``prefix``: of the names there; ``leave_out``: fields and keywords without a flag."""
    options = {field.name: flag_options(field) for field in fields(EngineConfig)}
    for name, (neutral, _) in ENGINE_KEYWORDS.items():
        is_switch = any(isinstance(value, bool) for value in neutral)
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if is_switch else {"type": parse_value}
        options[name] = {"help": argparse.SUPPRESS, **how}
    for name in [name for name in options if name not in leave_out]:
        flags = [flag_of(name), *(short for short, long in ENGINE_FLAGS.items() if long == name)]
        group.add_argument(*flags, dest=prefix + name, default=argparse.SUPPRESS, **options[name])


_DEFAULTS = {field.name: field.default for field in fields(EngineConfig)}
_DEFAULTS |= {name: (neutral or (None,))[0] for name, (neutral, _) in ENGINE_KEYWORDS.items()}
_Fields: Any = make_dataclass("_Fields", [(name, Any, default) for name, default in _DEFAULTS.items()])


@checked_keywords
class EngineArgs(_Fields):
    """The fields of `EngineConfig`, and vLLM's other keywords, as a dataclass with fields that can be assigned.

    They are checked by what takes them: `create_engine_config`, ``LLM(**vars(engine_args))``, ``from_engine_args``.
    """

    def create_engine_config(self, usage_context: object = None) -> EngineConfig:
        """The checked settings. Raises as `EngineConfig.from_keywords`; ``usage_context`` has no effect."""
        return EngineConfig.from_keywords(self.__dict__, owner=type(self).__name__)

    @staticmethod
    def add_cli_args(parser: Any, async_args_only: bool = False) -> Any:
        """Add a flag for each field to a parser or a group of one, and return that."""
        if not async_args_only:
            is_group = isinstance(parser, argparse._ArgumentGroup)
            add_setting_flags(parser if is_group else parser.add_argument_group("engine"))
            parser.set_defaults(**_DEFAULTS)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """The settings of parsed arguments; those that are no fields are ignored."""
        return cls(**{name: value for name, value in vars(args).items() if name in _DEFAULTS})


class AsyncEngineArgs(EngineArgs):
    """The same for `AsyncLLM`."""

"""Flags that several commands share: engine settings, sampling parameters, sizes, and the address to listen on.

Engine flags are generated from `EngineConfig`: each field has its flag, help text and default.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fleetfoot.config.engine import EngineConfig
from fleetfoot.engine.arg_utils import add_setting_flags, flag_of, flag_options, help_text
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams

_ENGINE, _SAMPLING = "engine.", "sampling."
"""Prefixes of parsed arguments: separate engine settings and sampling parameters from a command's own flags."""
_SAMPLING_DEFAULTS = "sampling_defaults"
"""Name of the command's own sampling defaults in the parsed arguments."""


def _given(arguments: argparse.Namespace, prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in vars(arguments).items() if name.startswith(prefix)}


def add_engine_arguments(
    parser: argparse.ArgumentParser,
    *,
    leave_out: Collection[str] = (),
    takes_model: bool = False,
    takes_seed: bool = False,
) -> None:
    """Add a flag for each field of `EngineConfig`. ``leave_out``: fields that do not apply to the command;
    ``takes_model``: whether the model can also be given as a positional argument; ``takes_seed``: whether --seed is the
    engine's, not a request's or a benchmark's."""
    group = parser.add_argument_group("engine")
    own = {"seed", *leave_out, *(["chat_template"] if "--chat-template" in parser._option_string_actions else [])}
    for field in dataclasses.fields(EngineConfig):
        options = {"dest": _ENGINE + field.name, "default": argparse.SUPPRESS, **flag_options(field)}
        if field.name == "seed":
            group.add_argument("--engine-seed", *(["--seed"] if takes_seed else []), **options)
        elif field.name == "model" and takes_model:
            own.add("model")
            parser.add_argument(nargs="?", action=_ModelAction, **options | {"metavar": "MODEL"})
            group.add_argument("--model", action=_ModelAction, **options)
    add_setting_flags(group, prefix=_ENGINE, leave_out=own)


class _ModelAction(argparse.Action):
    """Stores the model. It may be given as a positional argument or as a flag, but not as two different values."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        is_text = option is None and any(map(str.isspace, value)) and not os.path.exists(value)
        if is_text and "--prompt" in parser._option_string_actions:
            parser.error(f"{value!r} is no model; give a prompt with --prompt")
        before = getattr(namespace, self.dest, value)
        if before != value:
            parser.error(f"two models are given, {before!r} and {value!r}; leave one out")
        setattr(namespace, self.dest, value)


def engine_config(arguments: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """The `EngineConfig` of the given flags, with ``defaults`` for fields that were not given. Raises as it does."""
    return EngineConfig.from_keywords(defaults | given_settings(arguments), owner="the engine")


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of `EngineConfig` that were given on the command line, with their values."""
    return _given(arguments, _ENGINE)


def with_settings(arguments: argparse.Namespace, **settings: Any) -> argparse.Namespace:
    """``arguments`` with other values of these fields of `EngineConfig`."""
    return argparse.Namespace(**vars(arguments) | {_ENGINE + name: value for name, value in settings.items()})


def add_sampling_arguments(
    parser: argparse.ArgumentParser, *, leave_out: Collection[str] = (), **defaults: Any
) -> None:
    """Add a flag for each sampling parameter. ``leave_out``: fields that do not apply to the command; ``defaults``: of
    the command, where they differ from those of `SamplingParams`."""
    parser.set_defaults(**{_SAMPLING_DEFAULTS: defaults})
    group = parser.add_argument_group(
        "sampling",
        "Defaults are those of the model's generation_config.json, and else as shown; --generation-config none ignores "
        "the file.",
    )
    shown = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    shown |= {name: "none" if value is None else value for name, value in defaults.items()}
    for name, flag in _FLAGS.items():
        if name in leave_out:
            continue
        options: dict[str, Any] = {
            "dest": _SAMPLING + name,
            "default": argparse.SUPPRESS,  # only given flags override the model's own defaults
            "help": help_text(flag.help, shown[name]),
        }
        if flag.read is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": flag.read, "metavar": flag.metavar}
            if flag.is_list:  # a list of texts would take MODEL for one of them
                options |= {"action": "append"} if flag.read is str else {"action": "extend", "nargs": "+"}
        group.add_argument(flag_of(name), **options)


def sampling_params(
    arguments: argparse.Namespace, output_kind: RequestOutputKind, model_defaults: Mapping[str, Any] | None = None
) -> SamplingParams:
    """The given flags; then the model's defaults, the command's, and those of `SamplingParams`, in this order.

    Raises ValueError for a value out of range; the message names field and value. ``model_defaults``: as returned by
    `fleetfoot.sampling.defaults.read_sampling_defaults`.
    """
    defaults = {**getattr(arguments, _SAMPLING_DEFAULTS), **(model_defaults or {})}
    return SamplingParams(**{**defaults, **_given_sampling(arguments)}, output_kind=output_kind)


def check_sampling_arguments(arguments: argparse.Namespace) -> None:
    """Check, before a model is loaded, what does not depend on the model's defaults; raises as `sampling_params`."""
    # without a default of max_tokens, which min_tokens could contradict
    SamplingParams(**{"max_tokens": None, **_given_sampling(arguments)})


def changed_sampling_params(params: SamplingParams, name: str, text: str, names: Collection[str]) -> SamplingParams:
    """A copy with one parameter of ``names`` as its flag would set it. Raises ValueError: no such name, or no value."""
    if name not in names:
        near = difflib.get_close_matches(name, names) or names
        raise ValueError(f"there is no {name!r} to set; there is {', '.join(near)}")
    flag = _FLAGS[name]
    try:
        if flag.read is bool:
            value: Any = {"on": True, "off": False}[text.lower()]
        else:
            value = [flag.read(word) for word in text.split()] if flag.is_list else flag.read(text)
    except (ValueError, KeyError, argparse.ArgumentTypeError):
        kind = "on or off: " if flag.read is bool else ""
        raise ValueError(f"{text!r} is no value of {name}; {kind}{flag.help}") from None
    if flag.read is _token_ids:
        value = [token_id for part in value for token_id in part]
    return dataclasses.replace(params, **{name: value})


def _given_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    given = _given(arguments, _SAMPLING)
    for name in ("stop_token_ids", "allowed_token_ids"):
        if name in given:
            given[name] = [token_id for part in given[name] for token_id in part]
    return given


def _integer_or_none(text: str) -> int | None:
    """An integer, or ``none`` for no limit."""
    try:
        return None if text == "none" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither an integer nor 'none'") from None


def _token_ids(text: str) -> list[int]:
    """``1,2,3`` or ``1``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids; write 1 2 3 or 1,2,3") from None


def json_object(text: str) -> dict[str, Any]:
    """The type of a flag: ``{"42": -1.5}``."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error}); write '{{\"name\": 1.5}}'") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object; write '{{\"name\": 1.5}}'")
    return value


@dataclass(frozen=True, slots=True)
class _Flag:
    read: Callable[[str], Any]
    """Parses one word; `bool` makes a pair of --flag and --no-flag."""
    help: str
    metavar: str = "X"
    is_list: bool = False


_FLAGS = {
    "n": _Flag(int, "outputs for each prompt", "N"),
    "presence_penalty": _Flag(float, "off the logit of each token that is in the output so far, -2 to 2"),
    "frequency_penalty": _Flag(float, "off a token's logit for each time it is in the output so far, -2 to 2"),
    "repetition_penalty": _Flag(float, "above 1 discourages tokens of the prompt and the output so far"),
    "temperature": _Flag(float, "divides the logits; 0 is greedy"),
    "top_p": _Flag(float, "sample from the most probable tokens that together have this probability; 1 is off"),
    "top_k": _Flag(int, "sample from this many most probable tokens; 0 is off", "N"),
    "min_p": _Flag(float, "sample from tokens at least this probable relative to the most probable one; 0 is off"),
    "seed": _Flag(_integer_or_none, "makes samples repeatable; without it they follow from --engine-seed", "N"),
    "stop": _Flag(str, "text that ends the output; give the flag again for more", "TEXT", is_list=True),
    "stop_token_ids": _Flag(_token_ids, "tokens that end the output, beside the model's own", "ID", is_list=True),
    "ignore_eos": _Flag(bool, "go on past the model's end tokens"),
    "max_tokens": _Flag(_integer_or_none, "most tokens to generate; 'none': as many as the model has room for", "N"),
    "min_tokens": _Flag(int, "no end token before there are this many", "N"),
    "logprobs": _Flag(int, "return the logprobs of generated tokens and of this many best ones; -1: all", "N"),
    "prompt_logprobs": _Flag(int, "the same for the tokens of the prompt", "N"),
    "detokenize": _Flag(bool, "make text of the tokens"),
    "skip_special_tokens": _Flag(bool, "leave special tokens out of the text"),
    "spaces_between_special_tokens": _Flag(bool, "put spaces between special tokens that are kept in the text"),
    "include_stop_str_in_output": _Flag(bool, "keep the stop string at the end of the text"),
    "logit_bias": _Flag(json_object, "numbers to add to tokens' logits, as JSON: '{\"42\": -1.5}'", "JSON"),
    "allowed_token_ids": _Flag(_token_ids, "the only tokens that can be generated", "ID", is_list=True),
    "bad_words": _Flag(str, "a word that cannot be generated; give the flag again for more", "WORD", is_list=True),
    "structured_outputs": _Flag(json_object, 'what the output must look like: \'{"choice": ["yes", "no"]}\'', "JSON"),
    "truncate_prompt_tokens": _Flag(int, "keep this many tokens from the end of a prompt; -1: as many as fit", "N"),
}
SAMPLING_NAMES = tuple(_FLAGS)
"""The flags of each field of `SamplingParams`, except ``output_kind``, which commands set, and ``extra_args`` and
``logits_processors``, for programs."""

_UNITS = {
    "": 2**30, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip


def size_in_bytes(text: str) -> int:
    """The memory of a machine: ``80GiB``, ``80GB``, ``80`` (GiB); 1 MiB or more, below 1 PiB. An argparse type."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = 0.0 if found is None else float(found[1]) * _UNITS.get(found[2].upper(), 0)
    if not 2**20 <= size < 2**50:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 80GiB, 80GB or 512MiB; a number alone is GiB")
    return round(size)


def add_listen_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--host`` and ``--port``."""
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine alone)"
    )
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port to listen on; 0: any free (default: 0)")

"""Flags of the sampling parameters: one for each field of `SamplingParams` that makes sense on a command line."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fleetfoot.cli.arguments import flag_of, help_text
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams

_PREFIX = "sampling."
_DEFAULTS = "sampling_defaults"
"""Where the command's own defaults stand in the parsed arguments."""

NOT_A_FLAG = frozenset({"output_kind", "extra_args"})
"""Fields that the commands set themselves (whether an output is streamed), and what only other programs have to say."""


def add_sampling_arguments(
    parser: argparse.ArgumentParser, *, leave_out: Collection[str] = (), **defaults: Any
) -> None:
    """Add a flag for each sampling parameter.

    Args:
        leave_out: fields that mean nothing to the command.
        defaults: the command's own, where they are not those of `SamplingParams`.
    """
    parser.set_defaults(**{_DEFAULTS: defaults})
    group = parser.add_argument_group(
        "sampling",
        "What is not given here is as the model's generation_config.json says, and else as shown; --generation-config "
        "none leaves the file out.",
    )
    for field in dataclasses.fields(SamplingParams):
        if field.name in NOT_A_FLAG or field.name in leave_out:
            continue
        flag = _FLAGS[field.name]
        shown = field.default
        if field.name in defaults:
            shown = "none" if defaults[field.name] is None else defaults[field.name]
        options: dict[str, Any] = {
            "dest": _PREFIX + field.name,
            "default": argparse.SUPPRESS,  # only what the user gives counts against the model's own defaults
            "help": help_text(flag.help, shown),
        }
        if flag.read is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = flag.read
            options["metavar"] = flag.metavar
            if flag.is_list:
                options |= {"action": "extend", "nargs": "+"}
        group.add_argument(flag_of(field.name), **options)


def sampling_params(
    arguments: argparse.Namespace, output_kind: RequestOutputKind, model_defaults: Mapping[str, Any] | None = None
) -> SamplingParams:
    """What the user gave; else the model's defaults, the command's, or those of `SamplingParams`, in this order.

    Args:
        model_defaults: `fleetfoot.sampling.defaults.read_sampling_defaults`.

    Raises:
        ValueError: a value is out of its range; the message names field and value.
    """
    defaults = {**getattr(arguments, _DEFAULTS), **(model_defaults or {})}
    return SamplingParams(**{**defaults, **_given(arguments)}, output_kind=output_kind)


def check_sampling_arguments(arguments: argparse.Namespace) -> None:
    """Refuse what is wrong whatever the model's defaults are, before a model is loaded.

    Raises:
        ValueError: a value is out of its range; the message names field and value.
    """
    SamplingParams(**{"max_tokens": None, **_given(arguments)})  # no default of max_tokens can contradict min_tokens


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name.removeprefix(_PREFIX): value for name, value in vars(arguments).items() if name.startswith(_PREFIX)}
    for name in ("stop_token_ids", "allowed_token_ids"):
        if name in given:
            given[name] = [token_id for part in given[name] for token_id in part]
    return given


def integer_or_none(text: str) -> int | None:
    """An integer, or ``none`` for no limit."""
    try:
        return None if text == "none" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither an integer nor 'none'") from None


def token_ids(text: str) -> list[int]:
    """``1,2,3`` or ``1``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids; write 1 2 3 or 1,2,3") from None


def json_object(text: str) -> dict[str, Any]:
    """``{"42": -1.5}``."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error}); write '{{\"42\": -1.5}}'") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object; write '{{\"42\": -1.5}}'")
    return value


@dataclass(frozen=True, slots=True)
class _Flag:
    read: Callable[[str], Any]
    """Makes a value of a word; `bool` makes a pair of --flag and --no-flag."""
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
    "seed": _Flag(int, "makes samples repeatable, whatever else runs; without it they follow from --engine-seed", "N"),
    "stop": _Flag(str, "strings that end the output when they appear in it", "TEXT", is_list=True),
    "stop_token_ids": _Flag(token_ids, "tokens that end the output, beside the model's own", "ID", is_list=True),
    "ignore_eos": _Flag(bool, "go on past the model's end tokens"),
    "max_tokens": _Flag(integer_or_none, "most tokens to generate; 'none': as many as the model has room for", "N"),
    "min_tokens": _Flag(int, "no end token before there are this many", "N"),
    "logprobs": _Flag(int, "return the logprobs of generated tokens and of this many best ones; -1: all", "N"),
    "prompt_logprobs": _Flag(int, "the same for the tokens of the prompt", "N"),
    "detokenize": _Flag(bool, "make text of the tokens"),
    "skip_special_tokens": _Flag(bool, "leave special tokens out of the text"),
    "spaces_between_special_tokens": _Flag(bool, "put spaces between special tokens that are kept in the text"),
    "include_stop_str_in_output": _Flag(bool, "keep the stop string at the end of the text"),
    "logit_bias": _Flag(json_object, "numbers to add to tokens' logits, as JSON: '{\"42\": -1.5}'", "JSON"),
    "allowed_token_ids": _Flag(token_ids, "the only tokens that can be generated", "ID", is_list=True),
    "bad_words": _Flag(str, "words that cannot be generated", "WORD", is_list=True),
    "truncate_prompt_tokens": _Flag(int, "keep this many tokens from the end of a prompt; -1: as many as fit", "N"),
}

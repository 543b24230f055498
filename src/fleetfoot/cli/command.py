"""What commands share: their form, usage errors, the engine's start, prompts, and numbers as text."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fleetfoot.cli.arguments import engine_config
from fleetfoot.inputs import PromptType
from fleetfoot.outputs import RequestMetrics
from fleetfoot.scheduler.stats import DraftStats
from fleetfoot.utils.process import deferred_interrupts
from fleetfoot.utils.progress import loading_bar
from fleetfoot.weights.hub import ModelNotFoundError

if TYPE_CHECKING:
    from fleetfoot.engine.engine import LLMEngine

STORY_OPENING = "Once upon a time, by the sea, there lived"
"""The default prompt: the embedded model tells stories."""


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand; `fleetfoot.cli.main` lists all of them."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    """Adds flags, or nested commands (with `add_command`)."""
    run: Callable[[argparse.Namespace], int] | None = None
    """Runs the command and returns its exit code; None if `add_arguments` adds nested commands."""
    epilog: str | None = None
    positional: str = ""
    """Positional arguments in the usage line, before the flags."""


class UsageError(Exception):
    """A flag, value or file cannot work. The message is shown without a traceback, and the exit code is 2."""


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn errors about settings, files and prompts into `UsageError`."""
    try:
        yield
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error


def add_command(commands: argparse._SubParsersAction[Any], command: Command, *, has_flags: bool = True) -> None:
    """Add a command's parser. The parsed arguments get its ``run`` and ``parser``. ``has_flags``: else it is listed
    alone."""
    parser = commands.add_parser(
        command.name,
        help=command.help,
        description=command.help[0].upper() + command.help[1:] + ".",
        epilog=command.epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # with abbreviations, a new flag could make an old script ambiguous
    )
    if has_flags:
        command.add_arguments(parser)
    if command.run is not None:
        # short: the list of all flags would fill the screen before each error
        parser.usage = f"{parser.prog} {command.positional}[FLAG ...]"
        parser.add_argument("--verbose", action="store_true", help="log what happens, and show tracebacks of errors")
        parser.set_defaults(run=command.run, parser=parser)


@contextmanager
def started_engine(arguments: argparse.Namespace, **defaults: Any) -> Iterator[tuple[LLMEngine, float]]:
    """Load the engine that the flags describe, and shut it down at the end. Ctrl-C and SIGTERM do not interrupt its
    steps: after a step its state is consistent, and the connector's last saves are flushed.

    Args:
        defaults: values of settings that were not given.

    Yields:
        The engine, and the seconds from the first import until it accepts requests.

    Raises:
        UsageError: settings, model and machine do not fit together.
    """
    begin = time.perf_counter()
    with usage_errors():
        config = engine_config(arguments, **defaults)  # validated before torch is imported

        from fleetfoot.engine.engine import LLMEngine

        try:
            with loading_bar():
                engine = LLMEngine.from_config(config)
        except ModelNotFoundError as error:
            is_word = hasattr(arguments, "prompt") and error.setting == "model"
            raise UsageError(f"{error}{'; a prompt goes to --prompt' * is_word}") from error
    engine.step_context = deferred_interrupts
    try:
        yield engine, time.perf_counter() - begin
    finally:
        is_interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)  # an interrupted step is no failure
        with contextlib.suppress(*([Exception] if is_interrupted else [])):
            engine.shutdown()


def check_output_file(flag: str, file: str) -> None:
    """Raise UsageError unless a file of this name can be written; leaves it as it is."""
    path = Path(file)
    if path.is_dir():
        raise UsageError(f"{flag} {file}: it is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{flag} {file}: there is no such folder")
    is_new = not os.path.lexists(path)
    try:
        if is_new or path.is_file():  # a pipe would end for its reader
            path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{flag} {file}: it cannot be written: {error.strerror}") from error


def read_prompts(texts: Sequence[str], file: str | None) -> list[PromptType]:
    """Prompts from flags, then from a file; without either, standard input as one prompt, or `STORY_OPENING` if it is a
    terminal. ``file``: as for `read_prompts_file`. Raises UsageError if the file cannot be read or has no prompts, or
    there is none on standard input."""
    prompts: list[PromptType] = [*texts, *([] if file is None else read_prompts_file(file))]
    if prompts:
        return prompts
    if sys.stdin is not None and sys.stdin.isatty():
        return [STORY_OPENING]
    text = _read_stdin().removesuffix("\n").removesuffix("\r")
    if not text.strip():
        raise UsageError("standard input is empty; give a prompt there, with --prompt TEXT or with --prompts-file FILE")
    return [text]


def read_prompts_file(file: str) -> list[PromptType]:
    """One prompt for each line that is not blank. ``file``: a prompt on each line, or a JSON object if the name ends in
    ``.jsonl``; ``-`` is standard input. Raises UsageError, which names the file and the line that is not a prompt."""
    if not file.endswith(".jsonl"):
        return [line.removesuffix("\r") for _, line in _read_lines("--prompts-file", file)]
    prompts: list[Any] = []  # the engine validates the values
    for where, value in read_json_lines("--prompts-file", file):
        if not value.keys() & {"prompt", "prompt_token_ids"}:
            raise UsageError(f'{where} is no prompt; write {{"prompt": "..."}} or {{"prompt_token_ids": [...]}}')
        prompts.append(value)
    return prompts


def read_json_lines(flag: str, file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON object on each line that is not blank, and its place for messages. Raises UsageError as
    `read_prompts_file`; ``flag``: the one with the file."""
    for number, line in _read_lines(flag, file):
        where = f"{file}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise UsageError(f"{where} is a JSON {type(value).__name__}; it must be an object")
        yield where, value


def _read_lines(flag: str, file: str) -> list[tuple[int, str]]:
    """Lines that are not blank, and their numbers."""
    try:
        content = _read_stdin() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{flag} {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} {file} is not UTF-8 text: {error}") from error
    lines = [(number, line) for number, line in enumerate(content.split("\n"), start=1) if line.strip()]
    if not lines:
        raise UsageError(f"{flag} {file} holds no {flag[2:].partition('s-')[0]}: it has no line that is not blank")
    return lines


def _read_stdin() -> str:
    if sys.stdin is None:
        raise UsageError("standard input is closed; give a prompt with --prompt TEXT or --prompts-file FILE")
    try:
        return sys.stdin.read().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not {sys.stdin.encoding} text: {error}") from error


def print_status(text: str) -> None:
    """Print to standard error: standard output holds results alone. A reader that has left ends no command."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Redirect a standard stream to the null device: the interpreter flushes its buffer at exit."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as null:  # it may have no file descriptor
        os.dup2(null.fileno(), stream.fileno())


def dump_object(value: dict[str, Any]) -> str:
    """Indented ASCII JSON. NaN and infinity raise ValueError."""
    return json.dumps(value, indent=2, allow_nan=False)


def numbers_line(metrics: Sequence[RequestMetrics], duration_s: float) -> str:
    """``TTFT 12.1 ms, TPOT 3.2 ms, 312.5 tokens/s``; means over several requests. ``metrics``: of the finished
    requests; ``duration_s``: from the first request's arrival to the last token."""
    ttft = [request.first_token_latency for request in metrics if request.first_token_ts]
    tpot = [request.time_per_output_token for request in metrics if request.num_generation_tokens > 1]
    num_tokens = sum(request.num_generation_tokens for request in metrics)
    parts = [
        f"{name}{' (mean)' if len(values) > 1 else ''} {sum(values) / len(values) * 1e3:.1f} ms"
        for name, values in (("TTFT", ttft), ("TPOT", tpot))
        if values
    ]
    if duration_s > 0:
        parts.append(f"{num_tokens / duration_s:.1f} tokens/s")
    return ", ".join(parts)


def drafts_line(drafts: DraftStats) -> str:
    """``drafts: 3.42 tokens a step, 81% of 1200 accepted``; then the number of steps without drafts, by reason."""
    text = "none were verified"
    if drafts.num_rows:
        rate = f"{100 * drafts.acceptance_rate:.0f}%"
        text = f"{drafts.mean_acceptance_length:.2f} tokens a step, {rate} of {drafts.num_drafted} accepted"
    return f"drafts: {text}{steps_without_drafts(drafts.off)}"


def steps_without_drafts(off: dict[str, int]) -> str:
    """``; none in 2 steps: REASON`` for each reason."""
    return "".join(f"; none in {count(steps, 'step')}: {reason}" for reason, steps in off.items())


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 prompt``, ``2 prompts``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def at_least(least: int) -> Callable[[str], int]:
    """The type of a flag: an integer from ``least`` up."""

    def read(text: str) -> int:
        number = int(text) if text.lstrip("+-").isdecimal() else least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least {least}")
        return number

    return read


def positive(text: str) -> float:
    """The type of a flag: a number above 0, or ``inf``."""
    with contextlib.suppress(ValueError):
        if (number := float(text)) > 0:  # NaN is not
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is no number above 0; write 2.5, or inf")


def finite(text: str) -> float:
    """The same without ``inf``."""
    if math.isinf(number := positive(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return number


def add_number(add: Callable[..., object], flag: str, default: int | None, text: str, *, least: int = 1) -> None:
    """Declare a flag that counts. ``add``: ``add_argument`` of a parser or a group."""
    shown = "" if default is None else f" (default: {default})"
    add(flag, type=at_least(least), default=default, metavar="N", help=text + shown)

"""The `fleetfoot` command: finds the subcommand, and turns what happens into messages and an exit code.

Nothing here imports torch: `fleetfoot --help` answers at once, and so does a wrong flag.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import sys
import traceback
from collections.abc import Iterator, Sequence

from fleetfoot._version import __version__
from fleetfoot.cli import bench, chat, engine, generate, plan, proxy, verify, worker
from fleetfoot.cli.arguments import flag_of
from fleetfoot.cli.command import UsageError, add_command
from fleetfoot.cli.logs import logs_on_stderr
from fleetfoot.config.vllm_names import ENGINE_FLAGS, ENGINE_KEYWORDS

COMMANDS = (
    generate.COMMAND,
    chat.COMMAND,
    bench.COMMAND,
    plan.COMMAND,
    verify.COMMAND,
    worker.COMMAND,
    engine.COMMAND,
    proxy.COMMAND,
)

_OTHER_COMMANDS = {
    "serve": "fleetfoot engine runs an engine behind a port; generate and chat have one of their own",
    "run": "fleetfoot generate answers prompts, fleetfoot chat talks",
    "complete": "it is fleetfoot generate",
    "run-batch": "fleetfoot generate takes a file of prompts",
}
"""Commands of other engines, each with what to do here."""

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE: whoever read the output has left, which is not a failure to complain about."""

_EXIT_CODES = f"""\
exit codes: 0 fine; {EXIT_FAILURE} something failed; {EXIT_USAGE} a wrong flag, value or file;
            {EXIT_INTERRUPTED} ended by Ctrl-C; {EXIT_BROKEN_PIPE} the reader of the output has left"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: arguments without the program's name; None: the process's own.

    Returns:
        The exit code.
    """
    try:
        arguments = _parse(make_parser(), argv)
    except SystemExit as exit:  # argparse has printed help, the version or an error
        return exit.code if isinstance(exit.code, int) else 0
    with logs_on_stderr(verbose=arguments.verbose), _any_text_on_stdout():
        return _run(arguments)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="fleetfoot",
        description="An LLM inference and serving engine.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fleetfoot {__version__}")
    table = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        add_command(table, command)
    return parser


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    words = sys.argv[1:] if argv is None else argv
    if words and not words[0].startswith("-"):
        _check_command(parser, words[0])
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        flag = unknown[0].partition("=")[0]
        known: argparse.ArgumentParser = arguments.parser
        known.error(f"unknown argument {flag!r}; {_hint(flag, known)}")
    return arguments


def _check_command(parser: argparse.ArgumentParser, name: str) -> None:
    """Refuse a command that there is not, with what may have been meant."""
    names = [command.name for command in COMMANDS]
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=1)
    hint = _OTHER_COMMANDS.get(name) or (f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}")
    parser.error(f"there is no command {name!r}; {hint}")


def _hint(flag: str, known: argparse.ArgumentParser) -> str:
    """What to do instead of a flag that a command does not have."""
    flags = list(known._option_string_actions)
    name = flag.lstrip("-").replace("-", "_")
    if flag.startswith("-") and flag_of("tensor_parallel_size") in flags:  # the command takes an engine's settings
        name = ENGINE_FLAGS.get(name, name)
        if flag_of(name) in flags:
            return f"it is {flag_of(name)}"
        advice = ENGINE_KEYWORDS.get(name) or ENGINE_KEYWORDS.get(name.removeprefix("no_"))
        if advice:
            return advice
    near = difflib.get_close_matches(flag, flags, n=3)
    return f"did you mean {' or '.join(near)}?" if near else f"{known.prog} --help lists what it takes"


def _run(arguments: argparse.Namespace) -> int:
    name = arguments.parser.prog
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()  # here, where a reader that has left can still be dealt with
        return code
    except UsageError as error:
        _complain(f"{name}: error: {error}", arguments.verbose)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the terminal has written ^C
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return EXIT_BROKEN_PIPE
    except Exception as error:
        text = str(error) or type(error).__name__
        if not isinstance(error, RuntimeError | OSError | ValueError):
            text = f"{type(error).__name__}: {error}"  # a KeyError's text is the key alone
        _complain(f"{name}: error: {text}", arguments.verbose)
        if not arguments.verbose:
            print("(--verbose shows the traceback)", file=sys.stderr)
        return EXIT_FAILURE


@contextlib.contextmanager
def _any_text_on_stdout() -> Iterator[None]:
    """A model may write what the terminal's encoding does not have: that becomes a question mark, not an error."""
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    errors = stream.errors
    stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        stream.reconfigure(errors=errors)


def _complain(message: str, verbose: bool) -> None:
    if verbose:
        traceback.print_exc()
    print(message, file=sys.stderr)


def _drop_stdout() -> None:
    """What is left in the buffer goes nowhere, lest the interpreter complain when it flushes it at its end."""
    with contextlib.suppress(OSError, ValueError):  # a stdout without a file descriptor needs nothing
        descriptor = sys.stdout.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


if __name__ == "__main__":
    sys.exit(main())

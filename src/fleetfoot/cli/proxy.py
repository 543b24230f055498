"""`fleetfoot proxy`: two engines as one, prefill on the first and decode on the second."""

from __future__ import annotations

import argparse
import math

from fleetfoot.cli.command import Command, usage_errors
from fleetfoot.cli.engine import add_listen_arguments

_EPILOG = """\
Once requests can come, a line {"address": "HOST:PORT"} is printed. Clients ask a proxy as they would ask one engine.
Without its prefill engine it goes on: the decode engine computes the prompts itself. It ends with SIGINT or SIGTERM."""


def _address(text: str) -> str:
    from fleetfoot.kv_transfer.base.sockets import parse_address

    try:
        parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time to wait; it must be a number of seconds above 0")
    return seconds


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, help_text in (
        ("--prefill", "the engine that computes prompts (kv_producer)"),
        ("--decode", "the engine that goes on from there (kv_consumer)"),
    ):
        parser.add_argument(name, required=True, type=_address, metavar="HOST:PORT", help=help_text)
    parser.add_argument(
        "--prefill-timeout",
        type=_seconds,
        default=60.0,
        metavar="X",
        help="seconds after which the prefill engine is not waited for any longer (default: 60)",
    )
    add_listen_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    from fleetfoot.server.disaggregation.serve import serve_proxy

    with usage_errors():
        serve_proxy(
            arguments.prefill,
            arguments.decode,
            arguments.host,
            arguments.port,
            prefill_timeout=arguments.prefill_timeout,
        )
    return 0


COMMAND = Command("proxy", "prefill on one engine, decode on another", _add_arguments, _run, _EPILOG)

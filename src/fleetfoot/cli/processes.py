"""`fleetfoot engine`, `proxy` and `worker`: processes that serve other processes until they are stopped."""

from __future__ import annotations

import argparse
import math
from functools import partial

from fleetfoot.cli.arguments import add_engine_arguments, add_listen_arguments, engine_config
from fleetfoot.cli.command import Command, print_status, usage_errors

_ENGINE_EPILOG = """\
Once the engine can take requests, a line {"address": "HOST:PORT"} is printed. It ends with SIGINT or SIGTERM.
Prefill on one engine, decode on another, both behind one address (docs/disaggregation.md):

  fleetfoot engine M --port 8100 --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}'
  fleetfoot engine M --port 8200 --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}'
  fleetfoot proxy --prefill 127.0.0.1:8100 --decode 127.0.0.1:8200 --port 8000"""

_PROXY_EPILOG = """\
Once requests can come, a line {"address": "HOST:PORT"} is printed. Clients use a proxy as they would use one engine.
Without its prefill engine it goes on: the decode engine computes the prompts itself. It ends with SIGINT or SIGTERM."""

_WORKER_EPILOG = """\
An engine over several machines starts on the first one, node 0, with any command:

  fleetfoot generate --model M --tensor-parallel-size 16 --nnodes 2 --master-addr 10.0.0.1

and the others run their share of its workers, with the same settings:

  fleetfoot worker M --tensor-parallel-size 16 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1

The nodes can be started in any order, and wait ten minutes for each other. This command ends with the engine: with
exit code 0, or with 1 and the reason if anything failed, on whatever node."""


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    add_listen_arguments(parser)
    add_engine_arguments(parser, takes_model=True)


def _run_engine(arguments: argparse.Namespace) -> int:
    with usage_errors():
        config = engine_config(arguments)  # validated before torch is imported

        from fleetfoot.server.disaggregation.serve import serve_engine

        serve_engine(config, arguments.host, arguments.port)
    return 0


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


def _add_proxy_flags(parser: argparse.ArgumentParser) -> None:
    for flag, text in (
        ("--prefill", "the engine that computes prompts (kv_producer)"),
        ("--decode", "the engine that goes on from there (kv_consumer)"),
    ):
        parser.add_argument(flag, required=True, type=_address, metavar="HOST:PORT", help=text)
    text = "seconds after which the prefill engine is not waited for any longer (default: 60)"
    parser.add_argument("--prefill-timeout", type=_seconds, default=60.0, metavar="X", help=text)
    add_listen_arguments(parser)


def _run_proxy(arguments: argparse.Namespace) -> int:
    from fleetfoot.server.disaggregation.serve import serve_proxy

    addresses = arguments.prefill, arguments.decode, arguments.host
    with usage_errors():
        serve_proxy(*addresses, arguments.port, prefill_timeout=arguments.prefill_timeout)
    return 0


def _run_worker(arguments: argparse.Namespace) -> int:
    with usage_errors():
        config = engine_config(arguments)  # validated before torch is imported
        if config.node_rank != 0:
            node, address = f"node {config.node_rank} of {config.nnodes}", f"{config.master_addr}:{config.master_port}"
            print_status(f"this is {node}, and waits for node 0 at {address}")

        from fleetfoot.executor.nodes import run_node

        run_node(config)
    return 0


_ENGINE_HELP = "run an engine behind a port, for a proxy or a client in Python"
_PROXY_HELP = "prefill on one engine, decode on another"
_WORKER_HELP = "run the workers of a machine that is not an engine's first"
_add_worker_flags = partial(add_engine_arguments, takes_model=True)

ENGINE = Command("engine", _ENGINE_HELP, _add_engine_flags, _run_engine, _ENGINE_EPILOG, "[MODEL] ")
PROXY = Command("proxy", _PROXY_HELP, _add_proxy_flags, _run_proxy, _PROXY_EPILOG)
WORKER = Command("worker", _WORKER_HELP, _add_worker_flags, _run_worker, _WORKER_EPILOG, "[MODEL] ")

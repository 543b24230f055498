"""`fleetfoot engine`: an engine in a process of its own, one half of disaggregated prefill."""

from __future__ import annotations

import argparse

from fleetfoot.cli.arguments import add_engine_arguments, add_model_argument, engine_config
from fleetfoot.cli.command import Command, usage_errors

_EPILOG = """\
Once the engine can take requests, a line {"address": "HOST:PORT"} is printed. It ends with SIGINT or SIGTERM.
Prefill on one engine, decode on another, both behind one address (docs/disaggregation.md):

  fleetfoot engine M --port 8100 --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}'
  fleetfoot engine M --port 8200 --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}'
  fleetfoot proxy --prefill 127.0.0.1:8100 --decode 127.0.0.1:8200 --port 8000"""


def add_listen_arguments(parser: argparse.ArgumentParser) -> None:
    """``--host`` and ``--port``."""
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; whoever reaches it may ask (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="port to listen on; 0 is any that is free (default: 0)"
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_listen_arguments(parser)
    add_engine_arguments(parser, leave_out=("model",))


def _run(arguments: argparse.Namespace) -> int:
    with usage_errors():
        config = engine_config(arguments)  # a wrong value is refused before torch is imported

        from fleetfoot.server.disaggregation.serve import serve_engine

        serve_engine(config, arguments.host, arguments.port)
    return 0


COMMAND = Command(
    "engine",
    "run an engine behind a port, for a proxy or a client in Python",
    _add_arguments,
    _run,
    _EPILOG,
    positional="[MODEL] ",
)

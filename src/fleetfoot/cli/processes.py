"""`fleetfoot engine`, `proxy` and `worker`: processes that serve other processes until they are stopped."""

from __future__ import annotations

import argparse
from functools import partial
from importlib import import_module

from fleetfoot.cli.arguments import add_engine_arguments, add_listen_arguments, engine_config
from fleetfoot.cli.command import Command, finite, usage_errors
from fleetfoot.cli.serve import add_server_arguments, run_workers, server_settings
from fleetfoot.config import env
from fleetfoot.utils.cluster_key import find_cluster_key

_ENGINE_EPILOG = """\
Once the engine can take requests, a line {"address": "HOST:PORT"} is printed. It ends with SIGINT or SIGTERM.
Prefill on one engine, decode on another, both behind one address (docs/disaggregation.md):

  fleetfoot engine M --port 8100 --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}'
  fleetfoot engine M --port 8200 --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}'
  fleetfoot proxy --port 8000 --prefill 127.0.0.1:8100 --decode 127.0.0.1:8200"""

_PROXY_EPILOG = """\
It serves OpenAI's API as fleetfoot serve does, with the same flags. Without prefill engines it goes on: decode engines
compute the prompts. Requests of an engine that is lost continue on another one."""

_WORKER_EPILOG = """\
An engine over several machines starts on the first one, node 0, with any command:

  fleetfoot generate --model M --tensor-parallel-size 16 --nnodes 2 --master-addr 10.0.0.1 \\
    --cluster-key-file cluster_key --trusted-network

and the others run their share of its workers, with the same settings:

  fleetfoot worker M --tensor-parallel-size 16 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 \\
    --cluster-key-file cluster_key --trusted-network

The nodes can be started in any order, and wait ten minutes for each other. This command ends with the engine: with
exit code 0, or with 1 and the reason if anything failed, on whatever node."""


def _no_engine_key(text: str) -> str:
    raise argparse.ArgumentTypeError(
        "arguments are visible to all users of a machine; write the key to a file (mode 0600) for --cluster-key-file, "
        "or set FLEETFOOT_CLUSTER_KEY"
    )


def _add_key_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine-key", type=_no_engine_key, help=argparse.SUPPRESS)


def _check_variables() -> None:
    if env.engine_key():
        raise ValueError("FLEETFOOT_ENGINE_KEY is set, and is not read any more; set FLEETFOOT_CLUSTER_KEY instead")


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    add_listen_arguments(parser)
    _add_key_flag(parser)
    add_engine_arguments(parser, takes_model=True, takes_seed=True)


def _run_engine(arguments: argparse.Namespace) -> int:
    with usage_errors():
        config = engine_config(arguments)  # validated before torch is imported

        _check_variables()
        key = config.find_cluster_key(arguments.host)

        serve = import_module("fleetfoot.server.disaggregation.serve")  # a room that can be deleted
        code: int = serve.serve_engine(config, arguments.host, arguments.port, key)
        return code


def _address(text: str) -> str:
    from fleetfoot.utils.sockets import parse_address

    try:
        parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _add_proxy_flags(parser: argparse.ArgumentParser) -> None:
    add = partial(parser.add_argument, nargs="+", type=_address, metavar="HOST:PORT")
    add("--prefill", default=(), help="engines that compute prompts (kv_producer); without, all engines do all")
    add("--decode", required=True, help="engines that go on from there (kv_consumer)")
    text = "seconds to wait for a prefill engine, before a decode engine computes the prompt (default: 60)"
    parser.add_argument("--prefill-timeout", type=finite, default=60.0, metavar="X", help=text)
    text = "seconds that a request waits while no engine can be reached (default: 60)"
    parser.add_argument("--engine-timeout", type=finite, default=60.0, metavar="X", help=text)
    text = "file (mode 0600) with the secret that the engines have too (default: as of fleetfoot engine)"
    parser.add_argument("--cluster-key-file", metavar="FILE", help=text)
    _add_key_flag(parser)
    add_server_arguments(parser)


def _run_proxy(arguments: argparse.Namespace) -> int:
    with usage_errors():
        from fleetfoot.server.engine_group import EngineGroup
        from fleetfoot.server.serve import serve

        _check_variables()
        addresses = (*arguments.prefill, *arguments.decode)
        hosts = [address.rpartition(":")[0] for address in addresses]
        group = EngineGroup(
            prefill=tuple(f"tcp://{address}" for address in arguments.prefill),
            decode=tuple(f"tcp://{address}" for address in arguments.decode),
            prefill_timeout=arguments.prefill_timeout,
            engine_timeout=arguments.engine_timeout,
            key=find_cluster_key(arguments.cluster_key_file, env.cluster_key(), hosts),
        )
        return serve(group, server_settings(arguments))


def _run_worker(arguments: argparse.Namespace) -> int:
    with usage_errors():
        return run_workers(engine_config(arguments))  # validated before torch is imported


_ENGINE_HELP = "run an engine behind a port, for a proxy or a client in Python"
_PROXY_HELP = "prefill on one engine, decode on another"
_WORKER_HELP = "run the workers of a machine that is not an engine's first"
_add_worker_flags = partial(add_engine_arguments, takes_model=True, takes_seed=True)

ENGINE = Command("engine", _ENGINE_HELP, _add_engine_flags, _run_engine, _ENGINE_EPILOG, "[MODEL] ")
PROXY = Command("proxy", _PROXY_HELP, _add_proxy_flags, _run_proxy, _PROXY_EPILOG)
WORKER = Command("worker", _WORKER_HELP, _add_worker_flags, _run_worker, _WORKER_EPILOG, "[MODEL] ")

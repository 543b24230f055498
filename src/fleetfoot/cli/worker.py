"""`fleetfoot worker`: the workers of a machine that is not an engine's first."""

from __future__ import annotations

import argparse
import sys

from fleetfoot.cli.arguments import add_engine_arguments, add_model_argument, engine_config
from fleetfoot.cli.command import Command, usage_errors

_EPILOG = """\
An engine over several machines starts on the first one, node 0, with any command:

  fleetfoot generate --model M --tensor-parallel-size 16 --nnodes 2 --master-addr 10.0.0.1

and the others run their share of its workers, with the same settings:

  fleetfoot worker M --tensor-parallel-size 16 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1

The nodes can be started in any order, and wait ten minutes for each other. This command ends with the engine: with
exit code 0, or with 1 and the reason if anything failed, on whatever node."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_engine_arguments(parser, leave_out=("model",))


def _run(arguments: argparse.Namespace) -> int:
    with usage_errors():
        config = engine_config(arguments)  # a wrong value is refused before torch is imported
        if config.node_rank != 0:
            where = f"{config.master_addr}:{config.master_port}"
            print(
                f"this is node {config.node_rank} of {config.nnodes}, and waits for node 0 at {where}", file=sys.stderr
            )

        from fleetfoot.executor.node import run_node

        run_node(config)
    return 0


COMMAND = Command(
    "worker",
    "run the workers of a machine that is not an engine's first",
    _add_arguments,
    _run,
    _EPILOG,
    positional="[MODEL] ",
)

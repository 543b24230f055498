"""`fleetfoot compile`: fills the cache of compiled kernels, so that no later start compiles."""

from __future__ import annotations

import argparse
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetfoot.cli.arguments import add_engine_arguments, engine_config, with_settings
from fleetfoot.cli.command import Command, UsageError, count, dump_object, started_engine, usage_errors
from fleetfoot.config import env

if TYPE_CHECKING:
    from fleetfoot.plan.plan import EnginePlan

_EPILOG = """\
The engine's settings are those of the engine that will be started: kernels depend on the model's shape, the dtype, the
number of ranks, drafts and sizes of steps. The engine starts once with random weights and compiles what its steps
launch; only config.json is read. What the cache has is not compiled again.

Kernels lie in Triton's cache: TRITON_CACHE_DIR, by default ~/.triton/cache. --output is another folder, which an engine
uses with TRITON_CACHE_DIR=FOLDER. It can be copied to other machines, to a folder with the same absolute path, which
the cache contains. Equal must be: the version of Fleetfoot, of Triton and of Python, the kind of GPU, and variables
that begin with TRITON_. Where one differs, an engine compiles.

--json prints one object: kernels_found (in the cache), kernels_compiled, each over all ranks, cache (the folder),
  gpu_name, seconds
The exit code is 0 if every kernel is in the cache, 1 if one does not compile, 2 if there is nothing to compile or a
flag is wrong."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    output_help = "folder for the kernels instead of Triton's cache; made if it is not there"
    parser.add_argument("--output", metavar="FOLDER", help=output_help)
    leave_out = ("load_format", "skip_tokenizer_init")
    add_engine_arguments(parser, leave_out=leave_out, takes_model=True)


def _run(arguments: argparse.Namespace) -> int:
    settings = {"load_format": "dummy", "skip_tokenizer_init": True}
    plan = _plan(arguments, **settings)
    # the folder of config.json: the weights need not be there
    arguments = with_settings(arguments, model=str(plan.model_path), revision=None)
    with ExitStack() as stack:
        if arguments.output is not None:
            stack.enter_context(env.variable(env.TRITON_CACHE_DIR, str(_make_folder(arguments.output))))
        begin = time.perf_counter()
        engine, _ = stack.enter_context(started_engine(arguments, **settings))
        ranks = engine.collective_rpc("compiled_kernels")
        seconds, folder = time.perf_counter() - begin, _cache_folder()
    found, compiled = (sum(numbers) for numbers in zip(*ranks, strict=True))
    if arguments.json:
        numbers = {"kernels_found": found, "kernels_compiled": compiled}
        print(dump_object({**numbers, "cache": folder, "gpu_name": plan.machine.gpu_name, "seconds": seconds}))
    else:
        print(f"{count(found + compiled, 'kernel')} for {plan.machine.gpu_name} in {folder}")
        print(f"{found} found, {compiled} compiled, in {seconds:.1f} s")
    return 0


def _plan(arguments: argparse.Namespace, **settings: Any) -> EnginePlan:
    """The plan of the engine. Raises UsageError if it compiles nothing."""
    with usage_errors():
        config = engine_config(arguments, **settings)

        from fleetfoot.plan.machine import Machine
        from fleetfoot.plan.resolve import resolve_plan

        plan = resolve_plan(config, Machine.detect(), config_only=True)
    if plan.device == "cpu":
        raise UsageError("the device is a CPU, for which nothing needs to be compiled; run this where the GPU is")
    if plan.runner != "v2":
        reasons = "; ".join(plan.decision.reasons)
        raise UsageError(f"Model Runner V1 runs, which compiles each kernel when it is first launched: {reasons}")
    return plan


def _make_folder(name: str) -> Path:
    """An absolute path, because workers may have another working directory."""
    folder = Path(os.path.expanduser(name)).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {name}: {error}; name a folder that can be made") from error
    return folder


def _cache_folder() -> str:
    from triton import knobs

    return str(knobs.cache.dir)


_HELP = "compile an engine's kernels before it is started"
COMMAND = Command("compile", _HELP, _add_arguments, _run, _EPILOG, "[MODEL] ")

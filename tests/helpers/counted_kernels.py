"""Counts the kernels of starts on an H200 that is not there, and starts with a compiler that compiles nothing. Run as a
module, without ``TRITON_INTERPRET``; prints a line of JSON, see `main`."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from fleetfoot.config.engine import EngineConfig
from fleetfoot.executor.kernel_count import count_kernels
from fleetfoot.executor.worker import Worker
from fleetfoot.kernels.runtime import compile_ahead
from fleetfoot.kernels.runtime.compile_ahead import CompileAhead
from fleetfoot.kernels.runtime.gpu_limits import HOPPER_LIMITS, absent_gpu
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.plan.resolve import resolve_plan
from tests.helpers.kernel_choices import H200, write_config

DRAFTS = {"method": "ngram", "num_speculative_tokens": 2}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "windows": ("gemma-3-1b", {}, {}),
    "a chain and drafts": ("llama-3.2-1b", {}, {"speculative_config": DRAFTS}),
    "eager, small GPU": ("qwen3-0.6b", {}, {"enforce_eager": True}),
}
"""Model, further fields of its config, and settings."""


def nothing_compiled(self: Any, job: Callable[..., Any], /, *_: Any, **__: Any) -> Future[Any]:
    """In place of what Triton submits: a kernel that is ready."""
    future: Future[Any] = Future()
    kernel = SimpleNamespace(_init_handles=lambda: None, asm={})
    self.jobs.append(compile_ahead._Job(future, lambda: kernel))
    return future


def start(plan: EnginePlan) -> dict[str, Any]:
    """``bar``: what a start reports of its kernels, first and last; ``compiled`` of them; and the number of graphs."""
    reports: list[tuple[int, int]] = []
    with (
        absent_gpu(replace(HOPPER_LIMITS, num_sms=plan.machine.num_sms)) as device,
        patch.object(compile_ahead._Submitted, "submit", nothing_compiled),
        patch.object(CompileAhead, "_compile", lambda *_: None),
        patch.object(compile_ahead, "report_progress", lambda _, *numbers: reports.append(numbers)),
    ):
        worker = Worker(plan, device=device)
        worker.prepare()
        runner: Any = worker.runner
        group = runner._loader.context.groups.tensor
        compiled = sum(runner._padding.compile(CompileAhead(2), runner.graphs.keys, group))
    return {"bar": [reports[0], reports[-1]], "compiled": compiled, "graphs": len(runner.graphs.keys)}


def main() -> None:
    """For each case what a plan says, and what a start does."""
    report = {}
    for name, (model, fields, settings) in CASES.items():
        machine = replace(H200, num_sms=78) if "small" in name else H200
        with tempfile.TemporaryDirectory() as folder:
            path = write_config(model, folder, num_hidden_layers=6, **fields)
            config = EngineConfig(model=path, load_format="dummy", skip_tokenizer_init=True, **settings)
            plan = resolve_plan(config, machine, config_only=True)
            counted = count_kernels(plan), len(plan.capture_table.graphs)
            report[name] = {"plan": counted, **start(plan)}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()

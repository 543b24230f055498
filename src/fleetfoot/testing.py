"""Helpers for the tests of programs that use Fleetfoot."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from fleetfoot.config import env
from fleetfoot.config.engine import EngineConfig
from fleetfoot.engine.engine import LLMEngine, build_engine
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.plan.resolve import resolve_plan


class force_runner:  # noqa: N801  # read as a function: `with force_runner("v1"):`, `@force_runner("v1")`
    """Every engine that starts in this block, or in the decorated function, runs on this model runner.

    It overrides ``FLEETFOOT_USE_V2_MODEL_RUNNER``, which it sets, for child processes too, and restores at the end. An
    engine's own setting for the other runner is an error. The block asserts the runner that its engines report once
    they have started, in whichever thread. It ends with an AssertionError if an engine ran on the other runner, or if
    no engine of this process has started; a failed start does not count. An exception of the block itself is raised
    unchanged::

        with force_runner("v1"):
            with LLM(model) as llm:
                assert llm.llm_engine.runner_name == "v1"

    Blocks may be nested; an engine counts for the innermost one. Decorated functions may be ``async``.

    Args:
        runner: ``v1`` or ``v2``.

    Raises:
        ValueError: it is neither.
    """

    def __init__(self, runner: str) -> None:
        if runner not in ("v1", "v2"):
            raise ValueError(f"runner is {runner!r}; it can be 'v1' or 'v2'")
        self.runner = runner
        self.plans: list[EnginePlan] = []
        """The plans of the engines that have started in the block."""
        self._variable = {"v1": "0", "v2": "1"}[runner]
        self._others = 0
        self._undo: ExitStack | None = None

    def __enter__(self) -> force_runner:
        if self._undo is not None:
            raise RuntimeError("this force_runner is in use already; make another one for a block inside of it")
        self.plans, self._others = [], 0
        self._undo = ExitStack()
        self._undo.enter_context(env.variable(env.USE_V2_MODEL_RUNNER, self._variable))
        # modules, not threads, are patched: engines of all threads count
        self._undo.enter_context(mock.patch("fleetfoot.engine.engine.resolve_plan", self._resolve_plan))
        self._undo.enter_context(mock.patch("fleetfoot.engine.engine.build_engine", self._build_engine))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._undo is not None:
            self._undo.close()
            self._undo = None
        if error is None and self._others:
            raise AssertionError(f"force_runner({self.runner!r}): {self._others} engine(s) ran on another runner")
        if error is None and not self.plans:
            raise AssertionError(f"force_runner({self.runner!r}) had no effect: no engine has started in its block")

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def forced(*args: Any, **kwargs: Any) -> Any:
            with force_runner(self.runner):
                return function(*args, **kwargs)

        @functools.wraps(function)
        async def async_forced(*args: Any, **kwargs: Any) -> Any:
            with force_runner(self.runner):
                return await function(*args, **kwargs)

        return async_forced if inspect.iscoroutinefunction(function) else forced

    def _resolve_plan(self, config: EngineConfig, machine: Machine) -> EnginePlan:
        # passed explicitly: the block may have changed the environment
        plan = resolve_plan(config, machine, environ={env.USE_V2_MODEL_RUNNER: self._variable})
        if plan.runner != self.runner:
            raise ValueError(
                f"force_runner({self.runner!r}) is in effect, and the engine would run on {plan.runner!r}: "
                f"{' '.join(plan.reasons)} Leave that setting out, or use force_runner({plan.runner!r})"
            )
        return plan

    def _build_engine(self, config: EngineConfig) -> LLMEngine:
        engine = build_engine(config)
        if engine.runner_name != self.runner:
            self._others += 1
            engine.shutdown()
            ran = engine.runner_name
            raise AssertionError(f"force_runner({self.runner!r}) is in effect, and the engine runs on {ran!r}")
        self.plans.append(engine.plan)
        return engine

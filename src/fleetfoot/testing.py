"""Helpers for the tests of programs that use Fleetfoot."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, overload

from fleetfoot.plan.forced_runner import ForcedRunner, begin_forcing, forced_runners


class force_runner:  # noqa: N801  # read as a function: `with force_runner("v1"):`, `@force_runner("v1")`
    """Every engine that is created in this block, or in the decorated function, runs on this model runner.

    It wins over ``FLEETFOOT_USE_V2_MODEL_RUNNER``; an engine's own setting for the other runner is an error. The block
    asserts the runner that its engines report once they have started. It ends with an AssertionError if an engine ran
    on the other runner, or if no engine has started; a failed start does not count. An exception of the block itself is
    raised unchanged::

        with force_runner("v1") as forced:
            with LLM(model) as llm:
                assert llm.llm_engine.runner_name == "v1"
        assert [plan.runner for plan in forced.plans] == ["v1"]

    The block is that of its thread or task (`contextvars`), and nothing else in the process changes: blocks of several
    threads and tasks may overlap. A task that begins in a block is in it until the block ends. A thread that is started
    in a block is not in it. An engine's worker processes and the engine's process of a server get the runner of their
    creator; other programs that the block starts do not. The engine of a server does not count as one that has started.

    Blocks may be nested; an engine counts for the innermost one. Decorated functions may be ``async``.
    ``force_v1_runner`` is a name for ``force_runner("v1")``, and can be called too: ``with force_v1_runner():``.

    Args:
        runner: ``v1`` or ``v2``.

    Raises:
        ValueError: it is neither.
    """

    def __init__(self, runner: str) -> None:
        if runner not in ("v1", "v2"):
            raise ValueError(f"runner is {runner!r}; it can be 'v1' or 'v2'")
        self.runner = runner
        self._blocks: list[ForcedRunner] = []  # of all threads

    def __enter__(self) -> ForcedRunner:
        if any(block in self._blocks for block in forced_runners()):
            raise RuntimeError("this force_runner is in use already; make another one for a block inside of it")
        block = begin_forcing(self.runner)
        self._blocks.append(block)
        return block

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # a fixture may end in another context than it began in
        block = next((block for block in forced_runners() if block in self._blocks), self._blocks[-1])
        self._blocks.remove(block)
        block.is_active = False
        if error is None and block.num_others:
            raise AssertionError(f"force_runner({self.runner!r}): {block.num_others} engine(s) ran on another runner")
        if error is None and not block.plans:
            raise AssertionError(f"force_runner({self.runner!r}) had no effect: no engine has started in its block")

    @overload
    def __call__(self) -> force_runner: ...
    @overload
    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]: ...
    def __call__(self, function: Callable[..., Any] | None = None) -> Any:
        if function is None:
            return force_runner(self.runner)
        inner = function

        @functools.wraps(inner)
        def forced(*args: Any, **kwargs: Any) -> Any:
            with force_runner(self.runner):
                return inner(*args, **kwargs)

        @functools.wraps(inner)
        async def async_forced(*args: Any, **kwargs: Any) -> Any:
            with force_runner(self.runner):
                return await inner(*args, **kwargs)

        return async_forced if inspect.iscoroutinefunction(function) else forced


force_v1_runner = force_runner("v1")

"""Holding the step loop between steps: for weight updates, sleep, a restart, and calls of the workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal, get_args

from fleetfoot.engine.core import EngineCore
from fleetfoot.records.step import EngineOutput
from fleetfoot.utils.validation import FieldError

HoldMode = Literal["drain", "wait", "keep", "abort"]
"""What happens to unfinished requests before the loop is held.

``drain``: those that have run finish first; those that have not, and new ones, wait.
``wait``: running requests are preempted. They keep their tokens; their KV is computed again later.
``keep``: running requests keep their KV too, and go on later as if nothing had happened.
``abort``: all end as aborted, with the tokens that they have.
"""
HOLD_MODES: tuple[str, ...] = get_args(HoldMode)


class Hold:
    """A function that runs between two steps, when no step is in flight.

    Args:
        function: its result, or the exception that it raises, becomes that of `result`; the engine goes on either way.
        mode: see `HoldMode`. In a paused engine, ``drain`` means ``keep``.
        on_done: called when there is a result, in the thread that steps.

    Raises:
        ValueError: ``mode`` is unknown.
    """

    def __init__(
        self, function: Callable[[], Any], mode: str = "drain", on_done: Callable[[Hold], object] = lambda hold: None
    ) -> None:
        if mode not in HOLD_MODES:
            raise FieldError("mode", f"is {mode!r}; it must be one of {', '.join(HOLD_MODES)}", mode)
        self.mode = mode
        self.is_done = False
        self._function, self._on_done = function, on_done
        self._value: Any = None
        self.error: BaseException | None = None
        """What `result` raises."""

    def run(self) -> None:
        """Call the function. Only exceptions that are no `Exception`, such as KeyboardInterrupt, are raised."""
        try:
            self._value = self._function()
        except Exception as error:
            self.error = error
        self._end()

    def fail(self, error: BaseException) -> None:
        """End without calling the function."""
        self.error = error
        self._end()

    def _end(self) -> None:
        if not self.is_done:
            self.is_done = True
            self._on_done(self)

    def result(self) -> Any:
        """The function's result; raises what it has raised, or what has kept it from running."""
        if self.error is not None:
            raise self.error
        return self._value


class HoldQueue:
    """The holds of an engine, in order, and whether it is paused. Its methods are called by the thread that steps.

    Args:
        abort_all: ends all requests as aborted.
    """

    def __init__(self, core: EngineCore, abort_all: Callable[[], object]) -> None:
        self._core = core
        self._abort_all = abort_all
        self._queue: deque[Hold] = deque()
        self._begun: Hold | None = None
        self.is_paused = False
        """Whether steps do nothing until `resume`. Holds still run."""
        self.is_held = False
        """Whether a hold's function is running."""
        self.watch: Callable[[bool], object] = lambda is_held: None
        """Called when a hold's function begins, and when it has ended."""

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, hold: Hold) -> None:
        """Queue a hold."""
        self._queue.append(hold)

    def remove(self, hold: Hold) -> None:
        """Remove a hold, unless it is done."""
        if hold in self._queue:
            self._queue.remove(hold)
        if hold is self._begun:
            self._begun = None
            self._core.scheduler.release_new()

    def pause(self) -> None:
        """Within a hold's function: take no further step until `resume`."""
        self.is_paused = True

    def resume(self) -> None:
        """Go on with steps."""
        self.is_paused = False

    def step(self, before_update: Callable[[], object]) -> list[EngineOutput] | None:
        """One step towards the first hold: with started requests where it drains, else only of what is in flight."""
        hold, core = self._queue[0], self._core
        drains = hold.mode == "drain" and not self.is_paused
        if hold is not self._begun:
            self._begun = hold
            if drains:
                core.scheduler.hold_new()
            elif hold.mode == "abort":
                self._abort_all()
        return core.step(before_update) if drains and core.scheduler.has_started else core.retire(before_update)

    def run_if_reached(self) -> BaseException | None:
        """After `step`, with its outputs processed: run the hold's function if nothing is in flight, and with
        ``drain`` no started request is left. Returns what the function has raised."""
        hold, scheduler = self._begun, self._core.scheduler
        if hold is None or self._core.is_in_flight:
            return None
        if hold.mode == "drain" and not self.is_paused and scheduler.has_started:
            return None
        if hold.mode == "wait":
            scheduler.preempt_running()
        self.is_held = True
        self.watch(True)
        try:
            hold.run()
        finally:
            self.is_held = False
            self.watch(False)
            self.remove(hold)
        return hold.error

    def fail_all(self, error: BaseException) -> None:
        """End all holds: the engine has failed, or is shut down."""
        while self._queue:
            self._queue.popleft().fail(error)


class HoldCalls:
    """Mixed into `LLMEngine`."""

    _holds: HoldQueue
    _aborted: list[Any]

    def step(self) -> list[Any]:
        """See `LLMEngine.step`."""
        raise NotImplementedError

    def _check_alive(self) -> None:
        raise NotImplementedError

    def hold(self, function: Callable[[], Any], mode: str = "drain", **options: Any) -> Hold:
        """Queue a function that runs within a later `step`, in its thread, when no step is in flight.

        The function may use the engine, except `step` and `run_held`; `collective_rpc` calls all workers. `pause` in it
        makes the engine stay held.

        Args:
            function, mode, options: see `Hold`. ``mode``: ``drain``, ``wait``, ``keep`` or ``abort``.

        Raises:
            ValueError: ``mode`` is unknown.
            EngineDeadError: the engine has failed or was shut down. If it does so later, `Hold.result` raises it.
        """
        hold = Hold(function, mode, **options)
        self.add_hold(hold)
        return hold

    def watch_holds(self, watch: Callable[[bool], object]) -> None:
        """Call ``watch(True)`` when the function of a hold begins, and ``watch(False)`` when it has ended."""
        self._holds.watch = watch

    def add_hold(self, hold: Hold) -> None:
        """Queue a hold; see `hold`."""
        self._check_alive()
        self._holds.add(hold)

    def cancel_hold(self, hold: Hold) -> None:
        """Remove a hold that is not done."""
        self._holds.remove(hold)

    def run_held(self, function: Callable[[], Any], mode: str = "drain") -> Any:
        """`hold`, then `step` until the function has run; within a hold's function, call it at once.

        Returns or raises what the function does. The next `step` returns the outputs of these steps.
        """
        if self._holds.is_held:
            return function()
        hold, outputs = self.hold(function, mode), list[Any]()
        try:
            while not hold.is_done:
                outputs += self.step()
        finally:
            self.cancel_hold(hold)
            self._aborted = outputs + self._aborted
        return hold.result()

    def pause(self) -> None:
        """Within a hold's function: take no further step until `resume`. Requests can be added and aborted."""
        self._holds.pause()

    def resume(self) -> None:
        """Go on with steps; does nothing in an engine that is not paused."""
        self._holds.resume()

    @property
    def is_paused(self) -> bool:
        """Whether `step` runs no request until `resume`."""
        return self._holds.is_paused

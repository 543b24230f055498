"""Restarts: after an error the workers are rebuilt, and requests resume from the tokens that they have.

A request that makes steps fail again and again is found by bisection, and ends alone, with the cause.
"""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fleetfoot.engine.core import EngineCore
from fleetfoot.engine.output_processor import OutputProcessor
from fleetfoot.executor.protocol import Executor, WorkerError
from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import EngineOutput

logger = logging.getLogger(__name__)

WINDOW_S = 3600.0
"""``max_restarts`` limits the restarts within this time."""

Rebuild = Callable[[], tuple[Executor, SchedulerConnector, int]]
"""Starts new workers. Returns their executor, the scheduler's side of the connector, and the number of KV blocks."""

Step = Callable[[Callable[[], object]], list[EngineOutput] | None]
"""A step of the engine's core, see `EngineCore.step`."""


class NoRestarts:
    """An error ends the engine."""

    error: Exception | None = None
    """An error that has occurred, after which the next step restarts the workers."""
    watch: Callable[[bool], object] = staticmethod(lambda is_restarting: None)
    """Called when a restart begins and when it has ended."""

    def step(self, advance: Step, before_update: Callable[[], object]) -> list[EngineOutput] | None:
        """``advance(before_update)``."""
        return advance(before_update)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Between steps: an error in the block is that of the next step."""
        yield

    def report(self, error: BaseException | None) -> None:
        """The function of a hold has raised this; None: nothing."""


class Restarts(NoRestarts):
    """An error restarts the workers, at most ``max_restarts`` times within `WINDOW_S`."""

    def __init__(
        self,
        core: EngineCore,
        output_processor: OutputProcessor,
        rebuild: Rebuild,
        max_restarts: int,
        restore: Callable[[], object] = lambda: None,
    ) -> None:
        self._core = core
        self._output_processor = output_processor
        self._rebuild = rebuild
        self._max_restarts = max_restarts
        self._restore = restore  # brings new workers to the state of the earlier ones
        self._times: deque[float] = deque()
        self._first: Exception | None = None  # the first cause, until all requests involved have progressed
        # tokens that the steps in flight can yield, and one more
        self._search = FaultSearch((1 + core.depth) * (1 + core.scheduler.config.num_drafts))

    def step(self, advance: Step, before_update: Callable[[], object]) -> list[EngineOutput] | None:
        """``advance(before_update)``. After an error: restart the workers. Returns the outputs of requests that this
        ends.

        Raises:
            Exception: the first cause, if the number of restarts is exceeded.
        """
        if self.error is None:
            if self._first is not None:
                self._update_search()
            try:
                return advance(before_update)
            except Exception as error:
                self.error = error
        return self._restart()

    @contextmanager
    def deferring(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = self.error or error

    def report(self, error: BaseException | None) -> None:
        """The next step restarts workers of which one has ended, also if no request runs."""
        if isinstance(error, WorkerError):
            self.error = self.error or error

    def _update_search(self) -> None:
        self._search.update()
        self._core.scheduler.admit_only(self._search.selected)
        if not self._search.is_active:
            self._first = None

    def _restart(self) -> list[EngineOutput]:
        error, self.error = self.error, None
        assert error is not None
        requests, involved = self._output_processor.resumed(), self._core.scheduler.involved
        culprit = self._search.fail([request for request in requests if request in involved])
        cause = f"{type(error).__name__}: {error}"
        self.watch(True)
        executor, connector, num_blocks = self._start_workers(error)
        others = [request for request in requests if request is not culprit]
        ended = self._core.restart(executor, connector, num_blocks, others)
        self._restore()
        self.watch(False)
        if culprit is not None and len(others) < len(requests):
            logger.error("request %r has made steps fail again, and ends: %s", culprit.request_id, cause)
            culprit.status = RequestStatus.FINISHED_ERROR
            ended.append((culprit, f"the request makes steps of the engine fail: {cause}"))
        self._search.set_goals()
        self._update_search()
        for request, reason in ended:
            request.stop_reason = reason
        return [EngineOutput.last(request) for request, _ in ended]

    def _start_workers(self, error: Exception) -> tuple[Executor, SchedulerConnector, int]:
        while True:
            self._first = self._first or error
            now = self._core.clock()
            while self._times and self._times[0] <= now - WINDOW_S:
                self._times.popleft()
            num_restarts = len(self._times)
            if num_restarts >= self._max_restarts:
                self._first.add_note(f"The workers were restarted {num_restarts} times before (max_restarts).")
                raise self._first
            self._times.append(now)
            message = "the engine has failed, and restarts its workers (%d of at most %d times within an hour)"
            logger.error(message, num_restarts + 1, self._max_restarts, exc_info=error)
            release_frames(error)  # they refer to the model
            self._core.end_workers()
            try:
                rebuilt = self._rebuild()
            except Exception as start_error:
                error = start_error
            else:
                self._core.stats.num_restarts += 1
                return rebuilt


class FaultSearch:
    """Finds a request that makes steps fail.

    After a failure, the requests involved are suspects until each has ``margin`` more tokens or has ended. If
    steps with suspects fail again before, one half of these is tried first, while other requests wait: what fails is
    halved again, and what progresses is cleared. A request that fails alone is the culprit.
    """

    def __init__(self, margin: int) -> None:
        self._margin = margin
        self._suspects: dict[Request, int] = {}  # with the number of output tokens that clears each
        self._trial: set[Request] = set()  # suspects that run; empty: all run

    @property
    def is_active(self) -> bool:
        """Whether there are suspects."""
        return bool(self._suspects)

    @property
    def selected(self) -> set[str] | None:
        """The ids of requests that may begin; None: all."""
        return {request.request_id for request in self._trial} or None

    def fail(self, involved: Sequence[Request]) -> Request | None:
        """Steps have failed. ``involved``: the requests in them. Returns the culprit, if it is known."""
        tried = self._trial or self._suspects.keys()
        again = [request for request in involved if request in tried]
        self._trial = set()
        if len(again) == 1:
            self._suspects = {}
            return again[0]
        self._suspects = dict.fromkeys(again or involved, 0)
        if again:
            self._try_half()
        return None

    def set_goals(self) -> None:
        """Suspects are cleared when they have so many tokens; call when the tokens that they keep are known."""
        for request in self._suspects:
            self._suspects[request] = request.num_output_tokens + self._margin

    def update(self) -> None:
        """Clear suspects that have progressed or ended. When a trial is over, begin the next one."""
        self._suspects = {
            request: goal
            for request, goal in self._suspects.items()
            if not request.is_finished and request.num_output_tokens < goal
        }
        if self._trial:
            self._trial &= self._suspects.keys()
            if not self._trial:
                self._try_half()

    def _try_half(self) -> None:
        suspects = list(self._suspects)
        self._trial = set(suspects[: -(-len(suspects) // 2)])


def release_frames(error: BaseException | None) -> None:
    """Drop the local variables that the tracebacks of an error and of its causes hold; their lines stay."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__

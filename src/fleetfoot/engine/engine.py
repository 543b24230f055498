"""The synchronous engine: requests in, outputs out, one `step` at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from fleetfoot.config.engine import EngineConfig
from fleetfoot.engine.admission import COPY_MARK, Admission, CheckedParams, CheckedRequest
from fleetfoot.engine.build import build_parts
from fleetfoot.engine.core import EngineCore
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.engine.output_processor import OutputProcessor
from fleetfoot.engine.stats import EngineStats, StatsCollector
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.records.outputs import RequestOutput
from fleetfoot.records.prompts import PromptType
from fleetfoot.records.request import RequestStatus
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.utils.process import run_all

if TYPE_CHECKING:
    from fleetfoot.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class LLMEngine:
    """Admission, core and output processing in one thread.

    Nothing is lost: each request that was added is answered by an output with ``finished`` set, or by the exception
    that ended the engine, which every later call repeats.
    """

    def __init__(
        self,
        core: EngineCore,
        admission: Admission,
        tokenizer: Tokenizer | None,
        *,
        plan: EnginePlan | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._plan = plan
        self.core = core
        self.admission = admission
        self.tokenizer = tokenizer
        self.stats_collector: StatsCollector = core.stats
        self._clock = clock
        self._outputs = OutputProcessor(
            tokenizer,
            lambda request_id, stop: core.finish(request_id, RequestStatus.FINISHED_STOPPED, stop),
            core.stats,
        )
        self._owed: list[RequestOutput] = []  # of requests that were aborted, for the next step to deliver
        self._cause: BaseException | None = None
        self._is_shut_down = False

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLMEngine:
        """Load the model and get ready to serve."""
        parts = build_parts(config)
        return cls(parts.core, parts.admission, parts.tokenizer, plan=parts.plan)

    @property
    def plan(self) -> EnginePlan:
        """What was decided about the engine before it was made: ``plan.use_v2_model_runner``, ``plan.reasons``, ...

        Raises:
            ValueError: the engine was put together from parts, without a plan.
        """
        if self._plan is None:
            raise ValueError("this engine was put together from parts: there is no plan of it")
        return self._plan

    @property
    def runner_name(self) -> str:
        """``v1`` or ``v2``: the model runner that really runs."""
        return self.core.executor.runner_name

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        *,
        priority: int = 0,
        checked: CheckedParams | None = None,
    ) -> None:
        """Queue a request; its outputs come from `step`.

        Args:
            checked: what `check_params` has made of ``params`` that several requests share; None: they are checked now.

        Raises:
            ValueError, TypeError: the request is refused, and nothing has changed.
            EngineDeadError: the engine has ended.
        """
        self._check_alive()
        self.check_id(request_id)
        self.add_checked(self.check_request(request_id, prompt, checked or params, priority=priority))

    def check_id(self, request_id: str) -> None:
        """Whether a request can have this id now.

        Raises:
            ValueError: it cannot; says why.
        """
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id is {request_id!r}; it must be a string that is not empty")
        if COPY_MARK in request_id:
            raise ValueError(
                f"request_id is {request_id!r}; it must not hold the character {COPY_MARK!r}, which the engine keeps "
                "for the ids of a request's copies (n above 1)"
            )
        if self.has_request(request_id):
            raise ValueError(f"request id {request_id!r} is in use by a request that has not ended")

    def check_params(self, params: SamplingParams) -> CheckedParams:
        """Check parameters that several requests share, for `add_request`.

        Raises:
            ValueError, TypeError: they are refused.
        """
        return self.admission.check_params(params)

    def check_request(
        self, request_id: str, prompt: PromptType, params: SamplingParams | CheckedParams, *, priority: int = 0
    ) -> CheckedRequest:
        """The long half of `add_request`, for any thread: all that can be checked and tokenized beside a step.

        Raises:
            ValueError, TypeError: the request is refused.
        """
        if priority and not self.core.scheduler.config.priority:
            raise ValueError(f"priority is {priority!r}, but scheduling_policy is 'fcfs'; it can be 'priority'")
        return self.admission.check(request_id, prompt, params, priority=priority)

    def add_checked(self, checked: CheckedRequest) -> None:
        """The short half of `add_request`, between steps; its id has just passed `check_id`.

        Raises:
            ValueError: there is no room for such a request; nothing has changed.
            EngineDeadError: the engine has ended.
        """
        self._check_alive()
        admitted = self.admission.enter(checked)
        added = []
        try:
            for sequence in admitted.sequences:
                self.core.add_request(sequence)
                added.append(sequence.request_id)
        except ValueError:
            for sequence_id in added:
                self.core.finish(sequence_id, RequestStatus.FINISHED_ABORTED)
            raise
        self._outputs.add(admitted, self._clock())
        self.stats_collector.request_added(len(admitted.prompt_token_ids))

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; ids that are not known, or have ended, are no error. The next `step` delivers their outputs."""
        if self._cause is not None:
            return  # nothing runs any more, and the books may be half written
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            sequence_ids, output = self._outputs.abort(request_id)
            for sequence_id in sequence_ids:
                self.core.finish(sequence_id, RequestStatus.FINISHED_ABORTED)
            if output is not None:
                self._owed.append(output)

    def discard(self, request_ids: Iterable[str]) -> None:
        """Abort requests without delivering their outputs. May be called within a step, as `step` says."""
        discarded = set(request_ids)
        try:
            self.abort_request(discarded)
            self._owed = [output for output in self._owed if output.request_id not in discarded]
        except BaseException as error:
            self._fail(error)
            raise

    def report_finished(self) -> None:
        """No step may follow for a while: take in the steps in flight that no request needs, and give the KV connector
        the ids of the last requests."""
        if self._cause is not None:
            return
        try:
            self.core.report_finished()
        except BaseException as error:
            self._fail(error)
            raise

    def take_owed(self) -> list[RequestOutput]:
        """The outputs of aborted requests now, instead of with the next step."""
        owed, self._owed = self._owed, []
        return owed

    def has_request(self, request_id: str) -> bool:
        """Whether the id is in use by a request that has not ended."""
        return self._outputs.has(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self._outputs.num_unfinished or self._owed or self.core.has_work)

    def has_transfers(self) -> bool:
        """Whether steps still serve the KV connector, maybe for requests that have ended: blocks being sent."""
        return self._cause is None and self.core.has_transfers

    def step(self, before_update: Callable[[], object] = lambda: None) -> list[RequestOutput]:
        """Run one step and return what it owes to users.

        Args:
            before_update: called when a step's result has arrived and has not been taken in. It may add, abort and
                discard requests: one that it aborts ends as aborted, even if the result holds its last token.

        Raises:
            EngineDeadError: the engine has ended, now or before; the first cause is chained.
        """
        self._check_alive()
        owed = self.take_owed()
        try:
            taken = self.core.step(before_update)
            if taken is None:
                return owed
            results, output = taken
            outputs = self._outputs.process(results, output, self._clock())
            self.core.settle()
        except BaseException as error:  # Ctrl-C too: a step that was cut short leaves the books half written
            self._fail(error)
            raise
        return owed + outputs

    def get_default_sampling_params(self) -> SamplingParams:
        """For a request without parameters: the defaults, with the model's own in their place where it has any."""
        return SamplingParams(**self.admission.sampling_defaults)

    def stats(self) -> EngineStats:
        return self.stats_collector.snapshot(self.core.scheduler.stats())

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        """Forget cached prefixes; with ``reset_connector`` what a KV connector has saved is not loaded any more."""
        self.core.scheduler.reset_prefix_cache(reset_connector=reset_connector)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all requests that have ever been added."""
        return self.stats_collector.num_prompt_tokens

    @property
    def max_request_len(self) -> int:
        """Most tokens of prompt and output of one request: limited by ``max_model_len`` and by the KV cache."""
        cache = self.core.scheduler.config
        return min(self.admission.max_model_len, cache.num_blocks * cache.block_size)

    def may_begin(self, num_waiting: int) -> bool:
        """Whether prompts of so many tokens fill a step that is the same whatever is queued behind them."""
        scheduling = self.core.scheduler.config
        return num_waiting >= scheduling.max_num_batched_tokens and not scheduling.priority

    def check_integrity(self) -> None:
        """Raise RuntimeError if KV blocks, rows or queues do not add up."""
        self.core.scheduler.check_integrity()

    def shutdown(self) -> None:
        """Give everything back. Calling it again does nothing.

        What a KV connector has yet to save of requests that have ended is saved before. An error in that is raised at
        the end, when all has been given back.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        flush = self.core.flush if self._cause is None else lambda: None  # else the books may be half written
        run_all(flush, self.core.shutdown)

    def _fail(self, error: BaseException) -> None:
        """Remember the first cause, and raise it as an EngineDeadError, unless it is no error (as Ctrl-C is none)."""
        self._cause = error
        logger.error("the engine has failed with %d requests under way: %r", self._outputs.num_unfinished, error)
        if isinstance(error, Exception):
            raise _dead(error) from error

    def _check_alive(self) -> None:
        if self._cause is not None:
            raise _dead(self._cause) from self._cause
        if self._is_shut_down:
            raise EngineDeadError("the engine was shut down")


def _dead(cause: BaseException) -> EngineDeadError:
    message = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
    return EngineDeadError(f"the engine has failed: {message}")

"""The synchronous engine: add requests, call `step`, get outputs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from fleetfoot.config.engine import EngineConfig
from fleetfoot.engine.build import build_parts
from fleetfoot.engine.core import EngineCore
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.engine.input_processor import COPY_MARK, EngineRequest, InputProcessor
from fleetfoot.engine.output_processor import OutputProcessor
from fleetfoot.engine.stats import EngineStats, StatsCollector
from fleetfoot.inputs import PromptType
from fleetfoot.outputs import RequestOutput
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.records.request import RequestStatus
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.utils.process import run_all

if TYPE_CHECKING:
    from fleetfoot.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class LLMEngine:
    """Input processing, `EngineCore` and output processing in one thread.

    Each added request ends with an output that has ``finished`` set, or with the exception that ended the engine, which
    every later call raises again.
    """

    def __init__(
        self,
        core: EngineCore,
        input_processor: InputProcessor,
        tokenizer: Tokenizer | None,
        *,
        plan: EnginePlan | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._plan = plan
        self.core = core
        self.input_processor = input_processor
        self.tokenizer = tokenizer
        self.stats_collector: StatsCollector = core.stats
        self._clock = clock
        self._output_processor = OutputProcessor(
            tokenizer,
            lambda request_id, stop: core.finish(request_id, RequestStatus.FINISHED_STOPPED, stop),
            core.stats,
        )
        self._aborted: list[RequestOutput] = []  # last outputs of aborted requests, returned by the next step
        self._cause: BaseException | None = None
        self._is_shut_down = False

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLMEngine:
        """Plan the engine, load the model, and allocate memory.

        Raises:
            ValueError: settings, model and machine do not fit together.
        """
        parts = build_parts(config)
        return cls(parts.core, parts.input_processor, parts.tokenizer, plan=parts.plan)

    @property
    def plan(self) -> EnginePlan:
        """Decisions about this engine: ``plan.use_v2_model_runner``, ``plan.reasons``, ...

        Raises:
            ValueError: the engine was built from parts, without a plan.
        """
        if self._plan is None:
            raise ValueError("this engine was put together from parts: there is no plan of it")
        return self._plan

    @property
    def runner_name(self) -> str:
        """The model runner in use: ``v1`` or ``v2``."""
        return self.core.executor.runner_name

    # --- requests -----------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        *,
        priority: int = 0,
        params_checked: bool = False,
    ) -> None:
        """Add a request; `step` returns its outputs.

        Args:
            priority: lower runs sooner; needs ``scheduling_policy="priority"``.
            params_checked: ``params`` is a result of `InputProcessor.check_params`.

        Raises:
            ValueError, TypeError: the request is refused; the engine is unchanged.
            EngineDeadError: the engine has failed or was shut down.
        """
        self._check_alive()
        self.check_request_id(request_id)
        self.submit(self.process_inputs(request_id, prompt, params, priority=priority, params_checked=params_checked))

    def check_request_id(self, request_id: str) -> None:
        """Check that a new request can have this id.

        Raises:
            ValueError: it cannot; the message has the reason.
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

    def process_inputs(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        *,
        priority: int = 0,
        params_checked: bool = False,
    ) -> EngineRequest:
        """First part of `add_request`: validate and tokenize. May run in any thread, concurrently with a step.

        Raises:
            ValueError, TypeError: the request is refused.
        """
        if priority and not self.core.scheduler.config.priority:
            raise ValueError(f"priority is {priority!r}, but scheduling_policy is 'fcfs'; it can be 'priority'")
        return self.input_processor.process(
            request_id, prompt, params, priority=priority, params_checked=params_checked
        )

    def submit(self, request: EngineRequest) -> None:
        """Second part of `add_request`: queue. Its id must have passed `check_request_id`.

        Raises:
            ValueError: the request can never be scheduled; the engine is unchanged.
            EngineDeadError: the engine has failed or was shut down.
        """
        self._check_alive()
        sequences = self.input_processor.make_requests(request)
        added = []
        try:
            for sequence in sequences:
                self.core.add_request(sequence)
                added.append(sequence.request_id)
        except ValueError:
            for sequence_id in added:
                self.core.finish(sequence_id, RequestStatus.FINISHED_ABORTED)
            raise
        self._output_processor.add(request, sequences, self._clock())
        self.stats_collector.request_added(len(request.prompt_token_ids))

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; the next `step` returns their outputs. Unknown and finished ids are ignored."""
        if self._cause is not None:
            return  # the state of a failed engine may be inconsistent
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            sequence_ids, output = self._output_processor.abort(request_id)
            for sequence_id in sequence_ids:
                self.core.finish(sequence_id, RequestStatus.FINISHED_ABORTED)
            if output is not None:
                self._aborted.append(output)

    def discard(self, request_ids: Iterable[str]) -> None:
        """Abort requests and drop their outputs. May be called during a step, see ``before_update`` of `step`."""
        discarded = set(request_ids)
        try:
            self.abort_request(discarded)
            self._aborted = [output for output in self._aborted if output.request_id not in discarded]
        except BaseException as error:
            self._fail(error)
            raise

    def pop_aborted(self) -> list[RequestOutput]:
        """The last outputs of aborted requests, which the next `step` would return."""
        aborted, self._aborted = self._aborted, []
        return aborted

    def has_request(self, request_id: str) -> bool:
        """Whether an unfinished request has this id."""
        return self._output_processor.has(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` must be called again."""
        return bool(self._output_processor.num_unfinished or self._aborted or self.core.has_work)

    def has_transfers(self) -> bool:
        """Whether the KV connector needs further steps, possibly for finished requests."""
        return self._cause is None and self.core.has_transfers

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self, before_update: Callable[[], object] = lambda: None) -> list[RequestOutput]:
        """Run one step.

        Args:
            before_update: called when a step's result has arrived, before the engine is updated with it. It may add,
            abort
                and discard requests. A request that it aborts ends as aborted, even if the result has its last token.

        Returns:
            Outputs of requests with progress, and of aborted requests.

        Raises:
            EngineDeadError: the engine has failed, now or before, or was shut down; the first cause is chained.
        """
        self._check_alive()
        aborted = self.pop_aborted()
        try:
            engine_outputs = self.core.step(before_update)
            if engine_outputs is None:
                return aborted
            outputs = self._output_processor.process(engine_outputs, self._clock())
            self.core.drain()
        except BaseException as error:  # also KeyboardInterrupt: an interrupted step leaves inconsistent state
            self._fail(error)
            raise
        return aborted + outputs

    def fills_first_step(self, num_prompt_tokens: int) -> bool:
        """Whether prompts of so many tokens fill a step that later requests cannot change."""
        scheduling = self.core.scheduler.config
        return num_prompt_tokens >= scheduling.max_num_batched_tokens and not scheduling.priority

    def report_finished(self) -> None:
        """Call when no step may follow soon: retires steps in flight that no request needs, and sends the last finished
        ids to the KV connector."""
        if self._cause is not None:
            return
        try:
            self.core.report_finished()
        except BaseException as error:
            self._fail(error)
            raise

    # --- state --------------------------------------------------------------------------------------------------------

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters of a request without any: the defaults of `SamplingParams`, overridden by those of the model."""
        return SamplingParams(**self.input_processor.sampling_defaults)

    @property
    def max_request_len(self) -> int:
        """Most tokens of prompt and output of one request: limited by ``max_model_len`` and by the KV cache."""
        cache = self.core.scheduler.config
        return min(self.input_processor.max_model_len, cache.num_blocks * cache.block_size)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all requests since the start."""
        return self.stats_collector.num_prompt_tokens

    def stats(self) -> EngineStats:
        """Counters since the start, and the scheduler's state."""
        return self.stats_collector.snapshot(self.core.scheduler.stats())

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        """Forget cached prefixes; with ``reset_connector`` also KV that a KV connector has saved."""
        self.core.scheduler.reset_prefix_cache(reset_connector=reset_connector)

    def check_integrity(self) -> None:
        """Raises RuntimeError if KV blocks, rows or queues are inconsistent."""
        self.core.scheduler.check_integrity()

    def shutdown(self) -> None:
        """Release all resources. Further calls do nothing.

        Pending saves of a KV connector are flushed first. An error in that is raised after everything has been
        released.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        flush = self.core.flush if self._cause is None else lambda: None  # a failed engine's state may be inconsistent
        run_all(flush, self.core.shutdown)

    def _fail(self, error: BaseException) -> None:
        """Store the cause, and raise it as EngineDeadError. A KeyboardInterrupt is left to the caller."""
        self._cause = error
        logger.error(
            "the engine has failed with %d unfinished requests: %r", self._output_processor.num_unfinished, error
        )
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

"""The synchronous engine: add requests, call `step`, get outputs."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fleetfoot.compat.names import check_call_keywords
from fleetfoot.config.engine import EngineConfig
from fleetfoot.engine.building import (
    build_core,
    build_input_processor,
    check_weights,
    load_tokenizer,
    make_mask_memory,
    start_again,
)
from fleetfoot.engine.calls import EngineCalls
from fleetfoot.engine.core import EngineCore, no_callback
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.engine.hold import HoldCalls, HoldQueue
from fleetfoot.engine.input_processor import COPY_MARK, EngineRequest, InputProcessor
from fleetfoot.engine.live_weights import LiveWeights, update_settings
from fleetfoot.engine.metrics import Metric, engine_metrics
from fleetfoot.engine.output_processor import OutputProcessor
from fleetfoot.engine.restart import NoRestarts, Rebuild, Restarts, release_frames
from fleetfoot.engine.sleep import Suspension
from fleetfoot.engine.stats import EngineStats, StatsCollector
from fleetfoot.engine.step_trace import EngineProfiler
from fleetfoot.engine.watch import Watch, plan_facts
from fleetfoot.executor.build import find_machine, start_executor
from fleetfoot.inputs import PromptType
from fleetfoot.outputs import RequestOutput
from fleetfoot.plan.forced_runner import forced_runners
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.plan.resolve import resolve_plan
from fleetfoot.records.request import RequestStatus
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import EngineOutput
from fleetfoot.sampling.request_params import read_sampling_defaults
from fleetfoot.utils.process import EXIT_GUARD, run_all
from fleetfoot.utils.validation import FieldError

if TYPE_CHECKING:
    from fleetfoot.engine.arg_utils import EngineArgs
    from fleetfoot.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class LLMEngine(HoldCalls, EngineCalls):
    """Input processing, `EngineCore` and output processing in one thread.

    Each added request ends with an output that has ``finished`` set, or with the exception that ended the engine, which
    every later call raises again.

    Args:
        rebuild: starts new workers after an error, at most ``max_restarts`` times within an hour; None: an error ends
            the engine.
        output_processor: makes what `step` returns of the results; called as the class `OutputProcessor`.
    """

    def __init__(
        self,
        core: EngineCore,
        input_processor: InputProcessor,
        tokenizer: Tokenizer | None,
        *,
        plan: EnginePlan | None = None,
        clock: Callable[[], float] = time.perf_counter,
        rebuild: Rebuild | None = None,
        max_restarts: int = 0,
        output_processor: Callable[..., Any] = OutputProcessor,
    ) -> None:
        self._plan = plan
        self.core = core
        self.input_processor = input_processor
        self.tokenizer = tokenizer
        self.stats_collector: StatsCollector = core.stats
        self._clock = clock
        self.output_processor = output_processor(tokenizer, self._finish, core.stats)
        self._live = None if plan is None else LiveWeights(core, plan, self._change_weights, self._failing)
        self._restarts = NoRestarts()
        if rebuild is not None:
            restore = no_callback if self._live is None else self._live.restore
            self._restarts = Restarts(core, self.output_processor, rebuild, max_restarts, restore)
        self._aborted: list[RequestOutput] = []  # last outputs of aborted requests, returned by the next step
        self.watching = Watch(self, lambda: plan_facts(self.plan, self.runner_name))
        self.profiler = EngineProfiler(self)
        self._holds = HoldQueue(core, lambda: self.abort_request(self.output_processor.request_ids))
        can_sleep = plan is not None and plan.config.enable_sleep_mode
        self.suspension = Suspension(core, self._holds, self._live, can_sleep=can_sleep)
        self._cause: BaseException | None = None
        self._is_shut_down = False
        self._stepping = threading.Lock()
        self.step_context: Callable[[], AbstractContextManager[object]] = nullcontext
        """Around each step; of a command, what defers Ctrl-C."""
        self._pid = os.getpid()
        EXIT_GUARD.add_engine(self)

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLMEngine:
        """Plan the engine, load the model, and allocate memory.

        Raises:
            ValueError: settings, model and machine do not fit together, or no runner supports a feature.
        """
        return build_engine(config)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage_context: object = None, **unknown: Any) -> LLMEngine:
        """The same, from `EngineArgs`. ``usage_context`` has no effect."""
        check_call_keywords("LLMEngine.from_engine_args", cls.from_engine_args, unknown)
        return build_engine(engine_args.create_engine_config())

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
        self, request_id: str, prompt: PromptType, params: SamplingParams, *, priority: int = 0, **unknown: Any
    ) -> None:
        """Add a request; `step` returns its outputs.

        Args:
            priority: lower runs sooner; needs ``scheduling_policy="priority"``.
            unknown: refused, except neutral values of vLLM's keywords (``lora_request=None``).

        Raises:
            ValueError, TypeError: the request is refused; the engine is unchanged.
            EngineDeadError: the engine has failed or was shut down.
        """
        check_call_keywords("LLMEngine.add_request", self.add_request, unknown)
        self._check_alive()
        self.check_request_id(request_id)
        self.submit(self.process_inputs(request_id, prompt, params, priority=priority))

    def check_request_id(self, request_id: str) -> None:
        """Check that a new request can have this id.

        Raises:
            ValueError: it cannot; the message has the reason.
        """
        if not isinstance(request_id, str) or not request_id:
            raise FieldError("request_id", f"is {request_id!r}; it must be a string that is not empty", request_id)
        if COPY_MARK in request_id:
            raise FieldError(
                "request_id",
                f"is {request_id!r}; it must not hold the character {COPY_MARK!r}, which the engine keeps "
                "for the ids of a request's copies (n above 1)",
                request_id,
            )
        if self.has_request(request_id):
            raise FieldError("request_id", f"is {request_id!r}, which a request has that has not ended", request_id)

    @EXIT_GUARD
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
            raise FieldError(
                "priority", f"is {priority!r}, but scheduling_policy is 'fcfs'; it can be 'priority'", priority
            )
        process = self.input_processor.process
        return process(request_id, prompt, params, priority=priority, params_checked=params_checked)

    @EXIT_GUARD
    def submit(self, request: EngineRequest) -> None:
        """Second part of `add_request`: queue. Its id must have passed `check_request_id`.

        Raises:
            ValueError: the request can never be scheduled; the engine is unchanged.
            EngineDeadError: the engine has failed or was shut down.
        """
        self._check_alive()
        sequences, now = self.input_processor.make_requests(request), self._clock()
        for index, sequence in enumerate(sequences):
            sequence.queued_ts = now
            try:
                self.core.scheduler.add_request(sequence)
            except ValueError:
                for added in sequences[:index]:
                    self.core.scheduler.finish(added.request_id, RequestStatus.FINISHED_ABORTED)
                raise
        self.output_processor.add(request, {one.sequence_number: one for one in sequences}, now)
        self.stats_collector.num_prompt_tokens += len(request.prompt_token_ids)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; the next `step` returns their outputs. Unknown and finished ids are ignored.

        KV of a finished request that is held for another engine, and not being read, is released."""
        if self._cause is not None or self._is_shut_down:
            return  # the state of a failed engine may be inconsistent
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            if (output := self.output_processor.abort(request_id)) is not None:
                self._aborted.append(output)
            else:
                with self._restarts.deferring():
                    self.core.scheduler.transfers.evict(request_id)

    def _finish(self, sequence: Any, status: RequestStatus, stop_reason: int | str | None = None) -> None:
        """End a sequence of the output processor."""
        request_id = sequence.request.request_id
        with self._restarts.deferring():
            ended = self.core.scheduler.finish(request_id, status, stop_reason)
            if ended is None and status is RequestStatus.FINISHED_ABORTED:  # it had ended before, in this step
                self.core.scheduler.transfers.evict(request_id)

    def discard(self, request_ids: Iterable[str]) -> None:
        """Abort requests and drop their outputs. May be called during a step, see ``before_update`` of `step`."""
        discarded = set(request_ids)
        with self._failing():
            self.abort_request(discarded)
            self._aborted = [output for output in self._aborted if output.request_id not in discarded]

    def abort_all(self) -> list[RequestOutput]:
        """End all requests; returns their last outputs."""
        self.abort_request(self.output_processor.request_ids)
        return self.pop_aborted()

    def pop_aborted(self) -> list[RequestOutput]:
        """The last outputs of aborted requests, which the next `step` would return."""
        aborted, self._aborted = self._aborted, []
        return aborted

    def has_request(self, request_id: str) -> bool:
        """Whether an unfinished request has this id."""
        return self.output_processor.has(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` must be called again."""
        return bool(self.output_processor.num_unfinished or self._aborted or self._holds or self.core.has_work)

    @property
    def can_step(self) -> bool:
        """Whether `step` has an effect: a paused engine runs holds, and returns the outputs of aborted requests."""
        return bool(self._aborted or self._holds or (not self.is_paused and self.has_unfinished_requests()))

    def has_transfers(self) -> bool:
        """Whether the KV connector needs further steps, possibly for finished requests."""
        return self._cause is None and not self.is_paused and self.core.scheduler.has_idle_work

    # --- steps --------------------------------------------------------------------------------------------------------

    @EXIT_GUARD
    def step(self, before_update: Callable[[], object] = no_callback) -> list[RequestOutput]:
        """Run one step.

        Args:
            before_update: called when a step's result has arrived, before the engine is updated with it, and again
                before outputs are made of the result. It may add, abort and discard requests. A request that it aborts
                ends as aborted, even if the result has its last token.

        Returns:
            Outputs of requests with progress, and of aborted requests.

        Raises:
            EngineDeadError: the engine has failed, now or before, or was shut down; the first cause is chained.
            RuntimeError: a step is running, in another thread or interrupted by the caller; it is not affected.
        """
        self._check_alive()
        if self._stepping.locked():
            raise RuntimeError("step was called during a step; call it from one thread, and not from signal handlers")
        with self._stepping, self.step_context(), self._failing():
            outputs = self.pop_aborted()
            engine_outputs = self._restarts.step(self._advance, before_update)
            if engine_outputs is not None:
                if any(output.end is not None for output in engine_outputs):
                    before_update()  # an abort that has come during the update wins over the last token
                outputs += self.output_processor.process(engine_outputs, self._clock())
                with self._restarts.deferring():
                    self.core.drain()
            self._restarts.report(self._holds.run_if_reached())
        return outputs

    def _advance(self, before_update: Callable[[], object]) -> list[EngineOutput] | None:
        """A step of the core; with holds, a step towards the first of them."""
        if not (self._holds or self._holds.is_paused):
            return self.core.step(before_update)
        return self._holds.step(before_update) if self._holds else None

    def watch_restarts(self, watch: Callable[[bool], object]) -> None:
        """Call ``watch(True)`` when a restart of the workers begins, and ``watch(False)`` when it has ended."""
        self._restarts.watch = watch

    def fills_first_step(self, num_prompt_tokens: int) -> bool:
        """Whether prompts of so many tokens fill a step that later requests cannot change."""
        scheduling = self.core.scheduler.config
        return num_prompt_tokens >= scheduling.max_num_batched_tokens and not scheduling.priority

    @EXIT_GUARD
    def report_finished(self) -> None:
        """When no step may follow soon: retire steps that no request needs, and report ended ones to a connector."""
        if self._cause is None and not self._is_shut_down and not self.is_paused:
            with self._failing(), self._restarts.deferring():
                self.core.report_finished()

    # --- weights ------------------------------------------------------------------------------------------------------

    @property
    def live(self) -> LiveWeights:
        """The weights in use. Raises ValueError as `plan`."""
        _ = self.plan
        assert self._live is not None
        return self._live

    @property
    def weight_version(self) -> int:
        """The version of the weights in use; 0: those of the start."""
        return self.live.version

    def update_settings(self, settings: Mapping[str, Any]) -> None:
        """See `EngineCalls.update_config`; in the function of a hold."""
        update_settings(settings, self.live, self.plan, self.core, self.input_processor)

    def _held(self, function: Callable[[Any], Any], mode: str) -> Any:
        return self.run_held(lambda: function(self), mode)

    def _change_weights(self, version: int, identity: str, *, is_shared: bool) -> None:
        self.core.scheduler.change_weights(identity, is_shared=is_shared)
        self.output_processor.change_weights(version)

    # --- state --------------------------------------------------------------------------------------------------------

    def is_sleeping(self) -> bool:
        """Whether weights or KV are asleep."""
        return self.suspension.is_sleeping

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters of a request without any: the defaults of `SamplingParams`, overridden by those of the model."""
        return SamplingParams(**self.input_processor.sampling_defaults)

    @property
    def max_request_len(self) -> int:
        """Most tokens of prompt and output of one request: limited by ``max_model_len`` and by the KV cache."""
        cache = self.core.scheduler.config
        return min(self.input_processor.max_model_len, cache.most_tokens)

    def stats(self) -> EngineStats:
        """Counters since the start, and the scheduler's state."""
        return self.stats_collector.snapshot(self.core.scheduler.stats())

    def get_metrics(self) -> list[Metric]:
        """The statistics as vLLM's metrics: counters, gauges and histograms."""
        return engine_metrics(self.stats_collector, self.core.scheduler.stats(), self.plan.config.model)

    @property
    def model_config(self) -> SimpleNamespace:
        """``model``, ``tokenizer``, ``dtype``, ``max_model_len`` and ``vocab_size``, for scripts that read them."""
        config, served = self.plan.config, self.input_processor
        names = {"model": config.model, "tokenizer": config.tokenizer or config.model, "dtype": self.plan.dtype}
        return SimpleNamespace(**names, max_model_len=served.max_model_len, vocab_size=served.vocab_size)

    def check_integrity(self) -> None:
        """Raises RuntimeError if KV blocks, rows or queues are inconsistent."""
        if self._restarts.error is None:  # else the next step begins with empty ones
            self.core.scheduler.check_integrity()

    @EXIT_GUARD
    def shutdown(self) -> None:
        """Flush pending saves of a KV connector, and release all resources even if that fails. Further calls do
        nothing, and neither do calls in a forked process."""
        if self._is_shut_down or self.is_foreign:
            return
        self._is_shut_down = True
        self._holds.fail_all(EngineDeadError("the engine was shut down"))
        has_failed = self._cause is not None or self._restarts.error is not None
        flush = no_callback if has_failed else self.core.flush  # a failed engine's state may be inconsistent
        forget = no_callback if self._live is None else self._live.close
        run_all(flush, self.core.shutdown, self.input_processor.grammars.close, forget)
        release_frames(self._cause)  # they refer to the model

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """An exception in the block is the cause of the engine's end, and is raised as EngineDeadError.

        So is a KeyboardInterrupt or SystemExit, because an interrupted step leaves inconsistent state, but that is
        raised as it is, and in the main thread logged as no error.
        """
        try:
            yield
        except BaseException as error:
            self._cause = self._cause or error
            num_unfinished = self.output_processor.num_unfinished
            is_interrupt = not isinstance(error, Exception) and threading.current_thread() is threading.main_thread()
            level = logging.INFO if is_interrupt else logging.ERROR
            logger.log(level, "the engine has failed with %d unfinished requests: %r", num_unfinished, error)
            self._holds.fail_all(_dead(self._cause))
            if isinstance(error, Exception):
                raise _dead(self._cause) from self._cause
            raise

    @property
    def is_dead(self) -> bool:
        """Whether the engine has failed or was shut down."""
        return self._cause is not None or self._is_shut_down

    @property
    def is_foreign(self) -> bool:
        """Whether this process was forked from the engine's."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raises EngineDeadError if `is_foreign`."""
        if self.is_foreign:
            raise EngineDeadError(f"process {os.getpid()} was forked from that of the engine, {self._pid}; {_SPAWN}")

    def _check_alive(self) -> None:
        self.check_process()
        if self._cause is not None:
            raise _dead(self._cause) from self._cause
        if self._is_shut_down:
            raise EngineDeadError("the engine was shut down")


def drain_deadline(drain: bool | float) -> float:
    """Until when to drain, in seconds of `time.monotonic`. Raises ValueError: it is not a time."""
    if drain is True:
        return math.inf
    if not isinstance(drain, int | float) or not drain >= 0:
        raise FieldError("drain", f"is {drain!r}; it must be True, False or a number of seconds", drain)
    return time.monotonic() + drain


_SPAWN = "start processes with multiprocessing.get_context('spawn'), and make each engine in the process that uses it"


def _dead(cause: BaseException) -> EngineDeadError:
    message = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
    return EngineDeadError(f"the engine has failed: {message}")


@EXIT_GUARD
def build_engine(config: EngineConfig, *, output_processor: Callable[..., Any] = OutputProcessor) -> LLMEngine:
    """See `LLMEngine.from_config`. The tokenizer is loaded for the default ``output_processor`` alone."""
    if EXIT_GUARD.is_forked:
        raise RuntimeError(f"process {os.getpid()} was forked from one in which an engine had started; {_SPAWN}")
    if config.num_replicas > 1:
        raise FieldError(
            "data_parallel_size",
            f"is {config.data_parallel_size}, and this is one engine: fleetfoot serve runs several, with one port; "
            "enable_expert_parallel makes them ranks of one engine",
            config.data_parallel_size,
        )
    plan, forced = resolve_plan(config, find_machine(config)), next(forced_runners(), None)
    plan.decision.check()
    for warning in plan.warnings:
        logger.warning(warning)
    for reason in plan.reasons:
        if reason not in plan.warnings:
            logger.info(reason)
    defaults = read_sampling_defaults(config.generation_config, config.override_generation_config, plan.model_path)
    if defaults:
        logger.info("sampling defaults that come with the model or the settings: %s", defaults)
    tokenizer = load_tokenizer(plan) if output_processor is OutputProcessor else None
    masks = make_mask_memory(plan)
    (plan.weights.note if plan.connector is None else plan.weights.start)()
    executor = start_executor(plan, masks)
    try:
        check_weights(plan, executor)
        core = build_core(plan, executor, masks)
        input_processor = build_input_processor(plan, core, tokenizer, defaults)
        if forced is not None:
            forced.check_runner(executor.runner_name, plan)
    except BaseException:
        executor.shutdown()
        raise
    rebuild = partial(start_again, plan, masks) if config.on_error == "restart" else None
    return LLMEngine(
        core,
        input_processor,
        tokenizer,
        plan=plan,
        rebuild=rebuild,
        max_restarts=plan.max_restarts,
        output_processor=output_processor,
    )

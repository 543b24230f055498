"""`AsyncLLM`: the engine for asyncio. It steps in a thread of its own; requests are async generators."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Self

from fleetfoot.compat.names import check_call_keywords
from fleetfoot.config.engine import EngineConfig
from fleetfoot.engine.calls import EngineCalls
from fleetfoot.engine.engine import LLMEngine, drain_deadline
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.engine.hold import Hold
from fleetfoot.engine.input_processor import EngineRequest, is_long_text, needs_grammar
from fleetfoot.engine.output_processor import merge_outputs
from fleetfoot.engine.pooling import AsyncPoolingCalls
from fleetfoot.engine.sleep import Suspension
from fleetfoot.engine.stats import EngineStats
from fleetfoot.inputs import PromptType
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.utils.process import EXIT_GUARD, EXIT_S, SHORT_COLLECTIONS
from fleetfoot.utils.progress import loading_bar
from fleetfoot.utils.validation import FieldTypeError

if TYPE_CHECKING:
    from fleetfoot.engine.arg_utils import EngineArgs
    from fleetfoot.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_Item = RequestOutput | BaseException | Hold


class _ResultQueue:
    """Results from the engine's thread to a coroutine: outputs or an exception; None: a command without one is done."""

    __slots__ = ("loop", "queue")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, item: _Item | None) -> None:
        """May be called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the coroutine
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


@dataclass(slots=True, eq=False)
class _Command:
    """Work for the engine's thread, run in the order of submission."""

    run: Callable[[], None] | None
    """None: set later; the command keeps its place in the order."""
    results: _ResultQueue | None
    """Gets an error if the engine ends before the command has run."""


class AsyncLLM(AsyncPoolingCalls, EngineCalls):
    """Runs many requests concurrently, each an async generator of partial outputs.

    Every generator ends with a finished output, or with the exception that ended its request or the engine. Use it as
    an async context manager, or call `shutdown`.

    Args:
        model: as for `fleetfoot.LLM`.
        keywords: the fields of `EngineConfig`.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **keywords: Any) -> None:
        if model is not None:
            keywords["model"] = model
        with loading_bar():
            config = EngineConfig.from_keywords(keywords, owner="AsyncLLM")
            engine = LLMEngine.from_config(config)
        self._start(engine)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage_context: object = None, **unknown: Any) -> Self:
        """An engine with the settings of `EngineArgs`. ``usage_context`` has no effect. Raises as the class."""
        check_call_keywords("AsyncLLM.from_engine_args", cls.from_engine_args, unknown)
        return cls(**vars(engine_args))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> AsyncLLM:
        """Wrap an existing engine, which must not be used directly afterwards."""
        self = cls.__new__(cls)
        self._start(engine)
        return self

    def _start(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._result_queues: dict[str, _ResultQueue] = {}  # used by the engine's thread only
        self._commands: deque[_Command] = deque()
        self._pooling_numbers = count()
        self._wake = threading.Condition()
        self._stopping = False
        self._is_draining, self._drain_until = False, math.inf  # set by `shutdown`
        self._cause: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fleetfoot-engine", daemon=True)
        self._is_exiting = False
        EXIT_GUARD.add_thread(self)
        self._thread.start()

    # --- public methods -----------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        **unknown: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they are generated; the last one has ``finished`` set.

        The prompt is validated and tokenized by the caller, concurrently with the engine's steps; a long text in a
        thread of the event loop. Requests are added in the order in which their generators are first awaited. Leaving
        the generator early, by ``break`` or by cancellation, aborts the request.

        Args:
            prompt: text, a dictionary, or token ids, as for `fleetfoot.LLM.generate`.
            request_id: unique among unfinished requests.
            priority: lower runs sooner; needs ``scheduling_policy="priority"``.
            unknown: refused, except neutral values of vLLM's keywords (``lora_request=None``).

        Raises:
            ValueError, TypeError: the request is refused.
            EngineDeadError: the engine has failed or was shut down; the first cause is chained.
        """
        check_call_keywords("AsyncLLM.generate", self.generate, unknown)
        results, kind = _ResultQueue(), getattr(sampling_params, "output_kind", None)
        if needs_grammar(sampling_params):  # compiled before the request is queued: others do not wait for it
            await asyncio.to_thread(self._engine.input_processor.compile_grammar, sampling_params)
        self._submit_request(results, request_id, prompt, sampling_params, priority)
        finished = False
        try:
            while not finished:
                item = await results.queue.get()
                while not results.queue.empty():  # a slow reader gets several outputs merged into one
                    item = merge_outputs(item, results.queue.get_nowait(), kind)
                finished = isinstance(item, BaseException) or item.finished
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            if not finished:
                self._submit_if_alive(partial(self._discard, request_id, results))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: the last output of their generators has finish reason "abort". Unknown ids are ignored."""
        is_one = isinstance(request_id, str) or not isinstance(request_id, Iterable)
        request_ids: list[Any] = [request_id] if is_one else list(request_id)
        if not all(isinstance(entry, str) for entry in request_ids):
            raise FieldTypeError("request_id", f"is {request_id!r}; it must be a string, or hold strings", request_id)
        self._submit_if_alive(partial(self._abort, request_ids))

    async def run_held(self, function: Callable[[LLMEngine], Any], mode: str = "drain") -> Any:
        """Call ``function(engine)`` in the engine's thread between steps, when no step is in flight; see
        `LLMEngine.hold`. Other calls go on meanwhile; cancellation before the function runs cancels it.

        Returns or raises what the function does. Raises EngineDeadError as `generate`.
        """
        results = _ResultQueue()
        hold = Hold(lambda: function(self._engine), mode, results.put)
        self._submit(partial(self._engine.add_hold, hold), results)
        item = None
        try:
            item = await results.queue.get()
        finally:
            if item is None:
                self._submit_if_alive(partial(self._engine.cancel_hold, hold))
        if item is not hold:
            raise item
        return hold.result()

    async def is_sleeping(self) -> bool:
        """See `LLMEngine.is_sleeping`."""
        return self._engine.is_sleeping()

    async def is_paused(self) -> bool:
        """Whether generation is paused, or the engine sleeps."""
        return self._engine.is_paused

    @property
    def suspension(self) -> Suspension:
        """See `EngineCalls`."""
        return self._engine.suspension

    def _held(self, function: Callable[[LLMEngine], Any], mode: str) -> Any:
        return self.run_held(function, mode)

    @property
    def is_running(self) -> bool:
        """Whether the engine accepts requests."""
        return self._takes_commands and not self._is_draining

    @property
    def _takes_commands(self) -> bool:
        return self._cause is None and not self._stopping and not self._engine.is_foreign

    @property
    def runner_name(self) -> str:
        """The model runner in use: ``v1`` or ``v2``."""
        return self._engine.runner_name

    def get_tokenizer(self) -> Tokenizer | None:
        """None if the engine runs on token ids only."""
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """As of `fleetfoot.LLM`: the defaults, overridden by those of the model, as a new object."""
        return self._engine.get_default_sampling_params()

    def stats(self) -> EngineStats:
        """Counters since the start, and the scheduler's state."""
        return self._engine.stats()

    async def check_integrity(self) -> None:
        """Raises RuntimeError if KV blocks, rows or queues are inconsistent; EngineDeadError as `generate`."""
        results = _ResultQueue()

        def check() -> None:
            try:
                self._engine.check_integrity()
            except RuntimeError as error:
                results.put(error)
            else:
                results.put(None)

        self._submit(check, results)
        if (error := await results.queue.get()) is not None:
            raise error

    def shutdown(self, drain: bool | float = False) -> None:
        """End the engine and its thread. Blocks until then; in an event loop, call it with `asyncio.to_thread`. Further
        calls do nothing. New requests raise `EngineDeadError`.

        Args:
            drain: let pending generators end first: True, without a limit, or for at most so many seconds; then they
                end as aborted. False: they raise `EngineDeadError`.

        Raises:
            ValueError: ``drain`` is not a number of seconds.
        """
        deadline = drain_deadline(drain)
        if self._engine.is_foreign:
            return
        if drain:
            with self._wake:
                self._drain_until = min(self._drain_until, deadline)
                self._is_draining = True
                self._wake.notify()
            self._thread.join()
        self._stop()

    def stop_at_exit(self) -> None:
        """`shutdown`, except that pending generators, which only daemon threads can have, are left alone."""
        self._is_exiting = True
        self._stop(EXIT_S)

    def _stop(self, timeout: float | None = None) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)

    # --- submission, in any thread ------------------------------------------------------------------------------------

    def _submit_request(
        self,
        results: _ResultQueue,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        priority: int,
    ) -> None:
        def process() -> Callable[[], None]:
            try:
                request = self._engine.process_inputs(request_id, prompt, params, priority=priority)
            except Exception as error:  # raised by the engine's thread, after it has checked the id
                return partial(self._add, results, request_id, error)
            return partial(self._add, results, request_id, request)

        def process_in_thread() -> None:
            try:
                run = process()
            except BaseException as error:  # e.g. a panic of the tokenizer library: later commands must still run
                run = partial(results.put, error)
            with self._wake:
                command.run = run
                self._wake.notify()

        if self._is_draining:
            raise self._dead_error()
        if not is_long_text(prompt):
            self._submit(process(), results)
            return
        command = self._submit(None, results)
        try:
            asyncio.get_running_loop().run_in_executor(None, process_in_thread)
        except RuntimeError:  # the loop is shutting down and starts no threads
            process_in_thread()

    def _submit(self, run: Callable[[], None] | None, results: _ResultQueue | None) -> _Command:
        """Queue a command. With None, it and later commands wait until its function is set."""
        command = _Command(run, results)
        self._engine.check_process()  # before the lock, which a thread of the parent's may hold
        with self._wake:
            if not self._takes_commands:
                raise self._dead_error()
            self._commands.append(command)
            self._wake.notify()
        return command

    def _submit_if_alive(self, run: Callable[[], None]) -> None:
        with contextlib.suppress(EngineDeadError):
            self._submit(run, None)

    def _dead_error(self) -> EngineDeadError:
        """A new exception for each caller, because a traceback belongs to one of them."""
        if self._cause is None:
            return EngineDeadError("the engine was shut down")
        error = EngineDeadError(str(self._cause))
        error.__cause__ = self._cause.__cause__ if isinstance(self._cause, EngineDeadError) else self._cause
        return error

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with SHORT_COLLECTIONS:
                while self._poll():
                    for output in self._engine.step(self._run_commands):
                        self._put(output)
        except BaseException as error:  # every pending call gets it
            logger.exception("the engine's thread ends")
            self._cause = error
        with self._wake:
            self._stopping = True  # from here on no command is accepted
        pending = [command.results for command in self._commands if command.results is not None]
        if not self._is_exiting:
            for results in [*self._result_queues.values(), *pending]:
                results.put(self._dead_error())
        self._engine.shutdown()

    def _poll(self) -> bool:
        """Wait for commands or unfinished requests, then run the commands. Returns False at shutdown."""
        is_drained = False
        with self._wake:
            while not (self._next_command() or self._stopping or self._engine.can_step):
                is_drained = self._is_draining and not self._commands
                if is_drained or self._engine.has_transfers():
                    break  # a step waits for them, with a short timeout
                self._wake.wait()
        self._run_commands()
        if is_drained or (self._is_draining and time.monotonic() >= self._drain_until):
            for output in self._engine.abort_all():
                self._put(output)
            return False
        return not self._stopping

    def _run_commands(self) -> None:
        """Run commands in order: between steps, and when a step's result has arrived, so that an abort that was
        submitted during the step still takes effect."""
        while run := self._next_command():
            run()
            self._commands.popleft()  # after the call: if it raises, its results still get the error

    def _next_command(self) -> Callable[[], None] | None:
        """The first command's function; None if there is no command, or its function is not set yet."""
        return self._commands[0].run if self._commands else None

    def _add(self, results: _ResultQueue, request_id: str, request: EngineRequest | Exception) -> None:
        try:
            self._engine.check_request_id(request_id)
            if isinstance(request, Exception):
                raise request
            self._engine.submit(request)
        except Exception as error:  # fails this request only
            results.put(error)
        else:
            self._result_queues[request_id] = results

    def _abort(self, request_ids: list[str]) -> None:
        self._engine.abort_request(request_ids)
        for output in self._engine.pop_aborted():  # before a new request can have one of the ids
            self._put(output)

    def _discard(self, request_id: str, results: _ResultQueue) -> None:
        if self._result_queues.get(request_id) is results:
            del self._result_queues[request_id]
            self._engine.discard([request_id])
        elif request_id not in self._result_queues:  # its last output was not read
            self._engine.abort_request(request_id)

    def _put(self, output: RequestOutput) -> None:
        results = self._result_queues.get(output.request_id)
        if results is not None:
            results.put(output)
            if output.finished:
                del self._result_queues[output.request_id]


AsyncLLMEngine = AsyncLLM
"""vLLM's other name."""

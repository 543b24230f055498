"""`AsyncLLM`: the engine for asyncio. It steps in a thread of its own; requests are async generators."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fleetfoot.config.engine import EngineConfig
from fleetfoot.engine.admission import CheckedRequest
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.engine.stats import EngineStats
from fleetfoot.records.outputs import RequestOutput
from fleetfoot.records.prompts import PromptType
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.utils.process import short_collections

if TYPE_CHECKING:
    from fleetfoot.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LONG_TEXT = 4096
"""Characters from which on a prompt is tokenized in a thread of the event loop's: a millisecond's work."""

_Item = RequestOutput | BaseException
_T = TypeVar("_T")


class _Mailbox(Generic[_T]):
    """What is on its way from the engine's thread to one who waits: a generator for its outputs."""

    __slots__ = ("loop", "queue")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[_T | BaseException] = asyncio.Queue()

    def put(self, item: _T | BaseException) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: its owner has gone with it
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class _Command:
    """What the engine's thread is to do, in the order of submission."""

    __slots__ = ("mailbox", "run")

    def __init__(self, run: Callable[[], None] | None, mailbox: _Mailbox[Any] | None) -> None:
        self.run = run  # None: not known yet, it only keeps its place
        self.mailbox = mailbox  # of who waits for it: a command that never runs must be answered too


class AsyncLLM:
    """Many requests at once, each an async generator of partial outputs.

    Every generator ends: with a finished output, or with the exception that ended its request or the engine.
    Use it as an async context manager, or call `shutdown`.

    Args:
        model: as for `fleetfoot.LLM`.
        keywords: the fields of `EngineConfig`.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **keywords: Any) -> None:
        if model is not None:
            keywords["model"] = model
        config = EngineConfig.from_keywords(keywords, owner="AsyncLLM")
        self._start(LLMEngine.from_config(config))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> AsyncLLM:
        """Take over an engine that is there already; nobody else may use it any more."""
        self = cls.__new__(cls)
        self._start(engine)
        return self

    def _start(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._mailboxes: dict[str, _Mailbox[RequestOutput]] = {}  # the engine's thread alone touches it
        self._commands: deque[_Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._cause: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fleetfoot-engine", daemon=True)
        self._thread.start()

    # --- for users --------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come, the last one with ``finished`` set.

        The prompt is checked and tokenized here, in a thread of the event loop's if it is long, and steps go on
        meanwhile. Requests enter the engine in the order in which their generators are first asked for an output.
        Leaving the generator early, by ``break`` or by cancellation, aborts the request.

        Raises:
            ValueError, TypeError: the request is refused.
            EngineDeadError: the engine has failed or was shut down; the first cause is chained.
        """
        mailbox: _Mailbox[RequestOutput] = _Mailbox()
        self._submit_request(mailbox, request_id, prompt, sampling_params, priority)
        finished = False
        try:
            while not finished:
                item = await mailbox.queue.get()
                while not mailbox.queue.empty():  # a slow reader gets what has piled up as one output
                    item = _merge(item, mailbox.queue.get_nowait(), sampling_params.output_kind)
                finished = isinstance(item, BaseException) or item.finished
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            if not finished:
                self._submit_if_alive(lambda: self._discard(request_id, mailbox))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: their generators yield a last output that says "abort". Unknown ids are no error."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        if not all(isinstance(entry, str) for entry in request_ids):
            raise TypeError(f"request_id is {request_id!r}; it must be a string, or hold strings")
        self._submit_if_alive(lambda: self._abort(request_ids))

    @property
    def is_running(self) -> bool:
        """Whether the engine can take requests."""
        return self._cause is None and not self._stopping

    @property
    def runner_name(self) -> str:
        """``v1`` or ``v2``: the model runner that really runs."""
        return self._engine.runner_name

    def get_tokenizer(self) -> Tokenizer | None:
        """None when the engine runs on token ids alone."""
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """As of `fleetfoot.LLM`: the defaults with the model's own in their place, as a new object."""
        return self._engine.get_default_sampling_params()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def check_integrity(self) -> None:
        """Raise RuntimeError if KV blocks, rows or queues do not add up; EngineDeadError if the engine has ended."""
        mailbox: _Mailbox[None] = _Mailbox()
        self._submit(lambda: self._check(mailbox), mailbox)
        failure = await mailbox.queue.get()
        if failure is not None:
            raise failure

    def shutdown(self) -> None:
        """End the engine and its thread; generators that still wait raise `EngineDeadError`. Again: does nothing."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    # --- in any thread ----------------------------------------------------------------------------------------------

    def _submit_request(
        self,
        mailbox: _Mailbox[RequestOutput],
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        priority: int,
    ) -> None:
        def check() -> Callable[[], None]:
            checked: CheckedRequest | Exception
            try:
                checked = self._engine.check_request(request_id, prompt, params, priority=priority)
            except Exception as error:  # for the engine's thread to deliver: an id that is in use comes first
                checked = error
            return lambda: self._add(mailbox, request_id, checked)

        def check_elsewhere() -> None:
            try:
                self._fill(place, check())
            except BaseException as error:  # a panic of the tokenizer's: nobody may be left to wait behind it
                self._fill(place, lambda failure=error: mailbox.put(failure))  # type: ignore[misc]

        if not _is_long(prompt):
            self._submit(check(), mailbox)
            return
        place = self._submit(None, mailbox)
        try:
            asyncio.get_running_loop().run_in_executor(None, check_elsewhere)
        except RuntimeError:  # the loop is about to end and starts no threads any more
            check_elsewhere()

    def _submit(self, run: Callable[[], None] | None, mailbox: _Mailbox[Any]) -> _Command:
        """Put a command in line; one of None keeps those behind it waiting until it is filled."""
        command = _Command(run, mailbox)
        with self._wake:
            if not self.is_running:
                raise self._death()
            self._commands.append(command)
            self._wake.notify()
        return command

    def _fill(self, command: _Command, run: Callable[[], None]) -> None:
        with self._wake:
            command.run = run
            self._wake.notify()

    def _submit_if_alive(self, run: Callable[[], None]) -> None:
        with self._wake:
            if self.is_running:
                self._commands.append(_Command(run, None))
                self._wake.notify()

    def _death(self) -> EngineDeadError:
        if self._cause is None:
            return EngineDeadError("the engine was shut down")
        error = EngineDeadError(str(self._cause))  # one for each who waits: a traceback belongs to one of them
        error.__cause__ = self._cause.__cause__ if isinstance(self._cause, EngineDeadError) else self._cause
        return error

    # --- in the engine's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with short_collections():
                while self._obey():
                    for output in self._engine.step(self._run_commands):
                        self._deliver(output)
        except BaseException as error:  # whatever it is, those who wait must hear of it
            logger.exception("the engine's thread ends")
            self._cause = error
        with self._wake:
            self._stopping = True  # from here on nothing is submitted any more
        unheard = [command.mailbox for command in self._commands if command.mailbox is not None]
        for mailbox in [*self._mailboxes.values(), *unheard]:
            mailbox.put(self._death())
        self._engine.shutdown()

    def _obey(self) -> bool:
        """Run what was submitted; sleep while there is nothing to do. False: the end has come."""
        with self._wake:
            while not (self._next_command() or self._stopping or self._engine.has_unfinished_requests()):
                if self._engine.has_transfers():
                    break  # a step waits for them, briefly
                self._wake.wait()
        self._run_commands()
        return not self._stopping

    def _run_commands(self) -> None:
        """What was submitted, in order: between steps, and again when a step's result has arrived, so that an abort
        which came while the step ran still counts."""
        while run := self._next_command():
            run()
            self._commands.popleft()  # only now: were it to raise, whoever waits for it must be found

    def _next_command(self) -> Callable[[], None] | None:
        """The first in line; None while there is none, or it is not known yet."""
        return self._commands[0].run if self._commands else None

    def _add(self, mailbox: _Mailbox[RequestOutput], request_id: str, checked: CheckedRequest | Exception) -> None:
        try:
            self._engine.check_id(request_id)
            if isinstance(checked, Exception):
                raise checked
            self._engine.add_checked(checked)
        except Exception as error:  # one bad request hurts only itself
            mailbox.put(error)
        else:
            self._mailboxes[request_id] = mailbox

    def _abort(self, request_ids: list[str]) -> None:
        self._engine.abort_request(request_ids)
        for output in self._engine.take_owed():  # before a new request takes over one of the ids
            self._deliver(output)

    def _check(self, mailbox: _Mailbox[None]) -> None:
        try:
            self._engine.check_integrity()
        except RuntimeError as error:
            mailbox.put(error)
        else:
            mailbox.put(None)

    def _discard(self, request_id: str, mailbox: _Mailbox[RequestOutput]) -> None:
        if self._mailboxes.get(request_id) is mailbox:
            del self._mailboxes[request_id]
            self._engine.discard([request_id])

    def _deliver(self, output: RequestOutput) -> None:
        mailbox = self._mailboxes.get(output.request_id)
        if mailbox is not None:
            mailbox.put(output)
            if output.finished:
                del self._mailboxes[output.request_id]


def _is_long(prompt: object) -> bool:
    """Whether it is a long text that must be tokenized."""
    if isinstance(prompt, dict):
        prompt = None if prompt.get("prompt_token_ids") is not None else prompt.get("prompt")
    return isinstance(prompt, str) and len(prompt) >= LONG_TEXT


def _merge(earlier: _Item, later: _Item, kind: RequestOutputKind) -> _Item:
    """Two outputs of one request as one. Only deltas have to be joined: others hold everything."""
    if isinstance(earlier, BaseException) or isinstance(later, BaseException):
        return later
    if kind is RequestOutputKind.DELTA:
        for before, after in zip(earlier.outputs, later.outputs, strict=True):
            after.text = before.text + after.text
            after.token_ids = before.token_ids + after.token_ids
            if before.logprobs is not None and after.logprobs is not None:
                after.logprobs = before.logprobs + after.logprobs
    return later

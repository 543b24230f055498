"""A client of an engine in another process, with the interface of `AsyncLLM`, for asyncio. No torch.

The client validates and tokenizes requests, and makes the texts of their outputs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any, cast

from fleetfoot.engine import wire
from fleetfoot.engine.calls import CALLS
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.engine.input_processor import LONG_TEXT, InputProcessor, Limit, check_room, input_size, needs_grammar
from fleetfoot.engine.link import Link, connect
from fleetfoot.engine.output_processor import OutputProcessor, merge_outputs
from fleetfoot.engine.stats import StatsCollector
from fleetfoot.inputs import PromptType
from fleetfoot.outputs import PoolingRequestOutput, RequestOutput
from fleetfoot.records.pooling_params import PoolingParams
from fleetfoot.records.request import RequestStatus
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.records.step import EngineOutput
from fleetfoot.records.structured_outputs import as_structured_outputs
from fleetfoot.structured.compiler import TIMEOUT_S, GrammarChecker
from fleetfoot.structured.trial import GrammarTrial
from fleetfoot.tokenizer.tokenizer import Tokenizer
from fleetfoot.utils.validation import FieldError

_PART = 64
"""Sequences whose tokens are processed at a time, a few milliseconds."""
Listener = Callable[[Any], bool]
"""Takes an output or an exception. Returns whether it takes another one; while not, they are merged and kept."""


class OutputStream:
    """The outputs of a request that the engine has accepted: an async iterator, or calls of a listener. `aclose` aborts
    what is unfinished."""

    __slots__ = (
        *("_client", "_finished", "_is_held", "_items", "_kind", "_listener", "_request_id", "_waiter"),
        *("num_prompt_tokens", "owner", "params"),
    )

    def __init__(self, client: EngineClient, request_id: str, kind: RequestOutputKind, owner: str = "") -> None:
        self.owner = owner
        self.params: Any = None
        """The checked parameters of the request."""
        self.num_prompt_tokens = 0
        self._client = client
        self._request_id = request_id
        self._kind = kind
        self._items: list[Any] = []
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Listener | None = None
        self._is_held = False
        self._finished = False

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` with each output or exception when it arrives, in place of an iteration."""
        self._listener = listener
        self.resume()

    def resume(self) -> None:
        """Call the listener again, after it has returned False."""
        self._is_held = False
        if self._items:
            self._deliver(self._items.pop())

    def _deliver(self, item: Any) -> None:
        assert self._listener is not None
        self._finished = isinstance(item, BaseException) or item.finished
        self._is_held = not self._listener(item)
        if self._finished:
            self._listener = None  # it may refer to this stream

    def put(self, item: RequestOutput | BaseException) -> None:
        """Called by the client."""
        if self._listener is not None and not self._is_held:
            self._deliver(item)
            return
        if self._items:  # a slow reader gets several outputs merged into one
            self._items[0] = merge_outputs(self._items[0], item, self._kind)
            return
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._items.pop()
        if isinstance(item, BaseException):
            self._finished = True
            raise item
        self._finished = item.finished
        output: RequestOutput = item
        return output

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        self._listener = None
        if not self._finished:
            self._finished = True
            self._client.discard(self._request_id, self)


class _Backlog:
    """Outputs that have arrived and are not processed yet. Flows take turns: texts and logprobs of hundreds of
    sequences can take seconds longer than their steps, and others do not wait for them."""

    def __init__(self) -> None:
        self._flows: dict[str, deque[tuple[float, list[EngineOutput]]]] = {}

    def __bool__(self) -> bool:
        return bool(self._flows)

    def put(self, message: wire.Outputs, flows: Mapping[int, str]) -> None:
        parts: dict[str, list[EngineOutput]] = {}
        for tokens in message.tokens:
            parts.setdefault(flows.get(tokens.number, ""), []).append(tokens)
        for flow, outputs in parts.items():
            outputs.sort(key=_number_of)  # several steps of a sequence become one output of it
            self._flows.setdefault(flow, deque()).append((message.now, outputs))

    def pop(self) -> tuple[float, list[EngineOutput]]:
        """When they were made, and up to `_PART` of the flow whose turn it is."""
        flow, queue = next(iter(self._flows.items()))
        del self._flows[flow]
        now, outputs = queue.popleft()
        if outputs[_PART:]:
            queue.appendleft((now, outputs[_PART:]))
        if queue:
            self._flows[flow] = queue
        return now, outputs[:_PART]


_number_of = attrgetter("number")


async def _run_in_thread(cost: int, function: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.to_thread(function, *arguments)


class EngineClient:
    """A client of an engine's process, with the interface of `fleetfoot.AsyncLLM`; of one event loop.

    Args:
        engine: the address of its socket, or a link.
        clock: seconds, monotonic.
    """

    def __init__(self, engine: str | Link, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._link: Link = connect(engine) if isinstance(engine, str) else engine
        self._numbers = count()
        self._streams: dict[str, OutputStream] = {}
        self._open: dict[int, str] = {}  # the flows of sequences that the engine has, by number
        self._backlog = _Backlog()
        self._counts: Counter[str] = Counter()  # of the streams, by owner
        self._request_ids: dict[int, str] = {}  # the first sequence's number -> the request's id
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._urgent: set[int] = set()  # those whose replies come before outputs that wait
        self._weight_version = 0
        self._cause: str | None = None
        self._trial = GrammarTrial()
        self._task: asyncio.Task[None] | None = None
        self.run_native: Callable[..., Awaitable[Any]] = _run_in_thread
        """Runs a function, given with its cost and its arguments, outside of the event loop."""
        self.interruption = ""
        """Why requests wait at present, and go on afterwards; empty: they do not."""
        self.degraded = ""
        """Which engines of a group serve nothing at present, and why."""
        self.held, self.held_since = False, 0.0
        """Whether a call is running between steps, and since when."""
        self.last_message_ts = 0.0
        """When the engine's last message arrived, by the clock."""

    async def start(self) -> None:
        """Wait until the engine is ready; load the tokenizer meanwhile if that is possible."""
        ready = await self._link.hello()
        self.tokenizer = None if ready.tokenizer_path is None else Tokenizer.from_path(ready.tokenizer_path)
        self._grammars = GrammarChecker(
            None if (found := self.tokenizer) is None else lambda: found,
            ready.vocab_size,
            ready.eos_token_ids,
            trial=self._trial,
        )
        self._learn(ready)
        self._outputs = OutputProcessor(self.tokenizer, self._finish, StatsCollector(), has_metrics=False)
        self.last_message_ts = self._clock()
        self._task = asyncio.create_task(self._receive(), name="fleetfoot-engine-client")

    def _learn(self, ready: wire.Ready) -> None:
        """Take over the engine's facts: at the start, and when its settings have changed."""
        self.facts = ready
        self.input_processor = InputProcessor(
            vocab_size=ready.vocab_size,
            max_model_len=ready.max_model_len,
            eos_token_ids=ready.eos_token_ids,
            tokenizer=self.tokenizer,
            max_logprobs=ready.max_logprobs,
            seed=0,  # sequences get their seeds in the engine's process
            sampling_defaults=ready.sampling_defaults,
            pooling=ready.pooling,
            grammars=self._grammars,
        )

    # --- the interface of AsyncLLM ------------------------------------------------------------------------------------

    async def generate(
        self, prompt: PromptType, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `fleetfoot.AsyncLLM.generate`."""
        async with contextlib.aclosing(await self.submit(prompt, sampling_params, request_id, priority)) as outputs:
            async for output in outputs:
                yield output

    def encode(
        self, prompt: PromptType, pooling_params: PoolingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """As `fleetfoot.AsyncLLM.encode`."""
        params: Any = pooling_params
        outputs: Any = self.generate(prompt, params, request_id, priority=priority)
        return cast("AsyncGenerator[PoolingRequestOutput, None]", outputs)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """As `fleetfoot.AsyncLLM.abort`."""
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            output = self._outputs.abort(one)
            if output is not None and one in self._streams:
                self._remove(one).put(output)

    @property
    def is_running(self) -> bool:
        """Whether the engine accepts requests."""
        return self._cause is None and self._task is not None

    @property
    def num_unfinished(self) -> int:
        """Requests of this client that have not ended."""
        return len(self._streams)

    def count_of(self, owner: str) -> int:
        """Requests of one owner that have not ended."""
        return self._counts[owner]

    @property
    def runner_name(self) -> str:
        return self.facts.runner_name

    def get_tokenizer(self) -> Tokenizer | None:
        """None if the engine runs on token ids only."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """As `fleetfoot.AsyncLLM.get_default_sampling_params`."""
        return SamplingParams(**self.facts.sampling_defaults)

    async def call(self, method: str, /, *arguments: Any, **keywords: Any) -> Any:
        """The result, as plain data, of a call of `fleetfoot.engine.calls.CALLS`.

        Raises:
            ValueError, TypeError, RuntimeError: the method has raised it.
            EngineDeadError: the engine has failed.
        """
        self._check_alive()
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        if (row := CALLS.get(method)) is not None and row.runs == "at once":
            self._urgent.add(number)
        try:
            self._send(wire.Call(number, method, list(arguments), keywords))
        except ValueError as error:
            self._take_reply(wire.Reply(number, error=wire.Failed.of(error)))
        return await future

    async def stop(self) -> None:
        """End the engine's process, which aborts what is unfinished."""
        self._link.send(wire.Stop())
        self.fail("the engine was shut down")

    def close(self) -> None:
        """Disconnect. The engine goes on."""
        if self._task is not None:
            self._task.cancel()
        self._trial.close()
        self._link.close()

    def fail(self, cause: str) -> None:
        """End all requests and calls with EngineDeadError; call it when the engine's process has ended."""
        if self._cause is not None:
            return
        self._cause = cause
        for stream in self._streams.values():
            stream.put(EngineDeadError(cause))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(cause))
        self._streams.clear()
        self._counts.clear()
        self._calls.clear()

    def _remove(self, request_id: str) -> OutputStream:
        stream = self._streams.pop(request_id)
        self._counts[stream.owner] -= 1
        if not self._counts[stream.owner]:
            del self._counts[stream.owner]
        return stream

    # --- requests -----------------------------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        request_id: str,
        priority: int = 0,
        *,
        owner: str = "",
        flow: str = "",
        session: str = "",
        rank: int = -1,
        is_checked: bool = False,
        limit: Limit | None = None,
    ) -> OutputStream:
        """Validate, tokenize and send a request; the outputs can be iterated afterwards. Raises as `generate`.

        Args:
            owner: who has sent the request, for `count_of`.
            flow: requests of different flows take turns in the engine's queue.
            session, rank: see `fleetfoot.records.request.Request`.
            is_checked: ``params`` is that of another stream.
            limit: see `fleetfoot.engine.input_processor.check_room`; None: outputs are cut where the room ends.
        """
        self._check_alive()
        if request_id in self._streams:
            raise FieldError("request_id", f"is {request_id!r}, which a request has that has not ended", request_id)
        if priority and not self.facts.has_priority:
            raise FieldError(
                "priority", f"is {priority!r}, but scheduling_policy is 'fcfs'; it can be 'priority'", priority
            )
        process = partial(self.input_processor.process, priority=priority, params_checked=is_checked)
        if not is_checked and needs_grammar(params):
            await self._compile_grammar(params)
            self._check_alive()
        if (cost := input_size(prompt, params)) >= LONG_TEXT:
            request = await self.run_native(cost, partial(process, request_id, prompt, params))
            self._check_alive()
        else:
            request = process(request_id, prompt, params)
        check_room(limit, request)
        request.flow, request.session, request.rank = flow, session, rank
        first = next(self._numbers)
        numbers = [first, *(next(self._numbers) for _ in range(request.params.n - 1))]
        self._open.update(dict.fromkeys(numbers, flow))
        stream = self._streams[request_id] = OutputStream(self, request_id, request.params.output_kind, owner)
        stream.params = request.pooling_params or request.params
        stream.num_prompt_tokens = len(request.prompt_token_ids)
        self._counts[owner] += 1
        self._request_ids[first] = request_id
        self._outputs.add(request, dict.fromkeys(numbers), time.perf_counter())
        request.number, request.prompt = first, None  # the engine reads tokens alone
        try:
            self._send(request)
        except ValueError as error:
            self._refuse(wire.Refused(first, wire.Failed.of(error)))
            raise
        return stream

    async def _compile_grammar(self, params: SamplingParams | PoolingParams) -> None:
        """Check structured outputs here, and let the engine compile those that are new, before a response begins."""
        checked = await asyncio.to_thread(self.input_processor.compile_grammar, params)
        if checked is None or checked.is_compiled:
            return
        with contextlib.suppress(RuntimeError):  # of an engine that is lost; another one may take the request
            await self.call("compile_grammar", as_structured_outputs(getattr(params, "structured_outputs", None)))
            checked.is_compiled = True

    def validate_grammar(self, grammar: str) -> str:
        """The error of a grammar, which another process compiles; empty: there is none. Raises ValueError: it exceeds
        the limits."""
        return self._trial.run(grammar, TIMEOUT_S)

    def _finish(self, sequence: Any, status: RequestStatus, stop_reason: str | None = None) -> None:
        """Called by the output processor for a stop string, and for an abort."""
        if self._forget(sequence.number) and self._cause is None:
            self._send(wire.Finish(sequence.number, int(status), stop_reason))

    def _forget(self, number: int) -> bool:
        """A sequence has ended. Returns whether the engine has it."""
        self._request_ids.pop(number, None)
        return self._open.pop(number, None) is not None

    def discard(self, request_id: str, stream: OutputStream) -> None:
        """Abort a request without a last output."""
        if self._streams.get(request_id) is stream:
            self._remove(request_id)
            self._outputs.abort(request_id)

    def _send(self, message: wire.ClientMessage) -> None:
        self._link.send(message)

    def _check_alive(self) -> None:
        if self._cause is not None:
            raise EngineDeadError(self._cause)

    # --- messages of the engine ---------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        reading: asyncio.Future[wire.EngineMessage] | None = None
        try:
            while True:
                message: wire.EngineMessage | None = None
                if not self._backlog:
                    message, reading = await (reading or self._link.receive()), None
                else:
                    reading = reading or asyncio.ensure_future(self._link.receive())
                    await asyncio.sleep(0)  # others go on
                    if reading.done():
                        message, reading = reading.result(), None
                if message is not None:
                    while self._backlog and not self._may_overtake(message):
                        self._take_outputs(*self._backlog.pop())
                        await asyncio.sleep(0)
                    self._take(message)
                if self._backlog:
                    self._take_outputs(*self._backlog.pop())
        except asyncio.CancelledError:
            if reading is not None:
                reading.cancel()
            raise
        except BaseException as error:  # a panic of a library, too
            self.fail(f"the engine's outputs cannot be read: {type(error).__name__}: {error}")
            raise

    def _may_overtake(self, message: wire.EngineMessage) -> bool:
        """Whether a message need not wait until the outputs that came before are processed."""
        if isinstance(message, wire.Outputs):
            return message.weight_version == self._weight_version
        return isinstance(message, wire.Reply) and message.number in self._urgent

    def _take(self, message: wire.EngineMessage) -> None:
        self.last_message_ts = self._clock()
        if isinstance(message, wire.Outputs):
            if message.weight_version != self._weight_version:
                self._weight_version = message.weight_version
                self._outputs.change_weights(message.weight_version)
            if self._backlog or len(message.tokens) > _PART:
                self._backlog.put(message, self._open)
            else:
                self._take_outputs(message.now, message.tokens)
        elif isinstance(message, wire.Reply):
            self._take_reply(message)
        elif isinstance(message, wire.Refused):
            self._refuse(message)
        elif isinstance(message, wire.Interruption):
            self.interruption, self.degraded = message.reason, message.degraded
        elif isinstance(message, wire.Held):
            self.held, self.held_since = message.is_held, self.last_message_ts
        elif isinstance(message, wire.Ready):
            self._learn(message)
        elif isinstance(message, wire.Dead):
            self.fail(f"the engine has failed: {message.text}")

    def _take_outputs(self, now: float, outputs: list[EngineOutput]) -> None:
        for tokens in outputs:
            if tokens.end is not None:
                self._forget(tokens.number)
        for output in self._outputs.process(outputs, now):
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
                if output.finished:
                    self._remove(output.request_id)

    def _refuse(self, message: wire.Refused) -> None:
        request_id = self._request_ids.pop(message.number, None)
        if request_id is None:
            return
        stream = self._remove(request_id)
        self._outputs.abort(request_id)
        stream.put(message.error.as_error())

    def _take_reply(self, message: wire.Reply) -> None:
        self._urgent.discard(message.number)
        future = self._calls.pop(message.number, None)
        if future is None or future.done():
            return
        if message.error is not None:
            future.set_exception(message.error.as_error())
        else:
            future.set_result(message.value)

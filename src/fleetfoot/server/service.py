"""What endpoints share of one engine: its names, limits, admission, and the outputs of a request's prompts."""

from __future__ import annotations

import asyncio
import copy
import functools
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetfoot.engine.chat import ChatFormats
from fleetfoot.engine.client import EngineClient, OutputStream
from fleetfoot.engine.input_processor import LONG_TEXT, Limit, check_room, is_of_prompt
from fleetfoot.inputs import PromptType
from fleetfoot.kv_transfer.base.offers import parse_params
from fleetfoot.outputs import CompletionOutput, RequestOutput
from fleetfoot.records.pooling_params import PoolingParams
from fleetfoot.records.sampling_params import EXTRA_ARGS, SamplingParams
from fleetfoot.records.structured_outputs import with_closed_objects
from fleetfoot.server.bounds import SMALL_BYTES, BodyLimits, cost_of, decode, must_scan, over_limit, scan
from fleetfoot.server.conversion import decode_body
from fleetfoot.server.http import ENCODER, JSON, ApiError, check_request_id, invalid, read_body
from fleetfoot.server.liveness import Liveness
from fleetfoot.server.template_process import Messages, render_apart
from fleetfoot.server.tracing import RequestSpan, Tracing, make_tracing
from fleetfoot.server.unknown_fields import UnknownFields
from fleetfoot.tokenizer.tokenizer import Tokenizer
from fleetfoot.utils.process import num_cores
from fleetfoot.utils.validation import FieldError, shown
from fleetfoot.utils.work_pool import WorkPool

_T = TypeVar("_T")

MAX_ENTRIES = 1 << 18
"""Most entries of ``logit_bias`` or ``allowed_token_ids``, times prompts."""
MAX_BAD_CHARS = 1 << 18
"""Most characters of all ``bad_words``, times sequences: each sequence compares its tokens with them in each step."""
MAX_PROMPT_LOGPROBS = 1 << 20
"""Most logprobs of all prompts of a request, those of the prompts' own tokens too."""
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096
"""Most characters of all stop strings of a request."""
_MESSAGE_CHARS = 32
"""A message takes about as long to render as so many characters take to tokenize."""
_MAX_TEMPLATE_PROCESSES = 4
_RANK_HEADER = "x-data-parallel-rank"
_RESERVED = 8
"""One of so many parts of the queue is added for clients that need no more than that."""
_CHOICE_BYTES, _ENTRY_BYTES = 1024, 128
"""Bytes of a response, for each choice and each logprob."""
_BATCH_BITS = 3
"""Batches of 1 to 3, 4 to 31, 32 to 255 sequences and so on are different flows in the engine's queue."""
_PART = 64
"""Outputs that are taken at a time."""
_MAX_WAITING = 1024
"""Most pieces of work of clients that wait for a thread."""
_NICE = 5
"""A thread that shares its core with the event loop, or with the engine, has a quarter of it."""
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
_RENDER_OPTIONS = ("add_generation_prompt", "continue_final_message", "tools", "documents")
"""Keywords of `ChatTemplate.render`; others are variables."""
RESERVED_VARIABLES = {
    *("self", "conversation", "messages", "chat_template", "tokenize", "tools", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "tokenizer_kwargs", "add_generation_prompt", "continue_final_message"),
}
"""Keywords of `Tokenizer.apply_chat_template`, which variables of a template cannot be."""


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Settings of the server that endpoints read."""

    model_names: tuple[str, ...]
    """The first one is in responses. (): the engine's model."""
    max_queue: int
    """Unfinished requests from which on others are refused with 429."""
    max_body_bytes: int
    chat_template: str | None = None
    """Jinja source, or the name of one of the model's; None: the model's default."""
    allow_unknown_fields: bool = False
    """Whether unknown fields of a body are logged and ignored; else they are an error."""
    tool_call_parser: str | None = None
    """Name of the format of tool calls; None: that of the chat template."""
    reasoning_parser: str | None = None
    trusts_chat_templates: bool = False
    """Whether a request may bring a chat template."""
    data_parallel_size: int = 1
    """Ranks that a request may ask for."""
    strict_schemas: bool = False
    """Whether objects of requests' schemas have only the properties that these name."""
    accepts_kv_offers: bool = False
    """Whether requests may bring offers of KV that an engine has signed, and responses have them."""
    max_stored_responses: int = 4096
    """Responses that later requests can refer to; the oldest ones are dropped."""
    max_stored_bytes: int = 256 << 20
    """Most bytes of all stored responses."""
    limits: BodyLimits = field(default_factory=BodyLimits)
    """Those of each request."""
    max_queue_per_key: int | None = None
    """Unfinished requests of one client from which on its others are refused with 429; None: as many as there is room
    for. Clients differ by key if there are several, and else by address."""
    otlp_traces_endpoint: str | None = None
    """The collector of spans; None: nothing is traced."""


class Service:
    """An engine and the settings of its endpoints."""

    def __init__(self, engine: EngineClient, settings: ServiceSettings, liveness: Liveness | None = None) -> None:
        self.engine = engine
        self.liveness = liveness or Liveness(engine)
        self.settings = settings
        self.created = int(time.time())
        self.is_draining = False
        self._unknown_fields = UnknownFields(allow=settings.allow_unknown_fields)
        self._template_processes = asyncio.Semaphore(_MAX_TEMPLATE_PROCESSES)
        self.native = WorkPool(max(2, min(4, num_cores())), _MAX_WAITING, nice=_NICE)
        """Runs work that leaves the interpreter to other threads, and cores to the event loop."""
        self.python = WorkPool(1, _MAX_WAITING)
        """Runs other work: one thread, so that the event loop waits for no more than one."""
        self._submitting: Counter[str] = Counter()
        """Prompts that have a place in the queue, and that the engine does not count yet; by client."""
        self._client: ContextVar[str] = ContextVar("client", default="")
        self._placement: ContextVar[tuple[str, int]] = ContextVar("placement", default=("", -1))
        self._body_size: ContextVar[int] = ContextVar("body_size", default=0)
        engine.run_native = self.run_native
        self._headers: ContextVar[Mapping[str, str]] = ContextVar("headers", default=NO_VARIABLES)

    @functools.cached_property
    def _tracing(self) -> Tracing:
        return make_tracing(self.settings.otlp_traces_endpoint, self.model_name)

    def close(self) -> None:
        """End the threads."""
        self._tracing.close()
        self.native.close()
        self.python.close()

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.settings.model_names or (self.engine.facts.model,)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ApiError if there is none."""
        tokenizer = self.engine.get_tokenizer()
        if tokenizer is None:
            raise ApiError(400, "the engine runs on token ids only (--skip-tokenizer-init)")
        return tokenizer

    @functools.cached_property
    def formats(self) -> ChatFormats:
        """Raises ApiError if there is no tokenizer."""
        settings = self.settings
        return ChatFormats(self.tokenizer, settings.tool_call_parser, settings.reasoning_parser)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served; None is any."""
        names = self.model_names
        if name is not None and name not in names:
            raise ApiError(
                404, f"the model {name!r} does not exist; served: {', '.join(names)}", "model_not_found", "model"
            )

    async def read(self, http: Request, decoder: msgspec.json.Decoder[_T]) -> _T:
        """The body of a request, for a model that is served. Raises ApiError."""
        self._client.set(http.scope.get("client_name", ""))
        self._placement.set((http.headers.get("x-session-id", ""), self._rank_of(http)))
        content = await read_body(http, self.settings.max_body_bytes)
        self._body_size.set(cost_of(content))
        self._headers.set(http.headers)
        body = await self._decode(content, decoder)
        if (name := getattr(body, "request_id", None)) is not None:
            check_request_id(name)
        self._check_guarded(body)
        self.check_model(getattr(body, "model", None))
        return body

    async def _decode(self, content: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
        limits = self.settings.limits
        if self._body_size.get() > SMALL_BYTES:
            found = await self.run_native(len(content), scan, content, limits)
            return await self.work(decode, found, decoder, self._unknown_fields)
        if must_scan(content, limits):
            return decode(scan(content, limits), decoder, self._unknown_fields)
        return decode_body(content, decoder, self._unknown_fields)

    def _rank_of(self, http: Request) -> int:
        """The data-parallel rank that a request asks for; -1: none. Raises ApiError."""
        given, size = http.headers.get(_RANK_HEADER), self.settings.data_parallel_size
        if given is None:
            return -1
        if not (given.isdecimal() and len(given) < 10 and int(given) < size):
            raise invalid(_RANK_HEADER, f"{_RANK_HEADER} is {shown(given)}; it can be 0 to {size - 1}")
        return int(given)

    def add_size(self, size: int) -> None:
        """What belongs to the body is larger by so many bytes: a stored conversation."""
        self._body_size.set(self._body_size.get() + size)

    async def work(self, function: Callable[..., _T], /, *arguments: Any) -> _T:
        """The result of a function of the body, in the thread for Python if the body is large."""
        size = self._body_size.get()
        if size <= SMALL_BYTES:
            return function(*arguments)
        return await self.python.run(self._client.get(), size, function, *arguments)

    async def respond(self, size: int, make: Callable[[], Any], parts: str) -> Response:
        """The response that a function makes, in the thread for Python if it is long.

        Args:
            size: about its bytes.
            parts: the field that is a list or an iterator, the entries of which are encoded one by one: an encoder
                keeps the interpreter for the length of a call, and of an iterator one is in memory at a time.
        """
        if size <= SMALL_BYTES:
            response = make()
            setattr(response, parts, [*getattr(response, parts)])
            return JSON(response)

        def encode() -> bytes:
            response = make()
            setattr(response, parts, [msgspec.Raw(ENCODER.encode(part)) for part in getattr(response, parts)])
            return ENCODER.encode(response)

        body = await self.python.run(self._client.get(), size, encode)
        return Response(body, media_type=JSON.media_type)

    async def run_native(self, cost: int, function: Callable[..., _T], /, *arguments: Any) -> _T:
        """The result of a function that leaves the interpreter to others. ``cost``: about the bytes that it reads."""
        return await self.native.run(self._client.get(), cost, function, *arguments)

    def check_generates(self) -> None:
        """Raises ApiError for a model that pools."""
        if self.engine.facts.pooling is not None:
            raise ApiError(400, "this model pools and does not generate; use /v1/embeddings")

    def _check_guarded(self, body: Any) -> None:
        """Raises ApiError for fields that reach addresses, engines' memory or programs, and that the operator has not
        enabled; each such field of a body is named here."""
        if getattr(body, "chat_template", None) is not None and not self.settings.trusts_chat_templates:
            message = "chat_template is refused: templates of requests are not trusted (--trust-request-chat-template)"
            raise invalid("chat_template", message)
        if taken := [name for name in EXTRA_ARGS if name in (getattr(body, "vllm_xargs", None) or ())]:
            raise invalid("vllm_xargs", f"vllm_xargs cannot hold {taken[0]}, which is a field of its own")
        params = getattr(body, "kv_transfer_params", None)
        if params is None:
            return
        if not self.settings.accepts_kv_offers:
            message = "kv_transfer_params is refused: requests hand in no KV (--enable-kv-offers)"
            raise invalid("kv_transfer_params", message)
        try:
            parse_params(params)  # whatever the engine's connector is: no addresses
        except (ValueError, TypeError) as error:
            raise invalid("kv_transfer_params", str(error)) from None

    def kv_transfer_params(self, output: RequestOutput) -> dict[str, Any] | msgspec.UnsetType:
        """Those of a response."""
        params = output.kv_transfer_params if self.settings.accepts_kv_offers else None
        return msgspec.UNSET if params is None else params

    async def submit(
        self,
        prompts: Sequence[PromptType],
        params: SamplingParams | PoolingParams,
        request_id: str,
        priority: int | None,
        places: Sequence[str] = (),
        limit: Limit | None = None,
    ) -> RequestOutputs:
        """Send the prompts of a request.

        Args:
            places: of the prompts in the body, for errors.
            limit: see `EngineClient.submit`.

        Raises:
            ApiError: 429 if the queue is full; 400 for a prompt or parameters that are invalid. Then nothing runs.
            EngineDeadError: the engine has failed.
        """
        if self.settings.strict_schemas and isinstance(params, SamplingParams):
            params = copy.copy(params)
            params.structured_outputs = with_closed_objects(params.structured_outputs)
        num_sequences, limits = len(prompts) * getattr(params, "n", 1), self.settings.limits
        if num_sequences > limits.prompts:
            field = "n" if len(prompts) == 1 else ("prompt", *places)[-1].partition("[")[0]
            what = f"{field}: the sequences of the request (prompts times n) are"
            raise over_limit(field, what, num_sequences, "prompts", limits)
        for field in ("logit_bias", "allowed_token_ids"):
            if (size := len(prompts) * len(getattr(params, field, None) or ())) > MAX_ENTRIES:
                message = f"{field} has {size} entries for all prompts together; {MAX_ENTRIES} are the most"
                raise invalid(field, message)
        if (size := num_sequences * sum(map(len, getattr(params, "bad_words", None) or ()))) > MAX_BAD_CHARS:
            message = f"bad_words has {size:,} characters for all sequences together; {MAX_BAD_CHARS:,} are the most"
            raise invalid("bad_words", message)
        if self.is_draining:
            raise ApiError(503, "the server shuts down", "shutting_down", retry_after=5)
        self._check_queue(len(prompts), ("prompt", *places)[-1].partition("[")[0])
        streams: list[OutputStream] = []
        owner, begin = self._client.get(), time.time()
        flow = f"{owner} {num_sequences.bit_length() // _BATCH_BITS}"  # a batch and single prompts take turns
        session, rank = self._placement.get()
        suffix = secrets.token_hex(4)  # clients may repeat the id of a request that has not ended
        num_left, num_logprobs, is_checked = len(prompts), 0, False
        self._submitting[owner] += num_left
        try:
            for index, prompt in enumerate(prompts):
                name = f"{request_id if len(prompts) == 1 else f'{request_id}-{index}'}.{suffix}"
                if index:
                    await asyncio.sleep(0)  # others go on
                try:
                    options: dict[str, Any] = {"owner": owner, "flow": flow, "session": session, "rank": rank}
                    options |= {"is_checked": is_checked, "limit": limit}
                    stream = await self.engine.submit(prompt, params, name, priority or 0, **options)
                    streams.append(stream)
                    params, is_checked = stream.params, True
                    if (each := getattr(params, "prompt_logprobs", None)) is not None:
                        num_logprobs += stream.num_prompt_tokens * (1 + each)
                        if num_logprobs > MAX_PROMPT_LOGPROBS:
                            what = f"is {each}; {MAX_PROMPT_LOGPROBS:,} logprobs of all prompts together are the most"
                            raise FieldError("prompt_logprobs", what, each)
                    self._submitting[owner] -= 1
                    num_left -= 1
                except FieldError as error:
                    if places and is_of_prompt(error):
                        raise _named(error, places[index]) from error
                    raise
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        finally:
            self._submitting[owner] -= num_left
            if not self._submitting[owner]:
                del self._submitting[owner]
        headers, spans = self._headers.get(), {}
        for index in range(len(streams)):
            name = request_id if len(prompts) == 1 else f"{request_id}-{index}"
            if (span := self._tracing.span(headers, name, params, begin)) is not None:
                spans[index] = span
        return RequestOutputs(streams, spans)

    async def check_prompt(self, token_ids: list[int], params: SamplingParams, place: str, limit: Limit) -> int:
        """The most tokens of a prompt's output. Raises ApiError for one that `submit` would refuse.

        ``place``: of the prompt in the body.
        """
        process = functools.partial(self.engine.input_processor.process, params_checked=True)
        try:
            request = await self.work(process, "", {"prompt_token_ids": token_ids}, params)
            check_room(limit, request)
            return request.max_tokens
        except FieldError as error:
            if is_of_prompt(error):
                raise _named(error, place) from error
            raise

    def _check_queue(self, num_prompts: int, field: str) -> None:
        """Raises ApiError 429: the queue is full, or this client's part of it. Clients with few requests have room
        beside one that fills the queue. 400: the prompts of ``field`` do not fit in an empty one."""
        most, mine = self.settings.max_queue, self.settings.max_queue_per_key
        for limit, flag in ((most, "--max-queue"), (mine, "--max-queue-per-key")):
            if limit is not None and num_prompts > limit:
                message = f"{field} has {num_prompts:,} prompts; {limit:,} fit in this server's queue ({flag})"
                raise invalid(field, message)
        client = self._client.get()
        total = self.engine.num_unfinished + self._submitting.total() + num_prompts
        if total <= most and mine is None:
            return
        own, reserve = self.engine.count_of(client) + self._submitting[client] + num_prompts, most // _RESERVED
        if mine is not None and own > mine:
            message = f"{own - num_prompts} requests of this client are unfinished; {mine} are the most"
        elif total > most and (own > reserve or total > most + reserve):
            message = f"{total - num_prompts} requests are unfinished; {most} are the most"
        else:
            return
        raise ApiError(429, message, "queue_full", retry_after=1)

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, without special ones at its ends."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    async def encode(self, text: str, *, special: bool = True, keep: int | None = None) -> list[int]:
        """Token ids of a text, with or without special tokens at its ends.

        ``keep``: how many are needed, the last ones; -1: as many as a prompt has. Raises ApiError, or ValueError, for a
        text that is too long to be tokenized as a whole.
        """
        if keep is not None and len(text) >= LONG_TEXT:
            text = await self.run_native(len(text), self.engine.input_processor.cut, text, keep)
        elif len(text) > self.settings.limits.characters:
            raise over_limit("body", "the characters of the text are", len(text), "characters", self.settings.limits)

        def encode() -> list[int]:
            self.tokenizer.check_parts(text)
            token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
            return token_ids

        return encode() if len(text) < LONG_TEXT else await self.run_native(len(text), encode)

    async def render_chat(self, messages: Sequence[Any], /, keep: int | None = None, **options: Any) -> list[int]:
        """Token ids of a conversation. Raises ValueError: the template or the messages are invalid.

        Args:
            keep: as of `encode`.
            options: of `Tokenizer.apply_chat_template`. A ``chat_template`` that is not the name of one is rendered in
                another process.
        """
        tokenizer, source = self.tokenizer, options.get("chat_template")
        if source is not None and "{" in source:
            return await self._render_apart(messages, keep, **options)
        if source is None:
            options["chat_template"] = self.settings.chat_template

        more = options.pop("tokenizer_kwargs", None) or {}

        def render() -> str:
            text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            return text

        size = sum(_MESSAGE_CHARS + _content_size(message.get("content")) for message in messages)
        text = await self.python.run(self._client.get(), size, render) if size >= LONG_TEXT else await self.work(render)
        return await self.encode(text, special=bool(more.get("add_special_tokens")), keep=keep)

    async def render_apart(
        self,
        template: str,
        conversations: Sequence[Messages],
        variables: Mapping[str, Any] = NO_VARIABLES,
        **options: Any,
    ) -> list[str]:
        """Prompts by a template that a request has brought. Raises ValueError as `template_process.render_apart`."""
        options["variables"] = {**self.tokenizer.special_tokens, **variables}
        async with self._template_processes:
            return await render_apart(template, conversations, options)

    async def _render_apart(
        self,
        messages: Sequence[Any],
        keep: int | None,
        chat_template: str,
        tokenizer_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> list[int]:
        named = {name: options.pop(name) for name in _RENDER_OPTIONS if name in options}
        (text,) = await self.render_apart(chat_template, [messages], **named, variables=options)
        return await self.encode(text, special=bool((tokenizer_kwargs or {}).get("add_special_tokens")), keep=keep)


def _content_size(content: Any) -> int:
    """The characters of a message's text, or of the texts of its parts."""
    if isinstance(content, list):
        return sum(_MESSAGE_CHARS + len(str(part.get("text", ""))) for part in content)
    return len(content) if isinstance(content, str) else 0


def _named(error: FieldError, place: str) -> ApiError:
    """An error of a prompt, by the prompt's name in the body."""
    return ApiError(400, f"{place}: {error}", error.code, place)


def engine_prompt(prompt: str | list[int], cache_salt: str | None = None) -> Any:
    """A prompt of the engine, with the request's salt."""
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    content: Any = {key: prompt, "cache_salt": cache_salt}
    return content


def entry_names(field: str, count: int) -> list[str]:
    """The prompts of a field of the body, which is one prompt or a list."""
    return [field] if count == 1 else [f"{field}[{index}]" for index in range(count)]


def check_stop_strings(field: str, strings: Sequence[str]) -> None:
    """Raises ApiError for stop strings that are empty, or beyond the limits of a request."""
    if len(strings) > MAX_STOP_STRINGS or sum(map(len, strings)) > MAX_STOP_CHARS:
        most = f"{MAX_STOP_STRINGS} of {MAX_STOP_CHARS} characters together are the most"
        raise invalid(field, f"{field} has {len(strings)} strings; {most}")
    if "" in strings:
        raise invalid(field, f"{field} must hold strings that are not empty, got {list(strings)!r:.100}")


def check_completion(completion: CompletionOutput) -> None:
    """Raises ApiError for a sequence that the engine has ended with an error: 400 if that is of its own grammar."""
    if completion.finish_reason == "error":
        raise ApiError(400 if completion.is_unfit else 500, f"the request has failed: {completion.stop_reason}")


def response_size(outputs: Sequence[RequestOutput]) -> int:
    """About the bytes of a response with these outputs."""
    size = 0
    for output in outputs:
        num_bytes = output.num_logprob_bytes() + sum([one.num_logprob_bytes() for one in output.outputs])
        size += num_bytes * _ENTRY_BYTES // 8  # packed, an entry has 8
        for one in output.outputs:
            size += _CHOICE_BYTES + len(one.text)
    return size


class RequestOutputs:
    """The outputs of the prompts of one request, as they come: ``(prompt index, output)``. A completion that has ended
    is not in later outputs."""

    def __init__(self, streams: Sequence[OutputStream], spans: dict[int, RequestSpan] | None = None) -> None:
        self._streams, self._spans = streams, spans or {}
        self.num_prompts = len(streams)
        self._ended: set[tuple[int, int]] = set()

    def listen(self, listener: Callable[[int, Any], bool]) -> None:
        """Call ``listener`` with ``(prompt index, output or exception)``; see `OutputStream.listen`."""
        for index, stream in enumerate(self._streams):
            stream.listen(partial(self._pass, listener, index))

    def _pass(self, listener: Callable[[int, Any], bool], index: int, item: Any) -> bool:
        return listener(index, self._without_ended(index, item))

    def _without_ended(self, index: int, item: Any) -> Any:
        """Deltas of the engine repeat completions that have ended, without text."""
        if self._spans:
            self._trace(index, item)
        if not isinstance(item, RequestOutput) or len(item.outputs) == 1:
            return item
        item.outputs = [one for one in item.outputs if (index, one.index) not in self._ended]
        self._ended.update((index, one.index) for one in item.outputs if one.finish_reason is not None)
        return item

    def _trace(self, index: int, item: Any) -> None:
        if index not in self._spans:
            return
        if isinstance(item, BaseException):
            self._spans.pop(index).fail(str(item))
        elif item.finished:
            self._spans.pop(index).end(item)

    def resume(self) -> None:
        """Call the listener again, after it has returned False."""
        for stream in self._streams:
            stream.resume()

    def close(self) -> None:
        """Abort what is unfinished."""
        for stream in self._streams:
            stream.close()
        while self._spans:
            self._spans.popitem()[1].fail("aborted")

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        if len(self._streams) == 1:
            try:
                async for output in self._streams[0]:
                    yield 0, self._without_ended(0, output)
            except Exception as error:
                self._without_ended(0, error)
                raise
            return
        ready: deque[tuple[int, Any]] = deque()  # at most one item of each stream, which merges further ones
        arrived = asyncio.Event()

        def take(index: int, item: Any) -> bool:
            ready.append((index, item))
            arrived.set()
            return False

        for index, stream in enumerate(self._streams):
            stream.listen(partial(take, index))
        num_left, num_taken = len(self._streams), 0
        while num_left:
            arrived.clear()
            if not ready:
                await arrived.wait()
            elif num_taken % _PART == 0:
                await asyncio.sleep(0)  # others go on
            index, item = ready.popleft()
            num_taken += 1
            output = self._without_ended(index, item)
            if isinstance(item, BaseException):
                raise item
            if item.finished:
                num_left -= 1
            else:
                self._streams[index].resume()
            yield index, output

    async def collect(self) -> list[RequestOutput]:
        """The last output of each prompt; for parameters with `RequestOutputKind.FINAL_ONLY`."""
        try:
            outputs = {index: output async for index, output in self}
        finally:
            self.close()
        return [outputs[index] for index in sorted(outputs)]

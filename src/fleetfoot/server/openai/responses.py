"""``/v1/responses``: conversations that the server can continue."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetfoot.outputs import CompletionOutput, RequestOutput
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.server.conversation import (
    GeneratedMessages,
    MessageChunk,
    Turn,
    generate,
    prompt_token_ids,
)
from fleetfoot.server.conversion import converted
from fleetfoot.server.http import (
    ENCODER,
    JSON,
    ApiError,
    EventStream,
    invalid,
    renamed,
    request_id,
    until_disconnected,
)
from fleetfoot.server.openai.chat import template_options
from fleetfoot.server.openai.events import UsageCounter, token_logprobs
from fleetfoot.server.openai.prompts import read_messages
from fleetfoot.server.openai.protocol import TokenLogprob
from fleetfoot.server.openai.responses_items import Item, chat_messages, find_item, read_items, response_of_item
from fleetfoot.server.openai.responses_output import EventLog, Events, NoEvents, OutputBuilder
from fleetfoot.server.openai.responses_protocol import (
    ENCRYPTED_REASONING,
    FunctionChoice,
    IncompleteDetails,
    InputItems,
    InputItemsQuery,
    InputTokens,
    InputTokensDetails,
    OutputTokensDetails,
    PlainFormat,
    ReasoningConfig,
    ResponseDeleted,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseRequest,
    ResponseUsage,
    RetrieveQuery,
    TextConfig,
)
from fleetfoot.server.openai.structured import naming_constraint
from fleetfoot.server.openapi import READS, RUNS, Endpoint
from fleetfoot.server.service import Service
from fleetfoot.server.store import ResponseStore
from fleetfoot.utils.process import as_exception
from fleetfoot.utils.validation import FieldError, shown

_DECODER = msgspec.json.Decoder(ResponseRequest)
_T = TypeVar("_T")
_PIECE = 256
"""Items of a stored response that are encoded at a time."""


class Responses:
    """The endpoints.

    Args:
        store: keeps responses, as records (`encode_record`).
    """

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service = service
        self._store = store
        self._background: dict[str, asyncio.Task[None]] = {}
        self._logs: dict[str, EventLog] = {}
        """The events of responses that are streamed, and run in the background."""

    async def create(self, http: Request) -> Response:
        service = self._service
        body = await service.read(http, _DECODER)
        service.check_generates()
        key = secrets.token_hex(16)
        items = await self._read_items(body, key)
        name = body.request_id or request_id(http, "resp")
        turn = await service.work(read_turn, body, items, service, name)
        answer = Answer(key, body, service, turn.params, items, self._store)
        with naming_fields(body):
            if body.truncation == "auto":
                turn.messages = await drop_oldest(service, turn)
            generated = await generate(service, turn)
        if body.background:
            queued = await self._run_in_background(answer, generated)
            return EventStream(self._logs[queued.id].read(0)) if body.stream else await self._json(queued)
        if body.stream:
            return EventStream(answer.events(generated))
        return await self._json(await until_disconnected(http, answer.whole(generated)))

    async def _read_items(self, body: ResponseRequest, key: str) -> list[Item]:
        """The whole conversation. Raises ApiError 404 for a response or an item that is not stored."""
        body.check()
        items: list[Item] = []
        if (name := body.previous_response_id) is not None:
            record = await self._record(name, "previous_response_id")
            if record["response"]["status"] == "in_progress":
                message = f"previous_response_id is {shown(name)}, which is still in progress"
                raise invalid("previous_response_id", message, "response_in_progress")
            items += history(record)
        if isinstance(body.input, str):
            return items + await self._service.work(read_items, body.input, key)
        given = list(body.input)
        for index, item in enumerate(given):
            if item.get("type") == "item_reference":
                given[index] = await self._find_item(f"input[{index}].id", item.get("id"))
        return items + await self._service.work(read_items, given, key)

    async def _find_item(self, place: str, name: Any) -> Item:
        response = response_of_item(name) if isinstance(name, str) else None
        if response is None:
            raise invalid(place, f"{place} is {shown(name)}; it must be the id of an item of a stored response")
        return find_item(name, history(await self._record(response, place)))

    async def _record(self, name: str, param: str | None = None) -> Any:
        content = await self._store.get(name)
        if content is None:
            what = f"{param} is {name!r:.100}: the" if param else "the"
            message = f"{what} response {name!r:.100} is not known, or no longer stored"
            raise ApiError(404, message, "previous_response_not_found" if param else "response_not_found", param)
        self._service.add_size(len(content))
        return await self._service.work(decode_record, content)

    async def _json(self, content: Any) -> Response:
        return Response(await self._service.work(ENCODER.encode, content), media_type=JSON.media_type)

    async def _run_in_background(self, answer: Answer, generated: GeneratedMessages) -> ResponseObject:
        response = answer.response
        await answer.keep()
        if isinstance(answer.output_events, EventLog):
            self._logs[response.id] = answer.output_events
        self._background[response.id] = asyncio.create_task(self._finish(answer, generated))
        return msgspec.structs.replace(response, status="queued")

    async def _finish(self, answer: Answer, generated: GeneratedMessages) -> None:
        name = answer.response.id
        work = asyncio.ensure_future(answer.run(generated))
        changed = asyncio.ensure_future(self._store.changed(name))
        await asyncio.wait((work, changed), return_when=asyncio.FIRST_COMPLETED)
        for task in (work, changed):  # a change is a cancel or a delete
            task.cancel()
        await asyncio.gather(work, changed, return_exceptions=True)
        del self._background[name]
        if (log := self._logs.pop(name, None)) is not None:
            log.end()

    async def retrieve(self, http: Request) -> Response:
        name, query = http.path_params["name"], read_query(http, RetrieveQuery)
        record = await self._record(name)
        if not query.stream:
            return await self._json(record["response"])
        begin = 0 if query.starting_after is None else query.starting_after + 1
        if (log := self._logs.get(name)) is not None:
            return EventStream(log.read(begin))
        if record["response"]["status"] == "in_progress":
            message = f"response {name!r} runs in another API server, which has its events until it has ended"
            raise ApiError(409, message, "response_in_progress", "stream", retry_after=1)
        if not record["events"]:
            message = f"response {name!r} was not created with background=true and stream=true: it has no events"
            raise invalid("stream", message)
        return EventStream(_encoded(record["events"][begin:]))

    async def delete(self, http: Request) -> Response:
        name = http.path_params["name"]
        await self._record(name)
        await self._store.delete(name)
        return JSON(ResponseDeleted(name))

    async def cancel(self, http: Request) -> Response:
        record = await self._record(http.path_params["name"])
        response = record["response"]
        if not response["background"]:
            raise invalid("response_id", f"response {response['id']!r} has no background=true: it cannot be cancelled")
        if response["status"] == "in_progress":
            response["status"] = "cancelled"
            content = await self._service.work(encode_record, response, record["items"], record["events"])
            await self._store.put(response["id"], content)
        return await self._json(response)

    async def input_items(self, http: Request) -> Response:
        query = read_query(http, InputItemsQuery)
        items = (await self._record(http.path_params["name"]))["items"]
        if query.order == "desc":
            items = items[::-1]
        names = [item["id"] for item in items]
        if query.after is not None:
            if query.after not in names:
                raise invalid("after", f"after is {shown(query.after)}; it must be the id of an item of the response")
            items = items[names.index(query.after) + 1 :]
        page = items[: query.limit]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return await self._json(InputItems(page, first, last, len(items) > len(page)))

    async def count_input_tokens(self, http: Request) -> Response:
        service = self._service
        body = await service.read(http, _DECODER)
        service.check_generates()
        items = await self._read_items(body, secrets.token_hex(16))
        turn = await service.work(read_turn, body, items, service, "")
        with naming_fields(body):
            return JSON(InputTokens(len(await prompt_token_ids(service, turn))))


def encode_record(response: Any, items: Sequence[Item], events: Sequence[str]) -> bytes:
    """A stored response, its items, with those of the responses before, and its events if it is streamed in the
    background. In MessagePack, which copies texts, and in pieces: an encoder keeps the interpreter for the length of a
    call."""
    pieces = [_pieces(msgspec.msgpack.encode, values) for values in ((response,), items, events)]
    return msgspec.msgpack.encode(pieces)


def decode_record(content: bytes) -> dict[str, Any]:
    """``response``, ``items`` and ``events`` of `encode_record`."""
    decode = msgspec.msgpack.decode
    (response,), items, events = [[one for piece in pieces for one in decode(piece)] for pieces in decode(content)]
    return {"response": response, "items": items, "events": events}


def _pieces(encode: Callable[[Any], bytes], values: Sequence[Any]) -> list[bytes]:
    return [encode(values[begin : begin + _PIECE]) for begin in range(0, len(values), _PIECE)]


def read_query(http: Request, kind: type[_T]) -> _T:
    """The parameters of the query. Raises ApiError that names one."""
    return converted(dict(http.query_params), kind, strict=False)


async def _encoded(events: Sequence[str]) -> AsyncIterator[bytes]:
    for event in events:
        yield event.encode()


def history(record: Any) -> list[Item]:
    """The items of a stored response: of its input and its output. Calls that were cut are left out."""
    is_cut = {"type": "function_call", "status": "incomplete"}.items()
    return [item for item in record["items"] + record["response"]["output"] if not is_cut <= item.items()]


def sampling_params(body: ResponseRequest, service: Service) -> SamplingParams:
    """Raises ValueError."""
    fields: dict[str, Any] = {"max_tokens": body.max_output_tokens, "logprobs": body.num_logprobs}
    if body.constraint is not None:
        fields["structured_outputs"] = body.constraint
    params = body.sampling_params(service.engine.facts.sampling_defaults, **fields)
    if params.logprobs is not None:
        params.output_kind = RequestOutputKind.DELTA  # the logprobs of the text are separated from others in each step
    return params


def read_turn(body: ResponseRequest, items: list[Item], service: Service, name: str) -> Turn:
    """The request without its dialect. Raises ApiError."""
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    choice: Any = body.tool_choice or "auto"
    if isinstance(choice, FunctionChoice):
        choice = {"type": "function", "function": {"name": choice.name}}
    return Turn(
        request_id=name,
        messages=read_messages([*instructions, *chat_messages(items)]),
        params=sampling_params(body, service),
        template=template_options(body),
        effort=body.reasoning.effort if body.reasoning is not None else None,
        verbosity=body.text.verbosity if body.text is not None else None,
        tools=[tool.as_chat_tool() for tool in body.tools or ()],
        tool_choice=msgspec.to_builtins(choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        cache_salt=body.cache_salt,
        priority=body.priority,
        place="input",
        limit=("max_output_tokens", body.max_output_tokens),
    )


@contextlib.contextmanager
def naming_fields(body: ResponseRequest) -> Iterator[None]:
    """Errors about fields in the form of chat completions name those of responses."""
    names = {".function.": ".", ".allowed_tools.": "."}
    if body.constraint is not None:
        names["structured_outputs.json"] = "text.format.schema"
    with naming_constraint(body):
        try:
            yield
        except FieldError as error:
            raise renamed(error, names) from None


async def drop_oldest(service: Service, turn: Turn) -> Sequence[Mapping[str, Any]]:
    """The messages of a turn without its oldest ones, as many as it takes until they and the output fit.

    System messages at the begin stay, and messages are dropped up to one of the user.
    """
    limit = service.engine.facts.max_model_len - (turn.params.max_tokens or 1)
    messages = turn.messages
    roles = [message["role"] for message in messages]
    num_system = next((index for index, role in enumerate(roles) if role != "system"), len(roles))
    begins = [num_system, *(index for index, role in enumerate(roles) if role == "user" and index > num_system)]
    low, high = 0, len(begins) - 1
    while low < high:
        middle = (low + high) // 2
        shorter = replace(turn, messages=[*messages[:num_system], *messages[begins[middle] :]])
        token_ids = await prompt_token_ids(service, shorter)
        low, high = (low, middle) if len(token_ids) <= limit else (middle + 1, high)
    return [*messages[:num_system], *messages[begins[low] :]]


class Answer:
    """The response to one request."""

    def __init__(
        self,
        key: str,
        body: ResponseRequest,
        service: Service,
        params: SamplingParams,
        items: list[Item],
        store: ResponseStore,
    ) -> None:
        self._body = body
        self._service = service
        self._items = items
        self._store = store
        log = EventLog if body.background else Events
        self.output_events = log() if body.stream else NoEvents()
        encrypts = ENCRYPTED_REASONING in (body.include or ())
        self._output = OutputBuilder(key, self.output_events, as_summary=body.has_summary, encrypts=encrypts)
        self._counter = UsageCounter()
        self._is_cut = False
        text = body.text or TextConfig()
        self.response = ResponseObject(
            id=f"resp_{key}",
            created_at=int(time.time()),
            background=bool(body.background),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            model=service.model_name,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            prompt_cache_retention=body.prompt_cache_retention,
            reasoning=body.reasoning or ReasoningConfig(),
            safety_identifier=body.safety_identifier,
            store=body.store is not False,
            temperature=params.temperature,
            text=TextConfig(text.format or PlainFormat(), text.verbosity),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            truncation=body.truncation or "disabled",
            user=body.user,
            metadata=body.metadata or {},
        )

    async def whole(self, generated: GeneratedMessages) -> ResponseObject:
        """The finished response. Raises as `GeneratedMessages`."""
        try:
            async for output, chunks in generated:
                self._add(output, chunks)
        finally:
            generated.close()
        self._complete(generated)
        if self.response.store:
            await self.keep()
        return self.response

    async def run(self, generated: GeneratedMessages) -> None:
        """Finish a response that runs in the background."""
        async for _ in self.events(generated):
            pass

    async def events(self, generated: GeneratedMessages) -> AsyncIterator[bytes]:
        """The finished response is stored before its last event."""
        events, response = self.output_events, self.response
        try:
            for kind in ("response.created", "response.in_progress"):
                await self._add_state(kind)
            yield events.take()
            async for output, chunks in generated:
                self._add(output, chunks)
                if encoded := events.take():
                    yield encoded
            self._complete(generated)
        except BaseException as raised:
            error = ApiError.of(as_exception(raised))
            events.add("error", code=error.code or error.kind, message=error.message, param=error.param)
            self._fail(error)
        finally:
            generated.close()
        await self._add_state(f"response.{response.status}")
        if response.store and (response.background or response.status != "failed"):
            await self.keep()
        yield events.take()

    async def _add_state(self, kind: str) -> None:
        """Add an event with the response, which can be as long as its body."""
        await self._service.work(partial(self.output_events.add, kind, response=self.response))

    def _add(self, output: RequestOutput, chunks: list[MessageChunk]) -> None:
        self._counter.add(0, output)
        for chunk in chunks:
            if chunk.finish_reason == "abort":
                raise ApiError(503, "the request was aborted", "aborted")
            self._output.add(chunk.delta, self._logprobs(chunk.completion))
            self._is_cut = chunk.finish_reason == "length"
        self.response.kv_transfer_params = self._service.kv_transfer_params(output)

    def _complete(self, generated: GeneratedMessages) -> None:
        response = self.response
        response.status = "incomplete" if self._is_cut else "completed"
        self._output.finish(response.status)
        response.output, response.usage = self._output.items, self._usage(generated.num_reasoning_tokens())
        if self._is_cut:
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        else:
            response.completed_at = int(time.time())

    def _fail(self, error: ApiError) -> None:
        codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
        self.response.status = "failed"
        self.response.output = self._output.items
        self.response.error = ResponseError(codes.get(error.status, "server_error"), error.message)

    async def keep(self) -> None:
        """Put the response in the store."""
        events = [event.decode() for event in self.output_events.recorded()]
        content = await self._service.work(encode_record, self.response, self._items, events)
        await self._store.put(self.response.id, content)

    def _usage(self, num_reasoning: int | None) -> ResponseUsage:
        usage = self._counter.usage()
        return ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(min(num_reasoning or 0, usage.completion_tokens)),
            usage.total_tokens,
        )

    def _logprobs(self, completion: CompletionOutput) -> list[TokenLogprob]:
        if completion.each_logprobs() is None:
            return []
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return token_logprobs(completion, self._service.tokenizer, self._body.top_logprobs or 0, as_ids=as_ids)


def responses_endpoints(service: Service, store: ResponseStore) -> list[Endpoint]:
    """Their rows of the table."""
    responses = Responses(service, store)
    path, stored = "/v1/responses", "/v1/responses/{name}"
    return [
        Endpoint(
            *("POST", path, responses.create, "Respond to a conversation."),
            *(ResponseRequest, ResponseObject, ResponseEvent),
            errors=RUNS,
        ),
        Endpoint(
            *("POST", f"{path}/input_tokens", responses.count_input_tokens, "Count the tokens of a conversation."),
            *(ResponseRequest, InputTokens),
            errors=READS,
        ),
        Endpoint(
            *("GET", stored, responses.retrieve, "A stored response."),
            response=ResponseObject,
            events=ResponseEvent,
            query=RetrieveQuery,
            errors=(400, 404, 409),
        ),
        Endpoint(
            *("DELETE", stored, responses.delete, "Delete a stored response."), response=ResponseDeleted, errors=(404,)
        ),
        Endpoint(
            *("POST", f"{stored}/cancel", responses.cancel, "End a response that runs in the background."),
            response=ResponseObject,
            errors=(400, 404),
        ),
        Endpoint(
            *("GET", f"{stored}/input_items", responses.input_items, "The conversation of a stored response."),
            response=InputItems,
            query=InputItemsQuery,
            errors=(400, 404),
        ),
    ]

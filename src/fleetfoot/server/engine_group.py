"""A link to several engines, which takes the place of one: prefill engines compute prompts, decode engines the rest.

A request of an engine that is lost continues on another one, from the tokens that it has. No torch.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from fleetfoot.engine.calls import CALLS
from fleetfoot.engine.input_processor import EngineRequest
from fleetfoot.engine.link import EngineLink, LocalLink, connect
from fleetfoot.engine.wire import (
    Call,
    ClientMessage,
    Dead,
    EngineMessage,
    EngineState,
    Failed,
    Finish,
    Held,
    Interruption,
    Outputs,
    Ready,
    Refused,
    Reply,
)
from fleetfoot.records.request import RequestStatus
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.records.step import EngineOutput, SequenceEnd
from fleetfoot.utils.cluster_key import ClusterKey

logger = logging.getLogger(__name__)

MAX_LOST = 3
"""Engines that a request may lose: it may be the reason."""
_FIRST_NUMBER = 1 << 40
"""The first number of the group's own prompts and calls. Clients count from 0."""
_ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
_JOIN_S = 1.0
"""Seconds from the first decode engine on, in which others are waited for."""
_RETRY_S = 5.0
STUCK_S = 10.0
"""Seconds without a step after which a connected engine gets no further requests."""
_PING_S = 2.0


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Engines with the same model, by the addresses of their sockets (``tcp://HOST:PORT``)."""

    prefill: tuple[str, ...]
    """Engines with role ``kv_producer`` or ``kv_both``; (): decode engines compute prompts, and need no connector."""
    decode: tuple[str, ...]
    """Engines with role ``kv_consumer`` or ``kv_both``."""
    prefill_timeout: float = 60.0
    """Seconds to wait for a prefill engine. Then the decode engine computes the prompt."""
    engine_timeout: float | None = 60.0
    """Seconds that a request waits while no engine can be reached; None: without a limit."""
    key: ClusterKey | None = field(default=None, repr=False)
    """The key of the deployment, for addresses of TCP."""


@dataclass(slots=True, eq=False)
class _Engine:
    """One of the engines, and what it has to do."""

    name: str
    address: str
    is_prefill: bool
    link: EngineLink | LocalLink | None = None
    """None: it is not connected."""
    facts: Ready | None = None
    interruption: str = ""
    refusal: str = ""
    """Why its answers would differ from those of the group; empty: they would not."""
    last_message_ts: float = 0.0
    excused_ts: float = 0.0
    """Until when it need not have given a sign of life."""
    is_asked: bool = False
    """Whether it was asked for a sign of life."""
    is_held: bool = False
    """Whether a call runs between its steps, which may take long."""
    follows: bool = False
    """Whether it was started again, and has yet to be brought to the state of the group."""
    is_stuck: bool = False
    """Whether it has given no sign of life for `STUCK_S`, though it is connected."""
    awaited: int = 0
    """The call that it must answer then: nothing after it is of requests that continue elsewhere."""
    routes: dict[int, _Route] = field(default_factory=dict)
    """By the number of the sequence."""
    prefills: dict[int, asyncio.Future[SequenceEnd]] = field(default_factory=dict)
    calls: dict[int, asyncio.Future[Reply]] = field(default_factory=dict)

    @property
    def is_usable(self) -> bool:
        return not self.problem

    @property
    def problem(self) -> str:
        """Why it serves nothing; empty: it serves."""
        stuck = f"it answers nothing for {STUCK_S:g} s" if self.is_stuck else ""
        lost = "it cannot be reached" if self.link is None else ""
        return self.refusal or lost or self.interruption or stuck

    @property
    def title(self) -> str:
        """The name and the address, in messages."""
        return f"{self.name} at {self.address}"

    @property
    def load(self) -> int:
        return len(self.routes) + len(self.prefills)

    def send(self, message: ClientMessage) -> None:
        """Send a message if the engine is connected."""
        if self.link is not None:
            self.link.send(message)

    def fail(self, error: Exception) -> None:
        """End what waits for a reply."""
        waiting: list[asyncio.Future[Any]] = [*self.prefills.values(), *self.calls.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)


@dataclass(slots=True, eq=False)
class _Route:
    """A request on its way."""

    request: EngineRequest
    tokens: list[list[int] | None]
    """So far, of each sequence; None: it has ended."""
    engine: _Engine | None = None
    """The engine that generates."""
    held: tuple[_Engine, str] | None = None
    """The prefill engine that holds its KV, and the request's id there; None: no KV is held, or it was read."""
    has_offer: bool = False
    """Whether the engine that generates was sent an offer of KV, and has not begun."""
    num_lost: int = 0
    seed_number: int | None = None
    """See `EngineRequest.seed_number`; that of the engine which has generated the first token."""
    task: asyncio.Task[None] | None = None
    """Computes the prompt, and finds an engine."""

    @property
    def unfinished(self) -> Iterator[int]:
        """Numbers of sequences."""
        return (number for number, tokens in enumerate(self.tokens, start=self.request.number) if tokens is not None)

    @property
    def is_resumed(self) -> bool:
        return any(tokens is None or tokens for tokens in self.tokens)

    @property
    def can_load(self) -> bool:
        """Whether a decode engine can load its KV."""
        request = self.request
        is_simple = request.params.n == 1 and request.params.prompt_logprobs is None and request.pooling_params is None
        return is_simple and request.kv_transfer_params is None and not self.is_resumed


class GroupLink:
    """The link; implements `fleetfoot.engine.link.Link`. The facts are those of a decode engine."""

    detects_loss = True
    """Whether an engine without signs of life is lost, though its connection is open."""
    watches = True
    """Whether an engine that is connected and answers nothing gets no requests."""
    sees_work = False
    """Whether a long step on a CPU is told from a halt."""
    no_engine = "no engine can be reached"
    """Why requests wait then."""

    def __init__(self, group: EngineGroup) -> None:
        self._group = group
        self._engines = [_Engine(f"decode-{index}", address, False) for index, address in enumerate(group.decode)]
        self._engines += [_Engine(f"prefill-{index}", address, True) for index, address in enumerate(group.prefill)]
        self._incoming: asyncio.Queue[EngineMessage] = asyncio.Queue()
        self._routes: dict[int, _Route] = {}
        self._numbers = count(_FIRST_NUMBER)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._facts: Ready | None = None
        self._newest: tuple[int, str] | None = None  # version and identity of the weights that answers come from
        self._state: EngineState | None = None  # of an engine with these weights
        self._interruption = Interruption("")
        self._has_started = False
        self._checked_ts = 0.0
        self.counts = dict.fromkeys(("proxy_prefills", "proxy_prefills_failed", "proxy_requests_resumed"), 0)

    async def hello(self) -> Ready:
        """Wait until a decode engine is ready, and for a while until all are. Raises ValueError: an engine has another
        key, or its answers would differ."""
        keepers = [self._begin(self._keep(engine)) for engine in self._engines]
        logger.info("waiting for the engines at %s", ", ".join(engine.address for engine in self._engines))
        deadline: float | None = None
        while self._facts is None or any(engine.link is None for engine in self._engines):
            now = time.monotonic()
            if self._facts is not None:
                deadline = now + _JOIN_S if deadline is None else deadline
                if now >= deadline:
                    break
            timeout = None if deadline is None else deadline - now
            await asyncio.wait((self._changed, *keepers), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            for keeper in keepers:
                if keeper.done():
                    keeper.result()
        self._has_started = True
        if self.watches:
            self._begin(self._watch())
        return self._facts

    def send(self, message: ClientMessage) -> None:
        """Requests are routed, calls go to all engines. The engines do not end with their clients."""
        if isinstance(message, EngineRequest):
            route = _Route(message, [[] for _ in range(message.params.n)])
            self._routes.update(dict.fromkeys(route.unfinished, route))
            route.task = self._begin(self._start(route))
        elif isinstance(message, Finish):
            self._finish(message)
        elif isinstance(message, Call):
            self._begin(self._call(message))

    async def receive(self) -> EngineMessage:
        return await self._incoming.get()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for engine in self._engines:
            if engine.link is not None:
                engine.link.close()
                engine.link = None

    def _begin(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- connections --------------------------------------------------------------------------------------------------

    async def _keep(self, engine: _Engine) -> None:
        """Connect with an engine, again and again."""
        while True:
            link = connect(engine.address, self._group.key, detects_loss=self.detects_loss)
            lost = asyncio.ensure_future(link.lost())
            work = asyncio.ensure_future(self._serve(engine, link))
            try:
                done, _ = await asyncio.wait((lost, work), return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            except (ValueError, msgspec.MsgspecError) as error:
                if not self._has_started:
                    raise
                engine.refusal = str(error)
                self._update()
                logger.error("the engine %s cannot be used: %s", engine.name, error)
                await asyncio.sleep(_RETRY_S)
            finally:
                for task in (lost, work):
                    task.cancel()
                if engine.link is link:
                    self._leave(engine)
                link.close(linger=0)

    async def _serve(self, engine: _Engine, link: EngineLink | LocalLink) -> None:
        """Take the messages of an engine until it fails."""
        facts = await link.hello()
        self._check_transfers(engine, facts)
        self._check_settings(engine, facts)
        is_back = engine.facts is not None
        engine.link, engine.facts, engine.interruption, engine.refusal = link, facts, "", ""
        engine.is_held = False
        engine.follows = is_back and self._differs(engine)
        self._note_progress(engine)
        logger.info("the engine %s is connected", engine.title)
        self._learn(engine, facts)
        for one in self._engines:
            if one.link is not None and one.refusal:
                self._begin(self._catch_up(one))
        while not isinstance(message := await link.receive(), Dead):
            self._take(engine, message)
        self._report_failure(engine, message)

    def _report_failure(self, engine: _Engine, message: Dead) -> None:
        logger.error("the engine %s has failed: %s", engine.name, message.text)

    async def _watch(self) -> None:
        while True:
            self.check_progress(time.monotonic())
            await asyncio.sleep(_PING_S)

    def check_progress(self, now: float) -> None:
        """Ask engines that are quiet for a sign of life, which they give between two steps. One that gives none is not
        used until it does."""
        is_late = now - self._checked_ts > 3 * _PING_S  # this process has not run, and messages may wait
        self._checked_ts = now
        for engine in self._engines:
            if is_late:
                engine.excused_ts = now
            quiet = now - max(engine.last_message_ts, engine.excused_ts)
            if engine.link is None or engine.is_held or quiet < _PING_S:
                continue
            if not engine.is_asked:
                engine.is_asked = True
                engine.send(Call(next(self._numbers), "ping", []))
            elif self._works(engine, now):
                engine.excused_ts = now
            elif quiet >= STUCK_S and not engine.is_stuck:
                self._set_aside(engine)

    def _works(self, engine: _Engine, now: float) -> bool:
        """Whether an engine that gives no sign of life is known to compute."""
        return False

    def _set_aside(self, engine: _Engine) -> None:
        """An engine is stuck. Its requests continue elsewhere, unless it may be computing them."""
        engine.is_stuck, engine.awaited = True, next(self._numbers)
        is_on_cpu = engine.facts is not None and engine.facts.computes_on_cpu
        message = "the engine %s has taken no step for %.0f s, and gets no requests; %d continue elsewhere"
        moved: list[_Route] = []
        if self.sees_work or not is_on_cpu:
            moved = [*dict.fromkeys(engine.routes.values())]
            for number in engine.routes:
                engine.send(Finish(number, int(RequestStatus.FINISHED_ABORTED)))
            engine.routes.clear()
            engine.fail(RuntimeError(f"the engine {engine.name} is stuck"))
        engine.send(Call(engine.awaited, "ping", []))
        logger.error(message, engine.title, STUCK_S, len(moved))
        self._update()
        for route in moved:
            self._resume(route)

    def _note_progress(self, engine: _Engine, message: EngineMessage | None = None) -> None:
        engine.last_message_ts, engine.is_asked = time.monotonic(), False
        if engine.is_stuck and (message is None or (isinstance(message, Reply) and message.number == engine.awaited)):
            engine.is_stuck = False
            logger.warning("the engine %s goes on", engine.title)
            self._update()

    def _check_transfers(self, engine: _Engine, facts: Ready) -> None:
        """Raises ValueError: with prefill engines, the engine has no part in handing KV over."""
        part, role = ("hands over", "kv_producer") if engine.is_prefill else ("takes over", "kv_consumer")
        if self._group.prefill and facts.kv_role not in (role, "kv_both"):
            raise ValueError(
                f"the engine {engine.title} never {part} KV: its kv_connector is {facts.kv_connector!r}, and its "
                f"role for kv_transfer_params {facts.kv_role!r}; start it with NixlConnector and {role}, or the "
                "proxy without prefill engines"
            )

    def _check_settings(self, engine: _Engine, facts: Ready) -> None:
        """Raises ValueError: its answers would differ from those of another engine."""
        ours = _settings_of(facts)
        for other in self._engines:
            if other.facts is None:
                continue
            theirs = _settings_of(other.facts)
            if other is engine:  # started again; it may have less room for KV, and refuses what does not fit
                del theirs["max_model_len"]
            if facts.weight_version != other.facts.weight_version:
                theirs["weights"] = ours["weights"]  # see `_compare_weights`
            found = [
                f"{name} is {theirs[name]!r} of {other.name}, and {value!r} of {engine.name}"
                for name, value in ours.items()
                if name in theirs and theirs[name] != value
            ]
            if found:
                raise ValueError(
                    f"the engines {other.title} ({other.facts.model}) and {engine.title} ({facts.model}) would answer "
                    f"differently: {'; '.join(found)}; start all engines of a proxy with the same settings and weights"
                )

    def _differs(self, engine: _Engine) -> bool:
        """Whether calls have made something else of the group than of an engine."""
        ours, facts = self._state, engine.facts
        return not (ours is None or facts is None or _suspension(facts.state) == _suspension(ours))

    def _learn(self, engine: _Engine, facts: Ready) -> None:
        """An engine has come, or has changed."""
        engine.facts = facts
        self._compare_weights()
        if not engine.refusal:
            self._state = facts.state
        if self._facts is None and not engine.is_prefill:
            self._facts = facts
        elif not engine.is_prefill and not engine.refusal:
            self._incoming.put_nowait(facts)

    def _compare_weights(self) -> None:
        """Engines have come, or have other weights: only those with the newest ones are used."""
        connected = [(engine, engine.facts) for engine in self._engines if engine.link is not None and engine.facts]
        for _, facts in connected:
            if self._newest is None or facts.weight_version > self._newest[0]:
                self._newest = facts.weight_version, facts.weights
        for engine, facts in connected:
            refusal = ""
            if (facts.weight_version, facts.weights) != self._newest:
                assert self._newest is not None
                refusal = (
                    f"the engine {engine.title} has weights of version {facts.weight_version} ({facts.weights}), and "
                    f"answers are of version {self._newest[0]} ({self._newest[1]}); it is not used"
                )
                if refusal != engine.refusal:
                    logger.warning("%s", refusal)
            elif engine.follows:
                refusal = f"the engine {engine.title} has lost what calls had made of it"
            elif engine.refusal:
                logger.info("the engine %s has the weights of the group, and is used", engine.title)
            engine.refusal = refusal
        self._update()

    async def _catch_up(self, engine: _Engine) -> None:
        """Give an engine with earlier weights, or one that was started again, the state of the group."""
        state, facts = self._state, engine.facts
        if state is None or facts is None:
            return
        if state.has_own_weights and state.weight_version > facts.weight_version:
            message = "the engine %s needs weights that this proxy cannot give it: start it with them, or update all"
            logger.error(message, engine.title)
            return
        try:
            await self._ask(engine, Call(0, "bring_to", [state]))
        except (ValueError, TypeError, RuntimeError) as error:
            logger.error("the engine %s does not take the state of the group: %s", engine.title, error)
        else:
            engine.follows = False
            self._learn(engine, engine.facts or facts)

    def _leave(self, engine: _Engine) -> None:
        """An engine is lost."""
        routes = list(dict.fromkeys(engine.routes.values()))
        logger.warning("the engine %s is lost; %d requests continue elsewhere", engine.title, len(routes))
        engine.link, engine.refusal = None, ""
        engine.fail(RuntimeError(f"the connection with the engine {engine.name} is lost"))
        engine.routes.clear()
        self._update()
        for route in routes:
            self._resume(route)

    def _update(self) -> None:
        """Engines have come or gone: wake up what waits, and tell the client whether requests wait."""
        self._changed.set_result(None)
        self._changed = asyncio.get_running_loop().create_future()
        concerned = [engine for engine in self._engines if engine.link is not None or engine.refusal]
        reasons = [engine.problem for engine in concerned]
        reason = "" if any(engine.is_usable for engine in self._engines) else next(iter(reasons), self.no_engine)
        state = Interruption(reason, "; ".join(f"{one.title}: {one.problem}" for one in self._engines if one.problem))
        if state != self._interruption:
            self._interruption = state
            self._incoming.put_nowait(state)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _start(self, route: _Route) -> None:
        decodes = any(engine.is_usable and not engine.is_prefill for engine in self._engines)
        has_prefill = bool(self._group.prefill) and decodes
        transfer = await self._prefill(route) if has_prefill and route.can_load else None
        try:
            async with asyncio.timeout(self._group.engine_timeout):
                while (engine := self._generating_engine(route.request)) is None:
                    await asyncio.shield(self._changed)
        except TimeoutError:
            self._incoming.put_nowait(Refused(route.request.number, Failed("EngineDeadError", self.no_engine)))
            self._forget(route)
            return
        route.engine = engine
        engine.routes.update(dict.fromkeys(route.unfinished, route))
        request = route.request
        if engine.is_prefill:  # it has the KV in its prefix cache, and loads none
            self._release(route)
            transfer = None
        route.has_offer = transfer is not None
        if transfer is not None:
            request = msgspec.structs.replace(request, kv_transfer_params=transfer)
        elif route.is_resumed:
            request = msgspec.structs.replace(
                request, kv_transfer_params=None, resumed=route.tokens, seed_number=route.seed_number
            )
        try:
            engine.send(request)
        except ValueError as error:
            route.has_offer = False
            self._refuse(engine, Refused(request.number, Failed.of(error)))

    def _generating_engine(self, request: EngineRequest) -> _Engine | None:
        """The least busy decode engine; without any, a prefill engine."""
        usable = [engine for engine in self._engines if engine.is_usable]
        return min(usable, key=lambda engine: (engine.is_prefill, engine.load), default=None)

    async def _prefill(self, route: _Route) -> dict[str, Any] | None:
        """Let a prefill engine compute the prompt. Returns the ``kv_transfer_params`` with which a decode engine loads
        the KV; None: the decode engine computes the prompt."""
        usable = [engine for engine in self._engines if engine.is_prefill and engine.is_usable]
        if not usable:
            self.counts["proxy_prefills_failed"] += 1
            return None
        engine, number = min(usable, key=lambda engine: engine.load), next(self._numbers)
        # KV may be held for longer than the request lasts, and the id may be used again
        name = f"{route.request.request_id}-{secrets.token_hex(4)}"
        future = engine.prefills[number] = asyncio.get_running_loop().create_future()
        route.held = engine, name
        try:
            engine.send(_prefill_request(route.request, number, name))
            async with asyncio.timeout(self._group.prefill_timeout):
                end = await future
            if end.status >= RequestStatus.FINISHED_ERROR:
                raise RuntimeError(f"the prefill engine failed: {end.stop_reason}")
        except Exception as error:
            self._release(route)
            self.counts["proxy_prefills_failed"] += 1
            reason = str(error) or f"it took longer than {self._group.prefill_timeout:g} s"
            logger.warning("request %r goes without prefill: %s", route.request.request_id, reason)
            return None
        finally:
            del engine.prefills[number]
        if end.kv_transfer_output is None:
            route.held = None
        else:
            self.counts["proxy_prefills"] += 1
        return end.kv_transfer_output

    def _release(self, route: _Route) -> None:
        """KV that is held for a request, or computed, is not needed."""
        if route.held is not None:
            engine, name = route.held
            route.held = None
            engine.send(Call(next(self._numbers), "abort_requests", [[name]]))

    def _resume(self, route: _Route) -> None:
        """The engine that generates is lost, or stuck."""
        self._release(route)
        route.engine = None
        route.num_lost += 1
        self.counts["proxy_requests_resumed"] += 1
        if route.num_lost < MAX_LOST:
            route.task = self._begin(self._start(route))
            return
        reason = f"{MAX_LOST} engines were lost while they computed this request"
        end = SequenceEnd(int(RequestStatus.FINISHED_ERROR), reason, 0, 0, 0, 0.0, None, None)
        self._put_outputs([EngineOutput(number, [], end=end) for number in route.unfinished], 0)
        self._forget(route)

    def _finish(self, message: Finish) -> None:
        """The client ends a sequence."""
        route = self._routes.pop(message.number, None)
        if route is None:
            return
        route.tokens[message.number - route.request.number] = None
        if route.engine is not None:
            route.engine.routes.pop(message.number, None)
            route.engine.send(message)
        elif next(route.unfinished, None) is None:
            self._forget(route)

    def _forget(self, route: _Route) -> None:
        if route.task is not None and route.task is not asyncio.current_task():
            route.task.cancel()
        self._release(route)
        for number in range(route.request.number, route.request.number + len(route.tokens)):
            self._routes.pop(number, None)

    # --- messages of the engines --------------------------------------------------------------------------------------

    def _take(self, engine: _Engine, message: EngineMessage) -> None:
        self._note_progress(engine, message)
        if isinstance(message, Outputs):
            self._take_outputs(engine, message)
        elif isinstance(message, Refused):
            self._refuse(engine, message)
        elif isinstance(message, Reply):
            if (future := engine.calls.get(message.number)) is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, Interruption):
            engine.interruption = message.reason
            self._update()
        elif isinstance(message, Held):
            engine.is_held = message.is_held
        elif isinstance(message, Ready):
            self._learn(engine, message)

    def _take_outputs(self, engine: _Engine, message: Outputs) -> None:
        kept = []
        for tokens in message.tokens:
            if (prefill := engine.prefills.get(tokens.number)) is not None:
                if tokens.end is not None and not prefill.done():
                    prefill.set_result(tokens.end)
                continue
            route = engine.routes.get(tokens.number)
            if route is None:
                continue  # the client has ended it
            route.held, route.has_offer = None, False  # the engine has loaded the KV
            index = tokens.number - route.request.number
            so_far = route.tokens[index]
            assert so_far is not None
            so_far += tokens.new_token_ids
            if tokens.seed_number >= 0:
                route.seed_number = tokens.seed_number
            if tokens.end is not None:
                route.tokens[index] = None
                del self._routes[tokens.number], engine.routes[tokens.number]
            kept.append(tokens)
        self._put_outputs(kept, message.weight_version)

    def _put_outputs(self, tokens: list[EngineOutput], weight_version: int) -> None:
        if tokens:  # with the time of this machine
            self._incoming.put_nowait(Outputs(time.perf_counter(), tokens, weight_version))

    def _refuse(self, engine: _Engine, message: Refused) -> None:
        if (prefill := engine.prefills.get(message.number)) is not None:
            if not prefill.done():
                prefill.set_exception(message.error.as_error())
            return
        route = engine.routes.get(message.number)
        if route is not None and route.has_offer:  # it may be the offer that is refused, and not the client's request
            route.has_offer = False
            self._release(route)
            self.counts["proxy_prefills_failed"] += 1
            text = "the engine %s refuses request %r with KV of a prefill engine, and gets it without: %s"
            logger.warning(text, engine.name, route.request.request_id, message.error.text)
            engine.send(route.request)
        elif route is not None:
            for number in route.unfinished:
                engine.routes.pop(number, None)
            self._forget(route)
            self._incoming.put_nowait(message)

    # --- calls --------------------------------------------------------------------------------------------------------

    async def _call(self, call: Call) -> None:
        """Call all engines that are connected. The result is that of the first one, or of all where they differ, or the
        first error."""
        engines = [engine for engine in self._engines if engine.link is not None]
        call = _unwrapped(call)
        row = CALLS[call.method]
        if row.is_update:
            call = self._with_version(call)
            if call.method != "reload_weights":  # patches are of the newest weights
                engines = [engine for engine in engines if not engine.refusal]
        if row.group == "each":
            engines = [engine for engine in engines if not engine.is_stuck]
        if row.group == "one":
            engines = [engine for engine in engines if engine.is_usable][:1]
        try:
            if row.group == "none":
                raise ValueError(f"{call.method} is not supported through a proxy; call each engine")
            replies = await asyncio.gather(*(self._ask(engine, call) for engine in engines))
            if not replies:
                raise RuntimeError(self.no_engine)
            value = replies[0]
            if row.group == "each":
                names = [engine.name for engine in engines]
                value = [{**reply, "engine": name} for name, reply in zip(names, replies, strict=True)]
            if call.method == "metrics":
                gauges = {
                    "proxy_engines_refused": sum(bool(engine.refusal) for engine in self._engines),
                    "proxy_engines_unavailable": sum(not engine.is_usable for engine in self._engines),
                }
                value.append({"engine": "proxy", "counters": self.counts, "gauges": gauges})
            elif row.group == "joined":
                value = list(dict.fromkeys(name for names in replies for name in names))
            self._incoming.put_nowait(Reply(call.number, value))
        except (ValueError, TypeError, RuntimeError) as error:
            self._incoming.put_nowait(Reply(call.number, error=Failed.of(error)))
        for engine in self._engines:
            if engine.link is not None and engine not in engines and row.changes:  # it came meanwhile
                engine.follows = self._differs(engine)
                self._compare_weights()
                if engine.refusal:
                    self._begin(self._catch_up(engine))

    def _with_version(self, call: Call) -> Call:
        """An update with a version, the same for all engines: only then are their weights known to be the same."""
        if call.keywords.get("weight_version") is not None:
            return call
        version = 1 + (0 if self._newest is None else self._newest[0])
        return msgspec.structs.replace(call, keywords={**call.keywords, "weight_version": version})

    async def _ask(self, engine: _Engine, call: Call) -> Any:
        number = next(self._numbers)
        future = engine.calls[number] = asyncio.get_running_loop().create_future()
        engine.send(msgspec.structs.replace(call, number=number))
        try:
            reply = await future
        finally:
            del engine.calls[number]
        if reply.error is not None:
            raise reply.error.as_error()
        return reply.value


def _settings_of(facts: Ready) -> dict[str, Any]:
    """All that answers depend on, the weights included."""
    names = "vocab_size", "eos_token_ids", "pooling", "max_model_len", "max_logprobs", "has_priority"
    found = {name: getattr(facts, name) for name in (*names, "sampling_defaults", "weights")}
    return {**found, **facts.settings}


def _suspension(state: EngineState) -> tuple[Any, ...]:
    """What calls have made of an engine besides its weights."""
    return state.settings, state.is_paused, state.asleep


def _unwrapped(call: Call) -> Call:
    """An update by ``collective_rpc`` as the call of its method."""
    names = "method", "timeout", "args", "kwargs"
    given = (
        {**dict(zip(names, call.arguments, strict=False)), **call.keywords} if call.method == "collective_rpc" else {}
    )
    row = CALLS.get(given.get("method", ""))
    if row is None or not (row.is_update or row.group == "none"):
        return call
    return Call(call.number, given["method"], list(given.get("args") or ()), dict(given.get("kwargs") or {}))


def _prefill_request(request: EngineRequest, number: int, name: str) -> EngineRequest:
    """Computes the prompt, and one token that is discarded; the KV is held for a decode engine."""
    return msgspec.structs.replace(
        request,
        number=number,
        request_id=name,
        params=_ONE_TOKEN,
        max_tokens=1,
        bad_words_token_ids=[],
        kv_transfer_params={"do_remote_decode": True},
    )

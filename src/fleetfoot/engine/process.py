"""The process of an engine that serves clients in other processes, such as API servers.

It schedules and runs steps. Clients validate, tokenize and detokenize, so none of that delays a step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
import traceback
from concurrent.futures import Future
from typing import Any

import msgspec
import zmq

from fleetfoot.engine import wire
from fleetfoot.engine.calls import CALLS
from fleetfoot.engine.engine import LLMEngine, build_engine
from fleetfoot.engine.input_processor import EngineRequest
from fleetfoot.engine.local_server import SCHEME, LocalServer
from fleetfoot.engine.output_router import OutputRouter
from fleetfoot.engine.remote_calls import RemoteCalls, bring_to, state_of
from fleetfoot.plan.forced_runner import begin_forcing
from fleetfoot.plan.output_settings import output_settings
from fleetfoot.records.structured_outputs import as_structured_outputs
from fleetfoot.utils.curve import KeyPair, frames_of, listen_with, message_of
from fleetfoot.utils.logs import log_to_stderr
from fleetfoot.utils.process import as_exception, error_text, tune_collections
from fleetfoot.utils.progress import loading_bar
from fleetfoot.utils.validation import FieldError

logger = logging.getLogger(__name__)

MOST_ADDED = 16
"""Requests that are added at a time, 2 ms of work: a step waits for it, and thousands may have arrived."""
MOST_READ = 256
"""Messages that are read at a time, 10 ms of work: calls and small requests may be after thousands of a batch."""


class Arrivals:
    """Requests that have been read, and are not added to the engine yet. Flows take turns."""

    def __init__(self) -> None:
        self._flows: dict[str, dict[tuple[bytes, int], EngineRequest]] = {}  # by client and first number
        self._first: dict[tuple[bytes, int], tuple[str, int]] = {}  # of each sequence: its flow and first number

    def __bool__(self) -> bool:
        return bool(self._flows)

    def put(self, client: bytes, message: EngineRequest) -> None:
        self._flows.setdefault(message.flow, {})[client, message.number] = message
        for number in range(message.number, message.number + message.params.n):
            self._first[client, number] = message.flow, message.number

    def pop(self) -> tuple[bytes, EngineRequest]:
        """The first request of the flow whose turn it is."""
        client, number = next(iter(next(iter(self._flows.values()))))
        message = self.remove(client, number)
        assert message is not None
        if (others := self._flows.pop(message.flow, None)) is not None:
            self._flows[message.flow] = others
        return client, message

    def remove(self, client: bytes, number: int) -> EngineRequest | None:
        """Remove the request of a client's sequence; None: there is none."""
        if (found := self._first.get((client, number))) is None:
            return None
        flow, first = found
        message = self._flows[flow].pop((client, first))
        for number in range(first, first + message.params.n):
            del self._first[client, number]
        if not self._flows[flow]:
            del self._flows[flow]
        return message


class EngineServer:
    """The loop of an engine's process: messages in, steps, messages out.

    Args:
        engine: with an `OutputRouter`.
        socket: that clients connect with.
        lifeline: a file descriptor; data or its end of file stops the loop.
        can_stop: whether clients can stop the engine.
    """

    def __init__(
        self, engine: LLMEngine, socket: LocalServer | RemoteServer, lifeline: int, *, can_stop: bool = True
    ) -> None:
        router: Any = engine.output_processor
        self._engine = engine
        self._router: OutputRouter = router
        self._socket = socket
        self._lifeline = lifeline
        self._can_stop = can_stop
        self._clients: set[bytes] = set()
        self._stopping = False
        self._encode, self._decode = wire.encoder().encode, wire.decode_as(wire.ClientMessage)
        engine.watch_restarts(self._report_restart)
        engine.watch_holds(lambda is_held: self._send_all(wire.Held(is_held)))
        self._calls = RemoteCalls(engine, self._announce)
        self._settings = output_settings(engine.plan)
        if not can_stop:  # a proxy compares it with others
            engine.live.state_identity()
        self._facts = self._current_facts()
        self._poller = zmq.Poller()
        self._poller.register(socket.pollable, zmq.POLLIN)
        self._poller.register(lifeline, zmq.POLLIN)
        self._arrivals = Arrivals()
        self._compiling: list[tuple[Future[Any], bytes, EngineRequest | wire.Call]] = []
        self._compiled, self._note_compiled = os.pipe()  # a byte for each grammar
        self._poller.register(self._compiled, zmq.POLLIN)

    def run(self) -> int:
        """Serve until the clients stop it. Returns the exit code of the process."""
        engine = self._engine
        try:
            while not self._stopping:
                has_work = engine.can_step or engine.has_transfers()
                self._receive(wait=not (has_work or self._arrivals))
                if has_work or engine.can_step:
                    messages: list[Any] = engine.step(self._receive)
                    for client, message in messages:
                        self._send(client, message)
                if not self._arrivals:
                    self._calls.finish_drains()
        except Exception as error:
            logger.exception("the engine has failed")
            cause = error.__cause__ or error
            self._send_all(wire.Dead(f"{type(cause).__name__}: {cause}", traceback.format_exc()))
            return 1
        return 0

    def _receive(self, *, wait: bool = False) -> None:
        """Handle the messages that have arrived, and add up to `MOST_ADDED` requests; with ``wait`` wait for a message,
        or for the end of the lifeline."""
        ready = dict(self._poller.poll(None if wait and not self._socket.has_more else 0))
        if self._lifeline in ready:
            self._stopping = True
        if self._compiled in ready:
            os.read(self._compiled, 4096)
            done = [waiting for waiting in self._compiling if waiting[0].done()]
            self._compiling = [waiting for waiting in self._compiling if not waiting[0].done()]
            for future, client, message in done:
                if isinstance(message, wire.Call):
                    self._report_compiled(client, message, future)
                else:
                    self._submit(client, message)
        self._read()
        for _ in range(MOST_ADDED):  # others wait for the next step
            if self._arrivals:
                self._add(*self._arrivals.pop())

    def _read(self) -> None:
        for _ in range(MOST_READ):
            if (arrived := self._socket.receive()) is None:
                return
            client, content = arrived
            try:
                message = self._decode(content)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                logger.warning("data that is no message of a client is ignored: %s", error)
                continue
            if client in self._clients or isinstance(message, wire.Hello):
                self._handle(client, message)

    def _handle(self, client: bytes, message: wire.ClientMessage) -> None:
        if isinstance(message, EngineRequest):
            self._arrivals.put(client, message)
        elif isinstance(message, wire.Finish):
            self._arrivals.remove(client, message.number)
            self._router.finish(client, message)
            self._compiling = [
                waiting for waiting in self._compiling if not _is_of(message.number, client, *waiting[1:])
            ]
        elif isinstance(message, wire.Call):
            self._call(client, message)
        elif isinstance(message, wire.Hello):
            self._clients.add(client)
            self._send(client, self._facts)
        else:
            self._stopping = self._can_stop

    def _current_facts(self) -> wire.Ready:
        return facts(self._engine, self._settings)

    def _add(self, client: bytes, message: EngineRequest) -> None:
        """Queue a request; one with a grammar that is not compiled yet, when it is."""
        structured = message.params.structured_outputs
        future = None
        if structured is not None:
            with contextlib.suppress(ValueError):  # which `_submit` reports
                future = self._engine.input_processor.grammars.submit(structured)
        if future is None or future.done():
            self._submit(client, message)
        else:
            self._wait_for(future, client, message)

    def _wait_for(self, future: Future[Any], client: bytes, message: EngineRequest | wire.Call) -> None:
        """Go on with a message when its grammar is compiled."""
        self._compiling.append((future, client, message))
        future.add_done_callback(lambda _: os.write(self._note_compiled, b"."))

    def _report_compiled(self, client: bytes, call: wire.Call, future: Future[Any]) -> None:
        error = future.exception()
        self._send(client, wire.Reply(call.number, error=None if error is None else wire.Failed.of(error)))

    def _submit(self, client: bytes, message: EngineRequest) -> None:
        if client not in self._clients:
            return  # it has gone away while the grammar was compiled
        try:
            self._engine.check_request_id(message.request_id)
            self._engine.input_processor.check_further(message.params)  # clients have no logits processors
            message.client = client
            self._engine.submit(message)
        except (ValueError, TypeError) as error:
            self._send(client, wire.Refused(message.number, wire.Failed.of(error)))
        except BaseException as error:
            if isinstance(error, Exception):
                raise
            failed = as_exception(error)
            logger.error("request %r has failed", message.request_id, exc_info=failed)
            self._send(client, wire.Refused(message.number, wire.Failed.of(failed)))

    def _call(self, client: bytes, call: wire.Call) -> None:
        if (row := CALLS.get(call.method)) is None:
            unknown = FieldError("method", f"is {call.method!r}; the engine has no such call", call.method)
            self._send(client, wire.Reply(call.number, error=wire.Failed.of(unknown)))
        elif call.method == "compile_grammar":
            try:
                structured = as_structured_outputs(*call.arguments)
                assert structured is not None
                self._wait_for(self._engine.input_processor.grammars.submit(structured), client, call)
            except (ValueError, TypeError) as error:
                self._send(client, wire.Reply(call.number, error=wire.Failed.of(error)))
        else:
            while row.runs != "at once" and self._arrivals:  # it concerns requests that came before
                self._add(*self._arrivals.pop())
            self._calls.run(call, lambda reply: self._send(client, reply))

    def _announce(self) -> None:
        """Send the engine's facts to all clients if they have changed."""
        current = self._current_facts()
        if current != self._facts:
            self._facts = current
            self._send_all(current)

    def _report_restart(self, is_restarting: bool) -> None:
        reason = "the engine restarts its workers after an error" if is_restarting else ""
        self._send_all(wire.Interruption(reason))

    def _send(self, client: bytes, message: wire.EngineMessage) -> None:
        if client not in self._clients:
            return
        if not self._socket.send(client, self._encode(message)):
            self._clients.discard(client)
            logger.warning("a client of the engine has gone away; its requests are aborted")
            self._router.drop(client)

    def _send_all(self, message: wire.EngineMessage) -> None:
        for client in list(self._clients):
            self._send(client, message)


class RemoteServer:
    """As `LocalServer`, for clients of other machines: they must have the key, and a connection without signs of life
    is closed. ``pollable`` is to be bound."""

    has_more = False

    def __init__(self, context: zmq.Context[Any], keys: KeyPair) -> None:
        socket = self.pollable = context.socket(zmq.ROUTER)
        socket.set_hwm(0)
        socket.linger = 1000
        socket.router_mandatory = 1  # sending raises EHOSTUNREACH for a client that is gone
        listen_with(socket, keys)
        socket.heartbeat_ivl, socket.heartbeat_timeout = wire.HEARTBEAT_MS, 5 * wire.HEARTBEAT_MS

    def receive(self) -> tuple[bytes, bytes] | None:
        try:
            client, *frames = self.pollable.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return client, message_of(frames)

    def send(self, client: bytes, message: bytes) -> bool:
        try:
            self.pollable.send_multipart((client, *frames_of(message)))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True


def _is_of(number: int, client: bytes, owner: bytes, message: EngineRequest | wire.Call) -> bool:
    """Whether a client's sequence belongs to a request that waits for its grammar."""
    if isinstance(message, wire.Call):
        return False
    return owner == client and 0 <= number - message.number < message.params.n


def facts(engine: LLMEngine, settings: dict[str, str]) -> wire.Ready:
    """What clients need to validate requests, and to compare engines. ``settings``: `output_settings`."""
    plan, inputs, scheduling = engine.plan, engine.input_processor, engine.core.scheduler.config
    connector, takes_params = plan.connector, engine.core.scheduler.transfers.connector.takes_params
    return wire.Ready(
        pid=os.getpid(),
        model=plan.config.model,
        model_path=str(plan.model_path),
        tokenizer_path=None if plan.tokenizer_path is None else str(plan.tokenizer_path),
        vocab_size=inputs.vocab_size,
        max_model_len=inputs.max_model_len,
        num_kv_tokens=scheduling.most_tokens,
        eos_token_ids=sorted(inputs.eos_token_ids),
        max_logprobs=inputs.max_logprobs,
        has_priority=scheduling.priority,
        sampling_defaults=inputs.sampling_defaults,
        pooling=inputs.pooling,
        runner_name=engine.runner_name,
        state=state_of(engine),
        computes_on_cpu=plan.device == "cpu",
        settings=settings,
        weights=engine.live.stated_identity,
        weight_version=engine.live.version,
        kv_connector=None if connector is None else connector.config.kv_connector,
        kv_role=connector.config.kv_role if connector is not None and takes_params else None,
    )


def main() -> int:
    """Run an engine for the parent process, until a client stops it or standard input ends."""
    settings: wire.ProcessSettings = pickle.load(sys.stdin.buffer)
    for number in wire.ENGINE_IGNORES:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wire.ENGINE_IGNORES)  # for its workers
    with log_to_stderr(settings.log_level, settings.log_format):
        return _run(settings)


def _run(settings: wire.ProcessSettings) -> int:
    if settings.forced_runner is not None:
        begin_forcing(settings.forced_runner)
    try:
        with loading_bar(is_shown=sys.stderr.isatty() and settings.log_format == "text"):
            engine = build_engine(settings.config, output_processor=OutputRouter)
    except Exception as error:
        print(f"fleetfoot: error: {error_text(error)}", file=sys.stderr)
        logger.debug("the engine does not start", exc_info=True)
        return 2 if isinstance(error, ValueError | TypeError | FileNotFoundError) else 1
    if (state := settings.state) is not None:
        try:
            engine.run_held(lambda: bring_to(engine, state))
        except Exception as error:
            problem = "the new process cannot be as the one before"
            print(f"fleetfoot: error: {problem}: {error_text(error)}", file=sys.stderr)
            engine.shutdown()
            return wire.EXIT_OTHER_STATE
    tune_collections()
    with contextlib.closing(LocalServer(settings.address.removeprefix(SCHEME))) as server:
        exit_code = EngineServer(engine, server, sys.stdin.fileno()).run()
        engine.shutdown()
    return exit_code


if __name__ == "__main__":
    sys.exit(main())

"""The process of an engine that serves clients in other processes, such as API servers.

It schedules and runs steps. Clients validate, tokenize and detokenize, so none of that delays a step.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import pickle
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from fleetfoot.engine.engine import LLMEngine, build_engine
from fleetfoot.engine.input_processor import EngineRequest
from fleetfoot.engine.remote_calls import RemoteCalls
from fleetfoot.engine.stats import Histogram, StatsCollector
from fleetfoot.engine.wire import (
    COMPILE_GRAMMAR,
    HEARTBEAT_MS,
    MAX_MESSAGE_BYTES,
    AddRequest,
    Call,
    ClientMessage,
    Dead,
    EngineMessage,
    Failed,
    Finish,
    Hello,
    Interruption,
    Outputs,
    ProcessSettings,
    Ready,
    Refused,
    Reply,
    RoutedRequest,
    SequenceEnd,
    Tokens,
)
from fleetfoot.outputs import RequestMetrics
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import EngineOutput
from fleetfoot.records.structured_outputs import as_structured_outputs
from fleetfoot.scheduler.stats import SchedulerStats
from fleetfoot.utils.logs import log_to_stderr
from fleetfoot.utils.process import tune_collections
from fleetfoot.utils.progress import loading_bar

logger = logging.getLogger(__name__)

_SECONDS = [step * 10.0**power for power in range(-3, 3) for step in (1, 2, 5)]
_TOKENS = [step * 10.0**power for power in range(6) for step in (1, 2, 5)]


_IDLE_MS = 50
"""Without a message for that long, the engine prepares for later requests: longer than a kernel takes to load."""
_OF_REQUESTS = (
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_inference_time_seconds", "request_time_per_output_token_seconds"),
    *("request_prompt_tokens", "request_generation_tokens"),
)
"""Histograms with one sample for each request, in the order in which `OutputRouter` adds them."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence of a client."""

    client: bytes
    number: int
    request: Request
    name: str
    """The request's id."""
    arrival_time: float
    queued_ts: float
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_sent: int = 0
    """Tokens."""
    is_admission_sent: bool = False


class OutputRouter:
    """In place of an `OutputProcessor`: groups the results of a step by client. Texts are made by the clients.

    Each sequence counts as a request in the statistics.
    """

    def __init__(self, tokenizer: None, finish: Callable[..., object], stats: StatsCollector) -> None:
        self._stats = stats
        self._finish = finish
        self._sequences: dict[str, _Sequence] = {}
        self._numbers: dict[tuple[bytes, int], str] = {}
        self._weight_version = 0
        self._open: Counter[str] = Counter()  # the unfinished sequences of each request
        self._ttft, self._itl = Histogram(_SECONDS), Histogram(_SECONDS)
        self._step_tokens = Histogram(_TOKENS)
        self._requests = {name: Histogram(_TOKENS if name.endswith("tokens") else _SECONDS) for name in _OF_REQUESTS}

    @property
    def num_unfinished(self) -> int:
        return len(self._open)

    @property
    def request_ids(self) -> list[str]:
        return list(self._open)

    def has(self, request_id: str) -> bool:
        return request_id in self._open

    def add(self, request: EngineRequest, sequences: list[Request], now: float) -> None:
        assert isinstance(request, RoutedRequest)
        self._open[request.request_id] = len(sequences)
        resumed = [[]] * len(sequences) if request.resumed is None else request.resumed
        numbers = [number for number, tokens in enumerate(resumed, start=request.number) if tokens is not None]
        for number, sequence in zip(numbers, sequences, strict=True):
            route = _Sequence(request.client, number, sequence, request.request_id, request.arrival_time, now)
            route.num_sent = sequence.num_output_tokens
            self._sequences[sequence.request_id] = route
            self._numbers[request.client, number] = sequence.request_id

    def resumed(self) -> list[Request]:
        """As `OutputProcessor.resumed`: tokens that were not sent are dropped."""
        for sequence in self._sequences.values():
            del sequence.request.output_token_ids[sequence.num_sent :]
        return sorted([sequence.request for sequence in self._sequences.values()])

    def process(self, outputs: list[EngineOutput], now: float) -> list[tuple[bytes, Outputs]]:
        """The messages to send: for each client, those of its sequences with progress."""
        messages: dict[bytes, Outputs] = {}
        sequences, sample_itl = self._sequences, self._itl.add
        num_tokens = 0
        for output in outputs:
            request = output.request
            sequence = sequences.get(request.request_id)
            if sequence is None:
                continue  # ended by its client while this step was in flight
            token_ids = output.new_token_ids
            tokens = Tokens(sequence.number, token_ids, output.logprobs, output.prompt_logprobs)
            if token_ids:
                num_tokens += len(token_ids)
                sequence.num_sent += len(token_ids)
                if sequence.last_token_ts:
                    sample_itl(now - sequence.last_token_ts)
                else:
                    sequence.first_token_ts = now
                    self._ttft.add(now - sequence.queued_ts)
                sequence.last_token_ts = now
            if not sequence.is_admission_sent:
                sequence.is_admission_sent = True
                tokens.num_cached_tokens = request.num_cached_tokens
            if request.is_finished:
                tokens.end = self._end(sequence, output.pooled)
            message = messages.get(sequence.client)
            if message is None:
                message = messages[sequence.client] = Outputs(now, [], self._weight_version)
            message.tokens.append(tokens)
        self._stats.num_generation_tokens += num_tokens
        self._step_tokens.add(num_tokens)
        return list(messages.items())

    def metrics(self, scheduler: SchedulerStats) -> dict[str, Any]:
        """Gauges, counters and histograms, as plain data, by vLLM's names."""
        stats, drafts = self._stats, scheduler.drafts
        counters = {
            "num_preemptions": scheduler.num_preemptions,
            "prompt_tokens": stats.num_prompt_tokens,
            "generation_tokens": stats.num_generation_tokens,
            "prefix_cache_queries": scheduler.prefix_cache_queries,
            "prefix_cache_hits": scheduler.prefix_cache_hits,
            "engine_steps": stats.num_steps,
            "engine_restarts": stats.num_restarts,
        }
        if drafts.accepted_at:
            counters["spec_decode_num_drafts"] = drafts.num_rows
            counters["spec_decode_num_draft_tokens"] = drafts.num_drafted
            counters["spec_decode_num_accepted_tokens"] = drafts.num_accepted
        histograms = {
            "time_to_first_token_seconds": self._ttft,
            "inter_token_latency_seconds": self._itl,
            "iteration_tokens_total": self._step_tokens,
            **self._requests,
        }
        return {
            "gauges": {
                "num_requests_running": scheduler.num_running,
                "num_requests_waiting": scheduler.num_waiting,
                "kv_cache_usage_perc": scheduler.kv_cache_usage,
            },
            "counters": counters,
            "finished": dict(stats.num_finished),
            "histograms": {name: {"buckets": one.cumulative(), "sum": one.sum} for name, one in histograms.items()},
        }

    def finish(self, client: bytes, message: Finish) -> None:
        """End a sequence for its client; one that has ended is ignored."""
        sequence_id = self._numbers.get((client, message.number))
        if sequence_id is not None:
            sequence = self._sequences[sequence_id]
            self._finish(sequence_id, RequestStatus(message.status), message.stop_reason)
            self._remove(sequence)

    def drop(self, client: bytes) -> None:
        """End the sequences of a client that is gone."""
        for sequence in [sequence for sequence in self._sequences.values() if sequence.client == client]:
            self._finish(sequence.request.request_id, RequestStatus.FINISHED_ABORTED)
            self._remove(sequence)

    def abort(self, request_id: str) -> tuple[bytes, Outputs] | None:
        """End a request. Returns the message for its client; None for an unknown id."""
        ended = [sequence for sequence in self._sequences.values() if sequence.name == request_id]
        for sequence in ended:
            self._finish(sequence.request.request_id, RequestStatus.FINISHED_ABORTED)
        if not ended:
            return None
        tokens = [Tokens(sequence.number, [], end=self._end(sequence, None)) for sequence in ended]
        return ended[0].client, Outputs(time.perf_counter(), tokens, self._weight_version)

    def change_weights(self, version: int) -> None:
        """Tokens from now on are sampled with another version of the weights."""
        self._weight_version = version

    def _end(self, sequence: _Sequence, pooled: tuple[list[int], bytes] | None) -> SequenceEnd:
        request = sequence.request
        self._remove(sequence)
        return SequenceEnd(
            int(request.status),
            request.stop_reason,
            max(0, request.num_cached_tokens),
            request.num_drafted,
            request.num_accepted,
            request.scheduled_ts,
            request.kv_transfer_output,
            pooled,
        )

    def _remove(self, sequence: _Sequence) -> None:
        request = sequence.request
        del self._sequences[request.request_id], self._numbers[sequence.client, sequence.number]
        self._open[sequence.name] -= 1
        if not self._open[sequence.name]:
            del self._open[sequence.name]
        metrics = RequestMetrics(
            arrival_time=sequence.arrival_time,
            queued_ts=sequence.queued_ts,
            scheduled_ts=request.scheduled_ts,
            first_token_ts=sequence.first_token_ts,
            last_token_ts=sequence.last_token_ts,
            num_generation_tokens=request.num_output_tokens,
            num_drafted_tokens=request.num_drafted,
            num_accepted_tokens=request.num_accepted,
        )
        self._stats.request_finished(metrics, request.finish_reason)
        if not sequence.first_token_ts:
            return
        begin, first, last = request.scheduled_ts, sequence.first_token_ts, sequence.last_token_ts
        values = (
            last - sequence.queued_ts, begin - sequence.queued_ts, first - begin, last - first, last - begin,
            metrics.time_per_output_token, request.num_prompt_tokens, request.num_output_tokens,
        )  # fmt: skip
        for histogram, value in zip(self._requests.values(), values, strict=True):
            histogram.add(value)


class EngineServer:
    """The loop of an engine's process: messages in, steps, messages out.

    Args:
        engine: with an `OutputRouter`.
        socket: a bound socket of `engine_socket`.
        lifeline: a file descriptor; data or its end of file stops the loop.
        key: of clients; empty: they need none; None: they need none, and can stop the engine.
    """

    def __init__(self, engine: LLMEngine, socket: zmq.Socket[bytes], lifeline: int, key: str | None = None) -> None:
        router: Any = engine.output_processor
        self._engine = engine
        self._router: OutputRouter = router
        self._socket = socket
        self._lifeline = lifeline
        self._key = key
        self._clients: set[bytes] = set()
        self._stopping = False
        self._decoder = msgspec.msgpack.Decoder(ClientMessage)
        self._encoder = msgspec.msgpack.Encoder()
        engine.watch_restarts(self._report_restart)
        self._calls = RemoteCalls(engine, lambda: self._send_all(facts(engine)))
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(lifeline, zmq.POLLIN)
        self._compiling: list[tuple[Future[Any], bytes, AddRequest | Call]] = []
        self._compiled, self._note_compiled = os.pipe()  # a byte for each grammar
        self._poller.register(self._compiled, zmq.POLLIN)

    def run(self) -> int:
        """Serve until the clients stop it. Returns the exit code of the process."""
        engine = self._engine
        try:
            while not self._stopping:
                has_work = engine.can_step or engine.has_transfers()
                while not has_work and not self._poller.poll(_IDLE_MS) and engine.prepare():
                    pass
                self._receive(wait=not has_work)
                if has_work or engine.can_step:
                    messages: list[Any] = engine.step(self._receive)
                    for client, message in messages:
                        self._send(client, message)
                self._calls.finish_drains()
        except Exception as error:
            logger.exception("the engine has failed")
            cause = error.__cause__ or error
            self._send_all(Dead(f"{type(cause).__name__}: {cause}", traceback.format_exc()))
            return 1
        return 0

    def _receive(self, *, wait: bool = False) -> None:
        """Handle the messages that have arrived; with ``wait`` at least one, or the end of the lifeline."""
        ready = dict(self._poller.poll(None if wait else 0))
        if self._lifeline in ready:
            self._stopping = True
        if self._compiled in ready:
            os.read(self._compiled, 4096)
            done = [waiting for waiting in self._compiling if waiting[0].done()]
            self._compiling = [waiting for waiting in self._compiling if not waiting[0].done()]
            for future, client, message in done:
                if isinstance(message, Call):
                    self._report_compiled(client, message, future)
                else:
                    self._submit(client, message)
        while True:
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                message = self._decoder.decode(frames[-1])
            except zmq.Again:
                return
            except (IndexError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                logger.warning("data that is no message of a client is ignored: %s", error)
                continue
            if client in self._clients or isinstance(message, Hello):
                self._handle(client, message)

    def _handle(self, client: bytes, message: ClientMessage) -> None:
        if isinstance(message, AddRequest):
            self._add(client, message)
        elif isinstance(message, Finish):
            self._router.finish(client, message)
            self._compiling = [
                waiting for waiting in self._compiling if not _is_of(message.number, client, *waiting[1:])
            ]
        elif isinstance(message, Call):
            self._call(client, message)
        elif isinstance(message, Hello):
            self._welcome(client, message)
        else:
            self._stopping = self._key is None

    def _welcome(self, client: bytes, message: Hello) -> None:
        self._clients.add(client)
        if not self._key or hmac.compare_digest(message.key.encode(), self._key.encode()):
            self._send(client, facts(self._engine))
        else:
            self._send(client, Dead("the key of the engine is missing or wrong (--engine-key)", ""))
            self._clients.discard(client)

    def _add(self, client: bytes, message: AddRequest) -> None:
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

    def _wait_for(self, future: Future[Any], client: bytes, message: AddRequest | Call) -> None:
        """Go on with a message when its grammar is compiled."""
        self._compiling.append((future, client, message))
        future.add_done_callback(lambda _: os.write(self._note_compiled, b"."))

    def _report_compiled(self, client: bytes, call: Call, future: Future[Any]) -> None:
        error = future.exception()
        self._send(client, Reply(call.number, error=None if error is None else Failed.of(error)))

    def _submit(self, client: bytes, message: AddRequest) -> None:
        if client not in self._clients:
            return  # it has gone away while the grammar was compiled
        try:
            self._engine.check_request_id(message.request_id)
            self._engine.input_processor.check_further(message.params)  # clients have no logits processors
            self._engine.submit(message.routed(client))
        except (ValueError, TypeError) as error:
            self._send(client, Refused(message.number, Failed.of(error)))

    def _call(self, client: bytes, call: Call) -> None:
        if call.method == "metrics":
            self._send(client, Reply(call.number, self._router.metrics(self._engine.core.scheduler.stats())))
        elif call.method == COMPILE_GRAMMAR:
            try:
                structured = as_structured_outputs(*call.arguments)
                assert structured is not None
                self._wait_for(self._engine.input_processor.grammars.submit(structured), client, call)
            except (ValueError, TypeError) as error:
                self._send(client, Reply(call.number, error=Failed.of(error)))
        else:
            self._calls.run(call, lambda reply: self._send(client, reply))

    def _report_restart(self, is_restarting: bool) -> None:
        reason = "the engine restarts its workers after an error" if is_restarting else ""
        self._send_all(Interruption(reason))

    def _send(self, client: bytes, message: EngineMessage) -> None:
        if client not in self._clients:
            return
        try:
            self._socket.send_multipart((client, self._encoder.encode(message)))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._clients.discard(client)
            logger.warning("a client of the engine has gone away; its requests are aborted")
            self._router.drop(client)

    def _send_all(self, message: EngineMessage) -> None:
        for client in list(self._clients):
            self._send(client, message)


def engine_socket(context: zmq.Context[Any], *, detects_loss: bool = False) -> zmq.Socket[bytes]:
    """A socket for an engine's clients. Sending raises EHOSTUNREACH for a client that is gone.

    ``detects_loss``: whether a connection without signs of life is closed.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.set_hwm(0)
    socket.linger = 1000
    socket.router_mandatory = 1
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    if detects_loss:
        socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, 5 * HEARTBEAT_MS
    return socket


def _is_of(number: int, client: bytes, owner: bytes, message: AddRequest | Call) -> bool:
    """Whether a client's sequence is of a request."""
    if isinstance(message, Call):
        return False
    return owner == client and 0 <= number - message.number < message.params.n


def facts(engine: LLMEngine) -> Ready:
    """What clients need to validate requests."""
    plan, inputs, scheduling = engine.plan, engine.input_processor, engine.core.scheduler.config
    return Ready(
        pid=os.getpid(),
        model=plan.config.model,
        model_path=str(plan.model_path),
        tokenizer_path=None if plan.tokenizer_path is None else str(plan.tokenizer_path),
        vocab_size=inputs.vocab_size,
        max_model_len=inputs.max_model_len,
        num_kv_tokens=scheduling.num_blocks * scheduling.block_size,
        eos_token_ids=sorted(inputs.eos_token_ids),
        max_logprobs=inputs.max_logprobs,
        has_priority=scheduling.priority,
        sampling_defaults=inputs.sampling_defaults,
        pooling=inputs.pooling,
        runner_name=engine.runner_name,
    )


def main() -> int:
    """Run an engine for the parent process, until a client stops it or standard input ends."""
    settings: ProcessSettings = pickle.load(sys.stdin.buffer)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal or a service manager sends them to the parent too
    with log_to_stderr(settings.log_level, settings.log_format):
        return _run(settings)


def _run(settings: ProcessSettings) -> int:
    try:
        with loading_bar(is_shown=sys.stderr.isatty() and settings.log_format == "text"):
            engine = build_engine(settings.config, output_processor=OutputRouter)
    except Exception as error:
        print(error, file=sys.stderr)
        logger.debug("the engine does not start", exc_info=True)
        return 2 if isinstance(error, ValueError | TypeError | FileNotFoundError) else 1
    tune_collections()
    context = zmq.Context()
    try:
        with engine_socket(context) as socket:
            socket.bind(settings.address)
            exit_code = EngineServer(engine, socket, sys.stdin.fileno()).run()
            engine.shutdown()
    finally:
        context.term()
    return exit_code


if __name__ == "__main__":
    sys.exit(main())

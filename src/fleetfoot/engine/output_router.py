"""The results of steps as messages to clients, and the statistics of an engine that has clients."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from fleetfoot.engine.input_processor import EngineRequest
from fleetfoot.engine.stats import Histogram, StatsCollector
from fleetfoot.engine.wire import Finish, Outputs
from fleetfoot.outputs import RequestMetrics
from fleetfoot.records.kv_connector import READ_HISTOGRAMS
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import EngineOutput, SequenceEnd
from fleetfoot.scheduler.stats import SchedulerStats

_SECONDS = [step * 10.0**power for power in range(-3, 3) for step in (1, 2, 5)]
_TOKENS = [step * 10.0**power for power in range(6) for step in (1, 2, 5)]
_OF_REQUESTS = (
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_inference_time_seconds", "request_time_per_output_token_seconds"),
    *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
    *("request_params_max_tokens", "request_params_n", "request_prefill_kv_computed_tokens"),
)
"""Histograms with one sample for each request, in the order in which `OutputRouter` adds them."""


_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""By level."""
_NIXL_COUNTERS = {
    "nixl_num_failed_transfers": "loads_failed",
    "nixl_num_failed_notifications": "notifications_failed",
    "nixl_num_kv_expired_reqs": "sends_expired",
}
"""vLLM's names -> counters of the connector."""


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """What metrics have of an engine besides its statistics."""

    sleep_level: int
    has_connector: bool
    has_nixl: bool
    cache: Mapping[str, Any]
    """Settings of the KV cache."""

    @classmethod
    def of(cls, engine: Any) -> EngineGauges:
        """``engine``: an `LLMEngine`."""
        plan, scheduler = engine.plan, engine.core.scheduler
        config = plan.config
        cache = {
            "block_size": config.block_size,
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "num_gpu_blocks": scheduler.config.num_blocks,
        }
        name = None if plan.connector is None else plan.connector.config.kv_connector
        return cls(engine.suspension.level, name is not None, name == "NixlConnector", cache)


def _of_reads(name: str, counters: Mapping[str, int]) -> dict[str, Any]:
    """A histogram of `READ_HISTOGRAMS`, of the connector's counters."""
    _, unit, limits = READ_HISTOGRAMS[name]
    counts = accumulate(counters.get(f"{name}<={limit}", 0) for limit in (*limits, "inf"))
    labels = [f"{unit * limit:g}" if unit != 1 else str(limit) for limit in limits]
    return {"buckets": [*zip([*labels, "+Inf"], counts, strict=True)], "sum": unit * counters.get(name, 0)}


@dataclass(slots=True, eq=False)
class _Route:
    """The way of a sequence's outputs to its client."""

    client: bytes
    number: int
    request: Request
    name: str
    """The request's id."""
    arrival_time: float
    seed_number: int
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_sent: int = 0
    """Tokens."""


class OutputRouter:
    """In place of an `OutputProcessor`: groups the results of a step by client. Texts are made by the clients.

    Each sequence counts as a request in the statistics.
    """

    def __init__(self, tokenizer: None, finish: Callable[..., object], stats: StatsCollector) -> None:
        self._stats = stats
        self._finish = finish
        self._sequences: dict[int, _Route] = {}  # by `Request.sequence_number`
        self._numbers: dict[tuple[bytes, int], _Route] = {}  # by client, and its number
        self._weight_version = 0
        self._open: Counter[str] = Counter()  # the unfinished sequences of each request
        self._ttft, self._itl = Histogram(_SECONDS), Histogram(_SECONDS)
        self._step_tokens = Histogram(_TOKENS)
        self._requests = {name: Histogram(_SECONDS if name.endswith("seconds") else _TOKENS) for name in _OF_REQUESTS}

    @property
    def num_unfinished(self) -> int:
        return len(self._open)

    @property
    def request_ids(self) -> list[str]:
        return list(self._open)

    def has(self, request_id: str) -> bool:
        return request_id in self._open

    def add(self, request: EngineRequest, sequences: Mapping[int, Request], now: float) -> None:
        self._open[request.request_id] = len(sequences)
        resumed = [[]] * len(sequences) if request.resumed is None else request.resumed
        numbers = [number for number, tokens in enumerate(resumed, start=request.number) if tokens is not None]
        for number, (key, sequence) in zip(numbers, sequences.items(), strict=True):
            seed_number = request.seed_number or 0
            route = _Route(request.client, number, sequence, request.request_id, request.arrival_time, seed_number)
            route.num_sent = sequence.num_output_tokens
            self._sequences[key] = self._numbers[request.client, number] = route

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
            sequence = sequences.get(output.number)
            if sequence is None:
                continue  # ended by its client while this step was in flight
            token_ids, output.number = output.new_token_ids, sequence.number
            if token_ids:
                num_tokens += len(token_ids)
                sequence.num_sent += len(token_ids)
                if sequence.last_token_ts:
                    sample_itl(now - sequence.last_token_ts)
                else:
                    sequence.first_token_ts = now
                    self._ttft.add(now - sequence.request.queued_ts)
                sequence.last_token_ts = now
            if output.num_cached_tokens >= 0:
                output.seed_number = sequence.seed_number
            if output.end is not None:
                self._remove(sequence)
            message = messages.get(sequence.client)
            if message is None:
                message = messages[sequence.client] = Outputs(now, [], self._weight_version)
            message.tokens.append(output)
        self._stats.num_generation_tokens += num_tokens
        self._step_tokens.add(num_tokens)
        return list(messages.items())

    def metrics(self, scheduler: SchedulerStats, facts: EngineGauges) -> dict[str, Any]:
        """Gauges, counters and histograms, as plain data, by vLLM's names. ``labelled``: pairs of further labels and a
        value."""
        stats, drafts, num_loaded = self._stats, scheduler.drafts, scheduler.transfers.tokens_loaded
        num_missed = scheduler.prefix_cache_queries - scheduler.prefix_cache_hits
        sources = {
            "local_compute": num_missed - num_loaded,
            "local_cache_hit": scheduler.prefix_cache_hits,
            "external_kv_transfer": num_loaded,
        }
        waiting = {"capacity": scheduler.num_waiting, "deferred": scheduler.transfers.num_loading}
        labelled: dict[str, list[tuple[dict[str, str], float]]] = {
            "num_requests_waiting_by_reason": [({"reason": name}, count) for name, count in waiting.items()],
            "prompt_tokens_by_source": [({"source": name}, count) for name, count in sources.items()],
            "engine_sleep_state": [
                ({"sleep_state": name}, level == facts.sleep_level) for level, name in enumerate(_SLEEP_STATES)
            ],
            "lora_requests_info": [
                ({"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}, time.time())
            ],
            "cache_config_info": [({name: str(value) for name, value in facts.cache.items()}, 1)],
            "spec_decode_num_accepted_tokens_per_pos": [
                ({"position": str(position)}, count) for position, count in enumerate(drafts.accepted_at)
            ],
        }
        counters: dict[str, float] = {
            "num_preemptions": scheduler.num_preemptions,
            "prompt_tokens": stats.num_prompt_tokens,
            "generation_tokens": stats.num_generation_tokens,
            "prefix_cache_queries": scheduler.prefix_cache_queries,
            "prefix_cache_hits": scheduler.prefix_cache_hits,
            "prefix_cache_lost": scheduler.prefix_cache_lost,
            "prompt_tokens_cached": scheduler.prefix_cache_hits + num_loaded,
            "external_prefix_cache_queries": num_missed if facts.has_connector else 0,
            "external_prefix_cache_hits": num_loaded,
            "engine_steps": stats.num_steps,
            "engine_restarts": stats.num_restarts,
        }
        if drafts.accepted_at:
            counters["spec_decode_num_drafts"] = drafts.num_rows
            counters["spec_decode_num_draft_tokens"] = drafts.num_drafted
            counters["spec_decode_num_accepted_tokens"] = drafts.num_accepted
        gauges = {
            "num_requests_running": scheduler.num_running,
            "num_requests_waiting": scheduler.num_waiting,
            "kv_cache_usage_perc": scheduler.kv_cache_usage,
        }
        if (balance := stats.balance) is not None:
            gauges["expert_balancedness"] = balance.balancedness
            gauges["expert_balancedness_least"] = balance.least
            gauges["expert_balancedness_expected"] = balance.expected
            counters["expert_rebalancings"] = balance.num_rounds
            counters["expert_moves"] = balance.num_moved
            counters["expert_rebalancing_seconds"] = balance.seconds
        histograms = {
            "time_to_first_token_seconds": self._ttft,
            "inter_token_latency_seconds": self._itl,
            "iteration_tokens_total": self._step_tokens,
            **self._requests,
        }
        plain = {name: {"buckets": one.cumulative(), "sum": one.sum} for name, one in histograms.items()}
        if facts.has_nixl:
            counted = scheduler.transfers.counters
            counters |= {name: counted.get(own, 0) for name, own in _NIXL_COUNTERS.items()}
            plain |= {name: _of_reads(own, counted) for own, (name, *_) in READ_HISTOGRAMS.items()}
        return {
            "gauges": gauges,
            "counters": counters,
            "labelled": labelled,
            "finished": dict(stats.num_finished),
            "histograms": plain,
        }

    def latencies(self) -> dict[str, list[tuple[str, int]]]:
        """Times to the first token, and between tokens: samples up to limits in seconds, since the start."""
        return {"ttft": self._ttft.cumulative(), "itl": self._itl.cumulative()}

    def finish(self, client: bytes, message: Finish) -> None:
        """End a sequence for its client; one that has ended is ignored."""
        sequence = self._numbers.get((client, message.number))
        if sequence is not None:
            self._finish(sequence, RequestStatus(message.status), message.stop_reason)
            self._remove(sequence)

    def drop(self, client: bytes) -> None:
        """End the sequences of a client that is gone."""
        for sequence in [sequence for sequence in self._sequences.values() if sequence.client == client]:
            self._finish(sequence, RequestStatus.FINISHED_ABORTED)
            self._remove(sequence)

    def abort(self, request_id: str) -> tuple[bytes, Outputs] | None:
        """End a request. Returns the message for its client; None for an unknown id."""
        ended = [sequence for sequence in self._sequences.values() if sequence.name == request_id]
        tokens = []
        for sequence in ended:
            self._finish(sequence, RequestStatus.FINISHED_ABORTED)
            self._remove(sequence)
            tokens.append(EngineOutput(sequence.number, [], end=SequenceEnd.of(sequence.request)))
        if not ended:
            return None
        return ended[0].client, Outputs(time.perf_counter(), tokens, self._weight_version)

    def change_weights(self, version: int) -> None:
        """Tokens from now on are sampled with another version of the weights."""
        self._weight_version = version

    def _remove(self, sequence: _Route) -> None:
        request = sequence.request
        del self._sequences[request.sequence_number], self._numbers[sequence.client, sequence.number]
        self._open[sequence.name] -= 1
        if not self._open[sequence.name]:
            del self._open[sequence.name]
        metrics = RequestMetrics(
            arrival_time=sequence.arrival_time,
            queued_ts=request.queued_ts,
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
            last - request.queued_ts, begin - request.queued_ts, first - begin, last - first, last - begin,
            metrics.time_per_output_token, request.num_prompt_tokens, request.num_output_tokens,
            request.num_output_tokens, request.max_tokens, request.params.n,
            request.num_prompt_tokens - max(0, request.num_cached_tokens),
        )  # fmt: skip
        for histogram, value in zip(self._requests.values(), values, strict=True):
            histogram.add(value)

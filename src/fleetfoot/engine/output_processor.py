"""From tokens to what a user reads: text, logprobs, timestamps, and stop strings, which only text can show."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fleetfoot.engine.admission import AdmittedRequest
from fleetfoot.records.logprobs import Logprob, RowLogprobs, logprob_dict
from fleetfoot.records.outputs import CompletionOutput, RequestMetrics, RequestOutput
from fleetfoot.records.request import Request, RequestStatus, StepResult
from fleetfoot.records.sampling_params import RequestOutputKind
from fleetfoot.records.step import ModelRunnerOutput
from fleetfoot.tokenizer.text_stream import TextStream

if TYPE_CHECKING:
    from fleetfoot.engine.stats import StatsCollector
    from fleetfoot.tokenizer.tokenizer import Tokenizer

RUNNING = RequestStatus.RUNNING
FINAL_ONLY, DELTA = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA


class _Sequence:
    """One of a request's outputs, as it grows."""

    __slots__ = (
        "completion",
        "delivered",
        "finish_reason",
        "has_text",
        "index",
        "is_silent",
        "last_token_ts",
        "logprobs",
        "request",
        "state",
        "stop_reason",
        "text",
        "token_ids",
        "total_logprob",
    )

    def __init__(self, index: int, request: Request, text: TextStream, state: _RequestState) -> None:
        self.index = index
        self.request = request
        self.state = state
        self.text = text
        self.has_text = state.detokenize
        self.is_silent = state.kind is FINAL_ONLY and not state.detokenize
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] = []
        self.total_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.last_token_ts = 0.0
        self.delivered = 0  # tokens that earlier deltas held


class _RequestState:
    """A request and its sequences."""

    __slots__ = (
        "admitted",
        "detokenize",
        "first_token_ts",
        "kind",
        "metrics",
        "num_unfinished",
        "prompt_logprobs",
        "queued_ts",
        "sequences",
    )

    def __init__(self, admitted: AdmittedRequest, tokenizer: Tokenizer | None, now: float) -> None:
        params = admitted.params
        self.admitted = admitted
        self.kind = params.output_kind
        self.detokenize = params.detokenize and tokenizer is not None
        self.queued_ts = now
        self.first_token_ts = 0.0
        self.metrics: RequestMetrics | None = None  # once it has ended
        self.num_unfinished = len(admitted.sequences)
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self.sequences = [
            _Sequence(
                index,
                request,
                TextStream(
                    tokenizer,
                    admitted.prompt_token_ids,
                    detokenize=params.detokenize,
                    skip_special_tokens=params.skip_special_tokens,
                    spaces_between_special_tokens=params.spaces_between_special_tokens,
                    stop=params.stop or [],
                    include_stop_str_in_output=params.include_stop_str_in_output,
                    min_tokens=params.min_tokens,
                ),
                self,
            )
            for index, request in enumerate(admitted.sequences)
        ]


class OutputProcessor:
    """Keeps what each request has so far, and turns a step's results into `RequestOutput`.

    Args:
        tokenizer: None when the engine runs on token ids alone; texts are then empty.
        stop_sequence: called with (sequence's request id, stop string) when a stop string shows in the text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stop_sequence: Callable[[str, str], object], stats: StatsCollector
    ) -> None:
        self._tokenizer = tokenizer
        self._decode = None if tokenizer is None else tokenizer.decode_token
        self._stop_sequence = stop_sequence
        self._stats = stats
        self._requests: dict[str, _RequestState] = {}
        self._sequences: dict[str, _Sequence] = {}

    def add(self, admitted: AdmittedRequest, now: float) -> None:
        """Begin to follow a request. Its id must not be in use."""
        state = _RequestState(admitted, self._tokenizer, now)
        self._requests[admitted.request_id] = state
        for sequence in state.sequences:
            self._sequences[sequence.request.request_id] = sequence

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def request_ids(self) -> list[str]:
        return list(self._requests)

    def has(self, request_id: str) -> bool:
        return request_id in self._requests

    def process(self, results: list[StepResult], output: ModelRunnerOutput, now: float) -> list[RequestOutput]:
        """Take in a step.

        Args:
            now: when its tokens became known, in seconds of a monotonic clock.

        Returns:
            What users are owed: one output for each request that made progress, unless it asked for the last only.
        """
        touched: dict[int, _RequestState] = {}
        sequences, sample_itl = self._sequences, self._stats.itl.append
        has_logprobs = bool(output.logprobs or output.prompt_logprobs)
        num_tokens = 0
        for result in results:
            request = result.request
            sequence = sequences.get(request.request_id)
            if sequence is None:
                continue  # it ended by a stop string while this step was in flight
            new_token_ids = result.new_token_ids
            if sequence.is_silent and sequence.last_token_ts and request.status is RUNNING and not has_logprobs:
                num_tokens += len(new_token_ids)
                sequence.token_ids += new_token_ids  # nobody reads along: the straight line of the step
                sample_itl(now - sequence.last_token_ts)
                sequence.last_token_ts = now
                continue
            num_tokens += self._take(sequence, result, output, now)
            state = sequence.state
            if state.kind is not FINAL_ONLY or not state.num_unfinished:
                touched[id(state)] = state
        self._stats.num_generation_tokens += num_tokens
        return [self._deliver(state) for state in touched.values()]

    def abort(self, request_id: str) -> tuple[list[str], RequestOutput | None]:
        """Stop following a request: the ids of its sequences that still run, and what it is owed."""
        state = self._requests.get(request_id)
        if state is None:
            return [], None
        running = [sequence for sequence in state.sequences if sequence.finish_reason is None]
        for sequence in running:
            sequence.text.finish()
            self._end(sequence, "abort", None)
        return [sequence.request.request_id for sequence in running], self._deliver(state)

    # --- what a step brings -----------------------------------------------------------------------------------------

    def _take(self, sequence: _Sequence, result: StepResult, output: ModelRunnerOutput, now: float) -> int:
        """What a step brought a sequence; returns how many tokens count: none behind a stop string."""
        request, new_token_ids = result.request, result.new_token_ids
        if result.index in output.prompt_logprobs:
            self._take_prompt_logprobs(sequence.state, *output.prompt_logprobs[result.index])
        if new_token_ids:
            new_token_ids = self._take_text(sequence, new_token_ids)
            sequence.token_ids += new_token_ids
            self._take_time(sequence, now)
            if result.index in output.logprobs:
                self._take_logprobs(sequence, output.logprobs[result.index][: len(new_token_ids)])
            if sequence.text.stop_string is not None:
                self._end(sequence, "stop", sequence.text.stop_string)
        if request.is_finished and sequence.finish_reason is None:
            sequence.text.finish()
            self._end(sequence, request.finish_reason, request.stop_reason)
        return len(new_token_ids)

    def _take_text(self, sequence: _Sequence, new_token_ids: list[int]) -> list[int]:
        """Feed the text stream; returns the tokens that count, fewer where a stop string ended the sequence."""
        if not sequence.has_text:
            return new_token_ids
        request = sequence.request
        stopped_by_token = request.status == RequestStatus.FINISHED_STOPPED
        stop = sequence.text.push(new_token_ids, ends_with_stop_token=stopped_by_token)
        if stop is not None:
            new_token_ids = new_token_ids[: sequence.text.num_tokens_kept]
            if not request.is_finished:
                self._stop_sequence(request.request_id, stop)
        return new_token_ids

    def _take_time(self, sequence: _Sequence, now: float) -> None:
        state = sequence.state
        if sequence.last_token_ts:
            self._stats.itl.append(now - sequence.last_token_ts)
        elif not state.first_token_ts:
            state.first_token_ts = now
            self._stats.ttft.append(now - state.queued_ts)
        sequence.last_token_ts = now

    def _take_logprobs(self, sequence: _Sequence, entries: list[RowLogprobs]) -> None:
        for entry in entries:
            sequence.logprobs.append(logprob_dict(*entry, self._decode))
            sequence.total_logprob += entry.logprobs[0]

    def _take_prompt_logprobs(self, state: _RequestState, position: int, entries: list[RowLogprobs]) -> None:
        """Keep what is new: each copy, and a prompt computed again after a preemption, brings the same once more."""
        collected = state.prompt_logprobs
        if collected is not None:
            new = [logprob_dict(*entry, self._decode) for entry in entries[len(collected) - position :]]
            state.prompt_logprobs = [*collected, *new]  # another list: outputs that are out there hold the former one

    def _end(self, sequence: _Sequence, reason: str | None, stop_reason: int | str | None) -> None:
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        del self._sequences[sequence.request.request_id]
        state = sequence.state
        state.num_unfinished -= 1
        if not state.num_unfinished:
            del self._requests[state.admitted.request_id]
            state.metrics = self._metrics(state)
            self._stats.request_finished(state.metrics, reason)

    @staticmethod
    def _metrics(state: _RequestState) -> RequestMetrics:
        """As of now, and nobody else's: an output that a user keeps does not change later."""
        sequences = state.sequences
        return RequestMetrics(
            arrival_time=state.admitted.arrival_time,
            queued_ts=state.queued_ts,
            scheduled_ts=min([sequence.request.scheduled_ts for sequence in sequences]),
            first_token_ts=state.first_token_ts,
            last_token_ts=max([sequence.last_token_ts for sequence in sequences]),
            num_generation_tokens=sum([len(sequence.token_ids) for sequence in sequences]),
            num_drafted_tokens=sum([sequence.request.num_drafted for sequence in sequences]),
            num_accepted_tokens=sum([sequence.request.num_accepted for sequence in sequences]),
        )

    # --- what a user is given ---------------------------------------------------------------------------------------

    def _deliver(self, state: _RequestState) -> RequestOutput:
        admitted, finished = state.admitted, not state.num_unfinished
        output = RequestOutput(
            request_id=admitted.request_id,
            prompt=admitted.prompt,
            prompt_token_ids=admitted.prompt_token_ids,
            outputs=[self._completion(sequence, state) for sequence in state.sequences],
            finished=finished,
            prompt_logprobs=state.prompt_logprobs,
            metrics=state.metrics or self._metrics(state),
            num_cached_tokens=max(0, state.sequences[0].request.num_cached_tokens),
            kv_transfer_params=state.sequences[0].request.kv_transfer_output,
        )
        if finished:
            state.sequences = []  # they refer to it as well: a circle that would wait for the garbage collector
        return output

    @staticmethod
    def _completion(sequence: _Sequence, state: _RequestState) -> CompletionOutput:
        wants_logprobs = state.admitted.params.logprobs is not None
        begin = 0
        if state.kind is DELTA:
            begin, sequence.delivered = sequence.delivered, len(sequence.token_ids)
        return CompletionOutput(
            index=sequence.index,
            text=sequence.text.take_delta() if state.kind is DELTA else sequence.text.text,
            token_ids=sequence.token_ids[begin:],
            cumulative_logprob=sequence.total_logprob if wants_logprobs else None,
            logprobs=sequence.logprobs[begin:] if wants_logprobs else None,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )

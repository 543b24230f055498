"""Output processing: turns tokens of a step into text, logprobs and timestamps, and detects stop strings."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fleetfoot.engine.input_processor import EngineRequest
from fleetfoot.outputs import (
    CompletionOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    SampledLogprobs,
)
from fleetfoot.records.request import FINISH_REASONS, Request, RequestStatus
from fleetfoot.records.sampling_params import RequestOutputKind
from fleetfoot.records.step import EngineOutput, PackedLogprobs, SequenceEnd
from fleetfoot.tokenizer.text_stream import TextStream

if TYPE_CHECKING:
    from fleetfoot.engine.stats import StatsCollector
    from fleetfoot.tokenizer.tokenizer import Tokenizer

NO_METRICS = RequestMetrics()
FINAL_ONLY, DELTA = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA
_FIRST_LOGPROB = struct.Struct("=f")
"""Reads the first logprob of `PackedLogprobs`."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """Output of one of a request's ``n`` sequences."""

    index: int
    number: int
    request: Request | None
    """None: another process computes it."""
    state: _RequestState
    text: TextStream
    is_fast: bool
    """Whether its tokens, their text and their logprobs are only appended: it has no stop strings."""
    logprobs: SampledLogprobs
    token_ids: list[int] = field(default_factory=list)
    total_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    end: SequenceEnd | None = None
    num_cached_tokens: int = 0
    scheduled_ts: float = 0.0
    last_token_ts: float = 0.0
    num_returned: int = 0
    """Tokens in earlier deltas."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(number of tokens, version of the weights that has sampled those after them), in order."""


@dataclass(slots=True, eq=False)
class _RequestState:
    """A request and its sequences."""

    request: EngineRequest
    prompt: str | None
    """Its text, if known."""
    kind: RequestOutputKind
    detokenize: bool
    queued_ts: float
    num_unfinished: int
    is_single_delta: bool
    """Whether its outputs are deltas of one sequence, without prompt logprobs."""
    prompt_logprobs: SampledLogprobs | None
    prompt_token_ids: list[int] | None = None
    """Set with the first output, and shared by all."""
    sequences: list[_Sequence] = field(default_factory=list)
    first_token_ts: float = 0.0
    metrics: RequestMetrics | None = None
    """Set when it has finished."""
    pooled: tuple[list[int], bytes] | None = None
    """Result of a pooling request: shape and float32 values."""


class OutputProcessor:
    """Keeps the outputs of unfinished requests, and turns the results of a step into `RequestOutput`.

    Args:
        tokenizer: None if the engine runs on token ids only; texts are then empty.
        finish: called with a sequence that ends before its last token, its status and its stop string: for a stop
            string in the text, and for an abort.
        has_metrics: whether outputs of unfinished requests have metrics.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        finish: Callable[..., object],
        stats: StatsCollector,
        *,
        has_metrics: bool = True,
    ) -> None:
        self._has_metrics = has_metrics
        self._tokenizer = tokenizer
        self._decode = None if tokenizer is None else tokenizer.decode_token
        self._finish_request = finish
        self._stats = stats
        self._weight_version = 0
        self._requests: dict[str, _RequestState] = {}
        self._sequences: dict[int, _Sequence] = {}

    def add(self, request: EngineRequest, sequences: Mapping[int, Request | None], now: float) -> None:
        """Add a request.

        Args:
            sequences: those of its ``n`` outputs by their numbers; None for what another process computes.
            now: seconds of a monotonic clock.
        """
        params, kind = request.params, request.params.output_kind
        detokenize = params.detokenize and self._tokenizer is not None
        prompt_logprobs = None if params.prompt_logprobs is None else SampledLogprobs(self._decode)
        if prompt_logprobs is not None:
            prompt_logprobs.extend([None])  # of the first token
        is_plain = request.pooling_params is None and prompt_logprobs is None
        is_delta = kind is DELTA and len(sequences) == 1 and is_plain
        state = _RequestState(request, request.prompt, kind, detokenize, now, len(sequences), is_delta, prompt_logprobs)
        self._requests[request.request_id] = state
        for index, (number, sequence) in enumerate(sequences.items()):
            text = TextStream(
                self._tokenizer,
                request.prompt_token_ids,
                detokenize=params.detokenize,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                stop=params.stop or [],
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
            logprobs = SampledLogprobs(self._decode)
            is_fast = is_plain and not params.stop
            state.sequences.append(_Sequence(index, number, sequence, state, text, is_fast, logprobs))
            state.sequences[-1].versions.append((0, self._weight_version))
            self._sequences[number] = state.sequences[-1]

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def request_ids(self) -> list[str]:
        """Ids of the unfinished requests, in the order in which they were added."""
        return list(self._requests)

    def has(self, request_id: str) -> bool:
        return request_id in self._requests

    def resumed(self) -> list[Request]:
        """The unfinished sequences, to be computed on. Tokens of theirs that no output has are dropped: the step that
        sampled them has failed."""
        requests = []
        for sequence in self._sequences.values():
            assert sequence.request is not None
            del sequence.request.output_token_ids[len(sequence.token_ids) :]
            requests.append(sequence.request)
        return sorted(requests)

    def process(self, outputs: Iterable[EngineOutput], now: float) -> list[RequestOutput]:
        """Process the outputs of a step, or of several.

        Args:
            outputs: in the order of the steps; read one by one.
            now: when its tokens arrived, in seconds of a monotonic clock.

        Returns:
            One output for each request with progress; with `RequestOutputKind.FINAL_ONLY`, only when it has finished.
        """
        updated: dict[int, _RequestState] = {}
        sequences, sample_itl = self._sequences, self._stats.itl.append
        num_tokens = 0
        for output in outputs:
            sequence = sequences.get(output.number)
            if sequence is None:
                continue  # ended by a stop string or an abort while this step was in flight
            new_token_ids = output.new_token_ids
            if sequence.is_fast and sequence.last_token_ts and output.end is None:
                num_tokens += len(new_token_ids)
                sequence.token_ids += new_token_ids
                if output.logprobs is not None:
                    self._add_logprobs(sequence, output.logprobs)
                sample_itl(now - sequence.last_token_ts)
                sequence.last_token_ts = now
                state = sequence.state
                if state.detokenize:
                    sequence.text.push(new_token_ids)
                if state.kind is not FINAL_ONLY:
                    updated[id(state)] = state
                continue
            num_tokens += self._update(sequence, output, now)
            state = sequence.state
            if state.kind is not FINAL_ONLY or not state.num_unfinished:
                updated[id(state)] = state
        self._stats.num_generation_tokens += num_tokens
        return [
            self._delta(state) if state.is_single_delta and state.num_unfinished else self._request_output(state)
            for state in updated.values()
        ]

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request. Returns its last output; None for an unknown id."""
        state = self._requests.get(request_id)
        if state is None:
            return None
        unfinished = [sequence for sequence in state.sequences if sequence.finish_reason is None]
        for sequence in unfinished:
            sequence.text.finish()
            self._finish(sequence, "abort", None)
        output = self._request_output(state)
        for sequence in unfinished:
            self._finish_request(sequence, RequestStatus.FINISHED_ABORTED)
        return output

    def change_weights(self, version: int) -> None:
        """Tokens from now on are sampled with another version of the weights."""
        self._weight_version = version
        for sequence in self._sequences.values():
            count = len(sequence.token_ids)
            sequence.versions = [entry for entry in sequence.versions if entry[0] < count] + [(count, version)]

    # --- update of a sequence -----------------------------------------------------------------------------------------

    def _update(self, sequence: _Sequence, output: EngineOutput, now: float) -> int:
        """Returns the number of new tokens, without those after a stop string."""
        new_token_ids, end = output.new_token_ids, output.end
        if output.num_cached_tokens >= 0:
            sequence.num_cached_tokens = output.num_cached_tokens
        sequence.scheduled_ts = output.scheduled_ts or sequence.scheduled_ts
        sequence.end = end
        if output.prompt_logprobs is not None:
            self._add_prompt_logprobs(sequence.state, *output.prompt_logprobs)
        if end is not None and end.pooled is not None:
            sequence.state.pooled = end.pooled
            sequence.state.first_token_ts = sequence.last_token_ts = now  # of the result
        if new_token_ids:
            new_token_ids = self._detokenize(sequence, new_token_ids, end)
            sequence.token_ids += new_token_ids
            state = sequence.state
            if sequence.last_token_ts:
                self._stats.itl.append(now - sequence.last_token_ts)
            elif not state.first_token_ts:
                state.first_token_ts = now
                self._stats.ttft.append(now - state.queued_ts)
            sequence.last_token_ts = now
            if output.logprobs is not None:
                self._add_logprobs(sequence, output.logprobs[: len(new_token_ids)])
            if sequence.text.stop_string is not None:
                self._finish(sequence, "stop", sequence.text.stop_string)
        if end is not None and sequence.finish_reason is None:
            sequence.text.finish()
            self._finish(sequence, FINISH_REASONS[RequestStatus(end.status)], end.stop_reason)
        return len(new_token_ids)

    def _detokenize(self, sequence: _Sequence, new_token_ids: list[int], end: SequenceEnd | None) -> list[int]:
        """Update the text. Returns the tokens that belong to the output: fewer if a stop string ended it."""
        if not sequence.state.detokenize:
            return new_token_ids
        is_stop_token = end is not None and end.status == RequestStatus.FINISHED_STOPPED
        stop = sequence.text.push(new_token_ids, ends_with_stop_token=is_stop_token)
        if stop is not None:
            new_token_ids = new_token_ids[: sequence.text.num_tokens_kept]
            if end is None:
                self._finish_request(sequence, RequestStatus.FINISHED_STOPPED, stop)
        return new_token_ids

    @staticmethod
    def _add_logprobs(sequence: _Sequence, rows: list[PackedLogprobs]) -> None:
        sequence.logprobs.extend(rows)
        for row in rows:
            sequence.total_logprob += _FIRST_LOGPROB.unpack_from(row)[0]

    def _add_prompt_logprobs(self, state: _RequestState, position: int, entries: list[PackedLogprobs]) -> None:
        """Add entries from ``position`` on. Other sequences, and preempted ones, return the same positions again."""
        if (collected := state.prompt_logprobs) is not None:
            collected.extend(entries[len(collected) - position :])

    def _finish(self, sequence: _Sequence, reason: str | None, stop_reason: int | str | None) -> None:
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if sequence.end is None and sequence.request is not None:  # of a stop string, or an abort
            sequence.end = SequenceEnd.of(sequence.request)
        del self._sequences[sequence.number]
        state = sequence.state
        state.num_unfinished -= 1
        if not state.num_unfinished:
            del self._requests[state.request.request_id]
            state.metrics = self._metrics(state)
            self._stats.request_finished(state.metrics, reason)

    @staticmethod
    def _metrics(state: _RequestState) -> RequestMetrics:
        """A new object for each output, so that earlier outputs do not change."""
        sequences = state.sequences
        known = [counts for sequence in sequences if (counts := sequence.end or sequence.request) is not None]
        return RequestMetrics(
            arrival_time=state.request.arrival_time,
            queued_ts=state.queued_ts,
            scheduled_ts=min([sequence.scheduled_ts for sequence in sequences]),
            first_token_ts=state.first_token_ts,
            last_token_ts=max([sequence.last_token_ts for sequence in sequences]),
            num_generation_tokens=sum([len(sequence.token_ids) for sequence in sequences]),
            num_drafted_tokens=sum([counts.num_drafted for counts in known]),
            num_accepted_tokens=sum([counts.num_accepted for counts in known]),
        )

    # --- outputs ------------------------------------------------------------------------------------------------------

    def _delta(self, state: _RequestState) -> RequestOutput:
        """As `_request_output`, of an unfinished request with ``is_single_delta``: most outputs of a server are."""
        request, sequence = state.request, state.sequences[0]
        begin, sequence.num_returned = sequence.num_returned, len(sequence.token_ids)
        version, versions = _versions(sequence, begin)
        if state.prompt_token_ids is None:
            state.prompt_token_ids = request.prompt_token_ids.tolist()
        delta = CompletionOutput(0, sequence.text.take_delta(), sequence.token_ids[begin:])
        self._set_logprobs(delta, sequence, begin)
        delta.weight_version, delta.weight_versions = version, versions
        return RequestOutput(
            request_id=request.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            outputs=[delta],
            finished=False,
            metrics=self._metrics(state) if self._has_metrics else NO_METRICS,
            num_cached_tokens=sequence.num_cached_tokens,
            weight_version=version,
        )

    def _request_output(self, state: _RequestState) -> Any:
        request, finished = state.request, not state.num_unfinished
        if state.prompt_token_ids is None:
            state.prompt_token_ids = request.prompt_token_ids.tolist()
        if request.pooling_params is not None:
            return self._pooling_output(state)
        outputs = [self._completion(sequence, state) for sequence in state.sequences]
        first = state.sequences[0]
        output = RequestOutput(
            request_id=request.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            metrics=state.metrics or (self._metrics(state) if self._has_metrics else NO_METRICS),
            num_cached_tokens=first.num_cached_tokens,
            kv_transfer_params=None if first.end is None else first.end.kv_transfer_output,
            weight_version=max([completion.weight_version for completion in outputs]),
        )
        if state.prompt_logprobs is not None:
            output.read_later(state.prompt_logprobs, 0, len(state.prompt_logprobs))
        if finished:
            state.sequences = []  # breaks a reference cycle, which only the garbage collector could free
        return output

    @staticmethod
    def _pooling_output(state: _RequestState) -> PoolingRequestOutput:
        """The output of a finished pooling request; without a result if it was aborted or has failed."""
        import torch

        shape, values = state.pooled or ([0], b"")
        data = torch.frombuffer(bytearray(values), dtype=torch.float32).reshape(shape) if values else torch.empty(shape)
        sequence = state.sequences[0]
        output = PoolingRequestOutput(
            request_id=state.request.request_id,
            outputs=PoolingOutput(data),
            prompt_token_ids=state.prompt_token_ids or [],
            num_cached_tokens=sequence.num_cached_tokens,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            weight_version=sequence.versions[-1][1],
        )
        if state.metrics is not None:
            output.metrics = state.metrics
        state.sequences = []
        return output

    @staticmethod
    def _completion(sequence: _Sequence, state: _RequestState) -> CompletionOutput:
        begin = 0
        if state.kind is DELTA:
            begin, sequence.num_returned = sequence.num_returned, len(sequence.token_ids)
        version, versions = _versions(sequence, begin)
        completion = CompletionOutput(
            index=sequence.index,
            text=sequence.text.take_delta() if state.kind is DELTA else sequence.text.text,
            token_ids=sequence.token_ids[begin:],
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            weight_version=version,
            weight_versions=versions,
            is_unfit=sequence.end is not None and sequence.end.status == RequestStatus.FINISHED_UNFIT,
        )
        OutputProcessor._set_logprobs(completion, sequence, begin)
        return completion

    @staticmethod
    def _set_logprobs(completion: CompletionOutput, sequence: _Sequence, begin: int) -> None:
        """Set the fields about logprobs, of the tokens from ``begin`` on."""
        if sequence.state.request.params.logprobs is not None:
            completion.cumulative_logprob = sequence.total_logprob
            completion.read_later(sequence.logprobs, begin, len(sequence.token_ids))


def _versions(sequence: _Sequence, begin: int) -> tuple[int, list[int] | None]:
    """``weight_version`` and ``weight_versions`` of `CompletionOutput`, of the tokens from ``begin`` on."""
    marks = sequence.versions
    if len(marks) == 1:
        return marks[0][1], None
    stop = len(sequence.token_ids)
    if marks[-1][0] == stop > 0:
        marks = marks[:-1]  # no token has the newest version yet
    if len(marks) == 1:
        return marks[0][1], None
    ends = [first for first, _ in marks[1:]] + [stop]
    each = [version for (first, version), end in zip(marks, ends, strict=True) for _ in range(first, end)]
    return marks[-1][1], each[begin:]


def merge_outputs(earlier: Any, later: Any, kind: RequestOutputKind | None) -> Any:
    """Two outputs of one request as one; what is no output replaces what is before it. Only deltas are joined; other
    outputs are complete by themselves."""
    if not isinstance(earlier, RequestOutput) or not isinstance(later, RequestOutput):
        return later
    if kind is DELTA:
        for before, after in zip(earlier.outputs, later.outputs, strict=True):
            if before.weight_versions is not None or after.weight_versions is not None:
                each = [part.weight_versions or [part.weight_version] * len(part.token_ids) for part in (before, after)]
                after.weight_versions = each[0] + each[1]
            after.text = before.text + after.text
            after.token_ids = before.token_ids + after.token_ids
            if before.logprobs is not None and after.logprobs is not None:
                after.logprobs = before.logprobs + after.logprobs
    return later

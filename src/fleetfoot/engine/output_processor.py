"""Output processing: turns tokens of a step into text, logprobs and timestamps, and detects stop strings."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fleetfoot.engine.input_processor import EngineRequest
from fleetfoot.outputs import (
    CompletionOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    SampledLogprobs,
    logprob_dict,
)
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.sampling_params import RequestOutputKind
from fleetfoot.records.step import EngineOutput, PackedLogprobs, RowLogprobs
from fleetfoot.tokenizer.text_stream import TextStream

if TYPE_CHECKING:
    from fleetfoot.engine.stats import StatsCollector
    from fleetfoot.tokenizer.tokenizer import Tokenizer

NO_METRICS = RequestMetrics()
RUNNING = RequestStatus.RUNNING
FINAL_ONLY, DELTA = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA
_FIRST_LOGPROB = struct.Struct("=f")
"""Reads the first logprob of `PackedLogprobs`."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """Output of one of a request's ``n`` sequences."""

    index: int
    request: Request
    state: _RequestState
    text: TextStream
    is_fast: bool
    """Whether its tokens, their text and their logprobs are only appended: it has no stop strings."""
    logprobs: SampledLogprobs
    token_ids: list[int] = field(default_factory=list)
    total_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
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
    prompt_logprobs: list[dict[int, Logprob] | None] | None
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
        finish: `Scheduler.finish`; called for a stop string in the text, and for an abort.
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
        self._sequences: dict[str, _Sequence] = {}

    def add(self, request: EngineRequest, sequences: list[Request], now: float) -> None:
        """Add a request.

        Args:
            sequences: one for each of its ``n`` outputs.
            now: seconds of a monotonic clock.
        """
        params, kind = request.params, request.params.output_kind
        detokenize = params.detokenize and self._tokenizer is not None
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None if params.prompt_logprobs is None else [None]
        is_plain = request.pooling_params is None and prompt_logprobs is None
        is_delta = kind is DELTA and len(sequences) == 1 and is_plain
        state = _RequestState(request, request.prompt, kind, detokenize, now, len(sequences), is_delta, prompt_logprobs)
        self._requests[request.request_id] = state
        for index, sequence in enumerate(sequences):
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
            state.sequences.append(_Sequence(index, sequence, state, text, is_plain and not params.stop, logprobs))
            state.sequences[-1].versions.append((0, self._weight_version))
            self._sequences[sequence.request_id] = state.sequences[-1]

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def request_ids(self) -> list[str]:
        """Ids of the unfinished requests, in the order in which they were added."""
        return list(self._requests)

    def has(self, request_id: str) -> bool:
        return request_id in self._requests

    def queued_ts(self, sequence_id: str) -> float | None:
        """When a sequence's request was added; None: it has ended."""
        sequence = self._sequences.get(sequence_id)
        return None if sequence is None else sequence.state.queued_ts

    def resumed(self) -> list[Request]:
        """The unfinished sequences, to be computed on. Tokens of theirs that no output has are dropped: the step that
        sampled them has failed."""
        requests = [sequence.request for sequence in self._sequences.values()]
        for sequence in self._sequences.values():
            del sequence.request.output_token_ids[len(sequence.token_ids) :]
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
            request = output.request
            sequence = sequences.get(request.request_id)
            if sequence is None:
                continue  # ended by a stop string while this step was in flight
            new_token_ids = output.new_token_ids
            if sequence.is_fast and sequence.last_token_ts and request.status is RUNNING:
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
            self._finish_request(sequence.request.request_id, RequestStatus.FINISHED_ABORTED)
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
        request, new_token_ids = output.request, output.new_token_ids
        if output.prompt_logprobs is not None:
            self._add_prompt_logprobs(sequence.state, *output.prompt_logprobs)
        if output.pooled is not None:
            sequence.state.pooled = output.pooled
            sequence.state.first_token_ts = sequence.last_token_ts = now  # of the result
        if new_token_ids:
            new_token_ids = self._detokenize(sequence, new_token_ids)
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
        if request.is_finished and sequence.finish_reason is None:
            sequence.text.finish()
            self._finish(sequence, request.finish_reason, request.stop_reason)
        return len(new_token_ids)

    def _detokenize(self, sequence: _Sequence, new_token_ids: list[int]) -> list[int]:
        """Update the text. Returns the tokens that belong to the output: fewer if a stop string ended it."""
        if not sequence.state.detokenize:
            return new_token_ids
        request = sequence.request
        stop = sequence.text.push(new_token_ids, ends_with_stop_token=request.status == RequestStatus.FINISHED_STOPPED)
        if stop is not None:
            new_token_ids = new_token_ids[: sequence.text.num_tokens_kept]
            if not request.is_finished:
                self._finish_request(request.request_id, RequestStatus.FINISHED_STOPPED, stop)
        return new_token_ids

    @staticmethod
    def _add_logprobs(sequence: _Sequence, rows: list[PackedLogprobs]) -> None:
        sequence.logprobs.extend(rows)
        for row in rows:
            sequence.total_logprob += _FIRST_LOGPROB.unpack_from(row)[0]

    def _add_prompt_logprobs(self, state: _RequestState, position: int, entries: list[PackedLogprobs]) -> None:
        """Add entries from ``position`` on. Other sequences, and preempted ones, return the same positions again."""
        collected = state.prompt_logprobs or []
        new = [logprob_dict(*RowLogprobs.unpack(entry), self._decode) for entry in entries[len(collected) - position :]]
        state.prompt_logprobs = [*collected, *new]  # a new list: earlier outputs hold the old one

    def _finish(self, sequence: _Sequence, reason: str | None, stop_reason: int | str | None) -> None:
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        del self._sequences[sequence.request.request_id]
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
        return RequestMetrics(
            arrival_time=state.request.arrival_time,
            queued_ts=state.queued_ts,
            scheduled_ts=min([sequence.request.scheduled_ts for sequence in sequences]),
            first_token_ts=state.first_token_ts,
            last_token_ts=max([sequence.last_token_ts for sequence in sequences]),
            num_generation_tokens=sum([len(sequence.token_ids) for sequence in sequences]),
            num_drafted_tokens=sum([sequence.request.num_drafted for sequence in sequences]),
            num_accepted_tokens=sum([sequence.request.num_accepted for sequence in sequences]),
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
            num_cached_tokens=max(0, sequence.request.num_cached_tokens),
            kv_transfer_params=sequence.request.kv_transfer_output,
            weight_version=version,
        )

    def _request_output(self, state: _RequestState) -> Any:
        request, finished = state.request, not state.num_unfinished
        if state.prompt_token_ids is None:
            state.prompt_token_ids = request.prompt_token_ids.tolist()
        if request.pooling_params is not None:
            return self._pooling_output(state)
        outputs = [self._completion(sequence, state) for sequence in state.sequences]
        first = state.sequences[0].request
        output = RequestOutput(
            request_id=request.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            prompt_logprobs=state.prompt_logprobs,
            metrics=state.metrics or (self._metrics(state) if self._has_metrics else NO_METRICS),
            num_cached_tokens=max(0, first.num_cached_tokens),
            kv_transfer_params=first.kv_transfer_output,
            weight_version=max([completion.weight_version for completion in outputs]),
        )
        if finished:
            state.sequences = []  # breaks a reference cycle, which only the garbage collector could free
        return output

    @staticmethod
    def _pooling_output(state: _RequestState) -> PoolingRequestOutput:
        """The output of a finished pooling request; without a result if it was aborted or has failed."""
        import torch

        shape, values = state.pooled or ([0], b"")
        data = torch.frombuffer(bytearray(values), dtype=torch.float32).reshape(shape) if values else torch.empty(shape)
        request = state.sequences[0].request
        output = PoolingRequestOutput(
            request_id=state.request.request_id,
            outputs=PoolingOutput(data),
            prompt_token_ids=state.prompt_token_ids or [],
            num_cached_tokens=max(0, request.num_cached_tokens),
            finish_reason=state.sequences[0].finish_reason,
            stop_reason=state.sequences[0].stop_reason,
            weight_version=state.sequences[0].versions[-1][1],
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
            is_unfit=sequence.request.status == RequestStatus.FINISHED_UNFIT,
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

"""The sampler of Model Runner V2: parameters are read from device tables, by row.

Eager and captured steps use the same code: logits processors, one op that samples every row, logprobs, verification.
A part is present if at least one row uses it, and processes each row separately: a row's result does not depend on
other rows, nor on whether the step is a graph.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.prepare.staging import StagedWriteTensor, StagingBuffer
from fleetfoot.kernels.runtime.triton_support import next_power_of_2
from fleetfoot.kernels.sampling.logits_processors import (
    BIASES,
    PREFIX_ENDS,
    PREFIX_TOKENS,
    TOKENS,
    ListedTokens,
    LogitsProcessorTables,
    TokenHistory,
)
from fleetfoot.kernels.sampling.sample import MAX_TOP_K, RandomRows, RowFilters
from fleetfoot.kernels.sampling.token_logprobs import MAX_SELECTED, LogprobRows
from fleetfoot.records.step import NewRequest
from fleetfoot.sampling.logprobs import LogprobsTensors, PromptLogprobs, token_logprobs
from fleetfoot.sampling.request_params import has_filters, has_penalties
from fleetfoot.sampling.shape import (
    GRAPH_LOGPROBS,
    LIST_CAPACITY,
    MASK_BITS,
    NUM_FIELDS,
    NUM_PLANES,
    SamplingVariant,
    mask_size,
)
from fleetfoot.sampling.verification import DeviceSamples, DraftVerification, LogitsBatch

# fields of a row, each contiguous over the rows
(MIN_TOKENS, TOP_K, IS_LIMITED, NUM_BIASES, NUM_WORDS, NUM_STOPS, LOGPROBS_SIZE,
 TEMPERATURE, TOP_P, LOG_MIN_P, REPETITION, FREQUENCY, PRESENCE) = range(NUM_FIELDS)  # fmt: skip
_FIELDS_AND_SEED = struct.Struct(f"={TEMPERATURE}i{NUM_FIELDS - TEMPERATURE}fQ")
_RANDOM, _FILTERS, _OTHER_FILTERS, _PROCESSORS = "random", "filters", "other filters", "logits processors"


class SamplingTables:
    """Sampling parameters, with an entry for each of ``R = max_num_seqs`` rows, in tables on the device.

    The host writes a row when its request is admitted, through the staging buffer; eager steps and graphs read it. A
    list of tokens that exceeds `LIST_CAPACITY` gets a tensor of its own, which graphs do not read: while such a request
    runs, sampling is not part of the graphs.

    ``seeds``: ``[R, 2]``, aligned to 8 bytes; ``fields``: ``[NUM_FIELDS, R]``; ``lists``: ``[R, 4, LIST_CAPACITY]``;
    ``masks``: ``[R, ceil(vocab_size / 32)]``; ``history``: the tokens of each row.
    """

    def __init__(
        self,
        seeds: StagedWriteTensor,
        fields: StagedWriteTensor,
        lists: StagedWriteTensor,
        masks: StagedWriteTensor,
        history: TokenHistory,
        vocab_size: int,
    ) -> None:
        integers = fields.tensor
        floats = integers.view(torch.float32)
        # arena indices of row 0's fields and seed, and their distance to those of row 1: [NUM_FIELDS + 2]
        self._indices = np.array([*(fields.index(field) for field in range(NUM_FIELDS)), seeds.base, seeds.base + 1])
        self._row_strides = np.array([1] * NUM_FIELDS + [seeds.row_stride] * 2)
        self._lists = lists
        self._masks = masks
        self._vocab_size = vocab_size
        self.seeds = seeds.tensor.view(torch.int64).view(integers.shape[1])
        self.temperature = floats[TEMPERATURE]
        self.filters = RowFilters(floats[LOG_MIN_P], integers[TOP_K], floats[TOP_P])
        self.logprobs_size = integers[LOGPROBS_SIZE]
        """1 + number of top logprobs of a row; 0: none, or more than `MAX_SELECTED`."""
        self.logits_processors = LogitsProcessorTables(
            is_limited=integers[IS_LIMITED],
            allowed_masks=masks.tensor,
            listed=ListedTokens(
                lists.tensor, integers[NUM_BIASES], integers[NUM_WORDS], integers[NUM_STOPS], integers[MIN_TOKENS]
            ),
            repetition=floats[REPETITION],
            frequency=floats[FREQUENCY],
            presence=floats[PRESENCE],
            history=history,
        )
        self.long_lists: dict[int, ListedTokens] = {}

    def stage(self, request: NewRequest, buffer: StagingBuffer) -> None:
        """Write a request's row. Of its list and mask only the used part is written."""
        params, row = request.params, request.row
        planes, counts = _listed_tokens(request, self._vocab_size)
        is_long = max(map(len, planes)) > LIST_CAPACITY
        size = params.logprobs
        packed = _FIELDS_AND_SEED.pack(
            params.min_tokens,
            max(params.top_k, 0),
            params.allowed_token_ids is not None,
            *((0, 0, 0) if is_long else counts),
            0 if size is None or size > MAX_SELECTED else 1 + size,
            params.temperature,
            params.top_p,
            math.log(params.min_p) if params.min_p > 0 else -math.inf,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            request.seed,
        )
        values = np.frombuffer(packed, np.int32)  # [NUM_FIELDS + 2]
        buffer.write(self._indices + self._row_strides * row, values, len(values))
        self.long_lists.pop(row, None)
        if is_long:
            self.long_lists[row] = self._long_list(planes, counts)
        else:
            for number, plane in enumerate(planes):
                if len(plane):
                    _write(self._lists, row, number * LIST_CAPACITY, plane, buffer)
        if params.allowed_token_ids is not None:
            bits = np.zeros(mask_size(self._vocab_size) * MASK_BITS, dtype=np.uint8)
            bits[params.allowed_token_ids] = 1
            _write(self._masks, row, 0, np.packbits(bits, bitorder="little").view(np.int32), buffer)

    def remove(self, row: int) -> None:
        """Free a row."""
        self.long_lists.pop(row, None)

    def _long_list(self, planes: Sequence[np.ndarray], counts: tuple[int, int, int]) -> ListedTokens:
        """A table with the same entries for every row."""
        min_tokens = self.logits_processors.listed.min_tokens
        table = np.zeros((1, NUM_PLANES, max(map(len, planes))), dtype=np.int32)
        for number, plane in enumerate(planes):
            table[0, number, : len(plane)] = plane
        every_row = torch.from_numpy(table).to(min_tokens.device).expand(len(min_tokens), -1, -1)
        num_biases, num_words, num_stops = (torch.full_like(min_tokens, count) for count in counts)
        return ListedTokens(every_row, num_biases, num_words, num_stops, min_tokens)


def _write(table: StagedWriteTensor, row: int, column: int, values: np.ndarray, buffer: StagingBuffer) -> None:
    first = table.index(row, column)
    buffer.write(np.arange(first, first + len(values)), values, len(values))


def _listed_tokens(request: NewRequest, vocab_size: int) -> tuple[list[np.ndarray], tuple[int, int, int]]:
    """A request's part of each plane of `ListedTokens`, and its numbers of biases, bad words and stop tokens."""
    biases, words = request.params.logit_bias or {}, request.bad_words_token_ids
    # a stop token outside the model's vocabulary cannot be generated
    stops = [token for token in sorted(request.stop_token_ids) if token < vocab_size and request.params.min_tokens]
    planes = [np.empty(0, dtype=np.int32)] * NUM_PLANES
    if biases or words or stops:
        prefixes: list[list[int]] = [[] for _ in biases] + [word[:-1] for word in words] + [[] for _ in stops]
        planes[TOKENS] = np.array([*biases, *(word[-1] for word in words), *stops], dtype=np.int32)
        planes[BIASES] = np.array(list(biases.values()), dtype=np.float32).view(np.int32)
        planes[PREFIX_ENDS] = np.cumsum([len(prefix) for prefix in prefixes], dtype=np.int32)
        planes[PREFIX_TOKENS] = np.array([token for prefix in prefixes for token in prefix], dtype=np.int32)
    return planes, (len(biases), len(words), len(stops))


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The samples of a step."""

    samples: DeviceSamples
    token_ids: torch.Tensor
    """``[L]`` int64, for each row of logits."""
    invalid: torch.Tensor
    """``[L]`` 0 or 1: the row's logits contain NaN or +inf, or only -inf; its token is undefined."""
    logprobs: LogprobsTensors | None
    """``[L]`` rows, valid for rows with 0 to 256 logprobs; None: no row has logprobs."""


class Sampler:
    """Tracks the features that the running requests use, and samples batches. ``compute_logits``: ``[n, hidden_size]``
    -> ``[n, vocab_size]``, for prompt logprobs; ``is_as_captured``: eager steps launch the kernels of `VARIANTS`, with
    which greedy rows draw, too; else those of the parts that requests use."""

    def __init__(
        self,
        tables: SamplingTables,
        verification: DraftVerification,
        ops: Kernels,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        vocab_size: int,
        *,
        is_as_captured: bool,
    ) -> None:
        self._is_as_captured = is_as_captured
        self._tables = tables
        self._verification = verification
        self._ops = ops
        self._vocab_size = vocab_size
        self._requests: dict[int, NewRequest] = {}
        self._features: Counter[str] = Counter()
        self._num_logprobs: dict[int, int] = {}  # of the rows with logprobs
        self.prompt_logprobs = PromptLogprobs(compute_logits, vocab_size, ops.token_logprobs)

    def add(self, request: NewRequest) -> None:
        """A request takes a row."""
        self._requests[request.row] = request
        self._count(request, 1)
        if request.params.logprobs is not None:
            self._num_logprobs[request.row] = request.params.logprobs
        self.prompt_logprobs.add(request)

    def remove(self, row: int) -> None:
        """A row is freed."""
        self.prompt_logprobs.remove(row)
        request = self._requests.pop(row, None)
        self._num_logprobs.pop(row, None)
        if request is not None:
            self._count(request, -1)
            self._tables.remove(row)

    def _count(self, request: NewRequest, change: int) -> None:
        self._features.update(dict.fromkeys(_features(request), change))

    @property
    def variant(self) -> SamplingVariant:
        """The parts that the running requests use."""
        sizes = [size for size in set(self._num_logprobs.values()) if not _is_large(size)]
        num_logprobs = max(GRAPH_LOGPROBS, next_power_of_2(max(sizes) or 1)) if sizes else None
        features = self._features
        return SamplingVariant(
            features[_FILTERS] > 0, features[_OTHER_FILTERS] > 0, features[_PROCESSORS] > 0, num_logprobs
        )

    @property
    def fits_graph(self) -> bool:
        """Whether a graph can contain the sampling of all running requests."""
        has_many = any(not 0 <= size <= GRAPH_LOGPROBS for size in set(self._num_logprobs.values()))
        return not (self._tables.long_lists or has_many or self.prompt_logprobs.is_active)

    def __call__(
        self, logits: torch.Tensor, batch: LogitsBatch, masks: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> SamplerOutput:
        """Sample each row of ``logits [L, vocab_size]`` with the parts that the running requests use. ``masks``: of
        grammars, and the index of each row's; see `Kernels.mask_tokens`."""
        variant = replace(self.variant, masks=masks is not None)
        if not self._is_as_captured:
            return self.sample(logits, batch, variant, masks, all_greedy=not self._features[_RANDOM])
        captured = variant.captured()
        return self.sample(logits, batch, replace(captured, logprobs=variant.logprobs or captured.logprobs), masks)

    def sample(
        self,
        logits: torch.Tensor,
        batch: LogitsBatch,
        variant: SamplingVariant,
        masks: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        all_greedy: bool = False,
    ) -> SamplerOutput:
        """Sample each row of ``logits [L, vocab_size]``, padding included, without host synchronisation: a graph can
        contain it. ``variant``: has at least the parts that the rows use; ``all_greedy``: no row draws. Without
        logprobs, ``logits`` may be changed."""
        tables, processed = self._tables, logits
        if variant.logits_processors:
            parameters = tables.logits_processors, tables.long_lists
            processed = self._ops.process_logits(logits, batch.rows, batch.seq_lens, *parameters)
        if masks is not None:
            if processed is logits and (self._num_logprobs or variant.logprobs is not None):
                processed = logits.clone()
            self._ops.mask_tokens(processed, *masks)
        sampled = torch.empty((2, len(logits)), dtype=torch.int64, device=logits.device)
        token_ids, invalid = sampled
        random = None
        if not all_greedy:
            filters = replace(tables.filters, top_k_only=not variant.other_filters) if variant.filters else None
            random = RandomRows(tables.temperature, tables.seeds, batch.seq_lens, filters, batch.rows)
        self._ops.sample(processed, random, invalid=invalid, out=token_ids)
        logprobs = None
        if variant.logprobs is not None:
            rows, most = LogprobRows(tables.logprobs_size, batch.rows), min(variant.logprobs, self._vocab_size)
            logprobs = LogprobsTensors(self._ops.token_logprobs(logits, token_ids, most, rows))
        return SamplerOutput(self._verification(sampled, batch), token_ids, invalid, logprobs)

    def num_logprobs(self, rows: Sequence[int]) -> dict[int, int]:
        """Index in ``rows`` -> number of top logprobs, for the rows that `SamplerOutput.logprobs` is valid for."""
        return self._logprobs_of(rows, is_large=False)

    def large_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, rows: Sequence[int]
    ) -> tuple[LogprobsTensors, dict[int, int]] | None:
        """Logprobs of the rows with more than 256, and index in ``rows`` -> number of top logprobs (-1: all).
        ``logits``: ``[L, vocab_size]``; ``token_ids``, ``rows``: ``[L]``."""
        sizes = self._logprobs_of(rows, is_large=True)
        if not sizes:
            return None
        largest = -1 if -1 in sizes.values() else max(sizes.values())
        index = torch.tensor(list(sizes), device=logits.device)
        return token_logprobs(logits[index], largest, token_ids[index], self._ops.token_logprobs), sizes

    def _logprobs_of(self, rows: Sequence[int], *, is_large: bool) -> dict[int, int]:
        used = {row: size for row, size in self._num_logprobs.items() if _is_large(size) is is_large}
        return {index: used[row] for index, row in enumerate(rows) if row in used} if used else {}


def _is_large(num_logprobs: int) -> bool:
    """More logprobs than a graph contains; -1: those of all tokens."""
    return num_logprobs < 0 or num_logprobs > MAX_SELECTED


def _features(request: NewRequest) -> list[str]:
    """The optional parts of sampling that a request uses."""
    params = request.params
    is_filtered = has_filters(params)
    has_lists = params.allowed_token_ids is not None or bool(params.logit_bias) or bool(request.bad_words_token_ids)
    features = {
        _RANDOM: params.temperature > 0,
        _FILTERS: is_filtered,
        _OTHER_FILTERS: is_filtered and not 0 < params.top_k <= MAX_TOP_K,
        _PROCESSORS: has_penalties(params) or has_lists or params.min_tokens > 0,
    }
    return [name for name, is_on in features.items() if is_on]

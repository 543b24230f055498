"""Sampling parameters of all rows in Model Runner V2, in device tables that eager steps and graphs read.

The host writes a row when its request is admitted, through the staging buffer.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np
import torch

from fleetfoot.kernels.prepare.staging import StagedWriteTensor, StagingBuffer
from fleetfoot.kernels.sampling.filters import RowFilters
from fleetfoot.kernels.sampling.logits_processors import (
    BIASES,
    PREFIX_ENDS,
    PREFIX_TOKENS,
    TOKENS,
    AllowedTokenTable,
    ListedTokens,
    LogitsProcessorTables,
    PenaltyTable,
    TokenHistory,
)
from fleetfoot.kernels.sampling.token_logprobs import MAX_SELECTED
from fleetfoot.records.step import NewRequest
from fleetfoot.sampling.shape import LIST_CAPACITY, MASK_BITS, NUM_FIELDS, NUM_PLANES, mask_size

# fields of a row, each contiguous over the rows
(MIN_TOKENS, TOP_K, IS_LIMITED, NUM_BIASES, NUM_WORDS, NUM_STOPS, LOGPROBS_SIZE,
 TEMPERATURE, TOP_P, LOG_MIN_P, REPETITION, FREQUENCY, PRESENCE) = range(NUM_FIELDS)  # fmt: skip
_FIELDS_AND_SEED = struct.Struct(f"={TEMPERATURE}i{NUM_FIELDS - TEMPERATURE}fQ")


class SamplingTables:
    """Tables with an entry for each of ``R = max_num_seqs`` rows.

    A list of tokens that exceeds `LIST_CAPACITY` gets a tensor of its own, which graphs do not read: while such a
    request runs, sampling is not part of the graphs.

    Args:
        seeds: ``[R, 2]``, aligned to 8 bytes. fields: ``[NUM_FIELDS, R]``. lists: ``[R, 4, LIST_CAPACITY]``.
        masks: ``[R, ceil(vocab_size / 32)]``.
        history: the tokens of each row.
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
            AllowedTokenTable(integers[IS_LIMITED], masks.tensor),
            ListedTokens(
                lists.tensor, integers[NUM_BIASES], integers[NUM_WORDS], integers[NUM_STOPS], integers[MIN_TOKENS]
            ),
            PenaltyTable(floats[REPETITION], floats[FREQUENCY], floats[PRESENCE]),
            history,
        )
        self.long_lists: dict[int, ListedTokens] = {}

    def stage(self, request: NewRequest, buffer: StagingBuffer) -> None:
        """Write a request's row. Of its list and mask only the used part is written."""
        params, row = request.params, request.row
        listed = _RowList.of(request, self._vocab_size)
        is_long = listed.length > LIST_CAPACITY
        has_logprobs = params.logprobs is not None and params.logprobs <= MAX_SELECTED
        packed = _FIELDS_AND_SEED.pack(
            params.min_tokens,
            max(params.top_k, 0),
            params.allowed_token_ids is not None,
            0 if is_long else listed.num_biases,
            0 if is_long else listed.num_words,
            0 if is_long else listed.num_stops,
            1 + params.logprobs if has_logprobs and params.logprobs is not None else 0,
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
            self.long_lists[row] = self._long_list(listed)
        else:
            for number, plane in enumerate(listed.planes):
                if len(plane):
                    _write(self._lists, row, number * LIST_CAPACITY, plane, buffer)
        if params.allowed_token_ids is not None:
            bits = np.zeros(mask_size(self._vocab_size) * MASK_BITS, dtype=np.uint8)
            bits[params.allowed_token_ids] = 1
            _write(self._masks, row, 0, np.packbits(bits, bitorder="little").view(np.int32), buffer)

    def remove(self, row: int) -> None:
        """Free a row."""
        self.long_lists.pop(row, None)

    def _long_list(self, listed: _RowList) -> ListedTokens:
        """A table with the same entries for every row."""
        planes = np.zeros((1, NUM_PLANES, listed.length), dtype=np.int32)
        for number, plane in enumerate(listed.planes):
            planes[0, number, : len(plane)] = plane
        min_tokens = self.logits_processors.listed.min_tokens
        num_rows, device = len(min_tokens), min_tokens.device
        sizes = torch.tensor([listed.num_biases, listed.num_words, listed.num_stops], dtype=torch.int32)
        num_biases, num_words, num_stops = sizes.to(device).unsqueeze(1).expand(3, num_rows).contiguous()
        every_row = torch.from_numpy(planes).to(device).expand(num_rows, -1, -1)
        return ListedTokens(every_row, num_biases, num_words, num_stops, min_tokens)


def _write(table: StagedWriteTensor, row: int, column: int, values: np.ndarray, buffer: StagingBuffer) -> None:
    first = table.index(row, column)
    buffer.write(np.arange(first, first + len(values)), values, len(values))


@dataclass(frozen=True, slots=True)
class _RowList:
    """The entries of one request in `ListedTokens`: its part of each plane, int32."""

    planes: tuple[np.ndarray, ...]
    num_biases: int
    num_words: int
    num_stops: int

    @classmethod
    def of(cls, request: NewRequest, vocab_size: int) -> _RowList:
        params, words = request.params, request.bad_words_token_ids
        biases = params.logit_bias or {}
        # a stop token outside the model's vocabulary cannot be generated
        stops = [token for token in sorted(request.stop_token_ids) if token < vocab_size] if params.min_tokens else []
        if not biases and not words and not stops:
            return _EMPTY_LIST
        prefixes: list[list[int]] = [[] for _ in biases] + [list(word[:-1]) for word in words] + [[] for _ in stops]
        planes: list[np.ndarray] = [np.empty(0, dtype=np.int32)] * NUM_PLANES
        planes[TOKENS] = np.array([*biases, *(word[-1] for word in words), *stops], dtype=np.int32)
        planes[BIASES] = np.array(list(biases.values()), dtype=np.float32).view(np.int32)
        planes[PREFIX_ENDS] = np.cumsum([len(prefix) for prefix in prefixes], dtype=np.int32)
        planes[PREFIX_TOKENS] = np.array([token for prefix in prefixes for token in prefix], dtype=np.int32)
        return cls(tuple(planes), len(biases), len(words), len(stops))

    @property
    def length(self) -> int:
        """Entries of the longest plane."""
        return max(len(plane) for plane in self.planes)


_EMPTY_LIST = _RowList((np.empty(0, dtype=np.int32),) * NUM_PLANES, 0, 0, 0)

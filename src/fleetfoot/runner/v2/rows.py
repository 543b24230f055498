"""A row on the device for each running request, its block table, and its tokens in pages."""

from __future__ import annotations

import math
import struct

import numpy as np
import torch

from fleetfoot.kernels.sampling.records import LIST_CAPACITY
from fleetfoot.kernels.sampling.token_logprobs import MAX_SELECTED
from fleetfoot.records.step import NewRequest
from fleetfoot.runner.v2.row_lists import RowList
from fleetfoot.kernels.prepare.staging import StagedWriteTensor, StagingBuffer

# fields of a request, each one contiguous over the rows; floats are bit-cast
(NUM_COMPUTED, PREFILL_LEN, PROMPT_LEN, LIMIT, MIN_TOKENS, TOP_K, IS_LIMITED, NUM_BIASES, NUM_WORDS, NUM_STOPS,
 LOGPROBS_SIZE, TEMPERATURE, TOP_P, LOG_MIN_P, REPETITION, FREQUENCY, PRESENCE) = range(17)  # fmt: skip
NUM_FIELDS = 17
_FIELDS_AND_SEED = struct.Struct(f"={TEMPERATURE}i{NUM_FIELDS - TEMPERATURE}fQ")
_NO_LIMIT = 2**31 - 1


class RequestState:
    """The rows. The scheduler owns the numbering: a row is filled when a request is admitted, and needs no clearing.

    Each field is ``[max_num_seqs]``, int32 or, bit-cast, float32; seeds are int64. ``last_sampled`` and
    ``draft_tokens`` are written by the device alone. Tokens are kept in pages, one int32 for each KV slot, so that the
    block table is their index too: a prefix cache hit brings its tokens along, and the memory grows with the KV cache,
    not with max_num_seqs * max_model_len.
    """

    def __init__(
        self,
        seeds: StagedWriteTensor,
        fields: StagedWriteTensor,
        pages: StagedWriteTensor,
        *,
        block_size: int,
        num_draft: int,
    ) -> None:
        integers = fields.tensor  # [NUM_FIELDS, max_num_seqs]
        floats = integers.view(torch.float32)
        max_num_seqs, device = integers.shape[1], integers.device
        # where row 0 has its fields and its seed in the arena, and how far it is to the next row's: [NUM_FIELDS + 2]
        self._places = np.array([*(fields.index(field) for field in range(NUM_FIELDS)), seeds.base, seeds.base + 1])
        self._row_strides = np.array([1] * NUM_FIELDS + [seeds.row_stride] * 2)
        self._pages = pages
        self._block_size = block_size
        self._offsets = np.arange(block_size)
        self.seeds = seeds.tensor.view(torch.int64).view(max_num_seqs)
        self.num_computed = integers[NUM_COMPUTED]
        self.prefill_lens = integers[PREFILL_LEN]
        self.prompt_lens = integers[PROMPT_LEN]
        self.limits = integers[LIMIT]
        """Positions from here on are never an input: the last token's, and what drafts would reach behind it."""
        self.min_tokens = integers[MIN_TOKENS]
        self.top_k = integers[TOP_K]
        self.is_limited = integers[IS_LIMITED]  # to its allowed tokens
        self.num_biases = integers[NUM_BIASES]  # in its list, as the next two
        self.num_words = integers[NUM_WORDS]
        self.num_stops = integers[NUM_STOPS]
        self.logprobs_size = integers[LOGPROBS_SIZE]
        """1 + how many of the most probable tokens a step reports; 0: nothing, or more than a graph does."""
        self.temperature = floats[TEMPERATURE]
        self.top_p = floats[TOP_P]
        self.log_min_p = floats[LOG_MIN_P]  # -inf where off
        self.repetition_penalty = floats[REPETITION]
        self.frequency_penalty = floats[FREQUENCY]
        self.presence_penalty = floats[PRESENCE]
        self.token_pages = pages.tensor  # [num_blocks * block_size]
        self.last_sampled = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        # one row more than there are, for what padding requests write
        self.draft_tokens = torch.full((max_num_seqs + 1, num_draft), -1, dtype=torch.int32, device=device)

    def stage(self, request: NewRequest, listed: RowList, buffer: StagingBuffer) -> None:
        """Fill a request's row."""
        params = request.params
        is_listed = listed.length <= LIST_CAPACITY
        logprobs = -1 if params.logprobs is None or params.logprobs > MAX_SELECTED else params.logprobs
        packed = _FIELDS_AND_SEED.pack(
            request.num_computed_tokens,
            len(request.token_ids),
            request.num_prompt_tokens,
            min(request.max_tokens_in_all - 1, _NO_LIMIT),
            params.min_tokens,
            max(params.top_k, 0),
            params.allowed_token_ids is not None,
            listed.num_biases if is_listed else 0,
            listed.num_words if is_listed else 0,
            listed.num_stops if is_listed else 0,
            1 + logprobs,
            params.temperature,
            params.top_p,
            math.log(params.min_p) if params.min_p > 0 else -math.inf,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            request.seed,
        )
        values = np.frombuffer(packed, np.int32)  # [NUM_FIELDS + 2]
        buffer.write(self._places + self._row_strides * request.row, values, len(values))

    def stage_tokens(self, request: NewRequest, first: int, block_ids: np.ndarray, buffer: StagingBuffer) -> None:
        """Fill the pages of a request's tokens from place ``first`` on; those before are there.

        Args:
            block_ids: ``[num_blocks]``, those of the request.
        """
        size, end = self._block_size, len(request.token_ids)
        begin = first // size * size  # of the first block that is written to
        # pages lie in the arena as blocks do in the KV cache: [num_blocks that are written to, block_size]
        places = self._pages.base + (block_ids[begin // size :, np.newaxis] * size + self._offsets)
        buffer.write(places.reshape(-1)[first - begin : end - begin], _packed_tokens(request)[first:], end - first)


def _packed_tokens(request: NewRequest) -> np.ndarray:
    """``[num_tokens]`` int32: all tokens known."""
    if request.packed_prompt is None:
        return np.array(request.token_ids, np.int32)
    prompt = np.frombuffer(request.packed_prompt, np.int32)
    behind = request.token_ids[request.num_prompt_tokens :]  # what it had generated when it was preempted
    return np.concatenate((prompt, np.array(behind, np.int32))) if behind else prompt


class BlockTables:
    """``[max_num_seqs, max_blocks]`` KV block ids, row by row; entries past a request's last block mean nothing."""

    def __init__(self, table: StagedWriteTensor) -> None:
        self._table = table
        self.tensor = table.tensor

    def stage(self, row: int, block_ids: np.ndarray, buffer: StagingBuffer) -> None:
        """Put ``block_ids [num_blocks]`` into a row from its first column on."""
        first = self._table.index(row)
        buffer.write(np.arange(first, first + len(block_ids)), block_ids, len(block_ids))

    def stage_appended(self, appended: list[tuple[int, int, list[int]]], buffer: StagingBuffer) -> None:
        """Put (row, first column, block ids) into the rows; together, because decodes bring one block each."""
        stride, base = self._table.row_stride, self._table.base
        indices = [base + row * stride + start + i for row, start, block_ids in appended for i in range(len(block_ids))]
        values = [block for _, _, block_ids in appended for block in block_ids]
        buffer.write(np.array(indices), values, len(values))

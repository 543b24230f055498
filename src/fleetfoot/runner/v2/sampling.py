"""Sampling in Model Runner V2: parameters are read on the device, through the batch's row numbers.

There is one way, for steps that run eagerly and for those that are captured: edits of the logits, one op that chooses a
token for every row, logprobs. Each part is there if some row wants it, and works on each row by itself: what a row gets
does not depend on its neighbours, nor on whether the step is a graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from fleetfoot.kernels.opset import OpSet
from fleetfoot.kernels.runtime.triton_support import next_power_of_2
from fleetfoot.kernels.sampling.filters import RowFilters
from fleetfoot.kernels.sampling.token_logprobs import MAX_SELECTED, token_logprobs
from fleetfoot.records.step import NewRequest
from fleetfoot.runner.capture_table import LOGPROBS_ROOM, SamplingVariant
from fleetfoot.runner.v2.state import DeviceState
from fleetfoot.runner.v2.verification import LogitsRows
from fleetfoot.sampling.logprobs import LogprobsTensors
from fleetfoot.sampling.logprobs import token_logprobs as any_number_of_logprobs

_RANDOM, _FILTERED, _EDITED, _REPORTED = "random", "filtered", "edited", "reported"


@dataclass(frozen=True, slots=True)
class Sampled:
    """Of each row of logits."""

    chosen: torch.Tensor
    """``[2, L]`` int64: `token_ids` and `invalid`, together as the host will have them."""
    logprobs: LogprobsTensors | None
    """``[L]`` rows, of which those mean something that want logprobs, but not very many; None: nobody does."""

    @property
    def token_ids(self) -> torch.Tensor:
        """``[L]`` int64"""
        return self.chosen[0]

    @property
    def invalid(self) -> torch.Tensor:
        """``[L]`` 0 or 1: the row's logits hold NaN or +inf, or nothing but -inf; its token means nothing."""
        return self.chosen[1]


class RowSampler:
    """Knows what every row wants, and samples a batch.

    Args:
        ops: the operations, of which ``choose_tokens`` is used.
        vocab_size: length of the logits.
    """

    def __init__(self, state: DeviceState, ops: OpSet, vocab_size: int) -> None:
        self._state = state
        self._choose_tokens = ops.choose_tokens
        self._vocab_size = vocab_size
        self._rows: dict[int, NewRequest] = {}
        self._wanted: Counter[Hashable] = Counter()

    def add(self, request: NewRequest) -> None:
        """A row is taken."""
        self._rows[request.row] = request
        self._wanted.update(_wishes(request))

    def remove(self, row: int) -> None:
        """A row is given back."""
        request = self._rows.pop(row, None)
        if request is not None:
            self._wanted.subtract(_wishes(request))
            self._state.edits.remove(row)

    @property
    def wanted(self) -> SamplingVariant:
        """What the rows that are taken want, all together."""
        counts = [wish for wish, times in self._wanted.items() if isinstance(wish, int) and times]
        few = [count for count in counts if 0 <= count <= MAX_SELECTED]
        room = min(max(LOGPROBS_ROOM, next_power_of_2(max(few) or 1)), self._vocab_size) if few else None
        return SamplingVariant(self._wanted[_FILTERED] > 0, self._wanted[_EDITED] > 0, room)

    @property
    def fits_graph(self) -> bool:
        """Whether a graph can hold all that they want."""
        return self._state.edits.fit_graphs and not any(
            times for wish, times in self._wanted.items() if isinstance(wish, int) and _is_many(wish)
        )

    def __call__(self, logits: torch.Tensor, whose: LogitsRows) -> Sampled:
        """Choose a token for each row of ``logits [L, vocab_size]``, as the rows that are taken want it."""
        return self.sample(logits, whose, self.wanted, is_greedy=not self._wanted[_RANDOM])

    def sample(
        self, logits: torch.Tensor, whose: LogitsRows, variant: SamplingVariant, *, is_greedy: bool = False
    ) -> Sampled:
        """Choose a token for each row of logits. Launches alone, on a GPU: a graph can hold it.

        Args:
            logits: ``[L, vocab_size]``, those of padding among them if need be.
            variant: at least what any of the rows wants.
            is_greedy: the host knows that nobody draws.
        """
        requests = self._state.requests
        edited = self._state.edits.apply(logits, whose.rows, whose.seq_lens) if variant.edits else logits
        chosen = torch.empty((2, len(logits)), dtype=torch.int64, device=logits.device)
        token_ids, invalid = chosen
        if is_greedy:
            self._choose_tokens(edited, invalid=invalid, out=token_ids)
        else:
            self._choose_tokens(
                edited,
                requests.temperature,
                requests.seeds,
                whose.seq_lens,
                rows=whose.rows,
                invalid=invalid,
                filters=RowFilters(requests.log_min_p, requests.top_k, requests.top_p) if variant.filters else None,
                out=token_ids,
            )
        if variant.logprobs is None:
            return Sampled(chosen, None)
        sizes = requests.logprobs_size
        packed = token_logprobs(logits, token_ids, variant.logprobs, sizes=sizes, rows=whose.rows)
        return Sampled(chosen, LogprobsTensors(packed))

    def logprobs_counts(self, rows: Sequence[int], *, many: bool = False) -> dict[int, int]:
        """Index in ``rows`` -> number of most probable tokens, of those that want few of them, or very many."""
        if not self._wanted[_REPORTED]:
            return {}
        wanted = ((index, self._rows[row].params.logprobs) for index, row in enumerate(rows))
        return {index: count for index, count in wanted if count is not None and _is_many(count) == many}

    def many_logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, counts: dict[int, int]) -> LogprobsTensors:
        """Of the rows of logits that want very many."""
        most = -1 if -1 in counts.values() else max(counts.values())
        index = torch.tensor(list(counts), device=logits.device)
        return any_number_of_logprobs(logits[index], most, token_ids[index])


def _is_many(count: int) -> bool:
    """More logprobs than a graph reports; -1: those of all tokens."""
    return count < 0 or count > MAX_SELECTED


def _wishes(request: NewRequest) -> list[Hashable]:
    """What a request wants: some of the names above, and a number of logprobs."""
    params = request.params
    wishes: list[Hashable] = [] if params.logprobs is None else [_REPORTED, params.logprobs]
    if params.temperature > 0:
        wishes.append(_RANDOM)
        if params.min_p > 0 or params.top_k > 0 or params.top_p < 1:
            wishes.append(_FILTERED)
    is_penalized = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
    is_masked = params.allowed_token_ids is not None or bool(params.logit_bias)
    if is_penalized or is_masked or request.bad_words_token_ids or params.min_tokens > 0:
        wishes.append(_EDITED)
    return wishes

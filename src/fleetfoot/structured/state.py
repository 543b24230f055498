"""The state of a sequence under a grammar: which of its output tokens matchers consume, its drafts, and its masks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetfoot.records.step import SchedulerOutput
from fleetfoot.structured.grammars import GrammarText
from fleetfoot.structured.mask_space import clear_bits, fill_masks, set_only
from fleetfoot.structured.processes import Replica


class ReasoningEnd:
    """Finds the text after which a grammar begins. ``piece``: the text of a token."""

    def __init__(self, marker: bytes, piece: Callable[[int], bytes]) -> None:
        self._marker, self._piece = marker, piece
        self._begin: Sequence[int] = ()
        self._end: Sequence[int] = ()
        self._limit = 0

    def limit(self, num_tokens: int, begin: Sequence[int], end: Sequence[int]) -> None:
        """Force the tokens ``begin`` at first, and ``end`` after ``num_tokens`` more."""
        self._begin, self._end, self._limit = begin, end, len(begin) + num_tokens

    def forced(self, position: int) -> int | None:
        """The token that must be at a position of the output, which is before the end; None: any."""
        if position < len(self._begin):
            return self._begin[position]
        place = position - self._limit
        return self._end[place] if 0 <= place < len(self._end) else None

    def find(self, tail: bytes, token_id: int) -> tuple[bytes, bytes | None]:
        """Read a token after ``tail``, the text that may begin the marker. Returns the new tail, and the rest of the
        token's text after the marker; None: it is not there yet."""
        before, found, rest = (tail + self._piece(token_id)).partition(self._marker)
        return (b"", rest) if found else (before[max(0, len(before) - len(self._marker) + 1) :], None)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled constraint."""

    matcher: Any
    """An `llguidance.LLMatcher` at the beginning; sequences get copies."""
    text: GrammarText
    tokenizer: Any
    """An `llguidance.LLTokenizer`. Ids after the tokenizer's own, up to the model's vocabulary, are never allowed."""
    reasoning: ReasoningEnd | None
    """None: the constraint begins at once."""


def matcher_error(matcher: Any) -> str:
    """The error of a matcher of llguidance, without the state of its parser, which follows."""
    error, _, _ = matcher.get_error().partition("\n<state>")
    return f"{error:.300}"


class GrammarState:
    """One sequence. The state follows from its output tokens, so preemptions and restarts need nothing else.

    A matcher consumes the prefix, which is what the last token of reasoning has of the answer, and the output after
    it: `tokens` has those that it lacks.

    Args:
        banned: tokens that are never allowed where another one is: the end tokens, with ``ignore_eos``.
        min_tokens: end tokens and ``stop_token_ids`` are not allowed before, where another token is.
    """

    __slots__ = (
        "_ahead", "_banned", "_begin", "_min_tokens", "_num_read", "_num_taken", "_prefix", "_reasoning", "_tail",
        "begin", "drafts", "first_mask", "first_row", "grammar", "has_begun", "is_restricted", "matcher", "num_masks",
        "replica", "step_drafts",
    )  # fmt: skip

    def __init__(self, grammar: Grammar, banned: Sequence[int], min_tokens: int) -> None:
        self.grammar = grammar
        self.replica: Replica | None = None
        """A matcher in another process."""
        self._reasoning = grammar.reasoning
        self._banned, self._min_tokens = banned, min_tokens
        self._num_read = 0
        self._begin = 0
        self._prefix: Sequence[int] = ()
        self._tail = b""
        self.has_begun = grammar.reasoning is None
        """Whether the grammar applies to the next token."""
        self.drafts: list[int] = []
        """Those that the next step verifies, as its runner has reported them; -1: none."""
        # of the step: the first row of logits, the first mask among those of the step, and the number of masks
        self.first_row = self.first_mask = self.num_masks = 0
        self.begin = 0  # the first of its rows that the grammar applies to
        self._ahead: Any = None  # a matcher for that row; None: that of the sequence
        self.step_drafts: Sequence[int] = ()  # after that row
        self.is_restricted = False  # whether `restrict` has something to do
        self._restart()

    def _restart(self) -> None:
        self.matcher = self.grammar.matcher.deep_copy()  # a reset could keep a mask; see `fill_masks`
        """It has consumed what `catch_up` was called with last."""
        self._num_taken = 0

    def read(self, output_token_ids: Sequence[int]) -> None:
        """Note the tokens that are new. An output may have become shorter: its last tokens were lost with a worker."""
        num_tokens = len(output_token_ids)
        if not self.has_begun or num_tokens < self._begin:
            self._find_beginning(output_token_ids)
        self._num_read = num_tokens

    def _find_beginning(self, output_token_ids: Sequence[int]) -> None:
        assert self._reasoning is not None
        if len(output_token_ids) < self._num_read:
            self._num_read, self._tail, self.has_begun = 0, b"", False
        for place in range(self._num_read, len(output_token_ids)):
            self._tail, rest = self._reasoning.find(self._tail, output_token_ids[place])
            if rest is not None:
                self.has_begun, self._begin = True, place + 1
                self._prefix = self._start(rest)
                return

    def _start(self, text: bytes) -> Sequence[int]:
        """Begin again. Returns the tokens of the beginning of the answer, which is in the last token of reasoning;
        none, if it is white space that the grammar does not have."""
        self._restart()
        token_ids: list[int] = self.grammar.tokenizer.tokenize_bytes(text)
        return token_ids if self.matcher.validate_tokens(token_ids) == len(token_ids) else ()

    def tokens(self, output_token_ids: Sequence[int], num_taken: int) -> tuple[bool, Sequence[int]]:
        """The tokens up to the last `read` that a matcher lacks which has consumed ``num_taken``, and whether it has to
        begin again."""
        is_reset = self._begin + num_taken - len(self._prefix) > self._num_read
        num_taken = 0 if is_reset else num_taken
        begin = self._begin + max(0, num_taken - len(self._prefix))
        return is_reset, [*self._prefix[num_taken:], *output_token_ids[begin : self._num_read]]

    def advance(self, output_token_ids: Sequence[int], replica: Replica) -> tuple[bool, Sequence[int]]:
        """`tokens` of a replica, which lacks none then."""
        is_reset, token_ids = self.tokens(output_token_ids, replica.num_sent)
        replica.num_sent = len(token_ids) if is_reset else replica.num_sent + len(token_ids)
        return is_reset, token_ids

    def catch_up(self, output_token_ids: Sequence[int]) -> str:
        """Let `matcher` consume the tokens that it lacks. Returns why one is refused; empty: none is."""
        is_reset, token_ids = self.tokens(output_token_ids, self._num_taken)
        if is_reset:
            self._restart()
        for token_id in token_ids:
            self._num_taken += 1
            if not self.matcher.consume_token(token_id):
                return f"the grammar refuses token {token_id} of the output: {matcher_error(self.matcher)}"
        return ""

    def walk(self, num_drafts: int) -> tuple[int, Any, list[int]]:
        """The first of ``1 + num_drafts`` positions that the grammar applies to, counted from the next token, a matcher
        for it, and the drafts from there on. None as the matcher: that of the sequence. Beyond the last position: it
        applies to none."""
        drafts = self.drafts[:num_drafts]
        drafts = drafts[: drafts.index(-1)] if -1 in drafts else drafts
        if self.has_begun:
            return 0, None, drafts
        tail = self._tail
        assert self._reasoning is not None
        for place, token_id in enumerate(drafts, start=1):
            tail, rest = self._reasoning.find(tail, token_id)
            if rest is not None:
                prefix = self._start(rest)
                matcher = self.matcher.deep_copy()
                matcher.consume_tokens(prefix)
                return place, matcher, drafts[place:]
        return num_drafts + 1, None, []

    def enter(self, output: SchedulerOutput, index: int, output_token_ids: Sequence[int]) -> bool:
        """Begin a step in which it is at ``index``. Returns whether it needs masks; else every token is allowed."""
        self.read(output_token_ids)
        is_decode = index < output.num_decodes
        num_drafts = output.num_drafts if is_decode else 0
        self.first_row = index * (1 + num_drafts) if is_decode else index + output.num_decodes * output.num_drafts
        self.num_masks = 1 + num_drafts
        is_plain = self.has_begun and not num_drafts
        self.begin, self._ahead, self.step_drafts = (0, None, ()) if is_plain else self.walk(num_drafts)
        self.is_restricted = self.begin > 0 or self.has_bans
        return (
            self.begin <= num_drafts
            or self.has_bans
            or any(self._forced(place) is not None for place in range(self.num_masks))
        )

    def masks_of(self, masks: np.ndarray) -> np.ndarray:
        """Its own among the masks of the step, ``[num_masks, words]``."""
        return masks[self.first_mask : self.first_mask + self.num_masks]

    def fill(self, output_token_ids: Sequence[int], masks: np.ndarray) -> str:
        """Fill its masks in this thread. Returns why that fails; empty: it does not. ``masks``: as of `masks_of`."""
        masks[: self.begin].fill(-1)
        if self.begin >= self.num_masks:
            return ""
        error = self.catch_up(output_token_ids) if self._ahead is None else ""
        if not error:
            matcher = fill_masks(self._ahead or self.matcher, self.step_drafts, masks[self.begin :])
            error = f"the grammar cannot go on: {matcher_error(matcher)}" if matcher.is_error() else ""
        if error:
            masks.fill(-1)
        return error

    def restrict(self, masks: np.ndarray, stop_token_ids: Iterable[int]) -> None:
        """Apply what is beside the grammar: tokens that may not be there, and those that must be."""
        for place, mask in enumerate(masks):
            token_id = self._forced(place) if place < self.begin else None
            if token_id is not None:
                set_only(mask, token_id)
            elif bans := self.bans(place, stop_token_ids):
                clear_bits(mask.data, bans)

    def _forced(self, place: int) -> int | None:
        """The token that must be at a position before the grammar, counted from the next token; None: any."""
        return None if self._reasoning is None else self._reasoning.forced(self._num_read + place)

    @property
    def has_final_bans(self) -> bool:
        """Whether `bans` returns the same for all later positions."""
        return self._num_read >= self._min_tokens

    @property
    def has_bans(self) -> bool:
        """Whether `bans` may return a token for the next positions."""
        return bool(self._banned) or not self.has_final_bans

    def bans(self, place: int, stop_token_ids: Iterable[int]) -> Sequence[int]:
        """The tokens that may not be at a position, counted from the next token, if another one may."""
        return self._banned if self._num_read + place >= self._min_tokens else [*self._banned, *stop_token_ids]

"""The state of a sequence under a grammar: which of its output tokens the matcher has consumed, and its drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np


class ReasoningEnd:
    """Finds the text behind which a grammar begins. ``piece``: the text of a token."""

    def __init__(self, marker: bytes, piece: Callable[[int], bytes]) -> None:
        self._marker = marker
        self._piece = piece
        self._begin: Sequence[int] = ()
        self._end: Sequence[int] = ()
        self._limit: int | None = None

    def limit(self, num_tokens: int, begin: Sequence[int], end: Sequence[int]) -> None:
        """Force the tokens ``begin`` at first, and ``end`` after ``num_tokens`` more."""
        self._begin, self._end, self._limit = begin, end, len(begin) + num_tokens

    def forced(self, position: int) -> int | None:
        """The token that must be at a position of the output, which is before the end; None: any."""
        if position < len(self._begin):
            return self._begin[position]
        place = -1 if self._limit is None else position - self._limit
        return self._end[place] if 0 <= place < len(self._end) else None

    def find(self, tail: bytes, token_id: int) -> tuple[bytes, bytes | None]:
        """Read a token behind ``tail``, the text that may begin the marker. Returns the new tail, and the rest of the
        token's text behind the marker; None: it is not there yet."""
        text = tail + self._piece(token_id)
        place = text.find(self._marker)
        if place >= 0:
            return b"", text[place + len(self._marker) :]
        return text[max(0, len(text) - len(self._marker) + 1) :], None


class GrammarState:
    """One sequence. The state follows from its output tokens, so preemptions and restarts need nothing else.

    Args:
        matcher: an `llguidance.LLMatcher`, of this sequence alone.
        tokenizer: an `llguidance.LLTokenizer`.
        reasoning_end: None: the grammar begins at once.
        banned: tokens that are never allowed where another one is: the end tokens, with ``ignore_eos``.
        min_tokens: end tokens and ``stop_token_ids`` are not allowed before, where another token is.
    """

    __slots__ = (
        "_banned", "_min_tokens", "_num_read", "_reasoning", "_tail", "_tokenizer", "drafts", "has_begun", "matcher",
        "num_words",
    )  # fmt: skip

    def __init__(
        self, matcher: Any, tokenizer: Any, reasoning_end: ReasoningEnd | None, banned: Sequence[int], min_tokens: int
    ) -> None:
        self.matcher = matcher
        self.num_words = -(-tokenizer.vocab_size // 32)
        """int32 of a mask of the tokenizer."""
        self._tokenizer = tokenizer
        self._reasoning = reasoning_end
        self._banned = banned
        self._min_tokens = min_tokens
        self._num_read = 0
        self._tail = b""
        self.has_begun = reasoning_end is None
        """Whether the grammar applies to the next token."""
        self.drafts: list[int] = []
        """Those that the next step verifies, as its runner has reported them; -1: none."""

    def read(self, output_token_ids: Sequence[int]) -> str:
        """Consume the tokens that are new. Returns why one is refused; empty: none is.

        An output that has become shorter (its last tokens were lost with a worker) is read again from its beginning.
        """
        if len(output_token_ids) < self._num_read:
            self.matcher.reset()
            self._num_read, self._tail, self.has_begun = 0, b"", self._reasoning is None
        for token_id in output_token_ids[self._num_read :]:
            if not self.has_begun:
                self._num_read += 1
                self._begin_behind(token_id)
            elif error := self.note_read(token_id, is_taken=self.matcher.consume_token(token_id)):
                return error
        return ""

    def next_token(self, output_token_ids: Sequence[int]) -> int | None:
        """The new token, if the grammar applies and there is one; None: call `read`."""
        is_one = self.has_begun and len(output_token_ids) == self._num_read + 1
        return output_token_ids[-1] if is_one else None

    def note_read(self, token_id: int, *, is_taken: bool) -> str:
        """Call when the matcher was given a token. Returns why it is refused; empty: it is not."""
        self._num_read += 1
        if is_taken:
            return ""
        return f"the grammar refuses token {token_id} of the output: {self.matcher.get_error():.200}"

    def _begin_behind(self, token_id: int) -> None:
        assert self._reasoning is not None
        self._tail, rest = self._reasoning.find(self._tail, token_id)
        if rest is None:
            return
        self.has_begun = True
        self._consume_text(self.matcher, rest)

    def _consume_text(self, matcher: Any, text: bytes) -> None:
        """Consume the beginning of the answer, which is in the last token of reasoning; or white space, which the
        grammar may not have."""
        token_ids = self._tokenizer.tokenize_bytes(text)
        if token_ids and matcher.validate_tokens(token_ids) == len(token_ids):
            matcher.consume_tokens(token_ids)

    def walk(self, num_drafts: int) -> tuple[int, Any, list[int]]:
        """The first of ``1 + num_drafts`` positions that the grammar applies to, counted from the next token, a matcher
        for it, and the drafts from there on. Beyond the last position: it applies to none."""
        drafts = self.drafts[:num_drafts]
        drafts = drafts[: drafts.index(-1)] if -1 in drafts else drafts
        if self.has_begun:
            return 0, self.matcher, drafts
        tail = self._tail
        assert self._reasoning is not None
        for place, token_id in enumerate(drafts, start=1):
            tail, rest = self._reasoning.find(tail, token_id)
            if rest is not None:
                matcher = self.matcher.deep_copy()
                self._consume_text(matcher, rest)
                return place, matcher, drafts[place:]
        return num_drafts + 1, self.matcher, []

    def forced(self, place: int) -> int | None:
        """The token that must be at a position before the grammar, counted from the next token; None: any."""
        assert self._reasoning is not None
        return self._reasoning.forced(self._num_read + place)

    def bans(self, place: int, stop_token_ids: Iterable[int]) -> Sequence[int]:
        """The tokens that may not be at a position, counted from the next token, if another one may."""
        if self._num_read + place < self._min_tokens:
            return [*self._banned, *stop_token_ids]
        return self._banned


def set_only(mask: np.ndarray, token_id: int) -> None:
    """Allow one token. ``mask``: as of `clear_bits`."""
    mask.fill(0)
    mask.view(np.uint32)[token_id // 32] = 1 << (token_id % 32)


def clear_bits(mask: np.ndarray, token_ids: Iterable[int]) -> None:
    """Do not allow tokens, if others are left. ``mask``: ``[words]`` int32, bit ``t % 32`` of word ``t // 32``."""
    mask = mask.view(np.uint32)
    cleared: dict[int, int] = {}  # word -> its former value
    for token_id in token_ids:
        place, bit = divmod(token_id, 32)
        word = int(mask[place]) if place < len(mask) else 0
        if word >> bit & 1:
            cleared.setdefault(place, word)
            mask[place] = word & ~(1 << bit)
    if cleared and not mask.any():
        for place, word in cleared.items():
            mask[place] = word

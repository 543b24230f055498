"""The state of a sequence under a grammar: which of its output tokens matchers consume, and its drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fleetfoot.sampling.shape import mask_size
from fleetfoot.structured.grammars import GrammarText
from fleetfoot.structured.processes import Replica
from fleetfoot.structured.vocabulary import VocabularySource


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
    vocabulary: VocabularySource
    """What the tokenizer is made of."""
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
        "_banned", "_begin", "_min_tokens", "_num_read", "_num_taken", "_prefix", "_reasoning", "_tail", "drafts",
        "grammar", "has_begun", "matcher", "num_words", "replica",
    )  # fmt: skip

    def __init__(self, grammar: Grammar, banned: Sequence[int], min_tokens: int) -> None:
        self.grammar = grammar
        self.num_words = mask_size(grammar.tokenizer.vocab_size)
        """int32 of a mask of the tokenizer."""
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
        begin = self._begin + num_taken - len(self._prefix)
        if begin > self._num_read:
            return True, [*self._prefix, *output_token_ids[self._begin : self._num_read]]
        if num_taken >= len(self._prefix):
            return False, output_token_ids[begin : self._num_read]
        return False, [*self._prefix[num_taken:], *output_token_ids[self._begin : self._num_read]]

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

    def forced(self, place: int) -> int | None:
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

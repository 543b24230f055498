"""A stream for any decoder: decodes a short window of tokens, twice for each token, and releases the difference."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

from fleetfoot.tokenizer.pieces import PieceTable
from fleetfoot.tokenizer.streams import REPLACEMENT, PromptReplacements

# How many releases, of one token most often, stay in front of the window, so that what a decoder does at the beginning
# of a text (it drops a space there) does not happen in the middle. They are kept whole: each begins with a character.
_CONTEXT_RELEASES = 5
# An unfinished UTF-8 character has at most three bytes, and a token at least one.
_MAX_CHARACTER_TOKENS = 3
# How many tokens may wait for a character to be finished. A longer run is not an unfinished character.
_MAX_PENDING_TOKENS = 8


class WindowStream:
    """Text from token ids through the decoder of the tokenizer, at the cost of decoding two short windows per token.

    Args:
        decode: Token ids to text, special tokens included.
        tokens: Token id -> token, or "" for an id that has no text or is to be skipped.
        prompt_token_ids: The tokens before the output.
        unspaced_token_ids: Tokens between which the decoder's joining space is left out.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        tokens: PieceTable[str],
        prompt_token_ids: Sequence[int],
        unspaced_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._decode = decode
        self._tokens = tokens
        self._unspaced = unspaced_token_ids
        self._last_unspaced = False
        self._context = deque([self._prompt_tail(prompt_token_ids)], maxlen=_CONTEXT_RELEASES)
        self._pending: list[int] = []
        text = decode(self._context[0])
        self._context_text = text.rstrip(REPLACEMENT)
        self._prompt = PromptReplacements(len(text) - len(self._context_text))

    def update(self, new_token_ids: Sequence[int]) -> str:
        return "".join([self._step(token_id) for token_id in new_token_ids if self._tokens[token_id]])

    def finish(self) -> str:
        return self._release(len(self._pending), self._decode_behind_context(self._pending))

    def _step(self, token_id: int) -> str:
        self._pending.append(token_id)
        joined = self._last_unspaced
        self._last_unspaced = token_id in self._unspaced
        num_tokens = len(self._pending)
        window_text = self._decode_behind_context(self._pending)
        if window_text.endswith(REPLACEMENT):
            if num_tokens <= _MAX_PENDING_TOKENS:
                return ""
            num_tokens -= _MAX_CHARACTER_TOKENS
            window_text = self._decode_behind_context(self._pending[:num_tokens])
        text = self._release(num_tokens, window_text)
        if joined and self._last_unspaced and not self._tokens[token_id].startswith(" "):
            text = text.removeprefix(" ")
        return text

    def _release(self, num_tokens: int, window_text: str) -> str:
        """Makes context of the first pending tokens; returns their text, the end of `window_text`."""
        text = window_text[len(self._context_text) :]
        self._context.append(self._pending[:num_tokens])
        del self._pending[:num_tokens]
        self._context_text = self._decode_behind_context([])
        return self._prompt.remove(text)

    def _decode_behind_context(self, token_ids: list[int]) -> str:
        return self._decode([*itertools.chain(*self._context), *token_ids])

    def _prompt_tail(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The last tokens of the prompt that have text, a few more if the first of them begins within a character."""
        visible = (token_id for token_id in reversed(prompt_token_ids) if self._tokens[token_id])
        tail = list(itertools.islice(visible, _CONTEXT_RELEASES))[::-1]
        for token_id in itertools.islice(visible, _MAX_CHARACTER_TOKENS):
            if not self._decode(tail).startswith(REPLACEMENT):
                break
            tail.insert(0, token_id)
        return tail

"""A stream for any decoder: decodes a short window of tokens, twice, and releases the difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleetfoot.tokenizer.pieces import PieceTable
from fleetfoot.tokenizer.streams import REPLACEMENT, PromptReplacements

# Tokens that are already released and stay in front of the window, so that what a decoder does at the beginning of a
# text (it drops a space there) does not happen in the middle.
_CONTEXT_TOKENS = 5
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
        self._ids = self._context_of(prompt_token_ids)
        self._num_context = len(self._ids)
        text = decode(self._ids)
        self._context_text = text.rstrip(REPLACEMENT)
        self._prompt = PromptReplacements(len(text) - len(self._context_text))

    def update(self, new_token_ids: Sequence[int]) -> str:
        return "".join([self._step(token_id) for token_id in new_token_ids if self._tokens[token_id]])

    def finish(self) -> str:
        return self._release(len(self._ids))

    def _step(self, token_id: int) -> str:
        self._ids.append(token_id)
        joined = self._last_unspaced
        self._last_unspaced = token_id in self._unspaced
        end = len(self._ids)
        if self._decode(self._ids).endswith(REPLACEMENT):
            if end - self._num_context <= _MAX_PENDING_TOKENS:
                return ""
            end -= _MAX_CHARACTER_TOKENS
        text = self._release(end)
        if joined and self._last_unspaced and not self._tokens[token_id].startswith(" "):
            text = text.removeprefix(" ")
        return text

    def _release(self, end: int) -> str:
        """The text of the pending tokens before `end`, which become context."""
        text = self._decode(self._ids[:end])[len(self._context_text) :]
        start = max(0, end - _CONTEXT_TOKENS)
        self._ids = self._ids[start:]
        self._num_context = end - start
        self._context_text = self._decode(self._ids[: self._num_context])
        return self._prompt.remove(text)

    def _context_of(self, prompt_token_ids: Sequence[int]) -> list[int]:
        context: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if len(context) == _CONTEXT_TOKENS:
                break
            if self._tokens[token_id]:
                context.append(token_id)
        return context[::-1]

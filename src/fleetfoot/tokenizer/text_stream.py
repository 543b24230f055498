"""The text of one request: detokenized as tokens arrive, and ended by stop strings.

The matcher of stop strings is the automaton of Aho and Corasick ("Efficient string matching: an aid to bibliographic
search", 1975). Its state is the longest suffix of the text that begins a stop string: exactly the text to hold back.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fleetfoot.tokenizer.detokenizer import IncrementalDetokenizer, make_detokenizer

if TYPE_CHECKING:
    from fleetfoot.tokenizer.tokenizer import Tokenizer


class TextStream:
    """Turns output tokens into text. No part of a stop string is released, even if it spans several tokens.

    Args:
        tokenizer: None if the engine has none; the text is then empty.
        detokenize: Whether to generate text.
        prompt_token_ids, skip_special_tokens, spaces_between_special_tokens: See `make_detokenizer`.
        include_stop_str_in_output: Whether the text includes the stop string or stop token that ended it.
        min_tokens: A stop string counts only if it is completed after more than this many tokens.

    Raises:
        ValueError: There are stop strings, but no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int] = (),
        *,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer: IncrementalDetokenizer = _NoText()
        if tokenizer is not None and detokenize:
            self._detokenizer = make_detokenizer(
                tokenizer.pieces, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens
            )
        elif stop:
            raise ValueError(f"stop={list(stop)!r} needs text: detokenize=True and a tokenizer")
        self._checker = StopStringChecker(stop, include_stop_str_in_output) if stop else None
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._taken: list[str] = []  # released text that take_delta has returned
        self._delta: list[str] = []  # released text since then
        self.num_tokens_kept = 0
        """Tokens of the last `push` that belong to the output: up to the one that completed the stop string."""
        self.stop_string: str | None = None
        """The stop string that ended the text, or None."""

    @property
    def text(self) -> str:
        """All text released so far. Joined on access, not for each token."""
        self._taken = ["".join(self._taken)]
        self._delta = ["".join(self._delta)]
        return self._taken[0] + self._delta[0]

    def take_delta(self) -> str:
        """The text released since the last call."""
        if not self._delta:
            return ""
        delta = self._delta[0] if len(self._delta) == 1 else "".join(self._delta)
        self._delta.clear()
        self._taken.append(delta)
        return delta

    def push(self, new_token_ids: Sequence[int], ends_with_stop_token: bool = False) -> str | None:
        """Append tokens. Not called again after a stop string.

        Args:
            new_token_ids: The tokens.
            ends_with_stop_token: Whether the last of them is the EOS or stop token that ended the request. Its text is
                left out unless ``include_stop_str_in_output`` is set.

        Returns:
            The stop string that ended the text, or None. `num_tokens_kept` of these tokens are part of the output;
            later ones are not.
        """
        num_shown = len(new_token_ids) - (ends_with_stop_token and not self._include_stop)
        if self._checker is None:
            self.num_tokens_kept = len(new_token_ids)
            text = self._detokenizer.update(new_token_ids[:num_shown])
            if text:
                self._delta.append(text)
            return None
        self.num_tokens_kept = 0
        for token_id in new_token_ids[:num_shown]:
            self._num_tokens += 1
            self.num_tokens_kept += 1
            text = self._detokenizer.update((token_id,))
            released, self.stop_string = self._checker.feed(text, can_stop=self._num_tokens > self._min_tokens)
            if released:
                self._delta.append(released)
            if self.stop_string is not None:
                return self.stop_string
        self.num_tokens_kept = len(new_token_ids)
        return None

    def finish(self) -> None:
        """End the text: release what was held back for a stop string or an unfinished character."""
        if self.stop_string is None:
            held = "" if self._checker is None else self._checker.finish()
            self._delta += [held, self._detokenizer.finish()]


class _NoText:
    """The detokenizer of a request without text."""

    def update(self, new_token_ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class StopStringChecker:
    """Finds the first of several stop strings in a stream of text.

    The match that ends first wins; of several that end at the same character, the one that begins first (the longest).
    The result does not depend on how the text is split into calls. The time per character is constant. At most the
    length of the longest stop string less one is held back.

    Args:
        stop: The stop strings, none of them empty.
        include_stop_str_in_output: Whether the released text includes the stop string.

    Raises:
        ValueError: `stop` is empty or holds an empty string.
    """

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        if not stop or not all(stop):
            raise ValueError(f"stop={list(stop)!r} must hold at least one string, and no empty one")
        self._include = include_stop_str_in_output
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]  # the longest stop string that ends in this state
        for stop_string in stop:
            state = 0
            for character in stop_string:
                if character not in self._children[state]:
                    self._children[state][character] = len(self._children)
                    self._children.append({})
                    self._depth.append(self._depth[state] + 1)
                    self._match.append(None)
                state = self._children[state][character]
            self._match[state] = stop_string
        self._fallback = [0] * len(self._children)
        self._link()
        self._first_character = re.compile(f"[{''.join(map(re.escape, self._children[0]))}]")
        self._state = 0
        self._held = ""  # the text of the state: its length is the state's depth

    def feed(self, text: str, can_stop: bool = True) -> tuple[str, str | None]:
        """Append text.

        Args:
            text: The next part of the text.
            can_stop: Whether a stop string that ends in this part counts.

        Returns:
            The text to release, and the stop string that was found, or None. Text after the stop string is dropped, and
            no more is appended.
        """
        position = 0
        while position < len(text):
            if self._state == 0:  # jump to the next character that can begin a match
                first = self._first_character.search(text, position)
                if first is None:
                    break
                position = first.start()
            self._state = self._next_state(self._state, text[position])
            position += 1
            if can_stop and (stop_string := self._match[self._state]) is not None:
                text, self._held = self._held + text[:position], ""
                return text if self._include else text[: len(text) - len(stop_string)], stop_string
        text = self._held + text
        num_released = len(text) - self._depth[self._state]
        self._held = text[num_released:]
        return text[:num_released], None

    def finish(self) -> str:
        """End the text; returns what was held back, which is empty after a match."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _next_state(self, state: int, character: str) -> int:
        while state and character not in self._children[state]:
            state = self._fallback[state]
        return self._children[state].get(character, 0)

    def _link(self) -> None:
        """Set each state's fallback to the state of its longest proper suffix, shortest states first."""
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._children[state].items():
                fallback = self._next_state(self._fallback[state], character)
                self._fallback[child] = fallback
                self._match[child] = self._match[child] or self._match[fallback]
                queue.append(child)

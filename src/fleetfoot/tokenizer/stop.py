"""Stop strings: found in a stream of text as it grows, and never released in part.

The matcher is the automaton of Aho and Corasick ("Efficient string matching: an aid to bibliographic search", 1975).
Its state is the longest suffix of the text that begins some stop string, which is exactly the text to hold back.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import Protocol


class StopChecker(Protocol):
    """Decides which text may be released, and where it stops."""

    def feed(self, text: str, can_stop: bool = True) -> tuple[str, str | None]:
        """Takes the next piece of text; returns what may be released now, and the stop string that was met or None."""

    def finish(self) -> str:
        """Ends the text: returns what was held back."""


class NoStopStrings:
    """The checker of a request without stop strings: everything passes at once."""

    def feed(self, text: str, can_stop: bool = True) -> tuple[str, str | None]:
        return text, None

    def finish(self) -> str:
        return ""


def stop_checker(stop: Sequence[str], include_stop_str_in_output: bool = False) -> StopChecker:
    """The checker for `stop`, which may be empty."""
    return StopStringChecker(stop, include_stop_str_in_output) if stop else NoStopStrings()


class StopStringChecker:
    """Finds the first of several stop strings in a text that arrives in pieces.

    The match that ends first wins; of several that end at the same character, the one that begins first (the longest).
    The result does not depend on how the text is cut into pieces. The time for a character does not depend on how much
    text came before it; at most the length of the longest stop string, less one, is held back.

    Args:
        stop: The stop strings, none of them empty.
        include_stop_str_in_output: Whether the released text ends with the stop string or just before it.

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
            self._insert(stop_string)
        self._fallback = [0] * len(self._children)
        self._link()
        self._first_character = re.compile(f"[{''.join(map(re.escape, self._children[0]))}]")
        self._state = 0
        self._held = ""  # the text of the state: its length is the state's depth
        self._matched: str | None = None

    def feed(self, text: str, can_stop: bool = True) -> tuple[str, str | None]:
        """Takes the next piece of text.

        Args:
            text: The piece.
            can_stop: Whether a stop string that ends inside this piece counts.

        Returns:
            The text that can be released now, and the stop string that was met, or None. Text after the stop string is
            dropped, and so is all text that is fed after a match.
        """
        if self._matched is not None:
            return "", self._matched
        position = 0
        while position < len(text):
            if self._state == 0:  # jump to the next character that can begin a match
                first = self._first_character.search(text, position)
                if first is None:
                    break
                position = first.start()
            self._state = self._next_state(self._state, text[position])
            position += 1
            stop_string = self._match[self._state]
            if stop_string is not None and can_stop:
                return self._stop(text[:position], stop_string)
        text = self._held + text
        num_released = len(text) - self._depth[self._state]
        self._held = text[num_released:]
        return text[:num_released], None

    def finish(self) -> str:
        """Ends the text: returns what was held back for a match that did not come; nothing after a match."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _stop(self, text: str, stop_string: str) -> tuple[str, str]:
        text = self._held + text
        self._held = ""
        self._matched = stop_string
        return text if self._include else text[: len(text) - len(stop_string)], stop_string

    def _next_state(self, state: int, character: str) -> int:
        while state and character not in self._children[state]:
            state = self._fallback[state]
        return self._children[state].get(character, 0)

    def _insert(self, stop_string: str) -> None:
        state = 0
        for character in stop_string:
            if character not in self._children[state]:
                self._children[state][character] = len(self._children)
                self._children.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = self._children[state][character]
        self._match[state] = stop_string

    def _link(self) -> None:
        """Points each state to that of its longest proper suffix, shortest states first."""
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._children[state].items():
                fallback = self._next_state(self._fallback[state], character)
                self._fallback[child] = fallback
                self._match[child] = self._match[child] or self._match[fallback]
                queue.append(child)

"""Which of several engines or ranks gets a request: the one that has computed most of its prompt, or the least busy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeVar

_CHUNK = 64
"""Tokens of a prompt that have one entry of what is known."""
_MOST_CHUNKS = 1 << 16
_MOST_AHEAD = 4
"""Requests that the one with a prompt's beginning may have beyond those of the least busy one, and as a part of
them."""

_Place = TypeVar("_Place", bound=Hashable)


class PrefixRouting(Generic[_Place]):
    """Remembers where the beginnings of prompts went."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, _Place] = OrderedDict()
        """Hash of the beginning of a prompt -> where it was computed last."""

    def choose(self, token_ids: bytes, loads: Mapping[_Place, int], session: str = "") -> _Place:
        """The place of the session, or with the longest beginning of a prompt, unless it is far busier than the least
        busy one.

        Args:
            token_ids: of the prompt, int32.
            loads: requests of each place that can be used; not empty.
            session: empty: there is none.
        """
        least = min(loads, key=loads.__getitem__)
        chunks = [*_beginnings(token_ids), *([hash(session)] if session else ())]
        known = (self._known.get(chunk) for chunk in reversed(chunks))
        best = next((place for place in known if place is not None and place in loads), least)
        chosen = best if loads[best] <= loads[least] + max(_MOST_AHEAD, loads[least] // _MOST_AHEAD) else least
        for chunk in chunks:
            self._known[chunk] = chosen
            self._known.move_to_end(chunk)
        while len(self._known) > _MOST_CHUNKS:
            self._known.popitem(last=False)
        return chosen

    def forget(self, place: _Place) -> None:
        """A place is lost, with what it has computed."""
        for chunk in [chunk for chunk, known in self._known.items() if known == place]:
            del self._known[chunk]


def _beginnings(token_ids: bytes) -> Iterator[int]:
    """A hash of each beginning of whole chunks. ``token_ids``: int32."""
    number, size = 0, 4 * _CHUNK
    for first in range(0, len(token_ids) - size + 1, size):
        number = hash((number, token_ids[first : first + size]))
        yield number

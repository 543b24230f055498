"""The requests that wait to run, first come, first served, or by priority."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from fleetfoot.records.request import Request


class WaitingQueue:
    """A heap. A request that ends while it waits stays in it until it is met, but counts no more."""

    def __init__(self) -> None:
        # the order stands beside each request: numbers are compared much faster than requests
        self._heap: list[tuple[int, int, Request]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """Those that count, in no order."""
        return (request for _, _, request in self._heap if not request.is_finished)

    def push(self, request: Request) -> None:
        heappush(self._heap, (request.priority, request.sequence_number, request))
        self._size += 1

    def note_ended(self) -> None:
        """One of the requests has ended."""
        self._size -= 1

    @property
    def first(self) -> Request:
        """The next to run; there must be one."""
        while self._heap[0][2].is_finished:
            heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> None:
        """Take out `first`."""
        heappop(self._heap)
        self._size -= 1

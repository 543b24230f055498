"""The requests that wait to run, first come, first served, or by priority."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from fleetfoot.scheduler.request import Request


class WaitingQueue:
    """A heap. A request that ends while it waits stays in it until it is met, but counts no more."""

    def __init__(self) -> None:
        self._heap: list[Request] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """Those that count, in no order."""
        return (request for request in self._heap if not request.is_finished)

    def push(self, request: Request) -> None:
        heappush(self._heap, request)
        self._size += 1

    def note_ended(self) -> None:
        """One of the requests has ended."""
        self._size -= 1

    @property
    def first(self) -> Request:
        """The next to run; there must be one."""
        while self._heap[0].is_finished:
            heappop(self._heap)
        return self._heap[0]

    def pop(self) -> None:
        """Take out `first`."""
        heappop(self._heap)
        self._size -= 1

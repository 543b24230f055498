"""Threads that share an engine use it in turns."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


class Turns:
    """One thread at a time uses the engine; those that add or remove requests come before those that step, which wait
    while the engine cannot step."""

    def __init__(self, can_step: Callable[[], bool]) -> None:
        self._can_step = can_step
        self._changed = threading.Condition()
        self.owner: int | None = None
        self._num_first = 0  # threads that wait in `take` without ``until``

    @contextlib.contextmanager
    def take(self, until: Callable[[], bool] = lambda: False, *, is_step: bool = False) -> Iterator[bool]:
        """Have the turn for the length of the block, or run it with False, without the turn, once ``until`` is true.

        A signal handler that runs during a turn of its thread has it too.
        """
        previous, self_id = self.owner, threading.get_ident()
        if previous != self_id:
            with self._changed:
                self._num_first += not is_step
                try:  # with a timeout: a deferred Ctrl-C notifies no condition
                    while not (ends := until()) and (
                        self.owner is not None or (is_step and (self._num_first or not self._can_step()))
                    ):
                        self._changed.wait(0.1)
                    previous, self.owner = None, self.owner if ends else self_id
                finally:
                    self._num_first -= not is_step
        try:
            yield self.owner == self_id
        finally:
            if previous is None and self.owner == self_id:
                with self._changed:
                    self.owner = None
                    self._changed.notify_all()

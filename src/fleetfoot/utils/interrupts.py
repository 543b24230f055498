"""Ctrl-C that waits for a good moment: an exception out of the middle of a step would leave its books half written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """While it is entered, the first Ctrl-C only sets ``is_set``; the second raises KeyboardInterrupt, as ever.

    Outside the main thread, where Python delivers no signals, nothing changes.

    Args:
        only_default: leave a handler alone that somebody has put in the place of Python's own.
    """

    def __init__(self, *, only_default: bool = False) -> None:
        self.is_set = False
        self._only_default = only_default
        self._former: Any = None
        self._is_installed = False

    def check(self) -> None:
        """Raise the KeyboardInterrupt that was put off, if there was one."""
        if self.is_set:
            raise KeyboardInterrupt

    def __enter__(self) -> StopSignal:
        is_wanted = not self._only_default or signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_wanted and threading.current_thread() is threading.main_thread():
            self._former = signal.signal(signal.SIGINT, self._receive)
            self._is_installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_installed:
            # None stands for a handler that Python did not install, and cannot be given back to it
            signal.signal(signal.SIGINT, signal.default_int_handler if self._former is None else self._former)
            self._is_installed = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


@contextmanager
def deferred_interrupts() -> Iterator[StopSignal]:
    """Put Ctrl-C off to where the block calls `StopSignal.check`, or to its end: none is lost.

    Only where Ctrl-C would raise KeyboardInterrupt by itself: in the main thread, under Python's own handler.
    """
    stop = StopSignal(only_default=True)
    try:
        with stop:
            yield stop
    except Exception as error:
        if stop.is_set:
            raise KeyboardInterrupt from error
        raise
    stop.check()

"""Ctrl-C that waits for a good moment."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """While it is entered, the first Ctrl-C only sets ``is_set``; the second raises KeyboardInterrupt, as ever.

    An exception out of the middle of an engine's step would leave its books half written. Outside the main thread,
    where Python delivers no signals, nothing changes.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._former: Any = None
        self._is_installed = False

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
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

"""Progress of a start: its phases report it, and a bar on a terminal shows it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LEVEL = 5
"""Below DEBUG: reports are for the bar alone."""
_LOGGER = logging.getLogger(__name__)


def report_progress(phase: str, done: int = 0, total: int | None = None) -> None:
    """A phase of the start begins, or has ``done`` so many parts of ``total``. Does nothing while there is no bar."""
    _LOGGER.log(_LEVEL, "%s", phase, extra={"done": done, "total": total})


class _BarHandler(logging.Handler):
    """Shows one phase at a time, and how long it has taken."""

    def __init__(self, progress: Any) -> None:
        super().__init__()
        self._progress = progress
        self._phase = "start"
        self._task = progress.add_task(self._phase, total=None)

    def emit(self, record: Any) -> None:
        phase = record.getMessage()
        if phase != self._phase or record.total is None:
            self._progress.remove_task(self._task)
            self._phase, self._task = phase, self._progress.add_task(phase, total=record.total)
        self._progress.update(self._task, completed=record.done, total=record.total)


@contextmanager
def loading_bar(*, is_shown: bool) -> Iterator[None]:
    """Show the progress of this process on standard error, a terminal, for the length of the block. Log records appear
    above it."""
    if not is_shown:
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        handler = _BarHandler(progress)
        _LOGGER.addHandler(handler)
        _LOGGER.setLevel(_LEVEL)
        _LOGGER.propagate = False
        try:
            yield
        finally:
            _LOGGER.removeHandler(handler)
            _LOGGER.setLevel(logging.NOTSET)
            _LOGGER.propagate = True

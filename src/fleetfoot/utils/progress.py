"""Bars on a terminal where people wait: for starts and downloads, requests, comparisons. One kind for all.

What is far from a terminal reports with `report_progress`, which costs nothing while no bar is shown.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_LEVEL = 5
"""Below DEBUG: reports are for the bar alone."""
_LOGGER = logging.getLogger(__name__)

Advance = Callable[..., object]
"""Called with the tokens of one finished part, a request; ``by``: how much of the total that is, if it is not 1."""


def report_progress(phase: str, done: int = 0, total: int | None = None) -> None:
    """A phase of the start begins, or has ``done`` so many parts of ``total``. Does nothing while there is no bar."""
    _LOGGER.log(_LEVEL, "%s", phase, extra={"done": done, "total": total})


def is_shown() -> bool:
    """Whether reports are shown."""
    return _LOGGER.isEnabledFor(_LEVEL)


def _bar(*, is_transient: bool) -> Any:
    """A bar on standard error: what is done of what, a note, and the time that it has taken."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}")
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=is_transient)


class _BarHandler(logging.Handler):
    """Shows one phase at a time. Between phases the terminal is left to others, such as workers of this process."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: Any = None
        self._phase: tuple[str, bool] | None = None

    def emit(self, record: Any) -> None:
        phase = record.getMessage(), record.total is None
        if phase != self._phase or self._shown is None:
            self.stop()
            self._phase, self._shown = phase, _bar(is_transient=True)
            self._shown.add_task(phase[0], total=record.total, note="")
            self._shown.start()
        (task,) = self._shown.tasks
        self._shown.update(task.id, completed=record.done, total=record.total)
        if record.done == record.total:
            self.stop()

    def stop(self) -> None:
        if self._shown is not None:
            self._shown.stop()
            self._shown = None


@contextmanager
def loading_bar(*, is_shown: bool | None = None) -> Iterator[None]:
    """Show what this process reports on standard error for the length of the block. Log records appear above it.
    ``is_shown``: None: if standard error is a terminal. Within another such block this one does nothing."""
    if is_shown is None:
        is_shown = sys.stderr.isatty()
    if not is_shown or _LOGGER.isEnabledFor(_LEVEL):
        yield
        return
    handler = _BarHandler()
    level, propagates = _LOGGER.level, _LOGGER.propagate
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(_LEVEL)
    _LOGGER.propagate = False
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)
        _LOGGER.setLevel(level)
        _LOGGER.propagate = propagates
        handler.stop()


@contextmanager
def progress_bar(bar: bool | Callable[..., Any], *, total: float, description: str) -> Iterator[Advance]:
    """Show a progress bar over ``total`` parts for the length of the block.

    Args:
        bar: True: on the terminal, if there is one, or in a notebook; False: none; else a factory such as ``tqdm``, of
            objects with ``update(n)`` and ``close()``.
    """
    bar = bar if callable(bar) else bool(bar) and (sys.stderr.isatty() or "ipykernel" in sys.modules)
    if bar is False:
        yield lambda num_tokens, by=1: None
    elif bar is True:
        with _bar(is_transient=False) as progress:
            progress.add_task(description, total=total, note="")
            (task,) = progress.tasks
            num_tokens = 0

            def advance(tokens: int, by: float = 1) -> None:
                nonlocal num_tokens
                num_tokens += tokens
                progress.update(task.id, advance=by, note=f"{num_tokens:,} tokens" if num_tokens else "")

            yield advance
    else:
        custom = bar(total=total, desc=description)
        try:
            yield lambda num_tokens, by=1: custom.update(by)
        finally:
            custom.close()


def download_bar() -> type[Any] | None:
    """A class of bars for `huggingface_hub` that reports its bytes, in MB; None while no bar is shown: its own."""
    if not is_shown():
        return None
    from tqdm.std import tqdm

    class Reporting(tqdm):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **{**keywords, "disable": False, "file": io.StringIO()})

        def display(self, *_: object, **__: object) -> None:
            if self.unit == "B" and self.total:
                report_progress("download, MB", round(self.n / 1e6), round(self.total / 1e6))

    return Reporting

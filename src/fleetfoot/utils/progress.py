"""Progress bars on standard error."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol


class ProgressBar(Protocol):
    def update(self, count: int, *, tokens: int) -> None:
        """Add ``count`` finished requests and ``tokens`` generated tokens."""
        ...

    def __enter__(self) -> ProgressBar: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def progress_bar(bar: bool | Callable[..., Any], *, total: int, description: str) -> ProgressBar:
    """A progress bar on the terminal (True), one of a factory such as ``tqdm``, or a null object (False)."""
    if bar is False:
        return _NoBar()
    if bar is True:
        return _RichBar(total, description)
    return _CustomBar(bar(total=total, desc=description))


class _NoBar:
    def update(self, count: int, *, tokens: int) -> None:
        pass

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _RichBar:
    def __init__(self, total: int, description: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(description, total=total, tokens=0)
        self._tokens = 0

    def update(self, count: int, *, tokens: int) -> None:
        self._tokens += tokens
        self._progress.update(self._task, advance=count, tokens=self._tokens)

    def __enter__(self) -> _RichBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class _CustomBar:
    """A caller's object with ``update(n)`` and ``close()``."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def update(self, count: int, *, tokens: int) -> None:
        self._bar.update(count)

    def __enter__(self) -> _CustomBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

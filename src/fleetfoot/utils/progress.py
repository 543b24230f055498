"""Progress bars on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Advance = Callable[[int], object]
"""Adds one finished request; takes the number of its generated tokens."""


@contextmanager
def progress_bar(bar: bool | Callable[..., Any], *, total: int, description: str) -> Iterator[Advance]:
    """Show a progress bar over ``total`` requests for the length of the block.

    Args:
        bar: True: on the terminal; False: none; else a factory such as ``tqdm``, of objects with ``update(n)`` and
            ``close()``.
    """
    if bar is False:
        yield lambda num_tokens: None
    elif bar is True:
        with _rich_bar(total, description) as advance:
            yield advance
    else:
        custom = bar(total=total, desc=description)
        try:
            yield lambda num_tokens: custom.update(1)
        finally:
            custom.close()


@contextmanager
def _rich_bar(total: int, description: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.fields[tokens]} tokens"), TimeRemainingColumn()
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *columns, console=Console(stderr=True)
    ) as progress:
        task = progress.add_task(description, total=total, tokens=0)

        def advance(num_tokens: int) -> None:
            progress.update(task, advance=1, tokens=progress.tasks[0].fields["tokens"] + num_tokens)

        yield advance

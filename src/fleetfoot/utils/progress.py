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
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        tokens = TextColumn("{task.fields[tokens]} tokens")
        with Progress(*columns, tokens, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
            progress.add_task(description, total=total, tokens=0)
            (task,) = progress.tasks
            yield lambda num_tokens: progress.update(task.id, advance=1, tokens=task.fields["tokens"] + num_tokens)
    else:
        custom = bar(total=total, desc=description)
        try:
            yield lambda num_tokens: custom.update(1)
        finally:
            custom.close()

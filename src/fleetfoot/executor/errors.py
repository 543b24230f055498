"""What the engine raises when one of its workers is no more."""

from __future__ import annotations


class WorkerError(RuntimeError):
    """A worker process has raised, or has ended. The text has its rank, and its traceback if there is one."""

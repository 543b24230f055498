"""The log of a server on standard error, as text or as JSON lines."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the HTTP request that the current task serves; records logged meanwhile have it."""


class _TextFormatter(logging.Formatter):
    """A line, with the request's id at its end."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is the library's
        name = REQUEST_ID.get()
        return super().formatMessage(record) + (f" [{name}]" if name else "")


class _JSONFormatter(logging.Formatter):
    """One JSON object for each record."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        content = {
            "time": f"{moment}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if (name := REQUEST_ID.get()) is not None:
            content["request_id"] = name
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return json.dumps(content, ensure_ascii=False)


class _StderrHandler(logging.StreamHandler[Any]):
    """Looks standard error up for each record: a progress bar replaces it while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


@contextmanager
def log_to_stderr(level: int, log_format: str = "text") -> Iterator[None]:
    """Within the block, log the package's records from ``level`` on, and warnings of others, by one handler.

    ``log_format``: ``text`` or ``json``.
    """
    handler = _StderrHandler()
    text = _TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    handler.setFormatter(_JSONFormatter() if log_format == "json" else text)
    root, package = logging.getLogger(), logging.getLogger("fleetfoot")
    before = root.handlers[:], package.handlers[:], package.level
    root.handlers[:], package.handlers[:] = [handler], []
    package.setLevel(level)
    try:
        yield
    finally:
        root.handlers[:], package.handlers[:] = before[:2]
        package.setLevel(before[2])

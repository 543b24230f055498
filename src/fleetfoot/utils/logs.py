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


def escaped(text: str) -> str:
    """``text`` with each character that is not printed as itself as an escape: line breaks, terminals' codes, Unicode's
    separators and bidirectional controls. It stays on its line and cannot be taken for another one."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class TextFormatter(logging.Formatter):
    """A line for each record, with the request's id at its end; lines of a traceback follow, indented.

    Records hold what clients and peers send: names, paths, headers. All of it is `escaped` here.
    """

    def format(self, record: logging.LogRecord) -> str:
        kept, record.exc_text = record.exc_text, None  # another formatter's
        try:
            return super().format(record)
        finally:
            record.exc_text = kept

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is the library's
        name = REQUEST_ID.get()
        return escaped(super().formatMessage(record) + (f" [{name}]" if name else ""))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _indented(stack_info)


def _indented(text: str) -> str:
    return "\n".join(f"  {escaped(line)}" for line in text.split("\n"))


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
        text = json.dumps(content, ensure_ascii=False)
        if text.isprintable():
            return text
        return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


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
    text = TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
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

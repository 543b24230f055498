"""The log of a server on standard error, as text or as JSON lines."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


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
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return json.dumps(content, ensure_ascii=False)


@contextmanager
def log_to_stderr(level: int, log_format: str = "text") -> Iterator[None]:
    """Within the block, log the package's records from ``level`` on, and warnings of others, by one handler.

    ``log_format``: ``text`` or ``json``.
    """
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    handler.setFormatter(_JSONFormatter() if log_format == "json" else text)
    root, package = logging.getLogger(), logging.getLogger("fleetfoot")
    access = logging.getLogger("uvicorn.access")
    before = root.handlers[:], package.handlers[:], package.level, access.level
    root.handlers[:], package.handlers[:] = [handler], []
    package.setLevel(level)
    access.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers[:], package.handlers[:] = before[:2]
        package.setLevel(before[2])
        access.setLevel(before[3])

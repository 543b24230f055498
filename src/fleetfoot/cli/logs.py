"""Logs of the engine on standard error, for as long as a command runs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class _StderrHandler(logging.Handler):
    """Writes to what is standard error at the moment: a progress bar replaces it while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


@contextmanager
def logs_on_stderr(*, verbose: bool) -> Iterator[None]:
    """Show warnings, or with ``verbose`` everything from INFO on; afterwards logging is as it was."""
    logger = logging.getLogger("fleetfoot")
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)

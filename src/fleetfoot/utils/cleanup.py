"""Clean-up that runs to its end, and raises what came first."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


def run_all(*actions: Callable[[], object]) -> None:
    """Call each action, whatever the others raise.

    Raises:
        BaseException: what the first action that failed raised; later errors are logged.
    """
    first: BaseException | None = None
    for action in actions:
        try:
            action()
        except BaseException as error:
            if first is None:
                first = error
            else:
                logger.error("another error during clean-up", exc_info=error)
    if first is not None:
        raise first

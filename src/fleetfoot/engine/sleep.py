"""Pausing generation, and sleep: an engine that gives the memory of its weights and KV back."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fleetfoot.engine.core import EngineCore
from fleetfoot.engine.hold import HoldQueue
from fleetfoot.engine.live_weights import LiveWeights
from fleetfoot.executor.protocol import WorkerError
from fleetfoot.utils.validation import FieldError

logger = logging.getLogger(__name__)

TAGS = ("weights", "kv_cache")
"""What can be woken separately."""


class Suspension:
    """Whether an engine is paused or asleep. Methods that change it run in the function of a `Hold`.

    ``live``: the weights in use; None: the engine was built from parts.
    """

    def __init__(self, core: EngineCore, holds: HoldQueue, live: LiveWeights | None, *, can_sleep: bool) -> None:
        self._core, self._holds, self._live, self._can_sleep = core, holds, live, can_sleep
        self._asleep: set[str] = set()
        self._level = 0
        self._is_paused = False

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV are asleep."""
        return bool(self._asleep)

    @property
    def level(self) -> int:
        """The level of the sleep; 0: awake."""
        return self._level if self._asleep else 0

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called, and `resume` was not."""
        return self._is_paused

    @property
    def asleep(self) -> list[str]:
        """The tags that sleep."""
        return [tag for tag in TAGS if tag in self._asleep]

    @property
    def reason(self) -> str:
        """Why requests are not computed, and what changes that; empty: they are."""
        if self._asleep:
            return "the engine sleeps; call wake_up() first"
        return "generation is paused; call resume_generation() first" if self._is_paused else ""

    def pause(self, *, clear_cache: bool) -> None:
        """See `EngineCalls.pause_generation`."""
        if clear_cache and not self._asleep:
            self._core.scheduler.reset_prefix_cache(reset_running_requests=True)
        self._is_paused = True
        self._update(self._asleep)

    def resume(self) -> None:
        """See `EngineCalls.resume_generation`."""
        self._is_paused = False
        self._update(self._asleep)

    def check_sleep(self, level: int) -> None:
        """Raise ValueError if `sleep` cannot be called so; before requests are aborted for it."""
        if not self._can_sleep:
            raise ValueError("this engine cannot sleep; start it with enable_sleep_mode=True")
        if isinstance(level, bool) or level not in (1, 2):
            raise FieldError(
                "level", f"is {level!r}; it can be 1 (weights move to the host) or 2 (weights are dropped)", level
            )

    def sleep(self, level: int) -> None:
        """See `EngineCalls.sleep`."""
        if self._asleep:
            logger.warning("the engine sleeps already")
            return
        self._core.scheduler.reset_prefix_cache(reset_running_requests=True)
        self._core.settle_transfers()
        if level == 2 and self._live is not None:
            self._live.remember_source()
        self._level = level
        self._update(set(TAGS))
        try:
            self._core.executor.collective_rpc("sleep", (level,))
        except Exception:  # on one rank; others may sleep
            self.wake_up(None)
            raise

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """See `EngineCalls.wake_up`."""
        wanted = TAGS if tags is None else tags
        if isinstance(wanted, str) or any(tag not in TAGS for tag in wanted):
            raise FieldError("tags", f"is {tags!r}; it can be a list of {' and '.join(TAGS)}", tags)
        if not self._asleep:
            logger.warning("the engine is awake already")
            return
        left = self._asleep.difference(wanted)
        try:
            self._core.executor.collective_rpc("wake_up", (list(wanted),))
            if not left and self._live is not None:
                self._update({"kv_cache"})  # goes on with weights alone
                self._live.restore_lost()
        except WorkerError:  # the next step fails with it, for all requests that wait, or restarts the workers
            self._update(set())
            raise
        self._update(left)

    def _update(self, asleep: set[str]) -> None:
        self._asleep = asleep
        if self._live is not None:
            self._live.is_asleep = "weights" in asleep
        if self._asleep or self._is_paused:
            self._holds.pause()
        else:
            self._holds.resume()

"""Pausing generation, and sleep: an engine that gives the memory of its weights and KV back. Also profiles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from fleetfoot.engine.core import EngineCore
from fleetfoot.engine.hold import HoldQueue
from fleetfoot.engine.live_weights import LiveWeights
from fleetfoot.executor.protocol import WorkerError
from fleetfoot.utils.validation import FieldError

logger = logging.getLogger(__name__)

TAGS = ("weights", "kv_cache")
"""What can be woken separately."""
_MODES = {"abort": "abort", "wait": "drain", "keep": "keep"}
"""vLLM's modes of a pause, and those of a `Hold`."""


def _hold_mode(mode: str) -> str:
    if mode not in _MODES:
        raise FieldError("mode", f"is {mode!r}; it can be {', '.join(_MODES)}", mode)
    return _MODES[mode]


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
        """See `SleepCalls.pause_generation`."""
        if clear_cache and not self._asleep:
            self._core.scheduler.reset_prefix_cache(reset_running_requests=True)
        self._is_paused = True
        self._update(self._asleep)

    def resume(self) -> None:
        """See `SleepCalls.resume_generation`."""
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
        """See `SleepCalls.sleep`."""
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
        """See `SleepCalls.wake_up`."""
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


class SleepCalls:
    """Mixed into `LLM`, `LLMEngine` and `AsyncLLM`, which returns coroutines."""

    suspension: Any
    """The engine's `Suspension`."""

    def _held(self, function: Callable[[Any], Any], mode: str) -> Any:
        """Call ``function(engine)`` while the loop of the `LLMEngine` is held."""
        raise NotImplementedError

    def pause_generation(
        self, *, mode: str = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> Any:
        """Compute no requests until `resume_generation`. Requests that are added to an `AsyncLLM` or `LLMEngine` wait;
        a new call of `LLM.generate` raises RuntimeError.

        Args:
            mode: of running requests: ``abort`` ends them with the tokens that they have; ``wait`` waits until they
                have ended, and keeps new ones waiting; ``keep`` stops them, and they go on later.
            wait_for_inflight_requests: vLLM's older name of ``mode="wait"``.
            clear_cache: drop cached prefixes; KV of stopped requests is computed again.

        Raises:
            ValueError: the mode is unknown.
        """
        mode = _hold_mode("wait" if wait_for_inflight_requests else mode)
        return self._held(lambda engine: engine.suspension.pause(clear_cache=clear_cache), mode)

    def resume_generation(self) -> Any:
        """Undo `pause_generation`; does nothing otherwise. An engine that sleeps stays asleep."""
        return self._held(lambda engine: engine.suspension.resume(), "keep")

    def sleep(self, level: int = 1, mode: str = "abort") -> Any:
        """Give the memory of weights and KV back, until `wake_up`. Requests are as in `pause_generation`.

        Cached prefixes are forgotten. KV connectors first finish their transfers, and keep what they have saved.
        Captured graphs stay valid.

        Args:
            level: 1 keeps the weights in host memory, pinned with a GPU; 2 drops them.
            mode: of running requests, as of `pause_generation`.

        Raises:
            ValueError: the level or the mode is unknown, or the engine was started without ``enable_sleep_mode``.
            MemoryError: the host has no memory for the weights; the engine is awake.
        """
        self.suspension.check_sleep(level)
        return self._held(lambda engine: engine.suspension.sleep(level), _hold_mode(mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> Any:
        """Take the memory of ``tags`` again, a list of ``weights`` and ``kv_cache``; None: of both.

        With both awake, requests go on. Weights that level 2 has dropped, and that no update has replaced since, are
        then read again from where they came.

        Raises:
            ValueError: a tag is unknown.
            torch.OutOfMemoryError: the GPU has no memory for it; the engine sleeps on, and can be woken later.
            WeightError: dropped weights came from memory; give them to `reload_weights`, and call this again.
        """
        return self._held(lambda engine: engine.suspension.wake_up(tags), "keep")

    def start_profile(self, profile_prefix: str | None = None) -> Any:
        """Begin a trace: of the engine's steps, or of what each rank computes, as ``profiler_config`` says.
        ``profile_prefix``: before the names of the files.

        Raises:
            ValueError: the engine was started without a ``profiler_config``.
            RuntimeError: a trace has begun already.
        """
        return self._held(lambda engine: engine.profiler.start(profile_prefix), "keep")

    def stop_profile(self) -> Any:
        """Write the traces. Returns the file of each trace, Chrome's JSON, which https://ui.perfetto.dev opens. Raises
        RuntimeError: `start_profile` was not called."""
        return self._held(lambda engine: engine.profiler.stop(), "keep")

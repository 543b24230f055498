"""The profile of a worker, as a trace in Chrome's format, which Perfetto (https://ui.perfetto.dev) opens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fleetfoot.config.profiler import ProfilerConfig

logger = logging.getLogger(__name__)


class WorkerProfiler:
    """``torch.profiler`` around the steps of one rank. ``config``: None: there is no profiler."""

    def __init__(self, config: ProfilerConfig | None, rank: int, device: torch.device) -> None:
        self._config, self._rank = config or ProfilerConfig(), rank
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._running: tuple[Any, Path] | None = None

    def start(self, prefix: str | None) -> None:
        """Begin a trace. Raises ValueError: no profiler is set, the prefix is a path; RuntimeError: it has begun."""
        config = self._config
        path = config.new_file(prefix, f"rank{self._rank}", "pt.trace.json")
        if self._running is not None:
            raise RuntimeError("start_profile was called before; call stop_profile first")
        profiler = profile(
            activities=self._activities,
            record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
            with_stack=config.torch_profiler_with_stack,
            with_flops=config.torch_profiler_with_flops,
        )
        profiler.start()
        self._running = profiler, path

    def stop(self) -> str:
        """End the trace. Returns the file's path. Raises RuntimeError: none has begun."""
        if self._running is None:
            raise RuntimeError("stop_profile was called without a start_profile before it")
        (profiler, path), self._running = self._running, None
        profiler.stop()
        profiler.export_chrome_trace(str(path))
        logger.info("rank %d has written its trace to %s", self._rank, path)
        return str(path)

"""``profiler_config``: the profiler of `LLM.start_profile`, and where its traces go."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fleetfoot.config.json_fields import JSONSettings

_PREFIX = re.compile(r"[\w.-]{0,128}", re.ASCII)
_WHOLE = "leave it out: everything between start_profile and stop_profile is in the trace"


@dataclass(frozen=True, slots=True)
class ProfilerConfig(JSONSettings):
    """``--profiler-config``; names as in vLLM. Without a profiler it has no effect."""

    setting: ClassVar[str] = "profiler_config"
    neutral: ClassVar[Mapping[str, Any]] = {
        "torch_profiler_dump_cuda_time_total": True, "delay_iterations": 0, "max_iterations": 0,
    }  # fmt: skip
    advice: ClassVar[Mapping[str, str]] = {
        "torch_profiler_dump_cuda_time_total": "leave it out: the trace has the times",
        "ignore_frontend": "leave it out: workers are profiled alone",
        "delay_iterations": _WHOLE,
        "max_iterations": _WHOLE,
    }

    profiler: str | None = field(default=None, metadata={"choices": ("torch", "steps")})
    """``torch``: ``torch.profiler`` on each rank. ``steps``: steps and requests of the engine, without kernels."""
    torch_profiler_dir: str = ""
    """The folder of the traces, which is made if it is not there."""
    torch_profiler_with_stack: bool = True
    """Whether Python functions are in the trace."""
    torch_profiler_with_flops: bool = False
    """Whether floating-point operations are counted."""
    torch_profiler_record_shapes: bool = False
    """Whether the trace has the shapes of operations' inputs."""
    torch_profiler_with_memory: bool = False
    """Whether allocations are in the trace."""
    torch_profiler_use_gzip: bool = True
    """Whether traces are compressed."""

    def __post_init__(self) -> None:
        if isinstance(self.torch_profiler_dir, os.PathLike):
            object.__setattr__(self, "torch_profiler_dir", os.fspath(self.torch_profiler_dir))
        JSONSettings.__post_init__(self)
        if (self.profiler is None) != (not self.torch_profiler_dir):
            raise ValueError(
                f"profiler_config: profiler is {self.profiler!r} and torch_profiler_dir {self.torch_profiler_dir!r}; "
                "set both, as {'profiler': 'torch', 'torch_profiler_dir': './traces'}, or none"
            )

    def new_file(self, prefix: str | None, of: str, suffix: str) -> Path:
        """The file of a trace, in the folder, which is made. ``of``: what it is of. Raises ValueError: no profiler is
        set, or the prefix is a path."""
        if prefix is not None and (not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix)):
            raise ValueError(
                f"profile_prefix is {prefix!r:.100}; it must be the beginning of a file's name, up to 128 letters, "
                "digits, '.', '-' and '_', and no path"
            )
        if self.profiler is None:
            raise ValueError(
                "no profiler is set; start the engine with profiler_config={'profiler': 'torch', 'torch_profiler_dir': "
                "'./traces'}, or 'steps' in place of 'torch'"
            )
        folder = Path(self.torch_profiler_dir)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{f'{prefix}_' if prefix else ''}{of}.{time.time_ns()}.{suffix}"
        return folder / (f"{name}.gz" if self.torch_profiler_use_gzip else name)

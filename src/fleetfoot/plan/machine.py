"""The machine that an engine runs on, as far as a plan depends on it."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

_GPU_DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")
"""One of them is there wherever Linux has a GPU that torch can compute on."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that can be measured, or asserted for a machine that is not this one. Sizes in bytes."""

    cpu_memory_bytes: int
    """Memory that programs can still take."""
    gpu_name: str | None = None
    gpu_memory_bytes: int = 0
    """Of one GPU; 0: there is none."""
    has_triton: bool = False
    has_native: bool = False
    """Whether Fleetfoot's own CPU kernels were built."""

    @classmethod
    def detect(cls) -> Machine:
        """This machine. Imports torch where there may be a GPU, for torch alone knows which it can use."""
        memory, native = _available_memory(), _has_native()
        if not may_have_gpu():
            return cls(memory, has_native=native)
        import torch

        if not torch.cuda.is_available():
            return cls(memory, has_native=native)
        properties = torch.cuda.get_device_properties(0)
        return cls(memory, properties.name, properties.total_memory, has_triton(), native)


def may_have_gpu() -> bool:
    """False where there is certainly no GPU that torch could use, found without importing torch."""
    return sys.platform != "linux" or any(Path(path).exists() for path in _GPU_DEVICE_FILES)


def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def _has_native() -> bool:
    """The library's file stands beside its sources; loading it would need torch."""
    from fleetfoot import native

    return any(Path(folder, "libfleetfoot.so").exists() for folder in native.__path__)


def _available_memory() -> int:
    """Bytes that a new program could take: what Linux says it could free, elsewhere half of what is installed."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2

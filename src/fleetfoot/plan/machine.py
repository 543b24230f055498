"""The machine that an engine runs on, as far as a plan depends on it."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that can be measured, or asserted for a machine that is not this one. Sizes in bytes."""

    cpu_memory_bytes: int
    """Memory that programs can still take."""
    gpu_name: str | None = None
    gpu_memory_bytes: int = 0
    """Of one GPU; 0: there is none."""
    has_triton: bool = False

    @classmethod
    def detect(cls) -> Machine:
        """This machine."""
        import importlib.util

        import torch

        memory = _available_memory()
        if not torch.cuda.is_available():
            return cls(memory)
        properties = torch.cuda.get_device_properties(0)
        has_triton = importlib.util.find_spec("triton") is not None
        return cls(memory, properties.name, properties.total_memory, has_triton)


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

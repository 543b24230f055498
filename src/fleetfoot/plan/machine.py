"""The machine that an engine runs on, as far as a plan depends on it."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from fleetfoot.kernels.registry import has_hopper_room
from fleetfoot.kernels.runtime.internals import is_tested_triton
from fleetfoot.native.loading import find_native
from fleetfoot.plan.gpus import GPU, find_gpus
from fleetfoot.utils.torch_build import find_nvrtc, torch_build

_GPU_DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")
"""One of them is there wherever Linux has a GPU that torch can compute on."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that can be measured, or asserted for a machine that is not this one. Sizes in bytes."""

    cpu_memory_bytes: int
    """Memory that programs can still take."""
    gpu_name: str | None = None
    gpu_memory_bytes: int = 0
    """Memory of one GPU; 0: there is none."""
    num_gpus: int = 0
    has_triton: bool = False
    is_hopper: bool = False
    """Whether the GPU has compute capability 9.0."""
    has_e4m3: bool = True
    """Whether it converts FP8 in e4m3: compute capability 8.9 and above."""
    hopper_problem: str = ""
    """Why kernels for such GPUs alone cannot be used; empty: they can."""
    num_sms: int = 0
    """Its multiprocessors; of a MIG slice, those of the slice."""
    has_nvrtc: bool = False
    """Whether NVIDIA's compiler for CUDA C++ is among the packages that torch installs."""
    has_native: bool = False
    """Whether the C kernels can be used."""
    native_problem: str = ""
    """Why they cannot, if that was found out."""
    native_variant: str | None = None
    """The instruction set that they use; None: the best one."""

    def memory_bytes(self, device: str) -> int:
        """What a device (``cpu`` or ``cuda``) has."""
        return self.cpu_memory_bytes if device == "cpu" else self.gpu_memory_bytes

    def choose_device(self, setting: str) -> str:
        """``cpu`` or ``cuda``, from the setting ``device``. Raises ValueError if it is ``cuda`` and there is no
        GPU."""
        if setting == "cuda" and not self.gpu_memory_bytes:
            raise ValueError("device is 'cuda', but torch finds no GPU here; use device='cpu' or 'auto'")
        return ("cuda" if self.gpu_memory_bytes else "cpu") if setting == "auto" else setting

    @classmethod
    def without_gpu(cls) -> Machine:
        """This machine as if it had no GPU."""
        variant, problem = find_native()
        return cls(
            _available_memory(),
            has_native=not problem,
            native_problem=problem,
            native_variant=variant or None,
            hopper_problem="" if has_hopper_room() else "fleetfoot.kernels_hopper is not installed",
        )

    @classmethod
    def detect(cls) -> Machine:
        """This machine. Torch is imported only if there may be a GPU, and the driver does not list it."""
        here = cls.without_gpu()
        if "torch" not in sys.modules and not may_have_gpu():
            return here
        gpus = None if "torch" in sys.modules else find_gpus()
        if gpus is None:
            gpus = _gpus_of_torch()
        if not gpus:
            return here
        first, build = gpus[0], torch_build()
        has_triton = importlib.util.find_spec("triton") is not None
        if has_triton and not here.hopper_problem and not is_tested_triton():
            here = replace(here, hopper_problem=f"they were not tested with Triton {version('triton')}")
        return replace(
            here,
            gpu_name=first.name,
            gpu_memory_bytes=first.memory_bytes,
            num_gpus=len(gpus),
            has_triton=has_triton,
            is_hopper=build.hip is None and first.capability == (9, 0),
            has_e4m3=build.hip is not None or first.capability >= (8, 9),
            num_sms=first.num_sms,
            has_nvrtc=find_nvrtc(build.cuda) is not None,
        )


def _gpus_of_torch() -> list[GPU]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [GPU(each.name, each.total_memory, (each.major, each.minor), each.multi_processor_count) for each in found]


class Platform:
    """vLLM's ``current_platform``, as far as its scripts use it."""

    def is_cpu(self) -> bool:
        return Machine.detect().choose_device("auto") == "cpu"

    def is_cuda(self) -> bool:
        return not self.is_cpu()

    def is_rocm(self) -> bool:
        return False

    is_cuda_alike = is_cuda


current_platform = Platform()


def hopper_sms(gpu_name: str) -> int:
    """Multiprocessors of a GPU of this name; 0: it does not have compute capability 9.0."""
    found = re.search(r"\bG?H(20|100|200|800)\b", gpu_name)
    if found is None:
        return 0
    return 78 if found[1] == "20" else 114 if "PCIe" in gpu_name else 132


def may_have_gpu() -> bool:
    """False where there is certainly no GPU that torch could use, found without importing torch."""
    return sys.platform != "linux" or any(Path(path).exists() for path in _GPU_DEVICE_FILES)


def _available_memory() -> int:
    """Bytes that a new program could take: what Linux could free, elsewhere half of what is installed."""
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2

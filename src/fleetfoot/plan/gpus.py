"""The GPUs that torch would find here, from NVIDIA's driver, without importing torch.

An engine with worker processes computes nothing itself. Its process does not import torch, which would take as long as
the imports of its workers, one after the other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fleetfoot.utils.torch_build import torch_build

_NUM_SMS, _MAJOR, _MINOR = 16, 75, 76  # attributes of a device
_NO_DEVICE = 100


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU, or a MIG slice of it."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    num_sms: int
    """Multiprocessors."""


def _open_driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def find_gpus(open_driver: Callable[[], Any] = _open_driver) -> list[GPU] | None:
    """The GPUs, in torch's order; None: only torch can find them (ROCm, or a driver with an error or that is older
    than torch's CUDA). ``open_driver``: raises OSError where there is no driver."""
    build = torch_build()
    if build.cuda is None:
        return None if build.hip else []
    try:
        driver = open_driver()
    except OSError:
        return []
    status = driver.cuInit(0)
    version, count = ctypes.c_int(), ctypes.c_int()
    if status == _NO_DEVICE:
        return []
    if status or driver.cuDriverGetVersion(ctypes.byref(version)) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return None
    if version.value // 1000 < int(build.cuda.partition(".")[0]):
        return None
    gpus = [_read(driver, index) for index in range(count.value)]
    return None if None in gpus else [gpu for gpu in gpus if gpu is not None]


def _read(driver: Any, index: int) -> GPU | None:
    """None: the driver reports an error."""
    device, name, size = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    values = [ctypes.c_int() for _ in range(3)]
    failed = (
        driver.cuDeviceGet(ctypes.byref(device), index)
        or driver.cuDeviceGetName(name, len(name), device)
        or driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        or any(
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            for value, attribute in zip(values, (_MAJOR, _MINOR, _NUM_SMS), strict=True)
        )
    )
    major, minor, num_sms = (value.value for value in values)
    return None if failed else GPU(name.value.decode(), size.value, (major, minor), num_sms)

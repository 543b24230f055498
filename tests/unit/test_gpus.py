"""GPUs found by the driver, and what torch was built for, without torch."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fleetfoot.plan import gpus, machine
from fleetfoot.plan.gpus import GPU, find_gpus
from fleetfoot.plan.machine import Machine
from fleetfoot.utils.torch_build import TorchBuild, torch_build

H200 = GPU("NVIDIA H200", 150_000_000_000, (9, 0), 132)
SLICE = GPU("NVIDIA A100 MIG 1g.5gb", 5_000_000_000, (8, 0), 14)


class FakeDriver:
    """Functions of the driver as ctypes has them; those in ``failing`` return an error."""

    def __init__(self, found: list[GPU], version: int = 13000, **failing: int) -> None:
        self._found, self._version, self._failing = found, version, failing

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            assert name in ("cuInit", "cuDriverGetVersion") or "cuInit" not in self._failing
            getattr(self, f"_{name}")(*(getattr(argument, "_obj", argument) for argument in arguments))
            return self._failing.get(name, 0)

        return call

    def _cuInit(self, flags: int) -> None:  # noqa: N802
        assert flags == 0

    def _cuDriverGetVersion(self, version: Any) -> None:  # noqa: N802
        version.value = self._version

    def _cuDeviceGetCount(self, count: Any) -> None:  # noqa: N802
        count.value = len(self._found)

    def _cuDeviceGet(self, device: Any, index: int) -> None:  # noqa: N802
        device.value = 10 + index

    def _cuDeviceGetName(self, name: Any, size: int, device: Any) -> None:  # noqa: N802
        name.value = self._found[device.value - 10].name.encode()
        assert len(name.value) < size

    def _cuDeviceTotalMem_v2(self, size: ctypes.c_size_t, device: Any) -> None:  # noqa: N802
        size.value = self._found[device.value - 10].memory_bytes

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> None:  # noqa: N802
        gpu = self._found[device.value - 10]
        value.value = {16: gpu.num_sms, 75: gpu.capability[0], 76: gpu.capability[1]}[attribute]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what torch was built for."""

    def set_build(cuda: str | None = "13.0", hip: str | None = None) -> None:
        for module in (gpus, machine):
            monkeypatch.setattr(module, "torch_build", lambda: TorchBuild("2.13.0", cuda, hip))

    set_build()
    return set_build


def test_what_torch_was_built_for() -> None:
    assert torch_build() == TorchBuild(str(torch.__version__), torch.version.cuda, torch.version.hip)


def test_gpus_of_the_driver(build: Callable[..., None]) -> None:
    for found in ([H200, SLICE], [SLICE], []):
        assert find_gpus(lambda found=found: FakeDriver(found)) == found  # type: ignore[misc]
    assert find_gpus(lambda: FakeDriver([H200], cuInit=100)) == []  # CUDA_ERROR_NO_DEVICE


def test_there_is_no_driver_or_torch_does_not_use_it(build: Callable[..., None]) -> None:
    def no_driver() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    assert find_gpus(no_driver) == []
    build(cuda=None)
    assert find_gpus(lambda: FakeDriver([H200])) == []


def test_what_only_torch_can_tell(build: Callable[..., None]) -> None:
    for failing in ("cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGetName", "cuDeviceGetAttribute"):
        assert find_gpus(lambda failing=failing: FakeDriver([H200], **{failing: 999})) is None  # type: ignore[misc]
    assert find_gpus(lambda: FakeDriver([H200], version=12080)) is None  # older than torch's CUDA 13
    build(cuda="12.8")
    assert find_gpus(lambda: FakeDriver([H200], version=12020)) == [H200]  # minor versions are compatible
    build(cuda=None, hip="6.4")
    assert find_gpus(lambda: FakeDriver([H200])) is None


def test_a_machine_of_the_drivers_gpus(build: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "may_have_gpu", lambda: True)
    monkeypatch.delitem(machine.sys.modules, "torch")
    try:
        for found in ([H200, SLICE], [SLICE], []):
            monkeypatch.setattr(machine, "find_gpus", lambda found=found: found)
            here = Machine.detect()
            if not found:
                assert (here.gpu_memory_bytes, here.num_gpus) == (0, 0)
                continue
            facts = here.gpu_name, here.gpu_memory_bytes, here.num_gpus, here.is_hopper, here.num_sms
            first = found[0]
            assert facts == (first.name, first.memory_bytes, len(found), first is H200, first.num_sms)
    finally:
        monkeypatch.undo()

"""Memory that is given back while addresses stay: the C library over a driver made of the host's pages, and a CPU's."""

import contextlib
import ctypes
import mmap
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fleetfoot.native.loading import NativeUnavailableError, load_device_memory, native_problem, open_library
from fleetfoot.utils.memory import release_code, use_huge_pages, use_small_pages
from fleetfoot.weights import sleep
from fleetfoot.weights.sleep import KV_CACHE, WEIGHTS, CpuMemory, CudaMemory, make_sleep_memory, remaining

SOURCE = Path(__file__).parents[1] / "helpers" / "fake_cuda.c"
UNIT = 2 << 20


class FakeGpu:
    """The library over the fake driver; allocates as torch's memory pools do."""

    def __init__(self, driver: Path) -> None:
        self.functions = load_device_memory(str(driver))
        self.driver = ctypes.CDLL(str(driver))
        library = open_library()
        self._alloc, self._free = library.ff_device_alloc, library.ff_device_free
        self._alloc.argtypes, self._alloc.restype = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        self._free.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)

    def alloc(self, size: int) -> np.ndarray:
        address = self._alloc(size, 0, None)
        if not address:
            raise MemoryError
        return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)

    def free(self, array: np.ndarray) -> None:
        self._free(array.ctypes.data, array.size, 0, None)

    def value(self, name: str) -> int:
        return ctypes.c_int64.in_dll(self.driver, f"fake_{name}").value

    def limit(self, size: int) -> None:
        ctypes.c_int64.in_dll(self.driver, "fake_capacity").value = size


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> FakeGpu:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or native_problem():
        pytest.skip("needs a C compiler and the C library")
    driver = tmp_path_factory.mktemp("driver") / "libcuda.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", driver, SOURCE], check=True)
    try:
        return FakeGpu(driver)
    except NativeUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def memory(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaMemory]:
    """`CudaMemory` without torch's part of a GPU."""
    monkeypatch.setattr(sleep, "load_device_memory", lambda: gpu.functions)
    monkeypatch.setattr(sleep, "_allocator", lambda: SimpleNamespace(allocator=lambda: None))
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: object())
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: contextlib.nullcontext())
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    memory = CudaMemory(torch.device("cuda", 0))
    yield memory
    memory.close()
    gpu.limit(1 << 40)


def filled(gpu: FakeGpu, *sizes: int) -> list[np.ndarray]:
    arrays = [gpu.alloc(size) for size in sizes]
    for number, array in enumerate(arrays, start=1):
        array[:] = np.arange(array.size) % 251 + number
    return arrays


def test_what_is_kept_comes_back_and_what_is_dropped_is_zero(gpu: FakeGpu, memory: CudaMemory) -> None:
    with memory.allocating(WEIGHTS):
        weights = filled(gpu, 3 * UNIT, 100, UNIT + 1)
    with memory.allocating(KV_CACHE):
        kv = filled(gpu, 5 * UNIT)
    before = [array.copy() for array in weights]
    assert gpu.value("mapped") == gpu.value("reserved") == 11 * UNIT
    for _ in range(2):
        memory.release(WEIGHTS)
        memory.release(KV_CACHE, [], keeps_rest=False)
        assert (gpu.value("mapped"), gpu.value("reserved")) == (0, 11 * UNIT)
        memory.restore(WEIGHTS)
        assert gpu.value("mapped") == 6 * UNIT
        memory.restore(KV_CACHE)
        assert all(np.array_equal(*pair) for pair in zip(weights, before, strict=True))
        assert not kv[0].any()
    first = weights[0].ctypes.data
    memory.release(WEIGHTS, [(first + 10, 2 * UNIT), (weights[2].ctypes.data, weights[2].size)])
    memory.restore(WEIGHTS)
    assert not weights[0][10 : 10 + 2 * UNIT].any() and not weights[2].any()
    before[0][10 : 10 + 2 * UNIT] = 0
    assert np.array_equal(weights[0], before[0]) and np.array_equal(weights[1], before[1])
    for array in (*weights, *kv):
        gpu.free(array)
    assert gpu.value("mapped") == gpu.value("reserved") == 0


def test_a_wake_up_without_memory_changes_nothing(gpu: FakeGpu, memory: CudaMemory) -> None:
    with memory.allocating(WEIGHTS):
        weights = filled(gpu, UNIT, 2 * UNIT, UNIT)
    memory.release(WEIGHTS)
    gpu.limit(2 * UNIT)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match=r"weights .cuMemCreate: out of memory.*wake_up"):
            memory.restore(WEIGHTS)
        assert gpu.value("mapped") == 0
    with pytest.raises(MemoryError):
        gpu.alloc(3 * UNIT)
    gpu.limit(4 * UNIT)
    memory.restore(WEIGHTS)
    assert [array[1] for array in weights] == [2, 3, 4]
    memory.release(WEIGHTS)
    for array in weights:  # freed while their pages are not there
        gpu.free(array)
    assert gpu.value("mapped") == gpu.value("reserved") == 0


def test_pages_of_a_cpu_are_given_back() -> None:
    memory = make_sleep_memory(torch.device("cpu"), is_enabled=True)
    assert isinstance(memory, CpuMemory)
    size = 64 * mmap.PAGESIZE
    tensor = torch.from_numpy(np.frombuffer(mmap.mmap(-1, size), np.uint8).copy()).fill_(7)
    address = tensor.data_ptr()
    memory.release(WEIGHTS, [(address + 1, size - 2)])
    memory.restore(WEIGHTS)
    assert tensor.data_ptr() == address
    assert (tensor[0], tensor[-1]) == (7, 7)
    assert int((tensor == 0).sum()) in range(size - 2 * mmap.PAGESIZE, size)


def test_what_cannot_sleep_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="start it with enable_sleep_mode=True"):
        make_sleep_memory(torch.device("cpu"), is_enabled=False).release(WEIGHTS)

    def unavailable() -> Any:
        raise NativeUnavailableError("no such driver")

    monkeypatch.setattr(sleep, "load_device_memory", unavailable)
    with pytest.raises(ValueError, match=r"enable_sleep_mode is True, but .* no such driver"):
        make_sleep_memory(torch.device("cuda"), is_enabled=True)


def test_spans_that_remain() -> None:
    rng = random.Random(5)
    for _ in range(50):
        whole = [(100 * start, rng.randrange(1, 90)) for start in rng.sample(range(10), 4)]
        removed = [(rng.randrange(1000), rng.randrange(1, 200)) for _ in range(rng.randrange(4))]
        expected = {byte for first, size in whole for byte in range(first, first + size)}
        expected -= {byte for first, size in removed for byte in range(first, first + size)}
        found = [byte for first, size in remaining(whole, removed) for byte in range(first, first + size)]
        assert found == sorted(expected)


def test_huge_pages_keep_what_is_there() -> None:
    whole = np.random.default_rng(0).integers(0, 255, 9 << 20, np.uint8)
    address, before = whole.ctypes.data, whole.copy()
    use_huge_pages([(address + (5 << 20), 4 << 20), (address + 100, (5 << 20) - 200), (address, 10)])  # close together
    use_huge_pages([])
    assert np.array_equal(whole, before)


def test_memory_of_small_pages_is_taken_when_it_is_written() -> None:
    mapped = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)  # as NumPy does
    memory = np.frombuffer(mapped, np.uint8)
    use_small_pages(memory.ctypes.data, memory.nbytes)
    memory[:: 4 << 20] = 1
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(8 * (memory.ctypes.data // mmap.PAGESIZE))
        entries = np.frombuffer(pages.read(8 * (memory.nbytes // mmap.PAGESIZE)), np.uint64)
    assert int((entries >> 63).sum()) == 8


def test_code_that_was_given_back_runs() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[2])  # pages of files and of shared memory

    before, expected = resident(), torch.linalg.inv(torch.eye(3))
    release_code()
    assert resident() < before
    assert torch.equal(torch.linalg.inv(torch.eye(3)), expected)

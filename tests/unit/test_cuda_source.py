"""Kernels in CUDA C++ with a compiler and a driver that only note their calls."""

import ctypes
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fleetfoot.kernels.runtime import compile_ahead, compile_worker, cuda_source
from fleetfoot.kernels.runtime.compile_ahead import CompileAhead, KernelCompileError
from fleetfoot.kernels.runtime.compile_worker import CompilePool, CompileWorker
from fleetfoot.kernels.runtime.cuda_source import CudaCompileError, CudaKernel, CudaSource, can_compile, load
from fleetfoot.kernels.runtime.internals import is_cached
from fleetfoot.utils import torch_build

pytest.importorskip("triton")

DEVICE = torch.device("cuda", 0)
KERNEL = CudaKernel("twice.cu", "twice", (("WIDTH", 4),), cluster=2, threads=64, shared_bytes=1024)


class FakeNvrtc:
    """The library: compiles every source without an "error" to itself."""

    def __init__(self) -> None:
        self.compiled: list[tuple[bytes, list[bytes]]] = []
        self.source = b""

    def nvrtcVersion(self, major: Any, minor: Any) -> int:  # noqa: N802
        major._obj.value, minor._obj.value = 13, 0
        return 0

    def nvrtcCreateProgram(self, program: Any, source: bytes, *others: Any) -> int:  # noqa: N802
        self.source = source
        return 0

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> int:  # noqa: N802
        self.compiled.append((self.source, list(options)))
        return 6 if b"error" in self.source else 0

    def nvrtcDestroyProgram(self, program: Any) -> int:  # noqa: N802
        return 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        content = {"ProgramLog": b"line 1: error\0", "CUBIN": b"binary of " + self.source}[
            name[8:].removesuffix("Size")
        ]

        def get(program: Any, output: Any) -> int:
            if name.endswith("Size"):
                output._obj.value = len(content)
            else:
                output.raw = content
            return 0

        return get


class FakeDriver:
    """Notes calls. ``failing``: the name of one that fails."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.launches: list[tuple[list[int], list[int], bytes]] = []
        self.failing = ""
        self.num_clusters = 30

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name in ("cuModuleLoadData", "cuModuleGetFunction"):
                arguments[0]._obj.value = 7
            if name == "cuOccupancyMaxActiveClusters":
                arguments[0]._obj.value = self.num_clusters
            return 1 if name == self.failing else 0

        return call

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:  # noqa: N802
        made = config._obj
        sizes = [getattr(made, name) for name, _ in made._fields_[:7]]
        attributes = [value for each in made.attributes[: made.num_attributes] for value in (each.id, *each.value[:3])]
        self.launches.append(([*sizes, made.stream], attributes, ctypes.string_at(parameters[0], 4)))
        return 1 if self.failing == "cuLaunchKernelEx" else 0

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNvrtc:
    library = FakeNvrtc()
    (tmp_path / "twice.cu").write_text("#include <device.cuh>\nvoid twice() {}")
    (tmp_path / "device.cuh").write_text("// device")
    monkeypatch.setattr(cuda_source, "_FOLDER", tmp_path)
    monkeypatch.setattr(cuda_source.ctypes, "CDLL", lambda path: library)
    monkeypatch.setattr(cuda_source, "find_nvrtc", lambda version: Path("libnvrtc.so.13"))
    monkeypatch.setattr(cuda_source, "gpu_limits", lambda device: SimpleNamespace(capability=(9, 0)))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for cached in (cuda_source._nvrtc, cuda_source._function):
        cached.cache_clear()
    return library


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(cuda_source, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return driver


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileAhead]:
    ahead = CompileAhead(1)
    monkeypatch.setattr(ahead, "_start_threads", ahead._load_all)
    monkeypatch.setattr(compile_ahead, "CompilePool", partial(CompilePool, command=("/no/such/program",)))
    yield ahead
    ahead.close()


def source(kernel: CudaKernel = KERNEL, architecture: str = "sm_90a") -> CudaSource:
    return CudaSource(kernel, architecture, Path("libnvrtc.so.13"), DEVICE)


def test_a_kernel_is_compiled_once(nvrtc: FakeNvrtc, driver: FakeDriver, tmp_path: Path) -> None:
    assert not is_cached(SimpleNamespace(_key=source().key))
    first, second = source()(), pickle.loads(pickle.dumps(source()))()
    assert first._binary == second._binary == b"binary of #include <device.cuh>\nvoid twice() {}"
    ((_, options),) = nvrtc.compiled
    assert {b"--gpu-architecture=sm_90a", b"-DWIDTH=4", f"--include-path={tmp_path}".encode()} <= {*options}
    assert is_cached(SimpleNamespace(_key=source().key))


@pytest.mark.parametrize("change", ["source", "header", "function", "define", "architecture"])
def test_what_determines_the_binary_is_in_the_key(nvrtc: FakeNvrtc, tmp_path: Path, change: str) -> None:
    before, kernel, architecture = source().key, KERNEL, "sm_90a"
    if change in ("source", "header"):
        (tmp_path / {"source": "twice.cu", "header": "device.cuh"}[change]).write_text("// other")
    elif change == "architecture":
        architecture = "sm_100a"
    else:
        function, defines = ("thrice", KERNEL.defines) if change == "function" else ("twice", (("WIDTH", 8),))
        kernel = CudaKernel("twice.cu", function, defines, 2, 64, 1024)
    assert source(kernel, architecture).key != before


def test_the_compilers_log_is_raised(nvrtc: FakeNvrtc, tmp_path: Path) -> None:
    (tmp_path / "twice.cu").write_text("error")
    with pytest.raises(CudaCompileError, match=r"twice\.cu does not compile:\nline 1: error$"):
        source()()


@pytest.mark.parametrize(("version", "part"), [("13.0", "cu13"), ("12.8", "cuda_nvrtc"), (None, "cu13")])
def test_the_compiler_of_torchs_wheels_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str | None, part: str
) -> None:
    library = tmp_path / part / "lib" / f"libnvrtc.so.{(version or '13')[:2]}"
    spec = SimpleNamespace(submodule_search_locations=["/nowhere", str(tmp_path)])
    monkeypatch.setattr(torch_build, "find_spec", lambda name: spec)
    assert torch_build.find_nvrtc(version) is None
    library.parent.mkdir(parents=True)
    library.touch()
    assert torch_build.find_nvrtc(version) == (None if version is None else library)


def test_launches(nvrtc: FakeNvrtc, driver: FakeDriver) -> None:
    """With a cluster and, if it may start early, dependent; the parameter is passed by value."""
    loaded = load(KERNEL, DEVICE)
    loaded.launch(32, struct.pack("i", 3), dependent=True)
    load(KERNEL, DEVICE).launch(16, struct.pack("i", 4), dependent=False)
    cluster, dependent = [4, 2, 1, 1], [6, 1, 0, 0]
    assert driver.launches == [
        ([32, 1, 1, 64, 1, 1, 1024, 5], cluster + dependent, struct.pack("i", 3)),
        ([16, 1, 1, 64, 1, 1, 1024, 5], cluster, struct.pack("i", 4)),
    ]
    assert driver.names.count("cuModuleLoadData") == 1
    assert ("cuFuncSetAttribute", 8, 1024) in [(name, *arguments[1:]) for name, arguments in driver.calls]
    driver.failing = "cuLaunchKernelEx"
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed with CUDA error 1"):
        loaded.launch(32, b"", dependent=False)


def test_a_dry_pass_queues_them(nvrtc: FakeNvrtc, driver: FakeDriver, ahead: CompileAhead) -> None:
    for _ in range(2):
        ahead.queue(lambda: load(KERNEL, DEVICE).launch(2, b"", dependent=True))
    assert ahead.wait() == (0, 1)
    assert not driver.launches
    load(KERNEL, DEVICE).launch(2, bytes(4), dependent=True)
    assert len(driver.launches) == len(nvrtc.compiled) == 1


@pytest.mark.parametrize("failing", ["compiler", "driver"])
def test_a_kernel_that_fails_ends_the_start(
    nvrtc: FakeNvrtc, driver: FakeDriver, ahead: CompileAhead, tmp_path: Path, failing: str
) -> None:
    if failing == "compiler":
        (tmp_path / "twice.cu").write_text("error")
    else:
        driver.failing = "cuModuleLoadData"
    ahead.queue(lambda: load(KERNEL, DEVICE))
    with pytest.raises(KernelCompileError) as raised:
        ahead.wait()
    assert raised.value.name == "twice"


@pytest.mark.parametrize(("least_clusters", "fits"), [(30, True), (31, False)])
def test_whether_clusters_fit_at_once(
    nvrtc: FakeNvrtc, driver: FakeDriver, ahead: CompileAhead, least_clusters: int, fits: bool
) -> None:
    """On a slice of a GPU they may not."""
    kernel = replace(KERNEL, least_clusters=least_clusters)
    ahead.queue(lambda: load(kernel, DEVICE))
    ahead.wait()
    assert load(kernel, DEVICE).fits == fits


def test_without_a_compiler_nothing_can_be_compiled(nvrtc: FakeNvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    can_compile.cache_clear()
    assert can_compile(DEVICE)
    monkeypatch.setattr(cuda_source, "find_nvrtc", lambda version: None)
    can_compile.cache_clear()
    assert not can_compile(DEVICE)
    with pytest.raises(RuntimeError, match="needs NVRTC"):
        load(KERNEL, DEVICE)
    can_compile.cache_clear()


def test_processes_compile_them(nvrtc: FakeNvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket
    import threading

    here, there = socket.socketpair()
    ends = there.makefile("rb"), there.makefile("wb")
    thread = threading.Thread(target=compile_worker.serve, args=ends)
    thread.start()
    worker = CompileWorker(here)
    assert worker.compile(source())
    worker.close()
    thread.join()
    for end in (*ends, there, here):
        end.close()
    assert len(nvrtc.compiled) == 1 and is_cached(SimpleNamespace(_key=source().key))

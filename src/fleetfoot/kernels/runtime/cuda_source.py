"""Kernels in CUDA C++, compiled by NVRTC, for what Triton has no words for: clusters of thread blocks, their shared
memory, bulk copies.

They use the same machinery as Triton's kernels. Processes compile them (`fleetfoot.kernels.runtime.compile_worker`),
the binaries are in Triton's cache on disk, and dry passes queue them.

A kernel is an ``extern "C"`` function with one parameter, a struct that is passed by value.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from fleetfoot.kernels.runtime.gpu_limits import gpu_limits
from fleetfoot.kernels.runtime.internals import active_mode
from fleetfoot.kernels.runtime.triton_support import launcher
from fleetfoot.utils.torch_build import find_nvrtc

_FOLDER = Path(__file__).parents[2]
_GROUP, _BINARY = "cuda.json", "cuda.cubin"
_MAX_DYNAMIC_SHARED_SIZE_BYTES, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 8, 14
_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6
_PORTABLE_CLUSTER = 8


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """A kernel in CUDA C++. Equal ones are compiled once."""

    source: str
    """The file, below ``fleetfoot``. It may include the ``.cuh`` files of its folder, and those of ``runtime``,
    and no others."""
    function: str
    """Its name, which is declared ``extern "C"``."""
    defines: tuple[tuple[str, int], ...]
    """Names and values of macros."""
    cluster: int
    """Thread blocks of a cluster, by which the number of a launch is divisible."""
    threads: int
    """Threads of a block."""
    shared_bytes: int
    """Dynamic shared memory of a block."""
    least_clusters: int = 1
    """Clusters that must fit in the GPU at the same time: see `LoadedKernel.fits`."""

    @property
    def path(self) -> Path:
        """Path of the source."""
        return _FOLDER / self.source

    @property
    def include_paths(self) -> tuple[Path, Path]:
        """The folders of headers."""
        return self.path.parent, Path(__file__).parent


class CudaCompileError(RuntimeError):
    """NVRTC does not compile a kernel; the message is its log."""


# --- the compiler -----------------------------------------------------------------------------------------------------


class _Nvrtc:
    """NVIDIA's runtime compiler. It needs no GPU."""

    def __init__(self, path: Path) -> None:
        for builtins in path.parent.glob("libnvrtc-builtins.so.*"):  # it does not look for them beside itself
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(str(path))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise CudaCompileError(f"{name} failed with NVRTC error {status}")

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, content)
        return content.raw

    def compile(self, path: Path, options: Sequence[str]) -> bytes:
        """The binary of a file. Raises `CudaCompileError`."""
        program = ctypes.c_void_p()
        text, name = path.read_bytes(), path.name.encode()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text, name, 0, None, None)
        try:
            encoded = [option.encode() for option in options]
            values = (ctypes.c_char_p * len(encoded))(*encoded)
            if self._library.nvrtcCompileProgram(program, len(encoded), values):
                log = self._read("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
                raise CudaCompileError(f"{path.name} does not compile:\n{log}")
            return self._read("CUBIN", program)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _nvrtc(path: Path) -> _Nvrtc:
    return _Nvrtc(path)


@dataclass(frozen=True)
class CudaSource:
    """The compilation of a kernel: a job of `CompileAhead`, which another process can run."""

    kernel: CudaKernel
    architecture: str
    """As ``sm_90a``."""
    nvrtc: Path | None
    """None: of a GPU that is not here, for which nothing is compiled."""
    device: torch.device
    options: ClassVar[tuple[str, ...]] = ("--std=c++17", "--fmad=true", "--device-as-default-execution-space")

    @property
    def name(self) -> str:
        return self.kernel.function

    @property
    def key(self) -> str:
        """Equal for equal binaries."""
        headers = [each for folder in self.kernel.include_paths for each in sorted(folder.glob("*.cuh"))]
        texts = [each.read_bytes() for each in (self.kernel.path, *headers)]
        hashed = [hashlib.sha256(text).hexdigest() for text in texts]
        version = None if self.nvrtc is None else _nvrtc(self.nvrtc).version
        kernel = self.kernel
        return repr((kernel.source, kernel.function, kernel.defines, hashed, self.options, self.architecture, version))

    def compile(self) -> bytes:
        """The binary, which is in the cache on disk afterwards. Raises `CudaCompileError`."""
        assert self.nvrtc is not None
        defines = [f"-D{name}={value}" for name, value in self.kernel.defines]
        folders = [f"--include-path={folder}" for folder in self.kernel.include_paths]
        options = (f"--gpu-architecture={self.architecture}", *folders, *self.options, *defines)
        binary = _nvrtc(self.nvrtc).compile(self.kernel.path, options)
        manager = self._cache()
        manager.put_group(_GROUP, {_BINARY: manager.put(binary, _BINARY)})
        return binary

    def __call__(self) -> LoadedKernel:
        """The kernel, from the cache on disk or compiled."""
        path = (self._cache().get_group(_GROUP) or {}).get(_BINARY)
        binary = self.compile() if path is None else Path(path).read_bytes()
        return LoadedKernel(self.kernel, self.device, binary)

    def _cache(self) -> Any:
        from triton.runtime.cache import get_cache_manager

        return get_cache_manager(hashlib.sha256(self.key.encode()).hexdigest())


# --- launches ---------------------------------------------------------------------------------------------------------


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``; the value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def driver_call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises RuntimeError with its error."""
    if status := getattr(_driver(), name)(*arguments):
        raise RuntimeError(f"{name} failed with CUDA error {status}")


class LoadedKernel:
    """A kernel on a device."""

    is_dry = False
    """Whether it launches nothing, in a dry pass."""
    fits = True
    """Whether `CudaKernel.least_clusters` fit in the GPU; False: it is smaller, or a slice of one."""

    def __init__(self, kernel: CudaKernel, device: torch.device, binary: bytes) -> None:
        self._kernel, self._device, self._binary = kernel, device, binary
        self._function = ctypes.c_void_p()
        values = (_CLUSTER_DIMENSION, (kernel.cluster, 1, 1)), (_PROGRAMMATIC_STREAM_SERIALIZATION, (1,))
        attributes = (_Attribute(name, (ctypes.c_uint32 * 16)(*value)) for name, value in values)
        self._attributes = (_Attribute * len(values))(*attributes)

    def _init_handles(self) -> None:
        """Load the binary, once. Called as of ``triton.compiler.CompiledKernel``, in any thread."""
        if self._function:
            return
        _make_context_current(self._device)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        driver_call("cuModuleLoadData", ctypes.byref(module), self._binary)
        driver_call("cuModuleGetFunction", ctypes.byref(function), module, self._kernel.function.encode())
        driver_call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, self._kernel.shared_bytes)
        if self._kernel.cluster > _PORTABLE_CLUSTER:
            driver_call("cuFuncSetAttribute", function, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        clusters, config = ctypes.c_int(), self._config(self._kernel.cluster, None, dependent=False)
        driver_call("cuOccupancyMaxActiveClusters", ctypes.byref(clusters), function, ctypes.byref(config))
        self.fits = clusters.value >= self._kernel.least_clusters
        self._function = function

    def _config(self, num_ctas: int, stream: int | None, *, dependent: bool) -> _Config:
        kernel = self._kernel
        sizes = num_ctas, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes
        return _Config(*sizes, stream, self._attributes, 1 + dependent)

    def launch(self, num_ctas: int, arguments: bytes, *, dependent: bool) -> None:
        """Launch on torch's current stream, which may capture.

        Args:
            num_ctas: number of thread blocks, a multiple of the cluster.
            arguments: the bytes of the kernel's parameter.
            dependent: it may start while the kernel before still runs; it waits by ``griddepcontrol.wait``.

        Raises:
            RuntimeError: with the driver's error.
        """
        self._init_handles()
        stream = torch.cuda.current_stream(self._device).cuda_stream
        config = self._config(num_ctas, stream, dependent=dependent)
        parameters = (ctypes.c_char_p * 1)(arguments)
        driver_call("cuLaunchKernelEx", ctypes.byref(config), self._function, parameters, None)


class _DryKernel(LoadedKernel):
    """A kernel in a dry pass."""

    is_dry = True

    def __init__(self) -> None:
        pass

    def launch(self, num_ctas: int, arguments: bytes, *, dependent: bool) -> None:
        pass


_DRY = _DryKernel()


def _make_context_current(device: torch.device) -> None:
    """Make the driver's context current for this thread, which may not have used the device."""
    context, handle = ctypes.c_void_p(), ctypes.c_int()
    driver_call("cuCtxGetCurrent", ctypes.byref(context))
    if context:
        return
    driver_call("cuDeviceGet", ctypes.byref(handle), device.index or 0)
    driver_call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    driver_call("cuCtxSetCurrent", context)


@dataclass(eq=False)
class _CudaFunction:
    """A kernel for a device, with the methods of ``triton.JITFunction`` by which `CompileAhead` queues and launches."""

    source: CudaSource
    _loaded: LoadedKernel | None = field(default=None, init=False)

    @property
    def __name__(self) -> str:
        return self.source.name

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._load

    def _load(self) -> LoadedKernel:
        if self._loaded is None:
            self._finish(self.source())
        assert self._loaded is not None
        return self._loaded

    def warmup(self, *, grid: tuple[int, ...]) -> Any:
        """Queue the compilation; returns a ``triton.FutureKernel``, or None: it is ready."""
        if self._loaded is not None:
            return None
        return active_mode().submit(self.source.key, self.source, self._finish)

    def _finish(self, kernel: LoadedKernel) -> None:
        kernel._init_handles()
        self._loaded = kernel


@cache
def can_compile(device: torch.device) -> bool:
    """Whether kernels can be compiled for ``device``: NVRTC is among the packages that torch installs. For a GPU
    that is not here, the plan has decided that."""
    return device.type == "meta" or (device.type == "cuda" and find_nvrtc(torch.version.cuda) is not None)


@cache
def _function(kernel: CudaKernel, device: torch.device) -> _CudaFunction:
    nvrtc = find_nvrtc(torch.version.cuda)
    if nvrtc is None and device.type != "meta":
        raise RuntimeError(f"{kernel.function} needs NVRTC, which is not installed; see can_compile()")
    major, minor = gpu_limits(device).capability
    return _CudaFunction(CudaSource(kernel, f"sm_{major}{minor}{'a' if major >= 9 else ''}", nvrtc, device))


def load(kernel: CudaKernel, device: torch.device) -> LoadedKernel:
    """A kernel that can be launched. In a dry pass, its compilation is queued; elsewhere, one that no dry pass has
    queued is compiled now. Raises RuntimeError if it cannot be loaded, and `CudaCompileError`."""
    loaded: LoadedKernel | None = launcher(_function(kernel, device), (1,))()
    return loaded or _DRY

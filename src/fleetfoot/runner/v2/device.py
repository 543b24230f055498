"""Copies, events and graphs of a device, behind one interface: on a CPU, where every call is complete when it returns,
the runner has the same code, and tests count the calls."""

from __future__ import annotations

import ctypes
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import torch

from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.prepare.reference import apply_staged_writes_numpy
from fleetfoot.kernels.prepare.staging import Event
from fleetfoot.runner.graphs import Capture
from fleetfoot.utils.process import no_collections

logger = logging.getLogger(__name__)

Copies = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""Sources, and their targets of equal size; contiguous."""
_ALREADY_REGISTERED = 712
"""CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED."""
_PORTABLE = 1
"""CU_MEMHOSTREGISTER_PORTABLE: for all contexts."""
ApplyStagedWrites = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]


class Device(ABC):
    """Implements `fleetfoot.kernels.prepare.staging.StagingDevice`, and has copies to the host and graphs."""

    has_graphs = False

    def __init__(self, torch_device: torch.device, apply_staged_writes: ApplyStagedWrites) -> None:
        self.torch_device = torch_device
        self._apply_staged_writes = apply_staged_writes

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=self.torch_device.type == "cuda")

    def pin(self, words: np.ndarray) -> torch.Tensor:
        """The int32 words, page-locked where that makes copies asynchronous."""
        return torch.from_numpy(words)

    def copy_in(self, source: torch.Tensor, front: torch.Tensor, arena: torch.Tensor, num_writes: int) -> None:
        self._apply_staged_writes(source, front, arena, num_writes)

    @abstractmethod
    def copy_out(self, source: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Queue a copy to new host memory, concurrent with work that is queued later; the event is after the copy."""

    @abstractmethod
    def upload(self, copies: Copies, last_use: Event | None) -> Event:
        """Queue copies from pinned memory, concurrent with work that is queued already, except what is before the event
        ``last_use``; work that is queued later sees them. The event is after the copies."""

    @abstractmethod
    def record(self) -> Event:
        """An event after everything queued so far."""

    def capture(self, work: Callable[[], Any], warm_up: AbstractContextManager[object] | None) -> Capture:
        """Run ``work`` within ``warm_up``, so that the library's kernels are loaded, and then under capture;
        ``warm_up``: None: they are loaded."""
        raise NotImplementedError


class _PassedEvent:
    """An event on a device without a queue."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


_PASSED = _PassedEvent()


class CpuDevice(Device):
    """The host; or that of a GPU that need not be here (`absent_gpu`), all of whose steps are dry passes."""

    def __init__(
        self, apply_staged_writes: ApplyStagedWrites = apply_staged_writes_numpy, torch_device: str = "cpu"
    ) -> None:
        super().__init__(torch.device(torch_device), apply_staged_writes)
        self.has_graphs = torch_device == "meta"

    def copy_out(self, source: torch.Tensor) -> tuple[torch.Tensor, Event]:
        return source, _PASSED

    def upload(self, copies: Copies, last_use: Event | None) -> Event:
        for source, target in copies:
            target.copy_(source)
        return _PASSED

    def record(self) -> Event:
        return _PASSED


class _CudaCapture:
    """A CUDA graph. All graphs of a device share one memory pool, because they never run concurrently."""

    def __init__(self, work: Callable[[], Any], pool: Any, stream: torch.cuda.Stream) -> None:
        # not the whole device: a send to a pipeline rank that is capturing may still be queued
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        # not `torch.cuda.graph`, which collects garbage and empties caches first: a start captures a hundred
        with no_collections(), torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.output = work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.replay = graph.replay


class CudaDevice(Device):
    """A GPU: work is queued on the current stream, and outputs are copied on another stream."""

    has_graphs = True

    def __init__(self, torch_device: torch.device, apply_staged_writes: ApplyStagedWrites) -> None:
        super().__init__(torch_device, apply_staged_writes)
        self._out, self._in = torch.cuda.Stream(torch_device), torch.cuda.Stream(torch_device)
        self._pool = torch.cuda.graph_pool_handle()
        self._capturing = torch.cuda.Stream(torch_device)
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._copy = self._driver.cuMemcpyAsync
        self._copy.argtypes = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p

    def pin(self, words: np.ndarray) -> torch.Tensor:
        address = words.ctypes.data
        # of the driver: an error of the runtime's function would be raised again by torch's next call
        status = self._driver.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(words.nbytes), _PORTABLE)
        if status == 0:
            weakref.finalize(words, self._driver.cuMemHostUnregister, ctypes.c_void_p(address))
        elif status != _ALREADY_REGISTERED:  # by an earlier runner
            logger.warning("%d bytes cannot be page-locked (CUDA error %d): copies wait", words.nbytes, status)
        return torch.from_numpy(words)

    def copy_out(self, source: torch.Tensor) -> tuple[torch.Tensor, Event]:
        self._out.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._out):
            host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            host.copy_(source, non_blocking=True)
            source.record_stream(self._out)  # keep its memory until the copy has read it
        return host, self._out.record_event()

    def upload(self, copies: Copies, last_use: Event | None) -> Event:
        if last_use is not None:
            self._in.wait_event(cast("torch.cuda.Event", last_use))
        stream = self._in.cuda_stream
        for source, target in copies:
            # not `copy_` within `torch.cuda.stream`, which takes the host three times as long
            if status := self._copy(target.data_ptr(), source.data_ptr(), source.nbytes, stream):
                raise RuntimeError(f"a copy of {source.nbytes} bytes to the device failed with CUDA error {status}")
        event = self._in.record_event()
        torch.cuda.current_stream(self.torch_device).wait_event(event)
        return event

    def record(self) -> Event:
        return torch.cuda.current_stream(self.torch_device).record_event()

    def capture(self, work: Callable[[], Any], warm_up: AbstractContextManager[object] | None) -> Capture:
        if warm_up is not None:
            with warm_up:
                work()
        return _CudaCapture(work, self._pool, self._capturing)


def open_device(device: torch.device, kernels: Kernels) -> Device:
    """The `Device` of a torch device."""
    if device.type == "cuda":
        return CudaDevice(device, kernels.apply_staged_writes)
    return CpuDevice(kernels.apply_staged_writes, device.type)

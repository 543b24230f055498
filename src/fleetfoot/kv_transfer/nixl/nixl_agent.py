"""The transfer agent over NIXL (extra ``nixl``), with its UCX backend: RDMA, NVLink, shared memory, TCP."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetfoot.kv_transfer.nixl.transfer_agent import Transfer, TransferAgent, TransferError

if TYPE_CHECKING:
    import torch

MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
"""Modules of NIXL's Python interface: its wheels are named after the CUDA version that they were built for."""
_UCX = "UCX"
_POLL_SECONDS = 5e-5


def nixl_api() -> Any:
    """NIXL's Python interface.

    Raises:
        ValueError: it is not installed, or cannot be loaded.
    """
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it logs every agent to standard output
    errors = []
    for name in MODULES:
        try:
            return import_module(name)
        except ImportError as error:
            errors.append(f"{name}: {error}")
    raise ValueError(
        "NixlConnector with backend 'nixl' needs NIXL, and it cannot be imported; install Fleetfoot with the extra "
        f"'nixl' (pip install 'fleetfoot[nixl]'), or set backend to 'tcp' ({'; '.join(errors)})"
    )


class NixlAgent(TransferAgent):
    """Implements `TransferAgent`. UCX chooses the transport; its environment variables (``UCX_TLS``) configure it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        api = nixl_api()
        logging.getLogger("nixl").setLevel(logging.WARNING)  # the import resets it
        config = api.nixl_agent_config(backends=[_UCX], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        self._agent = api.nixl_agent(name, config)
        if _UCX not in self._agent.backends:
            raise ValueError("this NIXL has no UCX backend; install the published wheel")
        self._lock = threading.Lock()
        self._peers: set[str] = set()
        self._tensors: list[torch.Tensor] = []
        self._registered: list[Any] = []
        self._memory = "DRAM"
        self._device = 0
        self._metadata = b""

    def local_device(self, device: torch.device) -> torch.device:
        return device

    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        device = tensors[0].device
        self._memory, self._device = ("DRAM", 0) if device.type == "cpu" else ("VRAM", device.index or 0)
        regions = [(tensor.data_ptr(), tensor.nbytes, self._device, "") for tensor in tensors]
        self._registered.append(self._agent.register_memory(regions, self._memory, backends=[_UCX]))
        self._tensors += tensors
        self._metadata = self._agent.get_agent_metadata()

    @property
    def metadata(self) -> bytes:
        return self._metadata

    def connect(self, metadata: bytes) -> str:
        with self._lock:  # UCX breaks if two threads add the same peer at once
            try:
                peer = self._agent.add_remote_agent(metadata)
            except Exception as error:  # NIXL's exceptions have no common base
                raise TransferError(f"NIXL cannot reach the peer ({_text(error)})") from error
            name = peer.decode() if isinstance(peer, bytes) else str(peer)
            self._peers.add(name)
            return name

    def disconnect(self, peer: str) -> None:
        with self._lock:
            if peer in self._peers:
                self._peers.discard(peer)
                with contextlib.suppress(Exception):  # NIXL drops peers that it has found to be gone
                    self._agent.remove_remote_agent(peer)

    def read(self, peer: str, remote: np.ndarray, local: np.ndarray, remote_device: int) -> Transfer:
        try:
            here = self._agent.get_xfer_descs(_descriptors(local, self._device), self._memory)
            there = self._agent.get_xfer_descs(_descriptors(remote, remote_device), self._memory)
            handle = self._agent.initialize_xfer("READ", here, there, peer, backends=[_UCX])
        except Exception as error:
            raise TransferError(f"NIXL cannot read from {peer} ({_text(error)})") from error
        return _NixlTransfer(self._agent, peer, handle)

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        for region in self._registered:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(region)
        self._registered.clear()
        self._tensors.clear()


class _NixlTransfer(Transfer):
    def __init__(self, agent: Any, peer: str, handle: Any) -> None:
        self._agent, self._peer, self._handle = agent, peer, handle
        self._state = ""

    def poll(self) -> bool:
        if self._state not in ("DONE", "ERR"):
            try:
                if self._state:
                    self._state = self._agent.check_xfer_state(self._handle)
                else:
                    self._state = self._agent.transfer(self._handle)
            except Exception as error:
                self._state = "ERR"
                raise TransferError(f"NIXL's read from {self._peer} failed ({_text(error)})") from error
        if self._state == "ERR":
            raise TransferError(f"NIXL's read from {self._peer} failed")
        return self._state == "DONE"

    def wait(self, seconds: float) -> None:
        time.sleep(min(seconds, _POLL_SECONDS))

    def release(self) -> bool:
        """UCX cannot cancel a read: it continues until it has ended or its endpoint is closed."""
        if self._state == "PROC":
            with contextlib.suppress(TransferError):
                self.poll()
        if self._state == "PROC":
            return False
        if self._handle is not None:
            try:
                self._agent.release_xfer_handle(self._handle)
            except Exception:
                return False  # part of it has not ended
            self._handle = None
        return True


def _descriptors(regions: np.ndarray, device: int) -> np.ndarray:
    """``[n, 3]`` uint64: address, length, device."""
    columns = np.empty((len(regions), 3), dtype=np.uint64)
    columns[:, :2] = regions
    columns[:, 2] = device
    return columns


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

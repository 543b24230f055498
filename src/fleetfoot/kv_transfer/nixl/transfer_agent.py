"""Transfer agents: one-sided reads of a peer's registered memory.

`nixl_agent` uses RDMA, NVLink, shared memory or TCP, through NIXL and UCX; `tcp_agent` uses plain sockets, for machines
without NIXL. Which memory may be read, and whether a read is valid, is agreed over the side channel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


class TransferError(RuntimeError):
    """A read has failed: the peer is gone, refuses, or sent invalid data; the message says which."""


class Transfer(ABC):
    """A read under way."""

    @abstractmethod
    def poll(self) -> bool:
        """Whether all bytes have arrived; does not wait.

        Raises:
            TransferError: the read has failed.
        """

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Return when the result of `poll` may have changed, or after ``seconds``."""

    @abstractmethod
    def release(self) -> bool:
        """Release the transfer, whether or not it has ended.

        Returns:
            Whether the local memory is not written any more. If False, call again, and keep the memory until then.
        """


class TransferAgent(ABC):
    """One end of transfers. After `register`, methods may be called by any thread.

    Args:
        name: unique among all agents.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def local_device(self, device: torch.device) -> torch.device:
        """The device of the receive memory for KV on ``device``."""

    @abstractmethod
    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        """Register contiguous tensors that peers may read, or that reads may write; they are kept alive."""

    @property
    @abstractmethod
    def metadata(self) -> bytes:
        """The argument of a peer's `connect`; valid after the last `register`."""

    @abstractmethod
    def connect(self, metadata: bytes) -> str:
        """Connect to a peer and return its name; idempotent.

        Raises:
            TransferError: the peer cannot be reached.
        """

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Disconnect a peer; reads from it that are under way fail. Unknown peers are ignored."""

    @abstractmethod
    def read(self, peer: str, remote: np.ndarray, local: np.ndarray, remote_device: int) -> Transfer:
        """Start reading regions of a peer's memory.

        Args:
            remote: ``[n, 2]`` int64, address and length of each region, within memory that the peer has registered.
            local: ``[n, 2]`` int64, of the same lengths, within memory that was registered here.
            remote_device: index of the remote GPU; 0 for host memory.

        Raises:
            TransferError: the read cannot start.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop reading and serving."""

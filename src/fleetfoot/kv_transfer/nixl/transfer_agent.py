"""What moves bytes between engines: one-sided reads of a peer's registered memory.

There are two agents: `nixl_agent` (RDMA, NVLink, shared memory or TCP, through NIXL and UCX) and `tcp_agent` (plain
sockets, for machines without NIXL). Which memory may be read, and whether a read still counts, is agreed over the side
channel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


class TransferError(RuntimeError):
    """Bytes did not come: the peer is gone, refuses, or sent something else. The message says which."""


class Transfer(ABC):
    """A read under way."""

    @abstractmethod
    def poll(self) -> bool:
        """Whether everything has arrived; does not wait.

        Raises:
            TransferError: it will not.
        """

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Return when `poll` may say something new, or after so long."""

    @abstractmethod
    def release(self) -> bool:
        """Let go of it, whether it has ended or not.

        Returns:
            Whether nothing writes to the local memory any more. If not, ask again later: the memory must stay as it is.
        """


class TransferAgent(ABC):
    """One end. Methods may be called by any thread once `register` has been.

    Args:
        name: unlike that of any other agent.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def local_device(self, device: torch.device) -> torch.device:
        """Where the memory must lie that reads of KV on ``device`` arrive in."""

    @abstractmethod
    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        """Memory that peers may read, or that reads may arrive in; contiguous tensors, kept alive from now on."""

    @property
    @abstractmethod
    def metadata(self) -> bytes:
        """What a peer's `connect` needs; made after the last `register`."""

    @abstractmethod
    def connect(self, metadata: bytes) -> str:
        """Make a peer known; returns its name. Again with the same metadata: does nothing.

        Raises:
            TransferError: it cannot be reached.
        """

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Forget a peer; reads from it that are under way fail. Unknown ones are no error."""

    @abstractmethod
    def read(self, peer: str, remote: np.ndarray, local: np.ndarray, remote_device: int) -> Transfer:
        """Begin to read pieces of a peer's memory.

        Args:
            remote: ``[n, 2]`` int64, address and length of each, within what the peer has registered.
            local: ``[n, 2]`` int64, of the same lengths, within what was registered here.
            remote_device: number of the GPU that the remote memory is on; 0 for host memory.

        Raises:
            TransferError: it cannot begin.
        """

    @abstractmethod
    def close(self) -> None:
        """Nothing is read or served any more."""

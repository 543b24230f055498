"""Transfer agents: one-sided reads of a peer's registered memory, and the agent over plain TCP sockets.

Which memory may be read, and whether a read is valid, is agreed over the side channel. `nixl_agent` uses RDMA, NVLink,
shared memory or TCP, through NIXL and UCX. `TcpAgent` is for machines without NIXL, and for tests: a read is a request
with addresses and lengths; a checksum follows the reply's bytes. Bytes pass through host memory and the interpreter,
so it suits small models and slow networks. Any host that can reach its port can read the KV cache, so use it in a
trusted network only.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from fleetfoot.kv_transfer.base.sockets import ConnectionLostError, SocketServer, connect, receive_message, send_message

CONNECT_SECONDS = 5.0
MAX_REGIONS = 1 << 20
_HEADER = struct.Struct("<BQ")  # whether the request is valid, number of bytes that follow
_TRAILER = struct.Struct("<I")  # CRC-32 of the bytes
_POLL_BYTES = 8 << 20
"""At most this much is received per poll."""


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


# --- TCP ------------------------------------------------------------------------------------------------------------


class _Metadata(msgspec.Struct):
    name: str
    address: str


class TcpAgent(TransferAgent):
    """Implements `TransferAgent`.

    Args:
        host: the address of this machine for peers.
    """

    def __init__(self, name: str, host: str) -> None:
        super().__init__(name)
        self._memory = _Memory()
        self._server = SocketServer(host, 0, self._serve, "kv-tcp-agent")
        self._lock = threading.Lock()
        self._peers: dict[str, str] = {}  # name -> address
        self._idle: dict[str, list[socket.socket]] = {}

    def local_device(self, device: torch.device) -> torch.device:
        return torch.device("cpu")

    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._memory.add(tensor)

    @property
    def metadata(self) -> bytes:
        return msgspec.msgpack.encode(_Metadata(self.name, self._server.address))

    def connect(self, metadata: bytes) -> str:
        try:
            peer = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.DecodeError as error:
            raise TransferError(f"the peer's metadata is not a TCP agent's ({error})") from error
        with self._lock:
            self._peers[peer.name] = peer.address
        return peer.name

    def disconnect(self, peer: str) -> None:
        with self._lock:
            self._peers.pop(peer, None)
            connections = self._idle.pop(peer, [])
        for connection in connections:
            connection.close()

    def read(self, peer: str, remote: np.ndarray, local: np.ndarray, remote_device: int) -> Transfer:
        if not np.array_equal(remote[:, 1], local[:, 1]):
            raise TransferError("the remote and local regions have different lengths")
        with self._lock:
            address = self._peers.get(peer)
            idle = self._idle.get(peer)
            connection = idle.pop() if idle else None
        if address is None:
            raise TransferError(f"{peer} is not connected any more")
        try:
            connection = connection or connect(address, CONNECT_SECONDS)
            connection.settimeout(CONNECT_SECONDS)  # an idle connection is non-blocking
            send_message(connection, remote.astype("<i8").tobytes())
        except ConnectionLostError as error:
            raise TransferError(f"{peer} cannot be read from: {error}") from error
        return _TcpTransfer(self, peer, connection, [self._memory.view(*region) for region in local.tolist()])

    def close(self) -> None:
        self._server.close()
        for peer in list(self._peers):
            self.disconnect(peer)

    def reuse(self, peer: str, connection: socket.socket) -> None:
        """Keep a connection whose reply has been read completely."""
        with self._lock:
            if peer in self._peers:
                self._idle.setdefault(peer, []).append(connection)
                return
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        while True:
            request = receive_message(connection)
            if len(request) % 16 or len(request) > 16 * MAX_REGIONS:
                return
            regions = np.frombuffer(request, dtype="<i8").reshape(-1, 2)
            try:
                content = self._memory.read(regions)
            except ValueError as error:
                content, is_valid = str(error).encode(), False
            else:
                is_valid = True
            connection.sendall(_HEADER.pack(is_valid, len(content)))
            connection.sendall(content)
            connection.sendall(_TRAILER.pack(zlib.crc32(content)))


class _Memory:
    """Registered tensors, by address."""

    def __init__(self) -> None:
        self._tensors: list[tuple[int, int, torch.Tensor]] = []  # begin, end, uint8 [bytes]

    def add(self, tensor: torch.Tensor) -> None:
        begin = tensor.data_ptr()
        self._tensors.append((begin, begin + tensor.nbytes, tensor.view(-1).view(torch.uint8)))

    def find(self, address: int, length: int) -> torch.Tensor:
        """uint8 ``[length]``.

        Raises:
            ValueError: it is not within a registered tensor.
        """
        for begin, end, tensor in self._tensors:
            if begin <= address and 0 < length <= end - address:
                return tensor[address - begin : address - begin + length]
        raise ValueError(f"{length} bytes at {address:#x} are not within registered memory")

    def view(self, address: int, length: int) -> memoryview:
        """A writable view of host memory."""
        return self.find(address, length).numpy().data

    def read(self, regions: np.ndarray) -> bytes:
        """The regions (``[n, 2]``, address and length), concatenated."""
        found = [self.find(address, length) for address, length in regions.tolist()]
        if found and found[0].device.type != "cpu":
            # held blocks are final, so the copy has its own stream and does not wait for queued steps
            stream = torch.cuda.Stream(found[0].device)
            with torch.cuda.stream(stream):
                return torch.cat(found).cpu().numpy().tobytes()
        return b"".join(tensor.numpy().tobytes() for tensor in found)


class _TcpTransfer(Transfer):
    """Receives the reply directly into local memory."""

    def __init__(self, agent: TcpAgent, peer: str, connection: socket.socket, targets: list[memoryview]) -> None:
        self._agent, self._peer, self._connection = agent, peer, connection
        self._expected = sum(len(target) for target in targets)
        self._header = bytearray(_HEADER.size)
        self._trailer = bytearray(_TRAILER.size)
        self._targets = [memoryview(self._header), *targets, memoryview(self._trailer)]
        self._index = self._offset = 0
        self._checksum = 0
        self._has_ended = self._is_released = False
        connection.setblocking(False)

    def poll(self) -> bool:
        received = 0
        while not self._has_ended and received < _POLL_BYTES:
            target = self._targets[self._index][self._offset :]
            try:
                count = self._connection.recv_into(target)
            except BlockingIOError:
                break
            except OSError as error:
                raise TransferError(f"the connection to {self._peer} is lost ({error})") from error
            if count == 0:
                raise TransferError(f"{self._peer} closed the connection {self._progress()}")
            received += count
            self._process(target[:count])
        return self._has_ended

    def _process(self, arrived: memoryview) -> None:
        is_payload = 0 < self._index < len(self._targets) - 1
        if is_payload:
            self._checksum = zlib.crc32(arrived, self._checksum)
        self._offset += len(arrived)
        if self._offset < len(self._targets[self._index]):
            return
        self._index, self._offset = self._index + 1, 0
        if self._index == 1:
            self._check_header()
        elif self._index == len(self._targets):
            self._check_trailer()

    def _check_header(self) -> None:
        is_valid, length = _HEADER.unpack(self._header)
        if not is_valid:
            raise TransferError(f"{self._peer} has not registered the memory that was to be read")
        if length != self._expected:
            raise TransferError(f"{self._peer} sends {length:,} bytes instead of {self._expected:,}")

    def _check_trailer(self) -> None:
        (checksum,) = _TRAILER.unpack(self._trailer)
        if checksum != self._checksum:
            raise TransferError(
                f"data from {self._peer} is corrupt: its CRC-32 is {self._checksum:08x}, and {checksum:08x} was sent"
            )
        self._has_ended = True

    def _progress(self) -> str:
        before = sum(len(target) for target in self._targets[1 : self._index]) + (self._offset if self._index else 0)
        return f"after {min(before, self._expected):,} of {self._expected:,} bytes"

    def wait(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.poll(seconds * 1000)

    def release(self) -> bool:
        if not self._is_released:
            self._is_released = True
            if self._has_ended:
                self._agent.reuse(self._peer, self._connection)
            else:
                self._connection.close()
        return True

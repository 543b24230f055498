"""Transfer agents: one-sided reads of a peer's registered memory, over NIXL or plain TCP sockets.

Which memory may be read, and whether a read is valid, is agreed over the side channel.
"""

from __future__ import annotations

import contextlib
import logging
import select
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import msgspec
import numpy as np
import torch

from fleetfoot.config import env
from fleetfoot.utils.cluster_key import SIGNATURE_BYTES, ClusterKey
from fleetfoot.utils.network import interface_of, rdma_ports
from fleetfoot.utils.sockets import Channel, ConnectionLostError, SocketServer, UntrustedError, connect

logger = logging.getLogger(__name__)

NIXL_MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
"""Modules of NIXL's Python interface: its wheels are named after the CUDA version that they were built for."""
_UCX = "UCX"
_NIXL_POLL_SECONDS = 5e-5

CONNECT_SECONDS = 5.0
MAX_REGIONS = 1 << 20
_HEADER = struct.Struct("<BQ")  # whether the request is valid, number of bytes that follow
_TCP_AGENT = "kv-tcp-agent"
_POLL_BYTES = 8 << 20
"""At most this much is received per poll."""


class TransferError(RuntimeError):
    """A read has failed: the peer is gone, refuses, or sent invalid data; the message names it."""


class Transfer(ABC):
    """A read under way."""

    @abstractmethod
    def poll(self) -> bool:
        """Whether all bytes have arrived; does not wait. Raises TransferError if the read has failed."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Return when the result of `poll` may have changed, or after ``seconds``."""

    @abstractmethod
    def release(self) -> bool:
        """Release the transfer, whether or not it has ended. Returns whether the local memory is not written any more;
        if False, call again, and keep the memory until then."""


class TransferAgent(ABC):
    """One end of transfers. After `register`, methods may be called by any thread."""

    metadata: bytes
    """The argument of a peer's `connect`; valid after the last `register`."""

    @abstractmethod
    def local_device(self, device: torch.device) -> torch.device:
        """The device of the receive memory for KV on ``device``."""

    @abstractmethod
    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        """Register contiguous tensors that peers may read, or that reads may write; they are kept alive."""

    @abstractmethod
    def connect(self, metadata: bytes) -> str:
        """Connect to a peer and return its name; idempotent. Raises TransferError if it cannot be reached."""

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Disconnect a peer; reads from it that are under way fail. Unknown peers are ignored."""

    @abstractmethod
    def read(self, peer: str, remote: np.ndarray, local: np.ndarray, remote_device: int) -> Transfer:
        """Start reading regions of a peer's memory. Raises TransferError if the read cannot start.

        Args:
            remote: ``[n, 2]`` int64, address and length of each region, within memory that the peer has registered.
            local: ``[n, 2]`` int64, of the same lengths, within memory that was registered here.
            remote_device: index of the remote GPU; 0 for host memory.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop reading and serving."""


# --- TCP ------------------------------------------------------------------------------------------------------------


class _Metadata(msgspec.Struct):
    name: str
    address: str


class TcpAgent(TransferAgent):
    """Reads over TCP, without NIXL: a request with addresses and lengths; a signature follows the reply's bytes.

    Bytes pass through host memory and the interpreter, so it suits small models and slow networks. Peers prove the
    cluster key; what they read is not encrypted.

    Args:
        name: unique among all agents.
        host: the address of this machine for peers.
        key: of the deployment.
    """

    def __init__(self, name: str, host: str, key: ClusterKey) -> None:
        self._lock = threading.Lock()
        self._memory: list[tuple[int, int, torch.Tensor]] = []  # begin, end, uint8 [bytes]
        self._peers: dict[str, str] = {}  # name -> address
        self._idle: dict[str, list[Channel]] = {}  # name -> connections without a read under way
        self._key = key
        self._server = SocketServer(host, 0, self._serve, _TCP_AGENT, key)
        self.metadata = msgspec.msgpack.encode(_Metadata(name, self._server.address))

    def local_device(self, device: torch.device) -> torch.device:
        return torch.device("cpu")

    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            begin = tensor.data_ptr()
            self._memory.append((begin, begin + tensor.nbytes, tensor.view(-1).view(torch.uint8)))

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
            channel = idle.pop() if idle else None
        if address is None:
            raise TransferError(f"{peer} is not connected any more")
        try:
            channel = channel or connect(address, CONNECT_SECONDS, self._key, _TCP_AGENT)
            channel.connection.settimeout(CONNECT_SECONDS)  # an idle connection is non-blocking
            channel.send(remote.astype("<i8").tobytes())
        except ConnectionLostError as error:
            raise TransferError(f"{peer} cannot be read from: {error}") from error
        return _TcpTransfer(self, peer, channel, [tensor.numpy().data for tensor in self._find(local)])

    def close(self) -> None:
        self._server.close()
        for peer in list(self._peers):
            self.disconnect(peer)

    def reuse(self, peer: str, channel: Channel) -> None:
        """Keep a connection after its reply has been read completely."""
        with self._lock:
            if peer in self._peers:
                self._idle.setdefault(peer, []).append(channel)
                return
        channel.close()

    def _serve(self, channel: Channel) -> None:
        while True:
            request = channel.receive()
            if len(request) % 16 or len(request) > 16 * MAX_REGIONS:
                return
            try:
                found = self._find(np.frombuffer(request, dtype="<i8").reshape(-1, 2))
            except ValueError:
                channel.connection.sendall(_HEADER.pack(False, 0))
                return
            content = _join(found)
            header = _HEADER.pack(True, len(content))
            for part in (header, content, channel.sign(header, content)):
                channel.connection.sendall(part)

    def _find(self, regions: np.ndarray) -> list[torch.Tensor]:
        """uint8 ``[length]`` of each of ``regions [n, 2]``, address and length; raises ValueError if one is not
        registered."""
        found = []
        for address, length in regions.tolist():
            for begin, end, tensor in self._memory:
                if begin <= address and 0 < length <= end - address:
                    found.append(tensor[address - begin : address - begin + length])
                    break
            else:
                raise ValueError(f"{length} bytes at {address:#x} are not within registered memory")
        return found


def _join(parts: Sequence[torch.Tensor]) -> bytes:
    if parts and parts[0].device.type != "cpu":
        # held blocks are final, so the copy has its own stream and does not wait for queued steps
        with torch.cuda.stream(torch.cuda.Stream(parts[0].device)):
            return torch.cat(list(parts)).cpu().numpy().tobytes()
    return b"".join(part.numpy().tobytes() for part in parts)


class _TcpTransfer(Transfer):
    """Receives the reply directly into local memory."""

    def __init__(self, agent: TcpAgent, peer: str, channel: Channel, targets: list[memoryview]) -> None:
        self._agent, self._peer, self._channel = agent, peer, channel
        self._connection = channel.connection
        self._header, self._signature = bytearray(_HEADER.size), bytearray(SIGNATURE_BYTES)
        self._targets = targets
        self._expected = sum(map(len, targets))
        self._pending = deque([memoryview(self._header), *targets, memoryview(self._signature)])
        self._num_received = 0
        self._has_ended = self._is_released = False
        self._connection.setblocking(False)

    def poll(self) -> bool:
        most = self._num_received + _POLL_BYTES
        while self._pending and self._num_received < most:
            try:
                count = self._connection.recv_into(self._pending[0])
            except BlockingIOError:
                return False
            except OSError as error:
                raise TransferError(f"the connection to {self._peer} is lost ({error})") from error
            if count == 0:
                arrived = min(max(0, self._num_received - _HEADER.size), self._expected)
                raise TransferError(f"{self._peer} closed the connection after {arrived:,} of {self._expected:,} bytes")
            self._num_received += count
            self._pending[0] = self._pending[0][count:]
            if not self._pending[0]:
                self._pending.popleft()
            if self._num_received == _HEADER.size:
                self._check_header()
            elif not self._pending:
                self._check_signature()
                self._has_ended = True
        return self._has_ended

    def _check_header(self) -> None:
        is_valid, length = _HEADER.unpack(self._header)
        if not is_valid:
            raise TransferError(f"{self._peer} has not registered the memory that was to be read")
        if length != self._expected:
            raise TransferError(f"{self._peer} sends {length:,} bytes instead of {self._expected:,}")

    def _check_signature(self) -> None:
        try:
            self._channel.check(self._signature, self._header, *self._targets)
        except UntrustedError as error:
            raise TransferError(f"data from {self._peer} is corrupt: its signature is wrong") from error

    def wait(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.poll(seconds * 1000)

    def release(self) -> bool:
        if not self._is_released:
            self._is_released = True
            if self._has_ended:
                self._agent.reuse(self._peer, self._channel)
            else:
                self._channel.close()
        return True


# --- NIXL -----------------------------------------------------------------------------------------------------------


def nixl_api() -> Any:
    """NIXL's Python interface; raises ValueError if it is not installed, or cannot be loaded."""
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it logs every agent to standard output
    errors = []
    for name in NIXL_MODULES:
        try:
            return import_module(name)
        except ImportError as error:
            errors.append(f"{name}: {error}")
    raise ValueError(
        "NixlConnector with backend 'nixl' needs NIXL, and it cannot be imported; install Fleetfoot with the extra "
        f"'nixl' (pip install 'fleetfoot[nixl]'), or set backend to 'tcp' ({'; '.join(errors)})"
    )


class NixlAgent(TransferAgent):
    """Over NIXL (extra ``nixl``), with its UCX backend. UCX chooses RDMA, NVLink, shared memory or TCP; its environment
    variables (``UCX_TLS``) configure it. Without ``UCX_NET_DEVICES`` it uses, and listens on, the network interface of
    ``host`` and the RDMA devices, and no other interface."""

    def __init__(self, name: str, host: str) -> None:
        api = nixl_api()
        logging.getLogger("nixl").setLevel(logging.WARNING)  # the import resets it
        config = api.nixl_agent_config(backends=[_UCX], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        interface = interface_of(host)
        if interface is None:
            logger.warning("no network interface has the address %s: UCX listens on all, without UCX_NET_DEVICES", host)
        with env.defaults({} if interface is None else {"UCX_NET_DEVICES": ",".join((interface, *rdma_ports()))}):
            self._agent = api.nixl_agent(name, config)
        if _UCX not in self._agent.backends:
            raise ValueError("this NIXL has no UCX backend; install the published wheel")
        self._lock = threading.Lock()
        self._peers: set[str] = set()
        self._tensors: list[torch.Tensor] = []
        self._registered: list[Any] = []
        self._memory = "DRAM"
        self._device = 0

    def local_device(self, device: torch.device) -> torch.device:
        return device

    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        device = tensors[0].device
        self._memory, self._device = ("DRAM", 0) if device.type == "cpu" else ("VRAM", device.index or 0)
        regions = [(tensor.data_ptr(), tensor.nbytes, self._device, "") for tensor in tensors]
        self._registered.append(self._agent.register_memory(regions, self._memory, backends=[_UCX]))
        self._tensors += tensors
        self.metadata = self._agent.get_agent_metadata()

    def connect(self, metadata: bytes) -> str:
        with self._lock:  # UCX breaks if two threads add the same peer at once
            try:
                peer = self._agent.add_remote_agent(metadata)
            except Exception as error:  # NIXL's exceptions have no common base
                raise TransferError(f"NIXL cannot reach the peer ({error!r})") from error
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
            raise TransferError(f"NIXL cannot read from {peer} ({error!r})") from error
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
                raise TransferError(f"NIXL's read from {self._peer} failed ({error!r})") from error
        if self._state == "ERR":
            raise TransferError(f"NIXL's read from {self._peer} failed")
        return self._state == "DONE"

    def wait(self, seconds: float) -> None:
        time.sleep(min(seconds, _NIXL_POLL_SECONDS))

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
    return np.insert(regions.astype(np.uint64), 2, device, axis=1)


def make_agent(backend: str, name: str, host: str, key: ClusterKey) -> TransferAgent:
    """The transfer agent of a backend; raises ValueError if that is not installed."""
    return NixlAgent(name, host) if backend == "nixl" else TcpAgent(name, host, key)

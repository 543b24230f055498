"""Responses that later requests refer to, in memory: of one API server, or in the process that supervises several."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from itertools import count
from typing import Any

import msgspec
import zmq
import zmq.asyncio


class MemoryStore:
    """Records by id. Those that were used least recently are dropped.

    Args:
        max_entries, max_bytes: of all records. A larger record is not kept.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._records: OrderedDict[str, bytes] = OrderedDict()
        self._watches: dict[str, asyncio.Event] = {}

    async def put(self, name: str, content: bytes) -> None:
        """Add or replace a record."""
        self._remove(name)
        if len(content) > self._max_bytes:
            return
        self._records[name] = content
        self._num_bytes += len(content)
        while len(self._records) > self._max_entries or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._records.popitem(last=False)[1])

    async def get(self, name: str) -> bytes | None:
        """A record; None: it is unknown, was deleted, or was dropped."""
        if name in self._records:
            self._records.move_to_end(name)
        return self._records.get(name)

    async def delete(self, name: str) -> bool:
        """Whether there was the record."""
        return self._remove(name)

    async def changed(self, name: str) -> None:
        """Wait until the record is replaced or deleted."""
        await self._watches.setdefault(name, asyncio.Event()).wait()

    def _remove(self, name: str) -> bool:
        if name in self._watches:
            self._watches.pop(name).set()
        content = self._records.pop(name, None)
        self._num_bytes -= len(content or b"")
        return content is not None


class StoreServer:
    """Shares a store with other processes.

    Args:
        address: of a new socket, ``ipc://...``.
    """

    def __init__(self, store: MemoryStore, address: str) -> None:
        self._store = store
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.bind(address)
        self._tasks: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._receive(), name="fleetfoot-store")

    async def _receive(self) -> None:
        while True:
            client, content = await self._socket.recv_multipart()
            task = asyncio.create_task(self._answer(client, content))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, client: bytes, content: bytes) -> None:
        number, method, arguments = msgspec.msgpack.decode(content)
        value = await getattr(self._store, method)(*arguments)
        self._socket.send_multipart((client, msgspec.msgpack.encode((number, value))))

    def close(self) -> None:
        for task in (self._task, *self._tasks):
            task.cancel()
        self._socket.close()
        self._context.term()


class StoreClient:
    """A store in another process, with the methods of `MemoryStore`.

    Args:
        address: of its socket.
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.connect(address)
        self._numbers = count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._task = asyncio.create_task(self._receive(), name="fleetfoot-store-client")

    async def put(self, name: str, content: bytes) -> None:
        await self._call("put", name, content)

    async def get(self, name: str) -> bytes | None:
        content: bytes | None = await self._call("get", name)
        return content

    async def delete(self, name: str) -> bool:
        return bool(await self._call("delete", name))

    async def changed(self, name: str) -> None:
        await self._call("changed", name)

    async def _call(self, *call: Any) -> Any:
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        self._socket.send(msgspec.msgpack.encode((number, call[0], call[1:])))
        try:
            return await future
        finally:
            del self._calls[number]

    async def _receive(self) -> None:
        while True:
            number, value = msgspec.msgpack.decode(await self._socket.recv())
            future = self._calls.get(number)
            if future is not None and not future.done():
                future.set_result(value)

    def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(zmq.ZMQError):
            self._socket.close()
        self._context.term()


ResponseStore = MemoryStore | StoreClient

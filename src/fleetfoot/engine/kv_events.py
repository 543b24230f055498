"""Publishes the events of the prefix cache over ZMQ, in vLLM's format of 0.24 and later, for routers.

A message has three frames: the topic, the number of the batch (8 bytes, big-endian), and MessagePack of
``[time, events, replica]``. Events are maps with a ``type``. Who has missed batches sends the number of the first one
to the address of replays, and gets all that are kept from there on, then number -1.

Hashes are 64 bits of a keyed hash. Blocks of requests with a ``cache_salt`` are not published: their tokens are
private.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby

import msgspec
import zmq

from fleetfoot.config.kv_events import KVEventsConfig
from fleetfoot.records.kv_events import KVEvents
from fleetfoot.records.kv_layout import KVGroup
from fleetfoot.records.request import Request
from fleetfoot.utils.validation import FieldError

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
"""The number that ends a replay."""
MEDIUM = "GPU"
"""The memory of the engine's own blocks, whatever the device is."""
_MAX_BYTES = 256
"""The largest frame that a peer may send: a topic, or a number."""


class BlockStored(msgspec.Struct, tag=True, kw_only=True):
    """Consecutive blocks of a prefix."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """The hash of the block before them; None: they begin the prefix."""
    token_ids: list[int]
    """Those of all these blocks; []: of a recurrent state, which has the hash of the block before it."""
    block_size: int
    lora_id: None = None
    medium: str = MEDIUM
    lora_name: None = None
    extra_keys: list[None]
    """None for each block: they depend on their tokens alone."""
    group_idx: int
    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks that were reused for other tokens."""

    block_hashes: list[int]
    group_idx: int
    medium: str = MEDIUM


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The engine has begun, or its weights have changed."""


class KVEventBatch(msgspec.Struct, array_like=True):
    """The events of a step."""

    ts: float
    """Seconds since the epoch."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


class KVEventPublisher(KVEvents):
    """Collects events, and sends those of a step as one batch.

    Args:
        config: with addresses that can be listened on.
        groups: of layers.
        block_size: tokens in a block.
        clock: seconds since the epoch.

    Raises FieldError: an address cannot be used.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        groups: Sequence[KVGroup],
        block_size: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._kinds = [_kind(group) for group in groups]
        self._windows = [group.window for group in groups]
        self._block_size, self._rank, self._clock = block_size, config.data_parallel_rank, clock
        self._key = hashlib.blake2b(config.hash_key.encode() or secrets.token_bytes(32), digest_size=32).digest()
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._number = 0
        self._socket = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.sndhwm = config.max_queue_size
        inner = f"inproc://kv-events-{id(self):x}"
        self._socket.bind(inner)
        try:
            self._sender = _Sender(config, inner)
        except FieldError:
            self._socket.close(linger=0)
            raise

    def stored(self, group: int, request: Request, blocks: Sequence[int]) -> None:
        if request.cache_salt is not None or not blocks:
            return
        size, tokens = self._block_size, request.token_ids
        for _, run in groupby(enumerate(blocks), key=lambda pair: pair[1] - pair[0]):
            numbers = [number for _, number in run]
            first, last = numbers[0], numbers[-1] + 1
            hashes = [self.hash(digest) for digest in request.block_hashes[max(0, first - 1) : last]]
            parent = hashes.pop(0) if first else None
            self._store(group, hashes, parent, tokens[first * size : last * size].tolist())

    def state_stored(self, digest: bytes, group: int) -> None:
        self._store(group, [self.hash(digest)], None, [])

    def _store(self, group: int, hashes: list[int], parent: int | None, token_ids: list[int]) -> None:
        stored = BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=token_ids,
            block_size=self._block_size,
            extra_keys=[None] * len(hashes),
            group_idx=group,
            kv_cache_spec_kind=self._kinds[group],
            kv_cache_spec_sliding_window=self._windows[group],
        )
        self._events.append(stored)

    def removed(self, group: int, digest: bytes) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group:
            last.block_hashes.append(self.hash(digest))
        else:
            self._events.append(BlockRemoved([self.hash(digest)], group))

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def hash(self, digest: bytes) -> int:
        """A block's hash as it is published."""
        return int.from_bytes(hashlib.blake2b(digest, key=self._key, digest_size=8).digest(), "big")

    def flush(self) -> None:
        if not self._events:
            return
        batch, self._events = KVEventBatch(self._clock(), self._events, self._rank), []
        number, self._number = self._number.to_bytes(8, "big"), self._number + 1
        try:
            self._socket.send_multipart((number, self._encoder.encode(batch)), zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("too many batches of KV events wait to be sent (max_queue_size); batch %d is lost", number)

    def close(self) -> None:
        """Send what is left, and end the thread."""
        if self._socket.closed:
            return
        self.flush()
        self._socket.send(b"")
        self._sender.join()
        self._socket.close(linger=0)


class _Sender:
    """The thread that sends batches, keeps the last ones, and answers requests of replays."""

    def __init__(self, config: KVEventsConfig, inner: str) -> None:
        context = zmq.Context.instance()
        self._topic = config.topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._incoming, self._events = context.socket(zmq.PULL), context.socket(zmq.PUB)
        self._replays = context.socket(zmq.ROUTER)
        self._incoming.rcvhwm = 0
        self._events.sndhwm = config.hwm
        self._events.maxmsgsize = self._replays.maxmsgsize = _MAX_BYTES
        try:
            self._incoming.connect(inner)
            use = self._events.bind if config.is_listening else self._events.connect
            _use(use, "endpoint", config.endpoint)
            if config.replay_endpoint is not None:
                _use(self._replays.bind, "replay_endpoint", config.replay_endpoint)
        except FieldError:
            self._close()
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._incoming, self._replays):
            poller.register(socket, zmq.POLLIN)
        while self._send_all():
            if self._replays in dict(poller.poll()):
                requested = self._replays.recv_multipart()
                if not self._send_all():  # a replay has all batches that were published before it was asked for
                    break
                self._replay(requested)
        self._close()

    def _send_all(self) -> bool:
        """Send the batches that wait. False: there will be no more."""
        with contextlib.suppress(zmq.Again):
            while len(frames := self._incoming.recv_multipart(zmq.NOBLOCK)) == 2:
                self._kept.append((frames[0], frames[1]))
                self._events.send_multipart((self._topic, *frames))
            return False
        return True

    def _replay(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        peer, _, first = frames
        for number, batch in self._kept:
            if number >= first:
                self._replays.send_multipart((peer, b"", number, batch))
        self._replays.send_multipart((peer, b"", END, b""))

    def _close(self) -> None:
        self._incoming.close(linger=0)
        for socket in (self._events, self._replays):
            socket.close(linger=1000)

    def join(self) -> None:
        self._thread.join()


def _use(function: Callable[[str], object], name: str, address: str) -> None:
    try:
        function(address)
    except zmq.ZMQError as error:
        raise FieldError(f"kv_events_config.{name}", f"is {address!r}: {error}", address) from None


def _kind(group: KVGroup) -> str:
    if group.is_state:
        return "mamba"
    return "full_attention" if group.window is None else "sliding_window"

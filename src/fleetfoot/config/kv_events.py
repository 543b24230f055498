"""``kv_events_config``: where an engine publishes which KV blocks it has, for routers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from fleetfoot.config.json_fields import Bounds, JSONSettings

PUBLISHERS = ("zmq", "null")
_COUNT: dict[str, Any] = {"bounds": Bounds("be an integer of at least 1", 1)}
_TCP = re.compile(r"(tcp://.*:)(\d+)")
_LOCAL = ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:", "tcp://127.", "tcp://localhost:", "tcp://[::1]:", "ipc://")


@dataclass(frozen=True, slots=True)
class KVEventsConfig(JSONSettings):
    """``--kv-events-config``; names as in vLLM."""

    setting: ClassVar[str] = "kv_events_config"

    enable_kv_cache_events: bool = False
    """Whether events are published."""
    publisher: str = field(default="zmq", metadata={"choices": PUBLISHERS})
    """``zmq``; ``null``: nothing is published."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """ZMQ's address of the events. All addresses (``tcp://*:5557``), those of loopback and ``ipc://`` are listened on;
    others are connected to, as a router's. A replica of data parallelism adds its number to the port."""
    replay_endpoint: str | None = None
    """The address that is listened on for requests of earlier events; None: they are not kept."""
    buffer_steps: int = field(default=10_000, metadata=_COUNT)
    """Batches of events that are kept for replays."""
    hwm: int = field(default=100_000, metadata=_COUNT)
    """Batches that wait for a subscriber, at most; further ones are lost to it."""
    max_queue_size: int = field(default=100_000, metadata=_COUNT)
    """Batches that wait to be sent, at most; further ones are lost, which their numbers show."""
    topic: str = ""
    """The first frame of each message, such as ``kv@POD@MODEL``."""
    hash_key: str = ""
    """Published hashes depend on this text: engines with the same one have equal hashes of equal prefixes. Empty: on a
    random key of each process."""
    data_parallel_rank: int = 0
    """The number of the replica."""

    def __post_init__(self) -> None:
        JSONSettings.__post_init__(self)
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if (match := _TCP.fullmatch(value or "")) is not None and int(match[2]) > 65535:
                raise ValueError(f"kv_events_config: {name} is {value!r}; its port can be at most 65535")
            if value is not None and match is None and not value.startswith("ipc://"):
                raise ValueError(f"kv_events_config: {name} is {value!r}; it must be tcp://HOST:PORT or ipc://PATH")

    @property
    def is_active(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def is_listening(self) -> bool:
        """Whether ``endpoint`` is an address of this machine."""
        return self.endpoint.startswith(_LOCAL)

    def moved(self, rank: int) -> KVEventsConfig:
        """The settings of a data-parallel rank, the ports of which are so many higher."""
        replays = None if self.replay_endpoint is None else _moved(self.replay_endpoint, rank)
        endpoint = _moved(self.endpoint, rank)
        return replace(
            self, data_parallel_rank=self.data_parallel_rank + rank, endpoint=endpoint, replay_endpoint=replays
        )


def _moved(endpoint: str, rank: int) -> str:
    match = _TCP.fullmatch(endpoint)
    if match is None:
        return f"{endpoint}_dp{rank}" if rank else endpoint
    return f"{match[1]}{int(match[2]) + rank}"

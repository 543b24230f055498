"""Events of the prefix cache, read by a router that was written from vLLM's schema alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tests.helpers.processes import HANG
from tests.helpers.schedulers import LIMITS, Drive, make_scheduler, request_of

from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.kv_events import KVEventsConfig
from fleetfoot.engine.kv_events import KVEventPublisher
from fleetfoot.records.kv_layout import ONE_GROUP, KVGroup
from fleetfoot.utils.validation import FieldError

WINDOWED = (KVGroup(blocks_per_slab=2), KVGroup(window=8, blocks_per_slab=2))
BLOCK = LIMITS["block_size"]


class Router:
    """Subscribes to an engine, and knows which prefixes it has."""

    def __init__(self, config: KVEventsConfig) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(config.endpoint)
        self.socket.subscribe(config.topic)
        self.socket.rcvtimeo = int(1000 * HANG)
        self.replays = zmq.Context.instance().socket(zmq.DEALER)
        self.replays.connect(config.replay_endpoint)
        self.replays.rcvtimeo = self.socket.rcvtimeo
        self.topic = config.topic.encode()
        self.events: list[dict[str, Any]] = []
        self.next = 0
        self.chains: dict[int, tuple[int, ...]] = {}  # all tokens up to the end of a block, by hash; of the first group
        self.others: set[tuple[int, int]] = set()  # hashes of other groups

    def close(self) -> None:
        self.socket.close(linger=0)
        self.replays.close(linger=0)

    def replay(self) -> None:
        """Get the batches from the next one on."""
        self.replays.send_multipart((b"", self.next.to_bytes(8, "big")))
        while True:
            _, number, content = self.replays.recv_multipart()
            if number == b"\xff" * 8:
                assert content == b""
                return
            self._take(number, content)

    def _take(self, number: bytes, content: bytes) -> None:
        place = int.from_bytes(number, "big")
        if place < self.next:
            return
        assert place == self.next
        self.next += 1
        time, events, rank = msgspec.msgpack.decode(content)
        assert (time, rank) == (123.5, 3)
        for event in events:
            self.events.append(event)
            handlers = {"BlockStored": self._stored, "BlockRemoved": self._removed, "AllBlocksCleared": self._cleared}
            handlers[event["type"]](event)

    def _stored(self, event: dict[str, Any]) -> None:
        size, group = event["block_size"], event["group_idx"]
        assert event["medium"] == "GPU" and event["lora_id"] is event["lora_name"] is None
        assert event["extra_keys"] == [None] * len(event["block_hashes"])
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        if group:
            self.others.update((group, one) for one in event["block_hashes"])
            return
        parent = event["parent_block_hash"]
        tokens = () if parent is None else self.chains[parent]
        for index, one in enumerate(event["block_hashes"]):
            tokens += tuple(event["token_ids"][index * size : (index + 1) * size])
            self.chains[one] = tokens

    def _removed(self, event: dict[str, Any]) -> None:
        for one in event["block_hashes"]:
            if event["group_idx"]:
                self.others.remove((event["group_idx"], one))
            else:
                del self.chains[one]

    def _cleared(self, event: dict[str, Any]) -> None:
        self.chains.clear()
        self.others.clear()

    def longest_hit(self, token_ids: list[int]) -> int:
        """Tokens that the engine has of a prompt, one of which it computes at least."""
        known = {*self.chains.values()}
        blocks = range(BLOCK, len(token_ids), BLOCK)
        return max((end for end in blocks if tuple(token_ids[:end]) in known), default=0)


@contextlib.contextmanager
def events(folder: Path, groups: tuple[KVGroup, ...] = ONE_GROUP, **more: Any) -> Iterator[tuple[Any, Router]]:
    endpoints = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replays"}
    config = KVEventsConfig(True, **endpoints, topic="kv@pod@model", data_parallel_rank=3, **more)
    publisher, router = KVEventPublisher(config, groups, BLOCK, clock=lambda: 123.5), Router(config)
    try:
        yield publisher, router
    finally:
        router.close()
        publisher.close()


def test_a_router_finds_what_a_request_hits(tmp_path: Path) -> None:
    with events(tmp_path) as (publisher, router):
        drive = Drive(make_scheduler(events=publisher, num_blocks=12, max_num_seqs=2))
        prompts = [[*range(20)], [*range(12), *range(100, 108)], [*range(200, 224)], [*range(20)], [*range(300, 324)]]
        hits = []
        for number, prompt in enumerate([*prompts, *prompts]):
            router.replay()
            expected = router.longest_hit(prompt)
            request = request_of(f"{number}", prompt, max_tokens=5)
            drive.scheduler.add_request(request)
            while drive.scheduler.has_unfinished:
                drive.step()
            assert request.num_cached_tokens == expected
            hits.append(expected)
        assert 0 in hits and 12 in hits and 16 in hits
        assert any(event["type"] == "BlockRemoved" for event in router.events)
        drive.scheduler.reset_prefix_cache()
        router.replay()
        assert router.events[-1] == {"type": "AllBlocksCleared"} and not router.chains
        salted = request_of("salted", prompts[0], cache_salt="private")
        for request in (salted, request_of("last", [*range(400, 420)])):
            drive.scheduler.add_request(request)
        drive.step()
        router.replay()
        assert {tokens[0] for tokens in router.chains.values()} == {400}
        stored = next(event for event in reversed(router.events) if event["type"] == "BlockStored")
        assert stored["kv_cache_spec_kind"] == "full_attention" and stored["parent_block_hash"] is None


def test_subscribers_get_batches_as_they_come(tmp_path: Path) -> None:
    with events(tmp_path) as (publisher, router):
        scheduler = make_scheduler(events=publisher)
        while not router.socket.poll(10):  # each is another batch, until the subscription is known
            scheduler.reset_prefix_cache()
        topic, number, content = router.socket.recv_multipart()
        router.replay()  # also what came before the subscription
        assert topic == b"kv@pod@model" and int.from_bytes(number, "big") < router.next
        assert msgspec.msgpack.decode(content)[1][0] == {"type": "AllBlocksCleared"}


def test_groups_have_blocks_of_their_own(tmp_path: Path) -> None:
    with events(tmp_path, WINDOWED) as (publisher, router):
        drive = Drive(make_scheduler(events=publisher, num_blocks=16, groups=WINDOWED))
        for number in range(6):
            drive.scheduler.add_request(request_of(f"{number}", [*range(50 * number, 50 * number + 30)], max_tokens=4))
            while drive.scheduler.has_unfinished:
                drive.step()
        router.replay()
        kinds = {(event["kv_cache_spec_kind"], event["kv_cache_spec_sliding_window"]) for event in router.events[1:]
                 if event["type"] == "BlockStored"}  # fmt: skip
        assert kinds == {("full_attention", None), ("sliding_window", 8)}
        for group, known in ((0, {*router.chains}), (1, {one for _, one in router.others})):
            cached = {publisher.hash(digest) for digest in drive.scheduler.pools.all[group]._by_hash}
            assert known == cached and known


def test_hashes_depend_on_a_key(tmp_path: Path) -> None:
    found = []
    for number, key in enumerate(("a", "a", "b", "", "")):
        (folder := tmp_path / f"{number}").mkdir()
        with events(folder, hash_key=key) as (publisher, _):
            found.append(publisher.hash(b"a block"))
    assert found[0] == found[1] and len({*found}) == 4


def test_replays_keep_the_last_batches_and_ignore_what_is_no_number(tmp_path: Path) -> None:
    with events(tmp_path, buffer_steps=2) as (publisher, router):
        for _ in range(5):
            publisher.cleared()
            publisher.flush()
        stranger = zmq.Context.instance().socket(zmq.DEALER)
        stranger.connect(f"ipc://{tmp_path}/replays")
        for frames in ([b""], [b"", b"x"], [b"", bytes(8), b""], [b"", bytes(200)], [b"", bytes(300)]):
            stranger.send_multipart(frames)
        stranger.close(linger=-1)
        router.next = 3
        router.replay()
        assert router.next == 5


def test_settings() -> None:
    config = KVEventsConfig(True, endpoint="tcp://*:5557", replay_endpoint="tcp://127.0.0.1:5600")
    of_rank = config.moved(2)
    assert (of_rank.endpoint, of_rank.replay_endpoint) == ("tcp://*:5559", "tcp://127.0.0.1:5602")
    assert of_rank.data_parallel_rank == 2 and config.is_listening
    assert not KVEventsConfig(endpoint="tcp://router:5557").is_listening
    assert KVEventsConfig().endpoint.startswith("tcp://127.0.0.1:") and not KVEventsConfig().is_active
    with pytest.raises(ValueError, match="replay_endpoint"):
        KVEventsConfig(replay_endpoint="5557")
    with pytest.raises(ValueError, match="65535"):
        KVEventsConfig(endpoint="tcp://127.0.0.1:65535").moved(1)  # ZMQ would listen on port 0
    with pytest.raises(FieldError) as refusal:
        EngineConfig(kv_events_config=config, enable_prefix_caching=False)
    assert refusal.value.field == "kv_events_config"
    with pytest.raises(FieldError) as refusal:
        KVEventPublisher(KVEventsConfig(True, endpoint="ipc:///nowhere/at/all"), ONE_GROUP, 4)
    assert refusal.value.field == "kv_events_config.endpoint"

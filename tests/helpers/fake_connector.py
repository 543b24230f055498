"""KV connectors without KV: scheduler sides that do as scripted, and one with workers that move tokens.

The latter can load, fail, time out and hold, in any order, on several ranks. What its workers read must be the tokens
that the scheduler named, at the moment at which they read.
"""

import random
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any

from fleetfoot.executor.multiprocess import KVOutputMerger
from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.request import Request
from fleetfoot.records.step import KVConnectorOutput, SchedulerOutput, TransferFailure
from tests.helpers.fake_runner import FakeRunner

Block = tuple[int, bytes, list[int]]
"""Its id, the hash of its chain, and its tokens."""
GARBAGE = -7


@dataclass
class ScriptedConnector(SchedulerConnector):
    """Matches and holds as scripted, and records its calls. Metadata: the number of the step, and of ended requests."""

    matches: dict[str, int] = field(default_factory=dict)
    """Request -> tokens that it can load."""
    holds: Container[str] = ()
    params: dict[str, Any] | None = None
    """The ``kv_transfer_params`` of all that are held."""
    pending: bool = False
    evicts: bool = False
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def check_request(self, request: Request) -> None:
        if request.kv_transfer_params == {"bad": True}:
            raise ValueError("kv_transfer_params is bad")

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        self.calls.append(("match", request.request_id, num_computed_tokens, len(request.block_hashes)))
        return self.matches.get(request.request_id, 0)

    def update_state_after_alloc(self, request: Request, num_computed_tokens: int, num_external_tokens: int) -> None:
        call = "load", request.request_id, num_computed_tokens, num_external_tokens, len(request.block_ids)
        self.calls.append(call)

    def blocks_filled(self, request: Request, first: int, last: int, *, by_this_step: bool) -> None:
        self.calls.append(("filled", request.request_id, first, last, by_this_step))

    def slabs_reused(self, slabs: Iterable[int]) -> None:
        self.calls.append(("reused", [*slabs]))

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        call = "finished", request.request_id, request.finish_reason, len(request.block_ids), request.num_tokens
        self.calls.append(call)
        is_held = request.request_id in self.holds
        return is_held, self.params if is_held else None

    def evict(self, request_id: str) -> bool:
        self.calls.append(("evict", request_id))
        return self.evicts and request_id in self.holds

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> tuple[int, int] | None:
        return scheduler_output.step, len(self.of("finished"))

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self.calls.append(("update",))

    @property
    def has_pending(self) -> bool:
        return self.pending

    def reset_cache(self, weights: str = "") -> None:
        self.calls.append(("reset",))

    def shutdown(self) -> None:
        self.calls.append(("shutdown",))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == kind]


@dataclass
class Behaviour:
    """Probabilities, 0 to 1."""

    match: float = 0.8
    """That a request may load anything."""
    fail: float = 0.2
    """That a rank's part of a load fails."""
    hold: float = 0.4
    """That blocks of a request that has ended are held."""
    end: float = 0.4
    """That a transfer ends on a rank in a step."""
    has_all: bool = False
    """Whether KV of any tokens can be loaded, as from another engine; False: what was saved here."""


@dataclass
class Metadata:
    loads: dict[str, list[Block]] = field(default_factory=dict)
    flushes: list[Block] = field(default_factory=list)
    saves: list[Block] = field(default_factory=list)
    sends: dict[str, list[Block]] = field(default_factory=dict)


class FakeSchedulerConnector(SchedulerConnector):
    """The scheduler side."""

    def __init__(self, block_size: int, rng: random.Random, behaviour: Behaviour | None = None) -> None:
        self.block_size = block_size
        self.behaviour = behaviour or Behaviour()
        self.store: dict[bytes, tuple[list[int], int]] = {}  # what could be loaded: tokens, and their KV's weights
        self.loading: set[str] = set()
        self.held: set[str] = set()
        self.finished: list[str] = []
        self.num_metadata = 0
        self._rng = rng
        self._next = Metadata()

    def _blocks(self, request: Request, first: int, last: int) -> list[Block]:
        size = self.block_size
        blocks = [
            (request.block_ids[i], request.block_hashes[i], request.token_ids[i * size : (i + 1) * size].tolist())
            for i in range(first, last)
        ]
        assert all(len(tokens) == size for _, _, tokens in blocks), "a block of unknown tokens counts as full"
        return blocks

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        assert not request.has_prompt_logprobs
        first = num_computed_tokens // self.block_size
        usable = request.block_hashes[first : (request.num_tokens - 1) // self.block_size]
        assert len(usable) == (request.num_tokens - 1) // self.block_size - first
        count = len(usable)
        if not self.behaviour.has_all:
            count = next((i for i, digest in enumerate(usable) if digest not in self.store), count)
        if self._rng.random() >= self.behaviour.match:
            return 0
        return self._rng.randint(min(1, count), count) * self.block_size

    def update_state_after_alloc(self, request: Request, num_computed_tokens: int, num_external_tokens: int) -> None:
        first = num_computed_tokens // self.block_size
        last = first + num_external_tokens // self.block_size
        assert len(request.block_ids) * self.block_size >= request.num_tokens
        self.loading.add(request.request_id)
        self._next.loads[request.request_id] = self._blocks(request, first, last)

    def blocks_filled(self, request: Request, first: int, last: int, *, by_this_step: bool) -> None:
        assert first < last
        (self._next.saves if by_this_step else self._next.flushes).extend(self._blocks(request, first, last))

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self.finished.append(request.request_id)
        if self._rng.random() >= self.behaviour.hold:
            return False, None
        num_full = request.num_published if request.num_published <= len(request.block_ids) else 0
        self.held.add(request.request_id)
        self._next.sends[request.request_id] = self._blocks(request, 0, num_full)
        return True, {"blocks": num_full}

    def evict(self, request_id: str) -> bool:
        return True  # it is being read, and will be sent

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Metadata:
        metadata, self._next = self._next, Metadata()
        self.num_metadata += 1
        return metadata

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self.loading -= output.loaded | output.failed.keys()
        self.held -= output.sent

    @property
    def has_pending(self) -> bool:
        return self._next != Metadata()

    def reset_cache(self, weights: str = "") -> None:
        self.store.clear()
        self._next.saves.clear()
        self._next.flushes.clear()


@dataclass
class _Transfer:
    blocks: list[Block]
    ranks: set[int]
    weights: int
    has_failed: bool = False


class FakeWorkers:
    """The worker sides of all ranks, which read and write the runner's KV slots."""

    def __init__(
        self, connector: FakeSchedulerConnector, runner: FakeRunner, num_ranks: int, rng: random.Random
    ) -> None:
        self._connector, self._runner, self._rng = connector, runner, rng
        self._num_ranks = num_ranks
        self._merger = KVOutputMerger(num_ranks)
        self._loads: dict[str, _Transfer] = {}
        self._sends: dict[str, _Transfer] = {}
        self._metadata: Metadata | None = None

    def begin(self, output: SchedulerOutput) -> None:
        """Flush, and begin the loads."""
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, Metadata)
        self._metadata = metadata
        self._save(metadata.flushes)
        for transfers, given in ((self._sends, metadata.sends), (self._loads, metadata.loads)):
            for request_id, blocks in given.items():
                transfers[request_id] = _Transfer(blocks, set(range(self._num_ranks)), self._runner.weights)

    def end(self) -> KVConnectorOutput | None:
        """Save, and report what has ended."""
        assert self._metadata is not None
        self._save(self._metadata.saves)
        self._metadata = None
        for load in self._loads.values():  # an incomplete load is worth nothing
            self._write([(block, digest, [GARBAGE] * len(tokens)) for block, digest, tokens in load.blocks], GARBAGE)
        for send in self._sends.values():
            self._check(send.blocks)
        outputs = [self._advance(rank) for rank in range(self._num_ranks)]
        self._rng.shuffle(outputs)
        return self._merger.merge(outputs)

    def _ending(self, transfers: dict[str, _Transfer], rank: int) -> list[tuple[str, _Transfer]]:
        """The transfers that end on a rank in this step."""
        ending = []
        for request_id, transfer in list(transfers.items()):
            if rank in transfer.ranks and self._rng.random() < self._connector.behaviour.end:
                transfer.ranks.remove(rank)
                ending.append((request_id, transfer))
                if not transfer.ranks:
                    del transfers[request_id]
        return ending

    def _advance(self, rank: int) -> KVConnectorOutput | None:
        output = KVConnectorOutput()
        for request_id, load in self._ending(self._loads, rank):
            if self._rng.random() < self._connector.behaviour.fail:
                load.has_failed = True
                output.failed[request_id] = TransferFailure("a fault", timed_out=self._rng.random() < 0.5)
            else:
                output.loaded.add(request_id)
            if not (load.ranks or load.has_failed):
                self._write(load.blocks, load.weights)
                output.counters["blocks_loaded"] = output.counters.get("blocks_loaded", 0) + len(load.blocks)
        output.sent = {request_id for request_id, _ in self._ending(self._sends, rank)}
        return None if output.is_empty else output

    def _save(self, blocks: list[Block]) -> None:
        self._check(blocks)
        size, versions = self._connector.block_size, self._runner.versions
        for block, digest, tokens in blocks:
            version = min(versions[slot] for slot in range(block * size, (block + 1) * size))
            assert version == self._runner.weights, "KV of other weights is saved"
            self._connector.store[digest] = tokens, version

    def _check(self, blocks: list[Block]) -> None:
        size = self._connector.block_size
        for block, _, tokens in blocks:
            held = [self._runner.slots.get(block * size + i) for i in range(size)]
            assert held == tokens, "a block that leaves holds other tokens than its request's"

    def _write(self, blocks: list[Block], version: int) -> None:
        size = self._connector.block_size
        for block, _, tokens in blocks:
            for slot, token in enumerate(tokens, start=block * size):
                self._runner.slots[slot], self._runner.versions[slot] = token, version

"""A KV connector that can load, fail, time out and hold, in any order, on several ranks. It moves tokens instead of KV.

Everything that it reads must hold the tokens that the scheduler said, at the very moment it reads.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from fleetfoot.executor.multiprocess import KVOutputMerger
from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.request import Request
from fleetfoot.records.step import KVConnectorOutput, SchedulerOutput, TransferFailure
from tests.helpers.fake_runner import FakeRunner

Block = tuple[int, bytes, list[int]]
"""Its id, the hash of its chain, and its tokens."""
Stored = tuple[list[int], int]
"""A block's tokens, and the weights that its KV stands on."""
GARBAGE = -7


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

    def __bool__(self) -> bool:
        return bool(self.loads or self.flushes or self.saves or self.sends)


class FakeSchedulerConnector(SchedulerConnector):
    """The scheduler's side."""

    def __init__(self, block_size: int, rng: random.Random, behaviour: Behaviour | None = None) -> None:
        self.block_size = block_size
        self.behaviour = behaviour or Behaviour()
        self.store: dict[bytes, Stored] = {}  # what could be loaded
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
        assert all(len(tokens) == size for _, _, tokens in blocks), "a block counts as full whose tokens are not known"
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

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Metadata:
        metadata, self._next = self._next, Metadata()
        self.num_metadata += 1
        return metadata

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self.loading -= output.loaded | output.failed.keys()
        self.held -= output.sent

    @property
    def has_pending(self) -> bool:
        return bool(self._next)

    def reset_cache(self) -> None:
        self.store.clear()
        self._next.saves.clear()
        self._next.flushes.clear()


@dataclass
class _Transfer:
    blocks: list[Block]
    ranks: set[int]
    weights: int = 0
    has_failed: bool = False


class FakeWorkers:
    """All workers' sides.

    Args:
        runner: whose KV slots are read and written.
    """

    def __init__(
        self, connector: FakeSchedulerConnector, runner: FakeRunner, num_ranks: int, rng: random.Random
    ) -> None:
        self._connector = connector
        self._runner = runner
        self._num_ranks = num_ranks
        self._rng = rng
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
        for request_id, blocks in metadata.sends.items():
            self._sends[request_id] = _Transfer(blocks, set(range(self._num_ranks)))
        for request_id, blocks in metadata.loads.items():
            weights = self._runner.weights
            self._loads[request_id] = _Transfer(blocks, set(range(self._num_ranks)), weights)

    def end(self) -> KVConnectorOutput | None:
        """Save, and say what has ended."""
        assert self._metadata is not None
        self._save(self._metadata.saves)
        self._metadata = None
        for load in self._loads.values():  # what is there before all of it has come is worth nothing
            self._write([(block, digest, [GARBAGE] * len(tokens)) for block, digest, tokens in load.blocks], GARBAGE)
        for send in self._sends.values():
            self._check(send.blocks)
        outputs = [self._advance(rank) for rank in range(self._num_ranks)]
        self._rng.shuffle(outputs)
        return self._merger.merge(outputs)

    def _advance(self, rank: int) -> KVConnectorOutput | None:
        output, behaviour = KVConnectorOutput(), self._connector.behaviour
        for request_id, load in list(self._loads.items()):
            if rank not in load.ranks or self._rng.random() >= behaviour.end:
                continue
            load.ranks.remove(rank)
            if self._rng.random() < behaviour.fail:
                load.has_failed = True
                output.failed[request_id] = TransferFailure("a fault", timed_out=self._rng.random() < 0.5)
            else:
                output.loaded.add(request_id)
            if not load.ranks:
                del self._loads[request_id]
                if not load.has_failed:
                    self._write(load.blocks, load.weights)
                    output.counters["blocks_loaded"] = len(load.blocks)
        for request_id, send in list(self._sends.items()):
            if rank in send.ranks and self._rng.random() < behaviour.end:
                send.ranks.remove(rank)
                output.sent.add(request_id)
                if not send.ranks:
                    del self._sends[request_id]
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

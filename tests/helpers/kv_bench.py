"""Both sides of a KV connector with real tensors, without an engine: tests make requests, blocks and steps."""

import random
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.executor.multiprocess import KVOutputMerger
from fleetfoot.kv_transfer.base.block_copies import BlockCopies, CopyEvent, HostMemory
from fleetfoot.kv_transfer.base.connector import TransferContext, WorkerConnector
from fleetfoot.kv_transfer.base.registry import find_connector
from fleetfoot.records.kv_layout import KVCacheSpec, KVLayout, slab_of
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import KVConnectorOutput, SchedulerOutput
from fleetfoot.runner.base import clear_slabs
from fleetfoot.runner.step_connector import StepConnector
from fleetfoot.scheduler.kv_blocks import extend_chain, root_hash

BLOCK_SIZE = 4
LAYOUT = KVLayout(16, BLOCK_SIZE, "float32", (*[KVCacheSpec(2, 6)] * 2, KVCacheSpec(1, 4)))
"""Of a rank: two layers of a model, and one of a drafter with another shape."""
FINGERPRINT = "0123456789abcdef" * 2
TOKENS = list(range(17))
"""Four full blocks, and a last token, which is always computed."""
BLOCKS, PLACES = [3, 7, 1, 12, 5], [9, 8, 2, 0, 4]
"""For those tokens, and for the same tokens again."""


class ManualJobs:
    """Jobs that run when the test calls `run`."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()

    def submit(self, job: Callable[[], None]) -> None:
        self.waiting.append(job)

    def run(self, count: int | None = None) -> None:
        """The oldest ``count``, or all."""
        for _ in range(len(self.waiting) if count is None else count):
            self.waiting.popleft()()

    def stop(self, timeout: float, *, finish: bool) -> bool:
        if finish:
            self.run()
        self.waiting.clear()
        return True


class InlineJobs(ManualJobs):
    """Jobs that have run when they are submitted."""

    def submit(self, job: Callable[[], None]) -> None:
        job()


class Clock:
    """A clock that the test advances."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def transfer_config(connector: str, *, role: str = "kv_both", timeout: float = 60.0, **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(connector, role, kv_transfer_timeout=timeout, kv_connector_extra_config=extra)


class Bench:
    """An engine's connector, and its ranks' KV caches with random values. ``make_worker`` replaces the worker side."""

    def __init__(
        self, config: KVTransferConfig, *, num_ranks: int = 1, fingerprint: str = FINGERPRINT,
        layout: KVLayout = LAYOUT, clock: Callable[[], float] | None = None,
        make_worker: Callable[[TransferContext], WorkerConnector] | None = None, device: str | torch.device = "cpu",
    ) -> None:  # fmt: skip
        self.layout = layout
        num_bytes = layout.bytes_per_block * num_ranks
        shared = config, layout.block_size, fingerprint, "bench", num_ranks
        more = {"bytes_per_block": num_bytes, "groups": layout.groups, "clock": clock}
        self.contexts = [
            TransferContext(*shared, rank, tensor_parallel_size=num_ranks, **more) for rank in range(num_ranks)
        ]
        connector = find_connector(config)
        self.scheduler: Any = connector.scheduler_side(self.contexts[0])
        self.connector = self.scheduler
        self.steps = [StepConnector((make_worker or connector.worker_side)(context)) for context in self.contexts]
        self.caches = [[torch.rand(shape, device=device) for shape in layout.tensor_shapes] for _ in self.steps]
        self.views = [layout.layer_views(caches) for caches in self.caches]
        for step, caches in zip(self.steps, self.caches, strict=True):
            step.clear_slabs = partial(clear_slabs, caches[0])
            step.register_kv_caches(caches, layout)
        self.merger = KVOutputMerger(num_ranks)
        self.counters: Counter[str] = Counter()
        self.num_steps = 0

    def request(
        self, request_id: str, tokens: Sequence[int], block_ids: Sequence[int] = (), window: Sequence[int] = ()
    ) -> Request:
        """A request with its block hashes, and these blocks; ``window``: of the second group, 0 before its window."""
        request = Request(request_id, list(tokens), SamplingParams(), max_tokens=8, seed=0)
        request.block_hashes = extend_chain(root_hash(None), array("i", tokens), 0, len(tokens), BLOCK_SIZE)
        request.block_ids = list(block_ids)
        if window:
            request.group_block_ids, request.num_freed = [list(window)], [list(window).count(0)]
        return request

    def contents(self, block_ids: Sequence[int]) -> list[list[torch.Tensor]]:
        """A copy of blocks, of every layer of every rank."""
        return [[cache[list(block_ids)].clone() for cache in caches] for caches in self.caches]

    def scramble(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks, as the KV of other requests would."""
        for caches in self.caches:
            for cache in caches:
                cache[list(block_ids)] = torch.rand_like(cache[list(block_ids)])

    def step(
        self,
        finished: Sequence[str] = (),
        *,
        idle: bool = False,
        during: Callable[[], None] = lambda: None,
        new_blocks: Sequence[int] = (),
    ) -> KVConnectorOutput:
        """One step, with ``during`` in place of the forward pass, in which a running request gets ``new_blocks``."""
        output = SchedulerOutput(self.num_steps, [], [], 0, 0, 0, finished_req_ids=set(finished))
        output.new_block_ids = [(0, 0, list(new_blocks))] if new_blocks else []
        self.num_steps += 1
        output.kv_connector_metadata = self.scheduler.build_connector_meta(output)
        merged = self.execute(output, None if idle else during) or KVConnectorOutput()
        self.scheduler.update_connector_output(merged)
        self.counters.update(merged.counters)
        return merged

    def execute(self, output: SchedulerOutput, forward: Callable[[], object] | None) -> KVConnectorOutput | None:
        """The step of every rank; ``forward`` None: an idle one."""
        if forward is None:
            return self.merger.merge([step.no_forward(output) for step in self.steps])
        for step in self.steps:
            step.pre_forward(output)
        forward()
        return self.merger.merge([step.post_forward(output.finished_req_ids) for step in self.steps])

    def save(self, request: Request, first: int, last: int) -> None:
        """A step that fills these of the request's blocks."""
        self.scheduler.blocks_filled(request, first, last, by_this_step=True)
        self.step(during=lambda: self.scramble(request.block_ids[first:last]))

    def matched(self, request: Request, num_computed_tokens: int = 0) -> int:
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def begin(self, request: Request, num_computed_tokens: int = 0) -> None:
        """Begin to load all matched tokens."""
        matched = self.matched(request, num_computed_tokens)
        assert matched % BLOCK_SIZE == 0 < matched
        self.scheduler.update_state_after_alloc(request, num_computed_tokens, matched)

    def load(self, request: Request, num_computed_tokens: int = 0) -> KVConnectorOutput:
        """Load all matched tokens, in idle steps."""
        self.begin(request, num_computed_tokens)
        return self.until_ended(request)

    def until_ended(self, request: Request) -> KVConnectorOutput:
        for _ in range(1000):
            output = self.step(idle=True)
            if request.request_id in output.loaded or request.request_id in output.failed:
                return output
        raise AssertionError(f"the load of {request.request_id} never ends")

    def shutdown(self) -> None:
        self.connector.shutdown()
        for step in self.steps:
            step.shutdown()


def same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    """Whether two `Bench.contents` are bitwise equal."""
    pairs = [pair for ranks in zip(one, other, strict=True) for pair in zip(*ranks, strict=True)]
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


class _LateCopy:
    """A copy that is made when it is waited for, and with ``rng`` at random when it is queried."""

    def __init__(self, line: list["_LateCopy"], rng: random.Random | None, work: Callable[[], object], *places: Any):
        self.work, (self.slabs, self.memory, self.units) = work, places
        self._line, self._rng = line, rng
        line.append(self)

    def query(self) -> bool:
        if self in self._line and self._rng is not None and self._rng.random() < 0.3:
            self.synchronize()
        return self not in self._line

    def synchronize(self) -> None:
        """The copies of a direction are made in order."""
        while self in self._line:
            self._line.pop(0).work()


class LateCopies(BlockCopies):
    """Copies as late as the order of the device's work allows, so that missing synchronization shows."""

    def __init__(self, *arguments: Any, shares_blocks: bool = False, rng: random.Random | None = None) -> None:
        super().__init__(*arguments)
        self._rng = rng
        self._out: list[_LateCopy] = []
        self._in: list[_LateCopy] = []

    def to_host(self, group: int, block_ids: Sequence[int], memory: HostMemory, slots: Sequence[int]) -> CopyEvent:
        work = partial(super().to_host, group, block_ids, memory, slots)
        return _LateCopy(self._out, self._rng, work, *self._places(group, block_ids, memory, slots))

    def from_host(self, group: int, memory: HostMemory, slots: Sequence[int], block_ids: Sequence[int]) -> CopyEvent:
        places = self._places(group, block_ids, memory, slots)
        self._wait_for(*places)
        return _LateCopy(self._in, self._rng, partial(super().from_host, group, memory, slots, block_ids), *places)

    def _places(self, group: int, block_ids: Sequence[int], memory: HostMemory, slots: Sequence[int]) -> Any:
        slabs = frozenset(slab_of(self._groups, group, block_id) for block_id in block_ids)
        return slabs, memory, memory.units(group, slots)

    def fence(self, slabs: Iterable[int]) -> None:
        self._wait_for(frozenset(slabs), None, frozenset())

    def close(self) -> None:
        for copy in (*self._out, *self._in):
            copy.synchronize()

    def _wait_for(self, slabs: frozenset[int], memory: HostMemory | None, units: frozenset[int]) -> None:
        for copy in list(self._out):
            if copy.slabs & slabs or (copy.memory is memory and copy.units & units):
                copy.synchronize()

"""Random schedules, the real connectors and real tensors around a fake model: KV goes out and comes back, goes wrong
now and then, and no token changes."""

import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.fake_engine import VOCAB, Loop, check_output
from tests.helpers.fake_runner import FakeRunner
from tests.helpers.faulty_connector import Faults, faulty
from tests.helpers.kv_bench import Bench, LateCopies, ManualJobs

from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.blockstore import worker
from fleetfoot.kv_transfer.blockstore.connector import HostIndex
from fleetfoot.records.kv_layout import ONE_GROUP, KVCacheSpec, KVLayout, StateSpec, make_groups
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import ModelRunnerOutput, SchedulerOutput
from fleetfoot.scheduler import states
from fleetfoot.scheduler.config import SchedulerConfig
from fleetfoot.scheduler.scheduler import Scheduler

BLOCK_SIZE = 2
KV_SPECS = (
    *[KVCacheSpec(1, 3)] * 2,
    KVCacheSpec(2, 1),
    KVCacheSpec(1, 2, 3),
    KVCacheSpec(1, 1, 5),
    KVCacheSpec(1, 2, 3),
)
STATE_SPECS = StateSpec((26,)), StateSpec((29,))  # a number of tokens, and the tokens
SPECS = {
    "one": KV_SPECS,
    "windows": KV_SPECS,
    "states": (*KV_SPECS[:2], *STATE_SPECS),
    "all": (*KV_SPECS, *STATE_SPECS),
}
GROUPS = {
    name: ONE_GROUP if name == "one" else make_groups(specs, (), BLOCK_SIZE, "float32", 100)
    for name, specs in SPECS.items()
}


class TensorSlots(dict[int, int]):
    """KV slot -> a number, which every element of the slot's K (``half`` 0) or V (1) holds on all ranks."""

    def __init__(self, caches: list[list[torch.Tensor]], groups: list[int], half: int, group: int = 0) -> None:
        super().__init__()
        layers = [cache for rank in caches for cache, index in zip(rank, groups, strict=True) if index == group]
        self._arrays = [cache.numpy()[:, half] for cache in layers]

    def __setitem__(self, slot: int, value: int) -> None:
        for number, array in enumerate(self._arrays):
            array[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = 100 * number + value + 1

    def __getitem__(self, slot: int) -> int:
        found = {
            int(value) - 100 * number - 1
            for number, array in enumerate(self._arrays)
            for value in array[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE].flatten()
        }
        assert len(found) == 1, f"the layers and ranks of slot {slot} hold KV of different tokens: {found}"
        return found.pop()


class TensorParts(dict[Any, Any]):
    """(group, block) -> offset -> token, of the groups after the first; slabs are cleared by the connector's step."""

    def __init__(self, slots: list[TensorSlots]) -> None:
        super().__init__()
        self._slots = slots

    def __missing__(self, key: tuple[int, int]) -> "Part":
        return Part(self._slots[key[0]], key[1])

    def setdefault(self, key: tuple[int, int], default: object = None) -> "Part":
        return self[key]


class Part:
    def __init__(self, slots: TensorSlots, block: int) -> None:
        self._slots, self._first = slots, block * BLOCK_SIZE

    def __setitem__(self, offset: int, token: int) -> None:
        self._slots[self._first + offset] = token

    def get(self, offset: int) -> int:
        return self._slots[self._first + offset]


class TensorStates(dict[int, list[int]]):
    """Slot of a state -> the tokens that it comes after, on all layers and ranks."""

    def __init__(self, caches: list[list[torch.Tensor]], groups: list[int], group: int) -> None:
        super().__init__()
        layers = [cache for rank in caches for cache, index in zip(rank, groups, strict=True) if index == group]
        self._arrays = [cache.numpy() for cache in layers]

    def update(self, written: dict[int, list[int]]) -> None:  # type: ignore[override]
        for slot, tokens in written.items():
            for number, array in enumerate(self._arrays):
                array[slot, 0], array[slot, 1 : 1 + len(tokens)] = len(tokens), [100 * number + each for each in tokens]

    def __getitem__(self, slot: int) -> list[int]:
        found = []
        for number, array in enumerate(self._arrays):
            size = int(array[slot, 0])
            found.append([int(each) - 100 * number for each in array[slot, 1 : 1 + size]])
        assert all(tokens == found[0] for tokens in found), f"the layers and ranks of slot {slot} hold other states"
        return found[0]


class Engine(Bench):
    """A scheduler, and ranks that share a fake model."""

    def __init__(self, scheduler_config: SchedulerConfig, config: KVTransferConfig, num_ranks: int, kind: str) -> None:
        groups = scheduler_config.groups
        layout = KVLayout(scheduler_config.num_blocks, BLOCK_SIZE, "float32", SPECS[kind], groups=groups)
        super().__init__(config, num_ranks=num_ranks, layout=layout)
        self.scheduler = Scheduler(scheduler_config, connector=self.connector)
        for cache in (cache for caches in self.caches for cache in caches):
            cache.zero_()
        self.runner = FakeRunner(BLOCK_SIZE, VOCAB, pools=self.scheduler.pools, groups=groups)
        slots = partial(TensorSlots, self.views, layout.group_of_layers)
        self.runner.slots, self.runner.versions = slots(0), slots(1)
        with_kv = len(groups) - groups[-1].is_state
        self.runner.parts = TensorParts([slots(0, group) for group in range(with_kv)])
        if groups[-1].is_state:
            self.runner.states = TensorStates(self.views, layout.group_of_layers, with_kv)

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        result = ModelRunnerOutput([])

        def forward() -> None:
            nonlocal result
            result = self.runner.compute(output)

        self.runner.apply(output)
        result.kv_connector_output = self.execute(output, None if output.is_idle else forward)
        return result


def transfer_config(kind: str, folder: Path, rng: random.Random, faults: Faults) -> KVTransferConfig:
    extra: dict[str, dict[str, Any]] = {
        "OffloadingConnector": {"num_cpu_blocks": rng.choice([1, 4, 40])},
        "SharedStorageConnector": {"shared_storage_path": str(folder), "max_bytes_in_flight": rng.choice([1, 10**6])},
    }
    parts = [{"kv_connector": name, "kv_connector_extra_config": settings} for name, settings in extra.items()]
    several = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": parts}}
    return KVTransferConfig.parse(faulty({"offload": parts[0], "shared": parts[1], "multi": several}[kind], faults))


def make_request(rng: random.Random, name: str) -> Request:
    size = rng.randint(1, 16)
    tail = rng.randint(0, min(size, 2))
    prompt = [position % 10 for position in range(size - tail)] + [rng.randrange(VOCAB) for _ in range(tail)]
    max_tokens = rng.randint(1, 8)
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=rng.choice([None, None, None, 1]))
    return Request(name, prompt, params, max_tokens=max_tokens, seed=0, cache_salt=rng.choice([None, None, "a"]))


def inject(rng: random.Random, faults: Faults, folder: Path, engine: Engine, *, is_over: bool) -> None:
    if rng.random() < 0.2:
        faults.loads = rng.choice(["", "", "fail", "time_out", "corrupt", "hold"])
    faults.holds = rng.random() < 0.3
    if is_over or rng.random() < 0.2:  # all is released at some time
        faults.released.set()
    else:
        faults.released.clear()
    if rng.random() < 0.1 and (files := [path for path in sorted(folder.rglob("*.kv")) if path.stat().st_size]):
        victim = rng.choice(files)
        content = bytearray(victim.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        victim.write_bytes(content[: rng.choice([0, 50, len(content), len(content)])])
    if rng.random() < 0.03:
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.runner.weights += 1


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["offload", "shared", "multi"]), policy=st.sampled_from(["recompute", "fail"]),
    caching=st.booleans(), num_ranks=st.integers(1, 2), depth=st.integers(0, 2), seed=st.integers(0, 2**32),
    groups=st.sampled_from([*GROUPS]),
)  # fmt: skip
def test_transfers_change_nothing(
    kind: str, policy: str, caching: bool, num_ranks: int, depth: int, seed: int, groups: str
) -> None:
    rng = random.Random(seed)
    jobs: list[ManualJobs] = []

    def late_jobs(name: str, num_threads: int) -> ManualJobs:
        jobs.append(ManualJobs())
        return jobs[-1]

    with (
        tempfile.TemporaryDirectory() as name,
        patch.object(worker, "IOThreads", late_jobs),
        patch.object(worker, "block_copies", partial(LateCopies, rng=rng)),
        patch.object(worker, "WAIT_SECONDS", 0.0),
        patch.multiple(states, CHUNK=2, MAX_STEPS=3, _LONG=8),  # prompts here are short
    ):
        for _ in range(2):  # the second engine finds what the first has left
            config = SchedulerConfig(
                num_blocks=rng.randint(12, 20) + (0 if groups == "one" else 6),
                block_size=BLOCK_SIZE,
                max_num_seqs=rng.randint(1, 4),
                max_num_batched_tokens=rng.randint(4, 24),
                enable_prefix_caching=caching,
                groups=GROUPS[groups],
                kv_load_failure_policy=policy,
            )
            faults = Faults()
            engine = Engine(config, transfer_config(kind, Path(name), rng, faults), num_ranks, groups)

            def disturb(running: Any, have_all_arrived: bool, engine: Engine = engine, faults: Faults = faults) -> None:
                for threads in jobs:
                    threads.run(rng.randint(0, len(threads.waiting)))
                check_slots(engine.connector.inner)
                inject(rng, faults, Path(name), engine, is_over=have_all_arrived and not running)

            loop = Loop(engine.scheduler, engine.run, depth)
            requests = loop.run_random_requests(rng, partial(make_request, rng), disturb)
            engine.shutdown()
            for request in requests:
                check_output(request, policy)


def check_slots(connector: Any) -> None:
    """Of the host memory of a connector or its parts."""
    for part in getattr(connector, "_parts", [connector]):
        if isinstance(part.index, HostIndex):
            part.index.check_integrity()

"""When a KV connector's methods and the barrier are called in a step: the contract of
`fleetfoot.runner.step_connector` and `fleetfoot.runner.step_barrier`, tested against all events of a step, on both
runners, with drafts and without, alone and in a pipeline."""

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.helpers.faulty_connector import WORKER_POINTS, HookedWorker
from tests.helpers.kernels import cpu_kernels
from tests.helpers.local_pipeline import local_pipeline
from tests.helpers.recording_device import RecordingDevice
from tests.helpers.runner_lives import NUM_DRAFTS, make_runner

from fleetfoot.distributed.groups import SINGLE_PIPELINE_GROUP
from fleetfoot.models.interface import CausalLM
from fleetfoot.records.kv_layout import KVCacheSpec, KVLayout
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import KVConnectorOutput, NewRequest, SchedulerOutput
from fleetfoot.runner.base import ModelRunner
from fleetfoot.runner.step_barrier import StepBarrier
from fleetfoot.runner.step_connector import StepConnector
from fleetfoot.speculative.drafter import NO_DRAFTING, DraftBatch, DraftSettings

DRAFTS = pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])


@pytest.fixture(params=["v1", "v2"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


CLEAR = WORKER_POINTS[-1]


class FaultError(Exception):
    """What a raising event raises."""


@dataclass
class Log:
    """Events in order, of which some raise."""

    events: list[str] = field(default_factory=list)
    raising: Container[str] = ()

    def note(self, event: str, more: object = "") -> None:
        if event in self.raising:
            self.events.append(f"{event}!")
            raise FaultError(event)
        self.events.append(f"{event} {more}" if more else event)

    def take(self) -> list[str]:
        events, self.events = self.events, []
        return events


class RecordingConnector(HookedWorker):
    """Logs its calls, and which layers have KV in block 0 when loads and saves start."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log
        self.metadata: object | None = None
        self.is_written: dict[str, list[bool]] = {}

    def at(self, point: str) -> None:
        if point in ("start_load_kv", "save_kv"):
            self.is_written[point] = [bool(kv_cache[0].any()) for kv_cache in self.kv_caches]
        details = {"register_kv_caches": f"{len(self.kv_caches)} layers", "bind_connector_metadata": self.metadata}
        self.log.note(point, details.get(point, ""))

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        assert [tuple(kv_cache.shape) for kv_cache in kv_caches] == layout.tensor_shapes
        super().register_kv_caches(layout.layer_views(kv_caches), layout)

    def bind_connector_metadata(self, metadata: object | None) -> None:
        self.metadata = metadata
        super().bind_connector_metadata(metadata)

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        self.log.note("get_finished", " ".join(sorted(finished_req_ids)))
        return KVConnectorOutput(counters={"calls": 1})

    def clear_connector_metadata(self) -> None:
        self.metadata = None
        super().clear_connector_metadata()


class Noted:
    """Something callable, with a note of each of its calls."""

    def __init__(self, log: Log, event: str, called: Any) -> None:
        self._log, self._event, self._called = log, event, called

    def __getattr__(self, name: str) -> Any:
        return getattr(self._called, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._log.note(self._event)
        return self._called(*args, **kwargs)


class RecordingDrafter:
    """Has a layer of KV, and writes to it when it proposes."""

    num_drafts = NUM_DRAFTS
    reads_hidden = False
    kv_specs = (KVCacheSpec(1, 2),)

    def __init__(self, log: Log) -> None:
        self._log = log

    def load_model(self, target: CausalLM) -> None:
        self._log.note("load_drafter")

    def add_weights(self, weights: object) -> None:
        """It has none."""

    def bind_kv_caches(self, kv_caches: Sequence[torch.Tensor]) -> None:
        (self._kv_cache,) = kv_caches

    def propose(self, batch: DraftBatch, num_drafts: int) -> torch.Tensor | None:
        self._log.note("propose", num_drafts)
        slots = batch.metadata.slot_mapping[batch.metadata.slot_mapping >= 0]
        blocks, offsets = slots // self._kv_cache.shape[3], slots % self._kv_cache.shape[3]
        self._kv_cache[blocks, :, :, offsets] = 1.0
        return torch.zeros((len(batch.newest), num_drafts), dtype=torch.int32) if num_drafts else None


class RecordingBarrier(StepBarrier):
    def __init__(self, log: Log) -> None:
        self._log = log

    def step(self, scheduler_output: SchedulerOutput) -> None:
        self._log.note("barrier")


class Rank:
    """A runner, and what is recorded of it."""

    def __init__(
        self, kind: str, *, drafts: bool, pipeline: Any = SINGLE_PIPELINE_GROUP, device: RecordingDevice | None = None
    ) -> None:
        self.log = Log()
        self.connector = RecordingConnector(self.log)
        drafter = RecordingDrafter(self.log) if drafts and pipeline.is_last_rank else None
        ops = cpu_kernels()
        self.runner: ModelRunner = make_runner(
            kind,
            DraftSettings(NUM_DRAFTS, drafter=drafter) if drafts else NO_DRAFTING,
            device=device,
            connector=StepConnector(self.connector),
            barrier=RecordingBarrier(self.log),
            pipeline=pipeline,
            layers=None if pipeline.size == 1 else range(pipeline.rank, pipeline.rank + 1),
            ops=replace(ops, sample=Noted(self.log, "sample", ops.sample)),
            wrap=lambda model: Noted(self.log, "forward", model),
        )
        num_layers = (2 if pipeline.size == 1 else 1) + bool(drafter)
        begin = ["load_drafter"] * bool(drafter) + [f"register_kv_caches {num_layers} layers"]
        assert self.log.take()[: len(begin)] == begin  # captures of graphs follow

    def step(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        assert self.runner.execute_model(output) is None
        kv_output = self.runner.sample_tokens(None).get().kv_connector_output
        assert self.connector.metadata is None
        return kv_output


def ranks_of(kind: str, size: int, *, drafts: bool) -> list[Rank]:
    return [Rank(kind, drafts=drafts, pipeline=pipeline) for pipeline in local_pipeline(size)]


def prefill() -> SchedulerOutput:
    """A prompt of five tokens in block 0, after a request ``earlier`` has ended."""
    params = SamplingParams(temperature=0.9)
    request = NewRequest("r0", 0, array("i", [5, 6, 7, 8, 9]), 5, 0, [0, 1, 2], params, 1, frozenset(), [], 60)
    output = SchedulerOutput(0, [0], [5], num_decodes=0, num_sampled=1, total_num_scheduled_tokens=5)
    output.new_requests, output.finished_req_ids = [request], {"earlier"}
    output.num_to_propose, output.kv_connector_metadata = NUM_DRAFTS, "prompt"
    return output


def decode(step: int = 1, num_drafts: int = 0) -> SchedulerOutput:
    width = 1 + num_drafts
    output = SchedulerOutput(step, [0], [width], num_decodes=1, num_sampled=1, total_num_scheduled_tokens=width)
    output.num_drafts, output.awaited_step, output.kv_connector_metadata = num_drafts, step - 1, "decode"
    return output


def idle(step: int = 2) -> SchedulerOutput:
    finished = {"finished": [("r0", 0)], "finished_req_ids": {"r0"}}
    return SchedulerOutput(step, [], [], 0, 0, 0, **finished, kv_connector_metadata="idle")


def events_of(metadata: str, *events: str, finished: str = "") -> list[str]:
    """Of a step with a forward pass."""
    begin = [f"bind_connector_metadata {metadata}", "flush", "start_load_kv"]
    end = ["save_kv", "wait_for_save", f"get_finished {finished}".strip(), "clear_connector_metadata"]
    end += ["barrier"]  # what all ranks do comes last
    return [*begin, *events, *end]


prompt_step, decode_step = partial(events_of, "prompt", finished="earlier"), partial(events_of, "decode")
ALONE = prompt_step("forward", "sample"), decode_step("forward", "sample")
# a drafter writes KV of its own: nothing is final before it has run, and it runs in every step
DRAFTING = prompt_step("forward", "sample", "propose 3"), decode_step("forward", "sample", "propose")
# on a rank that is not the last, the forward pass is the last writer
NOT_LAST = prompt_step("forward"), decode_step("forward")
# no KV was written, so there is nothing to wait for; but a load may have ended
IDLE = events_of("idle", "wait_for_progress", finished="r0")
IDLE.remove("wait_for_save")


@DRAFTS
@pytest.mark.parametrize("size", [1, 2], ids=["alone", "pipeline"])
def test_order(kind: str, drafts: bool, size: int) -> None:
    ranks = ranks_of(kind, size, drafts=drafts)
    for output in (prefill(), decode(num_drafts=NUM_DRAFTS * drafts), idle()):
        assert [rank.step(output) for rank in ranks] == [KVConnectorOutput(counters={"calls": 1})] * size
    for rank in ranks:
        prompt, later = NOT_LAST if rank is not ranks[-1] else DRAFTING if drafts else ALONE
        assert rank.log.take() == prompt + later + IDLE
        rank.runner.shutdown()
        assert rank.log.take() == ["shutdown"]


STEPS = {
    "alone": {"prompt": DRAFTING[0], "idle": IDLE},
    "last": {"prompt": DRAFTING[0], "idle": IDLE},
    "first": {"prompt": NOT_LAST[0], "idle": IDLE},
}
"""Position in a pipeline -> the events of steps with a drafter."""
FAULTS = [
    (where, step, event.split()[0])
    for where, steps in STEPS.items()
    for step, events in steps.items()
    for event in events[: events.index(CLEAR)]
]


@pytest.mark.parametrize(("where", "step", "raising"), FAULTS)
def test_the_metadata_is_cleared_and_no_step_follows_whatever_raises(
    kind: str, where: str, step: str, raising: str
) -> None:
    events = STEPS[where][step]
    ranks = ranks_of(kind, 1 if where == "alone" else 2, drafts=True)
    rank = ranks[0 if where == "first" else -1]
    output = prefill() if step == "prompt" else idle()
    for earlier in ranks[: ranks.index(rank)]:
        earlier.step(output)
    rank.log.raising = {raising}
    with pytest.raises(FaultError, match=raising):
        rank.step(output)
    position = [event.split()[0] for event in events].index(raising)
    assert rank.log.take() == [*events[:position], f"{raising}!", CLEAR]
    assert rank.connector.metadata is None
    with pytest.raises(RuntimeError, match="an earlier step has raised"):
        rank.step(idle())
    assert rank.log.take() == []  # it meets no other rank any more


@pytest.mark.parametrize(("step", "raising"), [(step, raising) for where, step, raising in FAULTS if where == "alone"])
def test_clearing_hides_no_first_cause(kind: str, step: str, raising: str, caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(kind, drafts=True)
    rank.log.raising = {raising, CLEAR}
    with pytest.raises(FaultError, match=raising):
        rank.step(prefill() if step == "prompt" else idle())
    assert rank.log.take()[-1] == f"{CLEAR}!"
    assert "could not clear the metadata" in caplog.text
    rank.runner.shutdown()
    assert rank.log.take() == ["shutdown"]

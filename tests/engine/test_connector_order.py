"""When a KV connector's parts are called in a step: the written contract of `fleetfoot.runner.step_connector`, held
against the whole list of what happens, on both runners, with drafts and without, alone and in a pipeline."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.helpers.faulty_connector import HookedWorker
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
from fleetfoot.runner.step_connector import StepConnector
from fleetfoot.runner.v1.runner import ModelRunnerV1
from fleetfoot.runner.v2.runner import ModelRunnerV2
from fleetfoot.sampling.shape import PLAIN
from fleetfoot.speculative.drafter import NO_DRAFTING, DraftBatch, DraftSettings

# --- what happens, written down -------------------------------------------------------------------------------------


class Log:
    """Events in order. One of them may be made to raise.

    Args:
        raising: the name of the event.
        also_raising: of another.
    """

    def __init__(self, raising: str | None = None, also_raising: str | None = None) -> None:
        self.events: list[str] = []
        self.raising = raising
        self.also_raising = also_raising

    def note(self, event: str, more: object = "") -> None:
        if event in (self.raising, self.also_raising):
            self.events.append(f"{event}!")
            raise FaultError(event)
        self.events.append(f"{event} {more}" if more else event)

    def take(self) -> list[str]:
        events, self.events = self.events, []
        return events


class FaultError(Exception):
    """What a raising event raises."""


SHORT = {
    "register_kv_caches": "register",
    "bind_connector_metadata": "bind",
    "start_load_kv": "start",
    "save_kv": "save",
    "clear_connector_metadata": "clear",
}
"""Names of the methods in the log."""


class RecordingConnector(HookedWorker):
    """Logs its calls, and which layers have KV in block 0 when loads and saves start."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log
        self.metadata: object | None = None
        self.is_written: dict[str, list[bool]] = {}

    def at(self, point: str) -> None:
        if point in ("start_load_kv", "save_kv"):
            self.is_written[SHORT[point]] = [bool(kv_cache[0].any()) for kv_cache in self.kv_caches]
        if point == "register_kv_caches":
            self.log.note("register", f"{len(self.kv_caches)} layers")
        elif point == "bind_connector_metadata":
            self.log.note("bind", self.metadata)
        elif point != "get_finished":
            self.log.note(SHORT.get(point, point))

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        assert [tuple(kv_cache.shape) for kv_cache in kv_caches] == layout.layer_shapes
        super().register_kv_caches(kv_caches, layout)

    def bind_connector_metadata(self, metadata: object | None) -> None:
        self.metadata = metadata
        super().bind_connector_metadata(metadata)

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        self.log.note("get_finished", " ".join(sorted(finished_req_ids)))
        return KVConnectorOutput(counters={"calls": 1})

    def clear_connector_metadata(self) -> None:
        self.metadata = None
        super().clear_connector_metadata()


class RecordingModel:
    """Notes when the model runs."""

    def __init__(self, model: CausalLM, log: Log) -> None:
        self._model = model
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any) -> Any:
        self._log.note("forward")
        return self._model(*args)


class RecordingDrafter:
    """Has a layer of KV, and writes to it when it is asked for drafts."""

    def __init__(self, log: Log) -> None:
        self.num_drafts = NUM_DRAFTS
        self.reads_hidden = False
        self.kv_specs: tuple[KVCacheSpec, ...] = (KVCacheSpec(1, 2),)
        self._log = log

    def load_model(self, target: CausalLM) -> None:
        self._log.note("load_drafter")

    def bind_kv_caches(self, kv_caches: Sequence[torch.Tensor]) -> None:
        (self._kv_cache,) = kv_caches

    def propose(self, batch: DraftBatch, num_drafts: int) -> torch.Tensor | None:
        self._log.note("propose", num_drafts)
        slots = batch.metadata.slot_mapping[batch.metadata.slot_mapping >= 0]
        blocks, offsets = slots // self._kv_cache.shape[3], slots % self._kv_cache.shape[3]
        self._kv_cache[blocks, :, :, offsets] = 1.0
        return torch.zeros((len(batch.newest), num_drafts), dtype=torch.int32) if num_drafts else None


class Rank:
    """A runner, and what is recorded of it."""

    def __init__(
        self,
        kind: str,
        *,
        drafts: bool,
        raising: str | None = None,
        pipeline: Any = SINGLE_PIPELINE_GROUP,
        device: RecordingDevice | None = None,
    ) -> None:
        self.log = Log()
        self.connector = RecordingConnector(self.log)
        drafter = RecordingDrafter(self.log) if drafts and pipeline.is_last_rank else None
        ops = cpu_kernels()

        def sample(*args: Any, **kwargs: Any) -> Any:
            self.log.note("sample")
            return ops.sample(*args, **kwargs)

        self.runner: ModelRunner = make_runner(
            kind,
            DraftSettings(NUM_DRAFTS, drafter=drafter) if drafts else NO_DRAFTING,
            device=device,
            connector=StepConnector(self.connector),
            pipeline=pipeline,
            layers=None if pipeline.size == 1 else range(pipeline.rank, pipeline.rank + 1),
            ops=dataclasses.replace(ops, sample=sample),
            wrap=lambda model: RecordingModel(model, self.log),
        )
        self.started = self.log.take()
        self.log.raising = raising

    def step(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        assert self.runner.execute_model(output) is None
        kv_output = self.runner.sample_tokens(None).get().kv_connector_output
        assert self.connector.metadata is None
        return kv_output


def prefill() -> SchedulerOutput:
    """A prompt of five tokens in block 0; who runs before it has ended."""
    request = NewRequest(
        "r0", 0, array("i", [5, 6, 7, 8, 9]), 5, 0, [0, 1, 2], SamplingParams(temperature=0.9), 1, frozenset(), [], 60
    )
    return SchedulerOutput(
        0,
        [0],
        [5],
        num_decodes=0,
        num_sampled=1,
        total_num_scheduled_tokens=5,
        new_requests=[request],
        finished_req_ids={"earlier"},
        num_to_propose=NUM_DRAFTS,
        kv_connector_metadata="prompt",
    )


def decode(step: int = 1, num_drafts: int = 0) -> SchedulerOutput:
    width = 1 + num_drafts
    return SchedulerOutput(
        step,
        [0],
        [width],
        num_decodes=1,
        num_sampled=1,
        total_num_scheduled_tokens=width,
        num_drafts=num_drafts,
        awaited_step=step - 1,
        kv_connector_metadata="decode",
    )


def idle(step: int = 2) -> SchedulerOutput:
    return SchedulerOutput(
        step, [], [], 0, 0, 0, finished=[("r0", 0)], finished_req_ids={"r0"}, kv_connector_metadata="idle"
    )


# --- the contract ---------------------------------------------------------------------------------------------------

BEFORE = ["flush", "start"]
AFTER = ["save", "wait_for_save"]

PROMPT_ALONE = ["bind prompt", *BEFORE, "forward", "sample", *AFTER, "get_finished earlier", "clear"]
DECODE_ALONE = ["bind decode", *BEFORE, "forward", "sample", *AFTER, "get_finished", "clear"]
# a drafter writes KV of its own: nothing is final before it has run, and it runs in every step
PROMPT_DRAFTING = ["bind prompt", *BEFORE, "forward", "sample", "propose 3", *AFTER, "get_finished earlier", "clear"]
DECODE_DRAFTING = ["bind decode", *BEFORE, "forward", "sample", "propose", *AFTER, "get_finished", "clear"]
# on a rank that is not the last, the forward pass is the last writer
PROMPT_HANDED_ON = ["bind prompt", *BEFORE, "forward", *AFTER, "get_finished earlier", "clear"]
DECODE_HANDED_ON = ["bind decode", *BEFORE, "forward", *AFTER, "get_finished", "clear"]
# nothing new was written, so nothing needs to be waited for; but something may have come
IDLE = ["bind idle", *BEFORE, "wait_for_progress", "save", "get_finished r0", "clear"]

KINDS = ["v1", "v2"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_alone(kind: str, drafts: bool) -> None:
    rank = Rank(kind, drafts=drafts)
    assert rank.started == (["load_drafter", "register 3 layers"] if drafts else ["register 2 layers"])
    outputs = [rank.step(output) for output in (prefill(), decode(num_drafts=NUM_DRAFTS if drafts else 0), idle())]
    prompt, later = (PROMPT_DRAFTING, DECODE_DRAFTING) if drafts else (PROMPT_ALONE, DECODE_ALONE)
    assert rank.log.take() == prompt + later + IDLE
    assert outputs == [KVConnectorOutput(counters={"calls": 1})] * 3
    rank.runner.shutdown()
    assert rank.log.take() == ["shutdown"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_in_a_pipeline(kind: str, drafts: bool) -> None:
    ranks = [Rank(kind, drafts=drafts, pipeline=pipeline) for pipeline in local_pipeline(2)]
    assert ranks[0].started == ["register 1 layers"]
    assert ranks[1].started == (["load_drafter", "register 2 layers"] if drafts else ["register 1 layers"])
    for output in (prefill(), decode(num_drafts=NUM_DRAFTS if drafts else 0), idle()):
        assert [rank.step(output) for rank in ranks] == [KVConnectorOutput(counters={"calls": 1})] * 2
    prompt, later = (PROMPT_DRAFTING, DECODE_DRAFTING) if drafts else (PROMPT_ALONE, DECODE_ALONE)
    assert ranks[0].log.take() == PROMPT_HANDED_ON + DECODE_HANDED_ON + IDLE
    assert ranks[1].log.take() == prompt + later + IDLE


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_where_a_graph_is_replayed(drafts: bool) -> None:
    """Sampling and drafting are part of it, and still come before anything is saved."""
    rank = Rank("v2", drafts=drafts, device=RecordingDevice(has_graphs=True))
    num_drafts = NUM_DRAFTS if drafts else 0
    for output in (prefill(), decode(1, num_drafts)):  # they are captured here, which runs them
        rank.step(output)
    rank.log.take()
    rank.step(decode(2, num_drafts))
    rank.step(idle(3))
    assert rank.log.take() == (DECODE_DRAFTING if drafts else DECODE_ALONE) + IDLE
    assert isinstance(rank.runner, ModelRunnerV2)
    assert rank.runner.graphs.num_steps["uniform" if drafts else "decode"] == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2], ids=["alone", "pipeline"])
def test_kv_is_whole_when_it_is_saved(kind: str, size: int) -> None:
    """Nothing of a step is in the cache when loads begin, and everything is when it is saved: a drafter's too."""
    groups = local_pipeline(size)
    ranks = [Rank(kind, drafts=True, pipeline=pipeline) for pipeline in groups]
    for rank in ranks:
        rank.step(prefill())
        assert not any(rank.connector.is_written["start"])
        assert all(rank.connector.is_written["save"])


# --- something raises -----------------------------------------------------------------------------------------------

FAULTS = {
    # by the event that raises: what happens in a step with a drafter, on the last rank or alone
    "bind": ["bind!", "clear"],
    "flush": ["bind prompt", "flush!", "clear"],
    "start": ["bind prompt", "flush", "start!", "clear"],
    "forward": ["bind prompt", *BEFORE, "forward!", "clear"],
    "sample": ["bind prompt", *BEFORE, "forward", "sample!", "clear"],
    "propose": ["bind prompt", *BEFORE, "forward", "sample", "propose!", "clear"],
    "save": ["bind prompt", *BEFORE, "forward", "sample", "propose 3", "save!", "clear"],
    "wait_for_save": ["bind prompt", *BEFORE, "forward", "sample", "propose 3", "save", "wait_for_save!", "clear"],
    "get_finished": ["bind prompt", *BEFORE, "forward", "sample", "propose 3", *AFTER, "get_finished!", "clear"],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2], ids=["alone", "pipeline"])
@pytest.mark.parametrize("raising", FAULTS)
def test_whatever_raises_the_metadata_is_cleared(kind: str, size: int, raising: str) -> None:
    groups = local_pipeline(size)
    ranks = [
        Rank(kind, drafts=True, pipeline=group, raising=raising if group.is_last_rank else None) for group in groups
    ]
    for rank in ranks[:-1]:
        rank.step(prefill())
    with pytest.raises(FaultError, match=raising):
        ranks[-1].step(prefill())
    assert ranks[-1].log.take() == FAULTS[raising]
    assert ranks[-1].connector.metadata is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("raising", "expected"),
    [
        ("forward", ["bind prompt", *BEFORE, "forward!", "clear"]),
        ("save", ["bind prompt", *BEFORE, "forward", "save!", "clear"]),
    ],
)
def test_on_an_earlier_rank_too(kind: str, raising: str, expected: list[str]) -> None:
    rank = Rank(kind, drafts=True, pipeline=local_pipeline(2)[0], raising=raising)
    with pytest.raises(FaultError, match=raising):
        rank.step(prefill())
    assert rank.log.take() == expected
    assert rank.connector.metadata is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2], ids=["alone", "pipeline"])
@pytest.mark.parametrize(
    ("raising", "expected"),
    [
        ("start", ["bind idle", "flush", "start!", "clear"]),
        ("wait_for_progress", ["bind idle", *BEFORE, "wait_for_progress!", "clear"]),
        ("get_finished", ["bind idle", *BEFORE, "wait_for_progress", "save", "get_finished!", "clear"]),
    ],
)
def test_in_an_idle_step_too(kind: str, size: int, raising: str, expected: list[str]) -> None:
    groups = local_pipeline(size)
    for group in groups:
        rank = Rank(kind, drafts=True, pipeline=group, raising=raising)
        with pytest.raises(FaultError, match=raising):
            rank.step(idle())
        assert rank.log.take() == expected
        assert rank.connector.metadata is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("raising", [*FAULTS, "wait_for_progress"])
def test_clearing_never_hides_the_first_cause(kind: str, raising: str, caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(kind, drafts=True, raising=raising)
    rank.log.also_raising = "clear"
    with pytest.raises(FaultError, match=raising):
        rank.step(idle() if raising == "wait_for_progress" else prefill())
    assert rank.log.take()[-1] == "clear!"
    assert "could not clear the metadata" in caplog.text
    rank.runner.shutdown()
    assert rank.log.take() == ["shutdown"]


@pytest.mark.parametrize("kind", KINDS)
def test_clearing_that_raises_is_itself_a_cause(kind: str) -> None:
    rank = Rank(kind, drafts=False, raising="clear")
    with pytest.raises(FaultError, match="clear"):
        rank.step(prefill())


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_step_gives_rows_back(kind: str) -> None:
    rank = Rank(kind, drafts=False)
    output = prefill()
    output.new_requests[0].params = SamplingParams(logprobs=1)
    rank.step(output)
    rank.step(idle())
    if isinstance(rank.runner, ModelRunnerV1):
        assert rank.runner._host.requests[0] is None
    else:
        assert isinstance(rank.runner, ModelRunnerV2)
        assert rank.runner._sampler.variant == PLAIN

"""Runners of both kinds around a tiny model, without an engine: requests run in them from their prompts to their ends,
with drafts or without."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fleetfoot.assets import embedded_model_path
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.parsing import load_model_config
from fleetfoot.distributed.groups import SINGLE_PIPELINE_GROUP, Groups, PipelineGroup
from fleetfoot.fusion import plan_fusion
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.kernels.interface import Kernels
from fleetfoot.layers.context import ModelContext
from fleetfoot.models.interface import CausalLM
from fleetfoot.records.kv_layout import KVCacheSpec, KVLayout
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import EngineOutput, ModelRunnerOutput, PendingOutput, RowLogprobs, SchedulerOutput
from fleetfoot.runner.base import ModelRunner
from fleetfoot.runner.graphs import CaptureTable
from fleetfoot.runner.v1.pooling import PoolingModelRunner
from fleetfoot.runner.v1.runner import ModelRunnerV1
from fleetfoot.runner.v2.runner import ModelRunnerV2
from fleetfoot.scheduler.config import SchedulerConfig
from fleetfoot.scheduler.scheduler import Scheduler
from fleetfoot.speculative.drafter import NO_DRAFTING, DraftBatch, DraftSettings, build_speculation
from fleetfoot.speculative.find import find_drafter
from fleetfoot.weights.loading import ModelLoader
from tests.helpers.kernels import cpu_kernels
from tests.helpers.recording_device import RecordingDevice

STORY = embedded_model_path()
DRAFT = Path(__file__).parent.parent / "assets" / "story-draft"
NUM_DRAFTS = 3
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_max": 3},
    "draft_model": {"model": str(DRAFT), "num_speculative_tokens": NUM_DRAFTS},
    "eagle": {"method": "eagle", "num_speculative_tokens": NUM_DRAFTS},
}
"""Each ``speculative_config`` for STORY."""
MAX_NUM_SEQS = 6
MAX_MODEL_LEN = 96
BLOCK_SIZE = 8
FREQUENT = (1, 19, 34, 76, 204, 290, 336, 676, 689, 706, 764, 1868)
"""Tokens that the model repeats often."""
Execute = Callable[[SchedulerOutput], PendingOutput]


@dataclass
class ScriptedDrafter:
    """Proposes the continuation of every request, with some errors, and checks its input."""

    num_drafts: int = NUM_DRAFTS
    share_of_errors: float = 0.3
    kv_specs: tuple[KVCacheSpec, ...] = ()
    reads_hidden = True
    scripts: dict[int, list[int]] = field(default_factory=dict)
    """Row -> all tokens of its request, as they come without drafts."""
    num_proposals: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def load_model(self, target: CausalLM) -> None:
        assert target.is_last

    def bind_kv_caches(self, kv_caches: Sequence[torch.Tensor]) -> None:
        assert len(kv_caches) == len(self.kv_specs)

    def add_weights(self, store: object) -> None:
        """It has none."""

    def propose(self, batch: DraftBatch, num_drafts: int) -> torch.Tensor | None:
        if not num_drafts:
            return None
        proposals = []
        for index, row in enumerate(batch.rows.tolist()):
            script, position = self.scripts.get(row, []), int(batch.positions[index])
            if row >= 0 and position < min(len(script), int(batch.limits[index])):
                self._check(batch, index, script, position)
            proposal = [*script[position + 1 : position + 1 + num_drafts], *[-1] * num_drafts][:num_drafts]
            wrong = [self._random.random() < self.share_of_errors for _ in proposal]
            proposals.append([1 + token % 2000 if bad else token for token, bad in zip(proposal, wrong, strict=True)])
            self.num_proposals += 1
        return torch.tensor(proposals, dtype=torch.int32).view(-1, num_drafts)

    def _check(self, batch: DraftBatch, index: int, script: list[int], position: int) -> None:
        """The position of the request, from the batch."""
        first, last = int(batch.metadata.query_start_loc[index]), int(batch.last_index[index])
        positions = batch.metadata.positions[first : last + 1].tolist()
        assert int(batch.newest[index]) == script[position]
        assert positions[-1] == position - 1
        assert int(batch.input_ids[last]) == script[position - 1]
        assert batch.next_ids[first : last + 1].tolist() == [script[place + 1] for place in positions]


def configured_drafting(folder: Path, context: ModelContext, runner: str, speculative: dict[str, Any]) -> DraftSettings:
    """What a worker with this ``speculative_config`` builds for the model in ``folder``."""
    config = EngineConfig(speculative_config={"num_speculative_tokens": NUM_DRAFTS, **speculative})  # type: ignore[arg-type]
    found = find_drafter(config, load_model_config(folder), folder)
    fusion = () if found is None else plan_fusion(found.config, runner)
    assert context.max_positions is not None
    return build_speculation(config, found, context.max_positions - NUM_DRAFTS, context, fusion)


@dataclass(frozen=True, slots=True)
class WrappingLoader(ModelLoader):
    """Puts something around the model."""

    wrap: Callable[[CausalLM], CausalLM] = lambda model: model

    def load(self) -> CausalLM:
        return self.wrap(ModelLoader.load(self))


class CapturableAttention(SDPABackend):
    """For a device that plays graphs by running their work again."""

    is_capturable = True


def make_context(
    device: RecordingDevice | None = None,
    ops: Kernels | None = None,
    *,
    max_model_len: int = MAX_MODEL_LEN,
    pipeline: PipelineGroup = SINGLE_PIPELINE_GROUP,
) -> ModelContext:
    """The context of a model; its attention can be captured where the device has graphs."""
    attention = CapturableAttention() if device is not None and device.has_graphs else cpu_kernels().attention
    cpu, groups = torch.device("cpu"), Groups(pipeline=pipeline)
    return ModelContext(ops or cpu_kernels(), attention, torch.float32, cpu, max_model_len + NUM_DRAFTS, groups)


def make_runner(
    kind: str, draft_settings: DraftSettings = NO_DRAFTING, *, device: RecordingDevice | None = None,
    layers: range | None = None, folder: Path = DRAFT, ops: Kernels | None = None,
    wrap: Callable[[CausalLM], CausalLM] = lambda model: model, num_blocks: int = 64, max_num_seqs: int = MAX_NUM_SEQS,
    max_num_batched_tokens: int = 64, max_model_len: int = MAX_MODEL_LEN,
    pipeline: PipelineGroup = SINGLE_PIPELINE_GROUP, **options: Any,
) -> Any:  # fmt: skip
    """A runner, ``v1``, ``v2`` or ``pooling``, ready for steps. Only V2 takes a device; ``wrap``: given the model,
    returns what the runner takes for it; ``options``: of `ModelRunner`."""
    config = load_model_config(folder)
    context = make_context(device, ops, max_model_len=max_model_len, pipeline=pipeline)
    loader = WrappingLoader(config, context, folder, layers=layers, wrap=wrap)
    options |= {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "draft_settings": draft_settings}
    runner: ModelRunner
    if kind != "v2":
        runner = (PoolingModelRunner if kind == "pooling" else ModelRunnerV1)(loader, **options)
    else:
        table = CaptureTable.of(
            device="cuda",
            enforce_eager=device is None or not device.has_graphs,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_drafts=draft_settings.num_drafts,
            most_full_tokens=max_num_batched_tokens,
        )
        options |= {"max_num_batched_tokens": max_num_batched_tokens, "capture_table": table, "device": device}
        runner = ModelRunnerV2(loader, fusion=plan_fusion(config, "v2"), **options)
    runner.load_model()
    layout = KVLayout.of(config, num_blocks, BLOCK_SIZE, "float32", layers=layers)
    if draft_settings.drafter is not None:
        layout = layout.with_layers(draft_settings.drafter.kv_specs)
    runner.initialize_kv_cache(layout)
    if isinstance(runner, ModelRunnerV2) and device is not None:
        with torch.inference_mode():
            runner.capture_graphs()
        device.counts.clear()
        device.events.clear()
    return runner


def in_one_runner(runner: ModelRunner) -> Execute:
    """Both halves of a step, one behind the other."""

    def execute(output: SchedulerOutput) -> PendingOutput:
        runner.execute_model(output)
        return runner.sample_tokens(None)

    return execute


def make_scheduler(num_drafts: int = 0, *, budget: int = 64, controller: Any = None, **limits: Any) -> Scheduler:
    limits = {"num_blocks": 64, "max_num_seqs": MAX_NUM_SEQS, "num_lookahead": num_drafts, **limits}
    config = SchedulerConfig(block_size=BLOCK_SIZE, max_num_batched_tokens=budget, num_drafts=num_drafts, **limits)
    return Scheduler(config) if controller is None else Scheduler(config, controller=controller)


class TakenStep(NamedTuple):
    """A step after the scheduler has processed its output."""

    scheduled: SchedulerOutput
    output: ModelRunnerOutput
    results: list[EngineOutput]


def run_steps(scheduler: Scheduler, execute: Execute, *, depth: int = 0) -> Iterator[TakenStep]:
    """Until every request has ended, in lockstep or with ``depth`` steps queued ahead."""
    queue: list[tuple[SchedulerOutput, PendingOutput]] = []
    while scheduler.has_unfinished or queue:
        scheduled = scheduler.schedule()
        if scheduled is not None:
            queue.append((scheduled, execute(scheduled)))
        if queue and (len(queue) > depth or scheduled is None):
            oldest, pending = queue.pop(0)
            output = pending.get()
            yield TakenStep(oldest, output, scheduler.update(oldest, output))
    scheduler.check_idle()


def queue_step(scheduler: Scheduler, execute: Execute) -> tuple[SchedulerOutput, PendingOutput]:
    """One step, without `Scheduler.update`."""
    scheduled = scheduler.schedule()
    assert scheduled is not None
    return scheduled, execute(scheduled)


def take_steps(scheduler: Scheduler, execute: Execute, count: int) -> None:
    """So many steps, one after the other."""
    for _ in range(count):
        scheduled, pending = queue_step(scheduler, execute)
        scheduler.update(scheduled, pending.get())


@dataclass
class Life:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)


def params_of(number: int) -> SamplingParams:
    """Of request ``number``, 0 to 9. The last one is as long as the model's sequences may be."""
    every: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.7, "frequency_penalty": 0.7, "logprobs": 2},
        {"temperature": 0.0, "bad_words": ["a pair"], "logprobs": 0},
        {"temperature": 0.6, "logit_bias": {300 + token: 2.0 for token in range(40)}},
        {"temperature": 0.0, "repetition_penalty": 1.1},
        {"temperature": 0.0, "min_tokens": 13, "ignore_eos": False},
        {"temperature": 0.0},
    ]
    max_tokens = 7 + 5 * number if number < 9 else MAX_MODEL_LEN - prompt_length(9)
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **every[number]})


def prompt_length(number: int) -> int:
    return 3 + 9 * number % 40


def requests_of(params: list[SamplingParams], prompts: list[list[int]] | None = None) -> list[Request]:
    """``r0``, ``r1``, ... with these prompts, or some of many lengths."""
    numbers = range(len(params))
    prompts = prompts or [[20 + 7 * n + place % 5 for place in range(prompt_length(n))] for n in numbers]
    return [
        Request(
            f"r{number}",
            prompt,
            one,
            max_tokens=one.max_tokens or 16,
            seed=number,
            eos_token_ids=frozenset(FREQUENT),
            bad_words_token_ids=[[token, token] for token in FREQUENT] if one.bad_words else [],
        )
        for number, (prompt, one) in enumerate(zip(prompts, params, strict=True))
    ]


def live(
    execute: Execute, params: list[SamplingParams], *, scheduler: Scheduler | None = None,
    drafter: ScriptedDrafter | None = None, expected: dict[str, Life] | None = None, depth: int = 0,
    prompts: list[list[int]] | None = None,
) -> dict[str, Life]:  # fmt: skip
    """Run `requests_of` to their end, with ``depth`` steps queued ahead; ``expected`` scripts the drafter."""
    scheduler = scheduler or make_scheduler(0 if drafter is None else NUM_DRAFTS)
    lives: dict[str, Life] = {}
    requests: dict[int, Request] = {}
    for request in requests_of(params, prompts):
        lives[request.request_id] = Life()
        scheduler.add_request(request)
        requests[request.sequence_number] = request

    def script_and_execute(output: SchedulerOutput) -> PendingOutput:
        for new in output.new_requests:
            if drafter is not None and expected is not None:
                drafter.scripts[new.row] = expected[new.request_id].token_ids
        return execute(output)

    for step in run_steps(scheduler, script_and_execute, depth=depth):
        for result in step.results:
            life = lives[requests[result.number].request_id]
            life.token_ids = list(requests[result.number].token_ids)
            life.logprobs += map(RowLogprobs.unpack, (result.logprobs or [])[: len(result.new_token_ids)])
    return lives


def assert_same(got: dict[str, Life], expected: dict[str, Life], *, tolerance: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for name, life in expected.items():
        assert got[name].token_ids == life.token_ids, name
        assert len(got[name].logprobs) == len(life.logprobs), name
        for ours, theirs in zip(got[name].logprobs, life.logprobs, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=tolerance)

"""Runners of both kinds around a tiny model, without an engine: requests live in them from their prompts to their ends,
with drafts or without."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from fleetfoot.config.parsing import load_model_config
from fleetfoot.distributed.groups import SINGLE_PIPELINE_GROUP, PipelineGroup
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.kernels.interface import Kernels
from fleetfoot.layers.context import ModelContext
from fleetfoot.models.interface import CausalLM
from fleetfoot.records.kv_layout import KVCacheSpec, KVLayout
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import PendingOutput, RowLogprobs, SchedulerOutput
from fleetfoot.runner.base import ModelRunner
from fleetfoot.runner.graphs import CaptureTable
from fleetfoot.runner.step_connector import StepConnector
from fleetfoot.runner.v1.runner import ModelRunnerV1
from fleetfoot.runner.v2.runner import ModelRunnerV2
from fleetfoot.scheduler.config import SchedulerConfig
from fleetfoot.scheduler.scheduler import Scheduler
from fleetfoot.speculative.drafter import NO_DRAFTING, DraftBatch, DraftSettings
from fleetfoot.weights.loading import ModelLoader
from tests.helpers.kernels import cpu_kernels
from tests.helpers.recording_device import RecordingDevice
from tests.helpers.steps import Execute, run_steps

DRAFT = Path(__file__).parent.parent / "assets" / "story-draft"
NUM_DRAFTS = 3
MAX_NUM_SEQS = 6
MAX_MODEL_LEN = 96
BLOCK_SIZE = 8
FREQUENT = (1, 19, 34, 76, 204, 290, 336, 676, 689, 706, 764, 1868)
"""Tokens that the model says again and again."""


@dataclass
class ScriptedDrafter:
    """Knows how every request will go on, and proposes that with some errors. Checks what it is told."""

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

    def propose(self, batch: DraftBatch, num_drafts: int) -> torch.Tensor | None:
        if not num_drafts:
            return None
        proposals = []
        for index, row in enumerate(batch.rows.tolist()):
            script = self.scripts.get(row, [])
            position = int(batch.positions[index])
            if row >= 0 and script and position < len(script) and position < int(batch.limits[index]):
                self._check(batch, index, script, position)
            proposal = [*script[position + 1 : position + 1 + num_drafts], *[-1] * num_drafts][:num_drafts]
            wrong = [self._random.random() < self.share_of_errors for _ in proposal]
            proposals.append(
                [1 + token % 2000 if is_wrong else token for token, is_wrong in zip(proposal, wrong, strict=True)]
            )
            self.num_proposals += 1
        return torch.tensor(proposals, dtype=torch.int32).view(-1, num_drafts)

    def _check(self, batch: DraftBatch, index: int, script: list[int], position: int) -> None:
        """Where the request stands, seen from the batch."""
        assert int(batch.newest[index]) == script[position]
        last = int(batch.last_index[index])
        assert int(batch.metadata.positions[last]) == position - 1
        assert int(batch.input_ids[last]) == script[position - 1]
        first = int(batch.metadata.query_start_loc[index])
        known = range(first, last + 1)
        expected = [script[int(batch.metadata.positions[token]) + 1] for token in known]
        assert [int(batch.next_ids[token]) for token in known] == expected


@dataclass(frozen=True, slots=True)
class WrappingLoader(ModelLoader):
    """Puts something around the model."""

    wrap: Callable[[CausalLM], CausalLM] = lambda model: model

    def load(self) -> CausalLM:
        return self.wrap(ModelLoader.load(self))


class Whims:
    """A controller of drafts that changes its mind all the time."""

    off_reason = "a whim"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, num_decodes: int) -> int:
        return self._random.choice((NUM_DRAFTS, 0))

    def observe(self, *_: object) -> None:
        pass


class CapturableAttention(SDPABackend):
    """For a device that plays graphs by running their work again."""

    is_capturable = True


def make_context(
    device: RecordingDevice | None = None, ops: Kernels | None = None, *, max_model_len: int = MAX_MODEL_LEN
) -> ModelContext:
    """What a model's layers run on: its attention can be captured where the device has graphs."""
    has_graphs = device is not None and device.has_graphs
    attention = CapturableAttention() if has_graphs else cpu_kernels().attention
    positions = max_model_len + NUM_DRAFTS
    return ModelContext(ops or cpu_kernels(), attention, torch.float32, torch.device("cpu"), positions)


def make_runner(
    kind: str,
    draft_settings: DraftSettings = NO_DRAFTING,
    *,
    device: RecordingDevice | None = None,
    connector: StepConnector | None = None,
    pipeline: PipelineGroup = SINGLE_PIPELINE_GROUP,
    layers: range | None = None,
    folder: Path = DRAFT,
    ops: Kernels | None = None,
    wrap: Callable[[CausalLM], CausalLM] = lambda model: model,
    num_blocks: int = 64,
    max_model_len: int = MAX_MODEL_LEN,
) -> ModelRunner:
    """A runner, ready for steps.

    Args:
        kind: ``v1`` or ``v2``.
        device: of V2 alone.
        layers: the rank's part of the model; None: all.
        folder: of the checkpoint.
        ops: None: those of the CPU.
        wrap: given the model, returns what the runner takes for it.
    """
    config = load_model_config(folder)
    context = make_context(device, ops, max_model_len=max_model_len)
    loader = WrappingLoader(config, context, folder, layers=layers, wrap=wrap)
    runner: ModelRunner
    if kind == "v1":
        runner = ModelRunnerV1(
            loader,
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=max_model_len,
            draft_settings=draft_settings,
            connector=connector,
            pipeline=pipeline,
        )
    else:
        runner = ModelRunnerV2(
            loader,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=64,
            max_model_len=max_model_len,
            capture_table=CaptureTable.of(
                device="cuda",
                enforce_eager=not (device is not None and device.has_graphs),
                max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=64,
                num_drafts=draft_settings.num_drafts,
            ),
            device=device,
            draft_settings=draft_settings,
            connector=connector,
            pipeline=pipeline,
        )
    runner.load_model()
    layout = KVLayout.of(config, num_blocks, BLOCK_SIZE, "float32", layers=layers)
    if draft_settings.drafter is not None:
        layout = layout.with_layers(draft_settings.drafter.kv_specs)
    runner.initialize_kv_cache(layout)
    return runner


@dataclass
class Life:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)


def wishes(number: int) -> SamplingParams:
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


def requests_of(params: list[SamplingParams]) -> list[Request]:
    """``r0``, ``r1``, ... with prompts of many lengths."""
    return [
        Request(
            f"r{number}",
            [20 + 7 * number + place % 5 for place in range(prompt_length(number))],
            wish,
            max_tokens=wish.max_tokens or 16,
            seed=number,
            eos_token_ids=frozenset(FREQUENT),
            bad_words_token_ids=[[token, token] for token in FREQUENT] if wish.bad_words else [],
        )
        for number, wish in enumerate(params)
    ]


def live(
    execute: Execute,
    params: list[SamplingParams],
    *,
    num_drafts: int = 0,
    scripts: dict[str, list[int]] | None = None,
    drafter: ScriptedDrafter | None = None,
    budget: int = 64,
    depth: int = 0,
    num_stages: int = 1,
    scheduler: Scheduler | None = None,
) -> dict[str, Life]:
    """Run requests to their end, in lockstep or with ``depth`` steps queued ahead.

    Args:
        execute: runs a step; see `in_one_runner`.
        scripts: of each request, for ``drafter``.
        scheduler: made anew if it is None.
    """
    if scheduler is None:
        lookahead = num_drafts if drafter is not None else 0
        scheduler = Scheduler(
            SchedulerConfig(
                64, 8, MAX_NUM_SEQS, budget, num_drafts=num_drafts, num_lookahead=lookahead, num_stages=num_stages
            )
        )
    lives: dict[str, Life] = {}
    for request in requests_of(params):
        lives[request.request_id] = Life()
        scheduler.add_request(request)

    def tell_and_execute(output: SchedulerOutput) -> PendingOutput:
        for new in output.new_requests:
            if drafter is not None and scripts is not None:
                drafter.scripts[new.row] = scripts[new.request_id]
        return execute(output)

    for step in run_steps(scheduler, tell_and_execute, depth=depth):
        for result in step.results:
            life = lives[result.request.request_id]
            life.token_ids = list(result.request.token_ids)
            life.logprobs += step.output.logprobs.get(result.index, [])[: len(result.new_token_ids)]
    scheduler.check_idle()
    return lives


def in_one_runner(runner: ModelRunner) -> Execute:
    """Both halves of a step, one behind the other."""

    def execute(output: SchedulerOutput) -> PendingOutput:
        runner.execute_model(output)
        return runner.sample_tokens(None)

    return execute


def assert_same(got: dict[str, Life], expected: dict[str, Life], *, tolerance: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for name, life in expected.items():
        assert got[name].token_ids == life.token_ids, name
        assert len(got[name].logprobs) == len(life.logprobs), name
        for ours, theirs in zip(got[name].logprobs, life.logprobs, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=tolerance)

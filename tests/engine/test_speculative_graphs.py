"""Verifying and drafting inside one graph, for every method, and what is outside of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.test_drafters import BLOCK_SIZE, MAX_NUM_SEQS, NUM_DRAFTS, SMALL, STORY, Kind, make_runner
from tests.helpers.no_values import NoValues
from tests.helpers.recording_device import RecordingDevice
from torch.utils._python_dispatch import _disable_current_modes

from fleetfoot.kernels.interface import Kernels
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.runner.graphs import GraphKey
from fleetfoot.runner.v2.runner import ModelRunnerV2
from fleetfoot.sampling.shape import SamplingVariant
from fleetfoot.scheduler.config import SchedulerConfig
from fleetfoot.scheduler.drafting import ConstantDrafts
from fleetfoot.scheduler.scheduler import Scheduler
from fleetfoot.tokenizer.tokenizer import Tokenizer

METHODS = pytest.mark.parametrize(
    "kind",
    [Kind(STORY, "ngram"), Kind(STORY, "small"), Kind(SMALL, "self"), Kind(STORY, "eagle")],
    ids=["ngram", "draft_model", "itself", "eagle"],
)
ONE_STEP = {"copy_in": 1, "replay": 1, "copy_out": 1}
EDITED = {"temperature": 0.8, "repetition_penalty": 1.2, "logit_bias": {30: 1.0}, "logprobs": 2}
OPENING = "Pip the mouse, Pip the mouse, Pip"


def unwatched(ops: Kernels) -> Kernels:
    """Draws under filters look at values on a CPU, where kernels that do not stand for them on a GPU."""

    def sample(*args: Any, **kwargs: Any) -> torch.Tensor:
        with _disable_current_modes():
            return ops.sample(*args, **kwargs)

    return replace(ops, sample=sample)


def run_steps(
    runner: ModelRunnerV2,
    device: RecordingDevice,
    num_steps: int,
    *,
    controller: ConstantDrafts | None = None,
    **wishes: Any,
) -> list[tuple[int, Counter[str]]]:
    """Three requests: for each step, drafts that it verified, and what the host asked of the device."""
    config = SchedulerConfig(128, BLOCK_SIZE, MAX_NUM_SEQS, 64, num_drafts=NUM_DRAFTS, num_lookahead=NUM_DRAFTS)
    scheduler = Scheduler(config, controller=controller or ConstantDrafts(NUM_DRAFTS))
    prompt = Tokenizer.from_path(STORY).encode(OPENING)
    params = SamplingParams(**{"max_tokens": 100, "ignore_eos": True, "temperature": 0.0, **wishes})
    for number in range(3):
        scheduler.add_request(Request(f"r{number}", prompt, params, max_tokens=100, seed=number))
    steps = []
    for _ in range(num_steps):
        output = scheduler.schedule()
        assert output is not None
        device.counts.clear()
        runner.execute_model(output)
        pending = runner.sample_tokens(None)
        steps.append((output.num_drafts, Counter(device.counts)))
        scheduler.update(output, pending.get())
    return steps


@METHODS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_steady_step_is_one_copy_in_one_replay_and_one_copy_out(kind: Kind, temperature: float) -> None:
    device = RecordingDevice(has_graphs=True)
    runner = make_runner(kind, device=device)
    runner.warm_up()
    steps = run_steps(runner, device, 14, temperature=temperature)
    assert steps[0][0] == 0  # the prompts
    for num_drafts, counts in steps[1:]:  # captured before the first request came
        assert num_drafts == NUM_DRAFTS
        assert counts == ONE_STEP
    assert runner.graphs.num_steps == {"eager": 1, "uniform": 13}


@METHODS
@pytest.mark.parametrize("wishes", [{"temperature": 1.0}, EDITED], ids=["plain", "edited"])
def test_nothing_in_a_graph_depends_on_a_value(
    kind: Kind, wishes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = RecordingDevice(has_graphs=True)
    monkeypatch.setattr(NoValues, "num_operations", 0)
    capture = device.capture

    def strict(work: Callable[[], Any]) -> Any:
        def watched() -> Any:
            with NoValues():
                return work()

        return capture(watched)

    monkeypatch.setattr(device, "capture", strict)
    runner = make_runner(kind, device=device)
    run_steps(runner, device, 6, **wishes)
    assert NoValues.num_operations > 100
    assert runner.graphs.num_steps["uniform"] == 5


def test_what_no_graph_can_hold_is_refused() -> None:
    numbers = torch.arange(4)
    for ask in (lambda: numbers[0].item(), lambda: numbers[numbers > 1], lambda: torch.equal(numbers, numbers)):
        with pytest.raises(AssertionError, match="aten"), NoValues():
            ask()


@METHODS
def test_all_that_a_request_may_want_is_in_the_graph(kind: Kind) -> None:
    device = RecordingDevice(has_graphs=True)
    runner = make_runner(kind, device=device)
    steps = run_steps(runner, device, 8, **EDITED)
    for num_drafts, counts in steps[3:]:
        assert num_drafts == NUM_DRAFTS
        assert counts == {**ONE_STEP, "copy_out": 2}  # the logprobs
    variants = {key.sampling for key in runner.graphs.captured if key.kind == "uniform"}
    assert variants == {SamplingVariant(logits_processors=True, logprobs=32)}


@METHODS
def test_very_many_logprobs_are_verified_behind_the_graph(kind: Kind) -> None:
    """The forward pass is a graph; sampling, verification and drafting are queued behind it."""
    device = RecordingDevice(has_graphs=True)
    runner = make_runner(kind, device=device)
    steps = run_steps(runner, device, 8, **{**EDITED, "logprobs": -1})
    for num_drafts, counts in steps[3:]:
        assert num_drafts == NUM_DRAFTS
        assert counts == {**ONE_STEP, "copy_out": 2}
    assert {key.sampling for key in runner.graphs.captured if key.kind == "uniform"} == {None}


@METHODS
def test_steps_without_drafts_are_graphs_too(kind: Kind) -> None:
    """Where drafting is off, a drafter still fills its KV cache, in the same graph."""
    device = RecordingDevice(has_graphs=True)
    runner = make_runner(kind, device=device)
    steps = run_steps(runner, device, 8, controller=ConstantDrafts(0))
    for num_drafts, counts in steps[3:]:
        assert num_drafts == 0
        assert counts == ONE_STEP
    drafting = None if kind.drafter == "ngram" else 0
    assert GraphKey("decode", 4, 4, drafting=drafting) in runner.graphs.captured

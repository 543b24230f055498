"""Runners of both kinds, alone and in pipelines: whatever is proposed, a request gets the tokens of Model Runner V1."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import runner_lives as lives
from tests.helpers.kernels import cpu_kernels
from tests.helpers.recording_device import NoValues, StrictDevice, unwatched

from fleetfoot.assets import embedded_eagle_path
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.scheduler.drafting import DraftController
from fleetfoot.tokenizer.tokenizer import Tokenizer

DRAFTERS: dict[str, tuple[Path, dict[str, Any]]] = {
    "ngram": (lives.STORY, {"method": "ngram", "prompt_lookup_max": 3}),
    "small": (lives.STORY, {"model": str(lives.DRAFT)}),
    "self": (lives.DRAFT, {"model": str(lives.DRAFT)}),
    "eagle": (lives.STORY, {"method": "eagle"}),
}
"""The target, and the ``speculative_config``."""


def drafting_runner(drafter: str, kind: str = "v2", *, num_blocks: int = 128, **options: Any) -> Any:
    target, speculative = DRAFTERS[drafter]
    context = lives.make_context(options.get("device"), max_model_len=160)
    settings = lives.configured_drafting(target, context, kind, speculative)
    options = {"ops": cpu_kernels(), **options, "num_blocks": num_blocks, "max_model_len": 160}
    options["ops"] = unwatched(options["ops"])
    return lives.make_runner(kind, settings, folder=target, **options)


def test_the_head_ships_without_the_targets_matrices() -> None:
    assert (embedded_eagle_path() / "model.safetensors").stat().st_size < 1_200_000


ONE_STEP = {"copy_in": 1, "replay": 1, "copy_out": 1}
WITH_LOGPROBS = {**ONE_STEP, "copy_out": 2}
EDITED = {"temperature": 0.8, "repetition_penalty": 1.2, "logit_bias": {30: 1.0}, "logprobs": 2}


@pytest.mark.parametrize(
    ("drafter", "features", "num_drafts", "counts"),
    [
        *((drafter, {"temperature": 0.0}, lives.NUM_DRAFTS, ONE_STEP) for drafter in ("ngram", "small", "eagle")),
        ("ngram", {"temperature": 1.0}, lives.NUM_DRAFTS, ONE_STEP),
        # a forward pass that all samplers share, and this sampling with verification and drafting
        ("small", EDITED, lives.NUM_DRAFTS, {**WITH_LOGPROBS, "replay": 2}),
        # the forward pass is a graph; sampling, verification and drafting are queued behind it
        ("eagle", {**EDITED, "logprobs": -1}, lives.NUM_DRAFTS, WITH_LOGPROBS),
        # with drafting off, a drafter still fills its KV cache, in the same graph
        ("eagle", {"temperature": 0.0}, 0, ONE_STEP),
    ],
    ids=["greedy", "greedy, a model", "greedy, eagle", "random", "edited", "all logprobs", "off"],
)
def test_a_steady_step_is_one_copy_in_one_replay_and_one_copy_out(
    drafter: str,
    features: dict[str, Any],
    num_drafts: int,
    counts: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing in the graph depends on a value, and the host waits for nothing."""
    monkeypatch.setattr(NoValues, "num_operations", 0)
    device = StrictDevice()
    # layers one by one: operations within a chain of them would not be seen
    runner = drafting_runner(drafter, device=device, ops=replace(cpu_kernels(), layer_chain=None))
    scheduler = lives.make_scheduler(lives.NUM_DRAFTS, num_blocks=128, controller=DraftController(num_drafts))
    prompt = Tokenizer.from_path(lives.STORY).encode("Pip the mouse, Pip the mouse, Pip")
    params = SamplingParams(**{"max_tokens": 100, "ignore_eos": True, **features})
    for request in lives.requests_of([params] * 3, [prompt] * 3):
        scheduler.add_request(request)
    for step in range(8):
        device.counts.clear()
        output, pending = lives.queue_step(scheduler, lives.in_one_runner(runner))
        assert output.num_drafts == (num_drafts if step > 0 else 0)
        if step > 0:
            assert device.counts == counts
        scheduler.update(output, pending.get())
    assert NoValues.num_operations > 100
    assert runner.graphs.num_steps == {"mixed": 1, "uniform" if num_drafts else "decode": 7}

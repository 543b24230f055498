"""Model Runner V1 with the drafters that there are: tokens are those without, and many drafts are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.engines import make_engine, run_requests
from tests.helpers.kernels import cpu_kernels
from tests.helpers.runner_lives import (
    DRAFT,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    NUM_DRAFTS,
    assert_same,
    in_one_runner,
    live,
    make_runner,
)

from fleetfoot.assets import embedded_eagle_path, embedded_model_path
from fleetfoot.config.parsing import load_model_config
from fleetfoot.layers.context import ModelContext
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.scheduler.config import SchedulerConfig
from fleetfoot.scheduler.scheduler import Scheduler
from fleetfoot.scheduler.stats import SchedulerStats
from fleetfoot.speculative.draft_model import DraftModel
from fleetfoot.speculative.drafter import DraftSettings
from fleetfoot.tokenizer.tokenizer import Tokenizer
from fleetfoot.weights.loading import ModelLoader

STORY = embedded_model_path()
OPENINGS = ("Once there was a fox named", "One morning, the little bear", "Pip the mouse, Pip the mouse, Pip")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("num_blocks", "budget", "depth"),
    [(64, 64, 0), (64, 64, 1), (64, 26, 1), (16, 64, 0)],
    ids=["roomy", "overlapped", "chunked", "preempting"],
)
def test_a_model_that_drafts_for_itself_is_always_right(
    temperature: float, num_blocks: int, budget: int, depth: int
) -> None:
    params = [
        SamplingParams(max_tokens=20 + 5 * number, ignore_eos=True, temperature=temperature) for number in range(8)
    ]
    expected = live(in_one_runner(make_runner("v1")), params)
    positions = MAX_MODEL_LEN + NUM_DRAFTS
    context = ModelContext(cpu_kernels(), cpu_kernels().attention, torch.float32, torch.device("cpu"), positions)
    drafter = DraftModel(ModelLoader(load_model_config(DRAFT), context, DRAFT), NUM_DRAFTS)
    config = SchedulerConfig(num_blocks, 8, MAX_NUM_SEQS, budget, num_drafts=NUM_DRAFTS, num_lookahead=NUM_DRAFTS)
    scheduler = Scheduler(config)
    runner = make_runner("v1", DraftSettings(NUM_DRAFTS, drafter=drafter))
    assert_same(live(in_one_runner(runner), params, scheduler=scheduler, depth=depth), expected)
    stats = scheduler.stats()
    assert (stats.num_preemptions > 0) == (num_blocks < 64)
    # those behind a request's last token are the only ones that do not count
    assert stats.drafts.num_drafted - stats.drafts.num_accepted <= NUM_DRAFTS * len(params)
    if num_blocks == 64:  # as few steps as there can be
        assert stats.drafts.num_rows == sum(-(-(20 + 5 * i - 1) // (1 + NUM_DRAFTS)) for i in range(len(params)))


METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS},
    "draft_model": {"model": str(DRAFT), "num_speculative_tokens": NUM_DRAFTS},
    "eagle": {"method": "eagle", "model": str(embedded_eagle_path()), "num_speculative_tokens": NUM_DRAFTS},
}
WISHES = (
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, seed=3, max_tokens=31, ignore_eos=True, repetition_penalty=1.1),
    SamplingParams(temperature=0, max_tokens=25, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=1.0, seed=4, top_p=0.9, min_tokens=20, max_tokens=36),
)


def run(**settings: Any) -> tuple[dict[str, RequestOutput], SchedulerStats]:
    engine = make_engine(STORY, runner="v1", max_model_len=128, block_size=8, **settings)
    assert engine.runner_name == "v1"
    tokenizer = Tokenizer.from_path(STORY)
    requests = {
        f"{place}{number}": (tokenizer.encode(opening), wish)
        for place, opening in enumerate(OPENINGS)
        for number, wish in enumerate(WISHES)
    }
    outputs = run_requests(engine, requests)
    stats = engine.core.scheduler.stats()
    engine.shutdown()
    return outputs, stats


def rows_of(logprobs: Any) -> list[list[int]]:
    """Which tokens have logprobs, for each position."""
    return [sorted(row or ()) for row in logprobs or ()]


@pytest.fixture(scope="module")
def plain() -> dict[str, RequestOutput]:
    return run(num_gpu_blocks_override=128)[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["lockstep", "overlapped"])
def test_in_an_engine(method: str, async_scheduling: bool, plain: dict[str, RequestOutput]) -> None:
    outputs, stats = run(
        num_gpu_blocks_override=128, speculative_config=METHODS[method], async_scheduling=async_scheduling
    )
    for name, output in outputs.items():
        assert output.outputs[0].token_ids == plain[name].outputs[0].token_ids, name
        assert rows_of(output.outputs[0].logprobs) == rows_of(plain[name].outputs[0].logprobs)
        assert rows_of(output.prompt_logprobs) == rows_of(plain[name].prompt_logprobs)
    assert stats.drafts.num_drafted > 20
    assert stats.drafts.num_accepted > 5 or method == "ngram"  # these stories say little twice


@pytest.mark.parametrize("method", METHODS)
def test_with_a_connector(method: str, plain: dict[str, RequestOutput], tmp_path: Path) -> None:
    """KV that is offloaded under way, a drafter's too, is as good as what was computed here."""
    offload = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"num_cpu_blocks": 200},
    }
    outputs, stats = run(
        num_gpu_blocks_override=16, speculative_config=METHODS[method], kv_transfer_config=offload, max_num_seqs=4
    )
    assert {name: output.outputs[0].token_ids for name, output in outputs.items()} == {
        name: output.outputs[0].token_ids for name, output in plain.items()
    }
    assert stats.num_preemptions > 0
    assert stats.drafts.num_drafted > 20
    assert stats.drafts.num_accepted > 5 or method == "ngram"  # these stories say little twice

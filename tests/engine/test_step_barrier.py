"""When the barrier of a step is called: the contract of `fleetfoot.runner.step_barrier`. Every rank calls it once in
every step, in the same order. Steps that raise are in `tests.engine.test_connector_order`, ranks that are processes in
`tests.distributed.test_steps_of_ranks`."""

from array import array
from itertools import product
from typing import Any

import pytest
from tests.helpers.counting_barrier import CountingBarrier, steps_of, use_counting_barriers
from tests.helpers.engines import prompt_of
from tests.helpers.faulty_connector import HookedWorker, InjectedError
from tests.helpers.local_pipeline import local_pipeline
from tests.helpers.recording_device import RecordingDevice
from tests.helpers.runner_lives import NUM_DRAFTS, STORY, ScriptedDrafter, make_runner

from fleetfoot import LLM, SamplingParams
from fleetfoot.config.parsing import load_model_config
from fleetfoot.config.pooling import Pooling
from fleetfoot.config.sharding import pipeline_layers
from fleetfoot.records.pooling_params import PoolingParams
from fleetfoot.records.step import Agreement, NewRequest, SchedulerOutput, WarmUpOutput
from fleetfoot.runner.base import ModelRunner
from fleetfoot.runner.step_connector import StepConnector
from fleetfoot.runner.v2.warm_up import warm_up_steps
from fleetfoot.speculative.drafter import DraftSettings

RUNNERS = ("v1", "pooling", "v2", "v2 with graphs")
STAGES = {1: ("alone",), 3: ("first", "middle", "last")}
CELLS = [
    cell for cell in product(RUNNERS, STAGES, (False, True), (False, True)) if not (cell[0] == "pooling" and cell[2])
]


def make_ranks(kind: str, size: int, *, drafts: bool, has_connector: bool) -> dict[str, ModelRunner]:
    """A runner for each stage of a pipeline."""
    config, ranks = load_model_config(STORY), {}
    for pipeline in local_pipeline(size, config.hidden_size if "graphs" in kind else None):
        drafter = ScriptedDrafter() if pipeline.is_last_rank else None
        options: dict[str, Any] = {"pooling": Pooling("embed", config.hidden_size)} if kind == "pooling" else {}
        if kind.startswith("v2"):
            options["device"] = RecordingDevice(has_graphs="graphs" in kind)
        ranks[STAGES[size][pipeline.rank]] = make_runner(
            kind.partition(" ")[0],
            DraftSettings(NUM_DRAFTS, drafter=drafter) if drafts else DraftSettings(),
            connector=StepConnector(HookedWorker()) if has_connector else None,
            barrier=CountingBarrier(),
            pipeline=pipeline,
            layers=None if size == 1 else pipeline_layers(config, pipeline.rank, size),
            folder=STORY,
            **options,
        )
    return ranks


def life_of_a_request(num_drafts: int, *, is_pooled: bool) -> dict[str, SchedulerOutput]:
    """Its steps. The first samples nothing, so that a drafter only fills its cache."""
    params = SamplingParams(temperature=0)
    tokens = array("i", [5, 6, 7, 8, 9])
    request = NewRequest("r", 0, tokens, 5, 0, [0, 1, 2], params, 1, frozenset(), [], 60)
    request.pooling_params = PoolingParams() if is_pooled else None
    steps = {
        "chunk": SchedulerOutput(0, [0], [3], 0, 0, 3, new_requests=[request]),
        "rest": SchedulerOutput(1, [0], [2], 0, 1, 2, num_to_propose=num_drafts),
        "decode": SchedulerOutput(2, [0], [1 + num_drafts], 1, 1, 1 + num_drafts, num_drafts=num_drafts),
        "idle": SchedulerOutput(3, [], [], 0, 0, 0, finished=[("r", 0)], finished_req_ids={"r"}),
        "padding": SchedulerOutput(4, [], [], 0, 0, 0, agreement=Agreement(3)),
        "padding in a graph": SchedulerOutput(5, [], [], 0, 0, 0, agreement=Agreement(2, "decode")),
        "padding in a mixed graph": SchedulerOutput(6, [], [], 0, 0, 0, agreement=Agreement(16, "mixed")),
        "idle again": SchedulerOutput(7, [], [], 0, 0, 0),
    }
    steps["decode"].awaited_step = 1
    if is_pooled:
        del steps["decode"]
    return steps


@pytest.mark.parametrize(("kind", "size", "drafts", "has_connector"), CELLS)
def test_each_rank_calls_it_once_in_each_step(kind: str, size: int, drafts: bool, has_connector: bool) -> None:
    ranks = make_ranks(kind, size, drafts=drafts, has_connector=has_connector)
    steps = life_of_a_request(NUM_DRAFTS * drafts, is_pooled=kind == "pooling")
    if kind.startswith("v2"):
        steps = {f"warm-up {step.step}": step for step in warm_up_steps(64, 96, 8)} | steps
    expected = []
    for name, output in steps.items():
        expected.append(output.step)
        for stage, runner in ranks.items():
            if isinstance(output, WarmUpOutput):
                runner._run_warm_up_step(output)
                continue
            runner.execute_model(output)
            assert len(runner.barrier.steps) == len(expected) - 1, f"{stage} calls it before the end of {name}"
            runner.sample_tokens(None).get()
            assert runner.barrier.steps == expected, f"{stage}, {name}"


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_rank_whose_barrier_raises_takes_no_further_steps(kind: str) -> None:
    (runner,) = make_ranks(kind, 1, drafts=False, has_connector=True).values()
    first, second, *_ = life_of_a_request(0, is_pooled=kind == "pooling").values()
    assert isinstance(runner.barrier, CountingBarrier)
    runner.barrier.raise_at = first.step
    runner.execute_model(first)
    with pytest.raises(InjectedError):
        runner.sample_tokens(None)
    for call in (lambda: runner.execute_model(second), lambda: runner.sample_tokens(None)):
        with pytest.raises(RuntimeError, match=r"an earlier step has raised|without an execute_model"):
            call()
    assert runner.barrier.steps == []


ENGINES: dict[str, dict[str, Any]] = {
    "v1": {"model_runner": "v1"},
    "v2": {"model_runner": "v2"},
    "v2 with drafts": {
        "model_runner": "v2", "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
        "async_scheduling": True,
    },
    "v1 with a connector": {"model_runner": "v1", "kv_offloading_size": 0.01},
    "v2 with a connector": {"model_runner": "v2", "kv_offloading_size": 0.01},
}  # fmt: skip
"""Settings of engines in this process."""


@pytest.mark.parametrize("settings", ENGINES.values(), ids=ENGINES)
def test_pause_sleep_and_a_restart(settings: dict[str, Any], text_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts follow the scheduler's through all that an engine does between steps, the warm-up's steps before them."""
    use_counting_barriers(monkeypatch)
    sizes: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_num_seqs": 2, "device": "cpu", "dtype": "float32"}
    warm_up = [-2, -1] if settings["model_runner"] == "v2" else []
    prompts: list[Any] = [{"prompt_token_ids": prompt_of(length, 2048)} for length in (40, 9, 3)]
    with LLM(text_model, **sizes, **settings, enable_sleep_mode=True, on_error="restart") as llm:

        def check(first: int) -> int:
            """The steps of this worker since the first; returns how many there were."""
            count = llm.llm_engine.core.scheduler._step
            assert llm.collective_rpc(steps_of) == [warm_up + list(range(first, count))]
            return count

        def generate() -> None:
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)

        generate()
        count = check(0)
        llm.pause_generation()
        llm.resume_generation()
        generate()
        assert check(0) > count
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
        generate()
        count = check(0)
        with monkeypatch.context() as patch:
            patch.setattr(CountingBarrier, "raise_at", count + 2)
            generate()
        assert llm.llm_engine.stats().num_restarts == 1
        first = llm.collective_rpc(steps_of)[0][len(warm_up)]
        assert first > count + 2
        check(first)

"""The barrier of a step on ranks that are processes: see `tests.engine.test_step_barrier`. Here a barrier also meets
the other ranks', so that one that is missing ends the engine."""

from pathlib import Path
from typing import Any

import pytest
from tests.distributed.ranks import PROMPT, SMALL, pids_of
from tests.helpers.checkpoints import UNTRAINED, make_checkpoint
from tests.helpers.counting_barrier import counting, steps_of
from tests.helpers.processes import Watched

from fleetfoot import LLM, EngineDeadError, SamplingParams
from fleetfoot.executor.protocol import WorkerError

DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
PIPELINE, TENSOR = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}
DATA: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True, "max_model_len": 60}
PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
LIVES: dict[str, dict[str, Any]] = {
    "pipeline of V1": {**PIPELINE, "model_runner": "v1"},
    "pipeline of V2 with drafts": {**PIPELINE, **DRAFTS, "model_runner": "v2", "async_scheduling": True},
    "tensor ranks of V2": {**TENSOR, "model_runner": "v2", "async_scheduling": True},
    "pipeline that pools": {**PIPELINE, "task": "embed"},
    "data ranks of V1": {**DATA, "model_runner": "v1"},
    "data ranks of V2 with drafts": {**DATA, **DRAFTS, "model_runner": "v2", "async_scheduling": True},
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("experts")
    model_type, fields = UNTRAINED["qwen3-moe"]
    make_checkpoint(folder, model_type, **fields)
    return str(folder)


def sized(settings: dict[str, Any], experts: str) -> dict[str, Any]:
    """With a model."""
    return {**SMALL, **({"model": experts} if "data_parallel_size" in settings else {}), **settings}


def generate(llm: LLM, settings: dict[str, Any]) -> None:
    prompts: list[Any] = [{"prompt_token_ids": [*PROMPT * 9]}, {"prompt_token_ids": PROMPT}]
    if "task" in settings:
        llm.embed(prompts, use_tqdm=False)
    else:
        llm.generate(prompts, PARAMS, use_tqdm=False)


@pytest.mark.parametrize("settings", LIVES.values(), ids=LIVES)
def test_all_ranks_are_in_every_step(settings: dict[str, Any], experts: str, tmp_path: Path) -> None:
    """Through idle steps, a sleep and a restart, for which the second rank fails once."""
    faults = {
        "rank": 1,
        "raise_at": "wait_for_save",
        "on_call": 8 if "task" in settings else 60,
        "once": str(tmp_path / "once"),
    }
    kv = counting(tmp_path, **faults)
    sizes = sized(settings, experts)
    with LLM(**sizes, kv_transfer_config=kv, enable_sleep_mode=True, on_error="restart") as llm:
        warm_up = [-2, -1] if settings.get("model_runner") == "v2" else []
        first = 0
        for event in ("steps", "sleep", "failure", "restart"):
            if event == "sleep":
                llm.sleep()
                llm.wake_up()
            if event == "failure":
                while not (tmp_path / "once").exists():
                    generate(llm, settings)
                assert llm.llm_engine.stats().num_restarts == 1
                first = llm.collective_rpc(steps_of)[0][len(warm_up)]
            generate(llm, settings)
            steps = [*warm_up, *range(first, llm.llm_engine.core.scheduler._step)]
            assert llm.collective_rpc(steps_of) == [steps, steps], event


@pytest.mark.parametrize(
    ("way", "rank"),
    [
        ("pipeline of V2 with drafts", 0),
        ("pipeline of V2 with drafts", 1),
        ("tensor ranks of V2", 1),
        ("data ranks of V2 with drafts", 0),
    ],
)
def test_a_step_that_raises_on_one_rank_is_the_last_of_all(way: str, rank: int, experts: str, tmp_path: Path) -> None:
    """The others wait for it in the barrier at the latest, and end with the cause."""
    kv = counting(tmp_path, rank=rank, raise_at="save_kv", on_call=4)
    llm = LLM(**sized(LIVES[way], experts), kv_transfer_config=kv)
    workers = Watched(pids_of(llm.llm_engine).values())
    with pytest.raises(EngineDeadError) as caught:
        generate(llm, LIVES[way])
    workers.wait()
    assert isinstance(caught.value.__cause__, WorkerError)
    assert f"worker {rank} failed: InjectedError: injected at save_kv on rank {rank}" in str(caught.value)
    assert "Traceback (most recent call last)" in str(caught.value) and "faulty_connector.py" in str(caught.value)
    steps = [[int(line) for line in (tmp_path / str(each)).read_text().split()] for each in range(2)]
    last = steps[rank][-1]
    assert steps[rank] == [-2, -1, *range(last + 1)]
    assert steps[1 - rank] in (steps[rank], [*steps[rank], last + 1])

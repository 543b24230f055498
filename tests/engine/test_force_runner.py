"""`force_runner` wins over the environment, restores it, and is an error where it had no effect."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from fleetfoot import LLM, SamplingParams
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.env import USE_V2_MODEL_RUNNER
from fleetfoot.engine import engine as engine_module
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.resolve import resolve_plan
from fleetfoot.runner.v2.runner import ModelRunnerV2
from fleetfoot.testing import force_runner

RUNNERS = ("v1", "v2")


@pytest.fixture(params=[None, "0", "1", "nonsense"], ids=lambda value: f"holds-{value}")
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What the environment holds around the test."""
    if request.param is None:
        monkeypatch.delenv(USE_V2_MODEL_RUNNER, raising=False)
    else:
        monkeypatch.setenv(USE_V2_MODEL_RUNNER, request.param)
    return request.param


def start(**settings: object) -> LLM:
    return LLM(device="cpu", skip_tokenizer_init=True, max_num_seqs=2, num_gpu_blocks_override=16, **settings)


def runs() -> str:
    """Start an engine, run a request, and read which runner it was."""
    with start() as llm:
        (output,) = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        assert len(output.outputs[0].token_ids) >= 1
        assert llm.llm_engine.plan.explicit
        assert llm.llm_engine.plan.use_v2_model_runner == (llm.llm_engine.runner_name == "v2")
        return llm.llm_engine.runner_name


def is_as_before(held: str | None) -> bool:
    return os.environ.get(USE_V2_MODEL_RUNNER) == held and engine_module.resolve_plan is resolve_plan


@pytest.mark.parametrize("runner", RUNNERS)
def test_it_wins_and_restores_the_environment(runner: str, held: str | None) -> None:
    with force_runner(runner) as forced:
        assert runs() == runner
        assert os.environ[USE_V2_MODEL_RUNNER] == str(RUNNERS.index(runner))  # for processes that are started
        os.environ[USE_V2_MODEL_RUNNER] = "1"  # not by monkeypatch, which would put back what the block has set
        assert runs() == runner
    assert [plan.runner for plan in forced.plans] == [runner, runner]
    assert is_as_before(held)


def test_blocks_may_be_nested(held: str | None) -> None:
    with force_runner("v1"):
        with force_runner("v2"):
            assert runs() == "v2"
        assert runs() == "v1"
    assert is_as_before(held)


def test_as_a_decorator(held: str | None) -> None:
    @force_runner("v1")
    def first(suffix: str, *, times: int) -> str:
        """Its own."""
        return runs() + suffix * times

    @force_runner("v2")
    async def second() -> str:
        await asyncio.sleep(0)
        return runs()

    assert first("!", times=2) == "v1!!"
    assert first("", times=0) == "v1"  # again
    assert asyncio.run(second()) == "v2"
    assert first.__doc__ == "Its own."
    assert is_as_before(held)


def plan_only() -> None:
    engine_module.resolve_plan(EngineConfig(device="cpu"), Machine.detect())


def nested() -> None:
    """An engine counts for the innermost block alone."""
    with force_runner("v2"):
        runs()


@pytest.mark.parametrize("work", [plan_only, nested])
def test_without_an_engine_it_is_an_error(work: Callable[[], None], held: str | None) -> None:
    with pytest.raises(AssertionError, match=r"force_runner\('v1'\) had no effect: no engine"), force_runner("v1"):
        work()
    assert is_as_before(held)


@pytest.mark.parametrize("part", ["start_executor", "InputProcessor"])
def test_a_start_that_fails_does_not_count(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the workers have started, and after that."""
    monkeypatch.setattr(engine_module, part, mock.Mock(side_effect=RuntimeError("injected")))
    failed = pytest.raises(RuntimeError, match="injected")
    with pytest.raises(AssertionError, match="no engine has started"), force_runner("v1"), failed:
        start()


def test_an_engine_of_another_thread_counts() -> None:
    with force_runner("v1") as forced, ThreadPoolExecutor(1) as pool:
        assert pool.submit(runs).result() == "v1"
    assert [plan.runner for plan in forced.plans] == ["v1"]


@pytest.mark.parametrize(
    ("in_thread", "message"),
    [(False, r"\('v2'\) is in effect, and the engine runs on 'v1'"), (True, r"\('v2'\): 1 engine\(s\) ran on another")],
)
def test_the_runner_that_ran_counts_not_the_planned_one(
    in_thread: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers report V1 whatever the plan names, and the check of what was built is switched off."""
    monkeypatch.setattr(ModelRunnerV2, "name", "v1")
    monkeypatch.setattr("fleetfoot.executor.worker.check_parts", lambda *_: None)
    with pytest.raises(AssertionError, match=f"force_runner{message}"), force_runner("v2"):
        if not in_thread:
            start()
        with ThreadPoolExecutor(1) as pool:
            assert isinstance(pool.submit(start).exception(), AssertionError)  # which a thread may drop


def test_an_exception_is_raised_unchanged(held: str | None) -> None:
    with pytest.raises(KeyError, match="mine"), force_runner("v2"):
        raise KeyError("mine")
    assert is_as_before(held)
    with pytest.raises(ValueError, match="max_num_seqs is 0"), force_runner("v2"):
        LLM(max_num_seqs=0)
    assert is_as_before(held)


@pytest.mark.parametrize("settings", [{"runner": "v2"}, {"use_v2_model_runner": True}])
def test_a_setting_that_contradicts_it_is_an_error(settings: dict[str, object], held: str | None) -> None:
    (name,) = settings
    message = rf"force_runner\('v1'\) is in effect, and the engine would run on 'v2': .*{name} is .*Leave that"
    with pytest.raises(ValueError, match=message), force_runner("v1"):
        start(**settings)
    with force_runner("v2"), start(**settings) as llm:  # the same runner
        assert llm.llm_engine.runner_name == "v2"
    assert is_as_before(held)


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="runner is 'v3'; it can be 'v1' or 'v2'"):
        force_runner("v3")
    forced = force_runner("v1")
    with forced:
        with pytest.raises(RuntimeError, match="in use already"), forced:
            pass
        assert runs() == "v1"
    with forced:  # one after the other is fine
        assert runs() == "v1"

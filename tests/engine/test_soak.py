"""Short runs of ``benchmarks/soak.py``, which compares every output and what is left over, and that it would notice."""

import logging
from pathlib import Path
from typing import Any

import pytest
from benchmarks.soak import DRAFTERS, Checker, Faults, Live, Resources, own_temporary_folder, slope, soak
from benchmarks.soak_http import http_soak
from benchmarks.soak_oracle import Case, Oracle, WeightSets

from fleetfoot import RequestOutput
from fleetfoot.outputs import CompletionOutput, Logprob

pytestmark = pytest.mark.usefixtures("own_garbage")
DRAFT = Path(__file__).parents[1] / "assets" / "story-draft"


def test_every_output_is_that_of_the_weights_served(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1, "fleetfoot")  # records that are kept hold tracebacks, and these the engine
    settings = {"model_runner": "v2", "async_scheduling": True, "speculative_config": DRAFTERS["ngram"]}
    sizes = {"num_cases": 24, "num_weights": 2, "num_reports": 2, "num_live": 36, "seed": 1}
    report = soak(240, model=DRAFT, mean_steps=30, event_share=0.15, load_failures=0.5, **sizes, **settings)
    assert report["requests"] >= 240 and report["ends"].keys() <= {"abort", "length", "stop"}
    assert report["compared"] > 180 and report["cases_that_differ_with_each"] > 12
    happened = ("restarts", "preemptions", "loads", "update", "accepted_drafts", "refused", "pause")
    assert not [name for name in happened if not report.get(name)], report


def test_soak_over_http() -> None:
    report = http_soak(16, model=DRAFT, num_cases=4, num_weights=2, num_reports=2, event_every=5, seed=1)
    assert report["requests"] == 16 and report["compared"] > 8
    assert any(name.startswith("update_mode_") for name in report), report


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    case = Case([40, 50, 60], {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "logprobs": 1})
    oracle = Oracle(WeightSets(DRAFT, tmp_path_factory.mktemp("weights"), 2), [case])
    yield Checker(oracle)
    oracle.shutdown()


def changed(checker: Checker, number: int, **fields: Any) -> RequestOutput:
    """The output of weights ``number``, with other fields."""
    (whole,) = checker.oracle.output(0, number).outputs
    kept = {name: getattr(whole, name) for name in ("text", "token_ids", "logprobs", "finish_reason", "stop_reason")}
    seen = CompletionOutput(0, **{**kept, "weight_version": number, **fields})
    return RequestOutput("r", None, checker.oracle.cases[0].prompt, [seen], True)


@pytest.mark.parametrize(
    "fields",
    [
        {"weight_version": 0},
        {"weight_version": 2},
        {"token_ids": [9, 9, 9, 9]},
        {"text": "other"},
        {"finish_reason": "stop"},
        {"finish_reason": "error"},
        {"finish_reason": "abort"},
        {"stop_reason": "e"},
        {"logprobs": None},
        {"logprobs": [{9: Logprob(-0.1, 1, "x")}] * 4},
    ],
    ids=str,
)
def test_a_field_that_differs_is_noticed(fields: dict[str, Any], checker: Checker) -> None:
    checker.wrong, checker.numbers = [], {0: 0, 1: 1}
    checker.check("r", Live(0, 0), changed(checker, 1), 1)
    assert not checker.wrong
    checker.check("r", Live(0, 0), changed(checker, 1, **fields), 1)
    assert checker.wrong


def test_weights_that_change_within_an_output_are_replayed(checker: Checker) -> None:
    checker.wrong, checker.numbers = [], {0: 0, 1: 1}
    mixed = checker.oracle.replay(0, 0, [0, 0, 1, 1])
    first, second = (checker.oracle.output(0, number).outputs[0].token_ids for number in (0, 1))
    assert mixed.token_ids[:2] == first[:2] and mixed.token_ids not in (first, second)
    fields = {name: getattr(mixed, name) for name in ("text", "token_ids", "logprobs")}
    versions = {"weight_version": 1, "weight_versions": [0, 0, 1, 1]}
    checker.check("r", Live(0, 0), changed(checker, 1, **fields, **versions), 1)
    assert not checker.wrong
    checker.check("r", Live(0, 0), changed(checker, 1, **fields), 1)
    assert checker.wrong


def test_what_is_left_over_is_a_multiset(tmp_path: Path) -> None:
    with own_temporary_folder() as folder:
        before = Resources.now()
        with (tmp_path / "a").open("w"), (tmp_path / "b").open("w"):
            (folder / "fleetfoot-x").mkdir()
            after = Resources.now()
            left = after.left_over(before)
        assert left["descriptors"].total() == 2 and left["shared"].total() == 1
        assert "descriptors" not in before.left_over(after)


def test_the_slope_is_robust() -> None:
    samples = [(number * 1000, 5 * number * 1000) for number in range(20)]
    samples[7] = (7000, 10**9)
    assert slope(samples) == 5


def test_faults_spare_the_functions_of_holds() -> None:
    faults = Faults(0, load_failures=0, mean_steps=1)
    faults.is_held = True
    for _ in range(10):
        faults.strike()
    assert not faults.num_errors

"""Short runs of ``benchmarks/soak.py``, which compares every output and what is left over, and that it would notice."""

import logging
from pathlib import Path
from typing import Any

import pytest
from benchmarks.soak import DRAFTERS, Checker, Live, soak
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

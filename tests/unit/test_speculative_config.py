"""``speculative_config``: what it takes, what it fills in, and what it says to the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.speculative import SpeculativeConfig
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.resolve import resolve_plan

GIB = 1 << 30


def parse(**settings: Any) -> SpeculativeConfig:
    return SpeculativeConfig.parse({"num_speculative_tokens": 3, **settings})


def test_the_method_follows_from_the_model() -> None:
    assert parse().method == "ngram"
    assert parse(model="a/draft").method == "draft_model"
    assert parse(method="eagle").model is None
    assert SpeculativeConfig.parse('{"method": "eagle", "num_speculative_tokens": 2}').num_speculative_tokens == 2


@pytest.mark.parametrize(
    ("settings", "longest", "shortest"),
    [
        ({}, 5, 1),
        ({"prompt_lookup_max": 3}, 3, 1),
        ({"prompt_lookup_min": 2}, 5, 2),
        ({"prompt_lookup_min": 8}, 8, 8),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 4}, 4, 4),
    ],
)
def test_bounds_of_n_grams_are_filled_in(settings: dict[str, int], longest: int, shortest: int) -> None:
    config = parse(**settings)
    assert (config.prompt_lookup_max, config.prompt_lookup_min) == (longest, shortest)


def test_bounds_of_n_grams_stay_empty_elsewhere() -> None:
    assert parse(method="eagle").prompt_lookup_max is None
    assert parse(model="a/draft").prompt_lookup_min is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is missing or 0; it must be given"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1; it must be an integer of at least 1"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens is None"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"num_speculative_tokens": False}, "num_speculative_tokens is False"),
        ({"num_speculative_tokens": 2.0}, "num_speculative_tokens is 2.0"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens is 65; it can be at most 64"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max is 0"),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_min is 3 and prompt_lookup_max is 2"),
        ({"method": "eagle", "prompt_lookup_max": 3}, "prompt_lookup_max is 3, which means nothing for .*'eagle'"),
        ({"model": "a/draft", "prompt_lookup_min": 1}, "prompt_lookup_min is 1, which means nothing"),
        ({"method": "ngram", "model": "a/draft"}, "model is 'a/draft', and method 'ngram' takes none"),
        ({"method": "draft_model"}, "method 'draft_model' needs a model"),
        ({"method": "eagle3", "model": "a/head"}, "EAGLE-3 heads, .* are not supported; method 'eagle' takes"),
        ({"method": "medusa"}, "method is 'medusa'; it can be ngram, draft_model, eagle"),
        ({"disable_by_batch_size": 0}, "disable_by_batch_size is 0"),
        ({"disable_by_batch_size": "8"}, "disable_by_batch_size is '8'"),
        ({"adaptive": 1}, "adaptive is 1; it must be true or false"),
        ({"model": "[ngram]"}, r"model is '\[ngram\]', which is no model here; set method to 'ngram'"),
        ({"model": "ngram", "method": "ngram"}, "a folder of that name is './ngram'"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(**settings)


def test_num_speculative_tokens_cannot_be_left_out() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens is missing or 0"):
        EngineConfig(speculative_config={"method": "eagle"})  # type: ignore[arg-type]


def test_unknown_keys_are_refused_with_the_near_one() -> None:
    with pytest.raises(TypeError, match="did you mean 'disable_by_batch_size'"):
        parse(disable_by_batchsize=8)


def test_keys_of_vllm_are_refused_with_what_to_do() -> None:
    with pytest.raises(
        TypeError, match=r"'draft_tensor_parallel_size'; leave it out: .* each rank runs the whole drafter"
    ):
        parse(draft_tensor_parallel_size=1)


def test_a_path_may_name_the_model() -> None:
    assert parse(model=Path("a") / "draft").model == "a/draft"
    assert parse(model="./ngram").method == "draft_model"


def drafting(k: int, **settings: Any) -> EngineConfig:
    return EngineConfig(speculative_config={"num_speculative_tokens": k}, **settings)  # type: ignore[arg-type]


def test_a_step_must_hold_the_drafts_of_every_request() -> None:
    assert drafting(3, max_num_seqs=4, max_num_batched_tokens=16).max_decode_tokens == 16
    message = (
        r"max_num_batched_tokens is 15, .* 4 tokens, one and 3 drafts, .* max_num_seqs \(4\): raise it to 16, or set "
        "max_num_seqs=3"
    )
    with pytest.raises(ValueError, match=message):
        drafting(3, max_num_seqs=4, max_num_batched_tokens=15)
    with pytest.raises(ValueError, match=r"max_num_seqs \(2\): raise it to 8$"):  # no number of requests would help
        drafting(3, max_num_seqs=2, max_num_batched_tokens=3)


@pytest.mark.parametrize(("k", "tokens"), [(3, 2048), (64, 256 * 65)])
def test_a_step_of_the_default_size_does(k: int, tokens: int) -> None:
    plan = resolve_plan(drafting(k), Machine(64 * GIB), environ={}, config_only=True)
    assert plan.max_num_batched_tokens == tokens

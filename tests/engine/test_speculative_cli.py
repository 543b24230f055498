"""Drafts in the output of the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.engine.test_cli import GREEDY, SMALL, bench, generate

from fleetfoot.cli.main import main

Streams = pytest.CaptureFixture[str]
NGRAM = '{"method": "ngram", "num_speculative_tokens": 2, "adaptive": false}'
EAGLE = '{"method": "eagle", "num_speculative_tokens": 3, "adaptive": false}'


def test_generate(capsys: Streams) -> None:
    # drafts are verified in larger products, which in bfloat16 round the two most probable logits differently
    flags = ["--prompt", "Once there was a fox named", "--max-tokens", "40", *GREEDY, "--dtype", "float32", "--json"]
    assert generate(*flags, "--speculative-config", EAGLE) == 0
    out, err = capsys.readouterr()
    (content,) = json.loads(out)
    metrics = content["metrics"]
    # one token comes from the prompt's step and one from each later step
    num_steps = metrics["num_drafted_tokens"] // 3
    assert 40 <= 1 + num_steps + metrics["num_accepted_tokens"] < 44
    assert 20 < metrics["num_accepted_tokens"] < metrics["num_drafted_tokens"]
    assert f"drafts: {1 + metrics['num_accepted_tokens'] / num_steps:.2f} tokens a step, " in err

    assert generate(*flags) == 0
    out, err = capsys.readouterr()
    (plain,) = json.loads(out)
    assert plain["outputs"] == content["outputs"]
    assert plain["metrics"]["num_drafted_tokens"] == plain["metrics"]["num_accepted_tokens"] == 0
    assert "drafts" not in err


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_bench(capsys: Streams, tmp_path: Path, kind: str) -> None:
    if kind == "latency":
        load = ["--batch-size", "2", "--input-len", "8", "--num-iters", "2", "--num-warmup", "1"]
    else:
        (tmp_path / "prompts.txt").write_text("One morning, the little bear\nOnce there was a fox\n", encoding="utf-8")
        load = ["--prompts-file", str(tmp_path / "prompts.txt")]
    assert bench(kind, *load, "--output-len", "20", "--speculative-config", EAGLE) == 0
    out, err = capsys.readouterr()
    content = json.loads(out, parse_constant=pytest.fail)
    assert content["engine"]["config"]["speculative_config"]["method"] == "eagle"
    drafts = content["results"]["drafts"]
    assert 0 < drafts["num_accepted_tokens"] <= drafts["num_drafted_tokens"]
    assert drafts["num_drafted_tokens"] <= 3 * content["results"]["num_output_tokens"]
    assert len(drafts["acceptance_rate_at"]) == 3
    assert drafts["mean_acceptance_length"] == pytest.approx(1 + sum(drafts["acceptance_rate_at"]))
    assert drafts["off_reason"] is None
    assert f"\n drafts: {drafts['mean_acceptance_length']:.2f} tokens a step" in err


def test_bench_of_a_batch_that_is_too_large_for_drafts(capsys: Streams) -> None:
    config = json.dumps({**json.loads(NGRAM), "disable_by_batch_size": 1})
    load = ["--batch-size", "2", "--input-len", "8", "--output-len", "5", "--num-iters", "1", "--num-warmup", "0"]
    assert bench("latency", *load, "--speculative-config", config) == 0
    out, err = capsys.readouterr()
    drafts = json.loads(out)["results"]["drafts"]
    assert (drafts["num_steps"], drafts["acceptance_rate"]) == (0, None)
    assert drafts["off_reason"] == "more than 1 request"
    assert list(drafts["steps_without"]) == ["more than 1 request"]
    assert "drafts: none were verified; none in" in err


def test_bench_without_drafts(capsys: Streams) -> None:
    load = ["--batch-size", "1", "--input-len", "8", "--output-len", "2", "--num-iters", "1", "--num-warmup", "0"]
    assert main(["bench", "latency", *SMALL, *load]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["results"]["drafts"] is None
    assert "drafts" not in err

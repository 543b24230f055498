"""`fleetfoot verify`: both runners agree, and where one is made to stray, the place is named."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.commands import CommandRunner

from fleetfoot import LLMEngine
from fleetfoot.cli import verify
from fleetfoot.cli.verify import compare
from fleetfoot.outputs import CompletionOutput, Logprob, RequestOutput
from fleetfoot.records.step import ModelRunnerOutput, RowLogprobs
from fleetfoot.runner.v2.runner import ModelRunnerV2

pytestmark = pytest.mark.usefixtures("own_garbage")


class Command(CommandRunner):
    def verify(self, *flags: str, code: int = 0) -> Any:
        return self.json("verify", "--json", "--runners-only", *flags, code=code)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "--device", "cpu", "--num-gpu-blocks-override", "700", "--max-tokens", "6")


@pytest.fixture
def two_prompts(run: Command, tmp_path: Path) -> None:
    """Commands run 8 requests with 48 tokens together: two short prompts with each way of sampling."""
    path = tmp_path / "two.jsonl"
    path.write_text('{"prompt_token_ids": [5]}\n{"prompt_token_ids": [6, 7, 8]}\n')
    run.flags += ("--prompts-file", str(path))


def stray(monkeypatch: pytest.MonkeyPatch, step: int, change: Callable[[ModelRunnerOutput], None]) -> None:
    """Change what Model Runner V2 yields in one step that samples, warm-up left out."""
    sample_tokens, count = ModelRunnerV2.sample_tokens, iter(range(1, 10_000))

    def get(pending: Any) -> ModelRunnerOutput:
        output: ModelRunnerOutput = pending.get()
        if output.sampled_token_ids and next(count) == step:
            change(output)
        return output

    def changed(self: ModelRunnerV2, grammar: object) -> SimpleNamespace:
        return SimpleNamespace(get=partial(get, sample_tokens(self, grammar)))

    monkeypatch.setattr(ModelRunnerV2, "sample_tokens", changed)


def test_other_paths_and_float32_are_compared(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    preemptions: list[int] = []
    shutdown, run_path = LLMEngine.shutdown, verify._run_all

    def spy(self: LLMEngine) -> None:
        preemptions.append(self.stats().scheduler.num_preemptions)
        shutdown(self)

    def changed(arguments: Any, *positional: Any, **settings: Any) -> Any:
        facts, outputs = run_path(arguments, *positional, **settings)
        if verify.given_settings(arguments).get("max_num_seqs") == 1:
            outputs[0].outputs[0].token_ids[2] ^= 1
        return facts, outputs

    monkeypatch.setattr(LLMEngine, "shutdown", spy)
    monkeypatch.setattr(verify, "_run_all", changed)
    report = run.json("verify", "--json", "--max-tokens", "8", code=1)
    assert report["equal"] and report["num_wrong_greedy"] == 0
    assert list(report["paths"]) == ["one request at a time", "prompts in chunks", "preempted"]
    alone, float32 = report["paths"]["one request at a time"], report["float32"]
    assert alone["num_different"] >= 1 and alone["largest_gap"] > 0  # more where the batch size changes a sum
    assert alone["share"] == alone["num_different"] / 32
    assert [path["num_wrong"] for path in report["paths"].values()] == [1, 0, 0] and preemptions[4] > 0
    assert float32["num_tokens"] == 8 * 8 and float32["num_different"] < 8 * 8 / 4
    assert (float32["largest_gap"] is None) == (float32["num_different"] == 0)


@pytest.mark.usefixtures("two_prompts")
def test_a_token_that_is_wrong_on_both_runners(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    run_path = verify._run_all

    def changed(*positional: Any, **settings: Any) -> Any:
        facts, outputs = run_path(*positional, **settings)
        outputs[4].outputs[0].token_ids[3] ^= 1
        return facts, outputs

    monkeypatch.setattr(verify, "_run_all", changed)
    out = run("verify", "--runners-only", code=1)
    assert "all 48 tokens are equal" in out and "WRONG: 2 greedy tokens are not the most probable" in out


def test_a_path_that_cannot_start_is_reported(run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_token_ids": [5, 6, 7]}')
    settings = {"chunks": {"max_num_seqs": 9, "max_num_batched_tokens": 8}}
    monkeypatch.setattr(verify, "_paths", lambda arguments, v2: settings)
    flags = ("--dtype", "float32", "--prompts-file", str(path))
    report = run.json("verify", "--json", *flags)
    assert report["equal"] and report["float32"] is None
    assert "max_num_batched_tokens is 8" in report["paths"]["chunks"]["error"]
    assert "chunks: not compared: max_num_batched_tokens is 8" in run("verify", *flags)


@pytest.mark.usefixtures("two_prompts")
def test_a_token_that_differs_is_named(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[int] = []

    def change(output: ModelRunnerOutput) -> None:
        tokens.append(output.sampled_token_ids[0][0])
        output.sampled_token_ids[0][0] ^= 1

    stray(monkeypatch, 3, change)
    report = run.verify(code=1)
    (difference,) = report["differences"]
    gap = difference["v1_gap"]
    tokens_and_gaps = {"v1_token": tokens[0], "v2_token": tokens[0] ^ 1, "v1_gap": gap, "v2_gap": gap}
    assert difference == {"request": 0, "position": 2, **tokens_and_gaps, "error": None}
    assert (report["equal"], report["first_difference"]) == (False, difference)
    assert gap > 0 and report["num_equal_tokens"] == 8 * 6 - 4

    tokens.clear()
    stray(monkeypatch, 3, change)
    out = run("verify", "--runners-only", code=1)
    assert "8 requests on cpu in bfloat16: 1 of them differ (44 tokens are equal)." in out
    assert "first: request 0 (prompt 0 of 1 token, greedy), output token 2: V1 " in out
    assert "the two most probable logprobs are apart by " in out


@pytest.mark.usefixtures("two_prompts")
def test_a_logit_that_differs_is_named(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(output: ModelRunnerOutput) -> None:
        row = RowLogprobs.unpack(output.logprobs[1][0])
        row.logprobs[1] += 0.25  # of the most probable token
        output.logprobs[1][0] = row.pack()

    stray(monkeypatch, 2, change)
    report = run.verify()
    assert report["equal"] is True
    largest = report["largest_logprob_difference"]
    assert largest["difference"] == pytest.approx(0.25)
    assert (largest["request"], largest["position"]) == (1, 1 + 1)  # of prompt and output together
    assert "all 48 tokens are equal." in run("verify", "--runners-only")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens is 0; it must be at least 1"),
        (["--max-model-len", "6"], "--max-tokens is 6, which leaves no room for a prompt"),
        (["--model-runner", "v1"], "unknown argument '--model-runner'"),
        (["--use-v2-model-runner"], "unknown argument '--use-v2-model-runner'"),
        (["--prompts-file", "/no/such/file"], "No such file"),
        (["/no/such/model"], "no such folder"),
        (["--enable-lora"], "LoRA adapters (enable_lora is on): "),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
    ],
    ids=str,
)
def test_what_cannot_be_verified(flags: list[str], message: str, run: Command) -> None:
    assert message in run.refused("verify", *flags)


def output(
    token_ids: list[int], logprobs: list[dict[int, float]] | None = None, prompt: list[int] | None = None, **more: Any
) -> RequestOutput:
    entries = None if logprobs is None else [{t: Logprob(p) for t, p in entry.items()} for entry in logprobs]
    completion = CompletionOutput(0, "", token_ids, logprobs=entries, **{"finish_reason": "length", **more})
    return RequestOutput("r", None, prompt or [1], [completion], finished=True)


def test_a_logprob_that_is_no_number_is_the_largest() -> None:
    v1 = [output([1, 2], [{1: -0.5}, {2: -0.5}])]
    v2 = [output([1, 2], [{1: float("nan")}, {2: -0.25}])]
    largest = compare(v1, v2)["largest_logprob_difference"]
    assert largest == {"difference": None, "request": 0, "position": 1, "token": 1}
    infinite = [output([1], [{1: 0.0, 2: -math.inf}])]
    assert compare(infinite, infinite)["largest_logprob_difference"]["difference"] == 0

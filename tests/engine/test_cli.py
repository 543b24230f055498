"""The commands with the embedded model, in this process: what goes to which stream, and how they end."""

from __future__ import annotations

import builtins
import io
import json
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from fleetfoot import LLM, LLMEngine, SamplingParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.cli.main import main
from fleetfoot.outputs import RequestOutput
from fleetfoot.tokenizer.tokenizer import Tokenizer

SMALL = ["--device", "cpu", "--num-gpu-blocks-override", "128", "--max-num-seqs", "4"]
GREEDY = ["--temperature", "0", "--ignore-eos"]
TOKENIZER = Tokenizer.from_path(embedded_model_path())
WORDS = TOKENIZER.encode(" the and was", add_special_tokens=False)
"""Allowed tokens in tests that compare lines: without line breaks, and with a unique encoding."""
ONLY_WORDS = ["--allowed-token-ids", *map(str, WORDS)]

Streams = pytest.CaptureFixture[str]


def generate(*flags: str) -> int:
    return main(["generate", *SMALL, *flags])


def chat(*flags: str) -> int:
    return main(["chat", *SMALL, *GREEDY, *ONLY_WORDS, *flags])


def bench(kind: str, *flags: str) -> int:
    return main(["bench", kind, *SMALL, *flags])


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Set what is piped in."""

    def pipe(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))

    yield pipe


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The prompts that reach the engine."""
    seen: list[Any] = []
    add_request = LLMEngine.add_request

    def spy(self: LLMEngine, request_id: str, prompt: Any, params: SamplingParams, **more: Any) -> None:
        add_request(self, request_id, prompt, params, **more)
        seen.append(prompt)

    monkeypatch.setattr(LLMEngine, "add_request", spy)
    return seen


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, do: Any, repeat: int = 1) -> None:
    """Call ``do`` inside the engine's step of this number, before it runs, and inside the next ``repeat - 1``."""
    step, count = LLMEngine.step, iter(range(1, 1_000_000))

    def stepping(self: LLMEngine) -> list[RequestOutput]:
        if number <= next(count) < number + repeat:
            do()
        return step(self)

    monkeypatch.setattr(LLMEngine, "step", stepping)


def copied_model(folder: Path) -> Path:
    shutil.copytree(embedded_model_path(), folder)
    return folder


# --- generate -----------------------------------------------------------------------------------------------------


def test_json_is_all_that_is_on_stdout_and_says_what_the_library_says(capsys: Streams) -> None:
    texts = ["Once upon a time", "The fox"]
    flags = ["--max-tokens", "6", "--logprobs", "2", "--prompt-logprobs", "1", "--verbose", *GREEDY]
    assert generate("--prompt", texts[0], "--prompt", texts[1], "--json", *flags) == 0
    out, err = capsys.readouterr()
    content = json.loads(out, parse_constant=pytest.fail)
    with LLM(device="cpu", num_gpu_blocks_override=128, max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6, logprobs=2, prompt_logprobs=1)
        expected = llm.generate(texts, params, use_tqdm=False)
    assert [entry["prompt"] for entry in content] == texts
    for entry, output in zip(content, expected, strict=True):
        assert list(entry) == ["prompt", "prompt_token_ids", "outputs", "metrics", "prompt_logprobs"]
        assert entry["prompt_token_ids"] == output.prompt_token_ids
        (completion,), wanted = entry["outputs"], output.outputs[0]
        assert list(completion) == [
            "index", "text", "token_ids", "finish_reason", "stop_reason", "logprobs", "cumulative_logprob",
        ]  # fmt: skip
        assert (completion["index"], completion["text"]) == (0, wanted.text)
        assert completion["token_ids"] == wanted.token_ids
        assert (completion["finish_reason"], completion["stop_reason"]) == ("length", None)
        assert [list(map(int, step)) for step in completion["logprobs"]] == [
            list(step) for step in wanted.logprobs or []
        ]
        assert len(entry["prompt_logprobs"]) == len(output.prompt_token_ids)
        assert entry["metrics"]["num_generation_tokens"] == 6
        assert 0 < entry["metrics"]["ttft_ms"] <= entry["metrics"]["latency_ms"]
    assert "INFO fleetfoot" in err
    assert "TTFT" in err and "TPOT" in err and "tokens/s" in err


def test_streaming_prints_the_same_as_printing_at_the_end(capsys: Streams) -> None:
    flags = ["--prompt", "One day", "--prompt", "The owl", "--n", "2", "--seed", "5", "--max-tokens", "7", *ONLY_WORDS]
    assert generate(*flags) == 0
    at_once = capsys.readouterr()
    assert generate(*flags, "--stream") == 0
    streamed = capsys.readouterr()
    assert streamed.out == at_once.out
    assert streamed.out.count("One day") == streamed.out.count("The owl") == 2
    assert "--- prompt 2 of 2, output 1 of 2 ---\nThe owl" in streamed.out
    assert "2 prompts" in streamed.err and "28 out" in streamed.err


def test_text_is_written_as_it_is_made(capsys: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    at_step(monkeypatch, 1, lambda: seen.append(capsys.readouterr().out), repeat=99)
    assert generate("--prompt", "One day", "--stream", "--max-tokens", "5", *GREEDY, *ONLY_WORDS) == 0
    assert seen[0] == ""
    assert seen[1].startswith("One day") and len(seen[1]) > len("One day")
    assert len(seen) == 5 and all(seen[1:])


def test_the_seed_is_the_requests(capsys: Streams) -> None:
    def texts(*flags: str) -> list[str]:
        assert generate("--prompt", "a", "--prompt", "a", "--max-tokens", "16", "--json", *flags) == 0
        return [entry["outputs"][0]["text"] for entry in json.loads(capsys.readouterr().out)]

    first, second = texts("--seed", "1", "--engine-seed", "5")
    assert first == second  # each request draws from its own seed
    assert texts("--seed", "1", "--engine-seed", "6") == [first, second]
    assert texts("--engine-seed", "6") == texts("--engine-seed", "6") != texts("--engine-seed", "7")


def test_a_piped_prompt_and_a_file_of_tokens(capsys: Streams, stdin: Any, tmp_path: Path) -> None:
    stdin("A piped prompt\n")
    assert generate("--max-tokens", "2", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["prompt"] == "A piped prompt"
    path = tmp_path / "tokens.jsonl"
    path.write_text('{"prompt_token_ids": [5, 6, 7]}\n{"prompt_token_ids": [8], "prompt": "shown"}\n')
    assert generate("--prompts-file", str(path), "--skip-tokenizer-init", "--max-tokens", "2", *GREEDY) == 0
    plain = capsys.readouterr().out.splitlines()
    assert plain[0] == "--- prompt 1 of 2 ---" and plain[3] == "--- prompt 2 of 2 ---"
    words = plain[1].split()
    assert words[:3] == ["5", "6", "7"] and len(words) == 5
    assert plain[4].split()[0] == "shown"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", ""], "prompt is an empty string"),
        (["--prompt", "a", "--prompt", ""], "prompt 2 of 2: prompt is an empty string"),
        (["--prompt", "a", "--allowed-token-ids", "99999"], "allowed_token_ids names tokens [99999]"),
        (["--prompt", "a", "--logprobs", "500"], "logprobs must be at most 20, got 500"),
        (["--prompt", "a b c d e f g", "--max-model-len", "4"], "max_model_len=4"),
        (["--prompt", "a", "--max-model-len", "999999"], "set max_model_len to at most"),
        (["--prompt", "a", "--skip-tokenizer-init"], "this engine has no tokenizer"),
        (["--prompt", "a", "--model", "/no/such/model"], "no such folder"),
        (["--prompt", "a", "--model", str(Path(__file__).parent)], "no config.json"),
    ],
)
def test_what_the_engine_refuses_is_a_usage_error(capsys: Streams, flags: list[str], message: str) -> None:
    assert generate(*flags) == 2
    out, err = capsys.readouterr()
    assert "fleetfoot generate: error: " in err and message in err
    assert out == "" and "Traceback" not in err


def test_a_request_that_fails_is_reported_and_the_exit_code_says_so(capsys: Streams, tmp_path: Path) -> None:
    model = copied_model(tmp_path / "nan")
    weights = load_file(model / "model.safetensors")
    save_file({name: tensor * float("nan") for name, tensor in weights.items()}, model / "model.safetensors")
    assert generate("--model", str(model), "--prompt", "a", "--json", "--max-tokens", "3") == 1
    out, err = capsys.readouterr()
    (completion,) = json.loads(out, parse_constant=pytest.fail)[0]["outputs"]
    assert completion["finish_reason"] == "error"
    assert f"fleetfoot generate: error: prompt 1, output 1: {completion['stop_reason']}\n" in err


@pytest.mark.parametrize("verbose", [False, True])
def test_a_failing_engine_ends_the_command_with_its_cause(
    capsys: Streams, monkeypatch: pytest.MonkeyPatch, verbose: bool
) -> None:
    from fleetfoot.engine.core import EngineCore

    def broken(self: EngineCore, *_: object) -> None:
        raise RuntimeError("the device fell off")

    monkeypatch.setattr(EngineCore, "step", broken)
    assert generate("--prompt", "a", *(["--verbose"] if verbose else [])) == 1
    out, err = capsys.readouterr()
    assert "fleetfoot generate: error: the engine has failed: RuntimeError: the device fell off" in err
    assert ("Traceback" in err) == verbose
    assert out == ""


def test_ctrl_c_ends_generate_and_gives_memory_back(capsys: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[LLMEngine] = []
    monkeypatch.setattr(LLMEngine, "shutdown", lambda self: ended.append(self))
    at_step(monkeypatch, 2, lambda: signal.raise_signal(signal.SIGINT))
    assert generate("--prompt", "a", "--stream", "--max-tokens", "9", *GREEDY) == 130
    assert len(ended) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_leaves_ends_generate_quietly(capsys: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    class LeavingReader(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", LeavingReader())
    assert generate("--prompt", "a", "--stream", "--max-tokens", "9") == 141
    assert capsys.readouterr().err == ""


# --- chat ---------------------------------------------------------------------------------------------------------


def test_a_piped_chat_prints_replies_alone_and_remembers(capsys: Streams, stdin: Any, prompts: list[Any]) -> None:
    stdin("Hello!\n\nAnd then?\n/exit\nnot read\n")
    assert chat("--max-tokens", "4", "--system", "Be kind.") == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == len(prompts) == 2
    with LLM(device="cpu", num_gpu_blocks_override=128, max_num_seqs=4) as llm:
        history = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello!"}]
        assert prompts[0]["prompt_token_ids"] == TOKENIZER.apply_chat_template_ids(history)
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=4, allowed_token_ids=WORDS)
        reply = llm.chat(history, params, use_tqdm=False)[0].outputs[0].text
        assert out.startswith(reply + "\n")
        history += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And then?"}]
        assert prompts[1]["prompt_token_ids"] == TOKENIZER.apply_chat_template_ids(history)
    assert err == ""


def test_commands_of_a_chat(capsys: Streams, stdin: Any, prompts: list[Any]) -> None:
    stdin("/stats\nHi\n/reset\nHi\n/system Be brief.\n/reset\nHi\n/stats\n/help\n/what now\n/system\n")
    assert chat("--max-tokens", "3") == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    assert prompts[1] == prompts[0]
    assert len(prompts[2]["prompt_token_ids"]) > len(prompts[0]["prompt_token_ids"])
    assert "no reply yet" in err
    assert "chat: 3 replies, 1 turn remembered" in err and "last reply: TTFT" in err
    assert "/system TEXT" in err
    assert "unknown command /what" in err
    assert "there is no system message now" in err


def test_ctrl_c_stops_a_reply_and_the_chat_goes_on(
    capsys: Streams, monkeypatch: pytest.MonkeyPatch, stdin: Any, prompts: list[Any]
) -> None:
    at_step(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGINT))
    stdin("Hello!\nGo on.\n")
    assert chat("--max-tokens", "6") == 0
    out, err = capsys.readouterr()
    stopped, second = out.splitlines()
    assert err == "(stopped)\n"
    history = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": stopped},
        {"role": "user", "content": "Go on."},
    ]
    assert prompts[1]["prompt_token_ids"] == TOKENIZER.apply_chat_template_ids(history)
    assert 0 < len(TOKENIZER.encode(stopped, add_special_tokens=False)) <= 3
    assert second


def test_a_second_ctrl_c_ends_the_chat(capsys: Streams, monkeypatch: pytest.MonkeyPatch, stdin: Any) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    at_step(monkeypatch, 2, twice)
    stdin("Hello!\nGo on.\n")
    assert chat("--max-tokens", "6") == 130
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_a_chat_that_outgrows_the_model_forgets_its_beginning(capsys: Streams, stdin: Any, prompts: list[Any]) -> None:
    stdin("One day a fox went out.\n" * 5 + "word " * 90 + "\nShort again.\n")
    assert chat("--max-tokens", "8", "--max-model-len", "64", "--system", "Be kind.") == 1  # a turn was refused
    out, err = capsys.readouterr()
    lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts]
    assert len(out.splitlines()) == len(prompts) == 6
    assert max(lengths) + 8 <= 64 and lengths[0] < lengths[1]
    assert "(the conversation grew too long; forgotten from its beginning: 1 turn)" in err
    assert "fleetfoot chat: error: the message makes a prompt of" in err
    assert lengths[5] > lengths[0]  # what came before the refused message is still remembered
    system = prompts[0]["prompt_token_ids"][:4]
    assert all(prompt["prompt_token_ids"][:4] == system for prompt in prompts)


def test_a_chat_on_a_terminal(capsys: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines = iter(["Hello!", EOFError()])

    def answer(prompt: str = "") -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(builtins, "input", answer)
    assert chat("--max-tokens", "2") == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1
    assert err.startswith("story-llama on cpu, runner ") and err.count("> ") == 2

    lines = iter([KeyboardInterrupt()])
    assert chat() == 130


def test_a_model_without_a_chat_template_needs_one(
    capsys: Streams, stdin: Any, prompts: list[Any], tmp_path: Path
) -> None:
    model = copied_model(tmp_path / "plain")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert chat("--model", str(model)) == 2
    assert "has no chat template" in capsys.readouterr().err
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    stdin("Hi\n")
    assert chat("--model", str(model), "--chat-template", str(template), "--max-tokens", "1") == 0
    assert len(prompts) == 1
    assert chat("--chat-template", str(tmp_path / "absent")) == 2
    assert "neither a readable file" in capsys.readouterr().err


def test_a_template_that_refuses_a_message_does_not_end_the_chat(
    capsys: Streams, stdin: Any, prompts: list[Any], tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}Hi")
    stdin("Hello\n/system\nHello\n")
    assert chat("--chat-template", str(template), "--system", "x", "--max-tokens", "2") == 1
    out, err = capsys.readouterr()
    assert "fleetfoot chat: error: the chat template refuses these messages: no system" in err
    assert len(prompts) == len(out.splitlines()) == 1


# --- bench --------------------------------------------------------------------------------------------------------


def test_latency(capsys: Streams) -> None:
    flags = ["--input-len", "9", "--output-len", "4", "--batch-size", "3", "--num-iters", "2", "--num-warmup", "1"]
    assert bench("latency", *flags) == 0
    out, err = capsys.readouterr()
    content = json.loads(out, parse_constant=pytest.fail)
    assert list(content) == ["benchmark", "versions", "machine", "engine", "settings", "results"]
    assert content["settings"]["batch_size"] == 3
    assert content["engine"]["runner"] in ("v1", "v2")
    assert content["engine"]["config"]["max_num_seqs"] == 4
    measured = content["results"]
    # the warm-up is in none of these
    assert (measured["num_requests"], measured["num_prompt_tokens"], measured["num_output_tokens"]) == (6, 54, 24)
    assert measured["ttft_ms"]["count"] == measured["tpot_ms"]["count"] == 6
    assert measured["itl_ms"]["count"] == 6 * 3
    assert measured["num_steps"] == measured["host_time_per_step_us"]["count"] == 2 * 4
    assert measured["batch_latency_ms"]["count"] == 2
    assert measured["requests_per_step"] == 3.0
    assert measured["prefix_cache"] == {"queried_tokens": 54, "hit_tokens": 0, "hit_rate": 0.0}
    assert 0 < measured["ttft_ms"]["p50"] <= measured["ttft_ms"]["max"] < measured["request_latency_ms"]["max"]
    assert "output tokens/s" in err


def test_throughput_with_ranges_a_common_prefix_and_arrivals(capsys: Streams, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    flags = ["--num-prompts", "7", "--input-len", "40:50", "--output-len", "2:5", "--prefix-len", "32"]
    assert bench("throughput", *flags, "--request-rate", "1000", "--output", str(path)) == 0
    assert capsys.readouterr().out == ""
    content = json.loads(path.read_text())
    measured = content["results"]
    assert content["settings"]["input_len"] == "40:50" and content["settings"]["num_prompts"] == 7
    assert measured["num_requests"] == 7
    assert 7 * 40 <= measured["num_prompt_tokens"] <= 7 * 50
    assert measured["prefix_cache"]["hit_tokens"] == 6 * 32  # but for the first one, as the warm-up is forgotten
    assert "batch_latency_ms" not in measured


def test_throughput_of_a_file(capsys: Streams, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "One day"}\n{"prompt_token_ids": [5, 6, 7]}\n{"prompt": "The end"}\n')
    flags = ["--prompts-file", str(path), "--output-len", "3"]
    assert bench("throughput", *flags, "--num-prompts", "2") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["results"]["num_requests"] == content["settings"]["num_prompts"] == 2
    assert content["settings"]["input_len"] is None
    assert bench("throughput", *flags, "--num-prompts", "4") == 2
    assert "--num-prompts is 4" in capsys.readouterr().err


def test_random_weights_need_config_json_alone(capsys: Streams, tmp_path: Path) -> None:
    shutil.copy(embedded_model_path() / "config.json", tmp_path)
    flags = ["--model", str(tmp_path), "--load-format", "dummy", "--input-len", "4", "--output-len", "2"]
    assert bench("latency", *flags, "--batch-size", "1", "--num-iters", "1", "--num-warmup", "0") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["engine"]["config"]["skip_tokenizer_init"] is True
    assert content["results"]["num_output_tokens"] == 2


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_lengths_beyond_the_model_are_refused(capsys: Streams, kind: str) -> None:
    assert bench(kind, "--max-model-len", "64", "--input-len", "60", "--output-len", "5") == 2
    out, err = capsys.readouterr()
    assert "60 tokens of prompt and 5 of output are more than the 64" in err and out == ""

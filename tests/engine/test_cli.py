"""The commands with the embedded model, in this process: their output on each stream, and their exit codes."""

import builtins
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
from tests.helpers.commands import CommandRunner, shrink_peak_rates
from tests.helpers.engines import change_weights
from tests.helpers.processes import HANG
from tests.helpers.zygote import ForkedPopen

from fleetfoot import LLM, LLMEngine, SamplingParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.cli import compile
from fleetfoot.cli.arguments import given_settings
from fleetfoot.outputs import RequestOutput
from fleetfoot.plan.machine import Machine
from fleetfoot.tokenizer.tokenizer import Tokenizer

SMALL = ["--device", "cpu", "--num-gpu-blocks-override", "128", "--max-num-seqs", "4"]
GREEDY = ["--temperature", "0", "--ignore-eos"]
TOKENIZER = Tokenizer.from_path(embedded_model_path())
WORDS = TOKENIZER.encode(" the and was", add_special_tokens=False)
"""Allowed tokens in tests that compare lines: without line breaks, and with a unique encoding."""
ONLY_WORDS = ["--allowed-token-ids", *map(str, WORDS)]
EAGLE = '{"method": "eagle", "num_speculative_tokens": 3, "adaptive": false}'


PRESS_CTRL_C = partial(signal.raise_signal, signal.SIGINT)
Patch = pytest.MonkeyPatch
Pipe = Callable[[str], None]
Prompts = list[list[int]]


class Command(CommandRunner):
    def chat(self, *flags: str, code: int = 0) -> list[str]:
        """The replies."""
        return self("chat", *GREEDY, *ONLY_WORDS, *flags, code=code).splitlines()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: Patch) -> Command:
    shrink_peak_rates(monkeypatch)
    return Command(capsys, *SMALL)


@pytest.fixture
def pipe(monkeypatch: Patch) -> Pipe:
    """Sets what is piped in."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.fixture
def prompts(monkeypatch: Patch) -> Prompts:
    """The prompts that reach the engine as token ids."""
    seen: list[list[int]] = []
    add_request = LLMEngine.add_request

    def spy(self: LLMEngine, request_id: str, prompt: Any, params: SamplingParams, **more: Any) -> None:
        add_request(self, request_id, prompt, params, **more)
        seen.append(prompt["prompt_token_ids"])

    monkeypatch.setattr(LLMEngine, "add_request", spy)
    return seen


def at_step(monkeypatch: Patch, number: int, do: Callable[[], object], repeat: int = 1) -> None:
    """Call ``do`` inside the engine's step of this number, before it runs, and inside the next ``repeat - 1``."""
    step, count = LLMEngine.step, iter(range(1, 1_000_000))

    def stepping(self: LLMEngine) -> list[RequestOutput]:
        if number <= next(count) < number + repeat:
            do()
        return step(self)

    monkeypatch.setattr(LLMEngine, "step", stepping)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the embedded model."""
    return Path(shutil.copytree(embedded_model_path(), tmp_path / "model"))


def test_json_is_what_the_library_returns(run: Command) -> None:
    texts = ["Once upon a time", "The fox"]
    flags = ["--max-tokens", "6", "--logprobs", "2", "--prompt-logprobs", "1", "--verbose", *GREEDY]
    content = run.json("generate", "story-llama", "--prompt", texts[0], "--prompt", texts[1], "--json", *flags)
    with LLM(device="cpu", num_gpu_blocks_override=128, max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6, logprobs=2, prompt_logprobs=1)
        expected = llm.generate(texts, params, use_tqdm=False)
    for text, entry, output in zip(texts, content, expected, strict=True):
        assert list(entry) == ["prompt", "prompt_token_ids", "outputs", "metrics", "prompt_logprobs"]
        assert (entry["prompt"], entry["prompt_token_ids"]) == (text, output.prompt_token_ids)
        (completion,), wanted = entry["outputs"], output.outputs[0]
        logprobs = completion.pop("logprobs")
        assert list(completion.items())[:-1] == [
            ("index", 0), ("text", wanted.text), ("token_ids", wanted.token_ids), ("finish_reason", "length"),
            ("stop_reason", None),
        ]  # fmt: skip
        assert list(completion)[-1] == "cumulative_logprob"
        assert [list(map(int, step)) for step in logprobs] == [list(step) for step in wanted.logprobs or []]
        assert len(entry["prompt_logprobs"]) == len(output.prompt_token_ids)
        assert entry["metrics"]["num_generation_tokens"] == 6
        assert 0 < entry["metrics"]["ttft_ms"] <= entry["metrics"]["latency_ms"]
    assert all(text in run.err for text in ("INFO fleetfoot", "TTFT", "TPOT", "tokens/s"))


def test_a_piped_prompt_and_a_file_of_tokens(run: Command, pipe: Pipe, tmp_path: Path) -> None:
    pipe("A piped prompt\n")
    assert run.json("generate", "--max-tokens", "2", "--json")[0]["prompt"] == "A piped prompt"
    path = tmp_path / "tokens.jsonl"
    path.write_text('{"prompt_token_ids": [5, 6, 7]}\n{"prompt_token_ids": [8], "prompt": "shown"}\n')
    plain = run("generate", "--prompts-file", str(path), "--skip-tokenizer-init", "--max-tokens", "2", *GREEDY)
    lines = plain.splitlines()
    assert (lines[0], lines[3]) == ("--- prompt 1 of 2 ---", "--- prompt 2 of 2 ---")
    assert lines[1].split()[:3] == ["5", "6", "7"] and len(lines[1].split()) == 5
    assert lines[4].split()[0] == "shown"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "a", "--allowed-token-ids", "99999"], "allowed_token_ids names tokens [99999]"),
        (["--prompt", "a", "--logprobs", "500"], "logprobs must be at most 20, got 500"),
        (["--prompt", "a b c d e f g", "--max-model-len", "4"], "length is 4 tokens (max_model_len)"),
        (["--prompt", "a", "--max-model-len", "999999"], "set max_model_len to at most"),
        (["--prompt", "a", "--skip-tokenizer-init"], "prompt is a text, and this engine has no tokenizer"),
        (["--prompt", "a", "--model", "/no/such/model"], "no such folder"),
        (["--prompt", "a", "--model", str(Path(__file__).parent)], "no config.json"),
    ],
)
def test_what_the_engine_refuses_is_a_usage_error(run: Command, flags: list[str], message: str) -> None:
    error = run.refused("generate", *flags)
    assert "fleetfoot generate: error: " in error and message in error


def test_a_request_that_fails_is_reported(run: Command, model: Path) -> None:
    change_weights(model, lambda weights: weights.update({name: t * torch.nan for name, t in weights.items()}))
    flags = ["--model", str(model), "--prompt", "a", "--json", "--max-tokens", "3"]
    (completion,) = run.json("generate", *flags, code=1)[0]["outputs"]
    assert completion["finish_reason"] == "error"
    assert f"fleetfoot generate: error: prompt 1, output 1: {completion['stop_reason']}\n" in run.err


@pytest.mark.parametrize("flags", [[], ["--verbose"]])
def test_a_failing_engine_ends_the_command_with_its_cause(run: Command, monkeypatch: Patch, flags: list[str]) -> None:
    broken = mock.Mock(side_effect=RuntimeError("the device fell off"))
    monkeypatch.setattr("fleetfoot.engine.core.EngineCore.step", broken)
    assert run("generate", "--prompt", "a", *flags, code=1) == ""
    assert "fleetfoot generate: error: the engine has failed: RuntimeError: the device fell off" in run.err
    assert ("Traceback" in run.err) == bool(flags)


def test_ctrl_c_ends_generate_and_gives_memory_back(run: Command, monkeypatch: Patch) -> None:
    monkeypatch.setattr(LLMEngine, "shutdown", ended := mock.Mock())
    at_step(monkeypatch, 2, PRESS_CTRL_C)
    run("generate", "--prompt", "a", "--stream", "--max-tokens", "9", *GREEDY, code=130)
    assert ended.call_count == 1 and "Traceback" not in run.err


def test_a_reader_that_leaves_ends_generate_quietly(run: Command, monkeypatch: Patch) -> None:
    reader = io.StringIO()
    monkeypatch.setattr(reader, "flush", mock.Mock(side_effect=BrokenPipeError))
    monkeypatch.setattr(sys, "stdout", reader)
    run("generate", "--prompt", "a", "--stream", "--max-tokens", "9", code=141)
    assert run.err == ""


def test_drafts_are_counted_and_change_no_token(run: Command) -> None:
    # drafts are verified in larger products, which in bfloat16 round the two most probable logits differently
    flags = ["--prompt", "Once there was a fox named", "--max-tokens", "40", *GREEDY, "--dtype", "float32", "--json"]
    (content,) = run.json("generate", *flags, "--speculative-config", EAGLE)
    metrics = content["metrics"]
    # one token comes from the prompt's step and one from each later step
    num_steps = metrics["num_drafted_tokens"] // 3
    assert 40 <= 1 + num_steps + metrics["num_accepted_tokens"] < 44
    assert 20 < metrics["num_accepted_tokens"] < metrics["num_drafted_tokens"]
    assert f"drafts: {1 + metrics['num_accepted_tokens'] / num_steps:.2f} tokens a step, " in run.err

    (plain,) = run.json("generate", *flags)
    assert plain["outputs"] == content["outputs"]
    assert plain["metrics"]["num_drafted_tokens"] == plain["metrics"]["num_accepted_tokens"] == 0
    assert "drafts" not in run.err


CLOSING = """
import os, sys
for number in map(int, sys.argv.pop(1)):
    os.close(number)
    name = ("stdin", "stdout", "stderr")[number]
    setattr(sys, name, None)  # as an interpreter does that starts without it
    setattr(sys, f"__{name}__", None)
from fleetfoot.__main__ import run
sys.exit(run())
"""
"""The command without some of the standard streams, in a process that is forked."""


@pytest.mark.parametrize(("closed", "written"), [("12", "--"), ("2", "a-"), ("1", "-["), ("0", "a[")])
def test_streams_that_the_shell_closed(closed: str, written: str) -> None:
    command = ["generate", "--device", "cpu", "--prompt", "a", "--max-tokens", "2"]
    words = [sys.executable, "-c", CLOSING, closed, *command]
    if closed == "12":  # a shell that does so
        words = ["sh", "-c", '"$@" >&- 2>&-', "sh", sys.executable, "-m", "fleetfoot", *command]
    with ForkedPopen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        out, err = process.communicate(timeout=HANG)
    assert process.returncode == 0
    assert (out[:1] or "-") + (err[:1] or "-") == written


def test_a_piped_chat_prints_replies_alone_and_remembers(run: Command, pipe: Pipe, prompts: Prompts) -> None:
    pipe("Hello!\n\nAnd then?\n/exit\nnot read\n")
    replies = run.chat("--max-tokens", "4", "--system", "Be kind.")
    assert len(replies) == len(prompts) == 2 and run.err == ""
    history = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello!"}]
    assert prompts[0] == TOKENIZER.apply_chat_template_ids(history)
    with LLM(device="cpu", num_gpu_blocks_override=128, max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=4, allowed_token_ids=WORDS)
        assert llm.chat(history, params, use_tqdm=False)[0].outputs[0].text == replies[0]
    history += [{"role": "assistant", "content": replies[0]}, {"role": "user", "content": "And then?"}]
    assert prompts[1] == TOKENIZER.apply_chat_template_ids(history)


@pytest.fixture
def gpu(monkeypatch: Patch, tmp_path: Path) -> Iterator[list[Any]]:
    """A machine with a GPU, on which an engine of two ranks starts. Yields the settings that it starts with, and the
    cache of kernels at that time."""
    started: list[Any] = []

    @contextmanager
    def start(arguments: Any, **settings: Any) -> Iterator[tuple[Any, float]]:
        started.append((given_settings(arguments) | settings, os.environ.get("TRITON_CACHE_DIR")))
        ranks = {"compiled_kernels": [(1, 55), (56, 0)]}
        yield SimpleNamespace(collective_rpc=ranks.__getitem__), 0.0

    machine = Machine(1 << 34, gpu_name="a GPU", gpu_memory_bytes=1 << 34, has_triton=True)
    monkeypatch.setattr(Machine, "detect", lambda: machine)
    monkeypatch.setattr(compile, "started_engine", start)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "usual"))
    yield started
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "usual")


@pytest.fixture
def run_on_gpu(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.mark.parametrize("output", [None, "new/cache"])
def test_kernels_are_compiled_ahead(
    run_on_gpu: Command, gpu: list[Any], tmp_path: Path, monkeypatch: Patch, output: str | None
) -> None:
    pytest.importorskip("triton")
    monkeypatch.chdir(tmp_path)
    folder = str(tmp_path / (output or "usual"))
    flags = [] if output is None else ["--output", output]
    text = run_on_gpu("compile", "story-llama", "--max-model-len", "256", *flags)
    assert text.splitlines()[0] == f"112 kernels for a GPU in {folder}"
    assert text.splitlines()[1].startswith("57 found, 55 compiled, in ")
    ((settings, cache),) = gpu
    assert (settings["load_format"], settings["max_model_len"], cache) == ("dummy", 256, folder)
    assert settings["model"] == str(embedded_model_path())
    report = run_on_gpu.json("compile", "story-llama", "--json", *flags)
    assert report | {"seconds": 0} == {
        "kernels_found": 57, "kernels_compiled": 55, "cache": folder, "gpu_name": "a GPU", "seconds": 0,
    }  # fmt: skip


def test_an_engine_that_compiles_nothing_ahead_is_refused(
    run: Command, run_on_gpu: Command, gpu: list[Any], tmp_path: Path
) -> None:
    assert "the device is a CPU, for which nothing needs to be compiled" in run.refused("compile", "story-llama")
    assert "Model Runner V1 runs" in run_on_gpu.refused("compile", "--model-runner", "v1")
    assert "unknown argument '--load-format'" in run_on_gpu.refused("compile", "--load-format", "auto")
    (tmp_path / "file").touch()
    message = run_on_gpu.refused("compile", "--output", str(tmp_path / "file" / "cache"))
    assert "name a folder that can be made" in message
    assert not gpu


def test_commands_of_a_chat(run: Command, pipe: Pipe, prompts: Prompts) -> None:
    pipe("/stats\nHi\n/reset\nHi\n/system Be brief.\n/reset\nHi\n/stats\n/help\n/what now\n/system\n")
    assert len(run.chat("--max-tokens", "3")) == 3
    assert prompts[1] == prompts[0] and len(prompts[2]) > len(prompts[0])
    for text in ("no reply yet", "chat: 3 replies, 1 turn remembered", "last reply: TTFT", "/system TEXT"):
        assert text in run.err
    assert "unknown command /what" in run.err and "there is no system message now" in run.err


def test_a_chat_takes_lines_repeats_sets_and_saves(run: Command, pipe: Pipe, prompts: Prompts, tmp_path: Path) -> None:
    def encoded(*texts: str) -> list[int]:
        roles = ("user", "assistant") * 2
        return TOKENIZER.apply_chat_template_ids(
            [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        )

    file = tmp_path / "chat.json"
    settings = ["max_tokens 2", "seed=5", "stop a b", "", "top-p 2", "tempratur 1", "n 2", "ignore_eos maybe"]
    commands = [*(f"/set {text}" for text in settings), f"/save {tmp_path}", "/save", f"/save {file}"]
    pipe("\n".join(["/retry", "Hi", *commands, '"""', "/one", "", 'two"""', "/retry", '"""/x"""', "/reset", "/retry"]))
    first, *_, fourth = run.chat("--max-tokens", "4")
    assert prompts[0] == encoded("Hi") and prompts[1] == prompts[2] == encoded("Hi", first, "/one\n\ntwo")
    assert json.loads(file.read_text()) == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": first}]
    assert len(TOKENIZER.encode(fourth, add_special_tokens=False)) <= 2 < len(prompts[3])
    for text in ("max_tokens is 2", "seed is 5", "stop is ['a', 'b']", "top_p must be a number in (0, 1], got 2.0",
                 "there is temperature", "no 'n' to set", "'maybe' is no value of ignore_eos; on or off",
                 f"1 turn written to {file}", "temperature is 0.0; "):  # fmt: skip
        assert text in run.err
    assert run.err.count("there is no message yet") == 2 and run.err.count("/save FILE: [Errno") == 2


def test_ctrl_c_stops_a_reply_alone(run: Command, monkeypatch: Patch, pipe: Pipe, prompts: Prompts) -> None:
    at_step(monkeypatch, 3, PRESS_CTRL_C)
    pipe("Hello!\nGo on.\n")
    stopped, second = run.chat("--max-tokens", "6")
    assert run.err == "(stopped)\n"
    roles = {"Hello!": "user", stopped: "assistant", "Go on.": "user"}
    history = [{"role": role, "content": text} for text, role in roles.items()]
    assert prompts[1] == TOKENIZER.apply_chat_template_ids(history)
    assert 0 < len(TOKENIZER.encode(stopped, add_special_tokens=False)) <= 3
    assert second


@pytest.mark.parametrize("module", ["fleetfoot.compat.paths", "fleetfoot.cli.main"])
def test_ctrl_c_while_a_command_imports_shows_no_traceback(module: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import signal, sys\n"
        "class CtrlC:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}:\n"
        "            sys.meta_path.remove(self)\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, CtrlC())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "fleetfoot", "--version"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_a_chat_that_outgrows_the_model_forgets_its_beginning(run: Command, pipe: Pipe, prompts: Prompts) -> None:
    pipe("One day a fox went out.\n" * 5 + "word " * 90 + "\n" + "x" * 10**6 + "\nShort again.\n")
    flags = ["--max-tokens", "8", "--max-model-len", "64", "--system", "Be kind."]
    replies = run.chat(*flags, code=1)  # a turn was refused
    lengths = list(map(len, prompts))
    assert len(replies) == len(prompts) == 6
    assert max(lengths) + 8 <= 64 and lengths[0] < lengths[1]
    assert "(the conversation grew too long; forgotten from its beginning: 1 turn)" in run.err
    assert "fleetfoot chat: error: the message makes a prompt of" in run.err
    assert "fleetfoot chat: error: prompt has 10000" in run.err  # characters, which are not tokenized
    assert lengths[5] > lengths[0]  # turns before the refused message are still remembered
    assert all(prompt[:4] == prompts[0][:4] for prompt in prompts)  # of the system message


def test_a_chat_on_a_terminal(run: Command, monkeypatch: Patch, prompts: Prompts) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr(builtins, "input", mock.Mock(side_effect=["Hello!", "/bye", EOFError(), KeyboardInterrupt()]))
    monkeypatch.setattr("fleetfoot.cli.chat._has_input", mock.Mock(side_effect=[True, False]))  # a paste of two lines
    assert len(run.chat("--max-tokens", "2")) == 1
    expected = TOKENIZER.apply_chat_template_ids([{"role": "user", "content": "Hello!\n/bye"}])
    assert prompts == [expected]
    assert run.err.startswith("story-llama on cpu, runner ") and run.err.count("> ") == 2
    run.chat(code=130)


def test_chat_templates(run: Command, pipe: Pipe, prompts: Prompts, model: Path, tmp_path: Path) -> None:
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    run.chat("--model", str(model), code=2)
    assert "has no chat template" in run.err
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    pipe("Hi\n")
    run.chat("--model", str(model), "--chat-template", str(template), "--max-tokens", "1")
    assert len(prompts) == 1
    run.chat("--chat-template", str(tmp_path / "absent"), code=2)
    assert "neither a readable file" in run.err
    prompts.clear()
    # one that refuses a message does not end the chat
    template.write_text("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}Hi")
    pipe("Hello\n/system\nHello\n")
    replies = run.chat("--chat-template", str(template), "--system", "x", "--max-tokens", "2", code=1)
    assert "fleetfoot chat: error: the chat template refuses these messages: no system" in run.err
    assert len(prompts) == len(replies) == 1


def test_cold(run: Command) -> None:
    """Rounds of up to max_num_seqs requests, with every sampler; the last round runs to its end."""
    flags = ["--duration", "1", "--input-len", "1:9", "--output-len", "2:3"]
    content = run.json("bench", "cold", *flags)
    assert content["settings"] == {"input_len": "1:9", "output_len": "2:3", "duration": 1, "seed": 0}
    measured = content["results"]
    assert measured["ttft_ms"]["count"] == measured["num_requests"] > 0
    assert measured["num_requests"] <= measured["itl_ms"]["count"] <= 2 * measured["num_requests"]
    assert 0 < len(measured["slowest_steps"]) <= 12
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in measured)
    error = run.refused("bench", "cold", "--max-model-len", "64", "--input-len", "60", "--output-len", "5")
    assert "allow 65 tokens" in error


def test_throughput_with_ranges_a_common_prefix_and_arrivals(run: Command, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    flags = ["--num-prompts", "7", "--input-len", "40:50", "--output-len", "2:5", "--prefix-len", "32"]
    flags += ["--request-rate", "1000", "--output", str(path), "--plot", str(tmp_path / "plot.svg")]
    assert run("bench", "throughput", *flags) == ""
    words = {element.text for element in ElementTree.parse(tmp_path / "plot.svg").iter()}
    assert {"TTFT", "latency", "roofline", "50%"} <= words
    content = json.loads(path.read_text())
    measured = content["results"]
    assert content["settings"]["input_len"] == "40:50" and content["settings"]["num_prompts"] == 7
    assert measured["num_requests"] == 7
    assert 7 * 40 <= measured["num_prompt_tokens"] <= 7 * 50
    assert measured["prefix_cache"]["hit_tokens"] == 6 * 32  # the first has none, as the warm-up is forgotten
    assert "batch_latency_ms" not in measured


def test_throughput_of_a_file(run: Command, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "One day"}\n{"prompt_token_ids": [5, 6, 7]}\n{"prompt": "The end"}\n')
    flags = ["bench", "throughput", "--prompts-file", str(path), "--output-len", "3", "--num-prompts"]
    content = run.json(*flags, "2")
    assert content["results"]["num_requests"] == content["settings"]["num_prompts"] == 2
    assert content["settings"]["input_len"] is None
    run(*flags, "4", code=2)
    assert "--num-prompts is 4" in run.err


def test_random_weights_need_config_json_alone(run: Command, tmp_path: Path) -> None:
    shutil.copy(embedded_model_path() / "config.json", tmp_path)
    flags = ["--model", str(tmp_path), "--load-format", "dummy", "--input-len", "4", "--output-len", "2"]
    content = run.json("bench", "latency", *flags, "--batch-size", "1", "--num-iters", "1", "--num-warmup", "0")
    assert content["engine"]["config"]["skip_tokenizer_init"] is True
    assert content["results"]["num_output_tokens"] == 2


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_bench_with_drafts_and_of_too_long_requests(run: Command, tmp_path: Path, kind: str) -> None:
    error = run.refused("bench", kind, "--max-model-len", "64", "--input-len", "60", "--output-len", "5")
    assert "60 tokens of prompt and 5 of output are more than the 64" in error
    (tmp_path / "prompts.txt").write_text("One morning, the little bear\nOnce there was a fox\n", encoding="utf-8")
    load = {
        "latency": ["--batch-size", "2", "--input-len", "8", "--num-iters", "2", "--num-warmup", "1"],
        "throughput": ["--prompts-file", str(tmp_path / "prompts.txt")],
    }[kind]
    content = run.json("bench", kind, *load, "--output-len", "20", "--speculative-config", EAGLE)
    assert content["engine"]["config"]["speculative_config"]["method"] == "eagle"
    drafts = content["results"]["drafts"]
    assert 0 < drafts["num_accepted_tokens"] <= drafts["num_drafted_tokens"]
    assert drafts["num_drafted_tokens"] <= 3 * content["results"]["num_output_tokens"]
    assert len(drafts["acceptance_rate_at"]) == 3
    assert drafts["mean_acceptance_length"] == pytest.approx(1 + sum(drafts["acceptance_rate_at"]))
    assert drafts["off_reason"] is None
    assert f"\n drafts: {drafts['mean_acceptance_length']:.2f} tokens a step" in run.err

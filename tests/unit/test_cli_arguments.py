"""The command line without a model: flags, messages, exit codes, logs."""

import argparse
import dataclasses
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
from tests.helpers.commands import CommandRunner

from fleetfoot import __version__
from fleetfoot.cli import arguments, generate
from fleetfoot.cli.command import UsageError
from fleetfoot.cli.main import make_parser
from fleetfoot.compat.arguments import FlexibleArgumentParser
from fleetfoot.config.engine import UNSUPPORTED, EngineConfig
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams


def parse(argv: list[str], **defaults: Any) -> argparse.Namespace:
    parser = FlexibleArgumentParser()
    arguments.add_engine_arguments(parser)
    arguments.add_sampling_arguments(parser, **defaults)
    return parser.parse_args(argv)


ENGINE_VALUES: dict[str, Any] = {
    "model": "some/where", "tokenizer": "else/where", "revision": "v1.0", "device": "cpu", "dtype": "float16",
    "load_format": "dummy", "skip_tokenizer_init": True, "trust_remote_code": True, "runner": "pooling",
    "pooler_config": '{"pooling_type": "MEAN"}', "logits_processors": "module:Class,module:Other",
    "quantization": "fp8", "enable_lora": True, "generation_config": "a/folder", "enable_prompt_embeds": True,
    "override_generation_config": '{"temperature": 0.5, "max_new_tokens": null}', "model_runner": "v1",
    "use_v2_model_runner": False, "compilation_config": '{"mode": 1}', "enforce_eager": True, "seed": 11,
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}', "max_model_len": 77,
    "max_num_seqs": 5, "max_num_batched_tokens": 300, "enable_chunked_prefill": False,
    "enable_prefix_caching": False, "scheduling_policy": "priority", "async_scheduling": True, "max_logprobs": -1,
    "block_size": 32, "gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 12345, "num_gpu_blocks_override": 9,
    "kv_transfer_config": '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}', "kv_offloading_size": 1.5,
    "profiler_config": '{"profiler": "torch", "torch_profiler_dir": "traces"}',
    "enable_sleep_mode": True, "tensor_parallel_size": 2, "pipeline_parallel_size": 3,
    "prefill_context_parallel_size": 4, "hf_overrides": '{"rope_theta": 5}',
    "weight_transfer_config": '{"backend": "gloo"}', "kv_events_config": '{"topic": "kv@pod@model"}',
    "on_error": "restart", "max_restarts": 3, "cluster_key_file": "a/key",
    "eplb_config": '{"num_redundant_experts": 2}', "max_state_snapshots": 32,
}  # fmt: skip


@pytest.mark.parametrize("field", dataclasses.fields(EngineConfig), ids=lambda field: field.name)
def test_every_engine_setting_has_a_flag(field: dataclasses.Field[Any]) -> None:
    value = ENGINE_VALUES.get(field.name, field.default)
    flag = "--engine-seed" if field.name == "seed" else arguments.flag_of(field.name)
    if isinstance(value, bool):
        argv = [flag if value else flag.replace("--", "--no-", 1)]
    else:
        argv = [flag, str(value)]
    parallel = {"enable_eplb": True, "enable_expert_parallel": True, "tensor_parallel_size": 2}
    others: dict[str, dict[str, Any]] = {
        "max_num_batched_tokens": {"max_num_seqs": 5},
        "max_restarts": {"on_error": "restart"},
        "eplb_config": parallel,
    }
    beside = others.get(field.name, {})
    assert arguments.engine_config(parse(argv), **beside) == EngineConfig(**{field.name: value}, **beside)


def test_help_has_every_setting_with_its_default(run: CommandRunner) -> None:
    text = " ".join(run("generate", "--help").split())
    for field in dataclasses.fields(EngineConfig):
        assert (field.metadata["help"] in text) == (field.name not in UNSUPPORTED)
    for word in ("lora", "quantiz", "embeds", "context-parallel", "swap-space"):
        assert word not in text
    assert "most requests that run at the same time (default: 256)" in text
    assert "{auto,cpu,cuda}" in text
    assert "(default: none)" not in text


DELTA = RequestOutputKind.DELTA
NOT_FLAGS = {"output_kind", "extra_args", "logits_processors"}
"""Set by commands, and for programs only."""
SAMPLING: dict[str, tuple[list[str], Any]] = {
    "n": (["2"], 2), "seed": (["42"], 42), "min_tokens": (["3"], 3), "max_tokens": (["none"], None),
    "presence_penalty": (["-0.5"], -0.5), "frequency_penalty": (["1.5"], 1.5), "repetition_penalty": (["1.1"], 1.1),
    "temperature": (["0.7"], 0.7), "top_p": (["0.9"], 0.9), "top_k": (["-1"], -1), "min_p": (["0.05"], 0.05),
    "stop": (["and then"], ["and then"]), "bad_words": (["and peace"], ["and peace"]),
    "stop_token_ids": (["7,8", "9"], [7, 8, 9]), "allowed_token_ids": (["1", "2"], [1, 2]),
    "logprobs": (["5"], 5), "prompt_logprobs": (["0"], 0), "truncate_prompt_tokens": (["10"], 10),
    "logit_bias": (['{"42": -1.5}'], {42: -1.5}), "ignore_eos": ([], True), "detokenize": ([], True),
    "skip_special_tokens": ([], True), "spaces_between_special_tokens": ([], True),
    "include_stop_str_in_output": ([], True),
    "structured_outputs": (['{"choice": ["a", "b"]}'], {"choice": ["a", "b"]}),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({field.name for field in dataclasses.fields(SamplingParams)} - NOT_FLAGS))
def test_every_sampling_parameter_has_a_flag(name: str) -> None:
    words, value = SAMPLING[name]
    params = arguments.sampling_params(parse([arguments.flag_of(name), *words]), DELTA)
    assert params == SamplingParams(**{name: value}, output_kind=DELTA)


def test_lists_can_be_given_in_pieces() -> None:
    words = ["--stop", "a", "--stop", "b c", "--allowed-token-ids", "1,2", "--allowed-token-ids", "3"]
    params = arguments.sampling_params(parse(words), DELTA)
    assert (params.stop, params.allowed_token_ids) == (["a", "b c"], [1, 2, 3])


@pytest.mark.parametrize(
    ("argv", "command", "model", "expected"),
    [
        ([], {"max_tokens": 99}, {}, {"max_tokens": 99}),
        ([], {"max_tokens": None}, {}, {"max_tokens": None}),
        (["--max-tokens", "4"], {"max_tokens": 99}, {}, {"max_tokens": 4}),
        (
            ["--top-k", "3"],
            {"max_tokens": 99, "seed": 1},
            {"max_tokens": 50, "top_k": 7, "temperature": 0.5},
            {"top_k": 3, "max_tokens": 50, "temperature": 0.5, "seed": 1},
        ),
    ],
)
def test_the_model_stands_between_the_user_and_the_command(
    argv: list[str], command: dict[str, Any], model: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert arguments.sampling_params(parse(argv, **command), DELTA, model) == SamplingParams(
        **expected, output_kind=DELTA
    )


OVERRIDE = ["--override-generation-config"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "--max-modle-len", "9"], "did you mean --max-model-len"),
        (["generate", "--guided-regex", "a+"], """it is --structured-outputs '{"regex": ...}'"""),
        (["generate", "--json-schema={}"], """'--json-schema'; it is --structured-outputs '{"json": ...}'"""),
        (["plan", "--guided-json", "{}"], "unknown argument '--guided-json'; "),
        (["generate", "--xyzzy"], "unknown argument '--xyzzy'; fleetfoot generate --help lists what it takes"),
        (["generate", "--max-toke", "9"], "did you mean --max-tokens"),  # abbreviations are not guessed
        (["generate", "a prompt"], "'a prompt' is no model; give a prompt with --prompt"),
        (["generate", "--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["generate", "--max-tokens", "many"], "'many' is neither an integer nor 'none'"),
        (["generate", "--stop-token-ids", "x"], "'x' is no list of token ids"),
        (["generate", "--logit-bias", "[1]"], "'[1]' is no JSON object"),
        (["generate", "--logit-bias", "{1"], "is not JSON"),
        (["generate", "--logit-bias", '{"1": 1e99}'], "fleetfoot generate: error: logit_bias[1] must be"),
        (["generate", "--temperature", "-1"], "fleetfoot generate: error: temperature must be 0 (greedy)"),
        (["generate", "--top-p", "nan"], "fleetfoot generate: error: top_p must be"),
        (["generate", "--n", "2", "--temperature", "0"], "n must be 1 with greedy sampling"),
        (["generate", "--prompt", "x", "--max-model-len", "0"], "max_model_len is 0; it must be at least 2"),
        (["generate", "--prompt", "x", "--gpu-memory-utilization", "2"], "gpu_memory_utilization is 2.0"),
        (["generate", "/no/model", "a prompt"], "unknown argument 'a prompt'; a prompt goes to --prompt"),
        (["generate", "--stop", "a", "./no-model", "--prompt", "x"], "model './no-model': no such folder"),
        (["generate", "--prompt", "x", "--generation-config", ""], "generation_config is an empty string"),
        (["generate", "--prompt", "x", *OVERRIDE, "[1]"], "generation_config is [1]; it must be"),
        (["generate", "--prompt", "x", *OVERRIDE, '{"top_q": 1}'], "'top_q'; did you mean 'top_p'"),
        (["generate", "--prompts-file", "/no/such/file"], "--prompts-file /no/such/file: No such file"),
        (["generate", "--stream", "--json"], "--stream and --json do not go together"),
        (["chat", "--n", "2"], "unknown argument '--n'"),
        (["bench", "latency", "--batch-size", "0"], "'0' is no integer of at least 1"),
        (["bench", "latency", "--output", "/no/such/folder/x.json"], "there is no such folder"),
        (["bench", "latency", "--output", "/proc/x.json"], "--output /proc/x.json: it cannot be written: "),
        (["bench", "throughput", "--input-len", "9:3"], "'9:3' is no range"),
        (["bench", "throughput", "--request-rate", "0"], "'0' is no number above 0"),
        (["bench", "throughput", "--prefix-len", "600"], "--prefix-len 600 is more than --input-len 512"),
        (["bench", "throughput", "--prompts-file", "-", "--input-len", "8"], "leave out --input-len"),
        (["bench", "throughputs"], "did you mean throughput?"),
        (["generate", "--dtype", "bfloat"], "did you mean bfloat16?"),
        (["generat"], "there is no command 'generat'; did you mean generate?"),
        (["xyzzy"], "there is no command 'xyzzy'; there are generate, chat, serve, bench, plan"),
        (["run-batch", "M"], "there is no command 'run-batch'; fleetfoot generate takes a file of prompts"),
        (["plan", "--pp=2"], "unknown argument '--pp'; it is --pipeline-parallel-size"),
        (["plan", "--data-parallel-rank", "2"], "data_parallel_rank is 2"),
        (["plan", "--enable_dbo"], "does not support enable_dbo=True; leave it out"),
        (["plan", "--speculative-model", "x"], "does not support speculative_model='x'; set speculative_config="),
        (["bench", "latency", "--output", "/"], "--output /: it is a folder"),
        (["bench", "throughput", "--output", ""], "it is a folder"),
        *(([name, "M", "--model", "N"], "two models are given, 'M' and 'N'") for name in ("generate", "chat")),
        (["plan", "--speculative-config", "{method:", "ngram}"], "is not JSON"),
        (["plan", "--speculative-config", "ngram"], """in a shell between single quotes: '{"key": "value"}'"""),
        (["plan", "--nnodes", "2"], "is 1 worker, which cannot be spread evenly over so many; it can be 1"),
        (["plan", "--nnodes=2", "--data-parallel-size=2", "--tensor-parallel-size=2"], "replicas that share nothing"),
        (["plan", "--node-rank", "1"], "with nnodes 1 it can be 0; set nnodes to the number of machines"),
        (["plan", "--master-addr", "10.0.0.1:29500"], "the port is master_port"),
        (["plan", "--kv-offloading-size", "nan"], "kv_offloading_size is nan; it must be a finite number"),
    ],
)
def test_a_wrong_call_is_refused(run: CommandRunner, argv: list[str], message: str) -> None:
    assert message in run.refused(*argv)


@pytest.mark.parametrize(("argv", "names"), [([], ("generate", "serve", "plan")), (["bench"], ("latency", "cold"))])
def test_without_a_command_there_is_a_list(run: CommandRunner, argv: list[str], names: tuple[str, ...]) -> None:
    run(*argv, code=2)
    assert all(f"\n    {name} " in run.err for name in names)


def test_verbose_shows_the_traceback_of_a_wrong_value(run: CommandRunner) -> None:
    run("generate", "--temperature", "-1", "--verbose", code=2)
    assert "Traceback" in run.err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RuntimeError("the device is gone"), 1, "fleetfoot generate: error: the device is gone\n"),
        (KeyError("x"), 1, "fleetfoot generate: error: KeyError: 'x'\n"),
        (MemoryError(), 1, "fleetfoot generate: error: MemoryError"),
        (UsageError("not like this"), 2, "fleetfoot generate: error: not like this\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, run: CommandRunner, error: BaseException, code: int, message: str
) -> None:
    monkeypatch.setattr(generate.command, "started_engine", mock.Mock(side_effect=error))
    run("generate", "--prompt", "x", code=code)
    assert run.err.startswith(message) if message else not run.err
    assert "Traceback" not in run.err
    assert ("--verbose" in run.err) == (code == 1)


def test_version_and_help(run: CommandRunner) -> None:
    assert run("--version") == f"fleetfoot {__version__}\n"
    assert "docs/benchmarks.md" in run("bench", "throughput", "--help")


def test_a_word_in_place_of_a_model(run: CommandRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", mock.Mock(side_effect=OSError("offline\nhelp")))
    error = run.refused("generate", "hello", "--prompt", "x")
    assert "there is no model 'hello': no folder " in error
    assert error.endswith("(OSError: offline); a prompt goes to --prompt\n")


def test_unwritable_standard_error_ends_no_command(run: CommandRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert run("plan", "--gpu-name", "x", "--json").startswith("{")


def test_python_m_runs_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "fleetfoot", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "fleetfoot")


@pytest.mark.parametrize(
    "words", [["worker"], ["serve", "--headless", "--uvicorn-log-level", "info", "--enable-server-load-tracking"]]
)
def test_a_worker_names_what_it_waits_for(
    words: list[str], run: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetfoot.executor.nodes.run_node", lambda config: None)
    flags = ["--nnodes", "2", "--tensor-parallel-size", "2", "--master-addr", "10.0.0.1"]
    run(*words, *flags, "--node-rank", "1")
    assert run.err == "this is node 1 of 2, and waits for node 0 at 10.0.0.1:29500\n"


@pytest.mark.parametrize("command", ["serve", "engine", "worker", "plan"])
def test_the_seed_of_a_server_is_its_engines_as_in_vllm(command: str) -> None:
    for flag in ("--seed", "--engine-seed"):
        assert arguments.given_settings(make_parser().parse_args([command, "m", flag, "3"]))["seed"] == 3

"""`fleetfoot plan`: the decision and the memory of a dozen configurations, from config.json alone."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.helpers.commands import CommandRunner

from fleetfoot import LLM
from fleetfoot.cli.plan import plan_report
from fleetfoot.config import sentence_transformers
from fleetfoot.config.env import USE_V2_MODEL_RUNNER
from fleetfoot.native.loading import native_problem

GIB = 1 << 30
CPU = ["--device", "cpu", "--cpu-memory", "64GiB"]
GPU_24 = ["--gpu-memory", "24GiB"]
H100 = ["--device", "cuda", "--gpu-memory", "80GiB", "--gpu-name", "NVIDIA H100"]
PARTS = ["weights", "kv_cache", "graphs", "activations", "runner_state", "rotary_table", "sampling_scratch"]
PARTS += ["driver", "left"]
KEYS = {"model_runner", "explicit", "reasons", "unsupported", "attention_backend", "kv_layout", "graphs", "memory"}
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}  # fmt: skip
NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
EXAMPLE = (
    '{"kv_connector": "ExampleConnector", "kv_role": "kv_both", '
    '"kv_connector_extra_config": {"shared_storage_path": "kv"}}'
)
STRANGER = '{"kv_connector": "Stranger", "kv_role": "kv_both", "kv_connector_module_path": "no.such.module"}'


Patch = pytest.MonkeyPatch


class Command(CommandRunner):
    def plan(self, *flags: str, code: int = 0) -> dict[str, Any]:
        report: dict[str, Any] = self.json("plan", "--json", *flags, code=code)
        assert self.err == ""  # warnings are in the object
        assert report.keys() >= KEYS
        assert all(sentence.endswith(".") for sentence in report["reasons"])
        assert report["runnable"] == (not report["problems"]) == (code == 0)
        return report


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: Patch) -> Command:
    monkeypatch.delenv(USE_V2_MODEL_RUNNER, raising=False)
    return Command(capsys)


def config_folder(folder: Path, **changes: Any) -> str:
    """A model that is a config.json and nothing else."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | changes))
    return str(folder)


@pytest.fixture
def llama_8b(tmp_path: Path) -> str:
    return config_folder(tmp_path / "llama-8b")


TRANSFER = ["--kv-transfer-config"]
V2_DEFAULT = "default of LlamaForCausalLM"
NONE = "No model runner supports"
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 2}
LFM2 = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 16}
JAMBA = {"architectures": ["JambaForCausalLM"], "mamba_d_state": 16, "num_experts": 16}
ODD_BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 48]}}
FP8 = {"quantization_config": {"quant_method": "fp8"}}
DECISIONS: dict[str, tuple[list[str], dict[str, Any], str, list[str], str]] = {
    "cpu": (CPU, {}, "v2", [], V2_DEFAULT),
    "gpu": (H100, {}, "v2", [], V2_DEFAULT),
    "gpu-without-triton": ([*H100, "--no-triton"], {}, "v1", [], "Triton"),
    "cpu-without-triton": ([*CPU, "--no-triton"], {}, "v2", [], V2_DEFAULT),
    "lora-v2": ([*H100, "--enable-lora", "--use-v2-model-runner"], {}, "v2", ["LoRA adapters"], f"{NONE} LoRA"),
    "no-module": ([*H100, *TRANSFER, STRANGER], {}, "v1", ["this KV connector"], f"{NONE} this KV connector"),
    "inactive": ([*H100, *TRANSFER, "{}"], {}, "v2", [], V2_DEFAULT),
    "quantized": (H100, FP8, "v2", [], V2_DEFAULT),
    "blocks": (H100, ODD_BLOCKS, "v1", ["quantized weights in a format without kernels"], "blocks of 128 x 48"),
    "experts": (H100, MIXTRAL, "v2", [], "default of MixtralForCausalLM"),
    "states": (H100, LFM2, "v2", [], "default of Lfm2ForCausalLM"),
    "hybrid": (H100, JAMBA, "v1", ["recurrent layers of other kinds"], "architecture Jamba"),
    "other": (H100, {"architectures": ["GPT2LMHeadModel"]}, "v1", [], f"{NONE} the architecture GPT2LMHeadModel."),
}


@pytest.mark.parametrize("case", DECISIONS)
def test_the_decision(case: str, run: Command, tmp_path: Path) -> None:
    flags, fields, runner, unsupported, reason = DECISIONS[case]
    is_runnable = (not unsupported and case != "other") or case == "blocks"
    report = run.plan(config_folder(tmp_path / "model", **fields), *flags, code=0 if is_runnable else 1)
    assert (report["model_runner"], report["explicit"]) == (runner, "--use-v2-model-runner" in flags)
    assert report["unsupported"] == unsupported
    assert reason in report["reasons"][0]
    assert (report["memory"] is None) == (case in ("hybrid", "other"))  # cannot be loaded
    for name in () if is_runnable else unsupported:
        assert any(problem.startswith(f"{name} (") for problem in report["problems"])


def test_what_v1_alone_does(run: Command) -> None:
    """One warning names all of it; with Model Runner V2 it is refused."""
    flags = [*TRANSFER, EXAMPLE, "--compilation-config", "1"]
    report = run.plan(*H100, *flags)
    names = ["stock torch.compile", "this KV connector's layout"]
    assert (report["model_runner"], report["compiles_layers"], report["unsupported"]) == ("v1", True, names)
    (warning,) = report["warnings"]
    accepts = "the KV connector ExampleConnector accepts token-major-nhd alone"
    assert accepts in warning and "stock torch.compile (compilation_config" in warning
    assert report["kv_layout"]["name"] == "token-major-nhd" and accepts in report["kv_layout"]["reason"]
    text = run("plan", *H100, *flags, "--model-runner", "v1")
    assert re.search(r"\nKV layout +token-major-nhd: .*\n +Model Runner V1 keeps .*ExampleConnector accepts", text)
    assert re.search(r"\ntorch.compile +each decoder layer", text)
    refused = run.plan(*H100, *flags, "--model-runner", "v2", code=1)
    assert [problem.split(" (")[0] for problem in refused["problems"]] == names


def test_a_plan_for_this_machine_is_what_an_engine_does(run: Command) -> None:
    flags = ["--max-num-seqs", "3", "--max-model-len", "500", "--block-size", "8"]
    report = run.plan("--device", "cpu", *flags)
    with LLM(device="cpu", max_num_seqs=3, max_model_len=500, block_size=8, skip_tokenizer_init=True) as llm:
        engine = llm.llm_engine
        assert engine.runner_name == report["model_runner"]
        assert engine.core.scheduler.config.num_blocks == report["memory"]["num_blocks"] == 3 * 63
        assert engine.input_processor.max_model_len == report["max_model_len"] == 500
        theirs = plan_report(engine.plan)
    for plan_of in (report, theirs):  # free memory changes all the time
        for name in ("total", "budget", "left"):
            del plan_of["memory"][name]
        del plan_of["parallel"]["stages"][0]["left"]
    assert theirs == report


@pytest.mark.parametrize(
    ("flag", "value", "part", "expected"),
    [
        ("--gpu-memory-utilization", "0.5", "budget", 40 * GIB),
        ("--max-num-seqs", "512", "sampling_scratch", "more"),
        ("--max-num-batched-tokens", "32768", "activations", "more"),
        ("--block-size", "32", "block_size", 32),
        ("--num-gpu-blocks-override", "77", "num_blocks", 77),
        ("--kv-cache-memory-bytes", str(GIB), "kv_cache", GIB),
        ("--dtype", "float32", "weights", 4 * 8_030_261_248),
        ("--max-model-len", "4096", "runner_state", "less"),
    ],
)
def test_every_flag_counts(flag: str, value: str, part: str, expected: int | str, run: Command, llama_8b: str) -> None:
    before, after = run.plan(llama_8b, *H100)["memory"][part], run.plan(llama_8b, *H100, flag, value)["memory"][part]
    relation = "more" if after > before else "less"
    assert before != after and expected in (after, relation)


def test_a_default_length_is_limited_to_what_fits(run: Command, llama_8b: str) -> None:
    report = run.plan(llama_8b, *GPU_24)
    assert 256 < report["max_model_len"] <= report["memory"]["num_tokens"] < 131072
    assert report["capacity"]["longest_context"] == report["max_model_len"]
    limit = f"requests are limited to {report['max_model_len']:,} tokens."
    warning = f"There is no room for KV of the model's 131,072 positions: {limit}"
    assert report["warnings"] == [warning]
    run("plan", llama_8b, *GPU_24)
    assert run.err == f"fleetfoot plan: warning: {warning}\n"


def test_the_text_says_what_the_object_says(run: Command, llama_8b: str) -> None:
    report = run.plan(llama_8b, *H100)
    words = " ".join(run("plan", llama_8b, *H100).split())
    assert run.err == ""
    for part in PARTS:
        assert f"{report['memory'][part]:,} bytes" in words
    for text in (
        *("model runner V2", report["reasons"][0], "V2 lacks nothing that is on"),
        f"attention {report['attention_backend']}",
        f"kernels triton for {len(report['kernels']) - 3}, hopper for 3 of {len(report['kernels'])} operations",
        "layers 0 to 31 fused: branches with norms and residual sums",
        "KV layout arena: [num_blocks",
        f"graphs {report['graphs']['num_shapes']} shapes",
        "decode: 1, 2, 4, 8, 16-64 by 16, 96-256 by 32 requests",
        "mixed: 16, 32-192 by 32, 256-1024 by 128 tokens",
        "72.00 GiB to use, of 80.00 GiB",
        "longest context 131,072 tokens, 3 such requests at a time",
        "cuda (NVIDIA H100), 80.00 GiB",
    ):
        assert text in words
    words = " ".join(run("plan", llama_8b, *H100, "--enable-lora", "--model-runner", "v2", code=1).split())
    assert "model runner none; the plan is that of V2 (you chose it)" in words and "V2 lacks LoRA adapters" in words
    assert "NOT RUNNABLE LoRA adapters (enable_lora is on): " in words
    assert "runs:" not in run("plan", llama_8b, *H100, "--no-triton", "--model-runner", "v2", code=1)


def test_experts(run: Command, tmp_path: Path) -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "mlp_only_layers": [0]}
    fields = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 4, **sizes}
    folder = config_folder(tmp_path / "moe", **fields)
    report = run.plan(folder, *H100)
    kinds = [{"num_experts": 8, "num_chosen": 2, "intermediate_size": 512, "num_layers": 3}]
    inactive = 3 * (8 - 2) * 3 * 512 * 4096
    assert report["experts"] == {"num_active_parameters": report["num_parameters"] - inactive, "kinds": kinds}
    assert (report["kernels"]["route"], report["kernels"]["experts"]) == ("triton", "triton")
    assert "active: experts 2 of 8" in run("plan", folder, *H100)
    table = run("plan", folder, *H100, "--kernels")
    assert "8 experts [1024, 4096] of layers 1-3, by rows" in table
    assert "one, 4 and 1 outputs" in table

    # whole experts on each rank
    flags = (*H100, "--enable-expert-parallel", "--tensor-parallel-size", "4")
    split = run.plan(folder, *flags)
    placement = {"slots": [2] * 4, "bytes": 3 * 2 * 3 * 512 * 4096 * 2}
    assert split["experts"]["kinds"] == [kinds[0] | placement]
    assert split["memory"]["weights"] == run.plan(folder, *flags[:-3], *flags[-2:])["memory"]["weights"]
    assert "experts 8 of each of 3 layers: 2 + 2 + 2 + 2 on the ranks of a stage" in " ".join(
        run("plan", folder, *flags).split()
    )
    assert "grouped 64x128x16" in table and "few 16x256x8" in table


MODELS: dict[str, dict[str, Any]] = {"MODEL": {}, "WRONG": {"hidden_size": "wide"}}


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (["/no/such/model"], ["'/no/such/model': no such folder"]),
        (["MODEL", "--model", "another"], ["two models are given", "leave one out"]),
        (["MODEL", "--gpu-memory", "12GiB"], ["the model does not fit", "GiB of GPU memory, or more"]),
        (["MODEL", *GPU_24, "--max-model-len", "131072"], ["131,072, but the KV cache has room", "(--max-model-len "]),
        (["MODEL", "--device", "cpu", "--cpu-memory", "8GiB"], ["the model does not fit", "GiB of memory, or more"]),
        (["MODEL", "--max-model-len", "999999"], ["set max_model_len to at most 131072"]),
        (["--gpu-memory", "80GiB", "--device", "cpu"], ["--device is cpu"]),
        (["--gpu-memory", "much"], ["'much' is no size; write 80GiB"]),
        *((["--gpu-memory", word], [f"'{word}' is no size"]) for word in ("0", "80B", "85899345920", "80,5", "")),
        (["--max-model-len", "1"], ["max_model_len is 1; it must be at least 2"]),
        (["--block-size", "1", "--num-gpu-blocks-override", "1"], ["KV of at least 2 tokens", "override=2 (--num"]),
        (["--block-size", "1", "--kv-cache-memory-bytes", "2048", "--max-model-len", "2"], ["memory_bytes=4096 (--kv"]),
        (
            ["--model-runner", "v2", "--no-use-v2-model-runner"],
            ["model_runner is 'v2' and use_v2_model_runner is False"],
        ),
        (["--kv-transfer-config", "{"], ["kv_transfer_config is not JSON"]),
        (["--speculative-config", '{"method": "magic", "num_speculative_tokens": 1}'], ["method is 'magic'"]),
        (["--prompt", "x"], ["unknown argument '--prompt'"]),
        (["WRONG"], ["hidden_size is 'wide'"]),
    ],
    ids=str,
)
def test_what_cannot_be_planned(flags: list[str], messages: list[str], run: Command, tmp_path: Path) -> None:
    models = {name: config_folder(tmp_path / name, **changes) for name, changes in MODELS.items()}
    error = run.refused("plan", *[models.get(flag, flag) for flag in flags])
    for message in ("fleetfoot plan: error: ", *messages):
        assert message in error


@pytest.mark.parametrize(("flags", "sizes"), [([], [2, 4]), (["--max-model-len", "131072"], [4])])
def test_a_model_for_several_gpus_gets_the_smallest_number(
    run: Command, tmp_path: Path, flags: list[str], sizes: list[int]
) -> None:
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    flags = [config_folder(tmp_path / "llama-70b", **shape), "--gpu-memory", "80", *flags]
    error = run.refused("plan", *flags)
    assert [int(size) for size in re.findall(r"\(--tensor-parallel-size (\d+)\)$", error, re.MULTILINE)] == sizes
    assert "GiB of GPU memory, or more" in error
    run.plan(*flags, "--tensor-parallel-size", str(sizes[0]))
    assert "tensor" not in run.refused("plan", *flags, "--distributed-executor-backend", "uni")


def test_it_needs_no_torch(tmp_path: Path) -> None:
    """Nor numpy, a tokenizer or the hub, whether the plan is for this machine (where there is no GPU) or another."""
    model = config_folder(tmp_path / "model")
    eagle = '{"method": "eagle", "num_speculative_tokens": 3}'
    script = f"""
import sys
from fleetfoot.cli.main import main
calls = [[{model!r}, "--device", "cpu", "--cpu-memory", "64GiB"], ["--gpu-memory", "1GiB"],
         ["--json", "--device", "cpu", "--enable-lora", "--speculative-config", {eagle!r}],
         [{model!r}, "--gpu-memory", "1GiB"]]
codes = [main(["plan", *call]) for call in calls]
heavy = [name for name in ("torch", "numpy", "tokenizers", "huggingface_hub", "jinja2") if name in sys.modules]
sys.exit(f"{{codes}} {{heavy}}" if codes != [0, 2, 1, 2] or heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_more_than_the_config_is_downloaded(run: Command, llama_8b: str, monkeypatch: Patch) -> None:
    download = mock.Mock(return_value=llama_8b)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    report = run.plan("some/model", *H100, "--revision", "main", "--tokenizer", "another/model")
    assert report["num_parameters"] == 8_030_261_248
    (call,) = download.call_args_list
    assert (call.args, call.kwargs["revision"]) == (("some/model",), "main")
    assert call.kwargs["allow_patterns"] == [
        *("config.json", "generation_config.json", "*quant*_config.json"),
        *sentence_transformers.FILES,
    ]


@pytest.mark.parametrize("flags", [H100, CPU], ids=["gpu", "cpu"])
def test_what_sleep_gives_back(flags: list[str], run: Command, llama_8b: str, monkeypatch: Patch) -> None:
    assert run.plan(llama_8b, *flags)["sleep"] is None
    flags = [*flags, "--enable-sleep-mode"]
    is_gpu = flags[1] == "cuda"
    if not (is_gpu and native_problem()):
        report = run.plan(llama_8b, *flags)
        weights, kv_cache = report["memory"]["weights"], report["memory"]["kv_cache"]
        moved = weights if is_gpu else 0
        assert report["sleep"] == {
            "level_1": kv_cache + moved, "level_2": kv_cache + weights, "pinned_host_memory": moved
        }  # fmt: skip
        assert "of pinned host memory" in run("plan", llama_8b, *flags)
    if not is_gpu:
        assert run.plan(llama_8b, *flags, *TRANSFER, NIXL)["runnable"]
        return
    if not native_problem():
        assert "NixlConnector registers the KV cache" in run.refused("plan", llama_8b, *flags, *TRANSFER, NIXL)
    monkeypatch.setenv("FLEETFOOT_USE_NATIVE_KERNELS", "0")
    error = run.refused("plan", llama_8b, *flags)
    assert "enable_sleep_mode is True, but the C library" in error and "FLEETFOOT_USE_NATIVE_KERNELS=0" in error

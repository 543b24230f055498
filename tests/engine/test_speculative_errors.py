"""Drafters that are missing or do not fit: the errors before a start; and the plan of a drafter."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.commands import CommandRunner
from tests.helpers.runner_lives import DRAFT

from fleetfoot import LLM
from fleetfoot.assets import embedded_eagle_path, embedded_model_path
from fleetfoot.records.weights import WeightError


def start(model: str | Path | None = None, method: str = "", target: str = "story-llama", **settings: Any) -> None:
    speculative = {"method": method, "num_speculative_tokens": 2} | ({} if model is None else {"model": str(model)})
    LLM(model=target, device="cpu", num_gpu_blocks_override=64, speculative_config=speculative, **settings).shutdown()


def copy_of(source: Path, folder: Path, **fields: Any) -> Path:
    """A checkpoint with other fields in its config.json."""
    made = folder / "drafter"
    shutil.copytree(source, made)
    content = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**content, **fields}))
    return made


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_no_such_model(method: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"^speculative_config: model '/no/such/folder': no such folder"):
        start("/no/such/folder", method)


def test_a_whole_model_is_no_head() -> None:
    with pytest.raises(WeightError, match=r"'story-llama' .* has no tensor fc.weight, .* method 'draft_model'"):
        start("story-llama", "eagle")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    folder = copy_of(DRAFT, tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightError, match=r"no \*.safetensors in"):
        start(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config.json in"):
        start(folder)


HEAD = embedded_eagle_path()


@pytest.mark.parametrize(
    ("source", "fields", "message"),
    [
        (HEAD, {"vocab_size": 100}, "a vocabulary of 100 tokens and the model one of 2,048"),
        (DRAFT, {"architectures": ["GPT2LMHeadModel"]}, r"architectures is \['GPT2LMHeadModel'\]"),
        (DRAFT, {"quantization_config": {"quant_method": "fp8"}}, "quantized checkpoints are not"),
        (DRAFT, {"intermediate_size": 64}, "do not fit its config.json"),
        (HEAD, {"intermediate_size": 64}, "do not fit its config.json"),
    ],
)
def test_a_drafter_that_does_not_fit(source: Path, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        start(copy_of(source, tmp_path, **fields), "eagle" if source == HEAD else "draft_model")


def test_a_drafter_with_few_positions(tmp_path: Path, run: CommandRunner) -> None:
    """Also without ``max_model_len``, which is then the model's."""
    folder = copy_of(DRAFT, tmp_path, max_position_embeddings=512)
    message = r"has 512 positions \(max_position_embeddings\), fewer than the max_model_len 1,024; set max_model_len to"
    with pytest.raises(ValueError, match=message):
        start(folder)
    config = json.dumps({"model": str(folder), "num_speculative_tokens": 2})
    error = run.refused("plan", "--device", "cpu", "--speculative-config", config)
    assert "fewer than the max_model_len 2,048" in error
    start(folder, max_model_len=512)


def plan(run: CommandRunner, speculative: dict[str, Any] | None, *flags: str) -> tuple[dict[str, Any], str]:
    """The report, and the text with every run of blanks as one."""
    given = [] if speculative is None else ["--speculative-config", json.dumps(speculative)]
    words = ("plan", "--device", "cpu", "--cpu-memory", "64GiB", *given, *flags)
    return run.json(*words, "--json"), " ".join(run(*words).split())


PLANS: dict[str, tuple[dict[str, Any], tuple[str | None, int], str]] = {
    "eagle": (
        {"method": "eagle", "num_speculative_tokens": 3},
        ("story-llama-eagle", 1),
        "drafter EAGLE head story-llama-eagle: 3 drafts for each decode, where it is seen to pay 1 layer: ",
    ),
    "draft_model": (
        {"model": str(DRAFT), "num_speculative_tokens": 1, "adaptive": False, "disable_by_batch_size": 8},
        (str(DRAFT), 2),
        f"drafter draft model {DRAFT}: 1 draft for each decode, up to 8 requests at a time 2 layers: ",
    ),
    "ngram": (
        {"num_speculative_tokens": 4, "prompt_lookup_max": 3},
        (None, 0),
        "drafter n-grams of 1 to 3 tokens: 4 drafts for each decode, where it is seen to pay KV layout",
    ),
}
"""The speculative config, the name of the model and its number of layers, and a line of the text."""


@pytest.mark.parametrize("method", PLANS)
def test_the_plan_of_a_drafter(method: str, run: CommandRunner) -> None:
    speculative, model, line = PLANS[method]
    plain, plain_text = plan(run, None)
    report, text = plan(run, speculative)
    drafter, memory = report["drafter"], report["memory"]
    assert plain["drafter"] is None and "drafter" not in plain_text
    assert line in text
    assert (drafter["method"], drafter["model"], drafter["num_layers"]) == (method, *model)
    assert {"adaptive": True, **speculative}.items() <= {**drafter, "disable_by_batch_size": 8}.items()
    assert method != "ngram" or (drafter["prompt_lookup_max"], drafter["prompt_lookup_min"]) == (3, 1)
    assert drafter["weights"] == memory["weights"] - plain["memory"]["weights"]
    assert report["kv_layout"]["bytes_per_block"] == plain["kv_layout"]["bytes_per_block"] + drafter["bytes_per_block"]
    assert drafter["kv_cache"] == memory["num_blocks"] * drafter["bytes_per_block"]
    assert method != "eagle" or drafter["bytes_per_block"] == 2 * 2 * 32 * 16 * 2  # K and V, heads, size, tokens, bf16
    assert (drafter["weights"] > 0) == (drafter["kv_cache"] > 0) == (method != "ngram")


def test_the_drafter_is_on_the_last_rank(run: CommandRunner) -> None:
    report, _ = plan(run, {"model": str(DRAFT), "num_speculative_tokens": 1}, "--pipeline-parallel-size", "2")
    first, last = report["parallel"]["stages"]
    assert last["kv_cache"] - first["kv_cache"] == report["drafter"]["kv_cache"] > 0


def test_the_plan_of_graphs_with_drafts(run: CommandRunner) -> None:
    speculative = json.dumps({"num_speculative_tokens": 3})
    flags = ["--device", "cuda", "--gpu-memory", "80GiB", "--max-num-seqs", "16", "--speculative-config", speculative]
    graphs = run.json("plan", "--json", *flags)["graphs"]
    assert graphs["num_drafts"] == 3
    assert graphs["uniform"] == graphs["decode"] == [1, 2, 4, 8, 16]
    assert graphs["captured_at_start"] == 4


@pytest.mark.parametrize("target", ["story-llama", embedded_model_path()], ids=["name", "path"])
@pytest.mark.parametrize("model", [None, "story-llama-eagle"])
def test_the_embedded_head_is_found(target: str | Path, model: str | None) -> None:
    start(model, "eagle", target=str(target), max_model_len=64)

"""Drafters that cannot be had or do not fit: what an engine says before it starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.runner_lives import DRAFT

from fleetfoot import LLM
from fleetfoot.assets import embedded_eagle_path, embedded_model_path
from fleetfoot.cli.main import main
from fleetfoot.records.weights import WeightError

Streams = pytest.CaptureFixture[str]


def start(model: str | Path | None = None, method: str = "", **settings: Any) -> None:
    wish: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    if model is not None:
        wish["model"] = str(model)
    LLM(device="cpu", num_gpu_blocks_override=64, speculative_config=wish, **settings).shutdown()


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


def test_a_folder_without_weights(tmp_path: Path) -> None:
    folder = copy_of(DRAFT, tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightError, match=r"no \*.safetensors in"):
        start(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config.json in"):
        start(folder)


def test_a_whole_model_is_no_head() -> None:
    with pytest.raises(WeightError, match=r"'story-llama' .* has no tensor fc.weight, .* method 'draft_model'"):
        start("story-llama", "eagle")


@pytest.mark.parametrize(
    ("source", "method", "fields", "message"),
    [
        (embedded_eagle_path(), "eagle", {"vocab_size": 100}, "a vocabulary of 100 tokens and the model one of 2,048"),
        (DRAFT, "draft_model", {"architectures": ["GPT2LMHeadModel"]}, r"architectures is \['GPT2LMHeadModel'\]"),
        (DRAFT, "draft_model", {"quantization_config": {"quant_method": "fp8"}}, "quantized checkpoints are not"),
        (DRAFT, "draft_model", {"intermediate_size": 64}, "do not fit its config.json"),
        (embedded_eagle_path(), "eagle", {"intermediate_size": 64}, "do not fit its config.json"),
    ],
)
def test_what_does_not_fit(source: Path, method: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        start(copy_of(source, tmp_path, **fields), method)


def test_a_drafter_with_few_positions(tmp_path: Path, capsys: Streams) -> None:
    """Also where nobody has said how long requests may be: they are then as long as the model allows."""
    folder = copy_of(DRAFT, tmp_path, max_position_embeddings=512)
    message = r"has 512 positions \(max_position_embeddings\), fewer than the max_model_len 1,024; set max_model_len to"
    with pytest.raises(ValueError, match=message):
        start(folder)
    config = json.dumps({"model": str(folder), "num_speculative_tokens": 2})
    assert main(["plan", "--device", "cpu", "--speculative-config", config]) == 2
    assert "fewer than the max_model_len 2,048" in capsys.readouterr().err
    start(folder, max_model_len=512)


# --- the plan says who drafts ---------------------------------------------------------------------------------------


def plan(capsys: Streams, wish: dict[str, Any] | None, *flags: str) -> tuple[dict[str, Any], str]:
    """The object, and the text with every run of blanks as one."""
    given = [] if wish is None else ["--speculative-config", json.dumps(wish)]
    flags = ("--device", "cpu", "--cpu-memory", "64GiB", *given, *flags)
    assert main(["plan", "--json", *flags]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert main(["plan", *flags]) == 0
    return report, " ".join(capsys.readouterr().out.split())


def test_the_plan_of_a_head(capsys: Streams) -> None:
    plain, plain_text = plan(capsys, None)
    report, text = plan(capsys, {"method": "eagle", "num_speculative_tokens": 3})
    drafter, memory = report["drafter"], report["memory"]
    assert plain["drafter"] is None and "drafter" not in plain_text
    assert (drafter["method"], drafter["model"]) == ("eagle", "story-llama-eagle")
    assert (drafter["num_speculative_tokens"], drafter["num_layers"], drafter["adaptive"]) == (3, 1, True)
    assert drafter["weights"] == memory["weights"] - plain["memory"]["weights"]
    assert drafter["bytes_per_block"] == 2 * 2 * 32 * 16 * 2  # key and value, heads, size, tokens, bfloat16
    assert report["kv_layout"]["bytes_per_block"] == plain["kv_layout"]["bytes_per_block"] + drafter["bytes_per_block"]
    assert drafter["kv_cache"] == memory["num_blocks"] * drafter["bytes_per_block"]
    assert "drafter EAGLE head story-llama-eagle: 3 drafts for each decode, where it is seen to pay 1 layer: " in text


def test_the_plan_of_a_draft_model_on_the_last_rank(capsys: Streams) -> None:
    wish = {"model": str(DRAFT), "num_speculative_tokens": 1, "adaptive": False, "disable_by_batch_size": 8}
    report, text = plan(capsys, wish, "--pipeline-parallel-size", "2")
    assert (report["drafter"]["model"], report["drafter"]["num_layers"]) == (str(DRAFT), 2)
    first, last = report["parallel"]["stages"]
    assert last["kv_cache"] - first["kv_cache"] == report["drafter"]["kv_cache"] > 0
    assert f"drafter draft model {DRAFT}: 1 draft for each decode, up to 8 requests at a time 2 layers: " in text


def test_the_plan_of_n_grams(capsys: Streams) -> None:
    report, text = plan(capsys, {"num_speculative_tokens": 4, "prompt_lookup_max": 3})
    drafter = report["drafter"]
    assert (drafter["method"], drafter["model"], drafter["weights"], drafter["kv_cache"]) == ("ngram", None, 0, 0)
    assert (drafter["prompt_lookup_max"], drafter["prompt_lookup_min"]) == (3, 1)
    assert "drafter n-grams of 1 to 3 tokens: 4 drafts for each decode, where it is seen to pay KV layout" in text


def test_the_plan_of_graphs_with_drafts(capsys: Streams) -> None:
    wish = json.dumps({"num_speculative_tokens": 3})
    flags = ["--device", "cuda", "--gpu-memory", "80GiB", "--max-num-seqs", "16", "--speculative-config", wish]
    assert main(["plan", "--json", *flags]) == 0
    graphs = json.loads(capsys.readouterr().out)["graphs"]
    assert graphs["num_drafts"] == 3
    assert graphs["uniform"] == graphs["decode"] == [1, 2, 4, 8, 16]
    assert graphs["captured_at_start"] == 4


def test_the_embedded_model_is_found_by_its_path_too() -> None:
    LLM(
        model=str(embedded_model_path()),
        device="cpu",
        max_model_len=64,
        num_gpu_blocks_override=16,
        speculative_config={"method": "eagle", "num_speculative_tokens": 2},
    ).shutdown()

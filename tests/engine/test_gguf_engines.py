"""Engines on GGUF files: the tokens of the checkpoints that they were made of."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.helpers.checkpoints import UNTRAINED, make_checkpoint
from tests.helpers.gguf_files import write_gguf

from fleetfoot import LLM, SamplingParams
from fleetfoot.config.json_fields import ConfigError
from fleetfoot.native.loading import native_problem
from fleetfoot.plan.machine import Machine
from fleetfoot.weights.hub import ModelNotFoundError, resolve_model

pytest.importorskip("gguf")
STORY, QWEN = Path("src/fleetfoot/assets/story-llama"), Path("tests/assets/story-qwen3")
PROMPTS = ["Once upon a time", "The little dog ran"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def generate(model: Path, **settings: object) -> list[list[int]]:
    llm = LLM(model=str(model), device="cpu", dtype="float32", max_model_len=64, **settings)
    return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("folder", [STORY, QWEN], ids=["llama", "qwen3"])
def test_a_file_of_floats_has_the_tokens_of_its_checkpoint(folder: Path, tmp_path: Path) -> None:
    """Rows of q and k, the tokenizer and the config are those of the checkpoint; in one file and in parts."""
    expected = generate(folder)
    assert generate(write_gguf(folder, tmp_path / "whole.gguf", "BF16")) == expected
    assert generate(write_gguf(folder, tmp_path / "part.gguf", "F32", split=30)) == expected


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("qwen3-moe", {"mlp_only_layers": [], "norm_topk_prob": True}),
        ("gpt-oss", {"hidden_size": 64, "intermediate_size": 32}),
        ("gemma3", {"sliding_window_pattern": 6, "query_pre_attn_scalar": 16}),
    ],
)
def test_other_architectures_have_the_tokens_of_their_checkpoints(
    name: str, changed: dict[str, object], tmp_path: Path
) -> None:
    if name == "gpt-oss" and native_problem():
        pytest.skip("its experts have no other kernels")
    model_type, config = UNTRAINED[name]
    make_checkpoint(tmp_path / "model", model_type, **{**config, **changed})
    path = write_gguf(tmp_path / "model", tmp_path / "model.gguf", "F32")
    found = []
    for model in (tmp_path / "model", path):
        llm = LLM(model=str(model), device="cpu", dtype="float32", max_model_len=64, skip_tokenizer_init=True)
        prompts = [{"prompt_token_ids": [3, 90, 17, 4, 55, 68, 21, 9]}, {"prompt_token_ids": [7, 7, 31]}]
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
        found.append([list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]


def test_gpt_oss_is_refused_where_blocks_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, config = UNTRAINED["gpt-oss"]
    make_checkpoint(tmp_path / "model", model_type, **config)
    path = write_gguf(tmp_path / "model", tmp_path / "model.gguf", "F32")
    monkeypatch.setenv("FLEETFOOT_USE_NATIVE_KERNELS", "0")
    with pytest.raises(ConfigError, match="C kernels"):
        LLM(model=str(path), device="cpu", skip_tokenizer_init=True)


def mixed(module: str) -> str:
    """v and down in another type than the rest, as in the files that people download."""
    return "Q8_0" if module.endswith(("v_proj", "down_proj")) else "Q5_0" if "layers.1" in module else "Q5_1"


def test_blocks_are_read_in_place_or_dequantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tokens of both agree; later ones may differ, as inputs of products in place have 8 bits."""
    path = write_gguf(STORY, tmp_path / "mixed.gguf", mixed)
    found = [generate(path), generate(path, model_runner="v1")]
    assert found[0] == found[1]
    monkeypatch.setenv("FLEETFOOT_USE_NATIVE_KERNELS", "0")
    dequantized = generate(path)
    assert [each[:2] for each in found[0]] == [each[:2] for each in dequantized]


@pytest.mark.skipif(bool(native_problem()), reason="without the C kernels files are copied")
def test_the_plan_knows_the_types(tmp_path: Path) -> None:
    from fleetfoot.config.engine import EngineConfig
    from fleetfoot.plan.resolve import resolve_plan

    path = write_gguf(STORY, tmp_path / "mixed.gguf", mixed)
    config = EngineConfig(model=str(path), device="cpu", max_model_len=64)
    plan = resolve_plan(config, Machine.detect(), config_only=True)
    names = [f"model.layers.0.self_attn.{each}_proj" for each in "qkv"]
    assert plan.linear_methods.of(names).name == "Q5_1, Q8_0"
    assert plan.linear_methods.of(["lm_head"]).name == "Q5_1"


def test_a_folder_with_several_files_needs_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    first = write_gguf(STORY, folder / "story-Q8_0.gguf")
    assert resolve_model(folder) == resolve_model(first)
    shutil.copy(first, folder / "story-Q4_K_M.gguf")
    with pytest.raises(ModelNotFoundError, match=r"story-Q4_K_M\.gguf, story-Q8_0\.gguf"):
        resolve_model(folder)


def test_a_name_of_a_repository_chooses_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for name in ("story-Q8_0.gguf", "story-Q5_K_M.gguf"):
        write_gguf(STORY, folder / name)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: str(folder))
    assert resolve_model("owner/repo:Q8_0").name.startswith("story-Q8_0-")
    assert resolve_model("owner/repo:q5_k_m").name.startswith("story-Q5_K_M-")
    with pytest.raises(ModelNotFoundError, match="found: story-Q5_K_M"):
        resolve_model("owner/repo:Q5_K")


@pytest.mark.skipif(bool(native_problem()), reason="without the C kernels files are copied")
def test_a_file_that_is_cut_while_mapped_is_an_error(tmp_path: Path) -> None:
    """In a process of its own: the error stays until the process ends."""
    import subprocess
    import sys

    path = write_gguf(STORY, tmp_path / "cut.gguf")
    program = f"""
import os
from fleetfoot import LLM, SamplingParams
llm = LLM(model={str(path)!r}, device="cpu", max_model_len=64)
os.truncate({str(path)!r}, 4096)
try:
    llm.generate(["Once"], SamplingParams(max_tokens=4), use_tqdm=False)
except Exception as error:
    print("refused:", error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert "refused:" in result.stdout and "cut" in result.stdout, result.stderr[-2000:]

"""Which drafter a configuration means, whether it fits, and what it takes of memory."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleetfoot.assets import embedded_eagle_path, embedded_model_path
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.model import ModelConfig
from fleetfoot.config.parsing import load_model_config
from fleetfoot.records.kv_layout import KVCacheSpec
from fleetfoot.speculative.find import NO_DRAFTER, DrafterModel, DrafterShape, drafter_shape, find_drafter
from fleetfoot.weights.checkpoint import Checkpoint

DRAFT = Path(__file__).parent.parent / "assets" / "story-draft"
TARGET = load_model_config(embedded_model_path())


def wish(model: str | Path | None = None, method: str = "", engine: dict[str, Any] | None = None) -> EngineConfig:
    settings: dict[str, Any] = {"num_speculative_tokens": 3, "method": method}
    if model is not None:
        settings["model"] = str(model)
    return EngineConfig(speculative_config=settings, **(engine or {}))  # type: ignore[arg-type]


def find(config: EngineConfig) -> DrafterModel:
    found = find_drafter(config, TARGET)
    assert found is not None
    return found


def shape_of(config: EngineConfig, target: ModelConfig, dtype: str, device: str) -> DrafterShape:
    return drafter_shape(config, target, find_drafter(config, target), dtype, device)


def changed_head(folder: Path, **fields: Any) -> Path:
    """A copy of the embedded head's config.json with other fields."""
    content = json.loads((embedded_eagle_path() / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **fields}))
    return folder


def test_embedded_names() -> None:
    assert find(wish("story-llama")).folder == embedded_model_path()
    assert find(wish(method="eagle")).folder == embedded_eagle_path()
    assert find(wish("story-llama-eagle", "eagle")).folder == embedded_eagle_path()
    assert find(wish(DRAFT)).folder == DRAFT


def test_nothing_to_find() -> None:
    assert find_drafter(EngineConfig(), TARGET) is None
    assert find_drafter(wish(method="ngram"), TARGET) is None


def test_other_models_have_no_head_of_their_own() -> None:
    with pytest.raises(
        ValueError, match=r"'eagle' needs a model, and none is given; .* 'story-llama', and for no other"
    ):
        find(wish(method="eagle", engine={"model": "a/model"}))


def test_a_head_is_no_draft_model() -> None:
    with pytest.raises(ValueError, match=r"an EAGLE head, .* set method to 'eagle'"):
        find(wish("story-llama-eagle"))


def test_eagle_3_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="EAGLE-3 heads are not supported"):
        find(wish(changed_head(tmp_path, architectures=["LlamaForCausalLMEagle3"]), "eagle"))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"])
def test_names_that_heads_have(tmp_path: Path, name: str) -> None:
    found = find(wish(changed_head(tmp_path, architectures=[name]), "eagle"))
    assert found.config.architecture == "LlamaForCausalLM"


def test_sizes_that_do_not_fit_are_both_named(tmp_path: Path) -> None:
    head = changed_head(tmp_path, vocab_size=4096)
    with pytest.raises(ValueError, match="vocabulary of 4,096 tokens and the model one of 2,048"):
        find(wish(head, "eagle"))
    head = changed_head(tmp_path, hidden_size=96)
    with pytest.raises(ValueError, match="hidden_size 96 and the model has 192"):
        find(wish(head, "eagle"))
    head = changed_head(tmp_path, max_position_embeddings=512)
    with pytest.raises(ValueError, match=r"has 512 positions .* max_model_len 513; set max_model_len to at most 512"):
        find(wish(head, "eagle", {"max_model_len": 513}))
    find(wish(head, "eagle", {"max_model_len": 512})).check_length(512)


def test_a_heads_memory() -> None:
    config = wish(method="eagle", engine={"max_model_len": 256})
    shape = shape_of(config, TARGET, "bfloat16", "cuda")
    with Checkpoint(embedded_eagle_path()) as checkpoint:
        values = sum(checkpoint.tensor(name).numel() for name in checkpoint.names())
    assert shape.num_drafts == 3
    assert shape.kv_specs == (KVCacheSpec(2, 32),)
    rotary = (256 + 3) * 32 * 4
    assert 0 <= shape.weight_bytes - rotary - 2 * values <= 2 * 2 * 192  # a norm and a bias that it does not have


def test_a_draft_models_memory() -> None:
    config = wish(DRAFT, engine={"max_model_len": 256})
    shape = shape_of(config, TARGET, "float32", "cuda")
    draft = load_model_config(DRAFT)
    assert shape.weight_bytes == 4 * draft.num_parameters + (256 + 3) * 32 * 4
    assert shape.kv_specs == (KVCacheSpec(1, 32),) * 2
    on_cpu = shape_of(config, TARGET, "float32", "cpu")
    assert on_cpu.weight_bytes - shape.weight_bytes == 4 * 2048 * 64  # the packed head
    untied = dataclasses.replace(TARGET, tie_word_embeddings=False)
    assert shape_of(config, untied, "float32", "cuda") == shape


def test_a_head_far_from_the_embedding_has_its_own() -> None:
    untied = dataclasses.replace(TARGET, tie_word_embeddings=False)
    near = shape_of(wish(method="eagle"), untied, "float32", "cuda")
    far = shape_of(wish(method="eagle", engine={"pipeline_parallel_size": 2}), untied, "float32", "cuda")
    assert far.weight_bytes - near.weight_bytes == 4 * 2048 * 192


def test_n_grams_take_nothing_but_room_for_tokens() -> None:
    assert shape_of(wish(method="ngram"), TARGET, "float32", "cpu") == DrafterShape(3)
    assert shape_of(EngineConfig(), TARGET, "float32", "cpu") == NO_DRAFTER


def test_none_of_it_needs_torch() -> None:
    code = f"""
import sys
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.parsing import load_model_config
from fleetfoot.speculative.find import drafter_shape, find_drafter
config = EngineConfig(speculative_config={{"method": "eagle", "num_speculative_tokens": 3}})
target = load_model_config({str(embedded_model_path())!r})
assert drafter_shape(config, target, find_drafter(config, target), "float32", "cpu").weight_bytes
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)

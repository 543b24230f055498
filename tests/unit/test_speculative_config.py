"""``speculative_config``: what it takes, which drafter it means, whether that fits, and its memory."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.int8_method import Int8

from fleetfoot.assets import embedded_eagle_path, embedded_model_path
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.model import ModelConfig
from fleetfoot.config.parsing import load_model_config
from fleetfoot.config.speculative import SpeculativeConfig
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.resolve import resolve_plan
from fleetfoot.records.kv_layout import KVCacheSpec
from fleetfoot.speculative.find import NO_DRAFTER, DrafterModel, DrafterShape, drafter_shape, find_drafter
from fleetfoot.weights.checkpoint import Checkpoint


def parse(**settings: Any) -> SpeculativeConfig:
    return SpeculativeConfig.parse({"num_speculative_tokens": 3, **settings})


@pytest.mark.parametrize(
    ("settings", "method", "longest", "shortest"),
    [
        ({}, "ngram", 5, 1),
        ({"prompt_lookup_max": 3}, "ngram", 3, 1),
        ({"prompt_lookup_min": 2}, "ngram", 5, 2),
        ({"prompt_lookup_min": 8}, "ngram", 8, 8),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 4}, "ngram", 4, 4),
        ({"method": "eagle"}, "eagle", None, None),
        ({"model": "a/draft"}, "draft_model", None, None),
        ({"model": "./ngram"}, "draft_model", None, None),
    ],
)
def test_defaults(settings: dict[str, Any], method: str, longest: int | None, shortest: int | None) -> None:
    config = parse(**settings)
    assert (config.method, config.prompt_lookup_max, config.prompt_lookup_min) == (method, longest, shortest)
    assert config.model == settings.get("model")
    assert SpeculativeConfig.parse(json.dumps({"num_speculative_tokens": 3, **settings})) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is missing or 0; it must be given"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1; it must be an integer of at least 1"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens is None"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"num_speculative_tokens": False}, "num_speculative_tokens is False"),
        ({"num_speculative_tokens": 2.0}, "num_speculative_tokens is 2.0"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens is 65; it can be at most 64"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max is 0"),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_min is 3 and prompt_lookup_max is 2"),
        ({"method": "eagle", "prompt_lookup_max": 3}, "prompt_lookup_max is 3, which means nothing for .*'eagle'"),
        ({"model": "a/draft", "prompt_lookup_min": 1}, "prompt_lookup_min is 1, which means nothing"),
        ({"method": "ngram", "model": "a/draft"}, "model is 'a/draft', and method 'ngram' takes none"),
        ({"method": "draft_model"}, "method 'draft_model' needs a model"),
        ({"method": "eagle3", "model": "a/head"}, "EAGLE-3 heads, .* are not supported; method 'eagle' takes"),
        ({"method": "medusa"}, "method is 'medusa'; it can be ngram, draft_model, eagle"),
        ({"disable_by_batch_size": 0}, "disable_by_batch_size is 0"),
        ({"disable_by_batch_size": "8"}, "disable_by_batch_size is '8'"),
        ({"adaptive": 1}, "adaptive is 1; it must be true or false"),
        ({"model": "[ngram]"}, r"model is '\[ngram\]', which is no model here; set method to 'ngram'"),
        ({"model": "ngram", "method": "ngram"}, "a folder of that name is './ngram'"),
    ],
    ids=str,
)
def test_invalid_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(**settings)


def test_invalid_keys() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens is missing or 0"):
        EngineConfig(speculative_config={"method": "eagle"})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="did you mean 'disable_by_batch_size'"):
        parse(disable_by_batchsize=8)
    with pytest.raises(TypeError, match=r"'draft_tensor_parallel_size'; leave it out: .* each rank runs the"):
        parse(draft_tensor_parallel_size=1)
    assert parse(model=Path("a") / "draft").model == "a/draft"


def drafting(k: int, **settings: Any) -> EngineConfig:
    return EngineConfig(speculative_config={"num_speculative_tokens": k}, **settings)  # type: ignore[arg-type]


def test_a_step_must_hold_the_drafts_of_every_request() -> None:
    assert drafting(3, max_num_seqs=4, max_num_batched_tokens=16).max_decode_tokens == 16
    message = r"is 15, .* 4 tokens, one and 3 drafts, .* max_num_seqs \(4\): raise it to 16, or set max_num_seqs=3"
    with pytest.raises(ValueError, match=f"max_num_batched_tokens {message}"):
        drafting(3, max_num_seqs=4, max_num_batched_tokens=15)
    with pytest.raises(ValueError, match=r"max_num_seqs \(2\): raise it to 8$"):  # no number of requests would help
        drafting(3, max_num_seqs=2, max_num_batched_tokens=3)
    for k, tokens in ((3, 2048), (64, 256 * 65)):  # the default
        plan = resolve_plan(drafting(k), Machine(64 << 30), environ={}, config_only=True)
        assert plan.max_num_batched_tokens == tokens


DRAFT = Path(__file__).parent.parent / "assets" / "story-draft"
TARGET = load_model_config(embedded_model_path())


def make_config(drafter: str | Path | None = None, method: str = "", **engine: Any) -> EngineConfig:
    settings = {"num_speculative_tokens": 3, "method": method, **({} if drafter is None else {"model": str(drafter)})}
    return EngineConfig(speculative_config=settings, **engine)  # type: ignore[arg-type]


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


def test_models_are_found() -> None:
    assert find(make_config("story-llama")).folder == embedded_model_path()
    for name in (None, "story-llama-eagle"):
        assert find(make_config(name, "eagle")).folder == embedded_eagle_path()
    assert find(make_config(DRAFT)).folder == DRAFT
    assert find_drafter(EngineConfig(), TARGET) is find_drafter(make_config(method="ngram"), TARGET) is None


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"])
def test_names_that_heads_have(tmp_path: Path, name: str) -> None:
    found = find(make_config(changed_head(tmp_path, architectures=[name]), "eagle"))
    assert found.config.architecture == "LlamaForCausalLM"


EAGLE_3 = {"architectures": ["LlamaForCausalLMEagle3"]}
SHORT = {"max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("fields", "engine", "message"),
    [
        (EAGLE_3, {}, "EAGLE-3 heads are not supported"),
        ({"vocab_size": 4096}, {}, "vocabulary of 4,096 tokens and the model one of 2,048"),
        ({"hidden_size": 96}, {}, "hidden_size 96 and the model has 192"),
        (SHORT, {"max_model_len": 513}, r"has 512 positions .* max_model_len 513; set max_model_len to at most 512"),
        (None, {"model": "a/model"}, r"'eagle' needs a model, and none is given; .* 'story-llama', and for no other"),
    ],
)
def test_heads_that_do_not_fit(fields: Any, engine: dict[str, Any], message: str, tmp_path: Path) -> None:
    head = None if fields is None else changed_head(tmp_path, **fields)
    with pytest.raises(ValueError, match=message):
        find(make_config(head, "eagle", **engine))


def test_a_head_has_its_own_method_and_length(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"an EAGLE head, .* set method to 'eagle'"):
        find(make_config("story-llama-eagle"))
    find(make_config(changed_head(tmp_path, **SHORT), "eagle", max_model_len=512)).check_length(512)


def test_a_heads_memory() -> None:
    config = make_config(method="eagle", max_model_len=256)
    shape = shape_of(config, TARGET, "bfloat16", "cuda")
    with Checkpoint(embedded_eagle_path()) as checkpoint:
        values = sum(checkpoint.tensor(name).numel() for name in checkpoint.names())
    assert shape.num_drafts == 3
    assert shape.kv_specs == (KVCacheSpec(2, 32),)
    rotary = (256 + 3) * 32 * 4
    assert 0 <= shape.weight_bytes - rotary - 2 * values <= 2 * 2 * 192  # a norm and a bias that it does not have


def test_a_draft_models_memory() -> None:
    config = make_config(DRAFT, max_model_len=256)
    shape = shape_of(config, TARGET, "float32", "cuda")
    draft = load_model_config(DRAFT)
    assert shape.weight_bytes == 4 * draft.num_parameters + (256 + 3) * 32 * 4
    assert shape.kv_specs == (KVCacheSpec(1, 32),) * 2
    on_cpu = shape_of(config, TARGET, "float32", "cpu")
    assert on_cpu.weight_bytes - shape.weight_bytes == 4 * 2048 * 64  # the packed head
    untied = dataclasses.replace(TARGET, tie_word_embeddings=False)
    assert shape_of(config, untied, "float32", "cuda") == shape
    int8 = drafter_shape(config, TARGET, shape.model, "float32", "cuda", Int8())
    assert shape.weight_bytes - int8.weight_bytes == draft.num_layers * sum(
        outputs * (3 * inputs - 4) for outputs, inputs, _ in draft.layer_linears()
    )


def test_the_memory_of_a_head_far_from_the_embedding_and_of_n_grams() -> None:
    untied = dataclasses.replace(TARGET, tie_word_embeddings=False)
    near = shape_of(make_config(method="eagle"), untied, "float32", "cuda")
    far = shape_of(make_config(method="eagle", pipeline_parallel_size=2), untied, "float32", "cuda")
    assert far.weight_bytes - near.weight_bytes == 4 * 2048 * 192
    assert shape_of(make_config(method="ngram"), TARGET, "float32", "cpu") == DrafterShape(3)
    assert shape_of(EngineConfig(), TARGET, "float32", "cpu") == NO_DRAFTER

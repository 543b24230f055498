"""The models against `transformers` on the same random checkpoints, in float32, through a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.checkpoints import TINY, make_checkpoint, make_reference, reference_logits
from tests.helpers.kernels import cpu_kernels
from tests.helpers.paged_models import LLAMA3, MODELS, YARN, PagedCache, assert_close, checkpoint, context, prompt, run
from tests.helpers.specs import model_config, ropes_of

from fleetfoot.config.architectures import ARCHITECTURES
from fleetfoot.config.model import AttentionSpec, LayerSpec, MLPSpec
from fleetfoot.config.parsing import load_model_config
from fleetfoot.layers.decoder import representatives
from fleetfoot.layers.rotary import inverse_frequencies, rotary_table
from fleetfoot.models.interface import CausalLM, model_class
from fleetfoot.records.forward_context import IntermediateTensors
from fleetfoot.records.weights import WeightError
from fleetfoot.weights.checkpoint import Checkpoint
from fleetfoot.weights.loading import ModelLoader
from fleetfoot.weights.store import WeightStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(folder: Path, layers: range | None = None, **changes: Any) -> CausalLM:
    return ModelLoader(load_model_config(folder), context(**changes), folder, layers=layers).load()


def assert_logits(model: CausalLM, reference: PreTrainedModel) -> None:
    assert_close(run(model, PagedCache(model.config, 16), {0: prompt(30)})[0], reference_logits(reference, prompt(30)))


@pytest.mark.parametrize("case", MODELS)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    reference, tokens = checkpoint(tmp_path, case), prompt(70)
    model = load(tmp_path)
    expected = reference_logits(reference, tokens)

    assert_close(run(model, PagedCache(model.config, 16), {0: tokens})[0], expected)  # at once
    cache = PagedCache(model.config, 4)
    chunks = [run(model, cache, {1: tokens[begin:end]})[1] for begin, end in ((0, 1), (1, 30), (30, 35), (35, 60))]
    decodes = [run(model, cache, {1: [token]})[1] for token in tokens[60:]]  # then token by token
    assert_close(torch.cat(chunks + decodes), expected)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1000000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        {**LLAMA3, "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 8192},
        {**YARN, "rope_theta": 1000000.0, "original_max_position_embeddings": 32768},
        {**YARN, "truncate": False, "beta_fast": 64.0, "attention_factor": 1.25},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_angles_equal_those_of_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 1, "head_dim": 128, "max_position_embeddings": 131072, "rope_parameters": rope}
    reference = make_reference("llama", **fields)
    reference.config.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    (rope_config,) = ropes_of(config)
    assert rope_config is not None
    frequencies = inverse_frequencies(rope_config, config.layers[0].mixer.head_dim)
    torch.testing.assert_close(frequencies, reference.model.rotary_emb.inv_freq, rtol=0, atol=0)
    table = rotary_table(
        rope_config, config.layers[0].mixer.head_dim, config.max_position_embeddings, torch.device("cpu")
    )
    assert table.shape == (131072, 128)
    positions = torch.cat((torch.arange(64), torch.arange(64, 131072, 997), torch.tensor([131071])))
    cos, sin = reference.model.rotary_emb(torch.zeros(1), positions[None])
    expected = torch.cat((cos[0, :, :64], sin[0, :, :64]), dim=-1)
    torch.testing.assert_close(table[positions], expected, rtol=0, atol=2e-7)  # a vector's cosine and a scalar's


@pytest.mark.parametrize("case", ["llama", "llama-biases", "mistral-window", "qwen2", "qwen3-layer-types"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_ragged_batches_equal_single_requests(case: str, block_size: int, tmp_path: Path) -> None:
    reference = checkpoint(tmp_path, case)
    model = load(tmp_path, ops=cpu_kernels())
    cache = PagedCache(model.config, block_size)
    tokens = {request: prompt(length, seed=request) for request, length in enumerate((40, 9, 25, 33))}
    # Requests join, prefill in chunks and decode in the same steps; single tokens stand first in each.
    schedule = [{0: 20, 1: 8}, {1: 1, 0: 13, 2: 4}, {0: 1, 2: 21, 3: 30}, {3: 1, 0: 1}, {0: 1, 3: 1}, {0: 4}, {3: 1}]
    logits: dict[int, list[torch.Tensor]] = {request: [] for request in tokens}
    done = dict.fromkeys(tokens, 0)
    for step in schedule:
        batch = {request: tokens[request][done[request] : done[request] + count] for request, count in step.items()}
        for request, rows in run(model, cache, batch).items():
            logits[request].append(rows)
            done[request] += step[request]
    assert done == {request: len(ids) for request, ids in tokens.items()}
    for request, ids in tokens.items():
        assert_close(torch.cat(logits[request]), reference_logits(reference, ids))


@pytest.mark.parametrize(
    ("case", "tied"), [("qwen3", False), ("qwen3", True), ("granite", True), ("smollm3-layers", False)]
)
@pytest.mark.parametrize("cut", [1, 2])
def test_a_model_in_two_parts_gives_the_same_logits(case: str, tied: bool, cut: int, tmp_path: Path) -> None:
    checkpoint(tmp_path, case, tie_word_embeddings=tied)
    whole, first, last = (load(tmp_path, layers) for layers in (None, range(cut), range(cut, 3)))
    config = whole.config
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (True, False, False, True)

    cache = PagedCache(config, 4)
    input_ids, ctx = cache.step({0: prompt(30)})
    between = first(input_ids, replace(ctx, kv_caches=cache.kv_caches[:cut]))
    assert isinstance(between, IntermediateTensors)
    received = between.empty_like()
    received.hidden_states.copy_(between.hidden_states)
    ctx = replace(ctx, kv_caches=cache.kv_caches[cut:])
    hidden = last(input_ids, ctx, received)
    assert isinstance(hidden, torch.Tensor)
    expected = run(whole, PagedCache(config, 4), {0: prompt(30)})[0]
    torch.testing.assert_close(last.compute_logits(hidden), expected, rtol=0, atol=0)

    with pytest.raises(ValueError, match="intermediate_tensors"):
        last(input_ids, ctx)
    with pytest.raises(ValueError, match="no logits head"):
        first.compute_logits(hidden)
    for layers in (range(0), range(2, 4), range(0, 3, 2), range(2, -1, -1)):
        with pytest.raises(ValueError, match="expected consecutive ones"):
            load(tmp_path, layers)


@pytest.mark.parametrize("case", MODELS)
def test_the_weight_specs_are_the_tensors_of_checkpoints(case: str, tmp_path: Path) -> None:
    reference = checkpoint(tmp_path, case)
    (tmp_path / "config.json").write_text(reference.config.to_json_string(use_diff=False))
    config = load_model_config(tmp_path)
    model = ModelLoader(config, context(), None, "dummy").load()
    specs = {spec.name: spec.shape for spec in model.weight_specs()}
    with Checkpoint(tmp_path) as stored:
        assert specs == {name: stored.shape(name) for name in stored.names()}
    buffers = sum(buffer.numel() for name, buffer in reference.named_buffers() if "correction" in name)
    assert config.num_parameters == reference.num_parameters() + buffers


@pytest.mark.parametrize("case", ["qwen3-moe-dense-layers", "qwen2-moe", "mixtral", "granite-moe", "gpt-oss"])
def test_experts_in_stacks_are_those_of_single_tensors(case: str, tmp_path: Path) -> None:
    reference, tokens = checkpoint(tmp_path, case), prompt(30)
    expected, model = reference_logits(reference, tokens), load(tmp_path)
    tensors = dict(reference.state_dict())
    if reference.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if case == "mixtral":  # of a layer's parts, transformers has renamed all
        tensors = {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in tensors.items()}
    if case == "granite-moe":
        tensors = {name.replace(".router.weight", ".router.layer.weight"): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    stacked = load(tmp_path)
    assert_close(run(stacked, PagedCache(stacked.config, 16), {0: tokens})[0], expected)

    # and as an update
    store = WeightStore(torch.device("cpu"))
    store.add(model)
    doubled = {name: 2 * tensor for name, tensor in tensors.items() if "experts." in name and "shared" not in name}
    report = store.stage_tensors(doubled.items())
    assert (report.unknown, report.problems) == (set(), [])
    store.commit(1)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if ".experts." in name:
                parameter.mul_(2.0)
    assert_logits(model, reference)
    wrong = [(name, tensor[:1]) for name, tensor in doubled.items()]
    assert len(store.stage_tensors(wrong).problems) == len(wrong)


VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8}
EXPORTS: dict[str, Callable[[str], str]] = {
    "current": lambda name: name,
    "first": lambda name: (
        name.replace("model.language_model.", "language_model.model.")
        .replace("model.vision_tower.", "vision_tower.")
        .replace("model.multi_modal_projector.", "multi_modal_projector.")
        .replace("lm_head.", "language_model.lm_head.")
    ),
    "base model": lambda name: name.removeprefix("model."),
}


@pytest.mark.parametrize("tied", [False, True])
def test_the_decoder_of_a_multimodal_gemma_3(tied: bool, tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {**TINY, "sliding_window": 9, "sliding_window_pattern": 2}
    vision = {"model_type": "siglip_vision_model", "image_size": 16, **VISION}
    special = {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92, "mm_tokens_per_image": 4}
    config = Gemma3Config(text_config=text, vision_config=vision, tie_word_embeddings=tied, **special)
    reference, tokens = Gemma3ForConditionalGeneration(config).eval(), prompt(30)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(0.0, 0.15, generator=torch.Generator().manual_seed(parameter.numel()))
    expected = reference_logits(reference, tokens)
    config.save_pretrained(tmp_path)
    tensors = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
    if tied:
        del tensors["lm_head.weight"]
    for export, rename in EXPORTS.items():
        if export == "base model" and not tied:
            continue  # it has no logits head
        save_file({rename(name): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        for layers in (None, range(1), range(1, 3)):
            model = load(tmp_path, layers)
            if layers is None:
                assert_close(run(model, PagedCache(model.config, 4), {0: tokens})[0], expected)
                store = WeightStore(torch.device("cpu"))
                store.add(model)
                report = store.stage_checkpoint(str(tmp_path))
                assert (report.unknown, report.problems) == (set(), [])
                store.discard()
    head = 0 if tied else reference.lm_head.weight.numel()
    assert model.config.num_parameters == reference.model.language_model.num_parameters() + head
    tensors["model.language_model.extra.weight"] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match="1 unexpected"):
        load(tmp_path)


def test_the_registry_names_the_class_of_each_architecture() -> None:
    config = model_config("LlamaForCausalLM", 8, 8, 8, 1, 2, 2, 4, 16, layer_windows=(None,))
    for architecture in ARCHITECTURES:
        assert issubclass(model_class(replace(config, architecture=architecture)), CausalLM)
    with pytest.raises(ValueError, match="'GPT2LMHeadModel' is not supported; supported: LlamaForCausalLM, Mistral"):
        model_class(replace(config, architecture="GPT2LMHeadModel"))
    model = model_class(config)(config, context())
    with pytest.raises(RuntimeError, match="process_weights_after_loading"):  # it is not loaded
        run(model, PagedCache(config, 4), {0: [1, 2]})


def test_a_shortened_model_has_a_layer_of_each_kind(tmp_path: Path) -> None:
    def kept(*windows: int | None, wide: tuple[int, ...] = ()) -> list[int]:
        mixers = (AttentionSpec(2, 1, 8, window=window) for window in windows)
        return representatives([LayerSpec(each, MLPSpec(16 if i in wide else 8)) for i, each in enumerate(mixers)])

    assert [kept(*[None] * count) for count in (1, 2, 6)] == [[0], [0, 1], [0, 5]]
    assert [kept(None, 5, 5, None, None, last) for last in (None, 5)] == [[0, 1, 5]] * 2
    assert kept(5, None, None, None) == [0, 1, 3]
    # a wide layer after a narrow one, a narrow one after a wide one, and two of each in a row
    assert kept(*[None] * 8, wide=(2, 3, 4)) == [0, 1, 2, 3, 7]
    kinds = ["full_attention", *["sliding_attention"] * 2, *["full_attention"] * 3]
    sliding = {"use_sliding_window": True, "sliding_window": 5, "layer_types": kinds}
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=len(kinds), **sliding)
    model = load(tmp_path, range(2, 6))
    modules = list(model.model.layers.values())
    with model.shortened():
        assert [modules.index(run) for run in model.model.layers._runs] == [0, 1, 3]
    assert len(model.model.layers._runs) == len(model.layers)

"""Linear methods by the names of layers: in models, in the memory plan, and in the fused run."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.int8_method import Int8, quantize
from tests.helpers.paged_models import PagedCache, context, prompt

from fleetfoot.config.parsing import load_model_config
from fleetfoot.fusion.decoder import fuse
from fleetfoot.models.interface import CausalLM
from fleetfoot.quantization.base import LinearMethods
from fleetfoot.quantization.unquantized import UNQUANTIZED
from fleetfoot.weights.loading import ModelLoader

INT8 = Int8()
SOME = {
    "a layer": ("model.layers.1.*",),
    "an MLP and the head": ("model.layers.0.mlp.*", "lm_head"),
    "one kind": ("*.o_proj",),
    "a whole product": ("*.self_attn.[qkv]_proj",),
}


def test_the_first_pattern_that_fits_counts() -> None:
    methods = LinearMethods(INT8, (("lm_head", UNQUANTIZED.default), ("model.layers.[01].*", UNQUANTIZED.default)))
    names = "lm_head", "model.layers.1.mlp.down_proj", "model.layers.2.mlp.down_proj", "model.layers.10.mlp.down_proj"
    assert [methods.of([name]).name for name in names] == ["unquantized", "unquantized", "int8", "int8"]


def test_parts_of_one_product_have_one_method(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    methods = LinearMethods(UNQUANTIZED.default, (("*.k_proj", INT8),))
    message = (
        r"different linear methods: model.layers.0.self_attn.q_proj unquantized, model.layers.0.self_attn.k_proj int8"
    )
    with pytest.raises(ValueError, match=message):
        ModelLoader(load_model_config(tmp_path), context(linear_methods=methods), tmp_path).load()


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    with pytest.raises(ValueError, match="lm_head has the method 'int8', and is the embedding"):
        ModelLoader(load_model_config(tmp_path), context(linear_methods=LinearMethods(INT8)), tmp_path).load()


def logits(model: CausalLM) -> list[torch.Tensor]:
    cache, found = PagedCache(model.config, 4), []
    for tokens in ({0: prompt(9), 1: prompt(3)}, {0: [5], 1: [6]}):
        input_ids, ctx = cache.step(tokens)
        found.append(model.compute_logits(model(input_ids, ctx)))
    return found


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("names", SOME.values(), ids=SOME)
def test_some_layers_are_quantized(names: tuple[str, ...], is_fused: bool, tmp_path: Path) -> None:
    """The model computes with the values that its quantized layers stand for, plain and fused."""
    make_checkpoint(tmp_path / "whole", "llama", num_hidden_layers=3)
    methods = LinearMethods(UNQUANTIZED.default, tuple((name, INT8) for name in names))
    config, folders = load_model_config(tmp_path / "whole"), (tmp_path / "packed", tmp_path / "rounded")
    contents = quantize(load_file(tmp_path / "whole" / "model.safetensors"), methods)
    for folder, tensors in zip(folders, contents, strict=True):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
    chosen = context(linear_methods=methods)
    model = ModelLoader(config, chosen, folders[0]).load()
    expected = ModelLoader(config, context(), folders[1]).load()
    if is_fused:
        fuse(model.model.layers, chosen, (True,) * 3)
    for one, other in zip(logits(model), logits(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    size = methods.layer_bytes(config, range(3), "float32")
    assert size < UNQUANTIZED.layer_bytes(config, range(3), "float32")
    assert size == sum(spec.destination().nbytes for spec in model.weight_specs() if "layers." in spec.name)
    assert pickle.loads(pickle.dumps(methods)) == methods != UNQUANTIZED

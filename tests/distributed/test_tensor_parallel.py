"""Models that are shared by ranks give the logits of the whole model, with the same bits on every rank."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests.distributed.ranks import run_world
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.int8_method import Int8, quantize
from tests.helpers.kernels import cpu_kernels
from tests.helpers.paged_models import PagedCache, prompt

from fleetfoot.assets import embedded_model_path
from fleetfoot.config.parsing import load_model_config
from fleetfoot.config.sharding import pipeline_layers
from fleetfoot.distributed.groups import SINGLE_TENSOR_GROUP, StepShape, TensorGroup, TorchTensorGroup, make_groups
from fleetfoot.fusion.decoder import fuse
from fleetfoot.layers.context import ModelContext
from fleetfoot.models.interface import CausalLM
from fleetfoot.quantization.base import LinearMethod
from fleetfoot.records.forward_context import ForwardContext, IntermediateTensors
from fleetfoot.weights.loading import ModelLoader, reload_weights

CPU = torch.device("cpu")
ASSETS = {
    "story-llama": embedded_model_path(),
    "story-mistral": Path(__file__).parents[1] / "assets" / "story-mistral",
    "story-qwen3": Path(__file__).parents[1] / "assets" / "story-qwen3",
}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "window": ("mistral", {"sliding_window": 7}),
    "one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "small-vocabulary": ("llama", {"vocab_size": 40, "tie_word_embeddings": True}),  # the last of 4 ranks has no token
}
CASES = [
    ("story-llama", 2),  # 6 heads of 2 KV heads, tied
    ("story-mistral", 3),  # one KV head on all ranks; a vocabulary of 2048 over 3; a window
    ("story-qwen3", 2),
    ("story-qwen3", 4),  # each KV head on two ranks
    ("biases", 2),
    ("biases", 4),
    ("qwen2-tied", 2),
    ("window", 4),
    ("one-kv-head", 4),
    ("small-vocabulary", 4),
]


class SummingGroup(TorchTensorGroup):
    """As on GPUs: layers are split by their inputs, and the parts are summed over the ranks."""

    bitwise_reproducible = False


KINDS = {"exact": TorchTensorGroup, "summed": SummingGroup}


def context(group: TensorGroup) -> ModelContext:
    return ModelContext(cpu_kernels(), cpu_kernels().attention, torch.float32, CPU, tensor_group=group)


def load(
    folder: Path, group: TensorGroup = SINGLE_TENSOR_GROUP, linear_method: LinearMethod | None = None, **options: Any
) -> CausalLM:
    ctx = context(group) if linear_method is None else replace(context(group), linear_method=linear_method)
    return ModelLoader(load_model_config(folder), ctx, folder, **options).load()


def steps(model: CausalLM) -> Iterator[tuple[torch.Tensor, ForwardContext]]:
    """Inputs, the same on every rank: prompts, a decode beside the rest of a prompt, and decodes."""
    attention = model.model.layers[str(model.layers[0])].self_attn
    num_layers, num_kv_heads = len(model.layers), attention.num_kv_heads
    part = replace(model.config, num_layers=num_layers, num_kv_heads=num_kv_heads, layer_windows=())
    cache = PagedCache(part, block_size=4)
    for number, lengths in enumerate(((20, 3), (1, 27), (1, 1))):
        prompts = [prompt(length, part.vocab_size, seed=10 * number + length) for length in lengths]
        yield cache.step(dict(enumerate(prompts)))


@torch.inference_mode()
def run_steps(model: CausalLM) -> list[torch.Tensor]:
    """Logits ``[num_tokens, vocab_size]`` of each step."""
    return [model.compute_logits(model(input_ids, ctx)).clone() for input_ids, ctx in steps(model)]


def work_of_four(rank: int, folders: dict[str, Path]) -> dict[Any, Any]:
    """All that is done over ranks, in one world of four: smaller groups are its first ranks."""
    groups = {size: dist.new_group(list(range(size)), backend="gloo") for size in (2, 3, 4)}
    found: dict[Any, Any] = {}
    for name, size in CASES:
        if rank < size:
            for way, kind in KINDS.items():
                model = load(folders[name], group := kind(groups[size]))
                found[way, name, size] = run_steps(model)
                found[f"fused {way}", name, size] = run_steps(fused(model, group))
            attention = model.model.layers["0"].self_attn
            found["heads", name, size] = (attention.paged.num_heads, attention.num_kv_heads)
    if rank < 2:
        group, folder = TorchTensorGroup(groups[2]), folders["biases"]
        model = load(folder, group, load_format="dummy", seed=5)
        found["dummy"] = run_steps(model)
        reload_weights(model, context(group), folder)
        found["reloaded"] = run_steps(model)
        for name, kind in KINDS.items():
            group = kind(groups[2])
            found["int8", name] = run_steps(load(folders["int8"], group, Int8()))
            for is_fused in (False, True):
                found["residual", name, is_fused] = residual_streams(folders["biases"], group, is_fused)
    found["pipeline"] = run_pipeline(folders["story-qwen3"])
    return found


def fused(model: CausalLM, group: TensorGroup) -> CausalLM:
    fuse(model.model.layers, context(group), [True] * len(model.layers))
    return model


@torch.inference_mode()
def residual_streams(folder: Path, group: TensorGroup, is_fused: bool) -> list[torch.Tensor]:
    """The output of the first two layers of a model in each step, ``[num_tokens, hidden_size]``."""
    model = load(folder, group, layers=range(2))
    if is_fused:
        fused(model, group)
    return [model(input_ids, ctx).hidden_states.clone() for input_ids, ctx in steps(model)]


@torch.inference_mode()
def run_pipeline(folder: Path) -> list[torch.Tensor]:
    """Two tensor ranks by two pipeline ranks; logits of the steps on the last ones."""
    config = load_model_config(folder)
    groups = make_groups(2, 2, StepShape(64, config.hidden_size, torch.float32, CPU))
    pipeline = groups.pipeline
    model = load(folder, groups.tensor, layers=pipeline_layers(config, pipeline.rank, pipeline.size))
    logits = []
    for input_ids, ctx in steps(model):
        hidden = model(input_ids, ctx, pipeline.receive(len(input_ids)))
        if isinstance(hidden, IntermediateTensors):
            pipeline.send(hidden)
        else:
            logits.append(model.compute_logits(hidden).clone())
    dist.barrier()  # no rank leaves with a step on its way
    return logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = dict(ASSETS)
    for name, (model_type, fields) in TINY.items():
        folders[name] = tmp_path_factory.mktemp(name)
        make_checkpoint(folders[name], model_type, **fields)
    folder = folders["int8"] = tmp_path_factory.mktemp("int8")
    (folder / "config.json").write_text((folders["biases"] / "config.json").read_text())
    quantized, _ = quantize(load_file(folders["biases"] / "model.safetensors"))
    save_file(quantized, folder / "model.safetensors")
    return folders


@pytest.fixture(scope="module")
def four(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_world(tmp_path_factory.mktemp("four"), 4, work_of_four, folders)


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Within float32's rounding: sums over ranks are made in another order than within one."""
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


Found = list[dict[Any, Any]]


@pytest.mark.parametrize("way", ["exact", "summed", "fused exact", "fused summed"])
@pytest.mark.parametrize(("name", "size"), CASES)
def test_logits_equal_the_whole_models(four: Found, folders: dict[str, Path], name: str, size: int, way: str) -> None:
    ranks = [found[way, name, size] for found in four[:size]]
    assert_close(ranks[0], run_steps(load(folders[name])))
    for logits in ranks[1:]:
        assert_equal(logits, ranks[0])  # or else ranks could choose different tokens
    config = load_model_config(folders[name])
    heads = (config.num_heads // size, max(1, config.num_kv_heads // size))
    assert [found["heads", name, size] for found in four[:size]] == [heads] * size


def test_dummy_reloaded_and_quantized_weights(four: Found, folders: dict[str, Path]) -> None:
    dummy = run_steps(load(folders["biases"], load_format="dummy", seed=5))
    quantized = run_steps(load(folders["int8"], linear_method=Int8()))
    for found in four[:2]:
        assert_close(found["dummy"], dummy)
        assert_equal(found["reloaded"], found["exact", "biases", 2])
        assert_close(found["int8", "exact"], quantized)
        assert_close(found["int8", "summed"], quantized)


@pytest.mark.parametrize("way", ["exact", "summed"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_residual_is_whole_on_every_rank(four: Found, folders: dict[str, Path], way: str, is_fused: bool) -> None:
    first, second = (found["residual", way, is_fused] for found in four[:2])
    assert_close(first, residual_streams(folders["biases"], SINGLE_TENSOR_GROUP, is_fused=False))
    assert_equal(first, second)


def test_pipeline_of_tensor_groups_computes_what_a_tensor_group_does(four: Found) -> None:
    assert [len(found["pipeline"]) for found in four] == [0, 0, 3, 3]
    for found in four[2:]:
        assert_equal(found["pipeline"], four[0]["exact", "story-qwen3", 2])

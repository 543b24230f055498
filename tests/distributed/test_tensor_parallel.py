"""Models that are shared by ranks give the logits of the whole model, with the same bits on every rank; KV connectors
in worker processes. (`tests/engine/test_matrix.py` compares the tokens of such engines.)"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests.distributed.ranks import Turns, TurnsGroup, run_world, running, shorten_story
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import run_requests
from tests.helpers.faulty_connector import OFFLOADING, connector, faulty
from tests.helpers.int8_method import Int8, quantize
from tests.helpers.kernels import cpu_kernels
from tests.helpers.kv_pair import opened
from tests.helpers.paged_models import MODELS, MULTIPLIERS, PagedCache, prompt
from tests.helpers.prefill_decode import REQUESTS, ROOMY, SIZE, Tokens, decodes, nixl, prefilled, settle, tokens_of
from tests.helpers.runner_lives import DRAFT
from tests.helpers.schedules import assert_lives_agree, live_alone, random_lives
from tests.helpers.specs import changed

from fleetfoot.assets import embedded_eagle_path, embedded_model_path
from fleetfoot.config.model import (
    GatedDeltaNetSpec,
    LayerSpec,
    Mamba2Spec,
    ModelConfig,
    RecurrentSpec,
    RopeConfig,
    ShortConvSpec,
)
from fleetfoot.config.parsing import load_model_config
from fleetfoot.config.sharding import pipeline_layers
from fleetfoot.distributed.groups import SINGLE_TENSOR_GROUP, Groups, StepShape, TensorGroup, make_groups
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.fusion import plan_fusion
from fleetfoot.fusion.decoder import fuse
from fleetfoot.layers.context import ModelContext
from fleetfoot.models.interface import CausalLM
from fleetfoot.outputs import RequestOutput
from fleetfoot.quantization.base import LinearMethods
from fleetfoot.quantization.unquantized import UNQUANTIZED
from fleetfoot.records.forward_context import ForwardContext, IntermediateTensors
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.weights.loading import ModelLoader, reload_weights

CPU = torch.device("cpu")
ASSETS = {
    "story-llama": embedded_model_path(),
    "story-mistral": Path(__file__).parents[1] / "assets" / "story-mistral",
    "story-qwen3": Path(__file__).parents[1] / "assets" / "story-qwen3",
}
PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.5}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "window": ("mistral", {"sliding_window": 7}),
    "phi3-partial": ("phi3", {"rope_parameters": PARTIAL, "tie_word_embeddings": True}),
    "granite": ("granite", MULTIPLIERS),
    "one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "gemma2": ("gemma2", {"sliding_window": 7, "attn_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {"sliding_window": 7, "num_key_value_heads": 1}),
    "olmo2": ("olmo2", {}),
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
    ("phi3-partial", 2),  # tensors of several layers
    ("phi3-partial", 4),
    ("granite", 4),
    ("one-kv-head", 4),
    ("small-vocabulary", 4),
    ("gemma2", 2),
    ("gemma3", 4),
    ("olmo2", 2),
    ("olmo2", 4),  # each KV head on two ranks
]


class SummingGroup(TurnsGroup):
    """As on GPUs: layers are split by their inputs, and the parts are summed over the ranks."""

    bitwise_reproducible = False


KINDS = {"exact": TurnsGroup, "summed": SummingGroup}


def context(group: TensorGroup) -> ModelContext:
    return ModelContext(cpu_kernels(), cpu_kernels().attention, torch.float32, CPU, groups=Groups(group))


def load(
    folder: Path, group: TensorGroup = SINGLE_TENSOR_GROUP, linear_methods: LinearMethods = UNQUANTIZED, **options: Any
) -> CausalLM:
    ctx = replace(context(group), linear_methods=linear_methods)
    return ModelLoader(load_model_config(folder), ctx, folder, **options).load()


def steps(model: CausalLM, part: ModelConfig | None = None) -> Iterator[tuple[torch.Tensor, ForwardContext]]:
    """Inputs, the same on every rank: prompts, a decode beside the rest of a prompt, and decodes. ``part``: the layers
    of a rank; None: all have attention with as many KV heads as the first."""
    if part is None:
        attention = model.model.layers[str(model.layers[0])].self_attn
        num_layers, num_kv_heads = len(model.layers), attention.num_kv_heads
        part = changed(model.config, num_layers=num_layers, num_kv_heads=num_kv_heads, window=None, rope=RopeConfig())
    cache = PagedCache(part, block_size=4)
    for number, lengths in enumerate(((20, 3), (1, 27), (1, 1))):
        prompts = [prompt(length, part.vocab_size, seed=10 * number + length) for length in lengths]
        yield cache.step(dict(enumerate(prompts)))


@torch.inference_mode()
def run_steps(model: CausalLM, part: ModelConfig | None = None) -> list[torch.Tensor]:
    """Logits ``[num_tokens, vocab_size]`` of each step; ``part``: as of `steps`."""
    return [model.compute_logits(model(input_ids, ctx)).clone() for input_ids, ctx in steps(model, part)]


def on_ranks(way: str, size: int, function: Callable[[TensorGroup], Any]) -> list[Any]:
    """What a function returns for the group of each rank."""
    turns = Turns(size)
    return turns.run(lambda rank: function(KINDS[way](turns, rank)))


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
def run_pipeline(rank: int, folder: Path) -> list[torch.Tensor]:
    """Two tensor ranks by two pipeline ranks; logits of the steps on the last ones."""
    config = load_model_config(folder)
    groups = make_groups({"tensor": 2, "pipeline": 2}, StepShape(64, config.hidden_size, torch.float32, CPU))
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


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Within float32's rounding: sums over ranks are made in another order than within one."""
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


@cache
def logits_of_the_whole(folder: Path) -> list[torch.Tensor]:
    return run_steps(load(folder))


@pytest.mark.parametrize("way", ["exact", "summed", "fused exact", "fused summed"])
@pytest.mark.parametrize(("name", "size"), CASES)
def test_logits_equal_the_whole_models(folders: dict[str, Path], name: str, size: int, way: str) -> None:
    config = load_model_config(folders[name])
    is_fused, way = way.startswith("fused"), way.removeprefix("fused ")
    layer = config.layers[0]
    assert plan_fusion(config, "v2")[0].is_fused != bool(layer.unfusible)
    if is_fused and layer.unfusible:
        return
    heads = (layer.mixer.num_heads // size, max(1, layer.mixer.num_kv_heads // size))

    def work(group: TensorGroup) -> list[torch.Tensor]:
        model = load(folders[name], group)
        attention = model.model.layers["0"].self_attn
        assert (attention.paged.num_heads, attention.num_kv_heads) == heads
        return run_steps(fused(model, group) if is_fused else model)

    first, *others = on_ranks(way, size, work)
    assert_close(first, logits_of_the_whole(folders[name]))
    for logits in others:
        assert_equal(logits, first)  # or else ranks could choose different tokens


STATES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: MODELS[name] for name in ("qwen3_5", "qwen3-next", "lfm2-bias-untied", "bamba", "granite-hybrid")},
    "bamba-one-group": ("bamba", {**MODELS["bamba"][1], "mamba_n_groups": 1}),
}
"""Models with recurrent states."""


@pytest.mark.parametrize("way", ["exact", "fused summed"])
@pytest.mark.parametrize(
    ("name", "size"), [*((name, 2) for name in STATES), ("lfm2-bias-untied", 4), ("bamba-one-group", 4)]
)
def test_layers_with_states(name: str, size: int, way: str, tmp_path: Path) -> None:
    is_fused, way = way.startswith("fused"), way.removeprefix("fused ")
    kind, fields = STATES[name]
    make_checkpoint(tmp_path, kind, **fields)
    whole = load_model_config(tmp_path)
    expected = run_steps(load(tmp_path), whole)

    def part(layer: LayerSpec) -> LayerSpec:
        if layer.recurrent is not None:
            return replace(layer, mixer=layer.recurrent.part(size))
        return replace(layer, mixer=replace(layer.mixer, num_kv_heads=max(1, layer.mixer.num_kv_heads // size)))

    share = replace(whole, layers=tuple(map(part, whole.layers)))

    def work(group: TensorGroup) -> list[torch.Tensor]:
        model = load(tmp_path, group)
        return run_steps(fused(model, group) if is_fused else model, share)

    first, *others = on_ranks(way, size, work)
    assert_close(first, expected)
    for logits in others:
        assert_equal(logits, first)


@pytest.mark.parametrize(
    ("spec", "num_ranks", "is_shared"),
    [
        (GatedDeltaNetSpec(4, 8, 16, 16, 4), 4, True),
        (GatedDeltaNetSpec(4, 8, 16, 16, 4), 8, False),
        (Mamba2Spec(8, 16, 1, 16, 4), 8, True),
        (Mamba2Spec(6, 16, 1, 16, 4), 4, False),
        (Mamba2Spec(8, 16, 2, 16, 4), 2, True),
        (Mamba2Spec(8, 16, 2, 16, 4), 4, False),
        (ShortConvSpec(3, 96), 3, True),
        (ShortConvSpec(3, 96), 5, False),
    ],
)
def test_states_that_ranks_cannot_share_are_refused(spec: RecurrentSpec, num_ranks: int, is_shared: bool) -> None:
    assert bool(spec.problem(num_ranks)) != is_shared
    if is_shared:  # nothing is lost
        assert num_ranks * spec.states(num_ranks).num_recurrent == spec.states().num_recurrent


def test_dummy_and_reloaded_weights(folders: dict[str, Path]) -> None:
    folder = folders["biases"]

    def work(group: TensorGroup) -> list[list[torch.Tensor]]:
        model = load(folder, group, load_format="dummy", seed=5)
        dummy = run_steps(model)
        reload_weights(model, context(group), folder)
        return [dummy, run_steps(model), run_steps(load(folder, group))]

    expected = run_steps(load(folder, load_format="dummy", seed=5))
    for dummy, reloaded, loaded in on_ranks("exact", 2, work):
        assert_close(dummy, expected)
        assert_equal(reloaded, loaded)


@pytest.mark.parametrize("way", KINDS)
def test_quantized_weights(folders: dict[str, Path], way: str) -> None:
    expected = run_steps(load(folders["int8"], linear_methods=LinearMethods(Int8())))
    for logits in on_ranks(way, 2, lambda group: run_steps(load(folders["int8"], group, LinearMethods(Int8())))):
        assert_close(logits, expected)


@pytest.mark.parametrize("way", KINDS)
@pytest.mark.parametrize("is_fused", [False, True])
def test_residual_is_whole_on_every_rank(folders: dict[str, Path], way: str, is_fused: bool) -> None:
    first, second = on_ranks(way, 2, lambda group: residual_streams(folders["biases"], group, is_fused))
    assert_close(first, residual_streams(folders["biases"], SINGLE_TENSOR_GROUP, is_fused=False))
    assert_equal(first, second)


def test_pipeline_of_tensor_groups_computes_what_a_tensor_group_does(folders: dict[str, Path], tmp_path: Path) -> None:
    """Over gloo."""
    folder = folders["story-qwen3"]
    expected, _ = on_ranks("exact", 2, lambda group: run_steps(load(folder, group)))
    *firsts, third, fourth = run_world(tmp_path, 4, run_pipeline, folder)
    assert firsts == [[], []]
    for logits in (third, fourth):
        assert_equal(logits, expected)


SEED = 6
TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 24}
"""Prompts come in chunks, requests are preempted, blocks are evicted, rows change hands."""
WAYS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
}
Expected = dict[str, RequestOutput]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model of four layers, of which drafters foresee as much as of all eight."""
    folder = tmp_path_factory.mktemp("story")
    shorten_story(folder, (0, 1, 6, 7))
    return str(folder)


def files(folder: Path) -> dict[str, Any]:
    return connector("SharedStorageConnector", shared_storage_path=str(folder))


@pytest.fixture(scope="module")
def expected(story: str) -> Expected:
    with running(model=story, model_runner="v1", enable_prefix_caching=False, max_num_seqs=1) as engine:
        return live_alone(engine, random_lives(SEED, 2048))


def check(engine: LLMEngine, expected: Expected) -> None:
    assert_lives_agree(engine, random_lives(SEED, 2048), expected, tolerance=1e-4)


@pytest.mark.parametrize(("way", "runner"), [("tensor", "v2"), ("pipeline", "v1"), ("pipeline", "v2")])
def test_every_rank_has_saved_all_of_the_last_request(way: str, runner: str, story: str, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=13, ignore_eos=True)
    with running(model=story, model_runner=runner, kv_transfer_config=files(tmp_path), **WAYS[way]) as engine:
        run_requests(engine, {"r": ([40, 50, 60, 40, 50, 60, 40, 50], params)})
    saved = Counter(path.parent.name.rpartition("-")[2] for path in tmp_path.rglob("*.kv"))
    assert saved == {"rank0": 5, "rank1": 5}  # all but the last of 21 tokens have KV


@pytest.mark.parametrize(("way", "runner", "rank"), [("tensor", "v1", 1), ("pipeline", "v2", 0)])
def test_load_that_fails_on_one_rank_has_failed(
    way: str, runner: str, rank: int, story: str, expected: Expected
) -> None:
    settings = {"model": story, "model_runner": runner, **TIGHT, **WAYS[way]}
    with running(kv_transfer_config=faulty(OFFLOADING, {"rank": rank, "loads": "corrupt"}), **settings) as engine:
        for _ in range(2):
            check(engine, expected)
        transfers = engine.stats().transfers
    assert transfers.loads_failed == transfers.loads_started > 0
    assert transfers.tokens_loaded == 0


@pytest.fixture(scope="module")
def alone(story: str) -> Tokens:
    """The tokens of REQUESTS on one engine without drafts and connectors."""
    with running(model=story, model_runner="v1", max_num_seqs=8, **SIZE) as engine:
        return tokens_of(run_requests(engine, REQUESTS))


METHODS: dict[str, dict[str, Any] | None] = {
    "draft": {"method": "draft_model", "num_speculative_tokens": 2, "model": str(DRAFT)},
    "eagle": {"method": "eagle", "num_speculative_tokens": 3, "model": str(embedded_eagle_path())},
}
PAIRS = [
    ("eagle", "tensor", "v2"),
    ("draft", "pipeline", "v1"),
    ("draft", "one rank", "v2"),
    ("eagle", "one rank", "v1"),
]


@pytest.mark.parametrize("case", PAIRS, ids=", ".join)
def test_prefill_and_decode_engines(case: tuple[str, str, str], story: str, alone: Tokens) -> None:
    """Each rank reads the blocks of the same rank elsewhere, those of a drafter's layers too."""
    method, way, runner = case
    settings = {"model": story, "max_num_seqs": 8, "speculative_config": METHODS[method], **WAYS[way]}
    num_ranks = 1 if way == "one rank" else 2
    with (
        running(model_runner=runner, kv_transfer_config=nixl("kv_producer"), **settings, **ROOMY) as producer,
        running(model_runner=runner, kv_transfer_config=nixl("kv_consumer"), **settings, **SIZE) as consumer,
    ):
        assert consumer.runner_name == runner
        held = prefilled(producer)
        assert len(opened(held["long"]).addresses) == num_ranks
        assert tokens_of(run_requests(consumer, decodes(held))) == alone
        settle(consumer)
        sent = settle(producer)
        assert sent["sends_sent"] + sent.get("sends_declined", 0) == num_ranks * 4  # each rank counts
        stats = consumer.stats().transfers
        assert (stats.loads_failed, stats.loads_done >= 3) == (0, True)
        assert stats.counters["blocks_loaded"] * 4 == stats.tokens_loaded * num_ranks

"""Experts that are spread over ranks: logits and tokens of one rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.distributed.ranks import Turns, TurnsGroup, running
from tests.distributed.test_tensor_parallel import CPU, assert_close, assert_equal, run_steps
from tests.helpers.checkpoints import UNTRAINED, make_checkpoint
from tests.helpers.engines import prompt_of, run_requests
from tests.helpers.kernels import cpu_kernels

from fleetfoot.config.parsing import load_model_config
from fleetfoot.config.sharding import ExpertSplit
from fleetfoot.distributed.groups import SINGLE_TENSOR_GROUP, Groups, TensorGroup
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.executor.worker import Worker
from fleetfoot.layers.context import ModelContext
from fleetfoot.models.interface import CausalLM
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.weights.loading import ModelLoader, reload_weights

SPLITS = {
    "qwen3-moe": ExpertSplit(2),
    "qwen2-moe": ExpertSplit(4, num_redundant=1),  # 7 slots of 6 experts
    "gpt-oss": ExpertSplit(4),  # stacked; two ranks have one expert
    "glm4-moe": ExpertSplit(2, num_redundant=5),
    "mixtral": ExpertSplit(4, num_redundant=6),
}


def context(group: TensorGroup = SINGLE_TENSOR_GROUP, split: ExpertSplit | None = None) -> ModelContext:
    kernels, groups = cpu_kernels(), Groups(group) if split is None else Groups(group, expert=group)
    return ModelContext(kernels, kernels.attention, torch.float32, CPU, groups=groups, expert_split=split)


def load(folder: Path, where: ModelContext, **options: Any) -> CausalLM:
    return ModelLoader(load_model_config(folder), where, folder, **options).load()


def on_ranks(split: ExpertSplit, function: Callable[[ModelContext], Any]) -> list[Any]:
    turns = Turns(split.num_ranks)
    return turns.run(lambda rank: function(context(TurnsGroup(turns, rank), split)))


@pytest.mark.parametrize("family", SPLITS)
def test_logits_equal_the_whole_models(family: str, tmp_path: Path) -> None:
    model_type, fields = UNTRAINED[family]
    make_checkpoint(tmp_path, model_type, **fields)
    split = SPLITS[family]

    def work(where: ModelContext) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = load(tmp_path, where)
        layer = next(layer for layer in model.model.layers.values() if layer.spec.experts is not None)
        count = layer.spec.experts.num_experts
        held = len(split.slots(where.groups.expert.rank, count))
        assert [len(stack) for stack in layer.mlp.experts.weight.stacks()] == [held] * (4 if family == "gpt-oss" else 2)
        loaded = run_steps(model)
        ModelLoader(model.config, where, None, "dummy", seed=5).fill(model)
        dummy = run_steps(model)
        reload_weights(model, where, tmp_path)
        assert_equal(run_steps(model), loaded)
        return loaded, dummy

    expected = run_steps(load(tmp_path, context())), run_steps(load(tmp_path, context(), load_format="dummy", seed=5))
    first, *others = on_ranks(split, work)
    for one, other in zip(first, expected, strict=True):
        assert_close(one, other)
    for logits in others:
        for one, other in zip(logits, first, strict=True):
            assert_equal(one, other)


PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
REQUESTS = {str(length): (prompt_of(length, 100, seed=length), PARAMS) for length in (30, 7, 1)}


ROOM: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 24, "max_model_len": 64}
PARALLEL = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


def tokens_of(engine: LLMEngine) -> dict[str, list[int]]:
    outputs = run_requests(engine, REQUESTS)
    return {name: output.outputs[0].token_ids for name, output in outputs.items()}


def tokens(**settings: Any) -> dict[str, list[int]]:
    with running(**ROOM, **settings) as engine:
        return tokens_of(engine)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("experts")
    model_type, fields = UNTRAINED["qwen3-moe"]
    make_checkpoint(folder, model_type, **fields)
    return str(folder)


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, list[int]]:
    return tokens(model=model, model_runner="v1")


def test_tokens_equal_one_ranks(model: str, expected: dict[str, list[int]]) -> None:
    assert tokens(model=model, model_runner="v1", **PARALLEL) == expected


# --- balancing ------------------------------------------------------------------------------------------------------

EXPERT = "model.layers.2.mlp.experts.{}.down_proj.weight"


def balances(engine: LLMEngine) -> list[tuple[int, dict[str, Any], list[list[int]]]]:
    """Of each rank."""
    return engine.collective_rpc(balance_of)


def balance_of(worker: Worker) -> tuple[int, dict[str, Any], list[list[int]]]:
    """Steps, what was moved, and where experts are."""
    assert worker.balancer is not None
    placements = [list(layer.experts) for layer in worker.balancer._layers.values()]
    return worker.balancer.num_steps, worker.balance_report() or {}, placements


WAYS: dict[str, dict[str, Any]] = {
    "v1": {"model_runner": "v1"},
    "v2": {"model_runner": "v2", "async_scheduling": True},
    "pipeline": {"model_runner": "v2", "pipeline_parallel_size": 2},
    "drafts": {
        "model_runner": "v2",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1},
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_balanced_experts(way: str, model: str, expected: dict[str, list[int]], tmp_path: Path) -> None:
    """Tokens are the same while experts move, live weights find every replica, and sleep and files go with it."""
    eplb = {"window_size": 8, "step_interval": 8, "num_redundant_experts": 3, "save": str(tmp_path / "saved")}
    settings = {**ROOM, **PARALLEL, **WAYS[way], "model": model, "enable_eplb": True, "enable_sleep_mode": True}
    with running(**settings, eplb_config=eplb) as engine:
        before = engine.weight_checksums()
        for _ in range(4):
            assert tokens_of(engine) == expected
        found = balances(engine)
        stages = [found[:2], found[2:]] if way == "pipeline" else [found]
        assert len({steps for steps, _, _ in found}) == 1
        for first, second in stages:
            assert first == second
            _, report, placements = first
            assert report["num_rounds"] > 1 and report["num_moved"] > 0
            assert all(sorted({*experts}) == [*range(6)] and len(experts) == 9 for experts in placements)
        assert engine.weight_checksums() == before
        for level in (1, 2):
            engine.sleep(level=level)
            engine.wake_up()
            if level == 2:
                engine.reload_weights()
            assert tokens_of(engine) == expected
        # one matrix of each expert, where they are now, and back
        tensors = load_file(Path(model) / "model.safetensors")
        for factor in (-2, 1):
            engine.reload_weights({EXPERT.format(index): factor * tensors[EXPERT.format(index)] for index in range(6)})
            changed = {name for name, checksum in engine.weight_checksums().items() if checksum != before[name]}
            assert changed == ({EXPERT.format(index) for index in range(6)} if factor != 1 else set())
            assert (tokens_of(engine) == expected) == (factor == 1)
    eplb = {"step_interval": 1000, "num_redundant_experts": 3, "load_initial": str(tmp_path / "saved")}
    with running(**settings, eplb_config=eplb) as engine:
        assert tokens_of(engine) == expected
        placements = [experts for _, _, layers in balances(engine) for experts in layers]
        assert any(experts != [*range(6), 0, 1, 2] for experts in placements)

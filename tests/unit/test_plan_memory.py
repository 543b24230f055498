"""The memory plan: its bytes are those that are taken, its parts add up, and what it advises fits."""

import dataclasses
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.int8_method import Int8
from tests.helpers.kernels import cpu_kernels
from tests.helpers.paged_models import Rank
from tests.helpers.specs import changed, model_config

from fleetfoot.cli.plan import plan_report
from fleetfoot.cli.plan_text import plan_text
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.model import DTYPE_BYTES, BranchNorms, ModelConfig
from fleetfoot.config.sharding import vocab_rows
from fleetfoot.distributed.groups import Groups
from fleetfoot.executor.worker import Worker
from fleetfoot.kernels.registry import DeviceFacts, plan_kernels
from fleetfoot.layers.context import ModelContext
from fleetfoot.models.interface import model_class
from fleetfoot.plan import memory
from fleetfoot.plan.fit import MemoryPlanError, fit_engine
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.memory import GIB, EngineShape, MemoryPlan, footprint
from fleetfoot.plan.resolve import resolve_plan
from fleetfoot.quantization.base import LinearMethods
from fleetfoot.quantization.unquantized import UNQUANTIZED
from fleetfoot.records.kv_layout import KVCacheSpec, KVLayout
from fleetfoot.runner.v2.device import CpuDevice
from fleetfoot.runner.v2.grammar_masks import GrammarMasks
from fleetfoot.runner.v2.input_batch import InputBuffers
from fleetfoot.runner.v2.state import DeviceState

SMALL = model_config("LlamaForCausalLM", 101, 48, 80, 3, 4, 2, 12, 256)
LLAMA_8B = model_config("LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 128, 131072, dtype="bfloat16")
TINYLLAMA = model_config("LlamaForCausalLM", 32000, 2048, 5632, 22, 32, 4, 64, 2048, dtype="bfloat16")


def shape_of(
    model: ModelConfig = LLAMA_8B, device: str = "cuda", config: EngineConfig | None = None, runner: str = "v2"
) -> EngineShape:
    config, kernels = config or EngineConfig(), plan_kernels(DeviceFacts(device, has_native=True, has_triton=True))
    length = config.max_model_len or model.max_position_embeddings
    sizes: dict[str, Any] = {"dtype": model.dtype, "max_model_len": length}
    return EngineShape(config=config, model=model, device=device, runner=runner, kernels=kernels, **sizes)


def fitted_engine(
    total: int, model: ModelConfig = LLAMA_8B, device: str = "cuda", **settings: Any
) -> tuple[EngineShape, MemoryPlan]:
    return fit_engine(shape_of(model, device, EngineConfig(**settings)), total)


def fitted(total: int, model: ModelConfig = LLAMA_8B, device: str = "cuda", **settings: Any) -> MemoryPlan:
    return fitted_engine(total, model, device, **settings)[1]


@pytest.mark.parametrize(("seqs", "tokens", "length", "block_size"), [(3, 16, 40, 8), (64, 512, 256, 16)])
def test_the_state_of_v2_is_what_it_allocates(seqs: int, tokens: int, length: int, block_size: int) -> None:
    sizes: dict[str, Any] = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "max_model_len": length}
    shape, num_blocks = shape_of(SMALL, "cpu", EngineConfig(block_size=block_size, **sizes)), 10
    vocab_size = SMALL.vocab_size
    state = DeviceState(CpuDevice(), num_blocks=num_blocks, block_size=block_size, vocab_size=vocab_size, **sizes)
    buffers = InputBuffers(state, cpu_kernels(), seqs, tokens, length)
    tensors = [state.arena.flat, state.tables.last_sampled, state.tables.draft_tokens, state.staging.on_device]
    for owner in (buffers, GrammarMasks(CpuDevice(), seqs, vocab_size)):
        tensors += [value for value in vars(owner).values() if isinstance(value, torch.Tensor) and not value._is_view()]
    ones_and_zeros = 2 * 4 * seqs
    allocated = sum(tensor.nbytes for tensor in tensors) + ones_and_zeros
    assert memory.runner_state_bytes(shape) + num_blocks * memory.state_block_bytes(shape) == allocated


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kv_cache_is_what_its_layout_takes(dtype: str) -> None:
    model = dataclasses.replace(SMALL, dtype=dtype)
    plan = fitted(GIB, model, "cpu", block_size=4)
    layout = KVLayout.of(model, plan.num_blocks, 4, dtype)
    assert (plan.kv_cache, plan.bytes_per_block) == (layout.num_bytes, layout.bytes_per_block)
    assert memory.kv_block_bytes(shape_of(model, "cpu", EngineConfig(block_size=4))) == layout.bytes_per_block


def test_more_blocks_than_tensor_maps_address_are_refused() -> None:
    sizes: dict[str, Any] = {"max_num_seqs": 10**6, "max_num_batched_tokens": 10**6}
    reachable = fitted(1 << 60, kv_cache_memory_bytes=1 << 58, **sizes).num_blocks
    assert fitted(1 << 60, num_gpu_blocks_override=reachable).num_blocks == reachable
    with pytest.raises(ValueError, match="num_gpu_blocks_override") as refusal:
        fitted(1 << 60, num_gpu_blocks_override=reachable + 1)
    assert f"{reachable + 1:,}" in str(refusal.value) and f"{reachable:,}" in str(refusal.value)


BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
NORMS = {"qk_norm": True, "dtype": "bfloat16"}
SANDWICH = BranchNorms(before=True, after=True)
GEMMA: dict[str, Any] = {"architecture": "Gemma2ForCausalLM", "extras": {"final_logit_softcapping": None}}
GEMMA |= {"mixer_norms": SANDWICH, "mlp_norms": SANDWICH}
OLMO = {"architecture": "Olmo2ForCausalLM", "qk_norm_over_heads": True}
CHANGES: dict[str, Any] = {"plain": {}, "biases": BIASES, "norms": NORMS, "int8": {"methods": LinearMethods(Int8())}}
CHANGES |= {"four norms": GEMMA, "norms over heads": OLMO}
RANKS = [("cpu", 1, 1), ("cuda", 1, 1), ("cuda", 2, 1), ("cuda", 4, 1), ("cuda", 1, 2), ("cuda", 1, 3), ("cuda", 2, 2)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(("device", "tensor_size", "pipeline_size"), RANKS)
def test_weights_of_a_rank(device: str, tensor_size: int, pipeline_size: int, changes: Any, tied: bool) -> None:
    changes = dict(changes)
    methods = changes.pop("methods", UNQUANTIZED)
    if tied:
        methods = dataclasses.replace(methods, others=(("lm_head", UNQUANTIZED.default),))
    model = changed(SMALL, tie_word_embeddings=tied, **changes)
    settings = EngineConfig(tensor_parallel_size=tensor_size, pipeline_parallel_size=pipeline_size)
    dtype, size, hidden = getattr(torch, model.dtype), DTYPE_BYTES[model.dtype], model.hidden_size
    ops, meta, groups = cpu_kernels(), torch.device("meta"), Groups(Rank(0, tensor_size))
    context = ModelContext(ops, ops.attention, dtype, meta, groups=groups, linear_methods=methods)
    rows = vocab_rows(model.vocab_size, tensor_size)
    padding = max(0, rows - model.vocab_size)
    for stage in dataclasses.replace(shape_of(model, device, settings), linear_methods=methods).stages():
        part = model_class(model)(model, context, stage.layers)
        assert (part.is_first, part.is_last) == (stage.is_first, stage.is_last)
        held = sum(spec.destination().nbytes for spec in part.weight_specs())
        if stage.is_first or (stage.is_last and tied):  # rows of padding, one of zeros, and the table of rows
            held += padding * hidden * size + (hidden * size + model.vocab_size * 8) * (tensor_size > 1)
        if stage.is_last and not tied:
            head = methods.of(["lm_head"])
            held += head.num_bytes(rows, hidden, model.dtype) - head.num_bytes(rows - padding, hidden, model.dtype)
        if stage.is_last and tied and device == "cpu" and stage.kernels["prepare_linear"] != "native":
            held += rows * hidden * size  # packed again
        assert memory.weight_bytes(stage) == held
        layout = KVLayout.of(model, 1, 16, model.dtype, tensor_parallel_size=tensor_size, layers=stage.layers)
        heads = [layer.self_attn.num_kv_heads for layer in part.model.layers.values()]
        assert layout.layers == tuple(KVCacheSpec(num_heads, model.layers[0].mixer.head_dim) for num_heads in heads)
        assert memory.kv_block_bytes(stage) == layout.bytes_per_block


def test_ranks_that_cannot_share_a_model_are_refused() -> None:
    for settings, message in (
        ({"tensor_parallel_size": 4}, r"tensor_parallel_size is 4, but 6 attention heads .*: 1, 2$"),
        ({"pipeline_parallel_size": 9}, "pipeline_parallel_size is 9, but .* has 8 layers"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_plan(EngineConfig(**settings), Machine(3 * GIB), environ={})


def test_workers_that_restart_on_a_gpu_have_processes_of_their_own() -> None:
    gpu = Machine(64 * GIB, gpu_memory_bytes=80 * GIB, has_triton=True)
    for machine, settings, executor in (
        (Machine(3 * GIB), {"on_error": "restart"}, "uni"),
        (gpu, {}, "uni"),
        (gpu, {"on_error": "restart", "max_restarts": 3}, "mp"),
    ):
        plan = resolve_plan(EngineConfig(max_num_seqs=4, **settings), machine, environ={}, config_only=True)
        assert plan.executor == executor
    text = plan_text("story-llama", plan_report(plan))
    assert "restart workers in processes of their own, at most 3 times within an hour" in text
    with pytest.raises(ValueError, match=r"on_error is 'restart', but distributed_executor_backend is 'uni'.*'mp'"):
        resolve_plan(EngineConfig(on_error="restart", distributed_executor_backend="uni"), gpu, environ={})
    with pytest.raises(ValueError, match="on_error is 'restart', but nnodes is 2"):
        EngineConfig(on_error="restart", nnodes=2, tensor_parallel_size=2)


def test_blocks_that_fit_after_loading() -> None:
    plan = fitted(80 * GIB)
    taken, block = plan.taken_by_loading, plan.bytes_per_block + plan.state_bytes_per_block
    assert plan.fitting_blocks(taken) == plan.num_blocks
    assert plan.fitting_blocks(taken - GIB) > plan.num_blocks  # the worker keeps to the plan
    assert plan.fitting_blocks(taken + GIB) == plan.num_blocks - round(GIB / block + 0.5)
    assert plan.fitting_blocks(plan.budget) < 1


def test_memory_of_an_engine_that_ended_is_freed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(3 * GIB, has_native=Machine.detect().has_native)
    worker = Worker(resolve_plan(EngineConfig(max_num_seqs=4, skip_tokenizer_init=True), machine, environ={}))
    worker.device, memory = torch.device("cuda"), worker.plan.memory.stage(0)
    taken = [memory.budget, memory.taken_by_loading]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB - taken[0], 3 * GIB))
    monkeypatch.setattr("fleetfoot.executor.worker.cleanup_dist_env_and_memory", lambda: taken.pop(0))
    for _ in range(2):  # the second time nothing has to be freed
        assert worker._fitting_blocks() == memory.num_blocks
        assert taken == [memory.taken_by_loading]
    taken[:] = [memory.budget] * 2
    with pytest.raises(ValueError, match="no KV block fits"):
        worker._fitting_blocks()


SETTING = re.compile(r"(\w+)=([\d.]+|True) \(--([a-z-]+)(?: [\d.]+)?\)")

ENOUGH = re.compile(
    r"([\d.]+) GiB of (?:GPU )?memory(?: for each rank)?, or more"
    r"(?:, for requests of up to [\d,]+ tokens; ([\d.]+) GiB for [\d,]+)?"
)


def remedies_of(error: MemoryPlanError) -> list[str]:
    return str(error).split("\n  - ")[1:]


def assert_each_works(error: MemoryPlanError, model: ModelConfig, device: str, total: int, **settings: Any) -> None:
    """Every line of advice, taken literally, makes a plan."""
    for line in remedies_of(error):
        enough = ENOUGH.fullmatch(line)
        if enough:
            fitted(int(float(enough[1]) * GIB), model, device, **settings)
            if enough[2]:
                shape, _ = fitted_engine(int(float(enough[2]) * GIB), model, device, **settings)
                assert shape.max_model_len == model.max_position_embeddings
            continue
        found = SETTING.findall(line)
        assert found, line
        changed = dict(settings)
        for name, value, flag in found:
            assert flag == name.replace("_", "-")
            changed[name] = True if value == "True" else float(value) if "." in value else int(value)
        fitted(total, model, device, **changed)


FOUR_RANKS = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "max_model_len": 131072}
ALL = {"gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs", "enforce_eager"}


@pytest.mark.parametrize(
    ("total", "device", "settings", "advised"),
    [
        (-0.2, "cuda", {}, ALL),
        (-0.2, "cuda", {"max_model_len": 10000}, {*ALL, "max_model_len"}),
        (-0.2, "cuda", {"enforce_eager": True}, ALL - {"enforce_eager"}),
        (18, "cuda", {}, {"gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs"}),  # together
        (20, "cuda", {"max_model_len": 131072}, {"max_num_seqs", "max_model_len"}),
        (10, "cuda", {}, set()),
        (8, "cpu", {}, set()),
        (64, "cpu", {"max_model_len": 131072}, {"kv_cache_memory_bytes", "max_model_len"}),
        (80, "cuda", {"num_gpu_blocks_override": 10**6}, {"num_gpu_blocks_override"}),
        (80, "cuda", {"kv_cache_memory_bytes": 10**12}, {"kv_cache_memory_bytes"}),
        (80, "cuda", {"kv_cache_memory_bytes": 10}, {"kv_cache_memory_bytes"}),
        (64, "cpu", {"kv_cache_memory_bytes": 10**12}, {"kv_cache_memory_bytes"}),
        (80, "cuda", {"block_size": 10**9}, {"block_size"}),
        (9, "cuda", {"pipeline_parallel_size": 2}, set()),
        (9, "cuda", FOUR_RANKS, {"max_model_len"}),
        (4, "cuda", {"tensor_parallel_size": 4}, set()),
        (16, "cpu", {"pipeline_parallel_size": 2, "kv_cache_memory_bytes": 10**12}, {"kv_cache_memory_bytes"}),
        (40, "cuda", {"pipeline_parallel_size": 4, "kv_cache_memory_bytes": 10}, {"kv_cache_memory_bytes"}),
        (40, "cuda", {"pipeline_parallel_size": 4, "num_gpu_blocks_override": 10**6}, {"num_gpu_blocks_override"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_advice_where_nothing_fits(total: float, device: str, settings: dict[str, Any], advised: set[str]) -> None:
    """A negative ``total``: so much less than the least that is enough."""
    num_bytes = int((total if total > 0 else least_gib(**settings) + total) * GIB)
    with pytest.raises(MemoryPlanError) as caught:
        fitted(num_bytes, LLAMA_8B, device, **settings)
    assert str(caught.value).startswith("on pipeline rank ") == ("pipeline_parallel_size" in settings)
    assert remedies_of(caught.value)
    named = {name for line in remedies_of(caught.value) for name, _, _ in SETTING.findall(line)}
    assert advised <= named and bool(advised) == bool(named - {"tensor_parallel_size"})
    assert_each_works(caught.value, LLAMA_8B, device, num_bytes, **settings)


def least_gib(**settings: Any) -> float:
    """The GPU memory that is enough, as the advice for one that is far too small has it."""
    with pytest.raises(MemoryPlanError) as caught:
        fitted(GIB, **settings)
    *_, line = remedies_of(caught.value)
    return float(line.split()[0])


@given(
    model=st.sampled_from([LLAMA_8B, TINYLLAMA]),
    device=st.sampled_from(["cpu", "cuda"]),
    total=st.integers(1, 48),
    max_model_len=st.sampled_from([None, 512, 2048]),
    max_num_seqs=st.sampled_from([1, 64, 512]),
    enable_chunked_prefill=st.just(True),
    kv_cache_memory_bytes=st.sampled_from([None, None, 1, GIB, 100 * GIB]),
    enforce_eager=st.booleans(),
)
def test_any_amount_of_memory(model: ModelConfig, device: str, total: int, **settings: Any) -> None:
    try:
        shape, plan = fitted_engine(total * GIB, model, device, **settings)
    except MemoryPlanError as error:
        assert_each_works(error, model, device, total * GIB, **settings)
    else:
        assert plan.num_blocks >= 1
        assert plan.left >= 0
        assert plan.budget - plan.left == sum(plan.parts().values()) <= total * GIB
        assert footprint(shape) == plan.footprint
        length = settings["max_model_len"]
        assert shape.max_model_len == length if length else shape.max_model_len <= plan.num_tokens
        assert length is None or length <= plan.num_tokens or settings["kv_cache_memory_bytes"] is not None
        longer, _ = fitted_engine((total + 8) * GIB, model, device, **settings)
        assert longer.max_model_len >= shape.max_model_len

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
from fleetfoot.config.model import DTYPE_BYTES, BranchNorms, ModelConfig, RopeConfig
from fleetfoot.config.sharding import vocab_rows
from fleetfoot.distributed import peer_memory_words
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
from fleetfoot.speculative.find import DrafterShape

SMALL = model_config("LlamaForCausalLM", 101, 48, 80, 3, 4, 2, 12, 256)
LLAMA_8B = model_config("LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 128, 131072, dtype="bfloat16")
TINYLLAMA = model_config("LlamaForCausalLM", 32000, 2048, 5632, 22, 32, 4, 64, 2048, dtype="bfloat16")
PARTS = ["weights", "kv_cache", "graphs", "activations", "runner_state", "rotary_table", "sampling_scratch"]
PARTS += ["communication", "driver"]


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


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_parts_add_up(device: str, runner: str) -> None:
    plan = fit_engine(shape_of(LLAMA_8B, device, runner=runner), 80 * GIB)[1]
    assert list(plan.parts()) == PARTS
    assert sum(plan.parts().values()) + plan.left == plan.budget
    assert plan.budget == (80 * GIB if device == "cpu" else int(80 * GIB * 0.9))
    assert all(size >= 0 for size in plan.parts().values()) and plan.left >= 0
    assert plan.num_tokens == plan.num_blocks * 16
    assert (plan.parts()["graphs"] > 0) == (device == "cuda" and runner == "v2")
    assert (plan.parts()["driver"] > 0) == (device == "cuda")
    assert plan.parts()["communication"] == 0
    assert plan.stage(0) is plan


def test_more_blocks_than_tensor_maps_address_are_refused() -> None:
    sizes: dict[str, Any] = {"max_num_seqs": 10**6, "max_num_batched_tokens": 10**6}
    reachable = fitted(1 << 60, kv_cache_memory_bytes=1 << 58, **sizes).num_blocks
    assert fitted(1 << 60, num_gpu_blocks_override=reachable).num_blocks == reachable
    with pytest.raises(ValueError, match="num_gpu_blocks_override") as refusal:
        fitted(1 << 60, num_gpu_blocks_override=reachable + 1)
    assert f"{reachable + 1:,}" in str(refusal.value) and f"{reachable:,}" in str(refusal.value)


def test_only_default_steps_of_a_cpu_are_paced() -> None:
    explicit, whole = EngineConfig(max_num_batched_tokens=4096), EngineConfig(enable_chunked_prefill=False)
    cases = (("cpu", None), ("cuda", None), ("cpu", explicit), ("cpu", whole))
    steps = [shape_of(SMALL, device, config).prompt_step_s for device, config in cases]
    assert steps == [0.016, None, None, None]


def test_a_captured_full_step_keeps_all_its_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(max_num_batched_tokens=3000)
    full = shape_of(TINYLLAMA, config=config)
    assert full.capture_table.full_step == 3000
    monkeypatch.setattr("fleetfoot.plan.memory._FULL_STEP_PRODUCTS", 0)
    shape = shape_of(TINYLLAMA, config=config)
    assert shape.capture_table.most_tokens == shape.capture_table.mixed[-1] == 1024
    others = {*full.capture_table.mixed} - {*shape.capture_table.mixed}  # between 1,024 and 3,000
    nodes_and_hidden = sum(22 * 96 * 1024 + tokens * 2048 * 2 for tokens in (3000, *others))
    more = memory.graph_bytes(full) - memory.graph_bytes(shape)
    share = 1 - 1024 / 3000
    assert more == pytest.approx(share * memory.activation_bytes(shape) + nodes_and_hidden, abs=2)
    assert memory.graph_bytes(shape_of(TINYLLAMA, config=EngineConfig(enforce_eager=True))) == 0


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


def test_a_drafter_is_with_the_last_rank() -> None:
    specs = (KVCacheSpec(2, 64), *[KVCacheSpec(4, 32)] * 3)
    drafter = DrafterShape(num_drafts=4, weight_bytes=1000, kv_specs=specs)
    plain = shape_of(LLAMA_8B, "cuda", EngineConfig(pipeline_parallel_size=2))
    first, last = dataclasses.replace(plain, drafter=drafter).stages()
    plain_first, plain_last = plain.stages()
    for num_bytes in (memory.kv_block_bytes, memory.weight_bytes):
        assert num_bytes(first) == num_bytes(plain_first)
    assert memory.weight_bytes(last) == memory.weight_bytes(plain_last) + 1000
    layout = KVLayout(1, 16, "bfloat16", (*[KVCacheSpec(8, 128)] * 15, *specs))
    assert memory.kv_block_bytes(last) == layout.bytes_per_block > memory.kv_block_bytes(plain_last)
    assert footprint(last)["rotary_table"] - footprint(plain_last)["rotary_table"] == 4 * 128 * 4
    assert footprint(last)["sampling_scratch"] > footprint(plain_last)["sampling_scratch"]
    assert footprint(first)["sampling_scratch"] == 0


@pytest.mark.parametrize(("num_ranks", "num_tables"), [(1, [3]), (2, [2, 2]), (6, [1] * 6)])
def test_layers_with_equal_ropes_share_a_table(num_ranks: int, num_tables: list[int]) -> None:
    ropes = (RopeConfig(), RopeConfig(theta=3.0), RopeConfig(), None, RopeConfig(), None)
    model = changed(SMALL, num_layers=6, layer_ropes=ropes)
    ops = cpu_kernels()
    context = ModelContext(ops, ops.attention, torch.float32, torch.device("cpu"), max_positions=256)
    for stage, count in zip(
        shape_of(model, "cpu", EngineConfig(pipeline_parallel_size=num_ranks)).stages(), num_tables, strict=True
    ):
        layers = model_class(model)(model, context, stage.layers).model.layers.values()
        assert len({layer.self_attn.paged.rotary.cos_sin.data_ptr() for layer in layers}) == count
        assert footprint(stage)["rotary_table"] == count * 256 * 12 * 4


def test_buffers_between_ranks() -> None:
    tensor = shape_of(LLAMA_8B, "cuda", EngineConfig(tensor_parallel_size=2))
    words = peer_memory_words(2, LLAMA_8B.hidden_size * 2)
    assert memory.communication_bytes(tensor) - words * 8 == 1008 << 20  # NCCL's own
    step = 2048 * 48 * 4
    pipeline = shape_of(SMALL, "cpu", EngineConfig(pipeline_parallel_size=3))
    assert [memory.communication_bytes(stage) for stage in pipeline.stages()] == [step, 2 * step, step]
    on_gpus = shape_of(SMALL, "cuda", EngineConfig(pipeline_parallel_size=2))
    first, last = (memory.communication_bytes(stage) for stage in on_gpus.stages())
    step = on_gpus.max_num_batched_tokens * 48 * DTYPE_BYTES[on_gpus.dtype]
    assert last - first == step  # both have room for what the other writes
    assert first - step == 2 * (760 << 20)  # NCCL's own, to the other rank and from it
    assert memory.communication_bytes(shape_of(SMALL, "cpu", EngineConfig(tensor_parallel_size=2))) == 0


def test_ranks_share_the_work() -> None:
    whole, half, replicated = (fitted(80 * GIB, tensor_parallel_size=size) for size in (1, 2, 16))
    assert half.bytes_per_block * 2 == whole.bytes_per_block == 8 * replicated.bytes_per_block  # of 8 KV heads
    assert half.footprint["weights"] < 0.51 * whole.footprint["weights"]
    assert half.footprint["activations"] < 0.7 * whole.footprint["activations"]
    assert half.num_blocks > 2 * whole.num_blocks


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("settings", [{}, {"kv_cache_memory_bytes": GIB}, {"num_gpu_blocks_override": 50}], ids=str)
def test_all_pipeline_ranks_have_as_many_blocks(device: str, settings: dict[str, Any]) -> None:
    plan = fitted(80 * GIB, device=device, pipeline_parallel_size=2, **settings)
    first, last = plan.stages
    assert first.num_blocks == last.num_blocks == plan.num_blocks > 0
    assert (first.bytes_per_block, last.bytes_per_block) == (17 * 65536, 15 * 65536)
    assert plan.stage(1) is last and last.footprint["sampling_scratch"] > first.footprint["sampling_scratch"] == 0
    assert all(stage.left >= 0 for stage in plan.stages)
    assert plan.left == min(first.left, last.left)
    if "kv_cache_memory_bytes" in settings:
        assert plan.num_blocks == GIB // first.bytes_per_block


def test_ranks_that_cannot_share_a_model_are_refused() -> None:
    for settings, message in (
        ({"tensor_parallel_size": 4}, r"tensor_parallel_size is 4, but 6 attention heads .*: 1, 2$"),
        ({"pipeline_parallel_size": 9}, "pipeline_parallel_size is 9, but .* has 8 layers"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_plan(EngineConfig(**settings), Machine(3 * GIB), environ={})


def test_ranks_on_a_cpu_share_its_memory() -> None:
    whole = resolve_plan(EngineConfig(max_num_seqs=4), Machine(3 * GIB), environ={}, config_only=True)
    ranks = EngineConfig(max_num_seqs=4, tensor_parallel_size=2, pipeline_parallel_size=3)
    plan = resolve_plan(ranks, Machine(3 * GIB), environ={}, config_only=True)
    assert plan.memory.total == whole.memory.total // 6
    report = plan_report(plan)
    assert [stage["ranks"] for stage in report["parallel"]["stages"]] == [[0, 1], [2, 3], [4, 5]]
    assert [stage["layers"] for stage in report["parallel"]["stages"]] == [[0, 2], [3, 5], [6, 7]]
    assert report["kv_layout"]["shape"][1:4] == [3, 2, 1]
    assert "0-1: layers 0-2, 3 heads and 1 KV heads each" in plan_text("story-llama", report)


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


def test_a_gpu_is_filled() -> None:
    plan = fitted(80 * GIB)
    assert plan.left < plan.bytes_per_block + plan.state_bytes_per_block
    assert plan.kv_reason == "what gpu_memory_utilization leaves"
    more = fitted(80 * GIB, gpu_memory_utilization=0.95)
    assert more.budget - plan.budget == pytest.approx(0.05 * 80 * GIB, abs=2)
    assert more.num_blocks > plan.num_blocks


def test_no_more_than_can_be_used() -> None:
    plan = fitted(80 * GIB, TINYLLAMA, max_num_seqs=8, max_model_len=1000)
    assert plan.num_blocks == 8 * 63
    assert "as much as max_num_seqs requests" in plan.kv_reason
    assert plan.concurrency(1000, 8) == 8 == plan.concurrency(10, 8)


def test_a_cpu_gives_a_share_and_never_more_than_its_limit() -> None:
    weights = memory.weight_bytes(shape_of(LLAMA_8B, "cpu"))  # of 15 GiB
    plan = fitted(20 * GIB, device="cpu")
    assert 0 <= int((20 * GIB - weights) * 0.4) - plan.kv_cache < plan.bytes_per_block
    assert fitted(200 * GIB, device="cpu").kv_cache == 4 * GIB
    chosen = fitted(200 * GIB, device="cpu", kv_cache_memory_bytes=10 * GIB)
    assert (chosen.kv_cache, chosen.kv_reason) == (10 * GIB, "kv_cache_memory_bytes")
    assert fitted(200 * GIB, device="cpu", num_gpu_blocks_override=7).num_blocks == 7


def test_a_max_model_len_in_the_settings_must_fit() -> None:
    for total, settings in ((24, {}), (30, {"max_num_seqs": 4}), (80, {"num_gpu_blocks_override": 40})):
        shape, plan = fitted_engine(total * GIB, **settings)
        assert 256 <= shape.max_model_len <= plan.num_tokens < LLAMA_8B.max_position_embeddings
        if not settings:  # the longest: one block more has no room
            with pytest.raises(MemoryPlanError):
                fitted_engine(total * GIB, max_model_len=shape.max_model_len + 16)
        fitted_engine(total * GIB, **settings, max_model_len=shape.max_model_len)
    assert fitted_engine(80 * GIB)[0].max_model_len == LLAMA_8B.max_position_embeddings
    with pytest.raises(MemoryPlanError, match=r"max_model_len is 131,072, but the KV cache has room for [\d,]+ tokens"):
        fitted(24 * GIB, max_model_len=131072)


def test_blocks_that_fit_after_loading() -> None:
    plan = fitted(80 * GIB)
    taken, block = plan.taken_by_loading, plan.bytes_per_block + plan.state_bytes_per_block
    assert plan.fitting_blocks(taken) == plan.num_blocks
    assert plan.fitting_blocks(taken - GIB) > plan.num_blocks  # the worker keeps to the plan
    assert plan.fitting_blocks(taken + GIB) == plan.num_blocks - round(GIB / block + 0.5)
    assert plan.fitting_blocks(plan.budget) < 1


def test_the_worker_takes_what_was_planned() -> None:
    machine = Machine(3 * GIB, has_native=Machine.detect().has_native)
    plan = resolve_plan(EngineConfig(max_num_seqs=4, skip_tokenizer_init=True), machine, environ={})
    worker = Worker(plan)
    worker.start()
    layout = worker.layout
    assert layout.num_blocks == plan.memory.num_blocks == 4 * 128
    assert layout.num_bytes == plan.memory.kv_cache


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

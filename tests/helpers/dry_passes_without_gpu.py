"""Dry passes of every kind of engine for an H200 that is not there; nothing is compiled and nothing is launched.

Run as a module, without ``TRITON_INTERPRET``; prints a line of JSON, see `main`. What a dry pass must not read is
garbage: the KV cache and every buffer.
"""

import json
import random
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from triton import knobs

from fleetfoot.kernels.runtime import dependent_launch, gpu_limits

H200 = gpu_limits.GPULimits(num_sms=132, shared_bytes=232448, capability=(9, 0))
gpu_limits.gpu_limits = lambda device: H200  # type: ignore[assignment]  # before others take it by its name
dependent_launch.can_overlap = lambda device: True  # type: ignore[assignment]

from fleetfoot.assets import embedded_model_path  # noqa: E402
from fleetfoot.config.model import BranchNorms, GatedDeltaNetSpec, ModelConfig, RopeConfig  # noqa: E402
from fleetfoot.config.parsing import load_model_config  # noqa: E402
from fleetfoot.config.sharding import pipeline_layers  # noqa: E402
from fleetfoot.distributed import groups, peer_memory_words  # noqa: E402
from fleetfoot.distributed.groups import SINGLE_PIPELINE_GROUP, SINGLE_TENSOR_GROUP  # noqa: E402
from fleetfoot.distributed.peer_gather import CustomAllGather  # noqa: E402
from fleetfoot.distributed.peer_memory import CustomAllReduce, PeerMemory  # noqa: E402
from fleetfoot.fusion import plan_fusion  # noqa: E402
from fleetfoot.kernels.runtime import cuda_source  # noqa: E402
from fleetfoot.kernels.runtime.compile_ahead import CompileAhead  # noqa: E402
from fleetfoot.kernels.runtime.dry_tensors import DryTensor  # noqa: E402
from fleetfoot.kernels.runtime.triton_support import instead_of_launching  # noqa: E402
from fleetfoot.kernels_hopper.linear import decode_product, gated_product  # noqa: E402
from fleetfoot.kernels_hopper.linear import linear as hopper_linear  # noqa: E402
from fleetfoot.layers.context import ModelContext  # noqa: E402
from fleetfoot.records.forward_context import IntermediateTensors  # noqa: E402
from fleetfoot.records.kv_layout import ONE_GROUP, KVLayout, kv_cache_specs, make_groups  # noqa: E402
from fleetfoot.records.request import Request  # noqa: E402
from fleetfoot.records.sampling_params import SamplingParams  # noqa: E402
from fleetfoot.records.step import NewRequest, SchedulerOutput  # noqa: E402
from fleetfoot.runner.graphs import CaptureTable  # noqa: E402
from fleetfoot.runner.v2.runner import ModelRunnerV2  # noqa: E402
from fleetfoot.sampling.shape import LIST_CAPACITY  # noqa: E402
from fleetfoot.speculative.draft_model import DraftModel  # noqa: E402
from fleetfoot.speculative.drafter import NO_DRAFTING, DrafterContext, DraftSettings  # noqa: E402
from fleetfoot.speculative.eagle import EagleDrafter  # noqa: E402
from fleetfoot.speculative.find import DrafterModel  # noqa: E402
from fleetfoot.weights.loading import ModelLoader  # noqa: E402
from tests.helpers.kernels import triton_kernels  # noqa: E402
from tests.helpers.local_pipeline import MAX_NUM_TOKENS, local_pipeline  # noqa: E402
from tests.helpers.recording_device import RecordedCapture, RecordingDevice  # noqa: E402
from tests.helpers.specs import changed  # noqa: E402
from tests.helpers.warm_up_without_gpu import launch_nothing, use_fake_driver  # noqa: E402

CPU = torch.device("cpu")
MAX_NUM_SEQS, MAX_MODEL_LEN, NUM_DRAFTS, NUM_STEPS = 32, 256, 3, 70
GARBAGE = 2**30 + 12345
"""As an index it lies outside of every tensor."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of engine."""

    method: str | None = None
    """Of drafting."""
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 64
    qk_norm: bool = False
    window: int | None = None
    tensor_size: int = 1
    tensor_rank: int = 0
    has_peer_memory: bool = True
    pipeline_rank: int | None = None
    """Of two."""
    is_eager: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `ModelConfig`."""


GEMMA = {
    "architecture": "Gemma2ForCausalLM",
    "activation": "gelu_tanh",
    "norm_offset": 1.0,
    "attention_soft_cap": 50.0,
    "mixer_norms": BranchNorms(before=True, after=True),
    "mlp_norms": BranchNorms(before=True, after=True),
    "extras": {"final_logit_softcapping": 30.0},
}
HYBRID = {"architecture": "Qwen3NextForCausalLM", "class_path": "", "norm_offset": 1.0, "has_output_gate": True}
KINDS = {
    "small heads": Kind(head_dim=32),
    "norms and windows": Kind(head_dim=128, qk_norm=True, window=32),
    "soft caps": Kind("ngram", head_dim=256, qk_norm=True, window=32, model=GEMMA),
    "norms over heads": Kind(model={"architecture": "Olmo2ForCausalLM"}),
    "float16": Kind("ngram", dtype=torch.float16),
    "draft model": Kind("draft_model"),
    "eagle, float32": Kind("eagle", dtype=torch.float32),
    "draft model, eager": Kind("draft_model", is_eager=True),
    "tensor rank": Kind("eagle", tensor_size=2),
    "tensor rank, biases": Kind(tensor_size=2, model={"o_bias": True, "mlp_bias": True}),
    "tensor rank, a bias": Kind(tensor_size=2, tensor_rank=1, model={"o_bias": True}),
    "tensor rank, NCCL": Kind("ngram", tensor_size=2, has_peer_memory=False),
    "first of a pipeline": Kind("ngram", pipeline_rank=0),
    "last of a pipeline": Kind("eagle", pipeline_rank=1),
    "states": Kind("ngram", head_dim=128, model=HYBRID),
}
STATES = GatedDeltaNetSpec(4, 8, 128, 128, 4)
"""In place of attention in every second layer of "states"."""


class ZeroedTorch(TorchFunctionMode):
    """What kernels that are not launched would have written is 0, and products are not made."""

    INSTEAD: dict[Any, Callable[..., Any]] = {  # noqa: RUF012
        torch.empty: torch.zeros,
        torch.empty_like: torch.zeros_like,
        torch.Tensor.new_empty: torch.Tensor.new_zeros,
        F.linear: lambda x, weight, bias=None: x.new_zeros((*x.shape[:-1], weight.shape[0])),
        torch.Tensor.addmm_: lambda total, *factors, **scales: total,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.INSTEAD.get(func, func)(*args, **(kwargs or {}))


def make_runner(kind: Kind) -> ModelRunnerV2:
    config = changed(
        load_model_config(embedded_model_path()),
        hidden_size=512,
        intermediate_size=1024,
        num_heads=8,
        num_kv_heads=2,
        head_dim=kind.head_dim,
        num_layers=4,
        layer_windows=(None, kind.window) * 2,
        rope=RopeConfig(),
        qk_norm=kind.qk_norm,
        **kind.model,
    )
    if config.architecture == "Qwen3NextForCausalLM":
        layers_with_states = (replace(layer, mixer=STATES) for layer in config.layers[::2])
        both = zip(layers_with_states, config.layers[1::2], strict=True)
        config = replace(config, layers=tuple(chain.from_iterable(both)))
    tensor_group, pipeline, layers = SINGLE_TENSOR_GROUP, SINGLE_PIPELINE_GROUP, None
    if kind.tensor_size > 1:
        tensor_group = make_tensor_group(kind, config)
    if kind.pipeline_rank is not None:
        pipeline = local_pipeline(2, config.hidden_size)[kind.pipeline_rank]
        if kind.pipeline_rank:  # of the dtype of the model
            hidden_states = torch.zeros(MAX_NUM_TOKENS, config.hidden_size, dtype=kind.dtype)
            pipeline._buffers = IntermediateTensors(hidden_states)  # type: ignore[attr-defined]
        layers = pipeline_layers(config, kind.pipeline_rank, 2)
    kernels, ranks = triton_kernels(has_hopper=True), groups.Groups(tensor_group, pipeline)
    context = ModelContext(kernels, type(kernels.attention)(), kind.dtype, CPU, MAX_MODEL_LEN + 8, ranks)
    num_drafts = 0 if kind.method is None else NUM_DRAFTS
    num_tokens = 1024 if kind.pipeline_rank is None else MAX_NUM_TOKENS
    limits = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": num_tokens}
    runner = ModelRunnerV2(
        ModelLoader(config, context, None, "dummy", layers=layers),
        **limits,
        max_model_len=MAX_MODEL_LEN,
        capture_table=CaptureTable.of(device="cuda", enforce_eager=kind.is_eager, num_drafts=num_drafts, **limits),
        device=RecordingDevice(has_graphs=True),
        fusion=plan_fusion(config, "v2"),
        draft_settings=make_speculation(kind, config, context, is_last=pipeline.is_last_rank),
    )
    runner.load_model()
    name = str(kind.dtype).removeprefix("torch.")
    specs = kv_cache_specs(config, name, tensor_parallel_size=kind.tensor_size)
    kv_groups = make_groups(specs, (), 16, name, MAX_MODEL_LEN, 1 + num_drafts) if config.has_states else ONE_GROUP
    layout = KVLayout.of(config, 40, 16, name, tensor_parallel_size=kind.tensor_size, layers=layers, groups=kv_groups)
    if runner._draft_settings.drafter is not None:
        layout = layout.with_layers(runner._draft_settings.drafter.kv_specs)
    runner.initialize_kv_cache(layout)
    return runner


def make_speculation(kind: Kind, config: ModelConfig, context: ModelContext, *, is_last: bool) -> DraftSettings:
    if kind.method is None:
        return NO_DRAFTING
    if not is_last:
        return DraftSettings(NUM_DRAFTS)
    if kind.method == "ngram":
        return DraftSettings(NUM_DRAFTS, ngram=(3, 1))
    alone = replace(context, groups=groups.Groups())
    small = changed(config, num_layers=1, window=None, rope=RopeConfig())
    if kind.method != "eagle":
        small = changed(small, hidden_size=128, num_heads=4, num_kv_heads=1, intermediate_size=256)
    found = DrafterModel(kind.method, "head", embedded_model_path(), small)
    make = EagleDrafter if kind.method == "eagle" else DraftModel
    context_of_drafter = DrafterContext(alone, found, plan_fusion(small, "v2"), "dummy")
    return DraftSettings(NUM_DRAFTS, drafter=make(context_of_drafter))


def make_tensor_group(kind: Kind, config: ModelConfig) -> groups.CudaTensorGroup:
    """A rank without its peers: gathering with them is an error."""
    size, custom_all_reduce, custom_all_gather = kind.tensor_size, None, None
    if kind.has_peer_memory:
        num_words = peer_memory_words(size, config.hidden_size * kind.dtype.itemsize)
        memory = PeerMemory(torch.zeros(num_words, dtype=torch.int64), torch.zeros(size, dtype=torch.int64))
        rank = kind.tensor_rank
        custom_all_reduce = CustomAllReduce(memory, rank, size, config.hidden_size, kind.dtype, CPU)
        custom_all_gather = CustomAllGather(memory, rank, size, CPU)
    group = groups.CudaTensorGroup(dist.group.WORLD, custom_all_reduce, custom_all_gather)
    group.rank, group.size = kind.tensor_rank, size
    return group


def tensors_of(root: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that can be reached from an object of ours, and a way to it."""
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [("", root)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen or isinstance(value, type | ModuleType | FunctionType | str | int | float):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield path, value
        elif isinstance(value, dict | list | tuple | set | frozenset):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(f"{path}[{key!r:.20}]", item) for key, item in items]
        else:  # a bound method has ``__self__``
            names = ["__self__", *getattr(value, "__dict__", {})]
            names += [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
            waiting += [(f"{path}.{name}", getattr(value, name)) for name in names if hasattr(value, name)]


def fill_with_garbage(tensors: dict[str, torch.Tensor]) -> None:
    """All but weights, and what the host keeps for itself."""
    for path, tensor in tensors.items():
        if "_model" not in path and "_loader" not in path:
            tensor.fill_(float("nan") if tensor.is_floating_point() else GARBAGE)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).clone()


def record_cuda_kernels() -> None:
    """Let kernels in CUDA C++ be used, and counted as Triton's are."""

    def load(kernel: Any, device: torch.device) -> Any:
        hook = knobs.runtime.jit_cache_hook
        hook(key=str(kernel), repr=f"{kernel.function}[")
        return cuda_source._DRY

    hopper_linear.can_compile = lambda device: True
    for module in (decode_product, gated_product):
        module.load = load


class Requested:
    """Kernels that are compiled, each with its specialization."""

    def __init__(self) -> None:
        self.kernels: set[str] = set()

    def __call__(self, *, key: str, repr: str, **_: Any) -> bool:
        self.kernels.add(f"{repr.split('[')[0]} {key}")
        return True  # it need not be compiled


def try_kind(kind: Kind, seed: int) -> dict[str, Any]:
    """``requested``: number of kernels of the dry passes; ``missing``: those that random steps launch, and that were
    not requested; ``changed``: tensors that the dry passes wrote; ``kept``: tensors of them that are left;
    ``launched``: number of kernels of the random steps."""
    runner = make_runner(kind)
    tensors = dict(tensors_of(runner))
    fill_with_garbage(tensors)
    before = {path: bits(tensor) for path, tensor in tensors.items()}
    knobs.runtime.jit_cache_hook = requested = Requested()
    runner._padding.compile(CompileAhead(1), runner.graphs.keys, runner._loader.context.groups.tensor)
    own = runner._state.staging._padding  # the host's, and written anew before it is read
    changed = [
        path
        for path, tensor in tensors.items()
        if tensor.data_ptr() != own.data_ptr() and not torch.equal(bits(tensor), before[path])
    ]
    kept = [path for path, tensor in tensors_of(runner) if isinstance(tensor, DryTensor)]
    knobs.runtime.jit_cache_hook = launched = Requested()
    launch(runner, random_steps(runner, random.Random(seed)))
    return {
        "requested": len(requested.kernels),
        "missing": sorted(launched.kernels - requested.kernels),
        "launched": len(launched.kernels),
        "changed": changed,
        "kept": kept,
    }


SAMPLERS: tuple[dict[str, Any], ...] = (
    *({}, {}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9}),
    *({"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "min_p": 0.1}, {"temperature": 1.0, "top_k": 1030}),
    *({"repetition_penalty": 1.2}, {"logit_bias": {5: 1.0}}, {"min_tokens": 3}, {"allowed_token_ids": [1, 2]}),
    {"logit_bias": dict.fromkeys(range(LIST_CAPACITY + 1), 1.0)},
    *({"logprobs": number} for number in (0, 5, 33, 200, 300, -1)),
    *({"prompt_logprobs": number} for number in (0, 3, -1)),
)


def random_steps(runner: ModelRunnerV2, rng: random.Random) -> Iterator[SchedulerOutput]:
    """Steps of any shape, each of new requests."""
    budget, num_drafts = runner._max_num_batched_tokens, runner._draft_settings.num_drafts
    finished: list[tuple[str, int]] = []
    for number in range(NUM_STEPS):
        drafts = rng.choice((0, num_drafts))
        num_decodes = rng.choice((0, 0, 1, 2, 5, rng.randrange(MAX_NUM_SEQS), MAX_NUM_SEQS))
        num_decodes = min(num_decodes, budget // (1 + drafts))
        room = budget - num_decodes * (1 + drafts)
        prompts: list[int] = []
        most = rng.choice((1, 2, 8, 20, 70, MAX_MODEL_LEN - 1))
        while (not num_decodes or rng.random() < 0.6) and len(prompts) + num_decodes < MAX_NUM_SEQS and room > 0:
            prompts.append(rng.randint(1, min(room, most)))
            room -= prompts[-1]
        num_sampled = num_decodes + rng.randint(0, len(prompts))
        lengths = [1 + drafts] * num_decodes + prompts
        settings = [rng.choice(SAMPLERS) for _ in range(rng.choice((1, 1, 3)))]
        new = []
        for row, length in enumerate(lengths):
            params = SamplingParams(**rng.choice(settings))
            request = Request(f"{number}-{row}", array("i", [1] * max(2, length)), params, max_tokens=9, seed=0)
            request.row, request.block_ids = row, [0] * (MAX_MODEL_LEN // 16)
            request.group_block_ids = [request.block_ids] * len(runner._state.state_tables)
            new.append(NewRequest.of(request))
        yield SchedulerOutput(
            number,
            [*range(len(lengths))],
            lengths,
            num_decodes,
            num_sampled,
            sum(lengths),
            new_requests=new,
            finished=finished,
            num_drafts=drafts if num_decodes else 0,
            num_to_propose=rng.choice((0, num_drafts)) if num_sampled else 0,
            longest_decode=rng.choice((1, 100, 9000)) if num_decodes else 0,
            awaited_step=number - 1,
            structured=[0] if num_sampled and rng.random() < 0.2 else [],
        )
        finished = [(each.request_id, each.row) for each in new]


def launch(runner: ModelRunnerV2, steps: Iterator[SchedulerOutput]) -> None:
    """Steps of all layers, up to each launch, in real memory; graphs run their work again."""
    instead = instead_of_launching.set(launch_nothing)
    no_gather = patch.object(groups, "_all_gather", lambda *_, **__: None)
    no_reduce = patch.object(groups.dist, "all_reduce", lambda *_, **__: None)
    no_tokens = patch.object(runner._token_sync, "_receive", torch.Tensor.zero_)
    no_stage = patch.object(type(runner._pipeline), "receive", type(runner._pipeline).buffers)
    with torch.inference_mode(), ZeroedTorch(), no_gather, no_reduce, no_tokens, no_stage:
        for _, tensor in tensors_of(runner):
            tensor.zero_()
        runner.graphs.captured = {
            key: RecordedCapture(runner.device, partial(runner._padding.of_graph(key))) for key in runner.graphs.keys
        }
        for step in steps:
            runner._forward(step)
            if runner._execute_state is not None:
                runner._sample(None)
    instead_of_launching.reset(instead)


def main() -> None:
    """Prints `try_kind` of the kinds of one part of several, and ``imports``: modules that take long to import.

    Arguments: the part's number, and the number of parts.
    """
    part, num_parts = map(int, sys.argv[1:])
    use_fake_driver()
    record_cuda_kernels()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    report: dict[str, Any] = {
        name: try_kind(KINDS[name], seed) for seed, name in list(enumerate(KINDS))[part::num_parts]
    }
    report["imports"] = [name for name in ("sympy", "torch._dynamo") if name in sys.modules]
    dist.destroy_process_group()
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()

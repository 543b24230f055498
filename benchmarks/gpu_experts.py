"""Mixtures of experts on a GPU: results against float32, and times beside those of reading the chosen experts.

python benchmarks/gpu_experts.py check
python benchmarks/gpu_experts.py time [--shape qwen3] [--form fp8-blocks] [--variants]
python benchmarks/gpu_experts.py engine --layers 8
python benchmarks/gpu_experts.py routing --layers 8
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from fleetfoot.config.model import RouterSpec
from fleetfoot.kernels.experts import experts_triton
from fleetfoot.kernels.experts.experts import ExpertSizes, TorchExperts, route_torch
from fleetfoot.kernels.experts.experts_triton import TritonExperts
from fleetfoot.kernels.experts.routing_triton import Slots, group, route_triton
from fleetfoot.kernels.experts.tilings import FewTiling, GroupTiling
from fleetfoot.kernels.quantized.packed import PackedMatrix
from fleetfoot.kernels.quantized.scaled import ScaledMatrix

CUDA = torch.device("cuda")
CLAMPED: dict[str, Any] = {
    "has_bias": True, "is_interleaved": True, "activation": "clamped", "alpha": 1.702, "limit": 7.0,
}  # fmt: skip
SHAPES: dict[str, tuple[ExpertSizes, int]] = {
    "qwen3": (ExpertSizes(128, 2048, 768), 8),  # Qwen3-30B-A3B
    "olmoe": (ExpertSizes(64, 2048, 1024), 8),  # OLMoE-1B-7B
    "gpt-oss": (ExpertSizes(32, 2880, 2880, **CLAMPED), 4),  # GPT-OSS-20B
}
SIGMOID = RouterSpec("sigmoid", True, 2.5, has_correction=True, num_groups=4, num_chosen_groups=2)
CHECKS: list[tuple[ExpertSizes, int, RouterSpec]] = [
    (ExpertSizes(128, 2048, 768), 8, RouterSpec()),
    (ExpertSizes(60, 512, 352), 4, RouterSpec(is_normalized=False)),
    (ExpertSizes(32, 720, 720, **CLAMPED), 4, RouterSpec(has_bias=True)),
    (ExpertSizes(8, 1024, 1792), 2, RouterSpec()),
    (ExpertSizes(256, 256, 128), 8, SIGMOID),
]
ROWS = (1, 3, 8, 16, 17, 64, 256, 2048)


class Linear:
    """A router's layer."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.dense = weight, bias

    def apply_unrounded(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def filled(experts: TorchExperts) -> Any:
    for matrix in experts.matrices.values():
        matrix.normal_(0.0, matrix.shape[2] ** -0.5)
    for bias in experts.biases.values():
        if bias is not None:
            bias.normal_(0.0, 0.1)
    return experts


def scaled(rows: int, columns: int, block: tuple[int, int], dtype: torch.dtype = torch.float8_e4m3fn) -> ScaledMatrix:
    values = (torch.randn(rows, columns, device=CUDA) * 32).clamp(-127, 127).to(dtype)
    scales = (torch.rand(rows // block[0], -(-columns // block[1]), device=CUDA) + 0.5) * (0.03 / 32)
    return ScaledMatrix(values, scales, *block, "group")


def packed(rows: int, columns: int, group: int, *, zeros: bool = False, is_e2m1: bool = False) -> PackedMatrix:
    words = torch.randint(-(2**31), 2**31 - 1, (rows, -(-columns // 128) * 16), device=CUDA, dtype=torch.int32)
    scales = ((torch.rand(rows, -(-columns // group), device=CUDA) + 0.5) * 0.008).bfloat16()
    if is_e2m1:
        shape = rows, -(-columns // 128) * 128 // group
        scales = torch.randint(118, 122, shape, device=CUDA, dtype=torch.uint8)
    points = torch.randint(6, 10, scales.shape, device=CUDA, dtype=torch.uint8) if zeros else None
    return PackedMatrix(words, scales, points, group, columns, is_e2m1)


FORMS: dict[str, Callable[[int, int], Any]] = {
    "fp8-blocks": lambda rows, columns: scaled(rows, columns, (16, 128)),
    "fp8": lambda rows, columns: scaled(rows, columns, (1, columns)),
    "int8": lambda rows, columns: scaled(rows, columns, (1, columns), torch.int8),
    "awq": lambda rows, columns: packed(rows, columns, 128, zeros=True),
    "int4": lambda rows, columns: packed(rows, columns, 32),
    "mxfp4": lambda rows, columns: packed(rows, columns, 32, is_e2m1=True),
}


def random_layer(sizes: ExpertSizes, form: str) -> Any:
    """``form``: of `FORMS`, or ``plain``."""
    if form == "plain":
        return filled(TritonExperts(sizes, torch.bfloat16, CUDA))
    shapes = {"gate_up": (2 * sizes.size, sizes.hidden_size), "down": (sizes.hidden_size, sizes.size)}
    stacks = {name: FORMS[form](sizes.num_experts * rows, columns) for name, (rows, columns) in shapes.items()}
    experts = TritonExperts(sizes, torch.bfloat16, CUDA, stacks)
    for bias in experts.biases.values():
        if bias is not None:
            bias.normal_(0.0, 0.1)
    return experts


def layer_bytes(experts: TritonExperts) -> int:
    """Of all weights and scales."""
    if experts.stacks is None:
        return sum(each.nbytes for each in experts.matrices.values())
    found = 0
    for stack in experts.stacks.values():
        tensors = (
            (stack.values, stack.scales)
            if isinstance(stack, ScaledMatrix)
            else (stack.words, stack.scales, *([] if stack.zeros is None else [stack.zeros]))
        )
        found += sum(each.nbytes for each in tensors)
    return found


def check_forms() -> None:
    """Kernels of quantized experts against their dequantized weights in float32."""
    for form in FORMS:
        worst = 0.0
        for sizes, num_chosen, router in CHECKS[:4]:
            experts = random_layer(sizes, form)
            wide = TorchExperts(sizes, torch.bfloat16, CUDA, experts.stacks)
            wide.biases = experts.biases
            linear, correction = router_of(sizes, router, torch.bfloat16)
            x = torch.randn(max(ROWS[:-1]), sizes.hidden_size, device=CUDA).bfloat16()
            for rows in ROWS[:-1]:
                routing = route_triton(x[:rows], linear, correction, router, num_chosen)
                try:
                    output = experts(x[:rows], routing).float()
                except Exception as error:
                    print("FAILED", form, sizes, rows, type(error).__name__, str(error)[:300], flush=True)
                    continue
                reference = wide(x[:rows], routing).float()
                error = float((output - reference).norm() / reference.norm())
                if not error < 1e-2:
                    print("WRONG", form, sizes, rows, error, flush=True)
                worst = max(worst, error)
        print(f"CORRECT {form}: largest relative error {worst:.1e}", flush=True)


def router_of(sizes: ExpertSizes, router: RouterSpec, dtype: torch.dtype) -> tuple[Linear, torch.Tensor | None]:
    weight = torch.randn(sizes.num_experts, sizes.hidden_size, device=CUDA) * sizes.hidden_size**-0.5
    bias = torch.randn(sizes.num_experts, device=CUDA).to(dtype) * 0.1 if router.has_bias else None
    correction = torch.randn(sizes.num_experts, device=CUDA) * 0.1 if router.has_correction else None
    return Linear(weight.to(dtype), bias), correction


def check() -> None:
    """Every kernel against the reference in float32, with a row of NaN."""
    worst: dict[str, float] = {}
    for sizes, num_chosen, router in CHECKS:
        for dtype in (torch.float32, torch.bfloat16):
            experts = filled(TritonExperts(sizes, dtype, CUDA))
            wide = TorchExperts(sizes, torch.float32, CUDA)
            for name in experts.matrices:
                wide.matrices[name].copy_(experts.matrices[name])
                if (bias := experts.biases[name]) is not None:
                    wide.biases[name].copy_(bias)
            linear, correction = router_of(sizes, router, dtype)
            x = torch.randn(max(ROWS), sizes.hidden_size, device=CUDA).to(dtype)
            x[5] = float("nan")
            expected = route_torch(x, linear, correction, router, num_chosen)
            results = []
            for rows in ROWS:
                routing = route_triton(x[:rows], linear, correction, router, num_chosen)
                output = experts(x[:rows], routing)
                of_rows = expected._replace(experts=expected.experts[:rows], weights=expected.weights[:rows])
                valid = torch.arange(rows, device=CUDA) != 5
                same = (routing.experts == of_rows.experts).all(1)
                assert same[valid].float().mean() > (0.999 if dtype is torch.float32 else 0.98), (sizes, rows)
                valid &= same
                reference = wide(x[:rows].float(), of_rows)
                error = (output.float() - reference)[valid].norm() / reference[valid].norm()
                assert rows <= 5 or output[5].isnan().all()
                assert error < (2e-5 if dtype is torch.float32 else 1e-2), (sizes, dtype, rows, float(error))
                worst[str(dtype)] = max(worst.get(str(dtype), 0.0), float(error))
                results.append(output)
            alone = torch.equal(results[0][0], results[-1][0])
            print(f"{sizes} {dtype}: correct; a row alone and among {max(ROWS)} equal: {alone}", flush=True)
    print("largest relative errors", worst)


def milliseconds(work: Callable[[], object], times: int = 5) -> float:
    """Of a replay of a graph of ``work``."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times


FEW_VARIANTS = {
    "plain": [FewTiling(16, 64, 4, stages) for stages in (5, 6, 7, 8, 12)],
    "scaled": [
        FewTiling(16, inputs, slices, stages)
        for inputs, slices in ((64, 4), (128, 2), (128, 4), (64, 8))
        for stages in (5, 10, 18)
    ],
    "packed": [FewTiling(16, 128, slices, stages) for slices in (1, 2, 4, 8) for stages in (4, 8, 14)],
}
GROUP_VARIANTS = {
    16: [(16, 64, 64, 128, 4, 4), (16, 32, 64, 128, 4, 5)],
    32: [(32, 64, 128, 128, 4, 3)],
    64: [(64, 128, 256, 64, 8, 4), (64, 128, 128, 64, 8, 4)],
    128: [(128, 128, 256, 64, 8, 4), (128, 128, 128, 64, 8, 4)],
}


@contextmanager
def group_tiling(tiling: GroupTiling) -> Iterator[None]:
    with patch.object(experts_triton, "choose_group_tiling", lambda *_: tiling):
        yield


def measure(name: str, form: str, rows_list: list[int], *, variants: bool) -> None:
    """Times of a layer, cold: each call is of another layer."""
    sizes, num_chosen = SHAPES[name]
    properties = torch.cuda.get_device_properties(0)
    rate = 4.3e12 if "H200" in properties.name else 3.05e12
    router = RouterSpec(has_bias=sizes.has_bias)
    layers = [random_layer(sizes, form) for _ in range(4)]
    routers = [router_of(sizes, router, torch.bfloat16)[0] for _ in layers]
    per_expert = layer_bytes(layers[0]) / sizes.num_experts
    for rows in rows_list:
        inputs = [torch.randn(rows, sizes.hidden_size, device=CUDA).bfloat16() for _ in range(8)]
        calls = [(layers[i % 4], routers[i % 4], x) for i, x in enumerate(inputs)]
        routings = [route_triton(x, linear, None, router, num_chosen) for _, linear, x in calls]
        distinct = sum(len(routing.experts.unique()) for routing in routings) / len(calls)

        def whole(calls: Any = calls) -> None:
            for experts, linear, x in calls:
                experts(x, route_triton(x, linear, None, router, num_chosen))

        def of_routing(calls: Any = calls) -> None:
            for _, linear, x in calls:
                route_triton(x, linear, None, router, num_chosen)

        def products(calls: Any = calls, routings: Any = routings) -> None:
            for (experts, _, x), routing in zip(calls, routings, strict=True):
                experts(x, routing)

        floor = 1e6 * distinct * per_expert / rate
        flops = rows * num_chosen * 3 * sizes.size * sizes.hidden_size * 2
        us = {part.__name__: milliseconds(part) * 1e3 / len(calls) for part in (whole, of_routing, products)}
        if not isinstance(routings[0].grouping, Slots):

            def grouping(routings: Any = routings) -> None:
                for routing in routings:
                    group(routing, sizes.num_experts, 16)

            us["group"] = milliseconds(grouping) * 1e3 / 8
        text = " ".join(f"{part} {value:.1f}" for part, value in us.items())
        tera = flops / us["whole"] / 1e6
        print(f"{name} {form} rows {rows}: us {text}; floor {floor:.1f} ({floor / us['whole']:.2f}), "
              f"{tera:.0f} TFLOPS, {distinct:.1f} experts", flush=True)  # fmt: skip
        if not variants:
            continue
        if rows <= 16:
            for is_down in (False, True):
                for tiling in FEW_VARIANTS[layers[0]._form("down")]:
                    choose = experts_triton.choose_few_tiling

                    def other(*a: Any, is_down: bool, t: Any = tiling, c: Any = choose, d: bool = is_down) -> Any:
                        return t if is_down == d else c(*a, is_down=is_down)

                    with patch.object(experts_triton, "choose_few_tiling", other):
                        try:
                            us_found = milliseconds(products) * 125
                            print(f"  {'down' if is_down else 'gate_up'} {tiling}: {us_found:.1f}", flush=True)
                        except Exception as error:
                            print(f"  {tiling}: {type(error).__name__}")
        else:
            mean = rows * num_chosen / distinct
            for tile_rows, found in GROUP_VARIANTS.items():
                if mean / 6 <= tile_rows <= 8 * mean:
                    for values in found:
                        with group_tiling(GroupTiling(*values)):
                            try:
                                print(f"  {values}: {milliseconds(products) * 125:.1f}", flush=True)
                            except Exception as error:
                                print(f"  {values}: {type(error).__name__}")
    profile(name, form, rows_list)


def profile(name: str, form: str, rows_list: list[int]) -> None:
    """Times of single kernels."""
    sizes, num_chosen = SHAPES[name]
    router = RouterSpec(has_bias=sizes.has_bias)
    layers = [random_layer(sizes, form) for _ in range(4)]
    linear = router_of(sizes, router, torch.bfloat16)[0]
    for rows in rows_list:
        inputs = [torch.randn(rows, sizes.hidden_size, device=CUDA).bfloat16() for _ in range(8)]

        def work(inputs: Any = inputs) -> None:
            for index, x in enumerate(inputs):
                layers[index % 4](x, route_triton(x, linear, None, router, num_chosen))

        work()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            work()
            torch.cuda.synchronize()
        times = {event.key: event.self_device_time_total / event.count for event in found.key_averages()}
        print(
            f"{name} rows {rows}: " + ", ".join(f"{key[:32]} {value:.1f}" for key, value in times.items()), flush=True
        )


QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
    "intermediate_size": 6144, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
}  # fmt: skip


def engine(num_layers: int) -> None:
    """Time per output token of decodes, and prompts, on a model of few layers with random weights."""
    from fleetfoot import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**QWEN3, "num_hidden_layers": num_layers}))
        begin = time.perf_counter()
        llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=8192, seed=0,
                  use_v2_model_runner=True, enable_prefix_caching=False)  # fmt: skip
        print(f"started in {time.perf_counter() - begin:.1f} s")
        generator = torch.Generator().manual_seed(0)

        def run(count: int, length: int, tokens: int) -> float:
            ids = torch.randint(10, 150000, (count, length), generator=generator).tolist()
            prompts = [{"prompt_token_ids": each} for each in ids]
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - begin

        for count in (1, 8, 64):
            run(count, 128, 17)
            short, long = run(count, 128, 1), run(count, 128, 129)
            print(f"b{count}: {(long - short) / 128 * 1e3:.3f} ms a token, {num_layers} layers", flush=True)
        run(64, 512, 1)
        print(f"prefill 64x512: {64 * 512 / run(64, 512, 1):.0f} tokens/s", flush=True)


def routing(num_layers: int) -> None:
    """Distinct experts of a step's decodes in each layer, over those of uniform routing: random weights count as a
    benchmark from 0.95 on."""
    from fleetfoot import LLM, SamplingParams
    from fleetfoot.layers.experts import Router

    found: dict[int, dict[int, list[int]]] = {}
    choose = Router.choose

    def counted(self: Router, x: torch.Tensor) -> Any:
        chosen = choose(self, x)
        found.setdefault(len(x), {}).setdefault(id(self), []).append(len(chosen.experts.unique()))
        return chosen

    with tempfile.TemporaryDirectory() as folder, patch.object(Router, "choose", counted):
        (Path(folder) / "config.json").write_text(json.dumps({**QWEN3, "num_hidden_layers": num_layers}))
        llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, seed=0,
                  model_runner="v1", enforce_eager=True, enable_prefix_caching=False)  # fmt: skip
        params = SamplingParams(temperature=0.0, max_tokens=33, ignore_eos=True, detokenize=False)
        for count in (8, 64):
            ids = torch.randint(10, 150000, (count, 128), generator=torch.Generator().manual_seed(count)).tolist()
            llm.generate([{"prompt_token_ids": each} for each in ids], params, use_tqdm=False)
            expected = 128 * (1 - (1 - 8 / 128) ** count)
            shares = [sum(each) / len(each) / expected for each in found[count].values()]
            print(f"{count} decodes: distinct experts over uniform {' '.join(f'{share:.3f}' for share in shares)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("check", "forms", "time", "engine", "routing"))
    parser.add_argument("--form", choices=("plain", *FORMS), default="plain")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3")
    parser.add_argument("--rows", default="1,8,64,256,2048,8192")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.what == "check":
        check()
    elif arguments.what == "forms":
        check_forms()
    elif arguments.what in ("engine", "routing"):
        {"engine": engine, "routing": routing}[arguments.what](arguments.layers)
    else:
        measure(arguments.shape, arguments.form, list(map(int, arguments.rows.split(","))), variants=arguments.variants)


if __name__ == "__main__":
    main()

"""Host time of a whole engine step with a model that does nothing: scheduling, preparing, post-processing, outputs.

Model Runner V2 runs on a CPU here, so the preparation and sampling that a GPU would do are part of the time too. The
vocabulary is small, so that sampling costs what its calls cost.

With --prompts it is the host time of prompts that are given one token each: in all, up to the launch of the first
kernel, and after that of the last one. Here what a GPU would do does not count.

With --watched it is what a viewer of the engine adds to steps of decodes: for each step, and for each look, of which
there are four in a second.

Usage: python benchmarks/host_step.py [--requests 256] [--steps 1000] [--runner v2] [--logprobs 5] [--no-overlap]
           [--watched] [--profile]
       python benchmarks/host_step.py --prompts 64x512 [--steps 100] [--no-overlap] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn

from fleetfoot.config.model import AttentionSpec, LayerSpec, MLPSpec, ModelConfig
from fleetfoot.engine.core import EngineCore
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.engine.input_processor import InputProcessor
from fleetfoot.engine.output_router import OutputRouter
from fleetfoot.engine.stats import StatsCollector
from fleetfoot.engine.watch import Watch
from fleetfoot.fusion import LayerFusion
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.kernels.registry import DeviceFacts, load_kernels, plan_kernels
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.decoder import DecoderStack
from fleetfoot.models.interface import CausalLM, Decoder
from fleetfoot.native.loading import native_problem
from fleetfoot.records.forward_context import ForwardContext
from fleetfoot.records.kv_layout import KVCacheSpec, KVLayout
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.runner.v1.runner import ModelRunnerV1
from fleetfoot.runner.v2.runner import ModelRunnerV2
from fleetfoot.scheduler.scheduler import Scheduler, SchedulerConfig
from fleetfoot.weights.loading import ModelLoader

VOCAB_SIZE = 64
PROMPT_VOCAB_SIZE = 128_000
BLOCK_SIZE = 16
INTERVAL_S = 0.25
"""Between two looks of a viewer."""
STEP_S = 0.004
"""What a step takes, about, of 256 requests and a small model on a fast GPU."""


class NullModel(CausalLM):
    """A model that computes nothing and writes no KV."""

    def __init__(self, config: ModelConfig, context: ModelContext, max_tokens: int, max_reqs: int) -> None:
        super().__init__(config, context)
        self.lm_head = None
        self.model = Decoder()
        self.model.embed_tokens = self.model.norm = None
        self.model.layers = DecoderStack(config, context, self.layers, nn.Identity)
        self._hidden = torch.zeros(max_tokens, 1)
        self._logits = torch.randn(max_reqs, VOCAB_SIZE)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext, *others: object) -> torch.Tensor:
        hidden = self._hidden[: len(input_ids)]
        return hidden if ctx.logits is None else ctx.logits.select(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)]


class NullLoader(ModelLoader):
    """Hands out a `NullModel`."""

    def load(self) -> NullModel:
        return NullModel(self.config, self.context, 1 << 16, 1 << 12)


def build(
    requests: int, max_model_len: int, runner_name: str, overlap: bool, enable_prefix_caching: bool = True, **more: Any
) -> tuple[LLMEngine, ModelRunnerV1 | ModelRunnerV2]:
    model = ModelConfig(
        "LlamaForCausalLM", VOCAB_SIZE, 1, (LayerSpec(AttentionSpec(1, 1, 16), MLPSpec(1)),), max_model_len
    )
    kernels = load_kernels(plan_kernels(DeviceFacts("cpu", has_native=not native_problem())))
    context = ModelContext(kernels, SDPABackend(), torch.float32, torch.device("cpu"))
    loader = NullLoader(model, context, None)
    budget = max(8192, requests)
    runner: ModelRunnerV1 | ModelRunnerV2
    if runner_name == "v1":
        runner = ModelRunnerV1(loader, max_num_seqs=requests, max_model_len=max_model_len)
    else:
        runner = ModelRunnerV2(
            loader,
            max_num_seqs=requests,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            fusion=(LayerFusion(False, "the model computes nothing"),),
        )
    runner.load_model()
    num_blocks = requests * (max_model_len // BLOCK_SIZE + 1)
    runner.initialize_kv_cache(KVLayout(num_blocks, BLOCK_SIZE, "float32", (KVCacheSpec(1, 16),)))
    limits = SchedulerConfig(num_blocks, BLOCK_SIZE, requests, budget, enable_prefix_caching=enable_prefix_caching)
    input_processor = InputProcessor(
        vocab_size=PROMPT_VOCAB_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=[],
        tokenizer=None,
        max_logprobs=20,
        seed=0,
    )
    core = EngineCore(Scheduler(limits), _Executor(runner), StatsCollector(), depth=int(overlap))
    return LLMEngine(core, input_processor, None, **more), runner


class _Executor:
    def __init__(self, runner: ModelRunnerV1 | ModelRunnerV2) -> None:
        self.runner_name = runner.name
        self.execute_model = runner.execute_model
        self.sample_tokens = runner.sample_tokens
        self.shutdown = runner.shutdown


class DeviceWork:
    """Sums up the time of what a GPU would do, and remembers when it began and ended."""

    def __init__(self, runner: ModelRunnerV2) -> None:
        self.clear()
        for owner, name in (
            (runner._step_on_device, "forward"),
            (runner, "_sample_logits"),
            (runner._step_on_device, "finish"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def clear(self) -> None:
        self.seconds = self.began = self.ended = 0.0

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: object, **keywords: object) -> object:
            begin = time.perf_counter()
            result = call(*args, **keywords)
            self.ended = time.perf_counter()
            self.began = self.began or begin
            self.seconds += self.ended - begin
            return result

        return timed


def measure_prompts(args: argparse.Namespace, profiler: cProfile.Profile) -> dict[str, object]:
    """What `LLM.generate` does for prompts, again and again."""
    num_prompts, num_tokens = map(int, args.prompts.split("x"))
    engine, runner = build(num_prompts, num_tokens + 1, "v2", args.overlap, enable_prefix_caching=False)
    assert isinstance(runner, ModelRunnerV2)
    device = DeviceWork(runner)
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    # large numbers, for the small ones are objects that are there already
    prompts = [
        [(number * 310_007 + place * 70_001) % PROMPT_VOCAB_SIZE for place in range(num_tokens)]
        for number in range(num_prompts)
    ]
    samples: dict[str, list[float]] = {"host_us": [], "before_first_launch_us": [], "after_last_launch_us": []}
    for repeat in range(5 + args.steps):
        if repeat == 5 and args.profile:
            profiler.enable()
        device.clear()
        begin = time.perf_counter()
        checked = engine.input_processor.check_params(params)
        has_stepped = False
        for number, prompt in enumerate(prompts):
            inputs = {"prompt_token_ids": prompt}
            engine.submit(engine.process_inputs(str(number), inputs, checked, params_checked=True))
            if not has_stepped and engine.fills_first_step((number + 1) * num_tokens):
                has_stepped = True
                engine.step()
        while engine.has_unfinished_requests():
            engine.step()
        end = time.perf_counter()
        samples["host_us"].append(end - begin - device.seconds)
        samples["before_first_launch_us"].append(device.began - begin)
        samples["after_last_launch_us"].append(end - device.ended)
    profiler.disable()
    return {
        "prompts": args.prompts,
        "overlap": args.overlap,
        **{name: round(1e6 * statistics.median(times[5:]), 1) for name, times in samples.items()},
    }


def measure_steps(args: argparse.Namespace, profiler: cProfile.Profile) -> dict[str, object]:
    """Steps of decodes alone."""
    engine, _ = build(args.requests, args.steps + 512, args.runner, args.overlap)
    params = SamplingParams(
        max_tokens=args.steps + 300,
        temperature=args.temperature,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        logprobs=args.logprobs,
    )
    for number in range(args.requests):
        prompt = [(number * 31 + position * 7) % VOCAB_SIZE for position in range(17 + number % 64)]
        engine.add_request(str(number), prompt, params)
    while engine.stats().num_generation_tokens < args.requests * 4:
        engine.step()
    engine.stats_collector.clear_samples()
    if args.profile:
        profiler.enable()
    times = []
    for _ in range(args.steps):
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    profiler.disable()
    steps = engine.stats_collector.steps
    return {
        "runner": engine.runner_name,
        "overlap": args.overlap,
        "requests": args.requests,
        "step_us": round(1e6 * statistics.median(times), 1),
        "step_us_mean": round(1e6 * statistics.fmean(times), 1),
        "schedule_us": round(1e6 * statistics.median(step.schedule_s for step in steps), 1),
        "runner_us": round(1e6 * statistics.median(step.execute_s for step in steps), 1),
        "update_us": round(1e6 * statistics.median(step.update_s for step in steps), 1),
    }


class TimedWatch(Watch):
    """Keeps the times of its records."""

    def __init__(self, engine: LLMEngine) -> None:
        super().__init__(engine, dict)
        self.seconds: list[float] = []

    def record(self, *step: Any) -> None:
        begin = time.perf_counter()
        super().record(*step)
        self.seconds.append(time.perf_counter() - begin)


def measure_watched(args: argparse.Namespace, profiler: cProfile.Profile) -> dict[str, object]:
    """Steps of decodes of an engine with clients, and four looks in a second."""
    engine, _ = build(args.requests, args.steps + 512, args.runner, args.overlap, output_processor=OutputRouter)
    params = SamplingParams(
        max_tokens=args.steps + 300, temperature=args.temperature, ignore_eos=True, detokenize=False
    )
    for number in range(args.requests):
        prompt = {"prompt_token_ids": [(number * 31 + place * 7) % VOCAB_SIZE for place in range(17 + number % 64)]}
        request = engine.process_inputs(str(number), prompt, params)
        request.number = number
        engine.submit(request)
    while engine.stats().num_generation_tokens < args.requests * 4:
        engine.step()
    watch, looks, size = TimedWatch(engine), [], 0
    for number in range(args.steps):
        if number % round(INTERVAL_S / STEP_S) == 0:
            begin = time.perf_counter()
            size = len(msgspec.msgpack.encode(msgspec.to_builtins(watch.look("viewer"))))
            looks.append(time.perf_counter() - begin)
        engine.step()
    record_s, look_s = statistics.median(watch.seconds), statistics.median(looks)
    return {
        "requests": args.requests,
        "record_us": round(1e6 * record_s, 2),
        "look_us": round(1e6 * look_s, 1),
        "look_bytes": size,
        "share_of_4_ms_steps": round((record_s + look_s * STEP_S / INTERVAL_S) / STEP_S, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompts", metavar="COUNTxTOKENS", help="measure prompts: so many, of so many tokens each")
    parser.add_argument("--steps", type=int, default=1000, help="of decodes; or how often the prompts are computed")
    parser.add_argument("--runner", choices=("v1", "v2"), default="v2")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--logprobs", type=int, help="top logprobs of each token")
    parser.add_argument("--watched", action="store_true", help="what a viewer of the engine adds")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    profiler = cProfile.Profile()
    measure = measure_prompts if args.prompts else measure_watched if args.watched else measure_steps
    measured = measure(args, profiler)
    if args.profile:
        profiler.print_stats("tottime")
    print(json.dumps(measured))


if __name__ == "__main__":
    main()

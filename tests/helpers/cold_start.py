"""Starts one engine, serves requests of every sort while nothing may be compiled, and reports. Run as a module, in a
process of its own; prints a line of JSON, see `main`.

Usage: python -m tests.helpers.cold_start ahead|lazily SETTINGS, the JSON of `EngineConfig`'s.
"""

import json
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fleetfoot.engine.engine import LLMEngine
from fleetfoot.kernels.runtime.compile_ahead import CompileAhead
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.runner.v2 import padding_work
from tests.helpers.engines import make_engine, prompt_of, run_requests
from tests.helpers.nothing_compiles import nothing_compiles

VOCAB = 2048
LARGE = ("sympy", "torch._dynamo", "torch._inductor")
GREEDY: dict[str, Any] = {"temperature": 0.0}
RANDOM: dict[str, Any] = {"temperature": 0.9, "seed": 3}
SAMPLING: dict[str, dict[str, Any]] = {
    "random": RANDOM,
    "filters": {**RANDOM, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalties": {**GREEDY, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "biases": {**RANDOM, "logit_bias": {300: 2.0, 400: -3.0}, "allowed_token_ids": list(range(250, 900))},
    "minimum": {**GREEDY, "min_tokens": 6, "stop_token_ids": list(range(300, 600)), "ignore_eos": False},
    "logprobs": {**GREEDY, "logprobs": 3},
    "no logprobs": {**GREEDY, "logprobs": 0},
    "more logprobs": {**GREEDY, "logprobs": 40},
    "many logprobs": {**GREEDY, "logprobs": 300},
    "prompt logprobs": {**GREEDY, "prompt_logprobs": 2},
    "top-k": {**RANDOM, "top_k": 30},
    "top-p": {**RANDOM, "top_p": 0.9},
    "large top-k": {**RANDOM, "top_k": 1500},
    "long list": {**RANDOM, "logit_bias": {token: 0.1 for token in range(600)}},
    "everything": {**RANDOM, "top_p": 0.8, "top_k": 50, "repetition_penalty": 1.1, "logprobs": 5},
}


def requests(wave: int) -> dict[str, tuple[Any, SamplingParams]]:
    """By name: prompts of many lengths, and all that sampling has; in the second wave, more of them at once."""

    def request(length: int, place: int, **features: Any) -> tuple[Any, SamplingParams]:
        prompt = prompt_of(length, VOCAB, seed=1000 * wave + place)
        prompt[length // 2 :] = prompt[: length - length // 2]  # so that n-grams are found
        params = SamplingParams(**{"max_tokens": 10, "ignore_eos": True, "detokenize": False, **features})
        return {"prompt_token_ids": prompt}, params

    lengths = (1, 7, 40, 130, 350) if wave == 0 else (3, 350, *[20] * 24)
    named = {f"{wave} greedy {place}": request(length, place, **GREEDY) for place, length in enumerate(lengths)}
    return named | {
        f"{wave} {name}": request(12 + place, 100 + place, **features)
        for place, (name, features) in enumerate(SAMPLING.items())
    }


def serve(engine: LLMEngine, wave: int) -> dict[str, list[int]]:
    return {name: list(output.outputs[0].token_ids) for name, output in run_requests(engine, requests(wave)).items()}


def serve_alone(engine: LLMEngine, *, has_grammars: bool) -> None:
    """Prompts of every length, and each sampler and grammar, one after the other."""
    lengths = *range(1, 71), *range(127, 131), 255, 256, 257, 380
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)
    for length in lengths:
        run_requests(engine, {f"alone {length}": ({"prompt_token_ids": prompt_of(length, VOCAB, seed=length)}, params)})
    features = dict(SAMPLING)
    if has_grammars:
        features["grammar"] = {**RANDOM, "structured_outputs": {"regex": "[a-c]{2,9}"}}
        features["grammar and penalties"] = {**features["grammar"], "repetition_penalty": 1.2, "logprobs": 2}
    for name, settings in features.items():
        for count in (1, 20):
            params = SamplingParams(**{"max_tokens": 7, "ignore_eos": True, "detokenize": False, **settings})
            prompts = {f"{name} {place}": {"prompt_token_ids": prompt_of(9 + place, VOCAB)} for place in range(count)}
            run_requests(engine, {key: (prompt, params) for key, prompt in prompts.items()})


def main() -> None:
    """Prints ``runner``; ``kernels``, numbers of those found and compiled; ``late``: what was compiled, captured or
    loaded after the start; ``tokens``; ``threads`` of ours that are left; ``imports``, large ones, of the start; and
    ``ready_s``, seconds of the start without the imports before it."""
    how, settings = sys.argv[1], json.loads(sys.argv[2])
    is_ahead = how == "ahead"
    if not is_ahead:
        patch.object(padding_work, "can_compile_ahead", lambda device: False).start()
    report: dict[str, Any] = {"imports": []}
    queue = CompileAhead.queue

    def queue_and_look(*arguments: Any, **options: Any) -> None:
        modules = {*sys.modules}
        queue(*arguments, **options)
        report["imports"] += [name for name in LARGE if name in {*sys.modules} - modules]

    begin = time.perf_counter()
    with patch.object(CompileAhead, "queue", queue_and_look):
        engine = make_engine(Path(settings.pop("model")), max_logprobs=300, **settings)
    report |= {"runner": engine.runner_name, "ready_s": time.perf_counter() - begin}
    report["kernels"] = engine.collective_rpc("compiled_kernels")[0]
    is_watched = is_ahead and engine.runner_name == "v2"
    with nothing_compiles() if is_watched else nullcontext([]) as late:
        report["tokens"] = serve(engine, 0) | serve(engine, 1)
        if is_watched:
            serve_alone(engine, has_grammars=not settings.get("skip_tokenizer_init"))
        if settings.get("enable_sleep_mode"):
            engine.sleep(1)
            engine.wake_up()
            serve(engine, 0)
    engine.shutdown()
    report["late"] = late
    report["threads"] = [thread.name for thread in threading.enumerate() if "compile" in thread.name]
    print(json.dumps(report))


if __name__ == "__main__":
    main()

"""Sleep and wake-up of an engine: memory before and after, and seconds, beside those of its start.

Memory is that of the GPU in use (cudaMemGetInfo), or on a CPU the resident memory of the process. Greedy tokens are
compared before and after; with graphs, none is captured after the wake-up. Each level sleeps twice: the first sleep at
level 1 also takes the pinned host memory.

Usage: python benchmarks/sleep.py MODEL [--load-format dummy] [--device cpu] [--num-blocks N] [--prompt-tokens 1000]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from fleetfoot import LLM, SamplingParams


def memory_mib(device: str) -> float:
    """In use: of the GPU, or of this process."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**20
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def seconds(call: Callable[[], object], device: str) -> float:
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return round(time.perf_counter() - begin, 4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--num-blocks", type=int)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    arguments = parser.parse_args()
    settings: dict[str, Any] = {"device": arguments.device, "load_format": arguments.load_format}
    settings |= {"num_gpu_blocks_override": arguments.num_blocks, "max_model_len": arguments.prompt_tokens + 128}
    begin, before = time.perf_counter(), memory_mib(arguments.device)
    llm = LLM(arguments.model, **settings, enable_sleep_mode=True, skip_tokenizer_init=True)
    start_s = round(time.perf_counter() - begin, 3)
    vocab_size = llm.model_config.vocab_size
    prompts = [
        {"prompt_token_ids": [(7 * row + 13 * i) % (vocab_size - 10) + 5 for i in range(arguments.prompt_tokens)]}
        for row in range(8)
    ]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)

    def tokens() -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    def first_token() -> None:
        llm.generate(prompts[0], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)

    def num_graphs() -> int:
        runner = llm.llm_engine.core.executor.runner  # type: ignore[attr-defined]
        return len(runner.graphs.captured) if hasattr(runner, "graphs") else 0

    with llm:
        tokens()
        expected, graphs = tokens(), num_graphs()
        parts = llm.llm_engine.plan.memory.parts()
        sizes = {name: round(parts[name] / 2**20, 1) for name in ("weights", "kv_cache")}
        print(json.dumps({"start_s": start_s, "before_mib": round(before, 1), "graphs": graphs, "planned_mib": sizes}))
        for level in (1, 1, 2, 2):
            awake = memory_mib(arguments.device)
            sleep_s = seconds(lambda level=level: llm.sleep(level=level), arguments.device)
            asleep = memory_mib(arguments.device)
            weights_s = seconds(lambda: llm.wake_up(tags=["weights"]), arguments.device)
            kv_cache_s = seconds(llm.wake_up, arguments.device)
            woken = memory_mib(arguments.device)
            found = tokens()
            report = {
                "level": level,
                "awake_mib": round(awake, 1),
                "asleep_mib": round(asleep, 1),
                "woken_mib": round(woken, 1),
                "sleep_s": sleep_s,
                "wake_weights_s": weights_s,
                "wake_rest_s": kv_cache_s,
                "first_step_s": seconds(lambda: first_token(), arguments.device),
                "tokens_equal": found == expected,
                "graphs_captured_since": num_graphs() - graphs,
            }
            print(json.dumps(report), flush=True)
    if arguments.device == "cuda":
        torch.cuda.empty_cache()
    print(json.dumps({"after_shutdown_mib": round(memory_mib(arguments.device), 1)}))


if __name__ == "__main__":
    main()

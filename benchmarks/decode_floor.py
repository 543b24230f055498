"""One request on a CPU beside what reading memory takes: the time of a token, the bytes that it needs, the read rate.

    python benchmarks/decode_floor.py MODEL [--threads 2] [--tokens 32] [--rounds 12]

MODEL is a folder, of which `config.json` is enough: weights are random then. A token reads the weights of all layers
and of the head, reads and writes the recurrent states, and reads the KV of its context. Between rounds of tokens as
many bytes are summed by as many threads, as integers and as floats, in the same process: a minute later the machine may
be another one. A line of JSON has the bytes, the read rate, and the ratio of a token to reading its bytes, for the
fastest and for the medians: 1 is the floor, and 1.33 three quarters of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from fleetfoot import LLM, SamplingParams
from fleetfoot.cli.bench_roofline import Costs
from fleetfoot.records.kv_layout import StateSpec, kv_cache_specs


def read_seconds(words: torch.Tensor, num_bytes: int) -> float:
    """Seconds of sums over so many bytes."""
    begin, count = time.perf_counter(), max(1, round(num_bytes / words.nbytes))
    for _ in range(count):
        words.sum()
    return (time.perf_counter() - begin) / count / words.nbytes * num_bytes


def token_seconds(llm: LLM, name: str, num_tokens: int) -> list[float]:
    """Seconds of each step that decodes a token."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens + 1, ignore_eos=True, detokenize=False)
    prompt: Any = {"prompt_token_ids": list(range(3, 35))}
    llm.llm_engine.add_request(name, prompt, params)
    times, begin = [], time.perf_counter()
    while llm.llm_engine.has_unfinished_requests():
        if llm.llm_engine.step():
            times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    return times[2:]  # the prompt, and steps that overlap with it


def bytes_of_token(llm: LLM, context: int) -> dict[str, int]:
    plan = llm.llm_engine.plan
    costs, specs = Costs.of(plan.model, plan.dtype), kv_cache_specs(plan.model, plan.dtype)
    states = sum(spec.part_bytes(1, plan.dtype) for spec in specs if isinstance(spec, StateSpec))
    weights = plan.linear_methods.layer_bytes(plan.model, range(plan.model.num_layers), plan.dtype)
    head = plan.linear_methods.embedding_bytes("lm_head", plan.model.vocab_size, plan.model.hidden_size, plan.dtype)
    return {"weights": weights + head, "states": 2 * states, "kv": costs.attention_bytes(context, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    load_format = "auto" if list(Path(args.model).glob("*.safetensors")) else "dummy"
    llm = LLM(args.model, load_format=load_format, skip_tokenizer_init=True, device="cpu", dtype="bfloat16",
              max_num_seqs=1, max_model_len=1024, enable_prefix_caching=False)  # fmt: skip
    words = [torch.ones(32 << 20, dtype=torch.int64), torch.ones(64 << 20)]
    needed = bytes_of_token(llm, 32 + args.tokens // 2)
    total, times, reads = sum(needed.values()), list[float](), list[float]()
    for number in range(args.rounds):
        reads += [read_seconds(each, total) for each in words for _ in range(args.tokens // 4)]
        times += token_seconds(llm, str(number), args.tokens)
    report = {
        "bytes": needed, "gb_per_s": total / min(reads) / 1e9, "ms": min(times) * 1e3, "ratio": min(times) / min(reads),
        "ratio_of_medians": statistics.median(times) / statistics.median(reads),
    }  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main()

"""What structured output costs: the time per output token of a batch under a JSON schema, under one with bounded
strings, without one, and mixed.

All are timed turn by turn in one engine, and the best of several turns counts. The model has random weights, by
default in the shape of Qwen3-0.6B, and a tokenizer that is made up: bytes, and random words for the rest of the
vocabulary, so that masks have their real width. With --host it is the host's part alone, without an engine: matchers
that advance by a token, and masks that are filled.

Usage: python benchmarks/structured.py [--requests 64] [--tokens 256] [--turns 5] [--config '{"num_hidden_layers": 2}']
                                       [--settings '{"model_runner": "v1"}']
       python benchmarks/structured.py --host [--requests 64] [--tokens 256]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from fleetfoot import LLM, SamplingParams, StructuredOutputsParams
from fleetfoot.records.request import Request
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.structured.compiler import GrammarCompiler
from fleetfoot.structured.mask_space import MaskMemory
from fleetfoot.structured.masks import TokenMasker
from fleetfoot.tokenizer.tokenizer import Tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False, "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}  # fmt: skip
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 100_000,  # no output ends before its length
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "kind": {"enum": ["person", "company", "other"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["name", "age", "kind", "tags", "note"],
        "additionalProperties": False,
    },
}
BOUNDED: dict[str, Any] = {"type": "array", "minItems": 100_000, "items": {"type": "string", "maxLength": 24}}
"""Near the end of a bounded string, each token's length decides, and a mask takes up to a hundred times as long."""
PROMPT_TOKENS = 128
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_model(folder: Path, config: dict[str, Any]) -> None:
    """A config.json, and a tokenizer with a token for nearly each logit."""
    (folder / "config.json").write_text(json.dumps(config))
    rng = random.Random(0)
    vocabulary = {"<end>": 0} | {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)}
    while len(vocabulary) < config["vocab_size"] * 0.99:  # models have more logits than tokens
        space, length = rng.choice(["Ġ", ""]), rng.randint(2, 9)
        vocabulary.setdefault(space + "".join(rng.choices(LETTERS, k=length)), len(vocabulary))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(folder / "tokenizer.json"))


def measure_engine(folder: Path, args: argparse.Namespace) -> dict[str, object]:
    llm = LLM(str(folder), load_format="dummy", max_num_seqs=args.requests, **json.loads(args.settings))
    rng = random.Random(1)
    vocab_size = llm.llm_engine.input_processor.vocab_size
    prompts: list[Any] = [
        {"prompt_token_ids": [rng.randrange(300, vocab_size * 9 // 10) for _ in range(PROMPT_TOKENS)]}
        for _ in range(args.requests)
    ]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": args.tokens, "ignore_eos": True, "detokenize": False}
    free, bound = SamplingParams(**options), SamplingParams(**options, structured_outputs={"json": SCHEMA})
    bounded = SamplingParams(**options, structured_outputs={"json": BOUNDED})
    batches = {
        "free": [free] * args.requests,
        "mixed": [(free, bound)[i % 2] for i in range(args.requests)],
        "json": [bound] * args.requests,
        "bounded": [bounded] * args.requests,
    }
    times: dict[str, list[float]] = {name: [] for name in ("free", "mixed, free", "mixed, json", "json", "bounded")}
    for turn in range(1 + args.turns):  # the first one compiles the grammar, and captures graphs
        for name, params in batches.items():
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for kind, chosen in (("free", free), ("json", bound), ("bounded", bounded)):
                found = [
                    output.metrics.time_per_output_token
                    for output, one in zip(outputs, params, strict=True)
                    if one is chosen and output.metrics is not None
                ]
                if found and turn:
                    times[name if name == kind else f"{name}, {kind}"].append(statistics.mean(found))
    best = {name: min(values) for name, values in times.items()}
    return {
        "requests": args.requests,
        "runner": llm.llm_engine.runner_name,
        "tpot_us": {name: round(1e6 * value, 1) for name, value in best.items()},
        "ratio": {name: round(value / best["free"], 3) for name, value in best.items()},
    }


def measure_host(folder: Path, config: dict[str, Any], args: argparse.Namespace) -> dict[str, object]:
    tokenizer = Tokenizer.from_path(folder)
    masker = TokenMasker(MaskMemory(-(-config["vocab_size"] // 32), args.requests), args.processes)
    ends = [config["eos_token_id"]]
    grammars = GrammarCompiler(lambda: tokenizer, config["vocab_size"], ends, on_vocabulary=masker.start)
    structured, rng = StructuredOutputsParams(json=SCHEMA), random.Random(2)
    begin = time.perf_counter()
    grammars.compile(structured)
    compile_s = time.perf_counter() - begin
    requests = []
    for number in range(args.requests):
        request = Request(str(number), [1], SamplingParams(), max_tokens=args.tokens, seed=0)  # type: ignore[arg-type]
        request.grammar = grammars.start(structured, min_tokens=0, ignore_eos=True)
        requests.append(request)
    count, times = len(requests), []
    output = SchedulerOutput(0, list(range(count)), [1] * count, count, count, count, structured=list(range(count)))
    for _ in range(args.tokens):
        begin = time.perf_counter()
        masks, failed = masker.compute(output, requests)
        times.append(time.perf_counter() - begin)
        assert masks is not None and not failed
        for request, mask in zip(requests, masks.masks, strict=True):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            request.output_token_ids.append(int(rng.choice(allowed)))
    masker.close()
    return {
        "requests": count,
        "first_compile_s": round(compile_s, 3),
        "step_us": {
            "median": round(1e6 * statistics.median(times), 1),
            "p90": round(1e6 * statistics.quantiles(times, n=10)[-1], 1),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--config", default="{}", help="fields of config.json, as JSON")
    parser.add_argument("--settings", default='{"max_model_len": 2048}', help="settings of the engine, as JSON")
    parser.add_argument("--host", action="store_true", help="matchers and masks alone")
    parser.add_argument("--processes", type=int, default=0, help="of --host, that compute masks")
    args = parser.parse_args()
    config = CONFIG | json.loads(args.config)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), config)
        report = measure_host(Path(folder), config, args) if args.host else measure_engine(Path(folder), args)
    print(json.dumps(report))


if __name__ == "__main__":
    main()

"""Fleetfoot beside llama.cpp on the same GGUF file and CPU: a process each at a time, in turns.

    python benchmarks/gguf_peers.py --shape qwen3-0.6b smollm2-135m --type Q4_K_M Q8_0 --llama /path/to/python

Files are made for a shape, with random blocks in the mixture of types that llama.cpp's quantizer would choose, or
named. Workloads: `one`: 32 tokens after a prompt of 32; `many`: 32 requests at once, 16 tokens each after prompts of
32; `prompt`: 512 tokens. llama.cpp (`llama-cpp-python` 0.3.36, under the interpreter of `--llama`) decodes `many` in
batches. Both engines run with one thread and with two, and the better one of each counts. Where other processes have
the machine, processor time with the fewest threads says more; it stands beside.

Times are those of the fastest of `--repeats` within each process, so one that was disturbed does not count. Memory is
the peak of what was resident.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SHAPES: dict[str, dict[str, int]] = {
    name: dict(zip(("hidden", "layers", "heads", "kv_heads", "head_dim", "size", "vocab"), sizes, strict=True))
    for name, sizes in {
        "qwen3-0.6b": (1024, 28, 16, 8, 128, 3072, 151936),
        "smollm2-135m": (576, 30, 9, 3, 64, 1536, 49152),
        "tiny": (256, 2, 4, 2, 64, 512, 512),
    }.items()
}
WORKLOADS = {"one": (1, 32, 32), "many": (32, 32, 16), "prompt": (1, 512, 1)}
"""Name -> requests, tokens of a prompt, and tokens that follow it."""
CONTEXT = 2048 + 512


def types_of(mixture: str, layer: int, layers: int, inputs: int) -> dict[str, str]:
    """The types of a layer's matrices, and of the head (`output`)."""
    matrices = "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output"
    if mixture != "Q4_K_M":
        return dict.fromkeys(matrices, mixture)
    is_more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    four, six = ("Q4_K", "Q6_K") if inputs % 256 == 0 else ("Q5_0", "Q8_0")  # rows that have no blocks of 256
    down = "Q6_K" if is_more else "Q4_K"  # its inputs are those of the MLP
    return {**dict.fromkeys(matrices, four), "attn_v": six if is_more else four, "ffn_down": down, "output": six}


def random_blocks(kind: str, rows: int, inputs: int, rng: np.random.Generator) -> np.ndarray:
    """``[rows, bytes of a row]`` with values of the order of 0.02."""
    import gguf

    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, inputs // size, num_bytes), dtype=np.uint8)

    def halves(value: float) -> np.ndarray:
        values = rng.uniform(value, 2 * value, blocks.shape[:2]).astype(np.float16)
        return values.view(np.uint8).reshape(*blocks.shape[:2], 2)

    if kind == "Q6_K":
        blocks[..., 208:] = halves(1e-5)
    else:
        blocks[..., :2] = halves({"Q8_0": 1e-4, "Q5_0": 1e-3}.get(kind, 5e-5))
        if kind == "Q4_K":
            blocks[..., 2:4] = halves(4e-4)
    return blocks.reshape(rows, -1)


def make_file(path: Path, shape: dict[str, int], mixture: str) -> Path:
    """A file of Qwen3 or Llama with random blocks, its head tied to the embedding, and a tokenizer of bytes."""
    import gguf

    is_qwen = shape["head_dim"] == 128
    architecture = "qwen3" if is_qwen else "llama"
    writer, rng = gguf.GGUFWriter(path, architecture), np.random.default_rng(0)
    hidden, layers, size, vocab = (shape[name] for name in ("hidden", "layers", "size", "vocab"))
    writer.add_context_length(CONTEXT * 4)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(size)
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{index}" for index in range(vocab)])
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(0)

    def add(name: str, kind: str, rows: int, inputs: int) -> None:
        blocks = random_blocks(kind, rows, inputs, rng)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[kind])

    def add_norm(name: str, length: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(length, np.float32))

    add("token_embd", types_of(mixture, 0, layers, hidden)["output"], vocab, hidden)
    add_norm("output_norm", hidden)
    queries, keys = (shape[name] * shape["head_dim"] for name in ("heads", "kv_heads"))
    for layer in range(layers):
        kinds = types_of(mixture, layer, layers, hidden)
        matrices = {
            "attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
            "attn_output": (hidden, queries), "ffn_gate": (size, hidden), "ffn_up": (size, hidden),
            "ffn_down": (hidden, size),
        }  # fmt: skip
        for name, (rows, inputs) in matrices.items():
            add(f"blk.{layer}.{name}", kinds[name], rows, inputs)
        for name in ("attn_norm", "ffn_norm"):
            add_norm(f"blk.{layer}.{name}", hidden)
        for name in ("attn_q_norm", "attn_k_norm") if is_qwen else ():
            add_norm(f"blk.{layer}.{name}", shape["head_dim"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def prompts_of(count: int, length: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(10, 500, (count, length)).tolist()


Run = Callable[[list[list[int]], int], None]
"""Prompts, and how many tokens follow each: all are computed, and none is cached."""


def fleetfoot(path: str, threads: int) -> Run:
    import torch

    torch.set_num_threads(threads)
    from fleetfoot import LLM, SamplingParams

    llm = LLM(
        model=path, device="cpu", dtype="bfloat16", max_model_len=1024, max_num_seqs=32, max_num_batched_tokens=512,
        num_gpu_blocks_override=CONTEXT // 16, enable_prefix_caching=False, skip_tokenizer_init=True,
    )  # fmt: skip

    def run(prompts: list[list[int]], count: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
        assert all(len(each.outputs[0].token_ids) == count for each in outputs)

    return run


def llama_cpp(path: str, threads: int) -> Run:
    """Its C interface: one context for up to 32 sequences, greedy."""
    import llama_cpp as lib

    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = CONTEXT, 512, 512, 32
    settings.n_threads = settings.n_threads_batch = threads
    settings.kv_unified = True
    context = lib.llama_init_from_model(model, settings)
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(512, 0, 1)

    def decode(items: list[tuple[int, int, int, bool]]) -> None:
        """``(token, position, sequence, whether its logits are needed)``"""
        batch.n_tokens = len(items)
        for index, (token, position, sequence, is_read) in enumerate(items):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, position, 1
            batch.seq_id[index][0], batch.logits[index] = sequence, is_read
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")

    def best(index: int) -> int:
        logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, index), (vocab_size,))
        return int(logits.argmax())

    def run(prompts: list[list[int]], count: int) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        newest: dict[int, int] = {}
        queue = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for begin in range(0, len(queue), 512):
            items = queue[begin : begin + 512]
            decode(items)
            newest |= {sequence: best(i) for i, (_, _, sequence, is_read) in enumerate(items) if is_read}
        for step in range(count - 1):
            items = [(newest[sequence], len(prompt) + step, sequence, True) for sequence, prompt in enumerate(prompts)]
            decode(items)
            newest = {sequence: best(index) for index, (_, _, sequence, _) in enumerate(items)}

    return run


def run_one(engine: str, path: str, threads: int, repeats: int) -> None:
    """In a process of its own: print a line of JSON with the seconds of each workload."""
    run = {"fleetfoot": fleetfoot, "llama.cpp": llama_cpp}[engine](path, threads)
    run(prompts_of(2, 16, 0), 2)
    found: dict[str, Any] = {}
    for name, (requests, length, count) in WORKLOADS.items():
        walls, processors = [], []
        for repeat in range(repeats):
            wall, processor = time.perf_counter(), time.process_time()
            run(prompts_of(requests, length, repeat + 1), count)
            walls.append(time.perf_counter() - wall)
            processors.append(time.process_time() - processor)
        found[name] = {"wall_s": min(walls), "cpu_s": min(processors)}
    found["rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print("RESULT " + json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="GGUF files")
    parser.add_argument("--shape", nargs="+", default=[], choices=SHAPES)
    parser.add_argument("--type", nargs="+", default=["Q4_K_M", "Q8_0"])
    parser.add_argument("--llama", help="interpreter that has llama_cpp")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_one(args.one, args.files[0], args.threads[0], args.repeats)
        return
    engines = {"fleetfoot": sys.executable} | ({"llama.cpp": args.llama} if args.llama else {})
    print("| file | engine | one ms/token | many ms/step | prompt ms | the same, processor time | MB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(each) for each in args.files]
        for shape in args.shape:
            files += [make_file(Path(folder) / f"{shape}-{each}.gguf", SHAPES[shape], each) for each in args.type]
        for file in files:
            compare(file, engines, args)


def compare(file: Path, engines: dict[str, str], args: argparse.Namespace) -> None:
    """Run all engines on a file in turns, and print a line of the table for each, and their ratios."""
    found: dict[str, dict[str, list[float]]] = {engine: {} for engine in engines}
    for _ in range(args.rounds):
        for threads in args.threads:
            for engine, python in engines.items():
                options = ["--one", engine, "--threads", str(threads), "--repeats", str(args.repeats)]
                command = [python, __file__, str(file), *options]
                environment = os.environ | {"XDG_CACHE_HOME": str(file.parent)}
                done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
                lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                if done.returncode or not lines:
                    raise SystemExit(f"{engine} failed:\n{done.stderr[-3000:]}")
                result = json.loads(lines[0].removeprefix("RESULT "))
                for name, (_, _, count) in WORKLOADS.items():
                    for kind in ("wall_s", "cpu_s"):
                        if kind == "cpu_s" and threads != min(args.threads):
                            continue
                        value = result[name][kind] * 1e3 / count
                        found[engine].setdefault(f"{name} {kind}", []).append(value)
                found[engine].setdefault("rss_mb", []).append(result["rss_mb"])
    for engine, values in found.items():
        cells = [f"{min(values[f'{name} wall_s']):.1f}" for name in WORKLOADS]
        processor = " / ".join(f"{min(values[f'{name} cpu_s']):.1f}" for name in WORKLOADS)
        memory = statistics.median(values["rss_mb"])
        print(f"| {file.stem} | {engine} | " + " | ".join(cells) + f" | {processor} | {memory:.0f} |", flush=True)
    if len(found) > 1:
        ours, theirs = found["fleetfoot"], found["llama.cpp"]
        for kind, label in (("wall_s", "its rate"), ("cpu_s", "its rate, processor time")):
            ratios = [min(theirs[f"{name} {kind}"]) / min(ours[f"{name} {kind}"]) for name in WORKLOADS]
            cells = " | ".join(f"{each:.2f}" for each in ratios)
            print(f"| {file.stem} | times {label} | {cells} | | |", flush=True)


if __name__ == "__main__":
    main()

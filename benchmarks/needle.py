"""Whether long contexts find a needle with KV in FP8: a model whose weights are set by hand, not trained.

    python benchmarks/needle.py --tokens 32000

Two layers of attention, without an MLP, are an induction head: the first one writes the previous token to each
position, the second one looks for the position before which the newest token stood, and copies the token there. Tokens
are random codes of 64 signs. A haystack of random tokens has needles, pairs of a key, which is nowhere else, and a
value; a prompt is the haystack and a key. `--sharpness` scales queries times keys: 2 gives a needle half of the
attention among 32,000 tokens, 1.2 a fiftieth: the copied code is hardly above the sum of the others, and each rounding
counts.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

CODE, HIDDEN, HEAD, VOCAB = 64, 256, 128, 2048
CONSTANT = 3 * CODE
"""The dimension that is 1 for all tokens; before it, codes of the token, of the previous one, and of the next one."""
THETA = 1e10
PEAK = 400.0
"""Of the first layer: its scores fall by 30 from one position to the next."""


def make_model(folder: Path, sharpness: float, max_tokens: int) -> Path:
    """Write the checkpoint, of a Llama, to ``folder``."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2, (VOCAB, CODE), generator=generator).float() * 2 - 1
    embedding = torch.zeros(VOCAB, HIDDEN)
    embedding[:, :CODE], embedding[:, CONSTANT] = codes, 1.0
    head = torch.zeros(VOCAB, HIDDEN)
    head[:, 2 * CODE : 3 * CODE] = codes
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(HIDDEN)}
    own, previous, following = (torch.arange(CODE) + CODE * place for place in range(3))
    rotations = THETA ** (-torch.arange(HEAD // 4) / (HEAD // 2))  # of the faster half of the pairs, a position
    slow = torch.cat([torch.arange(HEAD // 4, HEAD // 2), torch.arange(3 * HEAD // 4, HEAD)])
    for layer in range(2):
        # norms divide by the root of the mean square, which is the same for all tokens
        norm = ((CODE * (1 + layer) + 1) / HIDDEN) ** 0.5
        q, k, v = (torch.zeros(HEAD, HIDDEN) for _ in range(3))
        o = torch.zeros(HIDDEN, HEAD)
        if layer == 0:  # keys are turned by a position
            q[: HEAD // 4, CONSTANT] = PEAK**0.5 * norm
            k[: HEAD // 4, CONSTANT] = PEAK**0.5 * norm * rotations.cos()
            k[HEAD // 2 : 3 * HEAD // 4, CONSTANT] = PEAK**0.5 * norm * rotations.sin()
        else:
            spread = _spread(generator)
            q[slow, own] = sharpness**0.5 * norm / spread
            k[slow, previous] = sharpness**0.5 * norm * spread
        spread = _spread(generator)
        v[torch.arange(CODE), own] = norm * spread
        o[previous if layer == 0 else following, torch.arange(CODE)] = 1.0 / spread
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        tensors |= {f"{attention}{name}_proj.weight": each for name, each in zip("qkvo", (q, k, v, o), strict=True)}
        tensors |= {f"{mlp}{name}_proj.weight": torch.zeros(16, HIDDEN) for name in ("gate", "up")}
        tensors |= {f"{mlp}down_proj.weight": torch.zeros(HIDDEN, 16)}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: each.bfloat16() for name, each in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1,
        "head_dim": HEAD, "rope_theta": THETA, "rms_norm_eps": 1e-6, "max_position_embeddings": max_tokens,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _spread(generator: torch.Generator) -> torch.Tensor:
    """Factors of dimensions of K and V, which queries and outputs are divided by: else all would be rounded alike."""
    return 2.0 ** torch.rand(CODE, generator=generator)


def haystack(num_tokens: int, num_needles: int, seed: int) -> tuple[list[int], dict[int, int]]:
    """Tokens, and the value of each key: needles are at equal distances, and no key is anywhere else."""
    rng = random.Random(seed)
    keys = rng.sample(range(VOCAB), num_needles)
    others = [token for token in range(VOCAB) if token not in set(keys)]
    tokens = [rng.choice(others) for _ in range(num_tokens)]
    places = [num_tokens * number // num_needles for number in range(num_needles)]
    for key, place in zip(keys, places, strict=True):
        tokens[place] = key
    return tokens, {key: tokens[place + 1] for key, place in zip(keys, places, strict=True)}


def found_share(model: Path, tokens: list[int], values: dict[int, int], **settings: object) -> float:
    """How many of the values an engine with these settings finds."""
    from fleetfoot import LLM, SamplingParams

    length = len(tokens) + 2
    llm = LLM(model=str(model), skip_tokenizer_init=True, max_model_len=length, max_num_seqs=8,
              num_gpu_blocks_override=length // 16 + 32, block_size=16, **settings)  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)  # others begin with its blocks
    prompts = [{"prompt_token_ids": [*tokens, key]} for key in values]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    pairs = zip(outputs, values.values(), strict=True)
    return sum(output.outputs[0].token_ids[0] == value for output, value in pairs) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32000)
    parser.add_argument("--needles", type=int, default=200)
    parser.add_argument("--sharpness", type=float, nargs="+", default=[1.2, 2.0])
    parser.add_argument("--kv", nargs="+", default=["auto", "fp8_e4m3", "fp8_e5m2"])
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    tokens, values = haystack(args.tokens, args.needles, 1)
    for sharpness in args.sharpness:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(Path(folder), sharpness, args.tokens + 16)
            for kv in args.kv:
                share = found_share(model, tokens, values, kv_cache_dtype=kv, dtype="bfloat16", device=args.device)
                print(json.dumps({"tokens": args.tokens, "sharpness": sharpness, "kv": kv, "found": share}), flush=True)


if __name__ == "__main__":
    main()

"""GGUF files of checkpoints, written by the `gguf` package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from fleetfoot.weights.gguf import tensor_names


def random_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator, scale: float = 0.002) -> np.ndarray:
    """Bytes of a type with values of the order of ``10 * scale``: ``[..., bytes of a row]``."""
    import gguf

    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // size, num_bytes), dtype=np.uint8)

    def halves() -> np.ndarray:
        values = rng.uniform(scale, 2 * scale, blocks.shape[:-1]).astype(np.float16)
        return values.view(np.uint8).reshape(*blocks.shape[:-1], 2)

    if kind == "Q6_K":
        blocks[..., 208:] = halves()
    elif kind == "MXFP4":
        blocks[..., 0] = rng.integers(116, 120, blocks.shape[:-1])
    else:
        blocks[..., :2] = halves()
        if kind in ("Q4_K", "Q5_K", "Q4_1", "Q5_1"):
            blocks[..., 2:4] = halves()
    return blocks.reshape(*shape[:-1], -1)


def paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k in the order of files of Llama."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    folder: Path, path: Path, kind: str | Callable[[str], str] = "Q8_0", *, split: int = 0, **metadata: Any
) -> Path:
    """Write the checkpoint of a folder, with its tokenizer.json of bytes if it has one.

    Args:
        kind: the type of matrices, or a function of their names.
        split: tensors of a part; 0: one file.
        metadata: further fields of the architecture.
    """
    import gguf

    config = json.loads((folder / "config.json").read_text())
    architecture = _ARCHITECTURES[config["model_type"]]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    options = {"split_max_tensors": split} if split else {}
    writer = gguf.GGUFWriter(path, architecture, **options)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = config.get("rope_parameters") or config
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if num_experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name, value in metadata.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    if (folder / "tokenizer.json").is_file():
        _write_tokenizer(writer, folder, config["vocab_size"])
    names: dict[str, str] = {}
    for name, module in tensor_names(architecture, config["num_hidden_layers"]):
        names.setdefault(module, name)  # of two names, the one that other tools write
    for full, weight in _tensors(folder).items():
        module, _, suffix = full.rpartition(".")
        if full.endswith(".sinks"):
            module, suffix = full, "weight"
        if architecture == "gemma3" and "norm" in full:
            weight = weight + 1
        if architecture == "llama" and module.endswith(("q_proj", "k_proj")):
            weight = paired(weight, heads if module.endswith("q_proj") else kv_heads)
        chosen = (
            "F32"
            if weight.ndim == 1 or suffix == "bias" or "norm" in module
            else kind
            if isinstance(kind, str)
            else kind(module)
        )
        number = gguf.GGMLQuantizationType[chosen]
        if chosen == "F32":
            writer.add_tensor(f"{names[module]}.{suffix}", np.ascontiguousarray(weight))
        else:
            blocks = gguf.quants.quantize(np.ascontiguousarray(weight), number)
            writer.add_tensor(f"{names[module]}.{suffix}", blocks, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not split else next(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


_ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3", "gpt_oss": "gpt-oss",
}  # fmt: skip


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    """In float32; experts are stacks of gates, ups and downs ``[experts, out, in]``."""
    found: dict[str, np.ndarray] = {}
    experts: dict[str, list[tuple[int, np.ndarray]]] = {}
    for full, values in load_file(folder / "model.safetensors").items():
        weight = values.float().numpy()
        before, is_expert, part = full.partition(".mlp.experts.")
        if part.startswith(("gate_up_proj", "down_proj")):  # GPT-OSS: transposed, gates and ups alternate
            place = "weight" if weight.ndim == 3 else "bias"
            whole = weight.swapaxes(1, 2) if weight.ndim == 3 else weight
            parts = {"down": whole} if part.startswith("down") else {"gate": whole[:, ::2], "up": whole[:, 1::2]}
            found |= {f"{before}.mlp.experts.{name}_proj.{place}": each for name, each in parts.items()}
        elif is_expert:
            number, _, name = part.partition(".")
            experts.setdefault(f"{before}.mlp.experts.{name}", []).append((int(number), weight))
        else:
            found[full] = weight
    stacks = {
        name: np.stack([weight for _, weight in sorted(each, key=lambda pair: pair[0])])
        for name, each in experts.items()
    }
    return found | stacks


def _write_tokenizer(writer: Any, folder: Path, vocab_size: int) -> None:
    import gguf

    content = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    by_id = {index: token for token, index in content["model"]["vocab"].items()}
    added = {token["id"]: token for token in content["added_tokens"]}
    by_id |= {index: token["content"] for index, token in added.items()}

    def kind(index: int) -> int:
        if index in added:
            return gguf.TokenType.CONTROL if added[index]["special"] else gguf.TokenType.USER_DEFINED
        return gguf.TokenType.NORMAL if index in by_id else gguf.TokenType.UNUSED

    indices = range(max(vocab_size, max(by_id) + 1))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id.get(index, f"[PAD{index}]") for index in indices])
    writer.add_token_types([kind(index) for index in indices])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]])
    ids = {token: index for index, token in by_id.items()}
    for name in ("bos", "eos", "pad"):
        if (token := config.get(f"{name}_token")) in ids:
            getattr(writer, f"add_{name}_token_id")(ids[token])
    writer.add_add_bos_token(content.get("post_processor") is not None)
    if isinstance(config.get("chat_template"), str):
        writer.add_chat_template(config["chat_template"])

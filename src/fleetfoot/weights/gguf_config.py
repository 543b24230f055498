"""From the metadata of a GGUF file to the fields of a ``config.json``. No torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from fleetfoot.weights.gguf import GGUFError, GGUFModel, tensor_names

_ROPE_FACTORS = "rope_freqs.weight"
_FACTORS = (
    *("logit_scale", "embedding_scale", "residual_scale", "attention.scale", "attention.clamp_kqv"),
    *("attn_logit_softcapping", "final_logit_softcapping", "rope.scaling.attn_factor", "rope.scaling.alpha"),
)
"""Fields that would change the result, and that no supported model has, except as 0 or 1."""


class _Fields:
    """Fields of the model's architecture."""

    def __init__(self, model: GGUFModel) -> None:
        self.model, self.path = model, model.files[0]
        name = model.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in _ARCHITECTURES:
            raise GGUFError(self.path, "general.architecture", name, f"supported: {', '.join(_ARCHITECTURES)}")
        self.architecture = name
        self.num_layers = 0

    def error(self, name: str, problem: str) -> GGUFError:
        return GGUFError(self.path, f"{self.architecture}.{name}", self.get(name), problem)

    def get(self, name: str, default: Any = None) -> Any:
        return self.model.metadata.get(f"{self.architecture}.{name}", default)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, list) and len(set(map(repr, value))) == 1:  # one for each layer
            value = value[0]
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.error(name, "expected an integer of at least 1, the same for all layers")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(name, "expected a number above 0")
        return float(value)

    def has(self, tensor: str) -> bool:
        return tensor in self.model.tensors


def config_of(model: GGUFModel) -> dict[str, Any]:
    """The fields of ``config.json``, with the type of each matrix in ``quantization_config``. Raises GGUFError: a field
    is missing, invalid, or of a model that is not supported."""
    fields = _Fields(model)
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    num_layers = fields.num_layers = fields.integer("block_count")
    if num_layers > len(model.tensors):
        raise fields.error("block_count", f"the file has {len(model.tensors)} tensors")
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GGUFError(fields.path, "token_embd.weight", None, "expected a matrix of that name")
    key_length = fields.integer("attention.key_length", hidden // heads)
    if fields.integer("attention.value_length", key_length) != key_length:
        raise fields.error("attention.value_length", f"expected attention.key_length, {key_length}")
    if fields.integer("rope.dimension_count", key_length) != key_length:
        raise fields.error("rope.dimension_count", f"expected attention.key_length, {key_length}")
    for factor in _FACTORS:
        if fields.get(factor) not in (None, 0, 1):
            raise fields.error(factor, "the supported models have none")
    name, own = _ARCHITECTURES[fields.architecture]
    tokens = {kind: model.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")}
    content = {
        "architectures": [name],
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": key_length,
        "intermediate_size": fields.integer("feed_forward_length", fields.get("expert_feed_forward_length")),
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": not fields.has("output.weight"),
        "dtype": "bfloat16",
        **{f"{kind}_token_id": token for kind, token in tokens.items()},
        **_rope(fields),
        **own(fields),
    }
    return {**content, "quantization_config": {"quant_method": "gguf", "tensors": _types(fields)}}


def _types(fields: _Fields) -> dict[str, str]:
    """Module -> the type of its matrix."""
    modules = dict(tensor_names(fields.architecture, fields.num_layers))
    found = {}
    for name, tensor in fields.model.tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight" and len(tensor.shape) > 1 and module in modules:
            found[modules[module]] = tensor.type.name
    for layer in range(fields.num_layers):  # gates, ups and downs have one rule
        path = f"model.layers.{layer}.mlp.experts"
        parts = [found.pop(f"{path}.{each}_proj", "") for each in ("gate", "up", "down")]
        if all(parts):
            found[path] = "+".join(parts)
    return found


def _rope(fields: _Fields) -> dict[str, Any]:
    theta = fields.number("rope.freq_base", 10000.0)
    kind = fields.get("rope.scaling.type", "none")
    if fields.has(_ROPE_FACTORS):
        return {"rope_parameters": {"rope_theta": theta, **_llama3(fields, theta)}}
    if kind in ("none", None):
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    if kind not in ("linear", "yarn"):
        raise fields.error("rope.scaling.type", "supported: none, linear and yarn")
    scaling = {"rope_type": kind, "rope_theta": theta, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields.integer("rope.scaling.original_context_length")
        for name in ("beta_fast", "beta_slow"):
            if fields.get(f"rope.scaling.yarn_{name}") is not None:
                scaling[name] = fields.number(f"rope.scaling.yarn_{name}")
    return {"rope_parameters": scaling}


def _llama3(fields: _Fields, theta: float) -> dict[str, Any]:
    """The parameters that make the factors of frequencies in ``rope_freqs.weight``: Llama-3.1 and its successors have
    all but the largest factor in common."""
    tensor = fields.model.tensors[_ROPE_FACTORS]
    if not tensor.type.name == "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 1 << 12:
        raise GGUFError(fields.path, _ROPE_FACTORS, tensor.type.name, "expected a vector in F32")
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.num_bytes)
    factors = struct.unpack(f"<{len(data) // 4}f", data[: len(data) // 4 * 4])
    if len(factors) < tensor.shape[0] or not all(map(math.isfinite, factors)):
        raise GGUFError(fields.path, _ROPE_FACTORS, "cut or not finite", "expected a factor of each frequency")
    factor, low, high, original = max(factors), 1.0, 4.0, 8192

    def expected(index: int) -> float:
        length = 2 * math.pi * theta ** (index / len(factors))
        if not original / high <= length <= original / low:
            return 1.0 if length < original / high else factor
        smooth = (original / length - low) / (high - low)
        return 1 / ((1 - smooth) / factor + smooth)

    if not all(math.isclose(found, expected(index), rel_tol=1e-3) for index, found in enumerate(factors)):
        raise GGUFError(fields.path, _ROPE_FACTORS, factors[:4], "expected those of Llama-3.1")
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip


def _llama(fields: _Fields) -> dict[str, Any]:
    if fields.get("expert_count"):
        raise fields.error("expert_count", "experts are supported in qwen3moe and gpt-oss")
    return {"attention_bias": fields.has("blk.0.attn_q.bias"), "mlp_bias": fields.has("blk.0.ffn_up.bias")}


def _qwen3_moe(fields: _Fields) -> dict[str, Any]:
    return {**_experts(fields), "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip


def _experts(fields: _Fields) -> dict[str, Any]:
    count = fields.integer("expert_count")
    return {"num_experts": count, "num_local_experts": count,
            "num_experts_per_tok": fields.integer("expert_used_count")}  # fmt: skip


def _gemma3(fields: _Fields) -> dict[str, Any]:
    """Every sixth layer has no window; the others rotate with a base of their own, unscaled."""
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    rope = _rope(fields)["rope_parameters"]
    return {
        "sliding_window": fields.integer("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": hidden // heads if fields.num_layers == 62 else head_dim,  # of the model with 27B
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10000.0)},
        },
    }


def _gpt_oss(fields: _Fields) -> dict[str, Any]:
    rope = _rope(fields)["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    return {**_experts(fields), "sliding_window": fields.integer("attention.sliding_window"), "attention_bias": True,
            "intermediate_size": fields.integer("expert_feed_forward_length"), "rope_parameters": rope}  # fmt: skip


_ARCHITECTURES: Mapping[str, tuple[str, Callable[[_Fields], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "qwen2": ("Qwen2ForCausalLM", lambda fields: {}),
    "qwen3": ("Qwen3ForCausalLM", lambda fields: {}),
    "qwen3moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma3": ("Gemma3ForCausalLM", _gemma3),
    "gpt-oss": ("GptOssForCausalLM", _gpt_oss),
}
"""``general.architecture`` -> the architecture, and its own fields."""

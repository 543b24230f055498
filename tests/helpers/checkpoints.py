"""Tiny random checkpoints of every architecture in Hugging Face format, and the reference model that wrote them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TINY: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None,
}  # fmt: skip


QUANTIZED = Path(__file__).parent.parent / "assets" / "quantized"
"""Checkpoints that ``tools/quantized_assets.py`` has made, with their logits for QUANTIZED_TOKENS."""
QUANTIZED_TOKENS = [3, 90, 17, 4, 55, 68, 21, 9]

WIDE = {"hidden_size": 64, "head_dim": 16}
"""Heads that Triton's attention supports."""
UNTRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 7, "attn_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 7, "sliding_window_pattern": 2}),
    "olmo2": ("olmo2", {"head_dim": 16}),
    "mixtral": ("mixtral", {**WIDE, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "olmoe": ("olmoe", {**WIDE, "num_experts": 6, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "qwen3_moe",
        {**WIDE, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    ),
    "qwen2-moe": (
        "qwen2_moe",
        {
            **WIDE, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "gpt-oss": ("gpt_oss", {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 7}),
    "granite-moe": (
        "granitemoe",
        {**WIDE, "num_local_experts": 6, "num_experts_per_tok": 2, "residual_multiplier": 0.4},
    ),
    "glm4-moe": (
        "glm4_moe",
        {
            "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "n_group": 4, "topk_group": 2,
        },
    ),
}  # fmt: skip
"""Models whose layers are not those of the trained ones in `tests/assets`."""


def make_checkpoint(
    folder: Path, model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any
) -> PreTrainedModel:
    """Write a checkpoint of ``model_type`` (of ``transformers``) in ``dtype``, and return the model in float32 with the
    same values. ``config``: fields that differ from TINY."""
    model = make_reference(model_type, seed=seed, **config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    # Only the copy is converted as a whole: the reference keeps its float32 rotary frequencies.
    copy.deepcopy(model).to(dtype=dtype).save_pretrained(folder)
    return model


def make_reference(model_type: str, *, seed: int = 0, **config: Any) -> PreTrainedModel:
    """A random float32 model of ``transformers``, with random norms and biases too."""
    from transformers import AutoConfig, AutoModelForCausalLM  # four seconds, which processes without it save

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**TINY, **config}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.15, generator=generator)
            if "norm" in name:
                parameter.add_(1.0)
        for name, buffer in model.named_buffers():
            if "correction" in name:
                buffer.normal_(0.0, 0.15, generator=generator)
    return model.eval()


@torch.no_grad()
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Logits ``[num_tokens, vocab_size]`` of one sequence, in one pass and without a cache."""
    return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]

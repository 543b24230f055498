"""The EAGLE head as it is trained: plain torch, all positions of a sequence at once, several drafts deep.

Source: Li, Wei, Zhang, Zhang, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024. That the
head learns from its own outputs, as it meets them when it drafts, is from Zhang et al., "Learning Harmonized
Representations for Speculative Sampling" (HASS), 2024.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

ARCHITECTURE = "LlamaForCausalLMEagle"
CONFIG_FIELDS = (
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "vocab_size",
)


class SelfAttention(nn.Module):
    """Names as in the checkpoint; see `EagleHead.attend`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        query = config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Without a norm before attention: what comes in was made of normalised hidden states."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)


class EagleHead(nn.Module):
    """From the embedding of token i + 1 and the target's hidden state of token i to the hidden state of token i + 1.

    Args:
        config: of the target, a `transformers` Llama config.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config)])

    def unroll(self, embeddings: torch.Tensor, hidden: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """The hidden states that the head foresees, drafting `depth` tokens from every position.

        Args:
            embeddings: of token i + 1 at i. [rows, length, hidden_size]
            hidden: the target's, of token i at i. [rows, length, hidden_size]

        Returns:
            For each draft [rows, length, hidden_size]: entry i stands for the hidden state of token i + 1. That of
            draft s was foreseen from the target's hidden state of token i - s (of draft 0: of token i), so entries
            before s mean nothing.
        """
        layer = self.layers[0]
        outputs: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for _ in range(depth):
            x = self.fc(torch.cat((embeddings, hidden), dim=-1))  # [rows, length, hidden_size]
            x = x + self.attend(layer.self_attn, x, keys, values)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            outputs.append(x)
            hidden = torch.cat((hidden[:, :1], x[:, :-1]), dim=1)
        return outputs

    def attend(
        self, attention: SelfAttention, x: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        """Attention of a draft's entries; adds this draft's keys and values to the lists.

        Entry i of draft s sees entries up to i - s of draft 0, then one entry of each draft in between (i - s + 1 of
        draft 1, ...), then itself: what lies in the KV cache when s drafts have been made.
        """
        config = self.config
        rows, length = x.shape[:2]
        groups = config.num_attention_heads // config.num_key_value_heads
        shape = (rows, length, -1, config.head_dim)
        query = self.rotate(attention.q_proj(x).view(shape).transpose(1, 2))  # [rows, heads, length, head_dim]
        key = self.rotate(attention.k_proj(x).view(shape).transpose(1, 2)).repeat_interleave(groups, dim=1)
        value = attention.v_proj(x).view(shape).transpose(1, 2).repeat_interleave(groups, dim=1)
        keys.append(key)
        values.append(value)
        draft = len(keys) - 1
        query = query * config.head_dim**-0.5
        if draft == 0:
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)
            return attention.o_proj(attended.transpose(1, 2).flatten(2))
        visible = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(-draft)
        scores = (query @ keys[0].transpose(2, 3)).masked_fill(~visible, -torch.inf)  # [rows, heads, length, length]
        own = [(query * _delayed(keys[s], draft - s)).sum(-1, keepdim=True) for s in range(1, draft + 1)]
        weights = torch.cat((scores, *own), dim=-1).softmax(dim=-1)
        attended = weights[..., :length] @ values[0]
        for s in range(1, draft + 1):
            attended = attended + weights[..., length + s - 1, None] * _delayed(values[s], draft - s)
        return attention.o_proj(attended.transpose(1, 2).flatten(2))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary positions 0, 1, ... of x [rows, heads, length, head_dim]."""
        half = self.config.head_dim // 2
        theta = self.config.rope_parameters["rope_theta"]
        frequencies = theta ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
        angles = torch.arange(x.shape[2], dtype=torch.float32, device=x.device)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()  # [length, head_dim / 2]
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def load(self, folder: Path) -> None:
        """Take the weights that `save` wrote."""
        self.load_state_dict(load_file(folder / "model.safetensors"))

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors (bfloat16); the embedding and the logits head stay the target's."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach().to("cpu", torch.bfloat16) for name, value in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)  # save_file lets only the owner read it
        config = {name: getattr(self.config, name) for name in CONFIG_FIELDS}
        config = {"architectures": [ARCHITECTURE], "dtype": "bfloat16", "num_hidden_layers": 1, **config}
        text = json.dumps(dict(sorted(config.items())), indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")


def _delayed(x: torch.Tensor, by: int) -> torch.Tensor:
    """Entry i of the result is entry i - `by` of x [rows, heads, length, head_dim]; the first ones are zeros."""
    return x if by == 0 else F.pad(x[:, :, :-by], (0, 0, by, 0))

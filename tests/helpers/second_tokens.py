"""Checkpoints of Qwen3-Next with the layer that predicts a second token, and that layer in ``transformers``."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextDecoderLayer,
    Qwen3NextRMSNorm,
    Qwen3NextRotaryEmbedding,
)

from tests.helpers.checkpoints import make_checkpoint


class SecondTokenLayer(torch.nn.Module):
    """The layer in modules of ``transformers``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        norms = {name: Qwen3NextRMSNorm(size, config.rms_norm_eps) for name in ("embedding", "hidden", "final")}
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norms.values()
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        index = config.layer_types.index("full_attention")
        self.layers = torch.nn.ModuleList([Qwen3NextDecoderLayer(config, index)])
        self._rotary = Qwen3NextRotaryEmbedding(config)

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)), dim=-1))[None]
        mask = torch.full((len(hidden), len(hidden)), -torch.inf).triu(1)[None, None]
        angles = self._rotary(x, torch.arange(len(hidden))[None])
        return self.norm(self.layers[0](x, position_embeddings=angles, attention_mask=mask))[0]


def make_mtp_checkpoint(folder: Path, **fields: Any) -> tuple[Any, SecondTokenLayer]:
    """Write one with random weights; returns the target, and the layer."""
    target = make_checkpoint(folder, "qwen3_next", **fields)
    layer, generator = SecondTokenLayer(target.config).eval(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.15, generator=generator)
    file = folder / "model.safetensors"
    added = {f"mtp.{name}": value.contiguous() for name, value in layer.state_dict().items()}
    save_file({**load_file(file), **added}, file, {"format": "pt"})
    return target, layer

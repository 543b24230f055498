"""What a model is: the facts of its ``config.json``, in one frozen record that needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetfoot.config.fields import ConfigError

DTYPES = ("bfloat16", "float16", "float32")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, "RoFormer") and how it is stretched to longer contexts."""

    theta: float = 10000.0
    """Base of the geometric series of wavelengths."""
    rope_type: str = "default"
    """``default``, ``linear``, ``dynamic``, ``llama3`` or ``yarn``."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """What the type needs beside theta, under the names of ``config.json`` (``factor``, ``low_freq_factor``, ...)."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model. Sizes are counts; ``head_dim`` is in elements."""

    architecture: str
    """The entry of ``architectures`` that names the model class, ``LlamaForCausalLM`` for example."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    layer_windows: tuple[int | None, ...] = ()
    """For each layer, how many of the last positions a token sees, itself included; None: all of them. Empty: no layer
    has a window; it is filled up with None."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """An RMSNorm over each head of q and k before the rotation (Qwen3)."""
    dtype: str = "float32"
    """The checkpoint's own dtype: one of DTYPES."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a reply, from ``generation_config.json`` where there is one, else from ``config.json``."""

    def __post_init__(self) -> None:
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (None,) * self.num_layers)
        if len(self.layer_windows) != self.num_layers:
            raise ValueError(
                f"layer_windows has {len(self.layer_windows)} entries and num_layers is {self.num_layers}; "
                "expected one for each layer, or () for no windows"
            )

    @property
    def num_parameters(self) -> int:
        """Weights in all; a tied output embedding is counted once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (q + 2 * kv) + q * self.hidden_size
        attention += (q + 2 * kv if self.qkv_bias else 0) + (self.hidden_size if self.o_bias else 0)
        attention += 2 * self.head_dim if self.qk_norm else 0
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += 2 * self.intermediate_size + self.hidden_size if self.mlp_bias else 0
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp + 2 * self.hidden_size) + embeddings + self.hidden_size

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of K and V that one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


def read_config_json(folder: str | Path) -> dict[str, Any]:
    """The object in ``config.json``, as it stands.

    Raises:
        ConfigError: the file is missing or holds no JSON object.
    """
    return _read_json(Path(folder) / "config.json", required=True)


def read_generation_json(folder: str | Path) -> dict[str, Any]:
    """The object in ``generation_config.json``, as it stands; empty if there is no such file.

    Raises:
        ConfigError: the file holds no JSON object.
    """
    return _read_json(Path(folder) / "generation_config.json", required=False)


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    if not path.is_file():
        if not required:
            return {}
        raise ConfigError(f"no config.json in {path.parent}: a model folder holds config.json and *.safetensors")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content

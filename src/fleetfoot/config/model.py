"""Facts of a checkpoint: the shape of its model, and the JSON files of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fleetfoot.config.json_fields import ConfigError, check_key, json_object, read_json_object

DTYPES = ("bfloat16", "float16", "float32")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""The fields that are sampling defaults. As in vLLM, ``do_sample`` is not one: it has no effect."""
OWN_DEFAULTS = ("none", "vllm", "fleetfoot")
"""Values of the setting ``generation_config`` for no file; the others are vLLM's name, and that as ported."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, "RoFormer") and its scaling to longer contexts."""

    theta: float = 10000.0
    """Base of the geometric series of wavelengths."""
    rope_type: str = "default"
    """``default``, ``linear``, ``dynamic``, ``llama3``, ``longrope`` or ``yarn``."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Further parameters of the type, by their names in ``config.json`` (``factor``, ``low_freq_factor``, ...)."""
    rotary_dim: int | None = None
    """The first elements of each head that are rotated; None: all."""

    def for_context(self, max_model_len: int) -> RopeConfig:
        """With the choice between two sets of factors that ``longrope`` makes, as ``is_long`` of the parameters: the
        long ones if the longest sequence is longer than those of the original training. It is made once, because keys
        that were rotated with one set do not fit queries with the other."""
        if self.rope_type != "longrope" or "is_long" in self.parameters:
            return self
        is_long = max_model_len > self.parameters["original_max_position_embeddings"]
        return replace(self, parameters={**self.parameters, "is_long": is_long})

    def __str__(self) -> str:
        """``longrope (long factors), theta 10000, 96 elements of each head``."""
        factors = {True: " (long factors)", False: " (short factors)", None: ""}[self.parameters.get("is_long")]
        partial = "" if self.rotary_dim is None else f", {self.rotary_dim} elements of each head"
        return f"{self.rope_type}{factors}, theta {self.theta:g}{partial}"


LayerRopes = tuple[RopeConfig | None, ...]
"""The rotation of each layer; None: the layer has no positions."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model. Sizes are counts; ``head_dim`` is in elements."""

    architecture: str
    """The model class from ``architectures``, for example ``LlamaForCausalLM``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the MLP."""
    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Longest context, in tokens."""
    rms_norm_eps: float = 1e-6
    layer_ropes: LayerRopes = ()
    """Empty: every layer has RopeConfig's defaults (replaced by one for each)."""
    layer_windows: tuple[int | None, ...] = ()
    """For each layer, how many positions a token attends to, its own included; None: all. Empty: no layer has a window
    (replaced by None for each)."""
    tie_word_embeddings: bool = False
    """Whether the logits head is the embedding."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    mlp_gate: bool = True
    """Whether the MLP has three matrices (gate, up and down) rather than two."""
    has_merged_projections: bool = False
    """Whether the checkpoint has q, k and v in one tensor, ``qkv_proj``, and gate and up in ``gate_up_proj``."""
    activation: str = "silu"
    """The activation of the MLP's gate: ``silu`` or ``gelu_tanh``."""
    num_layer_norms: int = 2
    """RMSNorms of ``hidden_size`` in a decoder layer."""
    norm_offset: float = 0.0
    """Added to the weights of all RMSNorms (Gemma: 1)."""
    qk_norm: bool = False
    """Whether each head of q and k has an RMSNorm before the rotation (Qwen3)."""
    qk_norm_over_heads: bool = False
    """Whether q and k have an RMSNorm each over all of their heads (OLMo-2)."""
    attention_scale: float | None = None
    """Factor of the attention scores; None: ``head_dim ** -0.5``."""
    residual_multiplier: float = 1.0
    """Factor of the outputs of attention and MLP, before they are added to the residual stream."""
    attention_soft_cap: float | None = None
    """Limit of the attention scores: ``cap * tanh(score / cap)`` (Gemma-2); None: none."""
    head: str = "logits"
    """Behind the final norm: ``logits``; ``score`` or ``biased_score``, a linear layer; ``reward``, two of them; or
    ``none``."""
    num_labels: int = 0
    """Outputs of a head for scores."""
    is_causal: bool = True
    """Whether tokens attend to earlier ones only."""
    class_path: str = ""
    """``module:class`` of the `CausalLM`; empty: that of the architecture."""
    unfusible: str = ""
    """How the decoder layers differ from those that `fleetfoot.fusion` can fuse; empty: they do not."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of ``config.json`` that only this architecture reads, by their names there."""
    dtype: str = "float32"
    """Dtype of the checkpoint, one of DTYPES."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """End tokens, from ``generation_config.json`` if it has them, else from ``config.json``."""

    def __post_init__(self) -> None:
        defaults: dict[str, Any] = {"layer_windows": None, "layer_ropes": RopeConfig()}
        for name, default in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, (default,) * self.num_layers)
            if len(getattr(self, name)) != self.num_layers:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries and num_layers is {self.num_layers}; "
                    "expected one for each layer, or () for the default"
                )

    def for_context(self, max_model_len: int) -> ModelConfig:
        """For sequences of at most this many tokens: see `RopeConfig.for_context`."""
        ropes = tuple(rope and rope.for_context(max_model_len) for rope in self.layer_ropes)
        return replace(self, layer_ropes=ropes)

    def distinct_ropes(self, layers: range) -> list[RopeConfig | None]:
        """Those of the layers, each once: layers with equal ropes share a table."""
        ropes = [self.layer_ropes[layer] for layer in layers]
        return [rope for index, rope in enumerate(ropes) if rope not in ropes[:index]]

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied logits head is counted once."""
        num_matrices = 1 if self.tie_word_embeddings or self.head != "logits" else 2
        embeddings = (self.vocab_size * num_matrices + self.num_labels) * self.hidden_size
        if self.head in ("reward", "biased_score"):
            embeddings += self.num_labels
        if self.head == "reward":
            embeddings += (self.hidden_size + 1) * self.hidden_size
        return self.num_layers * self.layer_parameters() + embeddings + self.hidden_size

    def layer_parameters(self, num_ranks: int = 1) -> int:
        """Weights of a decoder layer on one of ``num_ranks``."""
        linears = self.layer_linears(num_ranks)
        return self.layer_norm_parameters + sum(outputs * (inputs + has_bias) for outputs, inputs, has_bias in linears)

    def layer_linears(self, num_ranks: int = 1) -> tuple[tuple[int, int, bool], ...]:
        """Outputs, inputs, and whether there is a bias, of each linear layer of a decoder layer: q, k and v; o; gate
        and up; down."""
        hidden, intermediate = self.hidden_size, self.intermediate_size // num_ranks
        q = self.num_heads // num_ranks * self.head_dim
        kv = max(1, self.num_kv_heads // num_ranks) * self.head_dim
        return (
            (q + 2 * kv, hidden, self.qkv_bias),
            (hidden, q, self.o_bias),
            ((2 if self.mlp_gate else 1) * intermediate, hidden, self.mlp_bias),
            (hidden, intermediate, self.mlp_bias),
        )

    @property
    def layer_norm_parameters(self) -> int:
        """Weights of the norms of a decoder layer."""
        of_heads = 2 * self.qk_norm + (self.num_heads + self.num_kv_heads) * self.qk_norm_over_heads
        return self.num_layer_norms * self.hidden_size + of_heads * self.head_dim


class HFConfig(SimpleNamespace):
    """The fields of ``config.json`` as attributes, for a function as ``hf_overrides``."""

    def update(self, fields: Mapping[str, Any]) -> None:
        vars(self).update(fields)

    @staticmethod
    def parse(value: Any) -> Any:
        """The setting: a function of an `HFConfig` that returns it, or an object with fields in place of the file's."""
        return value if callable(value) else dict(json_object("hf_overrides", value)) or None


def read_config_json(folder: str | Path, hf_overrides: Any = None) -> dict[str, Any]:
    """The content of ``config.json`` with overrides (see `HFConfig.parse`). Raises ConfigError: the file is missing or
    is not a JSON object; TypeError: a function returns no config."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"no config.json in {path.parent}: a model folder holds config.json and *.safetensors")
    content = read_json_object(path)
    if not callable(hf_overrides):
        return content | (hf_overrides or {})
    changed = hf_overrides(HFConfig(**content))
    if not isinstance(changed, HFConfig):
        raise TypeError(f"hf_overrides has returned {changed!r}; it must return the config that it was called with")
    return vars(changed)


def read_generation_json(folder: str | Path) -> dict[str, Any]:
    """The content of ``generation_config.json``; empty if there is no such file. Raises ConfigError: the file is not a
    JSON object."""
    path = Path(folder) / "generation_config.json"
    return read_json_object(path) if path.is_file() else {}


class GenerationOverride:
    """``override_generation_config``: values that replace those of the file; null means the engine's default."""

    @staticmethod
    def parse(value: Any) -> dict[str, Any]:
        """A copy of a dictionary, or the object in JSON text. Raises TypeError, ValueError: not an object, or a key
        outside GENERATION_FIELDS."""
        content = json_object("override_generation_config", value)
        for key in content:
            check_key("override_generation_config", key, GENERATION_FIELDS)
        return dict(content)


def generation_file(setting: str, model_folder: Path) -> Path | None:
    """The file that the setting ``generation_config`` selects; None: no file. ``setting``: ``auto``, one of
    OWN_DEFAULTS, or a folder; ``model_folder``: the checkpoint. Raises ValueError if the setting is a folder without
    generation_config.json."""
    if setting in OWN_DEFAULTS:
        return None
    path = Path(model_folder if setting == "auto" else setting).expanduser() / "generation_config.json"
    if path.is_file():
        return path
    if setting != "auto":
        raise ValueError(
            f"generation_config is {setting!r}, but there is no file {path.absolute()}; it can be 'auto' (the model's "
            "own), 'none' (the engine's defaults) or a folder with a generation_config.json"
        )
    return None


def read_generation_fields(path: Path) -> Mapping[str, Any]:
    """The GENERATION_FIELDS of the file that are not null. Raises ConfigError: the file is not a JSON object."""
    content = read_generation_json(path.parent)
    return {name: content[name] for name in GENERATION_FIELDS if content.get(name) is not None}

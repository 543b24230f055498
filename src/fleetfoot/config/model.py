"""Facts of a checkpoint: the shape of its model, and the JSON files of its folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from fleetfoot.config.json_fields import ConfigError, check_key, json_object, read_json_object
from fleetfoot.config.quantization import NOT_QUANTIZED, QuantizedWeights
from fleetfoot.utils.validation import FieldError

DTYPES = ("bfloat16", "float16", "float32")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}
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
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further parameters of the type, by their names in ``config.json`` (``factor``, ``low_freq_factor``, ...)."""
    rotary_dim: int | None = None
    """The first elements of each head that are rotated; None: all."""

    def for_context(self, max_model_len: int) -> RopeConfig:
        """A config with the choice between two sets of factors that ``longrope`` makes, as ``is_long`` of the
        parameters: the long ones if the longest sequence is longer than those of the original training. It is made
        once, because keys that were rotated with one set do not fit queries with the other."""
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


class Linear(NamedTuple):
    """A linear layer on one rank: one or more of a checkpoint's, with the same input."""

    parts: tuple[str, ...]
    """Their names in a decoder layer, as where each has a tensor of its own: ``self_attn.q_proj``."""
    num_outputs: int
    num_inputs: int
    has_bias: bool


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of a decoder layer, with grouped queries. ``head_dim`` is in elements."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None = RopeConfig()
    """None: the layer has no positions."""
    window: int | None = None
    """How many positions a token attends to, its own included; None: all."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """Whether each head of q and k has an RMSNorm before the rotation (Qwen3)."""
    qk_norm_over_heads: bool = False
    """Whether q and k have an RMSNorm each over all of their heads (OLMo-2)."""
    scale: float | None = None
    """Factor of the scores; None: ``head_dim ** -0.5``."""
    soft_cap: float | None = None
    """Limit of the scores: ``cap * tanh(score / cap)`` (Gemma-2); None: none."""
    is_causal: bool = True
    """Whether tokens attend to earlier ones only."""
    has_sinks: bool = False
    """Whether each query head has a learned logit that joins the softmax's denominator (GPT-OSS)."""
    has_output_gate: bool = False
    """Whether the heads' outputs are multiplied by a sigmoid, which ``q_proj`` has the inputs of after each head's
    query (Qwen3-Next)."""

    def linears(self, hidden_size: int, num_ranks: int = 1) -> tuple[Linear, ...]:
        """The linear layers on one of ``num_ranks``: q, k and v, with the gate; o."""
        q = self.num_heads // num_ranks * self.head_dim
        kv = max(1, self.num_kv_heads // num_ranks) * self.head_dim
        parts = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
        return (
            Linear(parts, q * (1 + self.has_output_gate) + 2 * kv, hidden_size, self.qkv_bias),
            Linear(("self_attn.o_proj",), hidden_size, q, self.o_bias),
        )

    def own_parameters(self, num_ranks: int = 1) -> int:
        """Weights of the norms of q and k, and sinks."""
        num_heads = 2 * self.qk_norm + (self.num_heads + self.num_kv_heads) * self.qk_norm_over_heads
        return num_heads * self.head_dim + self.num_heads * self.has_sinks


@dataclass(frozen=True, slots=True)
class GatedDeltaNetSpec:
    """A gated delta net (Yang et al. 2024): a convolution over q, k and v, then the gated delta rule, whose state is a
    matrix for each head of v."""

    num_k_heads: int
    """Heads of q and of k; each serves consecutive heads of v."""
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    num_taps: int
    """Taps of the convolution."""
    is_grouped: bool = False
    """Whether the checkpoint has two projections with the outputs of each head of k together (Qwen3-Next), rather than
    four."""

    @property
    def conv_channels(self) -> int:
        """Outputs of the projection of q, k and v."""
        return 2 * self.num_k_heads * self.head_k_dim + self.value_size

    @property
    def value_size(self) -> int:
        return self.num_v_heads * self.head_v_dim

    def linears(self, hidden_size: int, num_ranks: int = 1) -> tuple[Linear, ...]:
        """The linear layers on one of ``num_ranks``: q, k, v and the output's gate; rates and decays; the output."""
        names = (("qkvz",), ("ba",)) if self.is_grouped else (("qkv", "z"), ("b", "a"))
        states, heads = (tuple(f"linear_attn.in_proj_{part}" for part in parts) for parts in names)
        part = self.part(num_ranks)
        return (
            Linear(states, part.conv_channels + part.value_size, hidden_size, has_bias=False),
            Linear(heads, 2 * part.num_v_heads, hidden_size, has_bias=False),
            Linear(("linear_attn.out_proj",), hidden_size, part.value_size, has_bias=False),
        )

    def own_parameters(self, num_ranks: int = 1) -> int:
        """Weights of the convolution and the output's norm, and the decays' parameters."""
        part = self.part(num_ranks)
        return part.conv_channels * self.num_taps + 2 * part.num_v_heads + self.head_v_dim

    def part(self, num_ranks: int) -> GatedDeltaNetSpec:
        """What one of ``num_ranks`` has."""
        heads = self.num_k_heads // num_ranks, self.num_v_heads // num_ranks
        return replace(self, num_k_heads=heads[0], num_v_heads=heads[1])

    def states(self, num_ranks: int = 1) -> StateShapes:
        part = self.part(num_ranks)
        matrices = part.num_v_heads, self.head_v_dim, self.head_k_dim
        return StateShapes(matrices, (self.num_taps - 1, part.conv_channels))

    def problem(self, num_ranks: int) -> str:
        """Why ``num_ranks`` cannot share it; empty: they can."""
        return f"{self.num_k_heads} key heads cannot be shared evenly" if self.num_k_heads % num_ranks else ""


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """A Mamba-2 mixer (Dao and Gu 2024): a convolution over x, B and C, then a recurrence, whose state is a matrix for
    each head."""

    num_heads: int
    head_dim: int
    num_groups: int
    """Groups of B and C; each serves consecutive heads."""
    state_size: int
    """Elements of B and C of a group."""
    num_taps: int
    """Taps of the convolution."""
    has_conv_bias: bool = True
    has_bias: bool = False
    """Whether the two projections have biases."""

    @property
    def value_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return self.value_size + 2 * self.num_groups * self.state_size

    def linears(self, hidden_size: int, num_ranks: int = 1) -> tuple[Linear, ...]:
        """The linear layers on one of ``num_ranks``: the output's gate, x, B, C and steps; the output."""
        part = self.part(num_ranks)
        num_outputs = part.value_size + part.conv_channels + part.num_heads
        return (
            Linear(("mamba.in_proj",), num_outputs, hidden_size, self.has_bias),
            Linear(("mamba.out_proj",), hidden_size, part.value_size, self.has_bias),
        )

    def own_parameters(self, num_ranks: int = 1) -> int:
        """Weights of the convolution and the output's norm, and three parameters for each head."""
        part = self.part(num_ranks)
        return part.conv_channels * (self.num_taps + self.has_conv_bias) + part.value_size + 3 * part.num_heads

    def part(self, num_ranks: int) -> Mamba2Spec:
        """What one of ``num_ranks`` has: some groups with their heads, or some heads of the only group."""
        return replace(self, num_heads=self.num_heads // num_ranks, num_groups=max(1, self.num_groups // num_ranks))

    def states(self, num_ranks: int = 1) -> StateShapes:
        part = self.part(num_ranks)
        return StateShapes((part.num_heads, self.head_dim, self.state_size), (self.num_taps - 1, part.conv_channels))

    def problem(self, num_ranks: int) -> str:
        """Why ``num_ranks`` cannot share it; empty: they can."""
        if self.num_groups > 1 and self.num_groups % num_ranks:
            return f"{self.num_groups} groups of Mamba-2's heads cannot be shared evenly"
        return f"{self.num_heads} heads of Mamba-2 cannot be shared evenly" if self.num_heads % num_ranks else ""


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A gated convolution of a few taps (LFM2, Liquid AI 2025); its state is the last inputs."""

    num_taps: int
    channels: int
    has_bias: bool = False
    """Whether the convolution and the two projections have biases."""

    def linears(self, hidden_size: int, num_ranks: int = 1) -> tuple[Linear, ...]:
        """The linear layers on one of ``num_ranks``: two gates and the input; the output."""
        channels = self.part(num_ranks).channels
        return (
            Linear(("conv.in_proj",), 3 * channels, hidden_size, self.has_bias),
            Linear(("conv.out_proj",), hidden_size, channels, self.has_bias),
        )

    def own_parameters(self, num_ranks: int = 1) -> int:
        """Weights of the convolution."""
        return self.part(num_ranks).channels * (self.num_taps + self.has_bias)

    def part(self, num_ranks: int) -> ShortConvSpec:
        """What one of ``num_ranks`` has."""
        return replace(self, channels=self.channels // num_ranks)

    def states(self, num_ranks: int = 1) -> StateShapes:
        return StateShapes((), (self.num_taps - 1, self.part(num_ranks).channels))

    def problem(self, num_ranks: int) -> str:
        """Why ``num_ranks`` cannot share it; empty: they can."""
        return f"{self.channels} channels cannot be shared evenly" if self.channels % num_ranks else ""


class StateShapes(NamedTuple):
    """What a recurrent mixer keeps of a request, on one rank."""

    recurrent: tuple[int, ...]
    """Shape of the recurrence's matrices, ``[heads, rows, columns]``; empty: it has none."""
    inputs: tuple[int, ...]
    """Shape of the convolution's last inputs, ``[taps - 1, channels]``, in the model's dtype."""

    @property
    def num_recurrent(self) -> int:
        """Elements of the matrices."""
        return math.prod(self.recurrent) if self.recurrent else 0

    def num_words(self, matrix_bytes: int, input_bytes: int) -> tuple[int, int]:
        """Float32 words of both, given the bytes of an element."""
        return -(-self.num_recurrent * matrix_bytes // 4), -(-math.prod(self.inputs) * input_bytes // 4)


RecurrentSpec = GatedDeltaNetSpec | Mamba2Spec | ShortConvSpec


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """The MLP of a decoder layer."""

    intermediate_size: int
    has_bias: bool = False
    has_gate: bool = True
    """Whether it has three matrices (gate, up and down) rather than two."""
    activation: str = "silu"
    """The activation of the gate: ``silu`` or ``gelu_tanh``."""

    def linears(self, hidden_size: int, num_ranks: int = 1) -> tuple[Linear, ...]:
        """The linear layers on one of ``num_ranks``: gate and up; down."""
        size = self.intermediate_size // num_ranks
        parts = ("mlp.gate_proj", "mlp.up_proj") if self.has_gate else ("mlp.up_proj",)
        return (
            Linear(parts, len(parts) * size, hidden_size, self.has_bias),
            Linear(("mlp.down_proj",), hidden_size, size, self.has_bias),
        )


class BranchNorms(NamedTuple):
    """The RMSNorms of ``hidden_size`` of a mixer or an MLP."""

    before: bool = True
    after: bool = False
    """Whether its output is normed before it is added to the residual stream."""


NORM_BEFORE = BranchNorms()


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How the experts of a token are chosen from the router's logits, and weighted."""

    scores: str = "softmax"
    """Function of the logits: ``softmax`` or ``sigmoid``."""
    is_normalized: bool = True
    """Whether the weights of the chosen experts are divided by their sum. With softmax that is a softmax over the
    logits of the chosen ones."""
    scale: float = 1.0
    """Factor of the weights."""
    has_bias: bool = False
    """Whether logits have a bias."""
    has_correction: bool = False
    """Whether each expert has a number that is added to its score for the choice alone (DeepSeek-V3)."""
    num_groups: int = 1
    """Experts are in as many groups, of which the ``num_chosen_groups`` with the largest sums of their two best scores
    are eligible (DeepSeek-V3)."""
    num_chosen_groups: int = 1


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts in place of an MLP: gated MLPs, some of which are chosen for each token, and one for all."""

    num_experts: int
    num_chosen: int
    """Experts of a token."""
    intermediate_size: int
    """Size of one expert."""
    router: RouterSpec = RouterSpec()
    has_bias: bool = False
    """Whether the matrices of experts have biases."""
    activation: str = "silu"
    """``silu``: SwiGLU; ``clamped``: the gate limited above and ``up`` on both sides, ``(up + 1) * gate * sigmoid(alpha
    * gate)`` (GPT-OSS)."""
    alpha: float = 1.0
    limit: float = 0.0
    """Limit of ``clamped``."""
    shared_size: int = 0
    """Intermediate size of the MLP that every token passes; 0: there is none."""
    has_shared_gate: bool = False
    """Whether its output is multiplied by the sigmoid of a product of the token (Qwen2-MoE)."""
    shared_name: str = "shared_experts"
    """Its name in the checkpoint."""

    def linears(self, hidden_size: int, num_ranks: int = 1) -> tuple[Linear, ...]:
        """The linear layers that every token passes, on one of ``num_ranks``: the router, and the shared MLP's."""
        router = Linear(("mlp.gate",), self.num_experts, hidden_size, self.router.has_bias)
        if not self.shared_size:
            return (router,)
        size, name = self.shared_size // num_ranks, f"mlp.{self.shared_name}"
        gate = Linear((f"{name}_gate",), 1, hidden_size, has_bias=False)
        return (
            router,
            Linear((f"{name}.gate_proj", f"{name}.up_proj"), 2 * size, hidden_size, has_bias=False),
            Linear((f"{name}.down_proj",), hidden_size, size, has_bias=False),
            *[gate] * self.has_shared_gate,
        )

    def expert_parameters(self, hidden_size: int, num_ranks: int = 1) -> int:
        """Weights of one expert on one of ``num_ranks``."""
        size = self.intermediate_size // num_ranks
        return 3 * size * hidden_size + (2 * size + hidden_size) * self.has_bias


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A decoder layer. Layers with equal specs launch the same kernels."""

    mixer: Any
    """An `AttentionSpec`, or a `RecurrentSpec`."""
    mlp: MLPSpec | ExpertsSpec
    mixer_norms: BranchNorms = NORM_BEFORE
    mlp_norms: BranchNorms = NORM_BEFORE
    residual_multiplier: float = 1.0
    """Factor of the outputs of mixer and MLP, before they are added to the residual stream."""
    unfusible: str = ""
    """Why the layer's class may compute something else than its `offer` says; empty: it does not."""

    def linears(self, hidden_size: int, num_ranks: int = 1) -> tuple[Linear, ...]:
        """The linear layers on one of ``num_ranks``, in the order of computation."""
        own: tuple[Linear, ...] = self.mixer.linears(hidden_size, num_ranks)
        return own + self.mlp.linears(hidden_size, num_ranks)

    @property
    def attention(self) -> AttentionSpec | None:
        """The mixer, where it is attention."""
        return self.mixer if isinstance(self.mixer, AttentionSpec) else None

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """The mixer, where it has a state."""
        return self.mixer if isinstance(self.mixer, RecurrentSpec) else None

    def norm_parameters(self, hidden_size: int, num_ranks: int = 1) -> int:
        """Weights outside linear layers, on one of ``num_ranks``: those of norms, and the mixer's own."""
        own: int = self.mixer.own_parameters(num_ranks)
        return sum(self.mixer_norms + self.mlp_norms) * hidden_size + own

    @property
    def experts(self) -> ExpertsSpec | None:
        """The MLP, where it is a mixture of experts."""
        return self.mlp if isinstance(self.mlp, ExpertsSpec) else None

    def num_parameters(self, hidden_size: int, num_ranks: int = 1, *, active: bool = False) -> int:
        """Weights on one of ``num_ranks``. ``active``: those that one token reads."""
        linears = self.linears(hidden_size, num_ranks)
        matrices = sum(each.num_outputs * (each.num_inputs + each.has_bias) for each in linears)
        if (mlp := self.experts) is not None:
            matrices += mlp.num_experts * mlp.router.has_correction
            matrices += mlp.expert_parameters(hidden_size, num_ranks) * (mlp.num_chosen if active else mlp.num_experts)
        return self.norm_parameters(hidden_size, num_ranks) + matrices


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model. Sizes are counts."""

    architecture: str
    """The model class from ``architectures``, for example ``LlamaForCausalLM``."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    """The decoder layers, which may differ from each other."""
    max_position_embeddings: int
    """Longest context, in tokens."""
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    """Whether the logits head is the embedding."""
    has_merged_projections: bool = False
    """Whether the checkpoint has q, k and v in one tensor, ``qkv_proj``, and gate and up in ``gate_up_proj``."""
    norm_offset: float = 0.0
    """Added to the weights of all RMSNorms (Gemma: 1)."""
    head: str = "logits"
    """After the final norm: ``logits``; ``score`` or ``biased_score``, a linear layer; ``reward``, two of them; or
    ``none``."""
    num_labels: int = 0
    """Outputs of a head for scores."""
    class_path: str = ""
    """``module:class`` of the `CausalLM`; empty: that of the architecture."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of ``config.json`` that only this architecture reads, by their names there."""
    dtype: str = "float32"
    """Dtype of the checkpoint, one of DTYPES; of quantized ones that of what is not quantized."""
    state_dtype: str = "float32"
    """Dtype in which the matrices of recurrent states are kept, whatever they are computed in."""
    quantization: QuantizedWeights = NOT_QUANTIZED
    """Which linear layers of the checkpoint are quantized, and how."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """End tokens, from ``generation_config.json`` if it has them, else from ``config.json``."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers is empty; expected a LayerSpec for each decoder layer")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def distinct_layers(self) -> tuple[LayerSpec, ...]:
        """The specs of the layers, each once, in the order of their first layers."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The attention of the layers that have it, in order."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    def with_state_dtype(self, dtype: str) -> ModelConfig:
        """This model with a value of ``mamba_ssm_cache_dtype``. Raises FieldError if no state has matrices."""
        name = "mamba_ssm_cache_dtype"
        if dtype == "auto":
            return self
        if not any(layer.recurrent is not None and layer.recurrent.states().recurrent for layer in self.layers):
            raise FieldError(name, f"is {dtype!r}, and {self.architecture} keeps no such states; leave it out", dtype)
        return replace(self, state_dtype=dtype)

    def check_snapshots(self, most: int | None) -> None:
        """Raises FieldError if ``max_state_snapshots`` is set and there are no states."""
        if most is not None and not self.has_states:
            why = f"is {most}, and {self.architecture} keeps no recurrent states; leave it out"
            raise FieldError("max_state_snapshots", why, most)

    @property
    def has_states(self) -> bool:
        """Whether a layer has a recurrent state."""
        return len(self.attentions) < self.num_layers

    def with_mixers(self, **changes: Any) -> ModelConfig:
        """This model with other fields of the mixers of all layers with attention."""

        def changed(layer: LayerSpec) -> LayerSpec:
            return layer if layer.attention is None else replace(layer, mixer=replace(layer.attention, **changes))

        return replace(self, layers=tuple(map(changed, self.layers)))

    def for_context(self, max_model_len: int) -> ModelConfig:
        """A config for sequences of at most this many tokens: see `RopeConfig.for_context`."""

        def resolved(layer: LayerSpec) -> LayerSpec:
            if layer.attention is None or layer.attention.rope is None:
                return layer
            return replace(layer, mixer=replace(layer.attention, rope=layer.attention.rope.for_context(max_model_len)))

        return replace(self, layers=tuple(map(resolved, self.layers)))

    def rotary_tables(self, layers: range) -> list[tuple[RopeConfig | None, int]]:
        """The rotation and the head size of each table of angles that the layers need, each once."""
        tables: list[tuple[RopeConfig | None, int]] = []  # ropes have mappings, which have no hash
        for mixer in (self.layers[layer].attention for layer in layers):
            if mixer is not None and (mixer.rope, mixer.head_dim) not in tables:
                tables.append((mixer.rope, mixer.head_dim))
        return tables

    @property
    def has_experts(self) -> bool:
        return any(layer.experts is not None for layer in self.layers)

    @property
    def num_active_parameters(self) -> int:
        """Number of weights that one token reads, the whole embedding included."""
        inactive = (
            layer.num_parameters(self.hidden_size) - layer.num_parameters(self.hidden_size, active=True)
            for layer in self.layers
        )
        return self.num_parameters - sum(inactive)

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied logits head is counted once."""
        num_matrices = 1 if self.tie_word_embeddings or self.head != "logits" else 2
        embeddings = (self.vocab_size * num_matrices + self.num_labels) * self.hidden_size
        if self.head in ("reward", "biased_score"):
            embeddings += self.num_labels
        if self.head == "reward":
            embeddings += (self.hidden_size + 1) * self.hidden_size
        return self.layer_parameters() + embeddings + self.hidden_size

    def layer_parameters(self, num_ranks: int = 1) -> int:
        """Weights of all decoder layers on one of ``num_ranks``."""
        return sum(layer.num_parameters(self.hidden_size, num_ranks) for layer in self.layers)


class HFConfig(SimpleNamespace):
    """The fields of ``config.json`` as attributes, for a function as ``hf_overrides``."""

    def update(self, fields: Mapping[str, Any]) -> None:
        vars(self).update(fields)

    @staticmethod
    def parse(value: Any) -> Any:
        """The setting: a function of an `HFConfig` that returns it, or an object with fields in place of the file's."""
        return value if callable(value) else dict(json_object("hf_overrides", value)) or None


_QUANTIZATION_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files beside ``config.json`` with what is its ``quantization_config`` elsewhere, and the method of each."""


def read_config_json(folder: str | Path, hf_overrides: Any = None) -> dict[str, Any]:
    """The content of ``config.json`` with overrides (see `HFConfig.parse`). Raises ConfigError: the file is missing or
    is not a JSON object; TypeError: a function returns no config."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        adapter = path.parent / "adapter_config.json"
        if adapter.is_file():
            base = read_json_object(adapter).get("base_model_name_or_path")
            raise ConfigError(
                f"{path.parent} holds an adapter alone (adapter_config.json, of the model {base!r}), and adapters are "
                "not served; merge it into the model and pass that folder"
            )
        raise ConfigError(f"no config.json in {path.parent}: a model folder holds config.json and *.safetensors")
    content = read_json_object(path)
    for name in _QUANTIZATION_FILES:
        if not content.get("quantization_config") and (path.parent / name).is_file():
            found = read_json_object(path.parent / name)
            content["quantization_config"] = {"quant_method": _QUANTIZATION_FILES[name]} | found
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

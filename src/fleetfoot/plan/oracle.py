"""The oracle: which model runner runs, and why; and the features that settings and a model require of it. No torch.

An explicit setting wins. Without one, in this order: an active KV connector that does not take Model Runner V2's KV
layout, an architecture or a task that V2 is not the default of, a GPU without Triton, and any feature that V2 lacks
each select V1. Else it is V2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from fleetfoot.config import env
from fleetfoot.config.architectures import ARCHITECTURES
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.kv_transfer import KV_ROLES, KVTransferConfig
from fleetfoot.config.model import ModelConfig
from fleetfoot.kv_transfer.base.registry import CONNECTORS, V2_LAYOUT
from fleetfoot.plan.connector import ConnectorPlan, resolve_connector
from fleetfoot.plan.machine import Machine
from fleetfoot.runner.capabilities import CAPABILITIES, Feature

_EXPERT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_STATE_FIELDS = ("ssm_cfg", "mamba_d_state", "mamba_num_heads", "ssm_state_size", "state_size", "linear_num_key_heads")
_HYBRID_FIELDS = (*_STATE_FIELDS, "attn_layer_period", "hybrid_override_pattern", "layers_block_type")
"""Only models with state-space, linear attention or mixed layers have one of these."""
_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")

_SPECULATIVE = {
    "ngram": Feature.SPECULATIVE_NGRAM,
    "draft_model": Feature.SPECULATIVE_DRAFT_MODEL,
    "eagle": Feature.SPECULATIVE_EAGLE,
}
_PARALLEL = {
    "tensor_parallel_size": Feature.TENSOR_PARALLELISM,
    "pipeline_parallel_size": Feature.PIPELINE_PARALLELISM,
    "prefill_context_parallel_size": Feature.PREFILL_CONTEXT_PARALLELISM,
}
_SWITCHES = {
    "enable_lora": Feature.LORA,
    "enable_prompt_embeds": Feature.PROMPT_EMBEDDINGS,
    "enable_sleep_mode": Feature.SLEEP,
    "enable_chunked_prefill": Feature.CHUNKED_PREFILL,
    "enable_prefix_caching": Feature.PREFIX_CACHING,
    "async_scheduling": Feature.ASYNC_SCHEDULING,
}


@dataclass(frozen=True, slots=True)
class ModelFeatures:
    """What a checkpoint's ``config.json`` requires of a runner, also of models that cannot be loaded."""

    architecture: str
    quantization: str | None = None
    """The method of weights that are stored quantized."""
    has_experts: bool = False
    is_hybrid: bool = False
    has_windows: bool = False

    @classmethod
    def of(cls, content: Mapping[str, Any], model: ModelConfig | None) -> ModelFeatures:
        """From the object in ``config.json`` and the config parsed from it; None: its kind is not supported."""
        fields = {**content, **_object(content.get("text_config"))}  # multimodal configs nest the decoder's
        names, layer_types = content.get("architectures"), fields.get("layer_types")
        name = str(names[0]) if isinstance(names, list) and names else f"model_type {content.get('model_type')!r}"
        stored = fields.get("quantization_config") or fields.get("compression_config")
        kinds = layer_types if isinstance(layer_types, list) else []
        return cls(
            architecture=name if model is None else model.architecture,
            quantization=str(_object(stored).get("quant_method", "of an unnamed method")) if stored else None,
            has_experts=any(isinstance(fields.get(name), int) and fields[name] > 1 for name in _EXPERT_FIELDS),
            is_hybrid=any(kind not in _ATTENTION_LAYERS for kind in kinds)
            or any(fields.get(name) is not None for name in _HYBRID_FIELDS),
            has_windows=model is not None and any(window is not None for window in model.layer_windows),
        )

    @property
    def is_loadable(self) -> bool:
        """Whether some runner can load a model of this kind, if its other fields are valid."""
        special = self.quantization is not None or self.has_experts or self.is_hybrid
        return not special and self.architecture in ARCHITECTURES


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A required feature that a runner lacks."""

    name: str
    requested_by: str
    """The setting that requires it: ``tensor_parallel_size is 2``."""
    why_not: str
    """A sentence."""

    def __str__(self) -> str:
        return f"{self.name} ({self.requested_by}): {self.why_not}"


def required_features(config: EngineConfig, model: ModelFeatures) -> dict[Feature, str]:
    """Each feature that these settings and this model require, with the setting that does, in a fixed order.

    What a single request may require (logprobs, penalties, ...) is not among them.
    """
    architecture, transfer, speculative = model.architecture, config.kv_transfer_config, config.speculative_config
    method = "" if speculative is None else speculative.method
    drafts = f"speculative_config has method {method!r}" if method else None
    mode = "NONE" if config.compilation_config is None else config.compilation_config.mode
    quantized = f"the checkpoint's weights are quantized, {model.quantization}" if model.quantization else None
    if config.quantization is not None:
        quantized = f"quantization is {config.quantization!r}"
    connector = None
    if transfer is not None and transfer.is_active:
        connector = f"kv_transfer_config has {transfer.kv_connector} as {transfer.kv_role}"
    sizes = {feature: (name, getattr(config, name)) for name, feature in _PARALLEL.items()}
    reasons: dict[Feature, Any] = {
        Feature.QUANTIZED_WEIGHTS: quantized,
        Feature.MIXTURE_OF_EXPERTS: model.has_experts and f"{architecture} has experts",
        Feature.HYBRID_LAYERS: model.is_hybrid and f"{architecture} has layers that are not attention",
        Feature.SLIDING_WINDOW: model.has_windows and f"{architecture} has layers that see a window",
        Feature.POOLING: config.task != "generate" and f"task is {config.task!r}; only 'generate' works",
        Feature.TORCH_COMPILE: mode != "NONE" and f"compilation_config has mode {mode}; only NONE works",
        **{feature: size > 1 and f"{name} is {size}" for feature, (name, size) in sizes.items()},
        # methods without a feature of their own are a `Drafter` as well
        _SPECULATIVE.get(method, Feature.SPECULATIVE_DRAFT_MODEL): drafts,
        **{feature: getattr(config, name) and f"{name} is on" for name, feature in _SWITCHES.items()},
        Feature.PREEMPTION: "every scheduler may preempt",
        Feature.PRIORITY_SCHEDULING: config.scheduling_policy == "priority" and "scheduling_policy is 'priority'",
        Feature.KV_OFFLOADING: config.kv_offloading_size and f"kv_offloading_size is {config.kv_offloading_size:g}",
        Feature.KV_CONNECTOR: connector,
    }
    return {feature: reason for feature, reason in reasons.items() if reason}


def unsupported_features(runner: str, required: Mapping[Feature, str]) -> tuple[Unsupported, ...]:
    """The required features that ``runner`` (``v1`` or ``v2``) does not support."""
    declared = CAPABILITIES[runner]
    return tuple(
        Unsupported(feature.value, requested_by, declared[feature])
        for feature, requested_by in required.items()
        if declared[feature]
    )


DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES = tuple(name for name, entry in ARCHITECTURES.items() if entry.default_on_v2)
"""The architectures that Model Runner V2 is the default of."""
NAMES = {"v1": "Model Runner V1", "v2": "Model Runner V2"}


class UnsupportedFeatureError(ValueError):
    """The runner that is to run lacks features that are on; the message lists them."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Which runner, and why."""

    runner: str
    """``v1`` or ``v2``."""
    explicit: bool
    """Whether the user has chosen it."""
    reasons: tuple[str, ...]
    """In sentences."""
    unsupported: tuple[Unsupported, ...]
    """Required features that V2 lacks, whichever runner runs."""
    missing: tuple[Unsupported, ...]
    """Required features that the chosen runner lacks; with any of them an engine does not start."""
    warnings: tuple[str, ...]
    """Logged at each start."""
    impossible: tuple[str, ...]
    """What is required and neither runner supports."""
    advice: str
    """How to avoid ``missing``, in a sentence."""
    connector: ConnectorPlan | None
    """The active KV connector."""

    def check(self) -> None:
        """Raise UnsupportedFeatureError if anything is missing."""
        if self.missing:
            listed = "".join(f"\n  - {feature}" for feature in self.missing)
            chosen = f"{self.reasons[0].rstrip('.')}, and it does not support"
            why = "no model runner supports" if self.impossible else chosen
            raise UnsupportedFeatureError(f"the engine cannot start: {why} what is on:{listed}\n{self.advice}")


def decide(
    config: EngineConfig, model: ModelFeatures, machine: Machine, environ: Mapping[str, str] | None = None
) -> Decision:
    """Choose the runner, also for models that no runner can load. The order is the module's docstring's. ``environ``:
    environment variables; None: the process's own. Raises ValueError if the environment variable holds neither 0 nor 1,
    even if a setting overrides it; there is no such device; or settings of the KV connector contradict each other."""
    choice, device = _explicit_choice(config, environ), machine.choose_device(config.device)
    connector = resolve_connector(config)
    lacks_triton = device == "cuda" and not machine.has_triton
    required = required_features(config, model)
    lacking = {runner: unsupported_features(runner, required) for runner in NAMES}
    if connector is not None and not connector.layouts.exists:
        absent = Unsupported("this KV connector", connector.requested_by, f"{connector.refusal}")
        lacking = {runner: (*features, absent) for runner, features in lacking.items()}
    elif connector is not None and connector.refusal is not None:
        lacking["v2"] += (Unsupported("Model Runner V2's KV layout", connector.requested_by, connector.refusal),)
    names = {feature.name for feature in lacking["v1"]}
    impossible = tuple(f"{lack.name} ({lack.requested_by})" for lack in lacking["v2"] if lack.name in names)
    if model.architecture not in ARCHITECTURES:
        impossible = (f"the architecture {model.architecture}", *impossible)
    chosen = None if choice is None else (*choice, False)
    runner, reason, warns = chosen or _choose(config, model, connector, lacks_triton, lacking["v2"])
    missing = lacking[runner]
    if runner == "v2" and lacks_triton:
        missing += (Unsupported("a GPU without Triton", "the device is cuda", _NO_TRITON),)
    reasons = [f"{NAMES[runner]} {'is chosen' if missing else 'runs'}: {reason}."]
    if impossible:
        reasons, warns = [f"No model runner supports {', '.join(impossible)}."], False
    elif runner == "v2" and device == "cpu":
        reasons.append(_ON_CPU)
    warnings = (*(reasons if warns else ()), *_inactive_transfer(config))
    advice = "" if not missing else _V1_HELPS if runner == "v2" and not lacking["v1"] else _NOTHING_HELPS
    found = choice is not None, tuple(reasons), lacking["v2"], missing, warnings
    return Decision(runner, *found, impossible, advice, connector)


def _explicit_choice(config: EngineConfig, environ: Mapping[str, str] | None) -> tuple[str, str] | None:
    """The runner, and the setting or variable that names it."""
    from_environment = env.use_v2_model_runner(environ)
    if config.runner != "auto":
        return config.runner, f"runner is {config.runner!r}"
    if config.use_v2_model_runner is not None:
        return "v2" if config.use_v2_model_runner else "v1", f"use_v2_model_runner is {config.use_v2_model_runner}"
    if from_environment is not None:
        return "v2" if from_environment else "v1", f"{env.USE_V2_MODEL_RUNNER} is {int(from_environment)}"
    return None


def _choose(
    config: EngineConfig,
    model: ModelFeatures,
    connector: ConnectorPlan | None,
    lacks_triton: bool,
    lacking: tuple[Unsupported, ...],
) -> tuple[str, str, bool]:
    """The runner, the reason, and whether it is a reason to warn of. ``lacking``: what V2 does not support."""
    if connector is not None and connector.refusal is not None:
        reason = f"Model Runner V2 keeps its KV in the layout {V2_LAYOUT}, and {connector.refusal.rstrip('.')}"
        return "v1", reason, False
    entry = ARCHITECTURES.get(model.architecture)
    if entry is None or not entry.default_on_v2:
        reason = (
            f"{model.architecture} is not one of the architectures that Model Runner V2 is the default of "
            f"({', '.join(DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES)})"
        )
        return "v1", reason + ("" if entry is None else "; use_v2_model_runner=True would choose it"), False
    if config.task != "generate":
        return "v1", f"the task is {config.task}, and Model Runner V2 is for generate alone", False
    if lacks_triton:
        return "v1", _NO_TRITON.rstrip("."), True
    if lacking:
        listed = "; ".join(f"{feature.name} ({feature.requested_by})" for feature in lacking)
        return "v1", f"Model Runner V2 does not support {listed}", True
    return "v2", f"it is the default of {model.architecture}, and nothing is on that it does not support", False


_NO_TRITON = "Model Runner V2's GPU kernels are written in Triton, and this GPU is to run without it."
_ON_CPU = "On a CPU it takes the same steps, with the torch twins of its kernels or what is compiled for the CPU."
_V1_HELPS = "Model Runner V1 supports all of it: let it run, with runner='v1' or use_v2_model_runner=False."
_NOTHING_HELPS = "Leave these settings out, or take another model."


def _inactive_transfer(config: EngineConfig) -> tuple[str, ...]:
    """A warning if there is a kv_transfer_config that does nothing."""
    transfer, empty = config.kv_transfer_config, KVTransferConfig()
    if transfer is None or transfer.is_active or transfer == empty:
        return ()
    names = [item.name for item in fields(transfer) if getattr(transfer, item.name) != getattr(empty, item.name)]
    given = ", ".join(f"{name} {getattr(transfer, name)!r}" for name in names)
    options: dict[str, Iterable[str]] = {"kv_connector": CONNECTORS, "kv_role": KV_ROLES}
    absent = [name for name in options if getattr(transfer, name) is None]
    needed = " and ".join(f"{name} ({', '.join(options[name])})" for name in absent)
    return (
        f"kv_transfer_config is not active, for it has no {' and no '.join(absent)}: nothing comes of {given}. Set "
        f"{needed}, or leave kv_transfer_config out.",
    )

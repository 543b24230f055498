"""The oracle: which model runner runs, and why; and the features that settings and a model require of it. No torch.

An explicit setting wins. Without one, each of these selects V1: an active KV connector that does not accept the KV
layout of Model Runner V2, an architecture or a task that V2 is not the default of, a GPU without Triton, and any
feature that V2 lacks. Else it is V2. All rules are evaluated, and one warning names all that apply.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

from fleetfoot.config import env
from fleetfoot.config.architectures import ARCHITECTURES
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.foreign_fields import EXPERTS, STATES, foreign_fields
from fleetfoot.config.kv_transfer import KV_ROLES, KVTransferConfig
from fleetfoot.config.model import ModelConfig
from fleetfoot.config.quantization import QUANTIZED_WHILE_LOADING, WeightFormat
from fleetfoot.kv_transfer.base.registry import CONNECTORS
from fleetfoot.plan.connector import ConnectorPlan, resolve_connector
from fleetfoot.plan.logits_processors import listed_processors
from fleetfoot.plan.machine import Machine
from fleetfoot.records.kv_layout import ARENA
from fleetfoot.runner.capabilities import BLOCKS_WITH_KERNELS, CAPABILITIES, KV_LAYOUTS, V1_ROOM, Feature

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
    formats: tuple[WeightFormat, ...] = ()
    """Their formats, if they are known."""
    has_experts: bool = False
    is_hybrid: bool = False
    has_states: bool = False
    """Whether its layers that are not attention are known."""
    has_windows: bool = False
    task: str = "generate"
    """``generate`` or ``pooling``."""

    @classmethod
    def of(cls, content: Mapping[str, Any], model: ModelConfig | None) -> ModelFeatures:
        """From the object in ``config.json`` and the config parsed from it; None: its kind is not supported."""
        fields = {**content, **_object(content.get("text_config"))}  # of multimodal models
        names, layer_types = content.get("architectures"), fields.get("layer_types")
        name = str(names[0]) if isinstance(names, list) and names else f"model_type {content.get('model_type')!r}"
        stored = fields.get("quantization_config") or fields.get("compression_config")
        unknown = str(_object(stored).get("quant_method", "of an unnamed method")) if stored else None
        kinds = layer_types if isinstance(layer_types, list) else []
        has_states = model is not None and model.has_states
        foreign = {found.kind for found in foreign_fields(content)} if model is None else set()
        return cls(
            architecture=name if model is None else model.architecture,
            quantization=unknown if model is None else model.quantization.method or None,
            formats=() if model is None else model.quantization.formats,
            has_experts=EXPERTS in foreign or (model is not None and model.has_experts),
            is_hybrid=STATES in foreign or any(kind not in _ATTENTION_LAYERS for kind in kinds) or has_states,
            has_states=has_states,
            has_windows=model is not None and any(mixer.window is not None for mixer in model.attentions),
        )

    @property
    def is_loadable(self) -> bool:
        """Whether some runner can load a model of this kind, if its other fields are valid."""
        return (not self.is_hybrid or self.has_states) and self.architecture in ARCHITECTURES


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
    processors = listed_processors(config)
    architecture, transfer, speculative = model.architecture, config.kv_transfer_config, config.speculative_config
    method = "" if speculative is None else speculative.method
    drafts = f"speculative_config has method {method!r}" if method else None
    mode = "NONE" if config.compilation_config is None else config.compilation_config.mode
    quantized = f"the checkpoint's weights are quantized, {model.quantization}" if model.quantization else None
    formats = model.formats
    if config.quantization is not None:
        quantized = f"quantization is {config.quantization!r}"
        formats = formats or tuple(filter(None, [QUANTIZED_WHILE_LOADING.get(config.quantization)]))
    other_blocks = [form for form in formats if form.has_8_bits and form.block[1] not in BLOCKS_WITH_KERNELS]
    others = ", ".join(map(str, other_blocks))
    connector = None
    if transfer is not None and transfer.is_active:
        connector = f"kv_transfer_config has {transfer.kv_connector} as {transfer.kv_role}"
    sizes = {feature: (name, getattr(config, name)) for name, feature in _PARALLEL.items()}
    reasons: dict[Feature, Any] = {
        Feature.QUANTIZED_WEIGHTS: not others and quantized,
        Feature.WEIGHTS_WITHOUT_KERNELS: others and f"{quantized}: {others}",
        Feature.MIXTURE_OF_EXPERTS: model.has_experts and f"{architecture} has experts",
        Feature.HYBRID_LAYERS: model.has_states and f"{architecture} has layers with recurrent states",
        Feature.OTHER_LAYERS: model.is_hybrid
        and not model.has_states
        and f"{architecture} has layers that are not attention",
        Feature.SLIDING_WINDOW: model.has_windows and f"{architecture} has layers that see a window",
        Feature.POOLING: model.task == "pooling" and "the task is pooling",
        Feature.TORCH_COMPILE: mode != "NONE" and f"compilation_config has mode {mode}",
        **{feature: size > 1 and f"{name} is {size}" for feature, (name, size) in sizes.items()},
        # methods without a feature of their own are a `Drafter` as well
        _SPECULATIVE.get(method, Feature.SPECULATIVE_DRAFT_MODEL): drafts,
        **{feature: getattr(config, name) and f"{name} is on" for name, feature in _SWITCHES.items()},
        Feature.PREEMPTION: "every scheduler may preempt",
        Feature.PRIORITY_SCHEDULING: config.scheduling_policy == "priority" and "scheduling_policy is 'priority'",
        Feature.KV_OFFLOADING: config.kv_offloading_size and f"kv_offloading_size is {config.kv_offloading_size:g}",
        Feature.KV_CONNECTOR: connector,
        Feature.LOGITS_PROCESSORS: processors and f"logits_processors has {len(processors)}",
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
    logits_processors: tuple[Any, ...]
    """Custom ones: see `fleetfoot.plan.logits_processors.listed_processors`."""

    @property
    def kv_layout(self) -> str:
        """The layout of the KV cache: the first one of the runner that the connector accepts."""
        accepted = None if self.connector is None else self.connector.layout(self.runner)
        return accepted or KV_LAYOUTS[self.runner][0]

    @property
    def kv_layout_reason(self) -> str | None:
        """Why it is not the runner's first one, as a clause; None: it is."""
        first = KV_LAYOUTS[self.runner][0]
        if self.connector is None or self.kv_layout == first:
            return None
        return f"{NAMES[self.runner]} keeps {first} by default, and {self.connector.accepts}"

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
    if find_spec(V1_ROOM) is None:
        lacking["v1"] += (Unsupported(NAMES["v1"], "it is to run", f"There is no {V1_ROOM}: it was deleted."),)
    rules = [] if choice is not None else _rules_for_v1(model, connector, lacks_triton, lacking["v2"])
    if connector is not None:
        refused = {runner: _refused_layout(connector, runner) for runner in NAMES}
        if model.has_states and ARENA not in connector.layouts.accepted:
            why = f"Recurrent states are kept in the layout {ARENA} alone, and {connector.accepts}."
            refused = dict.fromkeys(NAMES, (Unsupported("this KV connector", connector.requested_by, why),))
        lacking = {runner: (*lacking[runner], *refused[runner]) for runner in NAMES}
    names = {feature.name for feature in lacking["v1"]}
    impossible = tuple(f"{lack.name} ({lack.requested_by})" for lack in lacking["v2"] if lack.name in names)
    if model.architecture not in ARCHITECTURES:
        impossible = (f"the architecture {model.architecture}", *impossible)
    default = ("v1", "; ".join(rules)) if rules else ("v2", _DEFAULT.format(model.architecture))
    runner, why = choice or default
    missing = lacking[runner]
    if runner == "v2" and lacks_triton:
        missing += (Unsupported("a GPU without Triton", "the device is cuda", f"{_NO_TRITON}."),)
    reasons = [f"{NAMES[runner]} {'is chosen' if missing else 'runs'}: {why}."]
    if impossible:
        reasons, rules = [f"No model runner supports {', '.join(impossible)}."], []
    elif runner == "v2" and device == "cpu":
        reasons.append(_ON_CPU)
    warns = rules and (len(rules) > 1 or model.task == "generate")  # V1 is the runner of pooling
    warnings = (*(reasons if warns else ()), *_inactive_transfer(config))
    advice = "" if not missing else _V1_HELPS if runner == "v2" and not lacking["v1"] else _NOTHING_HELPS
    found = choice is not None, tuple(reasons), lacking["v2"], missing, warnings
    return Decision(runner, *found, impossible, advice, connector, listed_processors(config))


def _explicit_choice(config: EngineConfig, environ: Mapping[str, str] | None) -> tuple[str, str] | None:
    """The runner, and the setting or variable that names it."""
    from_environment = env.use_v2_model_runner(environ)
    if config.model_runner != "auto":
        return config.model_runner, f"model_runner is {config.model_runner!r}"
    if config.use_v2_model_runner is not None:
        return "v2" if config.use_v2_model_runner else "v1", f"use_v2_model_runner is {config.use_v2_model_runner}"
    if from_environment is not None:
        return "v2" if from_environment else "v1", f"{env.USE_V2_MODEL_RUNNER} is {int(from_environment)}"
    return None


def _refused_layout(connector: ConnectorPlan, runner: str) -> tuple[Unsupported, ...]:
    """The connector as a feature that ``runner`` lacks, if it accepts no layout that the runner keeps."""
    if connector.layout(runner) is not None:
        return ()
    if connector.layout("v1") is None:  # nor does V1 keep one
        kept = "" if connector.layouts.remark else f"; KV caches are kept as {', '.join(KV_LAYOUTS['v1'])}"
        return (Unsupported("this KV connector", connector.requested_by, f"{connector.accepts}{kept}."),)
    return (Unsupported("this KV connector's layout", connector.requested_by, f"{_other_layout(connector)}."),)


def _other_layout(connector: ConnectorPlan) -> str:
    return f"Model Runner V2 keeps its KV cache as {' or '.join(KV_LAYOUTS['v2'])}, and {connector.accepts}"


def _rules_for_v1(
    model: ModelFeatures, connector: ConnectorPlan | None, lacks_triton: bool, lacking: Iterable[Unsupported]
) -> list[str]:
    """The rules that select V1, as clauses. ``lacking``: the required features that V2 does not support."""
    rules, entry = [], ARCHITECTURES.get(model.architecture)
    if connector is not None and connector.layout("v2") is None:
        rules.append(_other_layout(connector))
    if entry is None or not entry.default_on_v2:
        others = ", ".join(DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES)
        rules.append(f"{model.architecture} is not one of the architectures that V2 is the default of ({others})")
    if model.task == "pooling":
        rules.append("the task is pooling, and V2 only generates")
    if lacks_triton:
        rules.append(_NO_TRITON)
    listed = [
        f"{feature.name} ({feature.requested_by})" for feature in lacking if feature.name != Feature.POOLING.value
    ]
    if listed:
        rules.append(f"V2 does not support {', '.join(listed)}")
    return rules


_DEFAULT = "it is the default of {}, and no feature is on that it does not support"
_NO_TRITON = "V2's GPU kernels are written in Triton, and this GPU is to run without it"
_ON_CPU = "On a CPU it takes the same steps, with kernels in C or in torch."
_V1_HELPS = "Model Runner V1 supports all of it: let it run, with model_runner='v1' or use_v2_model_runner=False."
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

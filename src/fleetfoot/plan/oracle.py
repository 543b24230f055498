"""The oracle: which model runner runs, and why.

An explicit setting wins. Without one, in this order: an active KV connector that does not take Model Runner V2's KV
layout, an architecture or a task that V2 is not the default of, a GPU without Triton, and any feature that V2 lacks
each select V1. Else it is V2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from fleetfoot.config import env
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.kv_transfer import KV_ROLES, KVTransferConfig
from fleetfoot.config.parsing import SUPPORTED_ARCHITECTURES
from fleetfoot.kv_transfer.base.layouts import KNOWN_CONNECTORS, V2_LAYOUT
from fleetfoot.plan.connector import ConnectorPlan
from fleetfoot.plan.features import ModelFeatures, Unsupported, required_features, unsupported_features

DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM")
"""Dense models that have run on V2 for long enough to run there unasked."""

NAMES = {"v1": "Model Runner V1", "v2": "Model Runner V2"}


class UnsupportedFeatureError(ValueError):
    """The runner that is to run lacks features that are on; the message lists them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The user's explicit choice of a runner."""

    runner: str
    source: str
    """``runner is 'v2'``, for example."""


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
    warnings: tuple[str, ...] = ()
    """Logged at each start."""
    advice: str = ""
    """How to avoid ``missing``, in a sentence."""

    def check(self) -> None:
        """Raise UnsupportedFeatureError if anything is missing."""
        if self.missing:
            listed = "".join(f"\n  - {feature}" for feature in self.missing)
            why = f"{self.reasons[0][len(NAMES[self.runner]) + len(' runs: ') : -1]}"
            raise UnsupportedFeatureError(
                f"the engine cannot start: {NAMES[self.runner]} is to run ({why}), and it does not support what is "
                f"on:{listed}\n{self.advice}"
            )


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that the decision depends on."""

    config: EngineConfig
    model: ModelFeatures
    device: str
    has_triton: bool
    choice: Choice | None
    connector: ConnectorPlan | None = None
    """The active KV connector."""


def explicit_choice(config: EngineConfig, environ: Mapping[str, str] | None = None) -> Choice | None:
    """The choice in the settings, else in the environment; None: there is none.

    Raises:
        ValueError: the environment variable is neither 0 nor 1, even if a setting overrides it.
    """
    from_environment = env.use_v2_model_runner(environ)
    if config.runner != "auto":
        return Choice(config.runner, f"runner is {config.runner!r}")
    if config.use_v2_model_runner is not None:
        return Choice(_name(config.use_v2_model_runner), f"use_v2_model_runner is {config.use_v2_model_runner}")
    if from_environment is not None:
        return Choice(_name(from_environment), f"{env.USE_V2_MODEL_RUNNER} is {int(from_environment)}")
    return None


def decide(situation: Situation) -> Decision:
    """Choose the runner; the order is the module's docstring's."""
    required = required_features(situation.config, situation.model)
    lacking = {runner: unsupported_features(runner, required) for runner in NAMES}
    connector = situation.connector
    refusal = None if connector is None else connector.refusal
    if connector is not None and not connector.layouts.exists:
        absent = Unsupported("this KV connector", connector.requested_by, f"{refusal}")
        lacking = {runner: (*features, absent) for runner, features in lacking.items()}
    elif connector is not None and refusal is not None:
        lacking["v2"] += (Unsupported("Model Runner V2's KV layout", connector.requested_by, refusal),)

    def decision(runner: str, *reasons: str, warn: bool = False) -> Decision:
        missing = lacking[runner]
        if runner == "v2" and _lacks_triton(situation):
            missing += (Unsupported("a GPU without Triton", "the device is cuda", _NO_TRITON),)
        first = f"{NAMES[runner]} runs: {reasons[0]}."
        warnings = ((first,) if warn else ()) + _inactive_transfer(situation.config)
        explicit = situation.choice is not None
        advice = _advice(runner, missing, lacking["v1"])
        return Decision(runner, explicit, (first, *reasons[1:]), lacking["v2"], missing, warnings, advice)

    if situation.choice is not None:
        return decision(situation.choice.runner, situation.choice.source, *_on_cpu(situation, situation.choice.runner))
    if refusal is not None:
        return decision("v1", f"Model Runner V2 keeps its KV in the layout {V2_LAYOUT}, and {refusal.rstrip('.')}")
    if situation.model.architecture not in DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES:
        is_loadable = situation.model.architecture in SUPPORTED_ARCHITECTURES
        return decision(
            "v1",
            f"{situation.model.architecture} is not one of the architectures that Model Runner V2 is the default of "
            f"({', '.join(DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES)})"
            f"{'; use_v2_model_runner=True would choose it' * is_loadable}",
        )
    if situation.config.task != "generate":
        return decision("v1", f"the task is {situation.config.task}, and Model Runner V2 is for generate alone")
    if _lacks_triton(situation):
        return decision("v1", _NO_TRITON.rstrip("."), warn=True)
    if lacking["v2"]:
        listed = "; ".join(f"{feature.name} ({feature.requested_by})" for feature in lacking["v2"])
        return decision("v1", f"Model Runner V2 does not support {listed}", warn=True)
    return decision(
        "v2",
        f"it is the default of {situation.model.architecture}, and nothing is on that it does not support",
        *_on_cpu(situation, "v2"),
    )


_NO_TRITON = "Model Runner V2's GPU kernels are written in Triton, and this GPU is to run without it."


def _lacks_triton(situation: Situation) -> bool:
    return situation.device == "cuda" and not situation.has_triton


def _advice(runner: str, missing: tuple[Unsupported, ...], lacking_in_v1: tuple[Unsupported, ...]) -> str:
    if not missing:
        return ""
    if runner == "v2" and not lacking_in_v1:
        return "Model Runner V1 supports all of it: let it run, with runner='v1' or use_v2_model_runner=False."
    return "No model runner supports all of it: leave these settings out, or take another model."


def _name(use_v2: bool) -> str:
    return "v2" if use_v2 else "v1"


def _on_cpu(situation: Situation, runner: str) -> tuple[str, ...]:
    if situation.device != "cpu" or runner != "v2":
        return ()
    return ("On a CPU it takes the same steps, with the torch twins of its kernels or what is compiled for the CPU.",)


def _inactive_transfer(config: EngineConfig) -> tuple[str, ...]:
    transfer, empty = config.kv_transfer_config, KVTransferConfig()
    if transfer is None or transfer.is_active or transfer == empty:
        return ()
    values = {item.name: getattr(transfer, item.name) for item in fields(transfer)}
    given = [f"{name} {value!r}" for name, value in values.items() if value != getattr(empty, name)]
    options: dict[str, Iterable[str]] = {"kv_connector": KNOWN_CONNECTORS, "kv_role": KV_ROLES}
    absent = [name for name in options if values[name] is None]
    wanted = [f"{name} ({', '.join(options[name])})" for name in absent]
    return (
        f"kv_transfer_config is not active, for it has no {' and no '.join(absent)}: nothing comes of "
        f"{', '.join(given)}. Set {' and '.join(wanted)}, or leave kv_transfer_config out.",
    )

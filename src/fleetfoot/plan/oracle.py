"""The oracle: which model runner runs, and why.

An explicit setting wins. Without one, in this order: an active KV connector that does not take Model Runner V2's KV
layout, an architecture or a task that V2 is not the default of, a GPU without Triton, and any feature that V2 lacks
each select V1. Else it is V2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from fleetfoot.config import env
from fleetfoot.config.architectures import ARCHITECTURES
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.kv_transfer import KV_ROLES, KVTransferConfig
from fleetfoot.kv_transfer.base.registry import CONNECTORS, V2_LAYOUT
from fleetfoot.plan.connector import ConnectorPlan
from fleetfoot.plan.features import ModelFeatures, Unsupported, required_features, unsupported_features

DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES = tuple(name for name, entry in ARCHITECTURES.items() if entry.default_on_v2)
"""The architectures that Model Runner V2 is the default of."""

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

    @property
    def lacks_triton(self) -> bool:
        return self.device == "cuda" and not self.has_triton


def explicit_choice(config: EngineConfig, environ: Mapping[str, str] | None = None) -> Choice | None:
    """The choice in the settings, else in the environment; None: there is none.

    Raises:
        ValueError: the environment variable is neither 0 nor 1, even if a setting overrides it.
    """
    from_environment = env.use_v2_model_runner(environ)
    if config.runner != "auto":
        return Choice(config.runner, f"runner is {config.runner!r}")
    if config.use_v2_model_runner is not None:
        runner = "v2" if config.use_v2_model_runner else "v1"
        return Choice(runner, f"use_v2_model_runner is {config.use_v2_model_runner}")
    if from_environment is not None:
        return Choice("v2" if from_environment else "v1", f"{env.USE_V2_MODEL_RUNNER} is {int(from_environment)}")
    return None


def decide(situation: Situation) -> Decision:
    """Choose the runner; the order is the module's docstring's."""
    required = required_features(situation.config, situation.model)
    lacking = {runner: unsupported_features(runner, required) for runner in NAMES}
    connector = situation.connector
    if connector is not None and not connector.layouts.exists:
        absent = Unsupported("this KV connector", connector.requested_by, f"{connector.refusal}")
        lacking = {runner: (*features, absent) for runner, features in lacking.items()}
    elif connector is not None and connector.refusal is not None:
        lacking["v2"] += (Unsupported("Model Runner V2's KV layout", connector.requested_by, connector.refusal),)
    runner, reason, warns = _choose(situation, lacking["v2"])
    reasons = [f"{NAMES[runner]} runs: {reason}."]
    warnings = (*(reasons if warns else ()), *_inactive_transfer(situation.config))
    missing = lacking[runner]
    if runner == "v2" and situation.lacks_triton:
        missing += (Unsupported("a GPU without Triton", "the device is cuda", _NO_TRITON),)
    if runner == "v2" and situation.device == "cpu":
        reasons.append(_ON_CPU)
    advice = "" if not missing else _V1_HELPS if runner == "v2" and not lacking["v1"] else _NOTHING_HELPS
    return Decision(runner, situation.choice is not None, tuple(reasons), lacking["v2"], missing, warnings, advice)


def _choose(situation: Situation, lacking: tuple[Unsupported, ...]) -> tuple[str, str, bool]:
    """The runner, the reason, and whether it is a reason to warn of. ``lacking``: what V2 does not support."""
    if situation.choice is not None:
        return situation.choice.runner, situation.choice.source, False
    refusal = None if situation.connector is None else situation.connector.refusal
    if refusal is not None:
        return "v1", f"Model Runner V2 keeps its KV in the layout {V2_LAYOUT}, and {refusal.rstrip('.')}", False
    architecture = situation.model.architecture
    entry = ARCHITECTURES.get(architecture)
    if entry is None or not entry.default_on_v2:
        reason = (
            f"{architecture} is not one of the architectures that Model Runner V2 is the default of "
            f"({', '.join(DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES)})"
        )
        advice = "" if entry is None else "; use_v2_model_runner=True would choose it"
        return "v1", f"{reason}{advice}", False
    if situation.config.task != "generate":
        return "v1", f"the task is {situation.config.task}, and Model Runner V2 is for generate alone", False
    if situation.lacks_triton:
        return "v1", _NO_TRITON.rstrip("."), True
    if lacking:
        listed = "; ".join(f"{feature.name} ({feature.requested_by})" for feature in lacking)
        return "v1", f"Model Runner V2 does not support {listed}", True
    return "v2", f"it is the default of {architecture}, and nothing is on that it does not support", False


_NO_TRITON = "Model Runner V2's GPU kernels are written in Triton, and this GPU is to run without it."
_ON_CPU = "On a CPU it takes the same steps, with the torch twins of its kernels or what is compiled for the CPU."
_V1_HELPS = "Model Runner V1 supports all of it: let it run, with runner='v1' or use_v2_model_runner=False."
_NOTHING_HELPS = "No model runner supports all of it: leave these settings out, or take another model."


def _inactive_transfer(config: EngineConfig) -> tuple[str, ...]:
    transfer, empty = config.kv_transfer_config, KVTransferConfig()
    if transfer is None or transfer.is_active or transfer == empty:
        return ()
    values = {item.name: getattr(transfer, item.name) for item in fields(transfer)}
    given = [f"{name} {value!r}" for name, value in values.items() if value != getattr(empty, name)]
    options: dict[str, Iterable[str]] = {"kv_connector": CONNECTORS, "kv_role": KV_ROLES}
    absent = [name for name in options if values[name] is None]
    wanted = [f"{name} ({', '.join(options[name])})" for name in absent]
    return (
        f"kv_transfer_config is not active, for it has no {' and no '.join(absent)}: nothing comes of "
        f"{', '.join(given)}. Set {' and '.join(wanted)}, or leave kv_transfer_config out.",
    )

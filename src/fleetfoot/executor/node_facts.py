"""What all machines of an engine must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields

import torch

from fleetfoot._version import __version__
from fleetfoot.plan.plan import EnginePlan

_OWN = (
    "node_rank",
    "master_addr",
    "model",
    "tokenizer",
    "skip_tokenizer_init",
    "generation_config",
    "override_generation_config",
)
"""Settings that a machine may have to itself. Where the model lies is its own business; that it is the same is not."""


def facts_of(plan: EnginePlan) -> dict[str, str]:
    """Name -> value, as text."""
    facts = {item.name: repr(getattr(plan.config, item.name)) for item in fields(plan.config) if item.name not in _OWN}
    facts |= {f"model's {name}": repr(value) for name, value in asdict(plan.model).items()}
    facts |= {
        "fleetfoot": __version__,
        "torch": str(torch.__version__),
        "weights (names and sizes of files)": _weights(plan),
        "device": plan.device,
        "dtype": plan.dtype,
        "runner": plan.runner,
        "backends": repr(plan.backends),
        "kv_layout": plan.kv_layout,
        "max_model_len": str(plan.max_model_len),
        "max_num_batched_tokens": str(plan.max_num_batched_tokens),
    }
    return facts


def check_same(facts: Mapping[str, str], others: Mapping[str, str], *, node: int) -> None:
    """Compare this machine's facts with those of the machine ``node``.

    Raises:
        ValueError: they differ; it says in what.
    """
    different = [
        f"\n  - {name}: {facts.get(name, 'nothing')} here, {others.get(name, 'nothing')} there"
        for name in {**facts, **others}
        if facts.get(name) != others.get(name)
    ]
    if different:
        raise ValueError(
            f"node {node} is set up differently, and the two cannot be one engine:{''.join(different)}\n"
            "start all nodes with the same settings, model and versions"
        )


def _weights(plan: EnginePlan) -> str:
    if plan.config.load_format == "dummy":
        return "dummy"
    return repr([(path.name, path.stat().st_size) for path in sorted(plan.model_path.glob("*.safetensors"))])

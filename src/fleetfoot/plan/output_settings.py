"""What an engine's outputs depend on, as a few texts: engines of a group must have the same."""

from __future__ import annotations

import json
from dataclasses import asdict

from fleetfoot.plan.plan import EnginePlan
from fleetfoot.tokenizer.files import tokenizer_digest
from fleetfoot.weights.identity import digest_of


def output_settings(plan: EnginePlan) -> dict[str, str]:
    """The settings by name, without weights, which change while an engine runs. Reads the files of the tokenizer."""
    config = plan.config
    model = json.dumps(asdict(plan.model), sort_keys=True, default=str)
    settings = {
        "model config": digest_of([model]),
        "dtype": plan.dtype,
        "quantization": str(config.quantization),
        "kv_cache_dtype": plan.kv_dtype,
        "tokenizer": "none" if plan.tokenizer_path is None else tokenizer_digest(plan.tokenizer_path),
        "seed": str(config.seed),
        "logits_processors": str([f"{one.__module__}:{one.__qualname__}" for one in plan.logits_processors]),
    }
    if plan.connector is not None:
        ranks = f"{config.tensor_parallel_size} times {config.pipeline_parallel_size} ranks"
        settings["KV"] = f"{plan.kv_layout} in blocks of {config.block_size}, {ranks}"
    return settings

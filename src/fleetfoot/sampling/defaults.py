"""The sampling parameters of a model: what its ``generation_config.json`` recommends, and what the user makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetfoot.config.model import generation_file, read_generation_fields
from fleetfoot.records.sampling_params import SamplingParams

_PARAMETERS = {"max_new_tokens": "max_tokens"}
"""Field of the file -> field of SamplingParams, where the names differ."""


def read_sampling_defaults(
    setting: str, override: Mapping[str, Any] | None, model_folder: str | Path
) -> dict[str, Any]:
    """The fields of `SamplingParams` for which the model has defaults of its own, with their values.

    The meaning is that of vLLM's ``ModelConfig.get_diff_sampling_param``: of the file, only temperature, top_p, top_k,
    min_p, repetition_penalty and max_new_tokens count, ``do_sample`` does not; the override replaces fields of the
    file, or stands alone without a file; null means the engine's default.

    Args:
        setting: ``EngineConfig.generation_config``.
        override: ``EngineConfig.override_generation_config``.
        model_folder: where the model's own file would be.

    Raises:
        ValueError: a value is out of its range (the message names file, field and value), or there is no such file.
    """
    path = generation_file(setting, Path(model_folder))
    from_file = {} if path is None else read_generation_fields(path)
    defaults = {}
    for name, value in {**from_file, **(override or {})}.items():
        if value is None:
            continue
        is_override = override is not None and name in override
        parameter = _PARAMETERS.get(name, name)
        try:
            defaults[parameter] = getattr(SamplingParams(**{parameter: value}), parameter)
        except ValueError as error:
            way_out = "" if is_override else "; override_generation_config can replace it, generation_config='none' all"
            source = "override_generation_config" if is_override else path
            raise ValueError(f"{source}: {name} is {value!r}: {error}{way_out}") from error
    return defaults

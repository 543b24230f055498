"""The model's default sampling parameters, what a request's parameters need, and its seed. No torch: admission does not
need it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetfoot.config.model import generation_file, read_generation_fields
from fleetfoot.records.sampling_params import SamplingParams

_PARAMETERS = {"max_new_tokens": "max_tokens"}
"""Field of ``generation_config.json`` -> field of SamplingParams, where the names differ."""
_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_SEEDED, _UNSEEDED = 1, 2  # keep a request's own seeds and the engine's apart


def read_sampling_defaults(
    setting: str, override: Mapping[str, Any] | None, model_folder: str | Path
) -> dict[str, Any]:
    """The fields of `SamplingParams` for which the model has defaults of its own, with their values.

    The meaning is that of vLLM's ``ModelConfig.get_diff_sampling_param``: of the file, only temperature, top_p, top_k,
    min_p, repetition_penalty and max_new_tokens count, ``do_sample`` does not; the override replaces fields of the
    file, or stands alone without a file; null means the engine's default. ``setting``, ``override``: the settings
    ``generation_config`` and ``override_generation_config``. Raises ValueError, with file, field and value, if a value
    is out of its range, or there is no such file.
    """
    override = override or {}
    path = generation_file(setting, Path(model_folder))
    values = {} if path is None else read_generation_fields(path)
    defaults = {}
    for name, value in {**values, **override}.items():
        if value is None:
            continue
        parameter = _PARAMETERS.get(name, name)
        try:
            defaults[parameter] = getattr(SamplingParams(**{parameter: value}), parameter)
        except ValueError as error:
            if name in override:
                raise ValueError(f"override_generation_config: {name} is {value!r}: {error}") from error
            remedy = "override_generation_config can replace it, generation_config='none' all"
            raise ValueError(f"{path}: {name} is {value!r}: {error}; {remedy}") from error
    return defaults


def has_filters(params: SamplingParams) -> bool:
    """Whether tokens are drawn, and min_p, top_k or top_p are on."""
    return params.temperature > 0 and (params.min_p > 0 or params.top_k > 0 or params.top_p < 1)


def has_penalties(params: SamplingParams) -> bool:
    """Whether the tokens of a sequence change its logits."""
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def request_seed(seed: int | None, index: int, engine_seed: int = 0, counter: int = 0) -> int:
    """The 64 bits, in [0, 2**64), that all random numbers of copy ``index`` (of ``n``) of a request derive from.

    With ``seed`` given, the result depends on ``seed`` and ``index`` alone: the same request gives the same tokens in
    any engine, and its copies differ. Without, it depends on ``engine_seed``, ``counter`` (which must differ from
    request to request; the order of arrival will do) and ``index``. Negative seeds count as their 64-bit pattern.
    """
    words = (_SEEDED, seed, index) if seed is not None else (_UNSEEDED, engine_seed, counter, index)
    state = 0
    for word in words:
        # SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection that spreads each input bit over all output bits
        state = ((state ^ (word & _MASK)) + _GOLDEN_GAMMA) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state

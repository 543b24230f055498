"""What a ``generation_config.json`` says about sampling, as it stands; its values are checked in `sampling`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetfoot.config.json_record import check_key, json_object
from fleetfoot.config.model import read_generation_json

GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""The fields that are sampling defaults. ``do_sample`` is none of them, as in vLLM: a file that says false without a
temperature says nothing about it."""
OWN_DEFAULTS = ("none", "vllm")
"""Values of the setting ``generation_config`` that mean no file; the second is vLLM's spelling."""


class GenerationOverride:
    """``override_generation_config``: what stands in for fields of the file; null stands for the engine's default."""

    @staticmethod
    def parse(value: Any) -> dict[str, Any]:
        """A copy of a dictionary, or the object in JSON text.

        Raises:
            TypeError, ValueError: it is neither, or has a key that is none of GENERATION_FIELDS; says which.
        """
        content = json_object("override_generation_config", value)
        for key in content:
            check_key("override_generation_config", key, GENERATION_FIELDS)
        return dict(content)


def generation_file(setting: str, model_folder: Path) -> Path | None:
    """The file that the setting ``generation_config`` names; None: there is none to read.

    Args:
        setting: ``auto``, one of OWN_DEFAULTS, or a folder.

    Raises:
        ValueError: a folder was named and it has no generation_config.json.
    """
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
    """Those of GENERATION_FIELDS that are in the file and not null.

    Raises:
        ConfigError: the file is no JSON object.
    """
    content = read_generation_json(path.parent)
    return {name: content[name] for name in GENERATION_FIELDS if content.get(name) is not None}

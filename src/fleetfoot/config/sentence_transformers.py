"""The files that sentence-transformers adds to a checkpoint: what is pooled, and how texts become prompts. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetfoot.config.json_fields import ConfigError, Fields

MODULES = "modules.json"
FILES = (MODULES, "config_sentence_transformers.json", "sentence_bert_config.json", "[0-9]*_*/config.json")
"""Patterns of the files that are read here."""
_MODES = {
    **dict.fromkeys(("lasttoken", "pooling_mode_lasttoken"), "LAST"),
    **dict.fromkeys(("mean", "pooling_mode_mean_tokens"), "MEAN"),
    **dict.fromkeys(("cls", "pooling_mode_cls_token"), "CLS"),
}
"""Names of releases from 6 on, and earlier ones."""
_ORDERS = (("Transformer", "Pooling", "Dense", "Normalize"), ("Transformer", "LogitScore"))
PROJECTION_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")
"""Names of classes of `torch.nn`."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A ``Dense`` module: ``activation(weight @ x + bias)`` of a pooled vector."""

    folder: str
    """The folder with ``model.safetensors``, within the checkpoint."""
    in_features: int
    out_features: int
    bias: bool
    activation: str
    """One of PROJECTION_ACTIVATIONS."""


def read_sentence_transformers(folder: Path) -> dict[str, Any]:
    """Fields of `fleetfoot.config.pooling.Pooling` that the files set; empty if there is no ``modules.json``.

    Raises ConfigError for a module, or a way of pooling, that is not supported.
    """
    path = folder / MODULES
    if not path.is_file():
        return {}
    modules = _read(path, list)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    order = next((order for order in _ORDERS if set(kinds) <= set(order)), None)
    if order is None or [*kinds] != sorted(kinds, key=order.index) or kinds.count("Pooling") > 1:
        raise ConfigError(
            f"{path}: the modules are {', '.join(kinds)}; supported, in this order: "
            f"{' or '.join(map(', '.join, _ORDERS))}"
        )
    found: dict[str, Any] = {"use_activation": "Normalize" in kinds} if "Pooling" in kinds else {}
    projections = []
    for kind, module in zip(kinds, modules, strict=True):
        name = str(module.get("path", ""))
        source = folder / name / "config.json"
        if kind == "Pooling":
            found |= _pooling(Fields(_read(source), {}, str(source)))
        elif kind == "Dense":
            projections.append(_projection(Fields(_read(source), {"bias": True}, str(source)), name))
        elif kind == "LogitScore":
            tokens = Fields(_read(source), {}, str(source))
            ids = (tokens.optional_integer("false_token_id", minimum=0), tokens.integer("true_token_id", minimum=0))
            found["token_ids"] = tuple(token for token in ids if token is not None)
    return {**found, "projections": tuple(projections), **_texts(folder)}


def _pooling(fields: Fields) -> dict[str, Any]:
    known = ", ".join(name for name in _MODES if not name.startswith("pooling"))
    mode = fields.raw("pooling_mode")
    modes = mode if isinstance(mode, list) else [mode]
    if mode is None:
        modes = [name for name, value in fields.content.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        shown = ", ".join(map(str, modes)) or "missing"
        raise ConfigError(f"{fields.source}: pooling_mode is {shown}; supported: {known}")
    if fields.raw("include_prompt") is False and _MODES[modes[0]] != "LAST":
        raise fields.error("include_prompt", "prompts are pooled with their texts; expected true")
    return {"pooling_type": _MODES[modes[0]]}


def _projection(fields: Fields, folder: str) -> Projection:
    fields.refuse("use_residual", because="expected false")
    for name in ("module_input_name", "module_output_name"):
        if fields.raw(name) not in (None, "sentence_embedding"):
            raise fields.error(name, "expected sentence_embedding")
    activation = str(fields.raw("activation_function") or "torch.nn.modules.activation.Tanh")
    name = activation.rpartition(".")[2]
    if not activation.startswith("torch.nn.modules.") or name not in PROJECTION_ACTIVATIONS:
        raise fields.error("activation_function", f"supported, of torch.nn: {', '.join(PROJECTION_ACTIVATIONS)}")
    sizes = fields.integer("in_features"), fields.integer("out_features")
    return Projection(folder, *sizes, fields.boolean("bias"), name)


def _texts(folder: Path) -> dict[str, Any]:
    """How texts become prompts."""
    source = folder / "config_sentence_transformers.json"
    fields = Fields(_read(source) if source.is_file() else {}, {}, str(source))
    prompts = fields.mapping("prompts")
    if not all(isinstance(text, str | None) for text in prompts.values()):
        raise fields.error("prompts", "expected texts by their names")
    named = {name: text or "" for name, text in prompts.items()}
    default = fields.raw("default_prompt_name")
    if default is not None and default not in named:
        raise fields.error("default_prompt_name", f"prompts has {', '.join(named) or 'no texts'}")
    source = folder / "sentence_bert_config.json"
    encoder = Fields(_read(source) if source.is_file() else {}, {}, str(source))
    encoder.refuse("do_lower_case", because="texts are tokenized as they are; expected false")
    return {
        "prompts": tuple(named.items()),
        "default_prompt": default,
        "truncate_dim": fields.optional_integer("truncate_dim"),
        "activation_fn": fields.raw("activation_fn"),
        "max_length": encoder.optional_integer("max_seq_length"),
        "uses_chat_template": "message" in encoder.mapping("modality_config"),
    }


def _read(path: Path, kind: type = dict) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    entries = content if kind is list and isinstance(content, list) else [content]
    if not isinstance(content, kind) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(f"{path} must hold {'a list of objects' if kind is list else 'an object'}")
    return content

"""The model that drafts: found, checked against its target, and what it adds to the engine's memory. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fleetfoot.assets import embedded_eagle_path, embedded_model_path
from fleetfoot.config.architectures import ARCHITECTURES
from fleetfoot.config.engine import EMBEDDED_MODEL, EngineConfig
from fleetfoot.config.model import DTYPE_BYTES, ModelConfig, read_config_json
from fleetfoot.config.parsing import parse_model_config
from fleetfoot.config.speculative import DRAFT_METHODS, EMBEDDED_EAGLE
from fleetfoot.quantization.base import LinearMethods
from fleetfoot.quantization.unquantized import UNQUANTIZED
from fleetfoot.records.kv_layout import LayerCacheSpec, kv_cache_specs
from fleetfoot.weights.hub import ModelNotFoundError, resolve_model

_EMBEDDED = {EMBEDDED_MODEL: embedded_model_path, EMBEDDED_EAGLE: embedded_eagle_path}


@dataclass(frozen=True, slots=True)
class DrafterModel:
    """A draft model, or an EAGLE head."""

    method: str
    """``draft_model``, ``eagle`` or ``mtp``."""
    name: str
    """As in the settings, for messages."""
    folder: Path
    config: ModelConfig
    """The config of the model; of an EAGLE head, the shape of its decoder layers."""

    def check_length(self, max_model_len: int) -> None:
        """Raise ValueError if the drafter has too few positions for requests of ``max_model_len`` tokens."""
        limit = self.config.max_position_embeddings
        if limit < max_model_len:
            raise ValueError(
                f"{self} has {limit:,} positions (max_position_embeddings), fewer than the max_model_len "
                f"{max_model_len:,}; set max_model_len to at most {limit}"
            )

    def __str__(self) -> str:
        kinds = {"eagle": "EAGLE head", "mtp": "layer for a second token of"}
        return f"the {kinds.get(self.method, 'draft model')} {self.name!r}"


def find_drafter(
    config: EngineConfig, target: ModelConfig, folder: Path | None = None, *, config_only: bool = False
) -> DrafterModel | None:
    """The model that ``speculative_config`` names, to draft for ``target``, which is in ``folder``; None: the method
    has no model. ``config_only``: download ``config.json`` only.

    Raises ValueError if a model must be named and is not, or does not fit its method or the target, and
    FileNotFoundError if there is no such model.
    """
    speculative = config.speculative_config
    if speculative is not None and speculative.method == "mtp" and folder is not None:
        return _second_token(config, target, folder)
    if speculative is None or not DRAFT_METHODS[speculative.method].has_model:
        return None
    name = speculative.model
    if name is None:
        if not _is_embedded(config.model) and Path(config.model) != embedded_model_path():
            raise ValueError(
                f"speculative_config: method {speculative.method!r} needs a model, and none is given; the package "
                f"carries a head for its own model, {EMBEDDED_MODEL!r}, and for no other"
            )
        name = EMBEDDED_EAGLE
    try:
        folder = _EMBEDDED[name]() if _is_embedded(name) else resolve_model(name, config_only=config_only)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"speculative_config: {error}", "speculative_config") from error
    is_head = speculative.method == "eagle"
    found = DrafterModel(speculative.method, name, folder, _read_config(folder, is_head=is_head))
    _check_fits(found, target)
    if config.max_model_len is not None:
        found.check_length(config.max_model_len)
    return found


def _second_token(config: EngineConfig, target: ModelConfig, folder: Path) -> DrafterModel:
    """The layer that predicts a second token: of the shape of the target's last layer with attention."""
    found, number = ARCHITECTURES.get(target.architecture), read_config_json(folder).get("mtp_num_hidden_layers", 1)
    if found is None or not found.has_mtp or number != 1:
        raise ValueError(
            f"speculative_config: method is 'mtp', and {target.architecture} has {number if found else 0} layers that "
            "predict a second token; expected a model with 1, such as Qwen3-Next or Qwen3.5"
        )
    if config.pipeline_parallel_size > 1 and not target.tie_word_embeddings:
        raise ValueError(
            f"speculative_config: method is 'mtp', which reads the embedding, and pipeline_parallel_size is "
            f"{config.pipeline_parallel_size}: the last rank has none; set it to 1, or take tensor ranks"
        )
    layer = next(layer for layer in reversed(target.layers) if layer.attention is not None)
    return DrafterModel("mtp", config.model, folder, replace(target, layers=(layer,)))


def _is_embedded(name: str) -> bool:
    return name in _EMBEDDED and not Path(name).exists()


def _read_config(folder: Path, *, is_head: bool) -> ModelConfig:
    content, source = read_config_json(folder), str(folder / "config.json")
    names = content.get("architectures")
    names = [str(name) for name in names] if isinstance(names, list) else []
    if any("eagle3" in name.lower() for name in names):
        raise ValueError(f"{source}: architectures is {names!r}; EAGLE-3 heads are not supported")
    is_named_head = any("eagle" in name.lower() for name in names)
    if is_named_head and not is_head:
        raise ValueError(
            f"{source}: architectures is {names!r}, an EAGLE head, which drafts with the target's hidden states; set "
            "method to 'eagle' in speculative_config"
        )
    # a head is named like the architecture of its decoder layers, with or without Eagle somewhere in the name
    plain = [name.replace("Eagle", "") for name in names]
    return parse_model_config({**content, "architectures": plain} if is_named_head else content, {}, source)


def _check_fits(drafter: DrafterModel, target: ModelConfig) -> None:
    if drafter.config.vocab_size != target.vocab_size:
        raise ValueError(
            f"{drafter} has a vocabulary of {drafter.config.vocab_size:,} tokens and the model one of "
            f"{target.vocab_size:,}; drafts are token ids, so both must have the same tokenizer and vocabulary"
        )
    if drafter.method == "eagle" and drafter.config.hidden_size != target.hidden_size:
        raise ValueError(
            f"{drafter} has hidden_size {drafter.config.hidden_size} and the model has {target.hidden_size}; a head "
            "reads the hidden states of the model that it was trained for, and drafts for no other"
        )


_FLOAT32 = 4


def drafter_shape(
    config: EngineConfig,
    target: ModelConfig,
    found: DrafterModel | None,
    dtype: str,
    device: str,
    methods: LinearMethods = UNQUANTIZED,
) -> DrafterShape:
    """What drafts add to the memory of the last pipeline stage. ``found``: from `find_drafter`; ``dtype``: of
    the target, and so of the drafter; ``device``: ``cpu`` or ``cuda``; ``methods``: of the drafter."""
    speculative = config.speculative_config
    if speculative is None:
        return NO_DRAFTER
    if found is None:
        return DrafterShape(speculative.num_speculative_tokens)
    drafter, hidden, size = found.config, found.config.hidden_size, DTYPE_BYTES[dtype]
    embedding = drafter.vocab_size * hidden * size
    max_positions = (config.max_model_len or target.max_position_embeddings) + speculative.num_speculative_tokens
    head_dims = sum(head_dim for _, head_dim in drafter.rotary_tables(range(drafter.num_layers)))
    total = head_dims * max_positions * _FLOAT32  # the rotary tables
    is_head, prefix = found.method == "eagle", {"eagle": "", "mtp": "mtp."}.get(found.method, "model.")
    total += methods.layer_bytes(drafter, range(drafter.num_layers), dtype, prefix=prefix)
    if found.method == "mtp":
        total += methods.of(["mtp.fc"]).num_bytes(hidden, 2 * hidden, dtype) + 3 * hidden * size
    elif is_head:
        total += (
            methods.of(["fc"]).num_bytes(hidden, 2 * hidden, dtype) + hidden * size
        )  # fc with the bias, which nearly all have
        if config.pipeline_parallel_size > 1 and not target.tie_word_embeddings:
            total += embedding  # the target's is on another rank
    else:
        total += embedding + hidden * size  # and the final norm
        if not drafter.tie_word_embeddings:
            total += methods.of(["lm_head"]).num_bytes(drafter.vocab_size, hidden, dtype)
        elif device == "cpu":  # the tied head is the embedding, packed, which makes a copy
            total += embedding
    return DrafterShape(speculative.num_speculative_tokens, total, kv_cache_specs(drafter, dtype), found, methods)


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """What a drafter adds on the last pipeline stage."""

    num_drafts: int = 0
    """Draft tokens of each decode in a step."""
    weight_bytes: int = 0
    """Bytes of its model's weights on one rank."""
    kv_specs: tuple[LayerCacheSpec, ...] = ()
    """Its layers in the KV cache, with one rank's heads."""
    model: DrafterModel | None = None
    """None: the method has no model, or there is no speculative decoding."""
    linear_methods: LinearMethods = UNQUANTIZED
    """Methods of its model's layers."""


NO_DRAFTER = DrafterShape()

"""The model that drafts: found, checked against its target, and what it adds to the engine's memory. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fleetfoot.assets import embedded_eagle_path, embedded_model_path
from fleetfoot.config.engine import EMBEDDED_MODEL, EngineConfig
from fleetfoot.config.model import DTYPE_BYTES, ModelConfig, read_config_json
from fleetfoot.config.parsing import parse_model_config
from fleetfoot.config.speculative import DRAFT_METHODS, EMBEDDED_EAGLE
from fleetfoot.records.kv_layout import KVCacheSpec, kv_cache_specs
from fleetfoot.weights.hub import ModelNotFoundError, resolve_model

_EMBEDDED = {EMBEDDED_MODEL: embedded_model_path, EMBEDDED_EAGLE: embedded_eagle_path}


@dataclass(frozen=True, slots=True)
class DrafterModel:
    """A draft model, or an EAGLE head."""

    method: str
    """``draft_model`` or ``eagle``."""
    name: str
    """As in the settings, for messages."""
    folder: Path
    config: ModelConfig
    """Of an EAGLE head: the shape of its decoder layers."""

    def check_length(self, max_model_len: int) -> None:
        """Raise ValueError if the drafter has too few positions for requests of ``max_model_len`` tokens."""
        limit = self.config.max_position_embeddings
        if limit < max_model_len:
            raise ValueError(
                f"{self} has {limit:,} positions (max_position_embeddings), fewer than the max_model_len "
                f"{max_model_len:,}; set max_model_len to at most {limit}"
            )

    def __str__(self) -> str:
        return f"the {'EAGLE head' if self.method == 'eagle' else 'draft model'} {self.name!r}"


def find_drafter(config: EngineConfig, target: ModelConfig, *, config_only: bool = False) -> DrafterModel | None:
    """The model that ``speculative_config`` names; None: the method has no model.

    Args:
        target: the model that it drafts for.
        config_only: download ``config.json`` only.

    Raises:
        ValueError: a model must be named and is not, or it does not fit its method or the target.
        FileNotFoundError: there is no such model.
    """
    speculative = config.speculative_config
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
    folder = _find_folder(name, config_only=config_only)
    is_head = speculative.method == "eagle"
    found = DrafterModel(speculative.method, name, folder, _read_config(folder, is_head=is_head))
    _check_fits(found, target)
    if config.max_model_len is not None:
        found.check_length(config.max_model_len)
    return found


def _find_folder(name: str, *, config_only: bool) -> Path:
    if _is_embedded(name):
        return _EMBEDDED[name]()
    try:
        return resolve_model(name, config_only=config_only)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"speculative_config: {error}") from error


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
    config: EngineConfig, target: ModelConfig, found: DrafterModel | None, dtype: str, device: str
) -> DrafterShape:
    """What drafts add to the memory of the last pipeline stage.

    Args:
        found: from `find_drafter`.
        dtype: of weights and KV, the target's. device: ``cpu`` or ``cuda``.
    """
    speculative = config.speculative_config
    if speculative is None:
        return NO_DRAFTER
    if found is None:
        return DrafterShape(speculative.num_speculative_tokens)
    max_positions = (config.max_model_len or target.max_position_embeddings) + speculative.num_speculative_tokens
    rotary_table = max_positions * found.config.head_dim * _FLOAT32
    parameters = _num_parameters(found, target, device, has_embedding=config.pipeline_parallel_size == 1)
    return DrafterShape(
        speculative.num_speculative_tokens,
        parameters * DTYPE_BYTES[dtype] + rotary_table,
        kv_cache_specs(found.config),
        found,
    )


def _num_parameters(found: DrafterModel, target: ModelConfig, device: str, *, has_embedding: bool) -> int:
    """Weights on one rank. ``has_embedding``: whether the rank of an EAGLE head has the target's embedding."""
    config = found.config
    matrix = config.vocab_size * config.hidden_size
    layers = config.num_layers * config.layer_parameters()
    if found.method == "eagle":
        fc = 2 * config.hidden_size**2 + config.hidden_size  # with the bias, which nearly all have
        own = 0 if has_embedding or target.tie_word_embeddings else matrix
        return layers + fc + own
    # a tied head is the embedding; on a CPU it is packed, which makes a copy
    return layers + config.hidden_size + matrix * (1 if config.tie_word_embeddings and device != "cpu" else 2)


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """What a drafter adds on the last pipeline stage."""

    num_drafts: int = 0
    """Draft tokens of each decode in a step."""
    weight_bytes: int = 0
    """Of its model on one rank."""
    kv_specs: tuple[KVCacheSpec, ...] = ()
    """Its layers in the KV cache, with one rank's heads."""
    model: DrafterModel | None = None
    """None: the method has no model, or there is no speculative decoding."""

    def kv_block_bytes(self, dtype: str, block_size: int) -> int:
        """Bytes of its layers in one KV block."""
        elements = sum(spec.num_kv_heads * spec.head_dim for spec in self.kv_specs)
        return 2 * elements * DTYPE_BYTES[dtype] * block_size


NO_DRAFTER = DrafterShape()

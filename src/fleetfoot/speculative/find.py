"""Which model drafts, found and held against the one that it drafts for. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fleetfoot.assets import embedded_eagle_path, embedded_model_path
from fleetfoot.config.engine import EMBEDDED_MODEL, EngineConfig
from fleetfoot.config.model import ModelConfig, read_config_json
from fleetfoot.config.parsing import parse_model_config
from fleetfoot.config.speculative import EMBEDDED_EAGLE
from fleetfoot.weights.hub import ModelNotFoundError, resolve_model

_EMBEDDED = {EMBEDDED_MODEL: embedded_model_path, EMBEDDED_EAGLE: embedded_eagle_path}


@dataclass(frozen=True, slots=True)
class DrafterModel:
    """A draft model, or an EAGLE head."""

    method: str
    """``draft_model`` or ``eagle``."""
    name: str
    """As it was asked for, for messages."""
    folder: Path
    config: ModelConfig
    """Of an EAGLE head: the shape of its decoder layers."""

    def check_length(self, max_model_len: int) -> None:
        """Raise ValueError if it has not enough positions to draft for requests of ``max_model_len`` tokens."""
        limit = self.config.max_position_embeddings
        if limit < max_model_len:
            raise ValueError(
                f"{self} has {limit:,} positions (max_position_embeddings), fewer than the max_model_len "
                f"{max_model_len:,}; set max_model_len to at most {limit}"
            )

    def __str__(self) -> str:
        return f"the {'EAGLE head' if self.method == 'eagle' else 'draft model'} {self.name!r}"


def find_drafter(config: EngineConfig, target: ModelConfig, *, config_only: bool = False) -> DrafterModel | None:
    """The model that ``speculative_config`` names; None: there is none, for n-grams or nobody draft.

    Args:
        target: the model that it drafts for.
        config_only: download no more than says what the model is.

    Raises:
        ValueError: a model must be named and is not, or it does not fit its method or the target.
        FileNotFoundError: there is no such model.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.method == "ngram":
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
    # A head's decoder layers are those of an architecture whose name it has, with Eagle put somewhere into it or not.
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

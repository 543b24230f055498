"""What a model pools: settings, and the facts of its checkpoint. No torch.

A checkpoint is one of three kinds: a decoder (``embed``), a decoder with a head named ``score`` in place of the logits
(``classify``), and a decoder whose logits of a few tokens are scores (``classify``, with `Pooling.token_ids`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from fleetfoot.config.json_fields import ConfigError, JSONSettings

POOLING_TYPES = ("LAST", "MEAN", "CLS", "STEP", "ALL")
HEAD = "ForSequenceClassification"
"""End of the name of an architecture with a ``score`` head."""
_SENTENCE_TRANSFORMERS = {"lasttoken": "LAST", "mean_tokens": "MEAN", "cls_token": "CLS"}
_ENCODERS = ("Bert", "Roberta", "XLMRoberta", "DistilBert", "Electra", "ModernBert", "NomicBert", "GteModel", "Albert")


@dataclass(frozen=True, slots=True)
class PoolerConfig(JSONSettings):
    """``--pooler-config``: in place of what the checkpoint has; names as in vLLM."""

    setting: ClassVar[str] = "pooler_config"

    pooling_type: str | None = None
    """One of POOLING_TYPES."""
    use_activation: bool | None = None
    """Normalise embeddings; softmax or sigmoid of scores."""
    normalize: bool | None = None
    """Another name for use_activation."""
    softmax: bool | None = None
    """Another name for use_activation."""
    dimensions: int | None = None
    """The default of `PoolingParams.dimensions`."""
    step_tag_id: int | None = None
    """The default of `PoolingParams.step_tag_id`."""

    def __post_init__(self) -> None:
        JSONSettings.__post_init__(self)
        if self.pooling_type is not None and self.pooling_type not in POOLING_TYPES:
            raise ValueError(
                f"pooler_config: pooling_type is {self.pooling_type!r}; it can be {', '.join(POOLING_TYPES)}"
            )


@dataclass(frozen=True, slots=True)
class Pooling:
    """How an engine pools."""

    task: str
    """``embed`` or ``classify``."""
    pooling_type: str
    use_activation: bool = True
    num_labels: int = 0
    """Outputs of the ``score`` head."""
    token_ids: tuple[int, ...] = ()
    """Of the tokens whose logits are the scores."""
    is_sigmoid: bool = False
    """Scores are sigmoids of each output; else a softmax over all."""
    is_causal: bool = True
    dimensions: int | None = None
    matryoshka: tuple[int, ...] | None = ()
    """The numbers of elements that embeddings can have; (): any; None: only all."""
    step_tag_id: int | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks of requests; the first is the default."""
        if self.task == "embed":
            return ("embed", "token_embed", "score")
        return ("classify", "token_classify", *(["score"] if self.has_one_score else []))

    @property
    def has_one_score(self) -> bool:
        """Whether a text has one score, as of a cross-encoder."""
        return self.num_labels == 1 or bool(self.token_ids)

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether hidden states of all tokens are read, so that none can come from the prefix cache."""
        return self.pooling_type != "LAST" or not self.is_causal


def is_pooling_model(content: Mapping[str, Any], folder: Path) -> bool:
    """Whether a checkpoint is for pooling by itself: a head for scores, or made by sentence-transformers."""
    return _architecture(content).endswith(HEAD) or (folder / "modules.json").is_file()


def resolve_pooling(content: Mapping[str, Any], folder: Path, override: PoolerConfig | None) -> Pooling:
    """From ``config.json`` and the files of sentence-transformers. Raises ConfigError: it is no decoder, or pools in a
    way that is not supported."""
    name = _architecture(content)
    if name.startswith(_ENCODERS):
        raise ConfigError(
            f"{folder / 'config.json'}: {name} is an encoder; embeddings and scores are computed by decoders: Llama, "
            "Mistral or Qwen, such as Qwen/Qwen3-Embedding-0.6B"
        )
    is_causal = content.get("is_causal", True) is not False and not content.get("use_bidirectional_attention")
    pooling = Pooling("embed", "LAST" if is_causal else "MEAN", is_causal=is_causal, matryoshka=_matryoshka(content))
    if name.endswith(HEAD):
        labels = content.get("classifier_from_token")
        count = 1 if labels else _num_labels(content)
        is_sigmoid = count == 1 or content.get("problem_type") == "multi_label_classification"
        pooling = replace(
            pooling, task="classify", pooling_type="LAST", num_labels=0 if labels else count, is_sigmoid=is_sigmoid
        )
    else:
        pooling = _of_sentence_transformers(folder, pooling)
    if override is None:
        return pooling
    flags = (override.use_activation, override.normalize, override.softmax)
    activation = next((flag for flag in flags if flag is not None), pooling.use_activation)
    return replace(
        pooling,
        pooling_type=override.pooling_type or pooling.pooling_type,
        use_activation=activation,
        dimensions=override.dimensions,
        step_tag_id=override.step_tag_id,
    )


def _architecture(content: Mapping[str, Any]) -> str:
    names = content.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _num_labels(content: Mapping[str, Any]) -> int:
    labels = content.get("id2label")
    count = content.get("num_labels", len(labels) if isinstance(labels, dict) else 2)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"config.json: num_labels is {count!r}; expected an integer of at least 1")
    return count


def _matryoshka(content: Mapping[str, Any]) -> tuple[int, ...] | None:
    sizes = content.get("matryoshka_dimensions")
    if isinstance(sizes, list):
        return tuple(sizes)
    return () if content.get("is_matryoshka") else None


def _of_sentence_transformers(folder: Path, pooling: Pooling) -> Pooling:
    """With the modules of ``modules.json``: a transformer, a pooling, and perhaps a normalisation."""
    path = folder / "modules.json"
    if not path.is_file():
        return pooling
    modules = _read(path)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    for kind in kinds:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise ConfigError(f"{path}: the module {kind} is not supported; supported: Transformer, Pooling, Normalize")
    if "Pooling" in kinds:
        found = _read(folder / str(modules[kinds.index("Pooling")]["path"]) / "config.json")
        modes = [name for name, value in found.items() if name.startswith("pooling_mode_") and value is True]
        known = {f"pooling_mode_{name}": kind for name, kind in _SENTENCE_TRANSFORMERS.items()}
        if len(modes) != 1 or modes[0] not in known:
            raise ConfigError(f"{path}: pooling is {', '.join(modes) or 'missing'}; supported: {', '.join(known)}")
        pooling = replace(pooling, pooling_type=known[modes[0]])
    return replace(pooling, use_activation="Normalize" in kinds)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error

"""What a model pools: settings, and the facts of its checkpoint. No torch.

A checkpoint is one of three kinds: a decoder (``embed``), a decoder with a head named ``score`` in place of the logits
(``classify``), and a decoder where the logits of a few tokens are scores (``classify``, with `Pooling.token_ids`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from fleetfoot.config.json_fields import ConfigError, Fields, JSONSettings
from fleetfoot.config.sentence_transformers import MODULES, Projection, read_sentence_transformers
from fleetfoot.utils.validation import FieldError, checked_keywords

SEQUENCE_TYPES = ("LAST", "MEAN", "CLS")
TOKEN_TYPES = ("ALL", "STEP")
TASKS = {"embed": ("embed", "token_embed"), "classify": ("classify", "token_classify")}
"""What a model is for -> the task of sequences, and the one of tokens."""
ACTIVATION_NAMES = ("normalize", "softmax", "activation")
"""vLLM's other names of ``use_activation``."""

HEADS: dict[str, dict[str, Any]] = {
    "ForSequenceClassification": {"head": "score"},
    "ForTokenClassification": {"head": "biased_score", "prefers_tokens": True},
    "ForRewardModel": {"head": "reward", "num_labels": 1, "prefers_tokens": True, "use_activation": False},
    "ForProcessRewardModel": {
        "head": "reward", "num_labels": 2, "prefers_tokens": True, "token_pooling_type": "STEP", "step_tag_id": 151651,
    },
}  # fmt: skip
"""Ends of the names of architectures with a head named ``score``, and what they set; the token is <extra_0>."""
_ENCODERS = (
    "Albert", "Bart", "Bert", "Camembert", "CLIPModel", "Deberta", "DistilBert", "Electra", "ErnieModel", "Gte",
    "JinaBert", "Longformer", "ModernBert", "MPNet", "MT5", "NewModel", "NomicBert", "Roberta", "T5", "XLM",
)  # fmt: skip
_NVIDIA_POOLING = {"avg": "MEAN", "cls": "CLS", "last": "LAST"}
_METHODS = ("from_2_way_softmax", "no_post_processing")


@checked_keywords
@dataclass(frozen=True, slots=True)
class PoolerConfig(JSONSettings):
    """``--pooler-config``: in place of what the checkpoint has; names as in vLLM. None: as the checkpoint has it."""

    setting: ClassVar[str] = "pooler_config"
    advice: ClassVar[Mapping[str, str]] = {
        "enable_chunked_processing": "a text has at most max_model_len tokens; truncate_prompt_tokens cuts longer ones",
        "max_embed_len": "a text has at most max_model_len tokens; truncate_prompt_tokens cuts longer ones",
        "logit_bias": "it is logit_mean",
        "logit_scale": "set logit_sigma to its inverse",
    }
    unsupported: ClassVar[Mapping[str, Any]] = {
        name: (False if name == "enable_chunked_processing" else None, text) for name, text in advice.items()
    }

    task: str | None = None
    """The default of `PoolingParams.task`."""
    pooling_type: str | None = None
    """One of SEQUENCE_TYPES or TOKEN_TYPES; the latter make tasks of tokens the default."""
    seq_pooling_type: str | None = None
    """One of SEQUENCE_TYPES."""
    tok_pooling_type: str | None = None
    """One of TOKEN_TYPES."""
    use_activation: bool | None = None
    """The default of `PoolingParams.use_activation`."""
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    """Other names for use_activation."""
    dimensions: int | None = None
    """The default of `PoolingParams.dimensions`."""
    step_tag_id: int | None = None
    """The default of `PoolingParams.step_tag_id`."""
    returned_token_ids: tuple[int, ...] | None = field(default=None, metadata={"record": tuple})
    """The logits of these tokens are scores of classes."""
    logit_mean: float | None = None
    """Subtracted from logits before the activation."""
    logit_sigma: float | None = None
    """Logits are divided by it before the activation."""

    def __post_init__(self) -> None:
        JSONSettings.__post_init__(self)
        for name, known in (
            ("pooling_type", (*SEQUENCE_TYPES, *TOKEN_TYPES)),
            ("seq_pooling_type", SEQUENCE_TYPES),
            ("tok_pooling_type", TOKEN_TYPES),
            ("task", tuple(task for tasks in TASKS.values() for task in tasks)),
        ):
            if (value := getattr(self, name)) is not None and value not in known:
                raise ValueError(f"pooler_config: {name} is {value!r}; it can be {', '.join(known)}")
        ids = self.returned_token_ids
        if ids is not None:
            if not isinstance(ids, list | tuple) or not ids or not all(type(token) is int for token in ids):
                raise ValueError(f"pooler_config: returned_token_ids is {ids!r}; it must be a list of token ids")
            object.__setattr__(self, "returned_token_ids", tuple(ids))
        if self.logit_sigma == 0:
            raise ValueError("pooler_config: logit_sigma is 0; logits are divided by it")
        object.__setattr__(self, "use_activation", merge_activation(self, "pooler_config: "))


def merge_activation(settings: Any, prefix: str = "") -> bool | None:
    """``use_activation``, which may have been given by one of ACTIVATION_NAMES. Raises ValueError: they differ."""
    given = {name: getattr(settings, name) for name in ("use_activation", *ACTIVATION_NAMES)}
    given = {name: value for name, value in given.items() if value is not None}
    if len(set(given.values())) > 1:
        first, *others = given
        raise FieldError(
            f"{prefix}{first}", f"and {' and '.join(others)} differ; they mean the same: leave all but one out"
        )
    return next(iter(given.values()), None)


@dataclass(frozen=True, slots=True)
class Pooling:
    """How an engine pools."""

    task: str
    """``embed`` or ``classify``."""
    size: int
    """Elements of an embedding, or scores."""
    pooling_type: str = "LAST"
    """How a prompt is pooled; one of SEQUENCE_TYPES."""
    token_pooling_type: str = "ALL"
    """The tokens of a prompt that are returned: ALL of them, or those that are the STEP tag."""
    prefers_tokens: bool = False
    """Whether the task of tokens is the default."""
    activation: str = "normalize"
    """``normalize`` (to length 1), ``softmax``, ``sigmoid`` or ``identity``."""
    use_activation: bool = True
    """Whether it is applied unless a request sets it."""
    head: str = "none"
    """After the final norm: see `ModelConfig.head`."""
    num_labels: int = 0
    """Outputs of a ``score`` or ``reward`` head."""
    token_ids: tuple[int, ...] = ()
    """Tokens with logits that are scores."""
    is_difference: bool = False
    """Whether the score is the second token's logit minus that of the first, as of Qwen3-Reranker."""
    logit_mean: float = 0.0
    logit_sigma: float = 1.0
    """The activation is of ``(score - logit_mean) / logit_sigma``."""
    is_causal: bool = True
    dimensions: int | None = None
    matryoshka: tuple[int, ...] | None = ()
    """The numbers of elements that embeddings can have; (): any; None: only all."""
    truncate_dim: int | None = None
    """Elements of an embedding that are kept, after the normalisation, unless a request has ``dimensions``."""
    projections: tuple[Projection, ...] = ()
    """Between pooling and normalisation."""
    step_tag_id: int | None = None
    prompts: tuple[tuple[str, str], ...] = ()
    """Names, and texts that are put before a text."""
    default_prompt: str | None = None
    """The name of the prompt of requests without one."""
    uses_chat_template: bool = False
    """Whether texts are rendered with the tokenizer's chat template."""
    use_sep_token: bool = True
    """Whether the tokenizer joins the texts of a pair; else the second follows the first."""
    max_length: int | None = None
    """Most tokens of a text, if fewer than the model has positions for."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks of requests; the first is the default."""
        tasks = TASKS[self.task][:: -1 if self.prefers_tokens else 1]
        return (*tasks, "score") if self.task == "embed" or self.size == 1 else tasks

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether hidden states of all tokens are read, so that none can come from the prefix cache."""
        return self.pooling_type != "LAST" or not self.is_causal


def is_pooling_model(content: Mapping[str, Any], folder: Path, base_models: tuple[str, ...] = ()) -> bool:
    """Whether a checkpoint is for pooling by itself: a head for scores, no head, bidirectional attention, or made by
    sentence-transformers. ``base_models``: names of architectures without a head."""
    name = _architecture(content)
    is_special = name.endswith(tuple(HEADS)) or bool(content.get("classifier_from_token")) or is_bidirectional(content)
    return is_special or name.replace("Bidirectional", "") in base_models or (folder / MODULES).is_file()


def is_bidirectional(content: Mapping[str, Any]) -> bool:
    """Whether tokens attend to later ones too, and so generate no text."""
    is_set = content.get("is_causal") is False or bool(content.get("use_bidirectional_attention"))
    return is_set or "Bidirectional" in _architecture(content)


def decoder_name(name: str) -> str:
    """The architecture without its head, or with logits: ``Qwen2ForRewardModel`` -> ``Qwen2ForCausalLM``."""
    for head in HEADS:
        name = name.removesuffix(head) + "ForCausalLM" if name.endswith(head) else name
    return name.replace("Bidirectional", "")


def check_is_decoder(content: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError for an encoder, or an encoder-decoder."""
    name = _architecture(content) or str(content.get("model_type", ""))
    is_encoder = name.lower().startswith(tuple(map(str.lower, _ENCODERS)))
    if is_encoder or content.get("is_encoder_decoder") is True:
        kind = "an encoder" if is_encoder and not content.get("is_encoder_decoder") else "an encoder-decoder"
        raise ConfigError(
            f"{source}: {name} is {kind}, which is not supported; text, embeddings and scores are computed by decoders "
            "(Llama, Mistral, Qwen, ...), such as Qwen/Qwen3-Embedding-0.6B, intfloat/e5-mistral-7b-instruct or "
            "Qwen/Qwen3-Reranker-0.6B"
        )


def resolve_pooling(
    content: Mapping[str, Any], folder: Path, override: PoolerConfig | None, *, hidden_size: int, vocab_size: int
) -> Pooling:
    """From ``config.json`` and the files of sentence-transformers. ``token_ids`` of ``classifier_from_token`` are not
    looked up (`classifier_tokens`). Raises ConfigError: the checkpoint pools in a way that is not supported."""
    name, fields = _architecture(content), Fields(content, {}, str(folder / "config.json"))
    is_causal = not is_bidirectional(content)
    given = read_sentence_transformers(folder)
    activation_fn, override = given.pop("activation_fn", None), override or PoolerConfig()
    pooling = Pooling(
        "embed", hidden_size, "LAST" if is_causal else "MEAN", is_causal=is_causal,
        matryoshka=_matryoshka(fields),
    )  # fmt: skip
    if "Bidirectional" in name and content.get("pooling") in _NVIDIA_POOLING:
        pooling = replace(pooling, pooling_type=_NVIDIA_POOLING[content["pooling"]])
    pooling = replace(pooling, **given)
    head = next((facts for end, facts in HEADS.items() if name.endswith(end)), None)
    if tokens := classifier_tokens(fields):
        pooling = replace(
            pooling, token_ids=tuple(range(len(tokens))), is_difference=_method(fields, tokens) == _METHODS[0]
        )
    elif override.returned_token_ids is not None:
        pooling = replace(pooling, token_ids=override.returned_token_ids)
    elif pooling.token_ids:  # of LogitScore
        pooling = replace(pooling, is_difference=len(pooling.token_ids) == 2)
    elif head is not None:
        pooling = replace(pooling, **{"num_labels": _num_labels(fields), **head})
        if (pooling.step_tag_id or 0) >= vocab_size:  # a reduced vocabulary
            pooling = replace(pooling, step_tag_id=None)
    if pooling.token_ids or pooling.num_labels:
        size = pooling.num_labels or (1 if pooling.is_difference else len(pooling.token_ids))
        sigma = content.get("temperature") if "Bidirectional" in name else None
        pooling = replace(
            pooling, task="classify", size=size, activation=_activation(fields, activation_fn, size),
            head="logits" if pooling.token_ids else pooling.head, logit_sigma=sigma or 1.0,
            use_activation=head is None or head.get("use_activation", True),
            use_sep_token=bool(content.get("use_sep_token", content.get("use_pad_token", not tokens))),
        )  # fmt: skip
    elif pooling.projections:
        pooling = replace(pooling, size=pooling.projections[-1].out_features)
    return _overridden(pooling, override)


def _overridden(pooling: Pooling, override: PoolerConfig) -> Pooling:
    kind = override.pooling_type
    sequence = override.seq_pooling_type or (kind if kind in SEQUENCE_TYPES else None)
    token = override.tok_pooling_type or (kind if kind in TOKEN_TYPES else None)
    named: dict[str, Any] = {"pooling_type": sequence, "token_pooling_type": token}
    if kind in TOKEN_TYPES:
        named["prefers_tokens"] = True
    if override.task is not None:
        if override.task not in TASKS[pooling.task]:
            raise ValueError(
                f"pooler_config: task is {override.task!r}; with this model it can be {', '.join(TASKS[pooling.task])}"
            )
        named["prefers_tokens"] = override.task.startswith("token_")
    for name in ("use_activation", "dimensions", "step_tag_id", "logit_mean", "logit_sigma"):
        named[name] = getattr(override, name)
    if override.dimensions is not None:
        check_dimensions(override.dimensions, pooling, "pooler_config: ")
    if pooling.task == "embed" and (override.logit_mean is not None or override.logit_sigma is not None):
        raise ValueError("pooler_config: logit_mean and logit_sigma are of scores, and this model has embeddings")
    return replace(pooling, **{name: value for name, value in named.items() if value is not None})


def check_dimensions(dimensions: int, pooling: Pooling, prefix: str = "") -> None:
    """Raise ValueError unless embeddings can have so many elements."""
    sizes, field, what = pooling.matryoshka, f"{prefix}dimensions", f"is {dimensions}"
    if pooling.task != "embed":
        raise FieldError(field, f"{what}, but this model has no embeddings; leave it out", dimensions)
    if sizes is None:
        raise FieldError(
            field,
            f"{what}, but the model's config has no matryoshka dimensions; hf_overrides={{'is_matryoshka': True}} "
            "declares that its embeddings can be cut",
            dimensions,
        )
    if sizes and dimensions not in sizes:
        raise FieldError(field, f"{what}; it can be {', '.join(map(str, sizes))}", dimensions)
    if dimensions > pooling.size:
        problem = f"{what}, and embeddings have {pooling.size} elements; it can be 1 to {pooling.size}"
        raise FieldError(field, problem, dimensions)


def classifier_tokens(fields: Fields) -> list[str]:
    """``classifier_from_token``: tokens, the logits of which are scores; empty if there are none."""
    tokens = fields.raw("classifier_from_token")
    if tokens is None or tokens == []:
        return []
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise fields.error("classifier_from_token", "expected a list of tokens, such as ['no', 'yes']")
    return tokens


def _method(fields: Fields, tokens: list[str]) -> str:
    """How logits of tokens become scores; vLLM's names."""
    default = _METHODS[0] if fields.raw("is_original_qwen3_reranker") or len(tokens) == 2 else _METHODS[1]
    method = fields.raw("method") or default
    if method not in _METHODS:
        raise fields.error("method", f"supported: {', '.join(_METHODS)}")
    if method == _METHODS[0] and len(tokens) != 2:
        raise fields.error("classifier_from_token", "expected two tokens, of which the second is yes")
    return str(method)


def _architecture(content: Mapping[str, Any]) -> str:
    names = content.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _num_labels(fields: Fields) -> int:
    labels = fields.raw("id2label")
    if fields.raw("num_labels") is None:
        return len(labels) if isinstance(labels, dict) and labels else 2
    return fields.integer("num_labels")


def _activation(fields: Fields, activation_fn: Any, size: int) -> str:
    """The activation of scores: by ``problem_type``, else that of a cross-encoder, else by the number of labels."""
    own = "sigmoid" if size == 1 else "softmax"
    kinds = {
        "regression": "identity",
        "single_label_classification": own,
        "multi_label_classification": "sigmoid",
    }
    if (problem := fields.raw("problem_type")) is not None:
        if problem not in kinds:
            raise fields.error("problem_type", f"expected {', '.join(kinds)}")
        return kinds[problem]
    default = fields.raw("sbert_ce_default_activation_function")
    name = activation_fn or fields.mapping("sentence_transformers").get("activation_fn") or default
    known = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "identity"}
    if name is None:
        return own
    if (last := str(name).rpartition(".")[2]) not in known:
        raise ConfigError(f"{fields.source}: the activation of scores is {name!r}; supported: {', '.join(known)}")
    return known[last]


def _matryoshka(fields: Fields) -> tuple[int, ...] | None:
    sizes = fields.raw("matryoshka_dimensions")
    if sizes is None:
        return () if fields.raw("is_matryoshka") else None
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise fields.error("matryoshka_dimensions", "expected a list of sizes")
    return tuple(sizes)

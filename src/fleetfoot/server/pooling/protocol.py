"""Bodies of the endpoints of models that pool: OpenAI's embeddings, and vLLM's pooling, classification, scores and
reranking. The latter is the shape of Jina's and Cohere's APIs, too."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fleetfoot.server.openai.protocol import Usage


def now() -> int:
    return int(time.time())


class PoolingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that all share. Those of the same name are parameters of `PoolingParams`."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    prompt_name: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None
    """No effect."""


class PromptFields(PoolingFields, kw_only=True):
    """Fields of endpoints that read prompts, or one conversation."""

    input: str | list[str | int | list[int]] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(PromptFields, kw_only=True):
    """``POST /v1/embeddings``."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class ClassificationRequest(PromptFields, kw_only=True):
    """``POST /classify``."""


class PoolingRequest(PromptFields, kw_only=True):
    """``POST /pooling``."""

    task: Literal["embed", "classify", "score", "token_embed", "token_classify"] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None


class ScoreRequest(PoolingFields, kw_only=True):
    """``POST /score``: one text for all others, or as many; under one of three pairs of names."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    chat_template: str | None = None


class RerankDocument(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class RerankRequest(PoolingFields, kw_only=True):
    """``POST /rerank``."""

    query: str
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """0: all."""
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=0)] | None = None
    """Documents are cut to so many tokens; 0: they are not."""
    chat_template: str | None = None


# --- responses --------------------------------------------------------------------------------------------------------


class _List(msgspec.Struct, kw_only=True):
    """What lists of results share."""

    id: str
    object: Literal["list"] = "list"
    created: int = msgspec.field(default_factory=now)
    model: str
    usage: Usage


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class Embeddings(_List, kw_only=True):
    data: list[Embedding]


class Classification(msgspec.Struct):
    index: int
    label: str
    """The label of the class with the highest probability."""
    probs: list[float]
    num_classes: int


class Classifications(_List, kw_only=True):
    data: list[Classification]


class Pooled(msgspec.Struct):
    index: int
    data: list[float | list[float]] | str
    """The values of a prompt, or of each of its tokens."""
    object: Literal["pooling"] = "pooling"


class PooledList(_List, kw_only=True):
    data: list[Pooled]


class Score(msgspec.Struct):
    index: int
    score: float
    object: Literal["score"] = "score"


class Scores(_List, kw_only=True):
    data: list[Score]


class RerankResult(msgspec.Struct):
    index: int
    """The place of the document in the request."""
    relevance_score: float
    document: RerankedDocument | msgspec.UnsetType = msgspec.UNSET


class RerankedDocument(msgspec.Struct):
    text: str


class RerankResponse(msgspec.Struct):
    """Results by falling score."""

    id: str
    model: str
    usage: Usage
    results: list[RerankResult]

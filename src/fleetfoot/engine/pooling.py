"""The calls of `fleetfoot.LLM` and `fleetfoot.AsyncLLM` for vectors and scores. Signatures follow vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from fleetfoot.compat.names import check_call_keywords
from fleetfoot.config.pooling import Pooling
from fleetfoot.engine.input_processor import InputProcessor
from fleetfoot.engine.pooling_texts import PoolingTexts
from fleetfoot.inputs import PromptType
from fleetfoot.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from fleetfoot.records.pooling_params import PoolingParams
from fleetfoot.utils.validation import FieldError, FieldTypeError

Params = PoolingParams | Sequence[PoolingParams] | None
Progress = bool | Callable[..., Any]
Text = str | Mapping[str, Any]
"""A text of a pair, or a dictionary with a ``prompt`` or ``prompt_token_ids``."""


class PoolingCalls:
    """Mixed into `fleetfoot.LLM`. All of them raise ValueError for a model or a task that does not fit, and refuse
    ``unknown`` keywords, except neutral values of vLLM's (``lora_request=None``)."""

    llm_engine: Any

    def _pool(self, prompts: Any, params: Any, use_tqdm: Progress) -> list[PoolingRequestOutput]:
        raise NotImplementedError

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: Params = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Progress = True,
        pooling_task: str | None = None,
        **unknown: Any,
    ) -> list[PoolingRequestOutput]:
        """Pool one prompt or many.

        Args:
            pooling_params: for all prompts, or one for each.
            truncate_prompt_tokens: as of `PoolingParams`.
            pooling_task: ``embed``, ``classify``, ``score``, or of each token ``token_embed``, ``token_classify``;
                None: what the model is for.

        Returns:
            ``outputs.data`` is a float32 tensor ``[dimensions]`` or ``[num_labels]``; of tokens, with ``num_tokens``
            before.
        """
        self._check_pools(self.encode, pooling_task, unknown)
        return self._pool(prompts, _with_task(pooling_params, pooling_task, truncate_prompt_tokens), use_tqdm)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        pooling_params: Params = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Progress = True,
        **unknown: Any,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt: ``outputs.embedding``."""
        self._check_pools(self.embed, "embed", unknown)
        outputs = self._pool(prompts, _with_task(pooling_params, "embed", truncate_prompt_tokens), use_tqdm)
        return [as_embedding(output) for output in outputs]

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        pooling_params: Params = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Progress = True,
        **unknown: Any,
    ) -> list[ClassificationRequestOutput]:
        """A probability of each class for each prompt: ``outputs.probs``."""
        self._check_pools(self.classify, "classify", unknown)
        outputs = self._pool(prompts, _with_task(pooling_params, "classify", truncate_prompt_tokens), use_tqdm)
        return [as_classes(output) for output in outputs]

    def reward(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        pooling_params: Params = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Progress = True,
        **unknown: Any,
    ) -> list[PoolingRequestOutput]:
        """The scores of a reward model for each token, or for the tokens of ``step_tag_id``: ``outputs.data``."""
        self._check_pools(self.reward, "token_classify", unknown)
        return self._pool(prompts, _with_task(pooling_params, "token_classify", truncate_prompt_tokens), use_tqdm)

    def score(
        self,
        data_1: Text | Sequence[Text],
        data_2: Text | Sequence[Text],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Progress = True,
        chat_template: str | None = None,
        **unknown: Any,
    ) -> list[ScoringRequestOutput]:
        """The similarity of pairs of texts: ``outputs.score``.

        A cross-encoder reads both texts of a pair. With a model for embeddings, it is the cosine of two vectors.

        Args:
            data_1: one text for all of ``data_2``, or one for each.
            chat_template: Jinja source that joins a pair for a cross-encoder, from messages of the roles ``query`` and
                ``document``; None: the tokenizer joins them, or the way that the checkpoint sets.
        """
        self._check_pools(self.score, "score", unknown)
        first, second = (_texts(name, data) for name, data in (("data_1", data_1), ("data_2", data_2)))
        if len(first) not in (1, len(second)) or not second:
            raise FieldError(
                "data_2", f"has {len(second)} texts, and data_1 {len(first)}; data_1 must have one, or as many", data_2
            )
        if not (pooling_params is None or isinstance(pooling_params, PoolingParams)):
            raise FieldTypeError(
                "pooling_params", f"is {pooling_params!r}; it must be a PoolingParams, for all pairs", pooling_params
            )
        processor = self.llm_engine.input_processor
        params = _with_task(pooling_params, None, truncate_prompt_tokens)
        prompts, params = pair_prompts(processor, first, second, params, chat_template)
        return pair_scores(processor, len(first), self._pool(prompts, params, use_tqdm))

    def _check_pools(self, method: Callable[..., Any], task: str | None, unknown: dict[str, Any]) -> None:
        check_pools(f"LLM.{method.__name__}", self.llm_engine.input_processor.pooling, method, task, unknown)


def check_pools(
    call: str, pooling: Pooling | None, method: Callable[..., Any], task: str | None, unknown: Mapping[str, Any]
) -> None:
    """Raise TypeError for keywords that ``method`` does not have, and ValueError if the engine generates or its model
    does not have the task; ``call``: its name, for messages."""
    check_call_keywords(call, method, unknown)
    if pooling is None:
        raise FieldError(
            call,
            "needs a model for pooling, and this one generates; start it with runner='pooling' for embeddings, "
            "or take a checkpoint with a head for scores",
        )
    if task is not None and task not in pooling.tasks:
        hint = " (scores of pairs need embeddings, or one label)" if task == "score" else ""
        raise FieldError(
            call,
            f"needs the task {task!r}; this model has {', '.join(pooling.tasks)}{hint}; "
            "LLM.encode(pooling_task=...) has all of them",
        )


def as_embedding(output: PoolingRequestOutput) -> EmbeddingRequestOutput:
    return replace(output, outputs=EmbeddingOutput(output.outputs.data.tolist()))


def as_classes(output: PoolingRequestOutput) -> ClassificationRequestOutput:
    return replace(output, outputs=ClassificationOutput(output.outputs.data.tolist()))


def as_score(output: PoolingRequestOutput) -> ScoringRequestOutput:
    values = output.outputs.data.tolist()
    return replace(output, outputs=ScoringOutput(values[0] if values else float("nan")))


def _async_call(task: str, convert: Callable[[PoolingRequestOutput], Any]) -> Any:
    """As the call of `PoolingCalls`, for one prompt: a generator of its output. ``options``: those of
    `AsyncPoolingCalls.encode`."""

    async def call(
        self: AsyncPoolingCalls,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[Any, None]:
        outputs = self.encode(prompt, pooling_params, request_id, **{**options, "pooling_task": task})
        async with aclosing(outputs):
            async for output in outputs:
                yield convert(output)

    return call


class AsyncPoolingCalls:
    """Mixed into `fleetfoot.AsyncLLM`: generators of one output, as `encode`. The output of an aborted request has no
    elements, or a score that is not a number."""

    _engine: Any
    _pooling_numbers: Iterator[int]

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> Any:
        raise NotImplementedError

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        pooling_task: str | None = None,
        **unknown: Any,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """The vector or the scores of a prompt, as the only output; as `LLM.encode` and `generate` else.

        Args:
            request_id: unique among unfinished requests; None: a number.
        """
        check_pools("AsyncLLM.encode", self._pooling, self.encode, pooling_task, unknown)
        params = _with_task(pooling_params, pooling_task, truncate_prompt_tokens)
        request_id = f"pooling-{next(self._pooling_numbers)}" if request_id is None else request_id
        async with aclosing(self.generate(prompt, params, request_id, priority=priority)) as outputs:
            async for output in outputs:
                yield cast("PoolingRequestOutput", output)

    embed = _async_call("embed", as_embedding)
    classify = _async_call("classify", as_classes)
    reward = _async_call("token_classify", lambda output: output)

    async def score(
        self,
        data_1: Text,
        data_2: Text,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[ScoringRequestOutput, None]:
        """As `LLM.score`, for one pair. ``options``: those of `encode`.

        A model for embeddings runs two requests; the second has the id ``{request_id}-2``.
        """
        check_pools("AsyncLLM.score", self._pooling, self.score, "score", {})
        first, second = (_text(name, data) for name, data in (("data_1", data_1), ("data_2", data_2)))
        processor: InputProcessor = self._engine.input_processor
        assert processor.pooling is not None
        task = score_task(processor.pooling, chat_template)
        params = _with_task(pooling_params, task, truncate_prompt_tokens)
        request_id = f"pooling-{next(self._pooling_numbers)}" if request_id is None else request_id
        if processor.pooling.task == "embed":
            left, right = (
                self.encode(cast("PromptType", text), params, name, **options)
                for text, name in ((first, request_id), (second, f"{request_id}-2"))
            )
            async with aclosing(left), aclosing(right):
                pair: list[Any] = await asyncio.gather(anext(left), anext(right), return_exceptions=True)
            if failed := [entry for entry in pair if isinstance(entry, BaseException)]:
                raise failed[0]
            yield cosine(pair[0], pair[1], _pad_token_id(processor))
            return
        prompt: Any = pair_prompt(processor, first, second, params, chat_template)
        async with aclosing(self.encode(prompt, replace(params, prompt_name=None), request_id, **options)) as outputs:
            async for output in outputs:
                yield as_score(output)

    @property
    def _pooling(self) -> Pooling | None:
        return self._engine.input_processor.pooling


def score_task(pooling: Pooling, chat_template: str | None) -> str:
    """The task of the requests of a call of ``score``. Raises ValueError: there is nothing that a template joins."""
    if pooling.task != "embed":
        return "score"
    if chat_template is not None:
        raise FieldError("chat_template", "joins pairs for cross-encoders, and this model has embeddings; leave it out")
    return "embed"


def pair_prompts(
    processor: InputProcessor, first: list[Any], second: list[Any], params: PoolingParams, template: str | None
) -> tuple[list[Any], PoolingParams]:
    """The prompts that score pairs, and their parameters: those of the pairs for a cross-encoder, else all texts.

    Args:
        first: one for all of ``second``, or as many.
    """
    assert processor.pooling is not None
    task = score_task(processor.pooling, template)
    params = _with_task(params, task, None)
    if task == "embed":
        return [*first, *second], params
    first = first * len(second) if len(first) == 1 else first
    prompts = [pair_prompt(processor, *pair, params, template) for pair in zip(first, second, strict=True)]
    return prompts, replace(params, prompt_name=None)


def pair_conversations(
    processor: InputProcessor, first: list[str], second: list[str], params: PoolingParams
) -> list[list[dict[str, str]]]:
    """The conversations of `pair_prompts`, for a template that is rendered elsewhere. Raises ValueError."""
    assert processor.pooling is not None
    score_task(processor.pooling, "")
    first = first * len(second) if len(first) == 1 else first
    return [_texts_of(processor).pair_messages(*pair, params) for pair in zip(first, second, strict=True)]


def rendered_prompts(
    processor: InputProcessor, texts: list[str], params: PoolingParams
) -> tuple[list[Any], PoolingParams]:
    """The results of `pair_prompts` for what a template has made of `pair_conversations`."""
    params = replace(_with_task(params, "score", None), prompt_name=None)
    return [{"prompt_token_ids": _texts_of(processor).encode(text, params)} for text in texts], params


def pair_scores(processor: InputProcessor, num_first: int, outputs: list[Any]) -> list[ScoringRequestOutput]:
    """The scores of pairs, from the outputs of `pair_prompts`."""
    assert processor.pooling is not None
    if processor.pooling.task != "embed":
        return [as_score(output) for output in outputs]
    left, right = outputs[:num_first], outputs[num_first:]
    left = left * len(right) if len(left) == 1 else left
    return [cosine(*pair, _pad_token_id(processor)) for pair in zip(left, right, strict=True)]


def pair_prompt(
    processor: InputProcessor, first: Text, second: Text, params: PoolingParams, template: str | None
) -> dict[str, Any]:
    """The prompt of a cross-encoder for a pair. Raises ValueError: there is no tokenizer, or a template fails."""
    texts = _texts_of(processor)
    pair: list[str] = []
    for data in (first, second):
        content = {"prompt": data} if isinstance(data, str) else data
        text = content.get("prompt")
        pair.append(texts.tokenizer.decode(content["prompt_token_ids"]) if text is None else text)
    return {"prompt_token_ids": texts.tokenize_pair(pair[0], pair[1], params, template)}


def _texts_of(processor: InputProcessor) -> PoolingTexts:
    if processor.pooling_texts is None:
        raise ValueError("this engine has no tokenizer (skip_tokenizer_init=True), which pairs of texts need")
    return processor.pooling_texts


def cosine(left: PoolingRequestOutput, right: PoolingRequestOutput, pad_token_id: int | None) -> ScoringRequestOutput:
    """The similarity of two embeddings; the ids of their prompts have the padding token between them, as in vLLM."""
    import torch.nn.functional as F

    vectors, pad = (left.outputs.data, right.outputs.data), [] if pad_token_id is None else [pad_token_id]
    is_whole = all(len(vector) for vector in vectors)
    return replace(
        left,
        request_id=f"{left.request_id}_{right.request_id}",
        outputs=ScoringOutput(float(F.cosine_similarity(*vectors, dim=0)) if is_whole else float("nan")),
        prompt_token_ids=[*left.prompt_token_ids, *pad, *right.prompt_token_ids],
        num_cached_tokens=left.num_cached_tokens + right.num_cached_tokens,
        finish_reason=left.finish_reason if len(vectors[0]) == 0 else right.finish_reason,
    )


def _pad_token_id(processor: InputProcessor) -> int | None:
    return None if processor.tokenizer is None else processor.tokenizer.pad_token_id


def _texts(name: str, data: Any) -> list[Any]:
    if isinstance(data, str | Mapping):
        return [_text(name, data)]
    if not isinstance(data, Sequence):
        raise FieldTypeError(name, f"is {data!r:.200}; it must be a text or a list of texts", data)
    return [_text(f"{name}[{index}]", text) for index, text in enumerate(data)]


def _text(name: str, data: Any) -> Text:
    is_dict = isinstance(data, Mapping) and any(data.get(key) is not None for key in ("prompt", "prompt_token_ids"))
    if not isinstance(data, str) and not is_dict:
        raise FieldTypeError(
            name, f"is {data!r:.200}; it must be a text, or a dictionary with 'prompt' or 'prompt_token_ids'", data
        )
    return data


def _with_task(params: Params, task: str | None, truncate_prompt_tokens: int | None) -> Any:
    """``params``, or those of each prompt, with a task and a length that are not None."""

    def changed(entry: PoolingParams) -> PoolingParams:
        if not isinstance(entry, PoolingParams):  # refused with the others
            return entry
        if task is not None and entry.task not in (None, task):
            raise FieldError(
                "task",
                f"is {entry.task!r} in pooling_params, and the call is for {task!r}; leave it out there",
                entry.task,
            )
        changes = {"task": task, "truncate_prompt_tokens": truncate_prompt_tokens}
        return entry.clone(**{name: value for name, value in changes.items() if value is not None})

    if isinstance(params, Sequence):
        return [changed(entry) for entry in params]
    return changed(PoolingParams() if params is None else params)

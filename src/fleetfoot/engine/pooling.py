"""The calls of `fleetfoot.LLM` for vectors and scores. Signatures follow vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F

from fleetfoot.config.vllm_names import check_call_keywords
from fleetfoot.engine.engine import LLMEngine
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

Params = PoolingParams | Sequence[PoolingParams] | None
Progress = bool | Callable[..., Any]


class PoolingCalls:
    """Mixed into `fleetfoot.LLM`. All of them raise ValueError for a model or a task that does not fit, and refuse
    ``unknown`` keywords, except neutral values of vLLM's (``lora_request=None``)."""

    llm_engine: LLMEngine

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
        changes = {"task": pooling_task, "truncate_prompt_tokens": truncate_prompt_tokens}
        return self._pool(prompts, _with_changes(pooling_params, changes), use_tqdm)

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
        changes = {"task": "embed", "truncate_prompt_tokens": truncate_prompt_tokens}
        outputs = self._pool(prompts, _with_changes(pooling_params, changes), use_tqdm)
        return [replace(output, outputs=EmbeddingOutput(output.outputs.data.tolist())) for output in outputs]

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        pooling_params: Params = None,
        use_tqdm: Progress = True,
        **unknown: Any,
    ) -> list[ClassificationRequestOutput]:
        """A probability of each class for each prompt: ``outputs.probs``."""
        self._check_pools(self.classify, "classify", unknown)
        outputs = self._pool(prompts, _with_changes(pooling_params, {"task": "classify"}), use_tqdm)
        return [replace(output, outputs=ClassificationOutput(output.outputs.data.tolist())) for output in outputs]

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
        changes = {"task": "token_classify", "truncate_prompt_tokens": truncate_prompt_tokens}
        return self._pool(prompts, _with_changes(pooling_params, changes), use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Progress = True,
        **unknown: Any,
    ) -> list[ScoringRequestOutput]:
        """The similarity of pairs of texts: ``outputs.score``.

        A cross-encoder reads both texts of a pair. With a model for embeddings, it is the cosine of two vectors.

        Args:
            data_1: one text for all of ``data_2``, or one for each.
        """
        self._check_pools(self.score, "score", unknown)
        first, second = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
        first = first * len(second) if len(first) == 1 else first
        if len(first) != len(second) or not second:
            raise ValueError(f"data_1 has {len(first)} texts and data_2 {len(second)}; expected one, or as many")
        changes = {"task": "score", "truncate_prompt_tokens": truncate_prompt_tokens}
        params = _with_changes(pooling_params, changes)
        if self._pooling.task == "embed":
            params = replace(params, task="embed") if isinstance(params, PoolingParams) else params
            pairs = self._pool([*first, *second], params, use_tqdm)
            halves = zip(pairs[: len(first)], pairs[len(first) :], strict=True)
            return [_cosine(left, right) for left, right in halves]
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise ValueError("this engine has no tokenizer (skip_tokenizer_init=True), which pairs of texts need")
        prompts = [{"prompt_token_ids": tokenizer.encode(*pair)} for pair in zip(first, second, strict=True)]
        outputs = self._pool(prompts, params, use_tqdm)
        return [replace(output, outputs=ScoringOutput(float(output.outputs.data.reshape(())))) for output in outputs]

    @property
    def _pooling(self) -> Any:
        return self.llm_engine.input_processor.pooling

    def _check_pools(self, method: Callable[..., Any], task: str | None, unknown: dict[str, Any]) -> None:
        call = method.__name__
        check_call_keywords(f"LLM.{call}", method, unknown)
        if self._pooling is None:
            raise ValueError(
                f"LLM.{call} needs a model for pooling, and this one generates; start it with runner='pooling'"
            )
        if task is not None and task not in self._pooling.tasks:
            known = ", ".join(self._pooling.tasks)
            raise ValueError(
                f"LLM.{call} needs the task {task!r}; this model has {known} (LLM.encode(pooling_task=...))"
            )


def _with_changes(params: Params, changes: dict[str, Any]) -> Any:
    """``params``, or those of each prompt, with the values of ``changes`` that are not None."""
    given = {name: value for name, value in changes.items() if value is not None}
    if isinstance(params, Sequence):
        return [entry.clone(**given) if isinstance(entry, PoolingParams) else entry for entry in params]
    params = PoolingParams() if params is None else params
    return params.clone(**given) if isinstance(params, PoolingParams) else params


def _cosine(left: PoolingRequestOutput, right: PoolingRequestOutput) -> ScoringRequestOutput:
    score = F.cosine_similarity(left.outputs.data, right.outputs.data, dim=0)
    ids = [*left.prompt_token_ids, *right.prompt_token_ids]
    return replace(left, outputs=ScoringOutput(float(score)), prompt_token_ids=ids)

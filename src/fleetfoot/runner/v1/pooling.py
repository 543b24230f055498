"""Pooling on Model Runner V1: a vector or scores of each prompt, from its hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fleetfoot.config.pooling import Pooling
from fleetfoot.models.interface import CausalLM
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.pooling_params import PoolingParams
from fleetfoot.records.step import ModelRunnerOutput, NewRequest
from fleetfoot.runner.v1.runner import ModelRunnerV1
from fleetfoot.weights.loading import ModelLoader


@dataclass(slots=True)
class _Prompt:
    """What is kept of a prompt between its chunks."""

    params: PoolingParams
    token_ids: Any
    num_tokens: int = 0
    """Computed."""
    total: torch.Tensor | None = None
    """``[hidden_size]`` float32: the sum over its tokens, for MEAN; the first one, for CLS."""
    states: list[torch.Tensor] = field(default_factory=list)
    """``[chunk, hidden_size]`` each, for results of each token."""


class Pooler:
    """From hidden states after the final norm to results.

    Args:
        pooling: of the engine.
        model: with the head for scores, if it has one.
    """

    def __init__(self, pooling: Pooling, model: CausalLM) -> None:
        self._pooling, self._model = pooling, model
        self._prompts: dict[int, _Prompt] = {}

    def add(self, request: NewRequest) -> None:
        """A request gets its row, or gets it again after a preemption."""
        assert request.pooling_params is not None
        self._prompts[request.row] = _Prompt(request.pooling_params, request.token_ids)

    def remove(self, row: int) -> None:
        """A row is freed."""
        self._prompts.pop(row, None)

    def collect(self, row: int, hidden_states: torch.Tensor) -> None:
        """Take a chunk of a prompt, ``[chunk, hidden_size]``."""
        prompt = self._prompts[row]
        kind = self._kind(prompt.params)
        if kind in ("ALL", "STEP"):
            prompt.states.append(hidden_states.float())
        elif kind == "MEAN":
            added = hidden_states.float().sum(0)
            prompt.total = added if prompt.total is None else prompt.total + added
        elif kind == "LAST":
            prompt.total = hidden_states[-1].float()
        elif prompt.total is None:
            prompt.total = hidden_states[0].float()
        prompt.num_tokens += len(hidden_states)

    def result(self, row: int) -> torch.Tensor:
        """Of a prompt that is complete: ``[dimensions]`` or ``[num_labels]``, or for tasks of tokens ``[num_tokens,
        dimensions or num_labels]``, float32 on the host."""
        prompt = self._prompts[row]
        params, kind = prompt.params, self._kind(prompt.params)
        if kind in ("ALL", "STEP"):
            pooled = torch.cat(prompt.states)
            if kind == "STEP" and (tag := self._step_tag_id(params)) is not None:
                pooled = pooled[torch.as_tensor([token == tag for token in prompt.token_ids], device=pooled.device)]
        else:
            assert prompt.total is not None
            pooled = prompt.total / prompt.num_tokens if kind == "MEAN" else prompt.total
        output = self._head(pooled.reshape(-1, pooled.shape[-1]))
        use_activation = self._pooling.use_activation if params.use_activation is None else params.use_activation
        if self._pooling.task == "embed":
            dimensions = params.dimensions or self._pooling.dimensions
            output = output[:, :dimensions]
            output = F.normalize(output, dim=1) if use_activation else output
        elif use_activation:
            output = output.sigmoid() if self._pooling.is_sigmoid else output.softmax(1)
        return output.reshape(*pooled.shape[:-1], output.shape[1]).cpu()

    def _head(self, pooled: torch.Tensor) -> torch.Tensor:
        """``[n, hidden_size]`` float32 -> scores ``[n, num_labels]`` float32, or the same without a head."""
        if self._pooling.token_ids:
            logits = self._model.compute_logits(pooled.to(self._model.dtype)).float()
            no, yes = logits[:, list(self._pooling.token_ids)].T
            return (yes - no)[:, None]
        return pooled if self._model.score is None else self._model.score(pooled.to(self._model.dtype)).float()

    def _kind(self, params: PoolingParams) -> str:
        if (params.task or "").startswith("token_"):
            return "STEP" if self._step_tag_id(params) is not None else "ALL"
        return self._pooling.pooling_type

    def _step_tag_id(self, params: PoolingParams) -> int | None:
        return self._pooling.step_tag_id if params.step_tag_id is None else params.step_tag_id


class PoolingModelRunner(ModelRunnerV1):
    """Model Runner V1 with a `Pooler` in place of the sampler."""

    def __init__(self, loader: ModelLoader, *, pooling: Pooling, **common: Any) -> None:
        super().__init__(loader, **common)
        self._pooling = pooling

    def _initialize_state(self, model: CausalLM, layout: KVLayout) -> None:
        super()._initialize_state(model, layout)
        self._pooler = Pooler(self._pooling, model)
        self._sampler = self._pooler  # type: ignore[assignment]  # rows are added and removed as those of the sampler

    @torch.inference_mode()
    def _sample(self) -> ModelRunnerOutput:
        assert self._execute_state is not None
        (scheduler_output, (hidden_states, inputs)), self._execute_state = self._execute_state, None
        starts = inputs.query_start_loc.tolist()
        rows = inputs.rows.tolist()
        for index, row in enumerate(rows):
            self._pooler.collect(row, hidden_states[starts[index] : starts[index + 1]])
        num_sampled = scheduler_output.num_sampled
        output = ModelRunnerOutput([[] for _ in range(num_sampled)])
        for index, row in enumerate(rows[:num_sampled]):
            result = self._pooler.result(row)
            output.pooled[index] = (list(result.shape), result.numpy().tobytes())
        if num_sampled and self._pipeline.size > 1:  # earlier stages wait for tokens of the step
            num_rejected = np.zeros(num_sampled, dtype=np.int64)
            message = self._host.sampled_token_message(inputs.rows[:num_sampled], [[0]] * num_sampled, num_rejected)
            self._token_sync.send(message.to(self._device))
        return output

"""Pooling on Model Runner V1: a vector or scores of each prompt, from its hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fleetfoot.config.json_fields import ConfigError
from fleetfoot.config.pooling import Pooling
from fleetfoot.config.sentence_transformers import Projection
from fleetfoot.models.interface import CausalLM
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.pooling_params import PoolingParams
from fleetfoot.records.step import ModelRunnerOutput, NewRequest, TokenMasks
from fleetfoot.runner.v1.runner import ModelRunnerV1
from fleetfoot.weights.loading import ModelLoader

_LOGITS_ROWS = 64
"""Tokens for which the logits of the whole vocabulary are in memory at the same time."""


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
        projections: from pooled vectors to embeddings.
    """

    def __init__(self, pooling: Pooling, model: CausalLM, projections: nn.Module) -> None:
        self._pooling, self._model, self._projections = pooling, model, projections
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
        """The result of a complete prompt: ``[dimensions]`` or ``[num_labels]``, or for tasks of tokens ``[num_tokens,
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
        states = pooled.reshape(-1, pooled.shape[-1])
        output = self._embeddings(states, params) if self._pooling.task == "embed" else self._scores(states, params)
        return output.reshape(*pooled.shape[:-1], output.shape[1]).cpu()

    def _embeddings(self, states: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """``[n, hidden_size]`` float32 -> ``[n, dimensions]``."""
        dimensions = params.dimensions or self._pooling.dimensions
        output = self._projections(states)[:, :dimensions]
        output = F.normalize(output, dim=1) if self._is_activated(params) else output
        return output if dimensions else output[:, : self._pooling.truncate_dim]

    def _scores(self, states: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """``[n, hidden_size]`` float32 -> ``[n, num_labels]``."""
        pooling = self._pooling
        if pooling.token_ids:
            scores = torch.cat([self._token_logits(rows) for rows in states.split(_LOGITS_ROWS)])
            scores = scores[:, 1:] - scores[:, :1] if pooling.is_difference else scores
        else:
            assert self._model.score is not None
            scores = self._model.score(states)
        scores = (scores - pooling.logit_mean) / pooling.logit_sigma
        if pooling.activation == "identity" or not self._is_activated(params):
            return scores
        return scores.sigmoid() if pooling.activation == "sigmoid" else scores.softmax(1)

    def _token_logits(self, states: torch.Tensor) -> torch.Tensor:
        logits = self._model.compute_logits(states.to(self._model.dtype))
        return logits[:, list(self._pooling.token_ids)].float()

    def _is_activated(self, params: PoolingParams) -> bool:
        return self._pooling.use_activation if params.use_activation is None else params.use_activation

    def _kind(self, params: PoolingParams) -> str:
        if not (params.task or "").startswith("token_"):
            return self._pooling.pooling_type
        return "STEP" if params.step_tag_id is not None else self._pooling.token_pooling_type

    def _step_tag_id(self, params: PoolingParams) -> int | None:
        return self._pooling.step_tag_id if params.step_tag_id is None else params.step_tag_id


def load_projections(projections: tuple[Projection, ...], loader: ModelLoader) -> nn.Sequential:
    """The ``Dense`` modules of sentence-transformers, in float32. Raises ConfigError: a file is missing, or does not
    fit its config."""
    layers: list[nn.Module] = []
    for projection in projections:
        linear = nn.Linear(projection.in_features, projection.out_features, projection.bias, loader.context.device)
        if loader.load_format != "dummy" and loader.folder is not None:
            from safetensors.torch import load_file

            path = Path(loader.folder) / projection.folder / "model.safetensors"
            try:
                tensors = load_file(path, device=str(loader.context.device))
                linear.load_state_dict({name.removeprefix("linear."): value for name, value in tensors.items()})
            except (OSError, RuntimeError) as error:
                raise ConfigError(f"{path} does not have the weights of {projection}: {error}") from error
        layers += [linear, getattr(nn, projection.activation)()]
    return nn.Sequential(*layers).requires_grad_(False)


class PoolingModelRunner(ModelRunnerV1):
    """Model Runner V1 with a `Pooler` in place of the sampler."""

    def __init__(self, loader: ModelLoader, *, pooling: Pooling, **common: Any) -> None:
        super().__init__(loader, **common)
        self._pooling = pooling

    def _initialize_state(self, model: CausalLM, layout: KVLayout) -> None:
        super()._initialize_state(model, layout)
        self._pooler = Pooler(self._pooling, model, load_projections(self._pooling.projections, self._loader))
        self._sampler = self._pooler  # type: ignore[assignment]  # rows are added and removed as those of the sampler

    @torch.inference_mode()
    def _sample(self, masks: TokenMasks | None) -> ModelRunnerOutput:
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

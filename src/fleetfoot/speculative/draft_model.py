"""Drafts from a smaller model with the same vocabulary (Leviathan, Kalman, Matias 2023)."""

from __future__ import annotations

import torch

from fleetfoot.models.interface import CausalLM
from fleetfoot.records.forward_context import AttentionMetadata, ForwardContext
from fleetfoot.speculative.drafter import DraftBatch, Drafter, DraftSteps, as_drafts
from fleetfoot.weights.loading import ModelLoader
from fleetfoot.weights.store import DRAFTER, WeightStore


class DraftModel(Drafter):
    """Each rank of a tensor group runs the whole draft model and gets the same drafts."""

    method = "draft_model"
    _model: CausalLM

    def load_model(self, target: CausalLM) -> None:
        context, found = self._context, self._context.model
        assert found is not None
        self._loader = ModelLoader(found.config, context.context, found.folder, context.load_format, context.seed)
        self._model = self._loader.load()
        self._fuse(self._model.model.layers)

    def add_weights(self, store: WeightStore) -> None:
        store.add(self._model, DRAFTER)

    def reload_weights(self) -> None:
        self._loader.fill(self._model)

    def propose(self, batch: DraftBatch, num_drafts: int) -> torch.Tensor | None:
        """One pass over the step's tokens, then one for each draft. For decodes alone the first two are merged."""
        if not batch.is_decode:
            self._run(batch.input_ids, batch.metadata)
        if not len(batch.rows):
            return None
        steps = self._steps(batch)
        if not num_drafts:
            if batch.is_decode:
                self._run(batch.input_ids[batch.last_index], steps.singles(-1, 1)[0])
            return None
        tokens = [self._first(batch, steps)]
        for metadata in steps.singles(1, num_drafts - 1):
            tokens.append(self._draw(steps, self._run(tokens[-1], metadata), metadata))
        return as_drafts(tokens)

    def _first(self, batch: DraftBatch, steps: DraftSteps) -> torch.Tensor:
        """The first draft of each request, ``[n]``, from its newest token.

        If all requests are decodes, tokens before the newest one got their KV when they were drafted. The last of them
        may not have (it was the last draft, or there were no drafts), so it is computed again with the newest token.
        """
        if not batch.is_decode:
            (metadata,) = steps.singles(0, 1)
            return self._draw(steps, self._run(batch.newest, metadata), metadata)
        metadata = steps.pairs()
        pairs = torch.stack((batch.input_ids[batch.last_index], batch.newest), dim=1)  # [n, 2]
        hidden = self._run(pairs.view(-1), metadata)[1::2].contiguous()  # [n, hidden_size]
        return self._draw(steps, hidden, metadata)

    def _run(self, input_ids: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """``[num_tokens]`` int64 -> hidden states ``[num_tokens, hidden_size]``."""
        hidden = self._model(input_ids, ForwardContext(metadata, self._kv_caches))
        assert isinstance(hidden, torch.Tensor)
        return hidden

    def _draw(self, steps: DraftSteps, hidden: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """Sample from ``hidden [n, hidden_size]``: the last token of each request in the step of ``metadata``."""
        return steps.draw(self._model.compute_logits(hidden), metadata.seq_lens)

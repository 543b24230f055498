"""Drafts from an EAGLE head (Li, Wei, Zhang, Zhang 2024) or a layer that predicts a second token: one path of k tokens,
no tree."""

from __future__ import annotations

import torch

from fleetfoot.models.eagle import BASE_PREFIX, EMBEDDING, FC_WEIGHT, OF_THE_TARGET, EagleHead
from fleetfoot.models.interface import CausalLM
from fleetfoot.models.qwen3_next import MultiTokenPredictor
from fleetfoot.records.forward_context import ForwardContext
from fleetfoot.records.weights import WeightError
from fleetfoot.speculative.drafter import DraftBatch, Drafter, as_drafts
from fleetfoot.weights.checkpoint import Checkpoint, load_safetensors
from fleetfoot.weights.dummy import fill_dummy
from fleetfoot.weights.store import DRAFTER, WeightStore

OTHERS_THAN_MTP = ("model.", "lm_head.", "visual.", "language_model.")
"""Beginnings of names of the target's own tensors, where the layer is in its checkpoint."""


class EagleDrafter(Drafter):
    """Each rank of a tensor group runs the whole head. The target's embedding and logits are equal on all ranks, and so
    are the drafts.

    The head's KV for position i is in that token's slot, but also depends on the token at i + 1. After a cached prefix
    another token may follow than when the KV was computed; then one entry differs, which may cost a draft but never
    changes a token.
    """

    method = "eagle"
    reads_hidden = True
    _head: EagleHead | MultiTokenPredictor

    def load_model(self, target: CausalLM) -> None:
        """Raises WeightError if the checkpoint cannot be read or does not fit."""
        self._target = target
        context, found, needs_embedding = self._context, self._context.model, not target.has_embedding
        assert found is not None
        full_names: dict[str, str] = {}  # without and with the prefix
        if context.load_format != "dummy":
            with Checkpoint(found.folder) as checkpoint:
                full_names = {name.removeprefix(BASE_PREFIX): name for name in checkpoint.names()}
            if FC_WEIGHT not in full_names:
                raise WeightError(
                    f"{found} in {found.folder} has no tensor {FC_WEIGHT}, which every EAGLE head has; a whole model "
                    "drafts with method 'draft_model'"
                )
        self._of_the_target = {full_names[name] for name in OF_THE_TARGET if name in full_names}
        self._head = head = EagleHead(found.config, context.context, full_names, has_embedding=needs_embedding)
        self.reload_weights()
        self._fuse(head.layers)
        self._embed = target.embed if head.embed_tokens is None else head.embed_tokens

    def add_weights(self, store: WeightStore) -> None:
        """An embedding of its own is a copy of the target's."""
        store.add(self._head, DRAFTER, copies={EMBEDDING: BASE_PREFIX + EMBEDDING})

    def reload_weights(self) -> None:
        context, found = self._context, self._context.model
        assert found is not None
        if context.load_format == "dummy":
            fill_dummy(self._head.weight_specs(), context.seed)
        else:
            load_safetensors(self._head.weight_specs(), found.folder, self._of_the_target)
        self._head.process_weights_after_loading()

    def propose(self, batch: DraftBatch, num_drafts: int) -> torch.Tensor | None:
        """One pass over the step's tokens, which gives the first draft, and one for each further draft."""
        embeddings = self._embed(batch.next_ids)
        predicted = self._head(embeddings, batch.hidden, ForwardContext(batch.metadata, self._kv_caches))
        if not num_drafts or not len(batch.rows):
            return None
        steps = self._steps(batch)
        hidden = predicted.index_select(0, batch.last_index)  # [n, hidden_size], of the newest tokens
        tokens = [steps.draw(self._target.compute_logits(hidden), batch.positions + 1)]
        for metadata in steps.singles(0, num_drafts - 1):
            # fills the KV of the position before the last draft
            hidden = self._head(self._embed(tokens[-1]), hidden, ForwardContext(metadata, self._kv_caches))
            tokens.append(steps.draw(self._target.compute_logits(hidden), metadata.seq_lens + 1))
        return as_drafts(tokens)


class MTPDrafter(EagleDrafter):
    """The layer that predicts a second token, in the target's own checkpoint, which is used as an EAGLE head is."""

    method = "mtp"

    def load_model(self, target: CausalLM) -> None:
        """Raises WeightError if the checkpoint has no such layer."""
        found = self._context.model
        assert found is not None
        self._target = target
        self._head = MultiTokenPredictor(found.config, self._context.context)
        self.reload_weights()
        self._fuse(self._head.layers)
        self._embed = target.embed

    def add_weights(self, store: WeightStore) -> None:
        store.add(self._head, DRAFTER)

    def reload_weights(self) -> None:
        context, found = self._context, self._context.model
        assert found is not None
        if context.load_format == "dummy":
            fill_dummy(self._head.weight_specs(), context.seed)
        else:
            load_safetensors(self._head.weight_specs(), found.folder, unread=OTHERS_THAN_MTP)
        self._head.process_weights_after_loading()

"""Gemma 3 (Gemma Team 2025): Gemma 2 with head norms in place of soft caps, and two rotations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fleetfoot.models.gemma2 import Gemma2ForCausalLM
from fleetfoot.records.weights import WeightSpec


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """The text models. Head norms and the rotation of each layer follow the config."""


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The decoder of the models that read images too; the vision tower is not loaded, and prompts are text."""

    other_weights = tuple(
        f"{prefix}{part}." for prefix in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
    )

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Every tensor of the checkpoint that it holds, by the names of this class, of older and of newer exports."""
        for spec in super().weight_specs():
            names = (spec.name, *spec.aliases)
            newer = (name.replace("model.", "model.language_model.", 1) for name in names)
            older = (f"language_model.{name}" for name in names)
            yield replace(spec, aliases=tuple(dict.fromkeys((*spec.aliases, *older, *newer))))

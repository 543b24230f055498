"""The drafter that the settings ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.speculative import SpeculativeConfig
from fleetfoot.speculative.find import DrafterModel

if TYPE_CHECKING:  # a plan can be made where there is no torch
    from fleetfoot.layers.context import ModelContext
    from fleetfoot.speculative.drafter import Drafter, DraftSettings


def build_speculation(
    config: EngineConfig, found: DrafterModel | None, max_model_len: int, context: ModelContext, *, fuses: bool
) -> DraftSettings:
    """The drafter of the last rank of a pipeline. Nothing is loaded yet.

    Args:
        found: the model that drafts, as the plan has it; None: n-grams do.
        max_model_len: the engine's.
        fuses: replace the drafter's decoder layers by fused ones.
        context: of the target on this rank. Over a tensor group each rank has the whole drafter: a drafter is small,
            and sharing its layers would put two sums over the ranks into each of its short passes.
    """
    from fleetfoot.speculative.drafter import NO_DRAFTING, DraftSettings, NgramSettings

    speculative = config.speculative_config
    if speculative is None:
        return NO_DRAFTING
    if found is None:
        longest, shortest = speculative.prompt_lookup_max, speculative.prompt_lookup_min
        assert longest is not None and shortest is not None  # filled in by the config
        return DraftSettings(speculative.num_speculative_tokens, ngram=NgramSettings(longest, shortest))
    drafter = _build_drafter(config, speculative, found, max_model_len, context, fuses=fuses)
    return DraftSettings(speculative.num_speculative_tokens, drafter=drafter)


def _build_drafter(
    config: EngineConfig,
    speculative: SpeculativeConfig,
    found: DrafterModel,
    max_model_len: int,
    context: ModelContext,
    *,
    fuses: bool,
) -> Drafter:
    from fleetfoot.distributed.groups import SINGLE_TENSOR_GROUP

    num_drafts = speculative.num_speculative_tokens
    alone = replace(context, tensor_group=SINGLE_TENSOR_GROUP, max_positions=max_model_len + num_drafts)
    if found.method == "eagle":
        from fleetfoot.speculative.eagle import EagleDrafter

        return EagleDrafter(found, alone, num_drafts, config.load_format, config.seed, fuses=fuses)
    from fleetfoot.speculative.draft_model import DraftModel
    from fleetfoot.weights.model_loader import ModelLoader

    loader = ModelLoader(found.config, alone, found.folder, config.load_format, config.seed)
    return DraftModel(loader, num_drafts, fuses=fuses)

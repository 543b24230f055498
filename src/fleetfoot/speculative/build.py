"""The drafter that the settings name."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.speculative import DRAFT_METHODS
from fleetfoot.speculative.find import DrafterModel

if TYPE_CHECKING:  # a plan can be made where there is no torch
    from fleetfoot.layers.context import ModelContext
    from fleetfoot.speculative.drafter import DraftSettings


def build_speculation(
    config: EngineConfig, found: DrafterModel | None, max_model_len: int, context: ModelContext, *, fuses: bool
) -> DraftSettings:
    """The drafter of the last rank of a pipeline. Nothing is loaded yet.

    Args:
        found: the model that drafts, as the plan has it; None: the method has none.
        max_model_len: the engine's.
        fuses: replace the drafter's decoder layers by fused ones.
        context: of the target on this rank. Over a tensor group each rank has the whole drafter: a drafter is small,
            and sharing its layers would put two sums over the ranks into each of its short passes.
    """
    from fleetfoot.distributed.groups import SINGLE_TENSOR_GROUP
    from fleetfoot.speculative.drafter import NO_DRAFTING, DrafterContext, DraftSettings, NgramSettings

    speculative = config.speculative_config
    if speculative is None:
        return NO_DRAFTING
    num_drafts = speculative.num_speculative_tokens
    if speculative.method == "ngram":
        longest, shortest = speculative.prompt_lookup_max, speculative.prompt_lookup_min
        assert longest is not None and shortest is not None  # filled in by the config
        return DraftSettings(num_drafts, ngram=NgramSettings(longest, shortest))
    alone = replace(context, tensor_group=SINGLE_TENSOR_GROUP, max_positions=max_model_len + num_drafts)
    module, _, function = DRAFT_METHODS[speculative.method].make.partition(":")
    make = getattr(import_module(module), function)
    drafter = make(DrafterContext(num_drafts, alone, found, config.load_format, config.seed, fuses))
    return DraftSettings(num_drafts, drafter=drafter)

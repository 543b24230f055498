"""From a plan to whoever makes drafts, and what that takes of memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.model import DTYPE_BYTES, ModelConfig
from fleetfoot.config.sharding import layer_parameters
from fleetfoot.config.speculative import SpeculativeConfig
from fleetfoot.plan.footprint import NO_DRAFTER, DrafterShape
from fleetfoot.records.layer_group import LayerGroup
from fleetfoot.speculative.find import DrafterModel, find_drafter

if TYPE_CHECKING:  # a plan can be made where there is no torch
    from fleetfoot.layers.context import ModelContext
    from fleetfoot.plan.plan import EnginePlan
    from fleetfoot.speculative.speculation import Speculation
    from fleetfoot.speculative.speculator import Speculator

_FLOAT32 = 4


def build_speculation(plan: EnginePlan, context: ModelContext) -> Speculation:
    """Who makes drafts on the last rank of a pipeline. Nothing is loaded yet.

    Args:
        context: of the target on this rank. Over a tensor group each rank has the whole drafter: a drafter is small,
            and sharing its layers would put two sums over the ranks into each of its short passes.

    Raises:
        ValueError: the drafter does not fit the model; the message names both numbers.
        FileNotFoundError: there is no such model.
    """
    from fleetfoot.speculative.speculation import NO_SPECULATION, NgramSettings, Speculation

    speculative = plan.config.speculative_config
    if speculative is None:
        return NO_SPECULATION
    found = find_drafter(plan.config, plan.model)
    if found is None:
        longest, shortest = speculative.prompt_lookup_max, speculative.prompt_lookup_min
        assert longest is not None and shortest is not None  # filled in by the config
        return Speculation(speculative.num_speculative_tokens, ngram=NgramSettings(longest, shortest))
    drafter = _build_drafter(plan, speculative, found, context)
    return Speculation(speculative.num_speculative_tokens, drafter=drafter)


def drafter_shape(
    config: EngineConfig, target: ModelConfig, found: DrafterModel | None, dtype: str, device: str
) -> DrafterShape:
    """What drafts add to the memory of the last rank of a pipeline. No torch.

    Args:
        found: what `find_drafter` finds with these settings.
        dtype: of weights and KV, the target's. device: ``cpu`` or ``cuda``.
    """
    speculative = config.speculative_config
    if speculative is None:
        return NO_DRAFTER
    if found is None:
        return DrafterShape(speculative.num_speculative_tokens)
    max_positions = (config.max_model_len or target.max_position_embeddings) + speculative.num_speculative_tokens
    rotary_table = max_positions * found.config.head_dim * _FLOAT32
    parameters = _num_parameters(found, target, device, has_embedding=config.pipeline_parallel_size == 1)
    return DrafterShape(
        speculative.num_speculative_tokens,
        parameters * DTYPE_BYTES[dtype] + rotary_table,
        _layer_groups(found),
        found.name,
    )


def _build_drafter(
    plan: EnginePlan, speculative: SpeculativeConfig, found: DrafterModel, context: ModelContext
) -> Speculator:
    from fleetfoot.distributed.groups import SINGLE_TENSOR_GROUP

    num_drafts, config = speculative.num_speculative_tokens, plan.config
    alone = replace(context, tensor_group=SINGLE_TENSOR_GROUP, max_positions=plan.max_model_len + num_drafts)
    if found.method == "eagle":
        from fleetfoot.speculative.eagle import EagleDrafter

        return EagleDrafter(found, alone, num_drafts, config.load_format, config.seed)
    from fleetfoot.speculative.draft_model import DraftModel
    from fleetfoot.weights.model_loader import ModelLoader

    return DraftModel(ModelLoader(found.config, alone, found.folder, config.load_format, config.seed), num_drafts)


def _layer_groups(found: DrafterModel) -> tuple[LayerGroup, ...]:
    return (LayerGroup(found.config.num_layers, found.config.num_kv_heads, found.config.head_dim),)


def _num_parameters(found: DrafterModel, target: ModelConfig, device: str, *, has_embedding: bool) -> int:
    """Weights on one rank.

    Args:
        has_embedding: whether an EAGLE head finds the target's embedding where it runs.
    """
    config = found.config
    matrix = config.vocab_size * config.hidden_size
    layers = config.num_layers * layer_parameters(config)
    if found.method == "eagle":
        fc = 2 * config.hidden_size**2 + config.hidden_size  # with the bias, which few go without
        own = 0 if has_embedding or target.tie_word_embeddings else matrix
        return layers + fc + own
    # a tied head is the embedding; on a CPU it is packed, which makes a copy
    return layers + config.hidden_size + matrix * (1 if config.tie_word_embeddings and device != "cpu" else 2)

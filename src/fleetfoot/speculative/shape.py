"""What a drafter adds to an engine: drafts per step, bytes of weights, KV layers. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.model import DTYPE_BYTES, ModelConfig
from fleetfoot.config.sharding import layer_parameters
from fleetfoot.records.kv_layout import KVCacheSpec, kv_cache_specs
from fleetfoot.speculative.find import DrafterModel

_FLOAT32 = 4


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
        kv_cache_specs(found.config),
        found,
    )


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


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """What a drafter adds, on the last rank of a pipeline."""

    num_drafts: int = 0
    """Tokens in a step for each decode, besides one."""
    weight_bytes: int = 0
    """Of its model on one rank; 0: it has none."""
    kv_specs: tuple[KVCacheSpec, ...] = ()
    """Its layers in the KV cache, with one rank's heads."""
    model: DrafterModel | None = None
    """None: n-grams, or no speculative decoding."""

    def kv_block_bytes(self, dtype: str, block_size: int) -> int:
        """Bytes of its layers in one KV block."""
        elements = sum(spec.num_kv_heads * spec.head_dim for spec in self.kv_specs)
        return 2 * elements * DTYPE_BYTES[dtype] * block_size


NO_DRAFTER = DrafterShape()

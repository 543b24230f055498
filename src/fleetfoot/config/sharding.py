"""How a model is sharded: heads, columns and the vocabulary over a tensor group, layers over a pipeline.

The scheme is that of Megatron-LM (Shoeybi et al. 2019): q, k, v, gate and up by outputs, o and down by inputs, so that
a decoder layer needs two sums over the ranks and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from fleetfoot.config.model import AttentionSpec, LayerSpec, ModelConfig
from fleetfoot.utils.validation import FieldError

_VOCAB_MULTIPLE = 16
"""A rank's share of the vocabulary is padded to a multiple of this, to align rows of logits for vector loads. A single
rank holds the unpadded vocabulary."""


@dataclass(frozen=True, slots=True)
class ExpertSplit:
    """Experts that are spread over ranks: each slot of a rank has the matrices of one expert."""

    num_ranks: int
    num_redundant: int = 0
    """Slots of a layer beyond one for each expert."""
    is_balanced: bool = False
    """Whether experts move between slots, by their load."""

    def slots(self, rank: int, num_experts: int) -> range:
        """The slots of a rank, in all ranks' numbering. If they cannot be shared evenly, the first ranks have more."""
        base, more = divmod(num_experts + self.num_redundant, self.num_ranks)
        first = rank * base + min(rank, more)
        return range(first, first + base + (rank < more))

    def most_slots(self, num_experts: int) -> int:
        """The slots of the rank with the most."""
        return len(self.slots(0, num_experts))

    def first_placement(self, num_experts: int) -> tuple[int, ...]:
        """The expert in each slot of all ranks when an engine starts: all in order, then the first ones again."""
        return tuple(slot % num_experts for slot in range(num_experts + self.num_redundant))


def check_expert_split(config: ModelConfig, split: ExpertSplit) -> None:
    """Raise ValueError if the experts of a layer cannot be spread so."""
    if not config.has_experts:
        raise FieldError(
            "enable_expert_parallel", f"is set, and this {config.architecture} has no experts; leave it out", True
        )
    for layer in config.distinct_layers:
        if layer.experts is None:
            continue
        count, ranks = layer.experts.num_experts, split.num_ranks
        if (missing := ranks - count - split.num_redundant) > 0:
            most = f"share them among at most {count + split.num_redundant} ranks"
            raise FieldError(
                "enable_expert_parallel",
                f"is set, and {ranks} ranks share {count} experts of a layer and {split.num_redundant} redundant ones, "
                f"so {missing} ranks would have none: {most}, or set enable_eplb and num_redundant_experts to at least "
                f"{ranks - count} in eplb_config",
                True,
            )
        if split.num_redundant > (most_redundant := count * (ranks - 1)):
            raise FieldError(
                "eplb_config",
                f"has num_redundant_experts {split.num_redundant}, and {count} experts on {ranks} ranks have at most "
                f"{most_redundant} further places; lower it",
                split.num_redundant,
            )


def check_tensor_parallel_size(config: ModelConfig, size: int, *, shares_experts: bool = True) -> None:
    """Raise ValueError if ``size`` ranks cannot share the model; the message names the sizes that can.
    ``shares_experts``: whether each rank has a part of each expert."""
    problem = _tensor_problem(config, size, shares_experts=shares_experts)
    if problem:
        works = map(str, tensor_parallel_sizes(config, shares_experts=shares_experts))
        raise ValueError(
            f"tensor_parallel_size is {size}, but {problem}; what would work for {config.architecture} of this shape: "
            f"{', '.join(works)}"
        )


def tensor_parallel_sizes(config: ModelConfig, *, shares_experts: bool = True) -> list[int]:
    """The numbers of ranks that can share each layer. ``shares_experts``: as of `check_tensor_parallel_size`."""
    most = min((mixer.num_heads for mixer in config.attentions), default=1)
    return [size for size in range(1, most + 1) if not _tensor_problem(config, size, shares_experts=shares_experts)]


def check_pipeline_parallel_size(config: ModelConfig, size: int) -> None:
    """Raise ValueError if the model has fewer layers than there are ranks."""
    if size > config.num_layers:
        raise ValueError(
            f"pipeline_parallel_size is {size}, but {config.architecture} of this shape has {config.num_layers} layers "
            f"to spread; set it to at most {config.num_layers}"
        )


def _tensor_problem(config: ModelConfig, size: int, *, shares_experts: bool) -> str:
    problems = (_layer_problem(layer, size, shares_experts=shares_experts) for layer in config.distinct_layers)
    return next(filter(None, problems), "")


def _layer_problem(layer: LayerSpec, size: int, *, shares_experts: bool) -> str:
    if layer.recurrent is not None and (problem := layer.recurrent.problem(size)):
        return problem
    if layer.attention is not None:
        heads, kv_heads = layer.attention.num_heads, layer.attention.num_kv_heads
        if heads % size:
            return f"{heads} attention heads cannot be shared evenly"
        if kv_heads % size and size % kv_heads:
            return f"{kv_heads} KV heads can neither be shared evenly nor be copied to equally many ranks each"
    shared = layer.experts.shared_size if layer.experts is not None else 0
    own = layer.mlp.intermediate_size if layer.experts is None or shares_experts else 0
    for intermediate_size in (own, shared):
        if intermediate_size % size:
            return f"an intermediate_size of {intermediate_size} cannot be shared evenly"
    return ""


def even_span(total: int, rank: int, size: int) -> slice:
    """The share of ``rank`` in ``total`` items, which ``size`` divides."""
    share = total // size
    return slice(rank * share, (rank + 1) * share)


def kv_head_span(mixer: AttentionSpec, rank: int, size: int) -> slice:
    """The KV heads that the query heads of ``rank`` read: its share, or one head that other ranks hold too."""
    first = rank * mixer.num_kv_heads // size
    return slice(first, first + num_kv_heads(mixer, size))


def num_kv_heads(mixer: AttentionSpec, size: int) -> int:
    """KV heads of a layer on each of ``size`` ranks."""
    return max(1, mixer.num_kv_heads // size)


def vocab_rows(vocab_size: int, size: int) -> int:
    """Rows of the embedding and of the logits head on each of ``size`` ranks, padding included."""
    if size == 1:
        return vocab_size
    return -(-vocab_size // (size * _VOCAB_MULTIPLE)) * _VOCAB_MULTIPLE


def vocab_span(vocab_size: int, rank: int, size: int) -> slice:
    """The token ids on ``rank``: at most `vocab_rows`, possibly none on the last ranks."""
    rows = vocab_rows(vocab_size, size)
    return slice(min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size))


def pipeline_layers(config: ModelConfig, rank: int, size: int) -> range:
    """The decoder layers that ``rank`` of a pipeline of ``size`` holds.

    A pipeline is as fast as its slowest rank, and a decode step takes as long as reading the weights. The last rank
    also reads the logits head, which may be as large as several layers, so it gets that many fewer layers. The others
    share the rest evenly; a remainder goes to the later ones, because the first also holds the embedding.
    """
    if size == 1:
        return range(config.num_layers)
    ends = [0, *accumulate(layer.num_parameters(config.hidden_size) for layer in config.layers)]

    def weights(stage: range) -> int:
        head = config.vocab_size * config.hidden_size if stage.stop == config.num_layers else 0
        return ends[stage.stop] - ends[stage.start] + head

    divisions = (_stages(config.num_layers, last, size) for last in range(config.num_layers - size + 1, 0, -1))
    return min(divisions, key=lambda stages: max(map(weights, stages)))[rank]


def _stages(num_layers: int, last: int, size: int) -> list[range]:
    """The layers of each rank if the last one has ``last``."""
    base, more = divmod(num_layers - last, size - 1)
    counts = [base + (rank >= size - 1 - more) for rank in range(size - 1)]
    ends = [0, *accumulate(counts), num_layers]
    return [range(*pair) for pair in pairwise(ends)]

"""The roofline of a model on a machine: bytes read and operations computed, over the machine's peak rates. No torch.

A step reads every weight once and multiplies each token with it; the slower of the two counts. A decode reads the keys
and values of its context, and a prompt attends to itself. For a token that is not sampled from, the last layer computes
keys and values only. Launches, norms, sampling and scheduling are left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fleetfoot.config.model import DTYPE_BYTES, ModelConfig
from fleetfoot.config.sharding import layer_parameters


@dataclass(frozen=True, slots=True)
class Costs:
    """What a model reads and computes, over all its ranks together."""

    weight_bytes: int
    """Read by a step: all layers and the logits head; of the embedding a few rows, which are not counted."""
    flops_per_token: int
    """Of the linear layers, but for what `flops_per_logits` has of the last one."""
    flops_per_logits: int
    """Of the logits head, and of the last layer without its keys and values: for each token that is sampled."""
    kv_bytes: int
    """Keys and values of one position in one layer."""
    attention_flops: int
    """Of one query token and one position in one layer."""
    windows: tuple[int | None, ...]
    """For each layer, how many positions a token sees; None: all."""

    @classmethod
    def of(cls, model: ModelConfig, dtype: str) -> Costs:
        layers = model.num_layers * layer_parameters(model)
        head = model.vocab_size * model.hidden_size
        kv_size = 2 * model.num_kv_heads * model.head_dim
        sampled = layer_parameters(model) - kv_size * model.hidden_size
        return cls(
            weight_bytes=(layers + head) * DTYPE_BYTES[dtype],
            flops_per_token=2 * (layers - sampled),
            flops_per_logits=2 * (head + sampled),
            kv_bytes=kv_size * DTYPE_BYTES[dtype],
            attention_flops=4 * model.num_heads * model.head_dim,
            windows=model.layer_windows,
        )

    def positions(self, first: int, count: int) -> int:
        """Positions that ``count`` tokens in a row see, the first of them at ``first``: of all tokens and layers."""
        return sum(
            num_layers * _positions(first, count, window) for window, num_layers in Counter(self.windows).items()
        )


def _positions(first: int, count: int, window: int | None) -> int:
    """Of one layer."""
    if window is None:
        window = first + count
    growing = max(0, min(count, window - first))  # tokens that see all before them, and themselves
    return growing * first + growing * (growing + 1) // 2 + (count - growing) * window


@dataclass(frozen=True, slots=True)
class PeakRates:
    """Of one device, or of all devices of an engine together."""

    bytes_per_s: float
    """Read plus written, by a copy larger than the caches."""
    flops_per_s: float
    """Of a square matrix product in the model's dtype; a multiply-add counts as two."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """The least time of a model's work on a machine, in seconds."""

    costs: Costs
    peak_rates: PeakRates

    def linear_s(self, num_tokens: int, num_sampled: int) -> float:
        """Of one step without its attention."""
        flops = num_tokens * self.costs.flops_per_token + num_sampled * self.costs.flops_per_logits
        return max(self.costs.weight_bytes / self.peak_rates.bytes_per_s, flops / self.peak_rates.flops_per_s)

    def prefill_attention_s(self, num_tokens: int, num_cached: int = 0) -> float:
        """Of a prompt, over all its chunks; ``num_cached`` of its tokens were found in the prefix cache."""
        num_computed = num_tokens - num_cached
        unread = _positions(num_cached, max(0, num_computed - 1), self.costs.windows[-1])
        pairs = self.costs.positions(num_cached, num_computed) - unread
        return pairs * self.costs.attention_flops / self.peak_rates.flops_per_s

    def decode_attention_s(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Of a request's steps after its prompt: all its outputs but the last are an input of one."""
        positions = self.costs.positions(num_prompt_tokens, max(0, num_output_tokens - 1))
        return positions * self.costs.kv_bytes / self.peak_rates.bytes_per_s

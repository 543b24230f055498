"""The features of model runners, which of them each runner supports, and the KV layouts that it keeps. No torch.

``tests/engine/test_capabilities.py`` runs a model for each of them on each runner.
"""

from __future__ import annotations

import enum

from fleetfoot.records.kv_layout import ARENA, BLOCK_CONTIGUOUS_HND, TOKEN_MAJOR_NHD

V1_ROOM = "fleetfoot.runner.v1"
"""Model Runner V1, which nothing else needs: it can be deleted."""


class Feature(enum.Enum):
    """A feature that a runner may support; the value is its display name."""

    # the model
    QUANTIZED_WEIGHTS = "quantized weights"
    WEIGHTS_WITHOUT_KERNELS = "quantized weights in a format without kernels"
    MIXTURE_OF_EXPERTS = "mixture of experts"
    HYBRID_LAYERS = "hybrid or state-space layers"
    OTHER_LAYERS = "recurrent layers of other kinds"
    SLIDING_WINDOW = "sliding window attention"
    POOLING = "pooling tasks"
    # execution
    GRAPHS = "graphs"
    TORCH_COMPILE = "stock torch.compile"
    ASYNC_SCHEDULING = "asynchronous scheduling"
    TENSOR_PARALLELISM = "tensor parallelism"
    PIPELINE_PARALLELISM = "pipeline parallelism"
    PREFILL_CONTEXT_PARALLELISM = "prefill context parallelism"
    SPECULATIVE_NGRAM = "speculative decoding with n-grams"
    SPECULATIVE_DRAFT_MODEL = "speculative decoding with a draft model"
    SPECULATIVE_EAGLE = "speculative decoding with EAGLE"
    SLEEP = "sleep and wake-up"
    LIVE_WEIGHTS = "live weight updates"
    # scheduling and KV
    CHUNKED_PREFILL = "chunked prefill"
    PREFIX_CACHING = "prefix caching"
    PREEMPTION = "preemption"
    PRIORITY_SCHEDULING = "priority scheduling"
    KV_CONNECTOR = "KV connectors"
    KV_OFFLOADING = "KV offloading"
    # request parameters
    SAMPLING = "seeded sampling with temperature, top-k, top-p and min-p"
    PENALTIES = "presence, frequency and repetition penalties"
    LOGIT_BIAS = "logit bias and allowed tokens"
    BAD_WORDS = "bad words and minimum lengths"
    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt logprobs"
    PROMPT_EMBEDDINGS = "prompt embeddings"
    LORA = "LoRA adapters"
    LOGITS_PROCESSORS = "custom logits processors"
    STRUCTURED_OUTPUTS = "structured outputs"


_UNSUPPORTED = {
    Feature.OTHER_LAYERS: "Gated delta nets, Mamba-2 and short convolutions are known, each in its own architectures.",
    Feature.PREFILL_CONTEXT_PARALLELISM: "A prompt is computed on one device.",
    Feature.PROMPT_EMBEDDINGS: "Its inputs are token ids.",
    Feature.LORA: "Linear layers have one set of weights for all requests.",
}
"""What no runner supports, and why."""
_UNSUPPORTED_BY_V1 = {Feature.GRAPHS: "It runs eagerly; graphs are Model Runner V2's."}
_UNSUPPORTED_BY_V2 = {
    Feature.WEIGHTS_WITHOUT_KERNELS: "The references in torch multiply them, and its graphs are for kernels.",
    Feature.POOLING: "Each step ends in logits and tokens; hidden states are not handed out.",
    Feature.TORCH_COMPILE: "Its layers run fused, with kernels of their own, inside graphs.",
    Feature.LOGITS_PROCESSORS: "It samples on the device and calls no Python code meanwhile.",
}

CAPABILITIES: dict[str, dict[Feature, str]] = {
    "v1": dict.fromkeys(Feature, "") | _UNSUPPORTED | _UNSUPPORTED_BY_V1,
    "v2": dict.fromkeys(Feature, "") | _UNSUPPORTED | _UNSUPPORTED_BY_V2,
}
"""Runner -> feature -> why it is not supported, a sentence for the user; empty: it is supported."""

BLOCKS_WITH_KERNELS = (0, 32, 64, 128)
"""Inputs of a block of weights with 8 bits, of which Model Runner V2 has kernels; 0: all."""

KV_LAYOUTS: dict[str, tuple[str, ...]] = {
    "v1": (ARENA, BLOCK_CONTIGUOUS_HND, TOKEN_MAJOR_NHD),
    "v2": (ARENA, BLOCK_CONTIGUOUS_HND),
}
"""Runner -> the layouts in which it can keep the KV cache; it keeps the first one that the KV connector accepts."""

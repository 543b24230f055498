"""Features of model runners, which each runner declares in its ``capabilities.py``. No torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Feature(enum.Enum):
    """A feature that a runner may support; the value is its display name."""

    # the model
    QUANTIZED_WEIGHTS = "quantized weights"
    MIXTURE_OF_EXPERTS = "mixture of experts"
    HYBRID_LAYERS = "hybrid or state-space layers"
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


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a runner supports a feature."""

    why_not: str = ""
    """A sentence for the user; empty: the feature is supported."""

    @property
    def is_supported(self) -> bool:
        return not self.why_not


YES = Support()

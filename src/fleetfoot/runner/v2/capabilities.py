"""The features of Model Runner V2. No torch. ``tests/engine/test_capabilities.py`` runs a model for each of them."""

from __future__ import annotations

from collections.abc import Mapping

from fleetfoot.runner.features import YES, Feature, Support

CAPABILITIES: Mapping[Feature, Support] = {
    Feature.QUANTIZED_WEIGHTS: Support("The loader and the linear layers support only bfloat16, float16 and float32."),
    Feature.MIXTURE_OF_EXPERTS: Support("No model here routes tokens to experts."),
    Feature.HYBRID_LAYERS: Support("Every layer must be attention over the paged KV cache."),
    Feature.SLIDING_WINDOW: YES,
    Feature.POOLING: Support("Each step ends in logits and tokens; hidden states are not handed out."),
    Feature.GRAPHS: YES,
    Feature.TORCH_COMPILE: Support("Its operations are chosen by hand, and no model is passed through torch.compile."),
    Feature.ASYNC_SCHEDULING: YES,
    Feature.TENSOR_PARALLELISM: YES,
    Feature.PIPELINE_PARALLELISM: YES,
    Feature.PREFILL_CONTEXT_PARALLELISM: Support("A prompt is computed on one device."),
    Feature.SPECULATIVE_NGRAM: YES,
    Feature.SPECULATIVE_DRAFT_MODEL: YES,
    Feature.SPECULATIVE_EAGLE: YES,
    Feature.SLEEP: Support("Memory is only given back at shutdown."),
    Feature.LIVE_WEIGHTS: Support("Weights are read once, at the start."),
    Feature.CHUNKED_PREFILL: YES,
    Feature.PREFIX_CACHING: YES,
    Feature.PREEMPTION: YES,
    Feature.PRIORITY_SCHEDULING: YES,
    Feature.KV_CONNECTOR: YES,
    Feature.KV_OFFLOADING: YES,
    Feature.SAMPLING: YES,
    Feature.PENALTIES: YES,
    Feature.LOGIT_BIAS: YES,
    Feature.BAD_WORDS: YES,
    Feature.LOGPROBS: YES,
    Feature.PROMPT_LOGPROBS: YES,
    Feature.PROMPT_EMBEDDINGS: Support("Its inputs are token ids."),
    Feature.LORA: Support("Linear layers have one set of weights for all requests."),
    Feature.LOGITS_PROCESSORS: Support("The sampler calls no code of the user's."),
    Feature.STRUCTURED_OUTPUTS: Support("The sampler takes no grammar's bitmask."),
}

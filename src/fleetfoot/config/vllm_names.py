"""vLLM's names that are not supported here, each with what to do instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fleetfoot.utils.validation import unknown_keyword

_NO_LORA = "LoRA adapters are not served; merge the adapter into the checkpoint"
_NO_MULTIMODAL = "models take text alone; leave it out"

ENGINE_KEYWORDS = {
    "swap_space": "leave it out: a preempted request is computed again; kv_offloading_size keeps KV in CPU memory",
    "cpu_offload_gb": "weights stay on the device; leave it out, or spread them with tensor_parallel_size",
    "tokenizer_mode": "leave it out: tokenizer.json is read, as by 'auto'",
    "tokenizer_revision": "revision holds for model and tokenizer; give tokenizer a folder for another one",
    "disable_log_stats": "leave it out: nothing is logged; stats() has the numbers",
    "disable_custom_all_reduce": "leave it out",
    "max_seq_len_to_capture": "leave it out: max_num_seqs sets the captured shapes; enforce_eager=True captures none",
    "kv_cache_dtype": "leave it out: KV has the model's dtype, as with 'auto'",
    "download_dir": "leave it out: the environment variable HF_HOME sets the folder of the hub's files",
    "served_model_name": "leave it out: model is the name",
    "hf_overrides": "change config.json in a copy of the checkpoint's folder; max_model_len has a keyword of its own",
    "rope_scaling": "change config.json in a copy of the checkpoint's folder",
    "limit_mm_per_prompt": _NO_MULTIMODAL,
    "mm_processor_kwargs": _NO_MULTIMODAL,
    "max_loras": _NO_LORA,
    "max_lora_rank": _NO_LORA,
    "data_parallel_size": "start one engine for each replica; tensor_parallel_size splits a model over GPUs",
    "enable_expert_parallel": "models are dense; leave it out",
    "guided_decoding_backend": "output is not constrained by grammars; leave it out",
    "structured_outputs_config": "output is not constrained by grammars; leave it out",
    "use_v2_block_manager": "leave it out",
    "num_scheduler_steps": "leave it out: async_scheduling hides the host's work behind the device's",
    "speculative_model": "set speculative_config={'model': ..., 'num_speculative_tokens': ...}",
    "num_speculative_tokens": "set speculative_config={'num_speculative_tokens': ..., 'method': ...}",
    "disable_async_output_proc": "leave it out; async_scheduling=False runs step by step",
    "chat_template": "give it to chat(chat_template=...)",
}
"""Keywords of vLLM's ``LLM``."""

ENGINE_FLAGS = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "dp": "data_parallel_size",
    "ep": "enable_expert_parallel",
    "sc": "speculative_config",
    "cc": "compilation_config",
}
"""Short flags of vLLM's commands, without their dash, and what they are short for."""

SPECULATIVE_KEYS = {
    "draft_tensor_parallel_size": "leave it out: with tensor parallelism each rank runs the whole drafter",
    "max_model_len": "leave it out: the engine's max_model_len counts for the drafter too",
    "quantization": "leave it out: drafters run in the model's dtype",
    "revision": "give the folder of a snapshot as model",
    "code_revision": "leave it out: code from a checkpoint is never run",
    "speculative_token_tree": "leave it out: drafts are one path",
    "rejection_sample_method": "leave it out: a draft is accepted where the model's own sampler chooses the same token",
    "acceptance_method": "leave it out: a draft is accepted where the model's own sampler chooses the same token",
    "speculative_disable_by_batch_size": "it is disable_by_batch_size",
    "num_lookahead_slots": "it is num_speculative_tokens",
    "disable_logprobs": "leave it out: logprobs are the same with drafts",
    "disable_padded_drafter_batch": "leave it out",
    "enforce_eager": "set the engine's enforce_eager",
}
"""Keys of vLLM's ``speculative_config``, each with what to do instead."""

CALL_KEYWORDS: dict[str, tuple[Any, str]] = {
    "lora_request": (None, _NO_LORA),
    "tokenization_kwargs": (None, "SamplingParams(truncate_prompt_tokens=...) truncates; give token ids for all else"),
    "mm_processor_kwargs": (None, _NO_MULTIMODAL),
    "chat_template_content_format": ("auto", "leave it out: templates get the content of messages as it is given"),
    "prompt_token_ids": (None, "give {'prompt_token_ids': [...]} as a prompt"),
    "guided_options_request": (None, "output is not constrained by grammars; leave it out"),
}
"""Keywords of vLLM's ``LLM.generate`` and ``LLM.chat``: the neutral value, and what to do instead."""


def check_call_keywords(owner: str, call: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise TypeError for keywords that a call does not have, unless they are vLLM's and have a neutral value.

    Args:
        owner: name of the call, for messages.
        call: the function, whose parameters are the known keywords.
        given: the other keywords, with their values.

    Raises:
        TypeError: the message has advice, or near names.
    """
    for name, value in given.items():
        neutral, hint = CALL_KEYWORDS.get(name, (None, None))
        is_neutral = value is None or (isinstance(value, str) and value == neutral)
        if hint is None or not is_neutral:
            known = [parameter for parameter in inspect.signature(call).parameters if parameter not in CALL_KEYWORDS]
            raise unknown_keyword(owner, name, [word for word in known if word not in ("self", "unknown")], hint)

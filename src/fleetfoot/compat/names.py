"""vLLM's names that are not supported here, each with what to do instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fleetfoot.compat.paths import NO_LORA, NO_MULTIMODAL, NO_PARSER
from fleetfoot.utils.validation import FieldError, is_neutral, unknown_keyword

_CONFIG = "set hf_overrides={...}: fields in place of those of config.json"
_SWITCH = (False, True)
_REPLICAS = "replicas that share experts are ranks of one engine: leave it out, and set nnodes for several machines"
_BY_ADVICE: dict[str, dict[str, tuple[Any, ...]]] = {
    "leave it out: a preempted request is computed again; kv_offloading_size keeps KV in CPU memory":
        {"swap_space": (0, 4)},
    "weights stay on the device; leave it out, or spread them with tensor_parallel_size": {"cpu_offload_gb": (0,)},
    "leave it out: tokenizer.json is read, as by 'auto'": {"tokenizer_mode": ("auto", "hf")},
    "revision holds for model and tokenizer; give tokenizer a folder for another one": {"tokenizer_revision": ()},
    "leave it out: nothing is logged; stats() has the numbers":
        {"disable_log_stats": _SWITCH, "disable_log_requests": _SWITCH, "enable_log_requests": (False,),
         "aggregate_engine_logging": (False,), "otlp_traces_endpoint": (), "collect_detailed_traces": (),
         "show_hidden_metrics_for_version": (), "kv_cache_metrics": (False,), "cudagraph_metrics": (False,),
         "enable_mfu_metrics": (False,)},
    "leave it out: max_num_seqs sets the captured shapes; enforce_eager=True captures none":
        {"max_seq_len_to_capture": (8192,), "cuda_graph_sizes": (), "cudagraph_capture_sizes": (),
         "max_cudagraph_capture_size": ()},
    "leave it out: scales of KV in FP8 are the checkpoint's, or 1": {"calculate_kv_scales": (False,)},
    "leave it out: the environment variables HF_HOME and HF_TOKEN set the hub's folder and token":
        {"download_dir": (), "hf_token": ()},
    "leave it out: model is the name": {"served_model_name": ()},
    _CONFIG: {"rope_scaling": (), "rope_theta": (), "rope_parameters": (), "hf_config_path": (),
              "disable_sliding_window": (False,)},
    NO_MULTIMODAL: {"limit_mm_per_prompt": (), "mm_processor_kwargs": (), "allowed_local_media_path": (),
                    "disable_chunked_mm_input": _SWITCH, "disable_mm_preprocessor_cache": _SWITCH,
                    "mm_processor_cache_gb": (0, 4), "mm_processor_cache_type": ("lru",), "mm_encoder_only": (False,),
                    "mm_encoder_tp_mode": ("weights",), "mm_encoder_attn_backend": (), "enable_mm_embeds": (False,),
                    "mm_shm_cache_max_object_size_mb": (128,), "interleave_mm_strings": _SWITCH,
                    "skip_mm_profiling": _SWITCH, "video_pruning_rate": (), "media_io_kwargs": (),
                    "allowed_media_domains": (), "io_processor_plugin": ()},
    NO_LORA: {"max_loras": (1,), "max_lora_rank": (16,), "max_cpu_loras": (), "lora_dtype": ("auto",),
               "fully_sharded_loras": (False,), "enable_lora_bias": (False,), "default_mm_loras": (),
               "lora_extra_vocab_size": (256,), "enable_prompt_adapter": (False,)},
    "leave it out: the replicas of data_parallel_size are processes of one machine; distributed_executor_backend='ray' "
    "spreads their ranks": {"data_parallel_backend": ("mp",)},
    _REPLICAS:
        {"data_parallel_rank": (), "data_parallel_size_local": (), "data_parallel_start_rank": (),
         "data_parallel_address": (), "data_parallel_rpc_port": (), "data_parallel_hybrid_lb": (False,),
         "data_parallel_external_lb": (False,)},
    "it is a key of eplb_config": {"num_redundant_experts": (0,)},
    "leave it out: `fleetfoot plan` prints how experts are placed, multiplied and sent":
        {"expert_placement_strategy": ("linear",), "all2all_backend": ("allgather_reducescatter",),
         "moe_backend": ("auto",), "enable_dbo": (False,), "dbo_decode_token_threshold": (32,),
         "dbo_prefill_token_threshold": (512,)},
    "leave it out: grammars are compiled by llguidance, the backend 'guidance'; options are fields of "
    "StructuredOutputsParams":
        {"guided_decoding_backend": ("auto", "guidance"), "structured_outputs_config": ("auto", "guidance", False),
         "guided_decoding_disable_fallback": _SWITCH, "guided_decoding_disable_any_whitespace": (False,),
         "guided_decoding_disable_additional_properties": (False,)},
    NO_PARSER:
        {"reasoning_parser": (), "reasoning_parser_plugin": (), "enable_reasoning": (False,)},
    "leave it out: async_scheduling hides the host's work behind the device's": {"num_scheduler_steps": (1,)},
    "leave it out; async_scheduling=False runs step by step": {"disable_async_output_proc": (False,)},
    "leave it out: max_num_batched_tokens limits a step":
        {"long_prefill_token_threshold": (0,), "max_num_partial_prefills": (1,), "max_long_partial_prefills": (1,)},
    "leave it out: logprobs are of the model's own logits": {"logprobs_mode": ("raw_logprobs",)},
    "it is pooler_config": {"override_pooler_config": ()},
    "collective_rpc() takes a function, whose first argument is the worker": {"worker_extension_cls": ()},
    "set speculative_config={'model': ..., 'num_speculative_tokens': ...}": {"speculative_model": ()},
    "set speculative_config={'num_speculative_tokens': ..., 'method': ...}": {"num_speculative_tokens": ()},
    "give it to chat(chat_template=...)": {"chat_template": ()},
    "leave it out":
        {"config_format": ("auto", "hf"), "model_impl": ("auto", "vllm", "fleetfoot"), "code_revision": (),
         "disable_custom_all_reduce": (False,), "decode_context_parallel_size": (1,),
         "max_parallel_loading_workers": (), "model_loader_extra_config": (), "safetensors_load_strategy": ("lazy",),
         "ignore_patterns": ("original/**/*",), "use_tqdm_on_load": _SWITCH, "use_v2_block_manager": _SWITCH,
         "disable_cascade_attn": _SWITCH, "disable_hybrid_kv_cache_manager": _SWITCH, "stream_interval": (1,),
         "prefix_caching_hash_algo": ("builtin", "sha256"), "scheduler_cls": (), "worker_cls": ("auto",),
         "attention_backend": (), "kv_sharing_fast_prefill": (False,),
         "additional_config": (),
         "attention_config": (), "kernel_config": (), "ec_transfer_config": (), "kv_offloading_backend": ("native",),
         "optimization_level": (), "pt_load_map_location": ("cpu",), "mamba_cache_dtype": ("auto",),
         "mamba_block_size": (), "override_attention_dtype": (),
         "dcp_kv_cache_interleave_size": (1,), "cp_kv_cache_interleave_size": (1,), "worker_use_ray": (False,),
         "ray_workers_use_nsight": (False,), "num_lookahead_slots": (0,), "preemption_mode": (),
         "scheduler_delay_factor": (0,), "multi_step_stream_outputs": _SWITCH, "tokenizer_pool_size": (0,)},
}  # fmt: skip
ENGINE_KEYWORDS = {name: (neutral, advice) for advice, names in _BY_ADVICE.items() for name, neutral in names.items()}
"""Keywords of vLLM's ``LLM`` and ``EngineArgs`` that are no settings here: the values that change nothing, beside None
and empty ones, and what to do instead of others."""


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """vLLM's value of ``attention_config``, for scripts that make one for other devices. The engine refuses it."""

    backend: AttentionBackendEnum | None = None


AttentionBackendEnum = Enum("AttentionBackendEnum", ["FLASH_ATTN", "FLEX_ATTENTION", "TRITON_ATTN", "TORCH_SDPA"])
"""Some of vLLM's names, for the same scripts."""


def check_engine_keyword(owner: str, name: str, value: Any) -> None:
    """Raise TypeError, with advice, unless ``value`` of a keyword in ENGINE_KEYWORDS changes nothing."""
    neutral, advice = ENGINE_KEYWORDS[name]
    if not is_neutral(value, neutral):
        raise TypeError(f"{owner} does not support {name}={value!r}; {advice}")


def replicas_here(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The keywords of an engine for the replicas that this process serves, and the number of the first one.

    vLLM's manifests start a process for each replica (``data_parallel_rank``), or for those of a machine
    (``data_parallel_hybrid_lb``), with a balancer before them. Without shared experts replicas need nothing of each
    other, so ``data_parallel_address`` and ``data_parallel_rpc_port`` have no effect.

    Raises FieldError: a number is not one of ``data_parallel_size``, or requests of this process would be for others.
    """
    given = {name: keywords[name] for name in _BY_ADVICE[_REPLICAS] if keywords.get(name) not in (None, False)}
    if not given or keywords.get("enable_expert_parallel"):
        return dict(keywords), 0
    kept = {name: value for name, value in keywords.items() if name not in _BY_ADVICE[_REPLICAS]}
    size = int(keywords.get("data_parallel_size") or 1)
    rank, local = given.get("data_parallel_rank"), given.get("data_parallel_size_local", size)
    first = given.get("data_parallel_start_rank", 0) if rank is None else rank
    number = local if rank is None else 1
    name = "data_parallel_start_rank" if rank is None else "data_parallel_rank"
    if not (type(first) is type(number) is int and 0 <= first <= size - number < size):
        raise FieldError(name, f"is {first!r}, for {number!r} of the replicas of data_parallel_size {size}", first)
    if number < size and rank is None and not given.get("data_parallel_hybrid_lb"):
        text = f"is {number}, and data_parallel_size {size}: one process does not serve the replicas of others; set "
        text += "data_parallel_hybrid_lb, or data_parallel_rank, and put a balancer before all"
        raise FieldError("data_parallel_size_local", text, number)
    return {**kept, "data_parallel_size": number}, first


ENGINE_FLAGS = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-dp": "data_parallel_size",
    "-ep": "enable_expert_parallel",
    "-sc": "speculative_config",
    "-cc": "compilation_config",
    "--executor": "distributed_executor_backend",
}
"""Short flags, those of one letter or two from vLLM's commands, and what they are short for."""

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
    "parallel_drafting": "leave it out: a draft model proposes one token after the other",
    "enforce_eager": "set the engine's enforce_eager",
}
"""Keys of vLLM's ``speculative_config``, each with what to do instead."""

CALL_KEYWORDS: dict[str, tuple[Any, str]] = {
    "lora_request": (None, NO_LORA),
    "tokenization_kwargs": (None, "SamplingParams(truncate_prompt_tokens=...) truncates; give token ids for all else"),
    "mm_processor_kwargs": (None, NO_MULTIMODAL),
    "chat_template_content_format": ("auto", "leave it out: templates get the content of messages as it is given"),
    "prompt_token_ids": (None, "give {'prompt_token_ids': [...]} as a prompt"),
    "guided_options_request": (None, "give it to SamplingParams, as structured_outputs"),
    "arrival_time": (None, "leave it out: a request arrives when it is added"),
    "trace_headers": (None, "leave it out: nothing is traced"),
    "data_parallel_rank": (None, "leave it out: an engine is one replica"),
    "stat_loggers": (None, "leave it out: nothing is logged; stats() has the numbers"),
    "start_engine_loop": (True, "leave it out: the engine runs from the start"),
    "enable_multiprocessing": (False, "leave it out: distributed_executor_backend sets where workers run"),
}
"""Keywords of the calls of vLLM's ``LLM`` and engines: the neutral value, and what to do instead."""

_BEAM_SEARCH = "call LLM.beam_search with BeamSearchParams"
_GUIDED = {
    f"guided_{name}": (None, f"set structured_outputs=StructuredOutputsParams({name}=...)")
    for name in ("json", "regex", "choice", "grammar", "json_object", "structural_tag", "whitespace_pattern")
}
SAMPLING_KEYWORDS: dict[str, tuple[Any, str]] = {
    "best_of": (1, "set n, and keep the outputs with the highest cumulative_logprob (logprobs=0 computes it)"),
    **dict.fromkeys(("use_beam_search", "early_stopping"), (False, _BEAM_SEARCH)),
    "length_penalty": (1.0, _BEAM_SEARCH),
    "guided_decoding": (None, "structured_outputs was given too; give one of them"),
    **_GUIDED,
    "guided_decoding_backend": (None, "leave it out: grammars are compiled by llguidance"),
    "thinking_token_budget": (None, "a server's chats take it, where the model marks the end of its reasoning"),
    "skip_clone": (True, "leave it out: parameters are copied"),
}
"""Keywords of vLLM's ``SamplingParams``: as CALL_KEYWORDS."""


def check_call_keywords(owner: str, call: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise TypeError, with advice or near names, for keywords that a call does not have, unless they are vLLM's with a
    neutral value. ``owner``: the call's name, for messages; ``given``: the other keywords, with their values."""
    for name, value in given.items():
        neutral, hint = CALL_KEYWORDS.get(name, (None, None))
        if hint is None or not is_neutral(value, (neutral,)):
            known = [parameter for parameter in inspect.signature(call).parameters if parameter not in CALL_KEYWORDS]
            raise unknown_keyword(owner, name, [word for word in known if word not in ("self", "unknown")], hint)

"""Tiny models of every architecture, and their steps through a paged KV cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from fleetfoot.config.model import LayerSpec, ModelConfig
from fleetfoot.distributed.groups import TensorGroup
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.kernels.recurrent.batch import make_state_batch
from fleetfoot.layers.context import ModelContext
from fleetfoot.models.interface import CausalLM
from fleetfoot.records.forward_context import AttentionMetadata, ForwardContext, LogitsMetadata
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.kernels import reference_kernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", **SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", **SCALED}
YARN_OPTIONS = {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.3}
SHORT = {"max_position_embeddings": 128}
WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
LINEAR = {"rope_type": "linear", "factor": 8.0}
SCALED_GLOBAL = {"full_attention": {**LINEAR, "rope_theta": 50000.0}, "sliding_attention": {"rope_type": "default"}}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
EVERY_LAYER = {"sliding_window": 5, "query_pre_attn_scalar": 20, "layer_types": LAYER_TYPES}

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.3, 1.1],
    "long_factor": [1.5, 3.0, 9.0],
}
MULTIPLIERS = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 3.0,
}
BIASES = {"attention_bias": True, "mlp_bias": True}

QWEN3_5 = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
SHARED_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
GRANITE_HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 48,
    **MAMBA,
    **MULTIPLIERS,
}
CONVS = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-groups-of-1": ("llama", {"num_key_value_heads": 4}),
    "llama-groups-of-3": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}),
    "llama-groups-of-8": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 6}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-biases": ("llama", BIASES),
    "llama-odd-sizes": ("llama", {"hidden_size": 52, "intermediate_size": 71, "vocab_size": 89, "head_dim": 10}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3, **SHORT, "head_dim": 16}),
    "llama-yarn": ("llama", {"rope_parameters": YARN, **SHORT, "head_dim": 16}),
    "llama-yarn-options": ("llama", {"rope_parameters": YARN_OPTIONS, **SHORT, "head_dim": 16}),
    "llama-yarn-attention-factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.4}, **SHORT}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-window": ("qwen2", {"tie_word_embeddings": True, **WINDOW}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 20}),
    "qwen3-layer-types": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": LAYER_TYPES}),
    "phi3": ("phi3", {}),
    "phi3-window-tied": ("phi3", {"sliding_window": 6, "tie_word_embeddings": True}),
    "phi3-partial": ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}),
    "phi3-long": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 20}),
    "granite": ("granite", MULTIPLIERS),
    "granite-tied-biases": (
        "granite",
        {**MULTIPLIERS, **BIASES, "tie_word_embeddings": True},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "smollm3-layers": ("smollm3", {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 5}),
    "gemma2": ("gemma2", {"sliding_window": 9, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma2-bias-untied": ("gemma2", {"sliding_window": 9, "attention_bias": True, "tie_word_embeddings": False}),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, **EVERY_LAYER}),
    "gemma3": ("gemma3_text", {"sliding_window": 9, "sliding_window_pattern": 2, "rope_scaling": LINEAR}),
    "gemma3-layer-types": ("gemma3_text", {"rope_parameters": SCALED_GLOBAL, **EVERY_LAYER}),
    "qwen3_5": ("qwen3_5_text", QWEN3_5),
    "qwen3_5-moe": ("qwen3_5_moe_text", {**QWEN3_5, **SHARED_EXPERTS}),
    "qwen3-next": ("qwen3_next", {**QWEN3_5, **SHARED_EXPERTS, "mlp_only_layers": [1]}),
    "lfm2": ("lfm2", CONVS),
    "lfm2-bias-untied": ("lfm2", {**CONVS, "conv_bias": True, "tie_word_embeddings": False, "conv_L_cache": 4}),
    "bamba": ("bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "granite-hybrid": ("granitemoehybrid", GRANITE_HYBRID),
    "granite-hybrid-rope": ("granitemoehybrid", {**GRANITE_HYBRID, "position_embedding_type": "rope"}),
    "olmo2": ("olmo2", {}),
    "olmo2-bias-tied": ("olmo2", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 20}),
}
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
OF_GLM = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
SPARSE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", EXPERTS),
    "mixtral-window": ("mixtral", {**EXPERTS, "sliding_window": 7}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "olmoe-normalized": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "moe_intermediate_size": 24}),
    "qwen3-moe-dense-layers": (
        "qwen3_moe",
        {
            **EXPERTS,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 6,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "gpt-oss": ("gpt_oss", {**EXPERTS, "sliding_window": 7}),
    "granite-moe": ("granitemoe", {**EXPERTS, **MULTIPLIERS}),
    "glm4-moe": ("glm4_moe", {**OF_GLM, "head_dim": 16}),
    "glm4-moe-groups": (
        "glm4_moe",
        {
            **OF_GLM,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 2,
            "use_qk_norm": True,
            "attention_bias": True,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
        },
    ),
}
"""With experts."""
MODELS |= SPARSE_MODELS


class PagedCache:
    """KV blocks handed out in a shuffled order, and the metadata of a step over them, built by hand."""

    def __init__(self, config: ModelConfig, block_size: int, num_blocks: int = 64) -> None:
        # Nothing may be read that was not written: a NaN would show. States begin with those of slot 0.
        self.kv_caches = [
            torch.full(_cache_shape(layer, block_size, num_blocks), float("nan")) for layer in config.layers
        ]
        for layer, cache in zip(config.layers, self.kv_caches, strict=True):
            if layer.recurrent is not None:
                cache[0] = 0
        self._block_size = block_size
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).tolist()
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._slots: dict[int, int] = {}

    def step(self, new_tokens: dict[int, list[int]]) -> tuple[torch.Tensor, ForwardContext]:
        """``(input_ids, ctx)`` of a step that appends to each request; single tokens have to come first."""
        positions: list[int] = []
        slots: list[int] = []
        starts, size = [0], self._block_size
        for request, tokens in new_tokens.items():
            table = self._tables.setdefault(request, [])
            begin = self._lengths.get(request, 0)
            self._lengths[request] = end = begin + len(tokens)
            while len(table) * size < end:
                table.append(self._free.pop())
            positions += range(begin, end)
            slots += [table[i // size] * size + i % size for i in range(begin, end)]
            starts.append(len(positions))
        tables = [torch.tensor(self._tables[request], dtype=torch.int32) for request in new_tokens]
        seq_lens = [self._lengths[request] for request in new_tokens]
        query_lens = [len(tokens) for tokens in new_tokens.values()]
        num_decodes = next((i for i, length in enumerate(query_lens) if length != 1), len(query_lens))
        metadata = AttentionMetadata(
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(seq_lens, dtype=torch.int32),
            pad_sequence(tables, batch_first=True),
            torch.tensor(slots),
            torch.tensor(positions),
            num_decodes,
            max(query_lens),
            max(seq_lens),
        )
        input_ids = torch.tensor([token for tokens in new_tokens.values() for token in tokens])
        written = {
            request: request % 8 * 4 + 1 + length % 3 for request, length in zip(new_tokens, seq_lens, strict=True)
        }
        read = torch.tensor([self._slots.get(request, 0) for request in new_tokens], dtype=torch.int32)
        write = torch.tensor([[slot] for slot in written.values()], dtype=torch.int32)
        self._slots |= written
        states = make_state_batch(metadata.query_start_loc, read, write, max(query_lens))
        return input_ids, ForwardContext(metadata, self.kv_caches, states=states)


def _cache_shape(layer: LayerSpec, block_size: int, num_blocks: int) -> tuple[int, ...]:
    """Of the KV of a layer, or of its states."""
    if layer.recurrent is not None:
        return num_blocks, sum(layer.recurrent.states().num_words(4, 4))
    mixer = layer.mixer
    return num_blocks, 2, mixer.num_kv_heads, block_size, mixer.head_dim


def run(model: CausalLM, cache: PagedCache, new_tokens: dict[int, list[int]]) -> dict[int, torch.Tensor]:
    """One step; the logits ``[num_new_tokens, vocab_size]`` of each request."""
    hidden = model(*cache.step(new_tokens))
    assert isinstance(hidden, torch.Tensor)
    logits = model.compute_logits(hidden).split([len(tokens) for tokens in new_tokens.values()])
    return dict(zip(new_tokens, logits, strict=True))


def context(**changes: Any) -> ModelContext:
    return replace(ModelContext(reference_kernels(), SDPABackend(), torch.float32, torch.device("cpu")), **changes)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    largest = expected.abs().max().item()
    assert (actual - expected).abs().max().item() < 1e-4 * largest


def prompt(length: int, vocab_size: int = 89, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def checkpoint(folder: Path, case: str, **more: Any) -> PreTrainedModel:
    """Write the checkpoint of a case of MODELS, and return the reference model."""
    model_type, fields = MODELS[case]
    return make_checkpoint(folder, model_type, **{**fields, **more})


def logits_metadata(metadata: AttentionMetadata, indices: list[int], starts: list[int]) -> LogitsMetadata:
    """Of the rows ``indices``. ``starts``: where the queries of the first requests begin, and the last ends."""
    count = max(len(starts) - 1, 0)
    has_drafts = len(indices) > count
    attention = replace(
        metadata,
        query_start_loc=torch.tensor(starts or [0], dtype=torch.int32),
        seq_lens=metadata.seq_lens[:count],
        block_tables=metadata.block_tables[:count],
        slot_mapping=metadata.slot_mapping[:0],
        positions=metadata.positions[:0],
        num_decodes=0 if has_drafts else count,
        max_query_len=3 if has_drafts else 1,
    )
    return LogitsMetadata(torch.tensor(indices, dtype=torch.int64), attention)


class Rank(TensorGroup):
    """One rank of several, without its peers."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

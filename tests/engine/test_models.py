"""The models against `transformers` on the same random checkpoints, in float32, through a paged KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import make_checkpoint, make_reference, reference_logits
from tests.helpers.kernels import cpu_kernels, reference_kernels

from fleetfoot.config.model import ModelConfig
from fleetfoot.config.parsing import SUPPORTED_ARCHITECTURES, load_model_config
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.kernels.linear.linear import PlainLinear
from fleetfoot.kernels.norm.pending_norm import PendingNorm
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.rotary import inverse_frequencies, rotary_table
from fleetfoot.models.interface import CausalLM
from fleetfoot.models.registry import model_class, supported_architectures
from fleetfoot.records.attention import AttentionMetadata
from fleetfoot.records.intermediate import IntermediateTensors
from fleetfoot.weights.loading import load_model, reload_weights

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-groups-of-1": ("llama", {"num_key_value_heads": 4}),
    "llama-groups-of-3": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}),
    "llama-groups-of-8": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 6}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-odd-sizes": ("llama", {"hidden_size": 52, "intermediate_size": 71, "vocab_size": 89, "head_dim": 10}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 128, "head_dim": 16}),
    "llama-yarn": ("llama", {"rope_parameters": YARN, "max_position_embeddings": 128, "head_dim": 16}),
    "llama-yarn-options": (
        "llama",
        {
            "rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 0.7}
            | {"mscale_all_dim": 1.3},
            "max_position_embeddings": 128,
            "head_dim": 16,
        },
    ),
    "llama-yarn-attention-factor": (
        "llama",
        {"rope_parameters": {**YARN, "attention_factor": 1.4}, "max_position_embeddings": 128},
    ),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-window": (
        "qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 20}),
    "qwen3-layer-types": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": LAYER_TYPES},
    ),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On tensors this small, threads do nothing but wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class PagedCache:
    """KV blocks handed out in a shuffled order, and the metadata of a step over them, built by hand."""

    def __init__(self, config: ModelConfig, block_size: int, num_blocks: int = 64) -> None:
        shape = (num_blocks, 2, config.num_kv_heads, block_size, config.head_dim)
        # Nothing may be read that was not written: a NaN would show.
        self.kv_caches = [torch.full(shape, float("nan")) for _ in range(config.num_layers)]
        self._block_size = block_size
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).tolist()
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def step(self, new_tokens: dict[int, list[int]]) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """``(input_ids, positions, metadata)`` that appends to each request; single tokens have to come first."""
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for request, tokens in new_tokens.items():
            table = self._tables.setdefault(request, [])
            begin = self._lengths.get(request, 0)
            self._lengths[request] = end = begin + len(tokens)
            while len(table) * self._block_size < end:
                table.append(self._free.pop())
            positions += range(begin, end)
            slots += [table[i // self._block_size] * self._block_size + i % self._block_size for i in range(begin, end)]
            starts.append(len(positions))
        tables = [self._tables[request] for request in new_tokens]
        width = max(map(len, tables))
        seq_lens = [self._lengths[request] for request in new_tokens]
        query_lens = [len(tokens) for tokens in new_tokens.values()]
        num_decodes = next((i for i, length in enumerate(query_lens) if length != 1), len(query_lens))
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            positions=torch.tensor(positions),
            num_decodes=num_decodes,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
        )
        return torch.tensor([token for tokens in new_tokens.values() for token in tokens]), metadata.positions, metadata


def run(model: CausalLM, cache: PagedCache, new_tokens: dict[int, list[int]]) -> dict[int, torch.Tensor]:
    """One step; the logits ``[num_new_tokens, vocab_size]`` of each request."""
    input_ids, positions, metadata = cache.step(new_tokens)
    hidden = model.forward(input_ids, positions, cache.kv_caches, metadata)
    assert isinstance(hidden, torch.Tensor)
    logits = model.compute_logits(hidden).split([len(tokens) for tokens in new_tokens.values()])
    return dict(zip(new_tokens, logits, strict=True))


def context(**changes: Any) -> ModelContext:
    defaults = {
        "ops": reference_kernels(),
        "attention": SDPABackend(),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    return ModelContext(**{**defaults, **changes})


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    largest = expected.abs().max().item()
    assert (actual - expected).abs().max().item() < 1e-4 * largest


def prompt(length: int, vocab_size: int = 89, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    model_type, fields = CASES[case]
    reference = make_checkpoint(tmp_path, model_type, **fields)
    config = load_model_config(tmp_path)
    model = load_model(config, context(), tmp_path)
    tokens = prompt(70)
    expected = reference_logits(reference, tokens)

    for block_size in (4, 16):
        cache = PagedCache(config, block_size)
        assert_close(run(model, cache, {0: tokens})[0], expected)  # at once

        chunks = [run(model, cache, {1: tokens[begin:end]})[1] for begin, end in ((0, 1), (1, 30), (30, 35), (35, 60))]
        decodes = [run(model, cache, {1: [token]})[1] for token in tokens[60:]]  # then token by token
        assert_close(torch.cat(chunks + decodes), expected)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1000000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        {**LLAMA3, "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 8192},
        {**YARN, "rope_theta": 1000000.0, "original_max_position_embeddings": 32768},
        {**YARN, "truncate": False, "beta_fast": 64.0, "attention_factor": 1.25},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_angles_equal_those_of_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 1, "head_dim": 128, "max_position_embeddings": 131072, "rope_parameters": rope}
    reference = make_reference("llama", **fields)
    reference.config.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    torch.testing.assert_close(frequencies, reference.model.rotary_emb.inv_freq, rtol=0, atol=0)
    table = rotary_table(config.rope, config.head_dim, config.max_position_embeddings, torch.device("cpu"))
    assert table.shape == (131072, 128)
    positions = torch.cat((torch.arange(64), torch.arange(64, 131072, 997), torch.tensor([131071])))
    cos, sin = reference.model.rotary_emb(torch.zeros(1), positions[None])
    expected = torch.cat((cos[0, :, :64], sin[0, :, :64]), dim=-1)
    torch.testing.assert_close(table[positions], expected, rtol=0, atol=2e-7)  # a vector's cosine and a scalar's


@pytest.mark.parametrize("case", ["llama", "llama-biases", "mistral-window", "qwen2", "qwen3-layer-types"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_ragged_batches_equal_single_requests(case: str, block_size: int, tmp_path: Path) -> None:
    model_type, fields = CASES[case]
    reference = make_checkpoint(tmp_path, model_type, **fields)
    config = load_model_config(tmp_path)
    model = load_model(config, context(ops=cpu_kernels()), tmp_path)
    cache = PagedCache(config, block_size)
    tokens = {request: prompt(length, seed=request) for request, length in enumerate((40, 9, 25, 33))}
    # Requests join, prefill in chunks and decode in the same steps; single tokens stand first in each.
    schedule = [
        {0: 20, 1: 8},
        {1: 1, 0: 13, 2: 4},
        {0: 1, 2: 21, 3: 30},
        {3: 1, 0: 1},
        {0: 1, 3: 1},
        {0: 4},
        {3: 1},
    ]
    logits: dict[int, list[torch.Tensor]] = {request: [] for request in tokens}
    done = dict.fromkeys(tokens, 0)
    for step in schedule:
        batch = {request: tokens[request][done[request] : done[request] + count] for request, count in step.items()}
        for request, rows in run(model, cache, batch).items():
            logits[request].append(rows)
            done[request] += step[request]
    assert done == {request: len(ids) for request, ids in tokens.items()}
    for request, ids in tokens.items():
        assert_close(torch.cat(logits[request]), reference_logits(reference, ids))


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_bfloat16_checkpoint_in_float32(model_type: str, tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, model_type, dtype=torch.bfloat16)
    config = load_model_config(tmp_path)
    assert config.dtype == "bfloat16"
    model = load_model(config, context(), tmp_path)
    assert_close(run(model, PagedCache(config, 16), {0: prompt(30)})[0], reference_logits(reference, prompt(30)))


def test_the_model_computes_in_the_dtype_asked_for(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, "llama")
    config = load_model_config(tmp_path)
    model = load_model(config, context(dtype=torch.bfloat16), tmp_path)
    cache = PagedCache(config, 16)
    cache.kv_caches = [kv_cache.to(torch.bfloat16) for kv_cache in cache.kv_caches]
    logits = run(model, cache, {0: prompt(30)})[0]
    expected = reference_logits(reference, prompt(30))
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cut", [1, 2])
def test_a_model_in_two_parts_gives_the_same_logits(tied: bool, cut: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", tie_word_embeddings=tied)
    config = load_model_config(tmp_path)
    whole = load_model(config, context(), tmp_path)
    first = load_model(config, context(), tmp_path, layers=range(cut))
    last = load_model(config, context(), tmp_path, layers=range(cut, config.num_layers))
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (True, False, False, True)

    cache = PagedCache(config, 4)
    input_ids, positions, metadata = cache.step({0: prompt(30)})
    between = first.forward(input_ids, positions, cache.kv_caches[:cut], metadata)
    assert isinstance(between, IntermediateTensors)
    received = between.empty_like()
    received.hidden_states.copy_(between.hidden_states)
    received.residual.copy_(between.residual)
    hidden = last.forward(input_ids, positions, cache.kv_caches[cut:], metadata, received)
    assert isinstance(hidden, torch.Tensor)
    expected = run(whole, PagedCache(config, 4), {0: prompt(30)})[0]
    torch.testing.assert_close(last.compute_logits(hidden), expected, rtol=0, atol=0)

    with pytest.raises(ValueError, match="intermediate_tensors"):
        last.forward(input_ids, positions, cache.kv_caches[cut:], metadata)
    with pytest.raises(ValueError, match="no logits head"):
        first.compute_logits(hidden)


class AddsToTheResidual(PlainLinear):
    """A residual linear layer that adds to the residual itself, where there are more than 8 rows."""

    num_added = 0

    def accumulate(self, x: torch.Tensor, total: torch.Tensor) -> bool:
        if len(x) <= 8:
            return False
        AddsToTheResidual.num_added += 1
        total.add_(self(x))
        return True


@pytest.mark.parametrize("case", ["llama-biases", "qwen3"])
def test_layers_that_add_to_the_residual_themselves(case: str, tmp_path: Path) -> None:
    model_type, fields = CASES[case]
    reference = make_checkpoint(tmp_path, model_type, **fields)
    config = load_model_config(tmp_path)
    ops = replace(reference_kernels(), prepare_residual_linear=AddsToTheResidual)
    whole = load_model(config, context(ops=ops), tmp_path)
    first = load_model(config, context(ops=ops), tmp_path, layers=range(1))
    last = load_model(config, context(ops=ops), tmp_path, layers=range(1, config.num_layers))
    tokens = prompt(40)
    expected = reference_logits(reference, tokens)

    before = AddsToTheResidual.num_added
    cache = PagedCache(config, 16)
    logits = [run(whole, cache, {0: tokens[begin:end]})[0] for begin, end in ((0, 20), (20, 24), (24, 40))]
    assert AddsToTheResidual.num_added - before == 2 * 2 * config.num_layers  # two chunks of more than 8 tokens
    assert_close(torch.cat(logits), expected)

    input_ids, positions, metadata = (parts := PagedCache(config, 16)).step({0: tokens})
    between = first.forward(input_ids, positions, parts.kv_caches[:1], metadata)
    assert isinstance(between, IntermediateTensors)
    hidden = last.forward(input_ids, positions, parts.kv_caches[1:], metadata, between)
    assert isinstance(hidden, torch.Tensor)
    assert_close(last.compute_logits(hidden), expected)


class LeavesTheNormPending(PlainLinear):
    """A linear layer that takes part in the norms on either side of it, where there are at most 8 rows."""

    num_joined = num_read = 0

    def join(
        self, x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
    ) -> PendingNorm | None:
        if len(x) > 8:
            return None
        LeavesTheNormPending.num_joined += 1
        total = residual + self(x)
        halves = total.square().chunk(2, dim=1)
        return PendingNorm(total * norm_weight, torch.stack([half.sum(dim=1) for half in halves]), total, eps)

    def reads_pending_norm(self, num_rows: int) -> bool:
        return num_rows <= 8

    def of_pending_norm(self, x: PendingNorm) -> torch.Tensor:
        LeavesTheNormPending.num_read += 1
        return self(x.finished())


class GateBehindANorm(LeavesTheNormPending):
    """The same of a gate and its up."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return reference_kernels().silu_and_mul(super().__call__(x))


@pytest.mark.parametrize("reads_in_mlp", [False, True])
@pytest.mark.parametrize("case", ["llama-biases", "qwen3"])
def test_layers_with_a_norm_between_them(case: str, reads_in_mlp: bool, tmp_path: Path) -> None:
    model_type, fields = CASES[case]
    reference = make_checkpoint(tmp_path, model_type, **fields)
    config = load_model_config(tmp_path)
    layer = LeavesTheNormPending
    ops = replace(reference_kernels(), prepare_linear=layer, prepare_residual_linear=layer)
    if reads_in_mlp:
        ops = replace(ops, prepare_gate_up=GateBehindANorm)
    whole = load_model(config, context(ops=ops), tmp_path)
    parts = [
        load_model(config, context(ops=ops), tmp_path, layers=range(*cut)) for cut in ((0, 1), (1, config.num_layers))
    ]
    tokens = prompt(40)
    expected = reference_logits(reference, tokens)

    before, cache = (layer.num_joined, layer.num_read), PagedCache(config, 16)
    logits = [run(whole, cache, {0: tokens[begin:end]})[0] for begin, end in ((0, 20), (20, 24), (24, 25), (25, 40))]
    # Twice few tokens: behind each layer but the last, and between attention and MLP if that reads it.
    norms = 2 * (config.num_layers - 1 + (config.num_layers if reads_in_mlp else 0))
    assert (layer.num_joined - before[0], layer.num_read - before[1]) == (norms, norms)
    assert_close(torch.cat(logits), expected)

    input_ids, positions, metadata = (cache := PagedCache(config, 16)).step({0: tokens[:7]})
    between = parts[0].forward(input_ids, positions, cache.kv_caches[:1], metadata)
    assert isinstance(between, IntermediateTensors)
    hidden = parts[1].forward(input_ids, positions, cache.kv_caches[1:], metadata, between)
    assert isinstance(hidden, torch.Tensor)
    assert_close(parts[1].compute_logits(hidden), expected[:7])


@pytest.mark.parametrize("layers", [range(0), range(2, 4), range(0, 3, 2), range(2, -1, -1)])
def test_impossible_parts_are_refused(layers: range) -> None:
    config = ModelConfig("LlamaForCausalLM", 8, 8, 8, 3, 2, 2, 4, 16)
    with pytest.raises(ValueError, match="expected consecutive ones"):
        load_model(config, context(), None, "dummy", layers=layers)


def test_the_rotary_table_can_be_shorter_than_the_models_limit(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, "llama")
    config = load_model_config(tmp_path)
    model = load_model(config, context(max_positions=30), tmp_path)
    assert_close(run(model, PagedCache(config, 16), {0: prompt(30)})[0], reference_logits(reference, prompt(30)))
    with pytest.raises(IndexError):
        run(model, PagedCache(config, 16), {0: prompt(31)})


@pytest.mark.parametrize("case", ["llama-tied", "llama-biases", "qwen3"])
def test_reloaded_weights_take_effect(case: str, tmp_path: Path) -> None:
    model_type, fields = CASES[case]
    make_checkpoint(tmp_path / "old", model_type, seed=1, **fields)
    reference = make_checkpoint(tmp_path / "new", model_type, seed=2, **fields)
    config = load_model_config(tmp_path / "old")
    run_context = context(ops=cpu_kernels())
    model = load_model(config, run_context, tmp_path / "old")
    before = run(model, PagedCache(config, 16), {0: prompt(30)})[0]
    reload_weights(model, run_context, tmp_path / "new")
    after = run(model, PagedCache(config, 16), {0: prompt(30)})[0]
    expected = reference_logits(reference, prompt(30))
    assert_close(after, expected)
    assert not torch.allclose(before, expected, rtol=0.01)


def test_one_reopened_slot_changes_that_tensor_alone(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, "llama", attention_bias=True)
    config = load_model_config(tmp_path)
    model = load_model(config, context(ops=cpu_kernels()), tmp_path)
    changed = ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.bias")
    with torch.no_grad():
        for slot in model.weight_slots():
            if slot.name in changed:
                torch.testing.assert_close(slot.destination(), reference.get_parameter(slot.name), rtol=0, atol=0)
                slot.destination().mul_(-2.0)
                reference.get_parameter(slot.name).mul_(-2.0)
    model.finish_loading()
    logits = run(model, PagedCache(config, 16), {0: prompt(30)})[0]
    assert_close(logits, reference_logits(reference, prompt(30)))


@pytest.mark.parametrize("case", CASES)
def test_the_slots_are_the_parameters_of_transformers(case: str, tmp_path: Path) -> None:
    model_type, fields = CASES[case]
    reference = make_reference(model_type, **fields)
    reference.config.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(reference.config.to_json_string(use_diff=False))
    config = load_model_config(tmp_path)
    model = load_model(config, context(), None, "dummy")
    slots = {slot.name: slot.shape for slot in model.weight_slots()}
    assert slots == {name: tuple(parameter.shape) for name, parameter in reference.named_parameters()}
    assert config.num_parameters == reference.num_parameters()


def test_the_registry_and_the_parser_agree() -> None:
    assert supported_architectures() == SUPPORTED_ARCHITECTURES
    for architecture in supported_architectures():
        assert model_class(architecture).__name__ == architecture
    with pytest.raises(ValueError, match="'GPT2LMHeadModel' is not supported; supported: LlamaForCausalLM, Mistral"):
        model_class("GPT2LMHeadModel")


def test_a_model_that_is_not_loaded_says_so() -> None:
    config = ModelConfig("LlamaForCausalLM", 8, 8, 8, 1, 2, 2, 4, 16, layer_windows=(None,))
    model = model_class("LlamaForCausalLM")(config, context())
    with pytest.raises(RuntimeError, match="finish_loading"):
        run(model, PagedCache(config, 4), {0: [1, 2]})


def test_a_shortened_model_has_a_layer_of_each_kind(tmp_path: Path) -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 5, "num_hidden_layers": 6}
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "full_attention"]
    for name, fields, layers, kept in (
        ("alike", {"num_hidden_layers": 6}, None, [0, 5]),
        ("one", {"num_hidden_layers": 1}, None, [0]),
        ("two", {"num_hidden_layers": 2}, None, [0, 1]),
        ("kinds", {**sliding, "layer_types": [*kinds, "full_attention"]}, None, [0, 1, 5]),
        ("last", {**sliding, "layer_types": [*kinds, "sliding_attention"]}, None, [0, 1, 5]),
        ("part", {**sliding, "layer_types": [*kinds, "full_attention"]}, range(2, 6), [0, 1, 3]),
    ):
        make_checkpoint(tmp_path / name, "qwen3", **fields)
        model = load_model(load_model_config(tmp_path / name), context(), tmp_path / name, layers=layers)
        short, indices = model.shortened()
        assert indices == kept, name
        assert [short._layers.index(layer) for layer in (model._layers[i] for i in kept)] == list(range(len(kept)))  # type: ignore[attr-defined]
        assert len(model._layers) == len(model.layers)  # type: ignore[attr-defined]

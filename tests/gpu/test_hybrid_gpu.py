"""Models with recurrent states on a GPU: kernels against float32, and engines in graphs against a CPU's tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import WIDE, make_checkpoint
from tests.helpers.engines import make_engine, prompt_of
from tests.helpers.kernels import reference_kernels, triton_kernels
from tests.helpers.paged_models import GRANITE_HYBRID, MAMBA, MODELS, QWEN3_5
from tests.helpers.recurrent_cases import CASES, RecurrenceCase, make_batch, random
from tests.helpers.schedules import Life, assert_lives_agree, live, live_alone, random_lives
from tests.helpers.second_tokens import make_mtp_checkpoint

from fleetfoot import SamplingParams
from fleetfoot.kernels.recurrent.conv import CausalConv
from fleetfoot.kernels.recurrent.gated_norm import GatedNorm
from fleetfoot.kernels.recurrent.recurrence import RecurrenceInputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_products"),
]

SHAPES = {
    **CASES,
    "qwen3.6": RecurrenceCase(True, 16, 32, 128, 128),
    "granite-4.0-h": RecurrenceCase(False, 1, 48, 128, 64),
}
LENGTHS = {
    "decodes": [1] * 9,
    "drafts": [4, 4, 4],
    "short": [5, 32, 1, 0, 17],
    "prompts": [70, 1, 300, 64, 33],
    "long": [2050],
}
ERRORS = {torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""The largest relative error, of the norm, of outputs and states."""


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", SHAPES)
def test_recurrence(name: str, lengths: str, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """From the same inputs and states, in float32."""
    case, counts = SHAPES[name], LENGTHS[lengths]
    num_tokens, num = sum(counts), len(counts)
    slots = range(1, num + 1)
    inputs, parameters = case.inputs(num_tokens, dtype, "cuda"), case.parameters("cuda")
    size = case.num_v_heads * case.head_v_dim
    gate = random(num_tokens, size, seed=1, dtype=dtype, device="cuda")
    weight = random(case.head_v_dim, seed=2, dtype=dtype, device="cuda")
    found = []
    for kernels, kind in ((reference_kernels(), torch.float32), (triton_kernels(), dtype)):
        state = case.state(num + 1, "cuda", state_dtype).to(torch.float32 if kind != dtype else state_dtype)
        batch = make_batch(counts, slots, [[slot] for slot in slots], "cuda")
        given = inputs
        if kind != dtype:
            beta = None if inputs.beta is None else inputs.beta.float()
            given = RecurrenceInputs(*(each.float() for each in (inputs.q, inputs.k, inputs.v, inputs.gate)), beta)
        norm = GatedNorm(gate.to(kind), weight.to(kind), 1e-5, case.head_v_dim, is_gate_last=case.is_delta)
        found.append((kernels.recurrence(given, state, parameters, batch, norm), state))
    (expected, kept), (got, state) = found
    assert error(got, expected) < ERRORS[dtype]
    assert error(state, kept) < ERRORS[dtype]
    assert not state[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("options", [{"has_silu": True, "norm_size": 128, "num_normed": 4096}, {"is_gated": True}])
def test_conv(options: dict[str, Any], lengths: str, dtype: torch.dtype) -> None:
    counts, channels = LENGTHS[lengths], 8192
    slots, width = range(1, len(counts) + 1), channels * (3 if "is_gated" in options else 1)
    x = random(sum(counts), width, seed=3, dtype=dtype, device="cuda")
    weight = random(4, channels, seed=1, dtype=dtype, device="cuda")
    before = random(len(counts) + 1, 3, channels, seed=4, dtype=dtype, device="cuda")
    before[0] = 0
    found = []
    for kernels, kind in ((reference_kernels(), torch.float32), (triton_kernels(), dtype)):
        state, batch = before.to(kind).clone(), make_batch(counts, slots, [[slot] for slot in slots], "cuda")
        conv = CausalConv(weight.to(kind), None, **options)
        found.append((kernels.causal_conv(x.to(kind), state, conv, batch), state))
    (expected, kept), (got, state) = found
    assert error(got, expected) < ERRORS[dtype]
    assert error(state, kept) < ERRORS[dtype]


# --- engines --------------------------------------------------------------------------------------------------------

HEADS = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 16, "hidden_size": 64}
WIDE_MAMBA = {**WIDE, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", {**QWEN3_5, **HEADS}),
    "qwen3-next": (MODELS["qwen3-next"][0], {**MODELS["qwen3-next"][1], **HEADS}),
    "lfm2": ("lfm2", {**MODELS["lfm2"][1], **WIDE}),
    "bamba": ("bamba", {**MAMBA, "attn_layer_indices": [1], **WIDE_MAMBA}),
    "granite-hybrid": ("granitemoehybrid", {**GRANITE_HYBRID, **WIDE_MAMBA}),
}
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "chunks": {"max_num_batched_tokens": 24},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}
VOCAB, LONGEST = 101, 150
"""Prompts have snapshots within a step."""


def engine(model: Path, device: str, **options: Any) -> Any:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 200, "block_size": 16}
    settings = {"dtype": "float32", "max_model_len": 200, "skip_tokenizer_init": True}
    return make_engine(model, device=device, **{**settings, **limits, **options})


def check(folder: Path, **options: Any) -> Any:
    """An engine in graphs that has the tokens of a CPU, alone there; twice, so that prefixes are hit."""
    reference = engine(folder, "cpu", model_runner="v1", enable_prefix_caching=False)
    tried = engine(folder, "cuda", model_runner="v2", **options)
    for seed in range(3):
        lives = random_lives(seed, VOCAB, longest=LONGEST)
        expected = live_alone(reference, lives)
        for number in range(2):
            assert_lives_agree(tried, lives, expected, f"seed {seed}, time {number}", tolerance=1e-3)
    reference.shutdown()
    return tried


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_cpus(family: str, way: str, tmp_path: Path) -> None:
    kind, fields = FAMILIES[family]
    make_checkpoint(tmp_path, kind, vocab_size=VOCAB, max_position_embeddings=256, **fields)
    tried = check(tmp_path, **WAYS[way])
    stats, graphs = tried.stats().scheduler, tried.core.executor.runner.graphs
    assert graphs.captured and graphs.num_steps["uniform" if way == "drafts" else "decode"] > 0
    assert stats.prefix_cache_hits > 0
    tried.shutdown()


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_second_tokens_as_drafts(num_drafts: int, tmp_path: Path) -> None:
    fields = {**FAMILIES["qwen3-next"][1], "mlp_only_layers": [], "max_position_embeddings": 256}
    make_mtp_checkpoint(tmp_path, vocab_size=VOCAB, **fields)
    drafts = {"method": "mtp", "num_speculative_tokens": num_drafts, "adaptive": False}
    tried = check(tmp_path, speculative_config=drafts)
    assert tried.stats().scheduler.drafts.num_drafted > 0
    assert tried.core.executor.runner.graphs.num_steps["uniform"] > 0
    tried.shutdown()


@pytest.mark.parametrize("family", ["qwen3_5", "bamba"])
def test_states_in_two_bytes(family: str, tmp_path: Path) -> None:
    """The tokens in graphs are those of eager steps."""
    kind, fields = FAMILIES[family]
    make_checkpoint(tmp_path, kind, vocab_size=VOCAB, max_position_embeddings=256, **fields)
    lives, outputs = random_lives(1, VOCAB, longest=LONGEST), []
    for eager in (True, False):
        options = {"enforce_eager": eager, "mamba_ssm_cache_dtype": "bfloat16", "enable_prefix_caching": False}
        tried = engine(tmp_path, "cuda", model_runner="v2", **options)
        found = live(tried, [replace(life, abort_at=None) for life in lives])
        outputs.append({name: output.outputs[0].token_ids for name, output in found.items()})
        tried.shutdown()
    assert outputs[0] == outputs[1]


def test_snapshots_are_hit(tmp_path: Path) -> None:
    """Prompts that share most of a long one's tokens compute at most a tenth of these again."""
    kind, fields = FAMILIES["qwen3_5"]
    make_checkpoint(tmp_path, kind, vocab_size=VOCAB, max_position_embeddings=4096, **fields)
    options = {"max_model_len": 3000, "max_num_batched_tokens": 4096, "num_gpu_blocks_override": 1000}
    reference = engine(tmp_path, "cpu", model_runner="v1", enable_prefix_caching=False, **options)
    tried = engine(tmp_path, "cuda", model_runner="v2", **options)
    base, params = prompt_of(2900, VOCAB), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for number, length in enumerate((2900, 2800, 2500)):
        life = Life(str(number), [*base[:length], 7, 8, 9], params)
        got = assert_lives_agree(tried, [life], live(reference, [life]), str(number), tolerance=1e-3)[str(number)]
        assert got.num_cached_tokens >= (0.89 * length if number else 0)
    tried.shutdown()
    reference.shutdown()

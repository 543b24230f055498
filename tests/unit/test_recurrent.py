"""Operations with recurrent states: the references against ``transformers``, their two forms against each other, and
the Triton kernels against both."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from tests.helpers.interpreter import compiled, interpreted, run_python
from tests.helpers.kernels import NATIVE_VARIANTS, native_kernels, reference_kernels, triton_kernels
from tests.helpers.recurrent_cases import CASES, SCHEDULES, make_batch, random, run_schedule, take, total_tokens
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridRMSNormGated,
    mamba2_chunk_scan,
)
from transformers.models.lfm2.modeling_lfm2 import causal_conv1d_fn
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    l2norm,
    torch_chunk_gated_delta_rule,
)

from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.recurrent.conv import CausalConv
from fleetfoot.kernels.recurrent.gated_norm import GatedNorm, gated_rms_norm_torch, gated_rms_norm_triton
from fleetfoot.records.forward_context import MAX_STEPS

KERNELS = [
    pytest.param(reference_kernels, id="torch"),
    pytest.param(triton_kernels, id="triton", marks=interpreted),
    *(
        pytest.param(partial(native_kernels, *variant.values), id=str(variant.values[0]), marks=variant.marks)
        for variant in NATIVE_VARIANTS
    ),
]
Load = Callable[[], Kernels]


@pytest.mark.parametrize("load", KERNELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_recurrence(name: str, schedule: str, load: Load) -> None:
    """Any division into steps gives what ``transformers`` computes at once, and slot 0 stays zero."""
    case, steps = CASES[name], SCHEDULES[schedule]
    totals = total_tokens(steps)
    inputs, parameters, state = case.inputs(sum(totals)), case.parameters(), case.state(16)
    got = run_schedule(
        lambda tokens, batch: load().recurrence(take(inputs, tokens), state, parameters, batch, None), steps
    )
    expected, decay = [], -parameters.log_decay.exp()
    for tokens in torch.arange(sum(totals)).split(totals):
        own = take(inputs, tokens)
        q, k, v, gate = (each[None] for each in (own.q, own.k, own.v, own.gate))
        if own.beta is None:
            options = {"D": parameters.skip, "dt_bias": parameters.step_bias, "dt_softplus": True}
            out = mamba2_chunk_scan(v, gate, decay, k, q, 16, **options)
        else:
            g = decay * torch.nn.functional.softplus(gate + parameters.step_bias)
            out, _ = torch_chunk_gated_delta_rule(q, k, v, g, own.beta[None].sigmoid())
        expected.append(out[0].flatten(1))
    torch.testing.assert_close(got, torch.cat(expected), rtol=2e-4, atol=2e-5)
    assert not state[0].any()


@pytest.mark.parametrize("load", KERNELS)
@pytest.mark.parametrize("name", ["delta", "mamba"])
def test_states_after_drafts(name: str, load: Load) -> None:
    """The state after each drafted token is as if the request had ended there; bfloat16 states are rounded alone."""
    case, lengths = CASES[name], [3, 1, 40]
    inputs, parameters, size = case.inputs(sum(lengths)), case.parameters(), case.num_v_heads * case.head_v_dim
    norm = GatedNorm(random(44, size, seed=1), random(case.head_v_dim, seed=2), 1e-5, case.head_v_dim, case.is_delta)
    state = case.state(16)
    before = state.clone()
    batch = make_batch(lengths, [9, 10, 11], [[1, 2, 9], [3, 4, 5], [6, -1, 11]])
    out = load().recurrence(inputs, state, parameters, batch, norm)
    written = {1: (0, 1), 2: (0, 2), 9: (0, 3), 5: (3, 4), 11: (4, 44)}  # slot -> tokens
    for slot, (first, end) in written.items():
        one, tokens = before.bfloat16(), torch.arange(first, end)
        read = {0: 9, 3: 10, 4: 11}[first]
        part = make_batch([end - first], [read], [[15]])
        own = GatedNorm(norm.gate[tokens], norm.weight, 1e-5, case.head_v_dim, case.is_delta)
        copy = before.clone()
        result = reference_kernels().recurrence(take(inputs, tokens), copy, parameters, part, own)
        torch.testing.assert_close(out[first:end], result, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state[slot], copy[15], rtol=1e-4, atol=1e-5)
        load().recurrence(take(inputs, tokens), one, parameters, part, own)
        torch.testing.assert_close(one[15].float(), copy[15], rtol=2e-2, atol=1e-2)
    kept = [slot for slot in range(16) if slot not in written]
    assert torch.equal(state[kept], before[kept])


@pytest.mark.parametrize("load", KERNELS)
@pytest.mark.parametrize("name", ["delta", "mamba"])
def test_snapshots_within_a_step(name: str, load: Load) -> None:
    """States after whole chunks of requests are those of shorter requests, of the convolution too."""
    case, lengths, chunk_slots = CASES[name], [70, 1, 200], torch.tensor([5, 0, 0, 6, 7, 0, 0, 0], dtype=torch.int32)
    inputs, parameters, state = case.inputs(sum(lengths)), case.parameters(), case.state(16)
    conv = CausalConv(random(4, 24, seed=1), None, has_silu=True)
    x, taps = random(sum(lengths), 24, seed=2), random(16, 3, 24, seed=3)
    before = state.clone(), taps.clone()
    batch = replace(make_batch(lengths, [9, 10, 11], [[1], [2], [3]]), chunk_slots=chunk_slots)
    load().recurrence(inputs, state, parameters, batch, None)
    load().causal_conv(x, taps, conv, batch)
    for slot, read, first, count in ((5, 9, 0, 64), (6, 11, 71, 128), (7, 11, 71, 192)):
        tokens, part = torch.arange(first, first + count), make_batch([count], [read], [[15]])
        reference_kernels().recurrence(take(inputs, tokens), before[0], parameters, part, None)
        reference_kernels().causal_conv(x[tokens], before[1], conv, part)
        torch.testing.assert_close(state[slot], before[0][15], rtol=1e-4, atol=1e-5)
        assert torch.equal(taps[slot], before[1][15])
    kept = [4, 8, *range(9, 15)]
    assert torch.equal(state[kept], before[0][kept])
    assert torch.equal(taps[kept], before[1][kept])


@pytest.mark.parametrize("load", KERNELS[1:])
@pytest.mark.parametrize("lengths", [[1, 70, 5], [1, 30, 5]])
@pytest.mark.parametrize("name", ["delta", "mamba-groups"])
def test_bfloat16(name: str, lengths: list[int], load: Load) -> None:
    case, states = CASES[name], []
    inputs, parameters = case.inputs(sum(lengths), torch.bfloat16), case.parameters()
    outputs = []
    for each in (reference_kernels, load):
        states.append(case.state(4))
        batch = make_batch(lengths, [1, 2, 3], [[1], [2], [3]])
        outputs.append(each().recurrence(inputs, states[-1], parameters, batch, None).float())
    for expected, got in (outputs, states):
        assert (got - expected).norm() < 1e-2 * expected.norm()


CONVS = {
    "silu": (4, {"has_silu": True}),
    "normed": (4, {"has_silu": True, "norm_size": 8, "num_normed": 16}),
    "gated": (3, {"is_gated": True}),
}


@pytest.mark.parametrize("load", KERNELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("kind", "has_bias"), [("silu", True), ("normed", False), ("gated", False), ("gated", True)])
def test_conv(kind: str, has_bias: bool, schedule: str, load: Load) -> None:
    (num_taps, options), channels, steps = CONVS[kind], 28, SCHEDULES[schedule]
    totals = total_tokens(steps)
    weight, bias = random(num_taps, channels, seed=1), random(channels, seed=2) if has_bias else None
    conv = CausalConv(weight, bias, **options)
    x = random(sum(totals), channels * (3 if conv.is_gated else 1) + 4, seed=3)[:, :-4]
    state = random(16, num_taps - 1, channels, seed=4)
    state[0] = 0
    got = run_schedule(lambda tokens, batch: load().causal_conv(x[tokens], state, conv, batch), steps)
    expected = []
    for own in x.split(totals):
        b, c, value = own.chunk(3, dim=1) if conv.is_gated else (1, 1, own)
        activation = "silu" if conv.has_silu else None
        out = c * causal_conv1d_fn((b * value).T[None], weight.T.contiguous(), bias, activation)[0].T
        if conv.norm_size:
            heads = out[:, : conv.num_normed].unflatten(1, (-1, conv.norm_size))
            out = torch.cat((l2norm(heads).flatten(1), out[:, conv.num_normed :]), dim=1)
        expected.append(out)
    torch.testing.assert_close(got, torch.cat(expected), rtol=1e-5, atol=1e-5)
    assert not state[0].any()


@pytest.mark.parametrize("load", KERNELS)
def test_inputs_kept_after_drafts(load: Load) -> None:
    """Slots have the last inputs up to each drafted token, those of the state before included."""
    x, conv = random(44, 12, seed=1), CausalConv(random(4, 12, seed=2))
    state = random(8, 3, 12, seed=3)
    state[0] = 0
    before = state.clone()
    batch = make_batch([2, 2, 40], [1, 2, 3], [[1, 4], [-1, 2], [5, 3]])
    load().causal_conv(x, state, conv, batch)
    windows = [torch.cat((before[slot], x[first:end])) for slot, first, end in ((1, 0, 2), (2, 2, 4), (3, 4, 44))]
    expected = {1: windows[0][1:4], 4: windows[0][2:5], 2: windows[1][2:5], 3: windows[2][-3:]}
    for slot in range(8):
        assert torch.equal(state[slot], expected.get(slot, before[slot])), slot


def test_gated_norm() -> None:
    x, gate, weight = random(5, 48, seed=1), random(5, 50, seed=2)[:, :48], random(48, seed=3)
    cases = [(False, 1, weight), (False, 3, weight), (True, 3, weight[:16])]
    for (is_gate_last, groups, own), run in product(cases, (gated_rms_norm_torch, gated_rms_norm_triton)):
        if is_gate_last:
            reference = Qwen3NextRMSNormGated(16, eps=1e-5)
        else:
            reference = GraniteMoeHybridRMSNormGated(48, 48 // groups, eps=1e-5)
        reference.weight.data = own
        heads = 48 if not is_gate_last else 16
        got = run(x, GatedNorm(gate, own, 1e-5, 48 // groups, is_gate_last))
        expected = reference(x.reshape(-1, heads), gate.reshape(-1, heads)).view(5, 48)
        torch.testing.assert_close(got, expected)


def test_more_states_than_steps() -> None:
    with pytest.raises(ValueError, match="write_slots"):
        make_batch([1], [0], [[1] * (MAX_STEPS + 1)])


@compiled
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """Also: no registers of a decode step are spilled."""
    printed = run_python(
        "-m", "tests.helpers.compile_kernels", "recurrent", is_forked=True, TRITON_CACHE_DIR=str(tmp_path)
    )
    stacks = [line.split(": ")[1].split()[0] for line in printed.splitlines() if "steps_kernel" in line]
    assert stacks and set(stacks) == {"0"}, printed

"""What a model must read and compute at least, against counts made position by position."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fleetfoot.assets import embedded_model_path
from fleetfoot.cli.bench_load import Samples, Work
from fleetfoot.cli.bench_roofline import Costs, PeakRates, Roofline, batch_floors, floor_report, measure_peak_rates
from fleetfoot.config.model import ModelConfig
from fleetfoot.config.parsing import load_model_config


@pytest.fixture
def model() -> ModelConfig:
    return load_model_config(embedded_model_path())


@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
@pytest.mark.parametrize(("first", "count"), [(0, 0), (0, 1), (0, 7), (3, 5), (8, 1), (8, 20), (30, 2)])
def test_positions_are_counted(window: int | None, first: int, count: int) -> None:
    costs = Costs(1, 1, 1, 1, 1, windows=(window, None, window))
    seen = [[min(position + 1, limit or 1000) for position in range(first, first + count)] for limit in costs.windows]
    assert costs.positions(first, count) == sum(map(sum, seen))


def test_costs_follow_from_the_weights(model: ModelConfig) -> None:
    costs = Costs.of(model, "bfloat16")
    embedding = model.vocab_size * model.hidden_size
    others = model.num_parameters - embedding * (1 if model.tie_word_embeddings else 2) - model.hidden_size
    assert costs.weight_bytes == 2 * (others + embedding)
    assert costs.flops_per_token + costs.flops_per_logits == 2 * (others + embedding)
    # A token that is not sampled needs all layers but the last, and of that keys and values.
    of_layer, keys_and_values = others // model.num_layers, 2 * model.num_kv_heads * model.head_dim * model.hidden_size
    assert costs.flops_per_token == 2 * (others - of_layer + keys_and_values)
    assert costs.kv_bytes == 2 * 2 * model.num_kv_heads * model.head_dim  # keys and values in bfloat16
    assert costs.attention_flops == 4 * model.num_heads * model.head_dim


def test_a_step_is_bound_by_memory_or_by_arithmetic() -> None:
    floor = Roofline(Costs(1000, 10, 40, 2, 3, windows=(None,)), PeakRates(bytes_per_s=100, flops_per_s=50))
    assert floor.linear_s(1, 1) == 10.0  # 1000 bytes
    assert floor.linear_s(100, 1) == (100 * 10 + 40) / 50
    assert floor.prefill_attention_s(4, 1) == 4 * 3 / 50  # all that the last layer needs
    assert floor.prefill_attention_s(4, 4) == floor.prefill_attention_s(0) == 0
    two = Roofline(replace(floor.costs, windows=(None, 2)), floor.peak_rates)
    assert two.prefill_attention_s(4, 1) == (2 + 3 + 4 + 2) * 3 / 50
    assert floor.decode_attention_s(4, 3) == (5 + 6) * 2 / 100  # the third token is never an input
    assert floor.decode_attention_s(4, 1) == floor.decode_attention_s(4, 0) == 0


def test_the_floor_of_a_load_is_that_of_its_steps() -> None:
    floor = Roofline(Costs(1000, 10, 40, 2, 3, windows=(None,)), PeakRates(bytes_per_s=100, flops_per_s=50))
    steps: list[Any] = [SimpleNamespace(num_tokens=8, num_requests=2), SimpleNamespace(num_tokens=2, num_requests=2)]
    samples = Samples(steps=steps, load_duration=[40.0, 10.0], work=[Work(4, 0, 2), Work(4, 2, 2)])
    report = floor_report(floor, samples, batch=(2, 4, 2))
    assert report is not None
    assert report["linear_s"] == 20.0
    assert report["attention_s"] == pytest.approx((4 + 4) * 3 / 50 + 2 * 5 * 2 / 100)
    assert report["share"] == pytest.approx((report["linear_s"] + report["attention_s"]) / 50.0)
    paced = floor_report(floor, samples, is_paced=True)
    assert paced is not None and paced["share"] is None and paced["duration_s"] == report["duration_s"]
    assert floor_report(None, samples) is None
    assert report["ttft_ms"] == pytest.approx(1e3 * (10.0 + 2 * 4 * 3 / 50))
    assert report["tpot_ms"] == pytest.approx(1e3 * (10.0 + 2 * 5 * 2 / 100))
    assert batch_floors(floor, 2, 4, 1).keys() == {"ttft_ms"}


def test_a_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock by which everything takes two seconds."""
    ticks = iter(range(0, 1000, 2))
    monkeypatch.setattr("fleetfoot.cli.bench_roofline.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr("fleetfoot.cli.bench_roofline._MATRIX_SIZE", {"cpu": 64})
    monkeypatch.setattr("fleetfoot.cli.bench_roofline._COPY_BYTES", 1 << 16)
    rates = measure_peak_rates("cpu", "float32")
    assert (rates.bytes_per_s, rates.flops_per_s) == ((1 << 16), 64**3)

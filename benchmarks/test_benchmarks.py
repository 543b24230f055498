"""The benchmarks that run on a CPU still run: a few steps of each. The figures mean nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.interpreter import run_python
from tests.helpers.zygote import ForkedPopen

BENCHMARKS = Path(__file__).parent


def run(name: str, *arguments: str) -> str:
    output: str
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments]
    with ForkedPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("overlap", [(), ("--no-overlap",)], ids=["overlap", "lockstep"])
def test_host_step(runner: str, overlap: tuple[str, ...]) -> None:
    report = json.loads(run("host_step", "--requests", "3", "--steps", "4", "--runner", runner, *overlap))
    assert (report["runner"], report["requests"]) == (runner, 3)
    assert report["step_us"] > 0


def test_a_viewer_costs_little() -> None:
    report = json.loads(run("host_step", "--requests", "3", "--steps", "4", "--watched"))
    assert 0 < report["record_us"] < report["look_us"] and 0 < report["share_of_4_ms_steps"] < 1


def test_sleep() -> None:
    model = str(BENCHMARKS.parent / "tests" / "assets" / "story-qwen3")
    sizes = "--num-blocks", "600", "--prompt-tokens", "20", "--device", "cpu"
    start, *levels, end = map(json.loads, run("sleep", model, *sizes).splitlines())
    assert start["start_s"] > 0 and end["after_shutdown_mib"] > 0
    assert [report["level"] for report in levels] == [1, 1, 2, 2]
    assert all(report["tokens_equal"] and report["asleep_mib"] < report["awake_mib"] for report in levels)


def test_host_time_of_prompts_and_of_the_scheduler() -> None:
    report = json.loads(run("host_step", "--prompts", "3x20", "--steps", "2"))
    assert report["host_us"] > report["before_first_launch_us"] > 0
    assert json.loads(run("scheduler_host_cost", "--requests", "3", "--steps", "4"))["step_us"] > 0
    table = run("executor_messages", "--requests", "3", "--steps", "4", "--workers", "1").splitlines()
    assert any("decodes" in line for line in table)


def test_host_time_of_launches() -> None:
    pytest.importorskip("triton")
    model = str(BENCHMARKS.parent / "tests" / "assets" / "story-qwen3")
    lines = run_python(str(BENCHMARKS / "host_launches.py"), model, "--shapes", "decode:2", "mixed:96", "--repeat", "2")
    for line, shape in zip(lines.splitlines(), ("decode:2", "mixed:96"), strict=True):
        report = json.loads(line)
        assert report["shape"] == shape and report["launches"] > 5
        assert report["median_us"] >= report["least_us"] > report["us_per_launch"] > 0


def test_structured() -> None:
    config = {"vocab_size": 3000, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    sizes = "--config", json.dumps(config), "--requests", "3", "--tokens", "4"
    report = json.loads(run("structured", *sizes, "--turns", "1"))
    assert set(report["ratio"]) == {"free", "mixed, free", "mixed, json", "json", "bounded"}
    assert json.loads(run("structured", *sizes, "--host"))["step_us"]["median"] > 0


def test_a_needle_is_found_with_kv_in_fp8() -> None:
    """In 1,200 tokens; docs/quantization.md has 32,000."""
    lines = run("needle", "--tokens", "1200", "--needles", "20", "--sharpness", "2", "--device", "cpu").splitlines()
    found = {report["kv"]: report["found"] for report in map(json.loads, lines)}
    assert found == {"auto": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0}


def test_a_token_beside_its_bytes() -> None:
    model = str(BENCHMARKS.parent / "src" / "fleetfoot" / "assets" / "story-llama")
    report = json.loads(run("decode_floor", model, "--tokens", "6", "--rounds", "1"))
    assert report["bytes"]["weights"] > 7_000_000 and report["bytes"]["states"] == 0
    assert report["ratio"] > 0

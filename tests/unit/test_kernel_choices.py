"""Which kernel computes what, for every number of rows, on a Hopper GPU that need not be there."""

import json
import sys
from difflib import unified_diff
from pathlib import Path

import pytest
from tests.helpers.commands import CommandRunner
from tests.helpers.interpreter import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("the kernels are chosen by modules that import Triton", allow_module_level=True)

from tests.helpers.kernel_choices import FOLDER, MODELS, choices, write_config

H200 = ["--gpu-memory", "140GiB", "--gpu-name", "NVIDIA H200"]


@pytest.mark.parametrize("name", MODELS)
def test_each_number_of_rows_has_the_kernel_that_was_measured(name: str) -> None:
    path = FOLDER / f"{name}.txt"
    lines = path.read_text().splitlines(), choices(name).splitlines()
    changes = "\n".join(unified_diff(*lines, "measured", "chosen now", lineterm=""))
    assert not changes, f"{changes}\n`python -m tests.helpers.kernel_choices` writes the new choices"


def test_no_file_is_left_of_another_model() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {*MODELS}


def test_a_plan_prints_the_table(run: CommandRunner, tmp_path: Path) -> None:
    model = write_config("llama-3.2-1b", tmp_path, num_hidden_layers=2)
    text = (FOLDER / "llama-3.2-1b.txt").read_text()
    assert run("plan", model, "--kernels", *H200).endswith(text[text.index("\nwhole layers") :])
    table = run.json("plan", model, "--kernels", "--json", *H200)["kernel_table"]
    assert table["o [2048, 2048], by rows"][-1] == [257, 8192, "library, added in place"]
    assert "kernel_table" not in run.json("plan", model, "--json", *H200)


@pytest.mark.parametrize(("size", "joins"), [(512, True), (1024, False)])
def test_a_shared_expert_joins_those_that_it_has_the_form_of(
    size: int, joins: bool, run: CommandRunner, tmp_path: Path
) -> None:
    """The table asks the layer."""
    config = {
        "architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 16,
        "num_experts_per_tok": 4, "moe_intermediate_size": 512, "shared_expert_intermediate_size": size,
        "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    table = run.json("plan", str(tmp_path), "--kernels", "--json", *H200)["kernel_table"]
    first, last, kernel = table[f"shared [{2 * size}, 2048], by rows"][0]
    assert ((first, last, kernel) == (1, 16, "with the experts")) == joins
    assert joins or "with the experts" not in str(table)


def test_triton_serves_without_the_room_of_hopper(
    run: CommandRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_config("llama-3.2-1b", tmp_path, num_hidden_layers=2)
    room = "fleetfoot.kernels_hopper"
    for name in [name for name in sys.modules if name.startswith(room)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, room, None)
    report = run.json("plan", folder, "--kernels", "--json", *H200)
    assert {"attention", "prepare_linear", "linear_chain", "layer_chain"} <= {
        operation for operation, name in report["kernels"].items() if name == "triton"
    }
    launched = {text for runs in report["kernel_table"].values() for _, _, text in runs}
    assert any(text.startswith("tiled 64x128") for text in launched)
    assert not any("hopper" in text or "_product" in text or "_block" in text for text in launched)
    assert room in report["hopper_problem"]
    assert f"none for Hopper GPUs alone: {report['hopper_problem']}" in run("plan", folder, *H200)


def test_biases_and_drafts_have_kernels_of_their_own(run: CommandRunner, tmp_path: Path) -> None:
    folder = write_config("qwen3-0.6b", tmp_path, num_hidden_layers=3, attention_bias=True)
    table = run.json("plan", folder, "--kernels", "--json", *H200)["kernel_table"]
    assert table["o [1024, 2048], by rows"][-1][2] == "library"  # which does not add to a residual with a bias
    drafts = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    table = run.json("plan", folder, "--kernels", "--json", *H200, *drafts)["kernel_table"]
    assert table["attention, by requests with drafts"][0][:2] == [1, 8]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "cpu"], "the plan is for cpu"),
        (["--gpu-memory", "80GiB", "--gpu-name", "NVIDIA A100"], "A100"),
        ([*H200, "-tp", "2"], "the plan has 2"),
    ],
)
def test_other_devices_have_no_table(run: CommandRunner, flags: list[str], words: str) -> None:
    message = run.refused("plan", "--kernels", *flags)
    assert words in message and "leave --kernels out" in message

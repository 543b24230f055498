"""`fleetfoot quantize` and `fleetfoot verify --against`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.helpers.checkpoints import make_checkpoint

from fleetfoot import LLM, SamplingParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.cli.against import compare_logprobs
from fleetfoot.cli.main import main
from fleetfoot.config.parsing import load_model_config

FORMATS = {"fp8": "fp8 by output, inputs quantized by token", "int8": "int8 by output, inputs quantized by token",
           "int4": "int4 in groups of 64"}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each format."""
    root = tmp_path_factory.mktemp("quantized")
    for name in FORMATS:
        assert main(["quantize", "--to", name, "--out", str(root / name)]) == 0
    return {name: root / name for name in FORMATS}


def tokens(model: Path, **settings: object) -> list[int]:
    llm = LLM(model=str(model), device="cpu", dtype="float32", max_model_len=64, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return list(llm.generate(["Once upon a time"], params, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_copy_is_a_checkpoint(name: str, folders: dict[str, Path]) -> None:
    formats = load_model_config(folders[name]).quantization.formats
    assert list(map(str, formats)) == [FORMATS[name]]
    assert (folders[name] / "tokenizer.json").is_file()
    if name != "int4":  # whose groups are others while loading
        assert tokens(folders[name]) == tokens(embedded_model_path(), quantization=name)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("name", FORMATS)
def test_transformers_reads_the_same_weights(name: str, folders: dict[str, Path]) -> None:
    """compressed-tensors decompresses what it reads to the values that the engine multiplies with."""
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    from fleetfoot.kernels.quantized.packed import unpack_columns
    from fleetfoot.weights.checkpoint import Checkpoint

    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folders[name],
        dtype=torch.float32,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    )
    layer = "model.layers.3.mlp.down_proj"
    found = loaded.get_submodule(layer).weight.detach()
    with Checkpoint(folders[name]) as checkpoint:
        scales = checkpoint.tensor(f"{layer}.weight_scale").float()
        if name == "int4":
            codes = unpack_columns(checkpoint.tensor(f"{layer}.weight_packed")).float() - 8
            expected = codes * scales.repeat_interleave(64, dim=1)
        else:
            expected = checkpoint.tensor(f"{layer}.weight").float() * scales
    torch.testing.assert_close(found.float(), expected)


def test_matrices_with_other_names_are_quantized(tmp_path: Path) -> None:
    """LFM2 has w1, w2 and w3, and layers whose inputs are not matrices."""
    types = ["conv", "full_attention", "conv"]
    make_checkpoint(tmp_path / "lfm2", "lfm2", hidden_size=64, head_dim=16, intermediate_size=96, layer_types=types)
    assert main(["quantize", str(tmp_path / "lfm2"), "--to", "fp8", "--out", str(tmp_path / "out")]) == 0
    found = []
    for folder, quantization in (("out", None), ("lfm2", "fp8")):
        llm = LLM(model=str(tmp_path / folder), quantization=quantization, device="cpu", dtype="float32",
                  max_model_len=64, skip_tokenizer_init=True)  # fmt: skip
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": [3, 90, 17, 4]}], params, use_tqdm=False)
        found.append(list(outputs[0].outputs[0].token_ids))
    assert found[0] == found[1]


def test_what_cannot_be_quantized_is_refused(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(folders["fp8"]), "--to", "int8", "--out", str(tmp_path / "x")]) == 2
    assert "quantized already" in capsys.readouterr().err
    (tmp_path / "file").write_text("x")
    assert main(["quantize", "--to", "int8", "--out", str(tmp_path)]) == 2
    assert main(["verify", "--by-layer"]) == 2


def test_against_reports_what_quantization_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.svg"
    command = ["verify", "--quantization", "fp8", "--against", str(embedded_model_path()), "--device", "cpu", "--json"]
    assert main([*command, "--by-layer", "--plot", str(plot)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 0 < report["mean_kl"] <= 0.01
    assert report["top1_agreement"] > 0.9
    assert report["num_positions"] > 400
    assert len(report["layers"]) == 8
    assert all(0 < error < 0.2 for error in report["layers"])
    assert plot.read_text().startswith("<svg")


def test_divergences_are_exact() -> None:
    first, second = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    report = compare_logprobs([first.log()], [second.log()])
    expected = 0.5 * torch.tensor(4 / 3).log().item()
    assert report["mean_kl"] == pytest.approx(expected / 2)
    assert report["largest_kl"] == pytest.approx(expected)
    assert report["top1_agreement"] == 0.5

"""Checkpoints with quantized experts: what they mean, in the forms of the hub, and engines with them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoints import UNTRAINED, make_checkpoint
from tests.helpers.engines import make_engine, prompt_of, run_requests
from tests.helpers.paged_models import PagedCache, context, run

from fleetfoot import LLMEngine, SamplingParams
from fleetfoot.config.parsing import load_model_config
from fleetfoot.quantization.methods import linear_methods
from fleetfoot.weights.loading import ModelLoader

TOKENS = prompt_of(9, 100)
Tensors = dict[str, torch.Tensor]
QWEN3 = {**UNTRAINED["qwen3-moe"][1], "num_hidden_layers": 2, "num_experts": 4}
GPT_OSS = {**UNTRAINED["gpt-oss"][1], "hidden_size": 64, "intermediate_size": 96, "num_experts_per_tok": 3}


def logits(folder: Path) -> torch.Tensor:
    """By the references in float32."""
    config = load_model_config(folder)
    methods = linear_methods(config.quantization, has_tied_head=config.tie_word_embeddings)
    model = ModelLoader(config, context(linear_methods=methods), folder).load()
    return run(model, PagedCache(config, 4), {0: TOKENS})[0]


# --- formats, each with its tensors and what these mean, by the formats' descriptions ---------------------------------


def joined(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """``[n, 8 * k]`` -> int32 ``[n, k]``: the code of column ``order[i]`` in bits ``4 * i``."""
    eights = codes.long().unflatten(1, (-1, 8))
    return sum(eights[:, :, column] << (4 * i) for i, column in enumerate(order)).to(torch.int32)  # type: ignore


def fp8_blocks(weight: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    values = (torch.randn(weight.shape) * 60).to(torch.float8_e4m3fn)
    scales = torch.rand(weight.shape[0] // 16, weight.shape[1] // 32) * 0.004
    whole = values.float() * scales.repeat_interleave(16, 0).repeat_interleave(32, 1)
    return {f"{name}.weight": values, f"{name}.weight_scale_inv": scales}, whole


def by_output(dtype: torch.dtype) -> Callable[[torch.Tensor, str], tuple[Tensors, torch.Tensor]]:
    def make(weight: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
        values = (torch.randn(weight.shape) * 40).clamp(-127, 127).to(dtype)
        scales = torch.rand(len(weight), 1) * 0.006
        return {f"{name}.weight": values, f"{name}.weight_scale": scales}, values.float() * scales

    return make


def by_tensor(weight: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    values, scale = (torch.randn(weight.shape) * 60).to(torch.float8_e4m3fn), torch.rand(()) * 0.004
    tensors = {f"{name}.weight": values, f"{name}.weight_scale": scale, f"{name}.input_scale": torch.tensor(0.01)}
    return tensors, values.float() * scale


def awq(weight: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    (num_outputs, num_inputs), order = weight.shape, (0, 2, 4, 6, 1, 3, 5, 7)
    codes, zeros = (
        torch.randint(0, 16, (num_inputs, num_outputs)),
        torch.randint(0, 16, (num_inputs // 16, num_outputs)),
    )
    scales = torch.rand(zeros.shape) * 0.05
    files = {"qweight": joined(codes, order), "qzeros": joined(zeros, order), "scales": scales}
    whole = (codes - zeros.repeat_interleave(16, 0)) * scales.repeat_interleave(16, 0)
    return {f"{name}.{key}": tensor for key, tensor in files.items()}, whole.T


def pack_quantized(weight: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    codes, scales = torch.randint(0, 16, weight.shape), torch.rand(len(weight), weight.shape[1] // 32) * 0.05
    shape = torch.tensor(weight.shape)
    files = {"weight_packed": joined(codes), "weight_scale": scales, "weight_shape": shape}
    return {f"{name}.{key}": tensor for key, tensor in files.items()}, (codes - 8) * scales.repeat_interleave(32, 1)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["re:.*experts.*proj"], "weights": weights, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


PLAIN = ["self_attn", "mlp.gate", "model.layers.1.mlp", "lm_head"]
FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp8 blocks": (fp8_blocks, {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32],
        "modules_to_not_convert": PLAIN,
    }),
    "fp8 by output": (
        by_output(torch.float8_e4m3fn),
        compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True),
    ),
    "int8 by output": (
        by_output(torch.int8), compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
    ),
    "modelopt": (by_tensor, {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": PLAIN}),
    "awq": (awq, {
        "quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "modules_to_not_convert": PLAIN,
    }),
    "pack-quantized": (
        pack_quantized,
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=True),
    ),
}  # fmt: skip


def make_quantized(folder: Path, form: str, model: str = "qwen3_moe", fields: dict[str, Any] = QWEN3) -> None:
    """A checkpoint in ``folder/plain`` with what the one in ``folder/quantized`` means."""
    make_checkpoint(folder / "plain", model, **fields)
    torch.manual_seed(0)
    make, content = FORMATS[form]
    plain = load_file(folder / "plain" / "model.safetensors")
    quantized = dict(plain)
    for name in [name for name in plain if ".experts." in name]:
        del quantized[name]
        tensors, plain[name] = make(plain[name], name.removesuffix(".weight"))
        quantized |= tensors
    config = json.loads((folder / "plain" / "config.json").read_text())
    write(folder / "quantized", quantized, config | {"quantization_config": content})
    write(folder / "plain", plain, config)


def write(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("form", FORMATS)
def test_formats(form: str, tmp_path: Path) -> None:
    make_quantized(tmp_path, form)
    torch.testing.assert_close(logits(tmp_path / "quantized"), logits(tmp_path / "plain"), rtol=1e-4, atol=1e-4)


def test_names_of_other_families(tmp_path: Path) -> None:
    """Mixtral's paths are not those of its modules here."""
    fields = {**UNTRAINED["mixtral"][1], "num_hidden_layers": 1, "num_local_experts": 3}
    excluded = FORMATS["modelopt"][1] | {"exclude_modules": ["self_attn", "block_sparse_moe.gate"]}
    FORMATS["mixtral"] = by_tensor, excluded
    make_quantized(tmp_path, "mixtral", "mixtral", fields)
    del FORMATS["mixtral"]
    torch.testing.assert_close(logits(tmp_path / "quantized"), logits(tmp_path / "plain"), rtol=1e-4, atol=1e-4)


def test_stacks_of_fp8(tmp_path: Path) -> None:
    make_quantized(tmp_path, "fp8 blocks")
    expected, file = logits(tmp_path / "quantized"), tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(file)
    mlp, count = "model.layers.0.mlp.experts.", QWEN3["num_experts"]
    for end in ("", "_scale_inv"):

        def layers(name: str, end: str = end) -> list[torch.Tensor]:
            return [tensors.pop(f"{mlp}{expert}.{name}.weight{end}") for expert in range(count)]

        gates, ups, downs = map(layers, ("gate_proj", "up_proj", "down_proj"))
        tensors[f"{mlp}gate_up_proj{end}"] = torch.stack([torch.cat(both) for both in zip(gates, ups, strict=True)])
        tensors[f"{mlp}down_proj{end}"] = torch.stack(downs)
    save_file(tensors, file)
    assert torch.equal(logits(tmp_path / "quantized"), expected)


def decoded(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4 ``[experts, rows, groups, 16]`` by the OCP's description: sign, two bits of exponent, one of mantissa."""
    values = torch.empty(*blocks.shape[:-1], 32)
    for i in range(16):
        for half in range(2):
            code = (blocks[..., i].int() >> (4 * half)) & 15
            exponent, mantissa = (code >> 1) & 3, (code & 1).float()
            magnitude = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
            values[..., 2 * i + half] = torch.where(code >= 8, -magnitude, magnitude)
    return (values * 2.0 ** (scales[..., None].float() - 127)).flatten(2)


def make_gpt_oss(folder: Path) -> None:
    """As OpenAI's, with the plain weights in ``folder/plain``."""
    make_checkpoint(folder / "plain", "gpt_oss", **GPT_OSS)
    torch.manual_seed(0)
    plain = load_file(folder / "plain" / "model.safetensors")
    quantized = dict(plain)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        count, num_inputs, num_outputs = quantized.pop(name).shape
        blocks = torch.randint(0, 256, (count, num_outputs, num_inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, blocks.shape[:3], dtype=torch.uint8)
        quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = decoded(blocks, scales).transpose(1, 2)
    config = json.loads((folder / "plain" / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    content = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    write(folder / "quantized", quantized, config | {"quantization_config": content})
    write(folder / "plain", plain, config)


def test_gpt_oss(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    make_gpt_oss(tmp_path)
    found = logits(tmp_path / "quantized")
    torch.testing.assert_close(found, logits(tmp_path / "plain"), rtol=1e-4, atol=1e-4)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "quantized", dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    with torch.no_grad():
        oracle = model.float()(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(found, oracle, rtol=1e-3, atol=1e-3)


# --- engines ----------------------------------------------------------------------------------------------------------


def greedy(engine: LLMEngine) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = {str(length): (TOKENS[:length], params) for length in (1, 5, 9)}
    return [output.outputs[0].token_ids for output in run_requests(engine, prompts).values()]


SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32"}


@pytest.mark.parametrize("form", ["awq", "gpt-oss"])
def test_ranks_runners_and_sleep_change_no_token(form: str, tmp_path: Path) -> None:
    """Ranks have halves of blocks, or 1 and 2 of 3 groups."""
    if form == "gpt-oss":
        make_gpt_oss(tmp_path)
    else:
        make_quantized(tmp_path, form)
    folder = tmp_path / "quantized"
    engine = make_engine(folder, enable_sleep_mode=True, model_runner="v2", **SETTINGS)
    expected, checksums = greedy(engine), engine.weight_checksums()
    engine.sleep(level=2)
    engine.wake_up()
    engine.reload_weights()
    assert greedy(engine) == expected and engine.weight_checksums() == checksums
    assert greedy(make_engine(folder, model_runner="v1", **SETTINGS)) == expected
    ranks = make_engine(folder, tensor_parallel_size=2, model_runner="v2", **SETTINGS)
    assert greedy(ranks) == expected and ranks.weight_checksums() == checksums
    ranks.shutdown()


@pytest.mark.parametrize(
    ("model", "quantization"), [("gpt-oss", "int4"), ("granite-moe", "fp8"), ("qwen3-moe", "int8")]
)
def test_weights_are_quantized_while_they_are_loaded(model: str, quantization: str, tmp_path: Path) -> None:
    """And updates of whole tensors equal a new start, of experts one by one and of stacks."""
    model_type, fields = UNTRAINED[model]
    make_checkpoint(tmp_path, model_type, **{**fields, "num_hidden_layers": 2, "hidden_size": 64})
    settings = {**SETTINGS, "quantization": quantization}
    engine = make_engine(tmp_path, **settings)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if "down_proj" in name or "output_linear" in name)
    tensors[name] = tensors[name].flip(-1).contiguous()
    before = engine.weight_checksums()
    engine.reload_weights(weights_iterator=[(name, tensors[name])])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fresh = make_engine(tmp_path, **settings)
    assert fresh.weight_checksums() == engine.weight_checksums() != before
    assert greedy(fresh) == greedy(engine)

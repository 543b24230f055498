"""Makes the checkpoints ``gptq-*`` and ``awq-*`` of ``tests/assets/quantized`` with GPTQModel, and their logits.

Run once, with GPTQModel and compressed-tensors beside the development environment, on a CPU: ``python -m
tools.gptq_assets FOLDER``. Logits are those of `transformers` with the weights that GPTQModel reads from its files.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gptqmodel
import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear, dequantize_gemm
from safetensors.torch import load_file, save_file
from tools.quantized_assets import SHAPE, TOKENS
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

TOKENIZER = Path(__file__).parent.parent / "src" / "fleetfoot" / "assets" / "story-llama"
WIDE = {"intermediate_size": 128, "num_key_value_heads": 4}
"""GPTQModel clips AWQ's weights in parts of 64 outputs."""
EXPERTS = {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gptq-group": ("llama", {}, {"bits": 4, "group_size": 32}),
    "gptq-ordered": ("llama", {}, {"bits": 4, "group_size": 32, "desc_act": True, "sym": False, "format": "gptq_v2"}),
    "gptq-bytes": ("llama", {}, {"bits": 8, "group_size": 32}),
    "gptq-experts": ("mixtral", EXPERTS, {"bits": 4, "group_size": 32, "sym": False}),
    "awq-group": ("llama", WIDE, {"bits": 4, "group_size": 32, "method": "awq", "format": "gemm"}),
}


def main(folder: Path) -> None:
    for name, (kind, shape, settings) in CASES.items():
        with TemporaryDirectory() as plain:
            make(folder / name, Path(plain), AutoConfig.for_model(kind, **{**SHAPE, **shape}), settings)
    path = folder / "versions.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"gptqmodel": gptqmodel.__version__}, indent=1) + "\n")


@torch.no_grad()
def make(folder: Path, plain: Path, config: Any, settings: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(len(folder.name))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for key, parameter in model.named_parameters():
        parameter.normal_(0.0, 0.15, generator=generator)
        if "norm" in key:
            parameter.add_(1.0)
    model.save_pretrained(plain)
    for path in TOKENIZER.glob("tokenizer*.json"):  # which GPTQModel loads
        shutil.copy(path, plain)
    texts = [torch.randint(3, 96, (64,), generator=generator).tolist() for _ in range(16)]
    quantizer = GPTQModel.load(str(plain), QuantizeConfig(**settings, device="cpu"), dtype=torch.bfloat16)
    quantizer.quantize([{"input_ids": text, "attention_mask": [1] * len(text)} for text in texts], batch_size=4)
    quantizer.save(str(folder))
    is_awq = "method" in settings
    # the dtypes of the files' scales
    backend, dtype = (BACKEND.AWQ_TORCH, torch.bfloat16) if is_awq else (BACKEND.GPTQ_TORCH, torch.float16)
    layers = GPTQModel.load(str(folder), backend=backend, device="cpu", dtype=dtype).model.named_modules()
    weights = {f"{name}.weight": read(layer) for name, layer in layers if hasattr(layer, "qweight")}
    for path in folder.iterdir():
        if path.name not in ("config.json", "quantize_config.json", "model.safetensors"):
            path.unlink()
    weights |= {name: each for name, each in load_file(folder / "model.safetensors").items() if "weight" in name}
    logits = reference(weights, config)(torch.tensor([TOKENS])).logits[0]
    save_file({"logits": logits}, folder / "reference.safetensors")
    print(folder.name, f"{logits.std().item():.3f}")


def read(layer: Any) -> torch.Tensor:
    """The weight of a quantized layer in float32, by GPTQModel's code."""
    layer.scales = layer.scales.float()
    if not isinstance(layer, AwqTorchLinear):
        return layer.dequantize_weight().T.contiguous()
    return dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, layer.bits, layer.group_size).T.contiguous()


def reference(weights: dict[str, torch.Tensor], config: Any) -> PreTrainedModel:
    with TemporaryDirectory() as folder:
        old = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
        names = {name: name for name in weights}
        if config.model_type == "mixtral":
            for new, first in old.items():
                names = {name: place.replace(new, first) for name, place in names.items()}
        save_file({names[name]: each.float() for name, each in weights.items()}, f"{folder}/model.safetensors")
        config.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

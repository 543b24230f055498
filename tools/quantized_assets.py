"""Makes the quantized checkpoints of ``tests/assets/quantized`` with the library compressed-tensors, and their logits.

Run once, with compressed-tensors beside the development environment: ``python tools/quantized_assets.py FOLDER``. Each
folder holds a tiny Llama as the library writes it, and in ``reference.safetensors`` its logits for
``TOKENS``, which the library computes, and `transformers` too where it loads the files. ``versions.json`` has the
versions that wrote them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import compressed_tensors
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

TOKENS = [3, 90, 17, 4, 55, 68, 21, 9]
SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int"}
TOKEN = {"strategy": "token", "dynamic": True}
STATIC = {"strategy": "tensor", "dynamic": False}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "fp8-tensor-static": ("float-quantized", FP8 | {"strategy": "tensor"}, FP8 | STATIC),
    "fp8-channel-token": ("float-quantized", FP8 | {"strategy": "channel"}, FP8 | TOKEN),
    "fp8-channel-weights": ("naive-quantized", FP8 | {"strategy": "channel"}, None),
    "fp8-block-group": (
        "float-quantized",
        FP8 | {"strategy": "block", "block_structure": [32, 32]},
        FP8 | {"strategy": "group", "dynamic": True, "group_size": 32},
    ),
    "fp8-narrow-blocks": (
        "float-quantized",
        FP8 | {"strategy": "block", "block_structure": [32, 16]},
        FP8 | {"strategy": "group", "dynamic": True, "group_size": 16},
    ),
    "int8-channel-token": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        {"num_bits": 8, "type": "int", "symmetric": True} | TOKEN,
    ),
    "int8-packed": (
        "pack-quantized",
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        None,
    ),
    "int4-group": ("pack-quantized", INT4 | {"strategy": "group", "group_size": 32, "symmetric": True}, None),
    "int4-group-zeros": ("pack-quantized", INT4 | {"strategy": "group", "group_size": 32, "symmetric": False}, None),
    "int4-channel": ("pack-quantized", INT4 | {"strategy": "channel", "symmetric": True}, None),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
        | dict.fromkeys(("scale_dtype", "zp_dtype"), "torch.uint8"),
        None,
    ),
}


def main(folder: Path) -> None:
    for name, (form, weights, activations) in CASES.items():
        make(folder / name, form, weights, activations)
    libraries = (compressed_tensors, torch, transformers)
    versions = {library.__name__: library.__version__ for library in libraries}
    (folder / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


@torch.no_grad()
def make(folder: Path, form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> None:
    generator = torch.Generator().manual_seed(len(str(weights)))
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, dtype="float32")).eval()
    for key, parameter in model.named_parameters():
        parameter.normal_(0.0, 0.15, generator=generator)
        if "norm" in key:
            parameter.add_(1.0)
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": form}
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=form)
    largest: dict[str, torch.Tensor] = {}
    layers = {
        key: each for key, each in model.named_modules() if isinstance(each, torch.nn.Linear) and key != "lm_head"
    }
    hooks = [
        each.register_forward_pre_hook(lambda module, args, key=key: largest.update({key: args[0].abs().max()}))
        for key, each in layers.items()
    ]
    model(torch.tensor([TOKENS]))
    for hook in hooks:
        hook.remove()
    apply_quantization_config(model, config)
    for key, layer in layers.items():
        args = layer.quantization_scheme.weights
        low, high = bounds(layer.weight, args)
        scale, zero = calculate_qparams(low, high, args)
        layer.weight_scale.copy_(scale.reshape(layer.weight_scale.shape))
        if hasattr(layer, "weight_zero_point"):
            layer.weight_zero_point.copy_(zero.reshape(layer.weight_zero_point.shape))
        if activations is not None and not activations["dynamic"]:
            bound = largest[key].reshape(1) * 0.9  # so that some values are clipped
            scale, _ = calculate_qparams(-bound, bound, layer.quantization_scheme.input_activations)
            layer.input_scale.copy_(scale)
        layer.quantization_status = QuantizationStatus.FROZEN
    computed = model(torch.tensor([TOKENS])).logits[
        0
    ]  # [tokens, vocab], with weights and inputs rounded by the library
    ModelCompressor.from_pretrained_model(model).compress_model(model)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: each.contiguous() for key, each in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = model.config.to_dict() | {"quantization_config": json.loads(config.model_dump_json())}
    content["quantization_config"]["quantization_status"] = "compressed"
    (folder / "config.json").write_text(json.dumps(content, indent=1) + "\n")
    # transformers loads no zero points, and makes weights in bfloat16 of MXFP4 beside the others in float32
    if "weight_zero_point" not in layers["model.layers.0.mlp.up_proj"].state_dict() and form != "mxfp4-pack-quantized":
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.testing.assert_close(loaded(torch.tensor([TOKENS])).logits[0], computed, rtol=1e-4, atol=1e-4)
    save_file({"logits": computed.contiguous()}, folder / "reference.safetensors")
    print(folder.name, sorted({key.rpartition(".")[2] for key in tensors}), f"{computed.std().item():.3f}")


def bounds(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest value of each part that has a scale."""
    if args.strategy == "tensor":
        return weight.amin().reshape(1), weight.amax().reshape(1)
    if args.strategy == "channel":
        return weight.amin(dim=1, keepdim=True), weight.amax(dim=1, keepdim=True)
    if args.strategy == "group":
        groups = weight.unflatten(1, (-1, args.group_size))
        return groups.amin(dim=2), groups.amax(dim=2)
    rows, columns = args.block_structure
    blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

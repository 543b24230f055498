"""`fleetfoot quantize`: writes a quantized copy of a checkpoint, in the format of compressed-tensors."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetfoot.cli.command import Command, UsageError, count, dump_object, usage_errors
from fleetfoot.config.engine import EMBEDDED_MODEL

if TYPE_CHECKING:
    import torch

_FORMATS = {"fp8": "float-quantized", "int8": "int-quantized", "int4": "pack-quantized"}
_GROUPS = (128, 64, 32)
"""Inputs of a group of 4 bits: the first of these that divides the inputs of all matrices."""
_MATRIX = re.compile(r"(.*\.layers\.\d+\..*(?:_proj|\.w[123]))\.weight$")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")
_INDEX = "model.safetensors.index.json"

_EPILOG = """\
The matrices of attention, MLPs and experts are quantized; embeddings, routers, norms and the logits head stay as they
are. Formats are those of llm-compressor: other engines and transformers load them.
  fp8   e4m3 with a scale for each output; inputs are quantized by token
  int8  the same with int8
  int4  in groups of 128 inputs (64 or 32 where 128 does not divide them), each with a scale
The files are read and written one after the other, and one matrix at a time is in memory. What it costs:
  fleetfoot verify DIR --against MODEL

--json prints one object: output, format, num_matrices, bytes_before, bytes_after"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=EMBEDDED_MODEL, help="a folder or a name on the hub")
    parser.add_argument("--to", required=True, choices=_FORMATS, help="the format of the weights")
    parser.add_argument("--out", required=True, metavar="DIR", help="a folder that is not there, or is empty")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _run(arguments: argparse.Namespace) -> int:
    target = Path(os.path.expanduser(arguments.out))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"--out {target}: it is there and not empty; name another folder")
    with usage_errors():
        from fleetfoot.config.parsing import load_model_config
        from fleetfoot.plan.resolve import find_model

        source = find_model(arguments.model)
        model = load_model_config(source)
        if model.quantization.method:
            raise UsageError(f"{source}: its weights are quantized already, {model.quantization.method}")
    report = quantize_checkpoint(source, target, arguments.to)
    if arguments.json:
        print(dump_object(report))
    else:
        sizes = " to ".join(f"{report[f'bytes_{when}'] / 1e6:,.1f} MB" for when in ("before", "after"))
        print(f"{target}: {count(report['num_matrices'], 'matrix', 'matrices')} in {report['format']}, from {sizes}")
    return 0


def quantize_checkpoint(source: Path, target: Path, to: str) -> dict[str, Any]:
    """Write the checkpoint of the folder ``source`` to ``target``, quantized to ``to`` (see `_FORMATS`). Raises
    WeightError: ``source`` cannot be read; UsageError: it has a matrix that is not quantized."""
    from safetensors.torch import save_file

    from fleetfoot.weights.checkpoint import Checkpoint
    from fleetfoot.weights.files import checkpoint_files

    files = checkpoint_files(source)
    with Checkpoint(source) as checkpoint:
        shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
        if stacked := [name for name, shape in shapes.items() if "experts" in name and len(shape) > 2]:
            raise UsageError(f"{stacked[0]} has all experts in one tensor, which is not supported")
        matrices = [name for name, shape in shapes.items() if _MATRIX.match(name) and len(shape) == 2]
        if not matrices:
            raise UsageError(f"{source} has no matrices with names as {_MATRIX.pattern}")
        inputs = {shapes[name][1] for name in matrices}
        group = next((size for size in _GROUPS if not any(each % size for each in inputs)), 0) if to == "int4" else 0
        if to == "int4" and not group:
            uneven = min(each for each in inputs if each % _GROUPS[-1])
            raise UsageError(f"{source} has matrices with {uneven} inputs, which groups of {_GROUPS[-1]} do not divide")
    target.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    before = after = 0
    for file in files:
        with Checkpoint(file) as checkpoint:
            tensors: dict[str, torch.Tensor] = {}
            for name in checkpoint.names():
                values = checkpoint.tensor(name)
                before += values.nbytes
                tensors |= dict(quantized(name, values, to, group)) if name in matrices else {name: values.clone()}
            save_file(tensors, target / file.name, {"format": "pt"})
            places |= dict.fromkeys(tensors, file.name)
            after += sum(each.nbytes for each in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": after}, "weight_map": places}
        (target / _INDEX).write_text(json.dumps(index, indent=2))
    _copy_others(source, target)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    others = [name for name, shape in shapes.items() if len(shape) == 2 and ".layers." in name and name not in matrices]
    config["quantization_config"] = _description(to, group, [name.removesuffix(".weight") for name in others])
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return {"output": str(target), "format": to, "num_matrices": len(matrices), "bytes_before": before,
            "bytes_after": after}  # fmt: skip


def quantized(name: str, values: torch.Tensor, to: str, group: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a quantized matrix ``[out, in]``. ``name``: of its tensor, which ends in ``.weight``."""
    import torch

    from fleetfoot.kernels.quantized.packed import pack_columns, quantize_groups
    from fleetfoot.kernels.quantized.scaled import FP8, quantize, scales_of

    if to == "int4":
        codes, scales = quantize_groups(values.float(), group)
        yield f"{name}_packed", pack_columns(codes)
        yield f"{name}_scale", scales
        yield f"{name}_shape", torch.tensor(values.shape)
        return
    dtype = FP8 if to == "fp8" else torch.int8
    scales = scales_of(values.abs().amax(dim=1, keepdim=True), dtype)
    yield name, quantize(values, scales, dtype)
    yield f"{name}_scale", scales


def _description(to: str, group: int, others: list[str]) -> dict[str, Any]:
    """``quantization_config``. ``others``: layers that are left as they are, routers and gates among them."""
    bits, kind = (4, "int") if to == "int4" else (8, "float" if to == "fp8" else "int")
    common: dict[str, Any] = {"num_bits": bits, "type": kind, "symmetric": True}
    weights = {**common, "group_size": group or None, "strategy": "group" if group else "channel", "dynamic": False}
    inputs = {**common, "group_size": None, "strategy": "token", "dynamic": True}
    layers: Mapping[str, Any] = {
        "targets": ["Linear"], "weights": weights, "input_activations": None if group else inputs,
        "output_activations": None, "format": _FORMATS[to],
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "config_groups": {"group_0": layers}, "format": _FORMATS[to],
        "ignore": ["lm_head", *others],
        "quantization_status": "compressed", "kv_cache_scheme": None,
    }  # fmt: skip


def _copy_others(source: Path, target: Path) -> None:
    """The tokenizer, templates and so on."""
    for path in source.iterdir():
        if path.is_file() and path.name != "config.json" and not any(path.match(each) for each in _WEIGHT_FILES):
            shutil.copyfile(path, target / path.name)
        elif path.name == "additional_chat_templates":
            shutil.copytree(path, target / path.name)


_HELP = "write a quantized copy of a checkpoint"
COMMAND = Command("quantize", _HELP, _add_arguments, _run, _EPILOG, "MODEL ")

"""Loads a model's weights from safetensors files, tensor by tensor, into their final memory.

Only the tensors in the specs are read: a rank of a pipeline reads its layers, a rank of a tensor group its part of each
tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch

from fleetfoot.records.weights import WeightError, WeightSpec
from fleetfoot.weights.checkpoint import Checkpoint

_FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
_BASE_PREFIX = "model."
_REDUNDANT_SUFFIX = ".rotary_emb.inv_freq"  # computed from the config, but contained in old exports
_MAX_LISTED = 10
_MAX_COMPARED_ROWS = 64


def load_safetensors(specs: Iterable[WeightSpec], folder: Path, elsewhere: Collection[str] = ()) -> None:
    """Copy a checkpoint into the specs, converted to their device and dtype; at most one tensor is in memory twice.

    All mismatches are found before the first byte is copied. Names without the prefix ``model.``, as in an export of
    the base model, are accepted if no name has it. A tied checkpoint may contain the matrix as ``lm_head.weight``, or
    twice. Of two copies only evenly spaced rows are compared: a separately trained head differs in all rows, and
    comparing gigabytes would slow every start.

    Args:
        elsewhere: names that belong to the model but not to these specs (other ranks').

    Raises:
        WeightError: a file cannot be read; tensors are missing, misshapen, not of a float dtype or unexpected (the
            error counts all of them and names the first ten); or the two copies of a tied matrix differ.
    """
    specs = list(specs)
    with Checkpoint(folder) as checkpoint:
        found = _by_model_name(checkpoint, [*(spec.name for spec in specs), *elsewhere])
        problems = [*_unfit(specs, found, checkpoint), *_unexpected(specs, found, checkpoint, elsewhere)]
        if problems:
            raise WeightError(_report(folder, problems))
        sources = {}  # tensor name in the checkpoint -> spec
        for spec in specs:
            first, *copies = _present(spec, found)
            for copy in copies:
                _check_same(checkpoint, spec, found[first], found[copy])
            sources[found[first]] = spec
        for name in checkpoint.names():
            if name in sources:
                spec = sources[name]
                spec.destination().copy_(checkpoint.tensor(name, spec.part))


def _by_model_name(checkpoint: Checkpoint, expected: Collection[str]) -> dict[str, str]:
    """Name in the model -> name in the checkpoint."""
    names = list(checkpoint.names())
    if any(name.startswith(_BASE_PREFIX) for name in names):
        return {name: name for name in names}
    known = set(expected)
    return {_BASE_PREFIX + name if _BASE_PREFIX + name in known else name: name for name in names}


def _present(spec: WeightSpec, found: dict[str, str]) -> list[str]:
    return [name for name in (spec.name, *spec.aliases) if name in found]


def _unfit(specs: list[WeightSpec], found: dict[str, str], checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """``(kind, description)`` of each spec that the checkpoint cannot fill."""
    for spec in specs:
        names = _present(spec, found)
        if not names:
            yield "missing", f"{spec.name}: expected {list(spec.shape)}"
        for name in names:
            shape, dtype = checkpoint.shape(found[name]), checkpoint.dtype(found[name])
            if shape != spec.shape:
                yield "misshapen", f"{found[name]}: found {list(shape)}, expected {list(spec.shape)}"
            if dtype not in _FLOAT_DTYPES:
                yield "quantized", f"{found[name]}: found {dtype}, expected one of {', '.join(_FLOAT_DTYPES)}"


def _unexpected(
    specs: list[WeightSpec], found: dict[str, str], checkpoint: Checkpoint, elsewhere: Collection[str]
) -> Iterator[tuple[str, str]]:
    known = {name for spec in specs for name in (spec.name, *spec.aliases)}
    known.update(elsewhere)
    for name, source in found.items():
        if name not in known and not name.endswith(_REDUNDANT_SUFFIX):
            yield "unexpected", f"{source}: found {list(checkpoint.shape(source))}, expected nothing of that name"


def _report(folder: Path, problems: list[tuple[str, str]]) -> str:
    kinds = [kind for kind, _ in problems]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    lines = [f"  {kind} {description}" for kind, description in problems[:_MAX_LISTED]]
    if len(problems) > _MAX_LISTED:
        lines.append(f"  and {len(problems) - _MAX_LISTED} more")
    hint = ""
    if [problem for kind, problem in problems if kind == "missing"] and all(
        problem.startswith("lm_head.") for kind, problem in problems if kind == "missing"
    ):
        hint = "\n(no output head: a base model, or a tied one with a config.json without tie_word_embeddings: true)"
    return f"the tensors in {folder} do not fit its config.json: {counts}\n" + "\n".join(lines) + hint


def _check_same(checkpoint: Checkpoint, spec: WeightSpec, name: str, copy: str) -> None:
    first, second = checkpoint.tensor(name, spec.part), checkpoint.tensor(copy, spec.part)
    rows = torch.linspace(0, first.shape[0] - 1, min(first.shape[0], _MAX_COMPARED_ROWS)).long()
    # NaN equals NaN: otherwise a checkpoint with a NaN would differ from itself.
    if not torch.allclose(first[rows].float(), second[rows].float(), rtol=0, atol=0, equal_nan=True):
        raise WeightError(
            f"{copy} differs from {name}, although tie_word_embeddings is true; set it to false in config.json"
        )

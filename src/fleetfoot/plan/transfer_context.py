"""What a KV connector gets from the plan: the context of each side, and the engine's fingerprint. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fleetfoot.config.model import DTYPE_BYTES
from fleetfoot.kv_transfer.base.connector import TransferContext
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.records.kv_layout import kv_cache_specs

_DIGEST_BYTES = 16
_SAMPLE_BYTES = 512
_IRRELEVANT = ("dtype", "bos_token_id", "eos_token_ids", "tie_word_embeddings", "vocab_size")
"""Fields of a model's config that change no KV; the dtype that counts is the engine's own."""


def check_connector_settings(plan: EnginePlan) -> None:
    """Let the active connector check its settings, before anything is started.

    A connector that does not exist is reported by `Decision.check`.

    Raises:
        ValueError, TypeError: the connector refuses its settings, or the class is not a connector.
    """
    connector = plan.connector
    if connector is not None and connector.layouts.exists:
        connector.connector_class.check_settings(_context(plan, fingerprint="", rank=0))


def transfer_context(plan: EnginePlan, *, rank: int = 0) -> TransferContext:
    """The context of one side of the plan's connector. The fingerprint reads the headers of the weight files.

    Args:
        rank: of a worker, 0 .. world_size - 1; the scheduler's side has 0.
    """
    return _context(plan, fingerprint=engine_fingerprint(plan), rank=rank)


def _context(plan: EnginePlan, *, fingerprint: str, rank: int) -> TransferContext:
    assert plan.connector is not None
    config = plan.connector.config
    return TransferContext(
        config=config,
        block_size=plan.config.block_size,
        fingerprint=fingerprint,
        engine_id=config.engine_id or plan.engine_id,
        num_ranks=plan.config.world_size,
        rank=rank,
        tensor_parallel_size=plan.config.tensor_parallel_size,
        pipeline_parallel_size=plan.config.pipeline_parallel_size,
        bytes_per_block=_bytes_per_block(plan),
        dtype=plan.dtype,
    )


def _bytes_per_block(plan: EnginePlan) -> int:
    """K and V of all layers on all ranks. If there are more ranks than KV heads, each rank holds one head."""
    model, ranks = plan.model, plan.config.tensor_parallel_size
    specs = *kv_cache_specs(model), *plan.drafter.kv_specs
    elements = sum(max(spec.num_kv_heads, ranks) * spec.head_dim for spec in specs)
    return 2 * elements * plan.config.block_size * DTYPE_BYTES[plan.dtype]


def engine_fingerprint(plan: EnginePlan) -> str:
    """32 hex digits over all that KV depends on: the model, its weights, dtype, block size, and the layers of the whole
    engine, a drafter's included.

    How the layers are spread over ranks is not in it, nor what device computes them.
    """
    model = {name: value for name, value in asdict(plan.model).items() if name not in _IRRELEVANT}
    content: dict[str, Any] = {
        "model": model,
        "weights": weights_identity(plan.model_path, plan.config.load_format, plan.config.seed),
        "quantization": plan.config.quantization,
        "dtype": plan.dtype,
        "block_size": plan.config.block_size,
        "kv_layout": plan.kv_layout,
    }
    drafter = plan.drafter.model
    if drafter is not None:
        content["drafter"] = {
            "method": drafter.method,
            "layers": [asdict(spec) for spec in plan.drafter.kv_specs],
            "weights": weights_identity(drafter.folder, plan.config.load_format, plan.config.seed),
        }
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def weights_identity(folder: Path, load_format: str, seed: int) -> str:
    """What tells one set of weights from another, without reading all of it.

    The commit, for a model from the hub. Else size, modification time, header, and a sample of every tensor of each
    file: size and time do not change when an archive's other weights are unpacked with its own times, and the samples
    may miss a few values that were changed in place.
    """
    if load_format == "dummy":
        return f"dummy {seed}"
    commit = _hub_commit(folder)
    if commit is not None:
        return commit
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for path in sorted(folder.glob("*.safetensors")):
        _add_file(digest, path)
    return digest.hexdigest()


def _hub_commit(folder: Path) -> str | None:
    """``models--owner--name@commit`` where the folder is a snapshot in the hub's cache."""
    parts = folder.parts
    if len(parts) >= 3 and parts[-2] == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", parts[-1]):
        return f"{parts[-3]}@{parts[-1]}"
    return None


def _add_file(digest: hashlib.blake2b, path: Path) -> None:
    """See `weights_identity`. A truncated file differs by its size; loading it fails anyway."""
    with open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns} ".encode())
        prefix = file.read(8)
        header = file.read(min(struct.unpack("<Q", prefix)[0], status.st_size)) if len(prefix) == 8 else b""
        digest.update(header)
        try:
            tensors = json.loads(header)
            spans = [value["data_offsets"] for name, value in sorted(tensors.items()) if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return
        for begin, end in spans:
            middle = 8 + len(header) + max(begin, (begin + end - _SAMPLE_BYTES) // 2)
            digest.update(os.pread(file.fileno(), min(_SAMPLE_BYTES, end - begin), middle))

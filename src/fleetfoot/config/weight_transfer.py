"""``weight_transfer_config``: how weights come from a trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from fleetfoot.config.json_fields import Bounds, JSONSettings

BACKENDS = ("auto", "nccl", "gloo", "ipc")


@dataclass(frozen=True, slots=True)
class WeightTransferConfig(JSONSettings):
    """``--weight-transfer-config``; names as in vLLM."""

    setting: ClassVar[str] = "weight_transfer_config"

    backend: str = field(default="auto", metadata={"choices": BACKENDS})
    """``nccl`` between GPUs, ``gloo`` between CPUs, ``ipc`` from the memory of another process on the same GPU, which
    needs no `init_weight_transfer_engine`; ``auto``: ``nccl`` or ``gloo``, by the engine's device."""
    check_finite: bool = False
    """Whether updates with values that are NaN or infinite are refused, unless a call sets it."""
    restart_memory_gb: float = field(default=4.0, metadata={"bounds": Bounds("be a number of at least 0", 0.0)})
    """GiB of the host's memory for weights that came as tensors or patches, which new workers load again with
    ``on_error="restart"``. Beyond, they are in files."""
    restart_path: str = ""
    """The folder of these files; empty: the system's for temporary files."""

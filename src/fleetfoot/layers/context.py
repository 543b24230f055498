"""What a model's layers are built with, handed down from the worker."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fleetfoot.distributed.groups import SINGLE_TENSOR_GROUP, TensorGroup
from fleetfoot.kernels.attention import AttentionBackend
from fleetfoot.kernels.interface import Kernels
from fleetfoot.quantization.base import LinearMethod
from fleetfoot.quantization.unquantized import UNQUANTIZED


@dataclass(frozen=True, slots=True)
class ModelContext:
    """Where and with what a model computes."""

    ops: Kernels
    attention: AttentionBackend
    dtype: torch.dtype
    """Of weights and activations."""
    device: torch.device
    max_positions: int | None = None
    """Rows of the rotary table: the longest sequence that will be served. None: the model's own limit."""
    tensor_group: TensorGroup = SINGLE_TENSOR_GROUP
    """The ranks that share each layer."""
    linear_method: LinearMethod = UNQUANTIZED
    """How linear layers store and apply their weights."""

"""A mode for tests in which operations that would wait for a device fail."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ASKS_FOR_VALUES = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.repeat_interleave.Tensor,
}
"""What makes a host wait for its device: values, and shapes that depend on them."""


class NoValues(TorchDispatchMode):
    """Refuses operations that no graph can hold."""

    num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in ASKS_FOR_VALUES, func
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            assert all(index is None or index.dtype is not torch.bool for index in args[1]), func
        NoValues.num_operations += 1
        return func(*args, **(kwargs or {}))

"""Linear layers with a weight that is prepared once for the device."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F


class PreparedLinear(Protocol):
    """``x [n, in]`` -> ``x @ weight.T + bias [n, out]``."""

    is_dense: bool
    """Whether the weight is contiguous at a fixed address, for kernels that read it in place."""
    has_rows: bool
    """Whether `rows` reads the stored weight, so that an embedding needs no copy of it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def unrounded(self, x: torch.Tensor) -> torch.Tensor:
        """`__call__` in float32, where the kernel supports it; else `__call__`. The largest output of each row is that
        of the sums before they are rounded."""
        ...

    def weight(self) -> torch.Tensor:
        """The plain weight ``[out, in]``. It may be a copy, so writing to it may not change the layer."""
        ...

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows ``[n, in]`` of the weight. ``index [n]``: int64. Raises IndexError: there is no such row."""
        ...

    def stored(self) -> tuple[int, int]:
        """Address and bytes of the memory of the weight."""
        ...

    def replace(self, weight: torch.Tensor) -> None:
        """Replace the weight by another one of the same shape and dtype.

        Raises:
            ValueError: shape, dtype or device differ.
        """
        ...


def check_replacement(new: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    """Raise ValueError unless ``new`` has this shape and dtype."""
    if new.shape != shape or new.dtype != dtype:
        raise ValueError(
            f"weight {list(new.shape)} {new.dtype} cannot replace {list(shape)} {dtype}: shape and dtype must be equal"
        )


class PlainLinear:
    """`torch.nn.functional.linear` on any device and dtype; the weight keeps its layout."""

    __slots__ = ("_bias", "_weight")
    is_dense = has_rows = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def unrounded(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    @property
    def has_bias(self) -> bool:
        return self._bias is not None

    def weight(self) -> torch.Tensor:
        return self._weight

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return F.embedding(index, self._weight)

    def stored(self) -> tuple[int, int]:
        return self._weight.data_ptr(), self._weight.nbytes

    def replace(self, weight: torch.Tensor) -> None:
        check_replacement(weight, self._weight.shape, self._weight.dtype)
        if weight.data_ptr() != self._weight.data_ptr() or weight.device != self._weight.device:
            self._weight.copy_(weight)


class PackedLinear:
    """The weight in the blocked layout of oneDNN, which `F.linear` would otherwise create in every call.

    Only the packed copy is kept. Unpacking restores the weight exactly.
    """

    __slots__ = ("_apply", "_apply_and_add", "_bias", "_packed")
    is_dense = has_rows = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = _pack(weight)
        self._bias = None if bias is None else bias.contiguous()  # oneDNN assumes a stride of 1
        self._apply = torch.ops.mkldnn._linear_pointwise.default
        self._apply_and_add = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._apply(x, self._packed, self._bias, "none", [], "")

    def unrounded(self, x: torch.Tensor) -> torch.Tensor:
        """See `PreparedLinear.unrounded`. oneDNN writes rounded sums only. Rounding is monotonic: the largest output
        of a row is wrong only where several are equal to it. For such rows, what rounding removed is computed by a
        second product, from which the first is subtracted before it is rounded."""
        rounded = self(x)
        if rounded.dtype is torch.float32:
            return rounded
        output = rounded.float()
        is_tied = (rounded == rounded.amax(dim=1, keepdim=True)).sum(dim=1) > 1  # [n]
        if is_tied.any():
            output[is_tied] += self._apply_and_add(x[is_tied], -rounded[is_tied], self._packed, self._bias, "add")
        return output

    def weight(self) -> torch.Tensor:
        return self._packed.to_dense()

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return F.embedding(index, self.weight())

    def stored(self) -> tuple[int, int]:
        return torch.ops.mkldnn.data_ptr(self._packed), torch.ops.mkldnn._nbytes(self._packed)

    def replace(self, weight: torch.Tensor) -> None:
        check_replacement(weight, self._packed.shape, self._packed.dtype)
        self._packed = _pack(weight)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    # No batch size hint: the layout without one was the fastest for every batch size.
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this dtype on this CPU, tested with a small weight."""
    weight = torch.arange(24 * 40, dtype=torch.float32).remainder(61).view(24, 40).to(dtype)
    try:
        linear = PackedLinear(weight, None)
        same = torch.equal(linear.weight(), weight)
        return same and linear(weight[:3]).shape == (3, 24)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


NO_CHAIN = None
"""`Kernels.linear_chain` where linear layers are not chained, and `Kernels.layer_chain` where layers are not."""


def prepare_linear_torch(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PreparedLinear:
    """Prepare ``weight [out, in]`` on its device: packed for oneDNN on a CPU, unchanged elsewhere.

    The layer keeps one copy; without other references to ``weight``, a packed layer frees the original.
    """
    if weight.device.type == "cpu" and weight.numel() > 0 and can_pack(weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)

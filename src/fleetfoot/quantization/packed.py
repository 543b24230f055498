"""Weights in words: 4 bits of AWQ, GPTQ, compressed-tensors and MXFP4, or made while loading; 8 of GPTQ and
compressed-tensors.

The tensors of a part of a matrix are read whole, or what this rank needs of them, and then brought into the one layout
that kernels read, so that one part is in memory twice. A spec that is opened later gets a tensor of the file's form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from fleetfoot.config.model import DTYPE_BYTES
from fleetfoot.config.quantization import WeightFormat
from fleetfoot.kernels.quantized import WRITTEN_OUTPUTS
from fleetfoot.quantization.base import ExpertMethod, LinearMethod, LinearShape
from fleetfoot.quantization.experts import QuantizedExpertMethod
from fleetfoot.quantization.scaled import QuantizedWeight, Scaled, bias_specs
from fleetfoot.records.weights import Rows, Span, WeightError, WeightSpec, slices_of

if TYPE_CHECKING:
    import torch

    from fleetfoot.kernels.interface import Kernels

_DUMMY_SCALES = {4: 0.02 / 4.6, 8: 0.02 / 74.0}
"""Random codes of so many bits with this scale have a standard deviation of 0.02."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the matrix on this rank, in the units of its files."""

    name: str
    size: int
    """Outputs in the checkpoint."""
    rows: Rows
    columns: slice
    num_columns: int
    """Inputs in the checkpoint."""
    span: slice
    """Where its outputs are stored."""
    group: int
    """Inputs of a group; 0: all."""
    per_word: int
    """Codes in a word of the file."""

    @property
    def hull(self) -> slice:
        """Outputs from the first to the last, in whole words."""
        runs = slices_of(self.rows)
        first, last = min(run.start for run in runs), max(run.stop for run in runs)
        return slice(first // self.per_word * self.per_word, min(-(-last // self.per_word) * self.per_word, self.size))

    @property
    def groups(self) -> slice:
        """Groups of the inputs."""
        if not self.group:
            return slice(0, 1)
        return slice(self.columns.start // self.group, -(-self.columns.stop // self.group))

    @property
    def num_groups(self) -> int:
        return -(-self.num_columns // self.group) if self.group else 1

    def outputs(self, device: torch.device) -> torch.Tensor:
        """``[n]``: the outputs, counted from the hull's first one."""
        import torch

        return (
            torch.cat([torch.arange(run.start, run.stop, device=device) for run in slices_of(self.rows)])
            - self.hull.start
        )

    def words(self, some: slice) -> slice:
        return slice(some.start // self.per_word, self.num_words(some.stop))

    def num_words(self, count: int) -> int:
        return -(-count // self.per_word)


@dataclass(frozen=True, slots=True)
class _Content:
    """A part, unpacked, with the inputs of this rank."""

    codes: torch.Tensor
    """``[out, in]`` uint8."""
    scales: torch.Tensor
    """``[out, groups of the part]``"""
    zeros: torch.Tensor | None
    """``[out, groups of the part]``"""
    group_of: torch.Tensor | None = None
    """``[in]``: the group of each input in the checkpoint; None: in order."""


Tensors = dict[str, Any]


class _Layout:
    """The tensors of a part in a kind of file: suffix -> `WeightSpec` fields, and the two ways of conversion."""

    def __init__(self, form: WeightFormat, dtype: torch.dtype) -> None:
        self.form, self.dtype, self.bits = form, dtype, 8 if form.values == "int8" else 4

    def fields(self, part: _Part) -> dict[str, dict[str, Any]]:
        raise NotImplementedError

    def read(self, part: _Part, tensors: Tensors) -> _Content:
        raise NotImplementedError

    def write(self, part: _Part, content: _Content) -> Tensors:
        raise NotImplementedError


def _spec(shape: tuple[int, ...], part: tuple[Any, ...], kind: str = "integer", init: Any = "normal") -> dict[str, Any]:
    return {"shape": shape, "part": part, "kind": kind, "init": init}


class _ByColumns(_Layout):
    """AWQ and GPTQ: ``[in, out]``, AWQ packed along the outputs and in an order of its own, GPTQ along the inputs."""

    @property
    def is_awq(self) -> bool:
        return self.form.tensors == "awq"

    def fields(self, part: _Part) -> dict[str, dict[str, Any]]:
        hull, words, groups = part.hull, part.words, part.groups
        num_words = part.num_words(part.size)
        if self.is_awq:
            codes = _spec((part.num_columns, num_words), (part.columns, words(hull)))
        else:
            codes = _spec((part.num_words(part.num_columns), part.size), (words(part.columns), hull))
        zero = {4: -0x77777778, 8: -0x7F7F7F80}[self.bits]  # 8 or 128 in each
        if self.form.tensors == "gptq":
            zero = {4: 0x77777777, 8: 0x7F7F7F7F}[self.bits]
        fields = {
            "qweight": codes,
            "qzeros": _spec((part.num_groups, num_words), (groups, words(hull)), init=zero),
            "scales": _spec((part.num_groups, part.size), (groups, hull), "float", _DUMMY_SCALES[self.bits]),
        }
        if not self.is_awq:
            order = partial(_fill_order, first=part.columns.start, group=part.group or part.num_columns)
            fields["g_idx"] = _spec((part.num_columns,), (part.columns,), init=order)
        return fields

    def read(self, part: _Part, tensors: Tensors) -> _Content:
        from fleetfoot.kernels.quantized.packed import unpack_columns, unpack_rows

        outputs = part.outputs(tensors["scales"].device)
        if self.is_awq:
            codes = unpack_columns(tensors["qweight"], is_awq=True)
        else:
            first = part.columns.start % part.per_word
            codes = unpack_rows(tensors["qweight"], self.bits)[first : first + part.columns.stop - part.columns.start]
        zeros = unpack_columns(tensors["qzeros"], is_awq=self.is_awq, bits=self.bits)
        if self.form.tensors == "gptq":
            zeros = (zeros + 1) & ((1 << self.bits) - 1)  # as other tools read them, too
        group_of = None
        if not self.is_awq:
            group_of = self._group_of(part, tensors["g_idx"].long())
        scales = tensors["scales"][:, outputs].T
        return _Content(codes[:, outputs].T, scales, zeros[:, outputs].T, group_of)

    def _group_of(self, part: _Part, index: torch.Tensor) -> torch.Tensor | None:
        """See `_Content`. Raises WeightError: there is no such group, or groups are in another order than the form
        says."""
        import torch

        if bool(((index < 0) | (index >= part.num_groups)).any()):
            raise WeightError(f"{part.name}.g_idx has values that are not groups from 0 to {part.num_groups - 1}")
        if self.form.is_ordered:
            return index - part.groups.start
        expected = torch.empty_like(index)
        _fill_order(expected, part.columns.start, part.group or part.num_columns)
        if not torch.equal(index, expected):
            raise WeightError(f"{part.name}.g_idx has groups in another order, and desc_act is not true")
        return None

    def write(self, part: _Part, content: _Content) -> Tensors:
        import torch

        from fleetfoot.kernels.quantized.packed import pack_columns, pack_rows

        def spread(values: torch.Tensor) -> torch.Tensor:  # [n, k] -> [k, hull]
            whole = values.new_zeros(values.shape[1], part.hull.stop - part.hull.start)
            whole[:, part.outputs(values.device)] = values.T
            return whole

        assert content.zeros is not None
        zeros = content.zeros
        if self.form.tensors == "gptq":
            zeros = (zeros - 1) & ((1 << self.bits) - 1)
        tensors = {
            "qzeros": pack_columns(spread(zeros), is_awq=self.is_awq, bits=self.bits),
            "scales": spread(content.scales),
        }
        if self.is_awq:
            return tensors | {"qweight": pack_columns(spread(content.codes), is_awq=True)}
        device, columns = content.codes.device, torch.arange(part.columns.start, part.columns.stop)
        order = columns.to(device) // (part.group or part.num_columns) if content.group_of is None else content.group_of
        return tensors | {"qweight": pack_rows(spread(content.codes), self.bits), "g_idx": order.to(torch.int32)}


def _fill_order(target: torch.Tensor, first: int, group: int) -> None:
    import torch

    target.copy_(torch.arange(first, first + len(target), device=target.device) // group)


class _CompressedTensors(_Layout):
    """compressed-tensors: ``[out, in]``, packed along the inputs, zero points along the outputs."""

    def fields(self, part: _Part) -> dict[str, dict[str, Any]]:
        num_words, hull = part.num_words(part.num_columns), part.hull
        scales = (part.size, part.num_groups), (part.rows, part.groups)
        fields = {
            "weight_packed": _spec((part.size, num_words), (part.rows, part.words(part.columns))),
            "weight_scale": _spec(*scales, "float", _DUMMY_SCALES[self.bits]),
            "weight_shape": _spec((2,), (), init=partial(_fill_shape, shape=(part.size, part.num_columns))),
        }
        if self.form.has_zeros:
            zeros = (part.num_words(part.size), part.num_groups), (part.words(hull), part.groups)
            fields["weight_zero_point"] = _spec(*zeros, init=-0x77777778)
        return fields

    def read(self, part: _Part, tensors: Tensors) -> _Content:
        from fleetfoot.kernels.quantized.packed import unpack_columns, unpack_rows

        if tensors["weight_shape"].tolist() != [part.size, part.num_columns]:
            raise WeightError(
                f"{part.name}.weight_shape is {tensors['weight_shape'].tolist()}, and the layer has "
                f"{[part.size, part.num_columns]}"
            )
        first = part.columns.start % part.per_word
        codes = unpack_columns(tensors["weight_packed"], bits=self.bits)
        codes = codes[:, first : first + part.columns.stop - part.columns.start]
        zeros = None
        if self.form.has_zeros:
            zeros = unpack_rows(tensors["weight_zero_point"])[part.outputs(codes.device)]
        return _Content(codes, tensors["weight_scale"], zeros)

    def write(self, part: _Part, content: _Content) -> Tensors:
        import torch

        from fleetfoot.kernels.quantized.packed import pack_columns, pack_rows

        tensors = {
            "weight_packed": pack_columns(content.codes, bits=self.bits),
            "weight_scale": content.scales,
            "weight_shape": torch.tensor([part.size, part.num_columns]),
        }
        if content.zeros is not None:
            whole = content.zeros.new_zeros(part.hull.stop - part.hull.start, content.zeros.shape[1])
            whole[part.outputs(whole.device)] = content.zeros
            tensors["weight_zero_point"] = pack_rows(whole)
        return tensors


def _fill_shape(target: torch.Tensor, shape: tuple[int, int]) -> None:
    for index, size in enumerate(shape):
        target[index] = size


class _MXFP4(_Layout):
    """MXFP4 of compressed-tensors and GPT-OSS: two codes in a byte, scales as exponents of 2 (E8M0). Whole groups are
    read."""

    def fields(self, part: _Part) -> dict[str, dict[str, Any]]:
        half = slice(part.groups.start * part.group // 2, part.groups.stop * part.group // 2)
        return {
            "weight_packed": _spec((part.size, part.num_columns // 2), (part.rows, half)),
            "weight_scale": _spec((part.size, part.num_groups), (part.rows, part.groups), init=120),
        }

    def read(self, part: _Part, tensors: Tensors) -> _Content:
        from fleetfoot.kernels.quantized.packed import unpack_bytes

        return _Content(unpack_bytes(tensors["weight_packed"])[:, self._columns(part)], tensors["weight_scale"], None)

    @staticmethod
    def _columns(part: _Part) -> slice:
        """Those of the rank in whole groups."""
        before = part.groups.start * part.group
        return slice(part.columns.start - before, part.columns.stop - before)

    def write(self, part: _Part, content: _Content) -> Tensors:
        from fleetfoot.kernels.quantized.packed import pack_bytes

        codes = content.codes.new_zeros(len(content.scales), content.scales.shape[1] * part.group)
        codes[:, self._columns(part)] = content.codes
        return {"weight_packed": pack_bytes(codes), "weight_scale": content.scales}


def _refuse_patch(indices: torch.Tensor, values: torch.Tensor) -> str:
    return "has 4 bits, and its groups were rounded as a whole; give it whole"


class _Plain(_Layout):
    """A weight that is not quantized, with all inputs: groups are those of the whole."""

    def fields(self, part: _Part) -> dict[str, dict[str, Any]]:
        fields = _spec((part.size, part.num_columns), (part.rows,), "float")
        return {"weight": fields | {"patch_problem": _refuse_patch}}

    def read(self, part: _Part, tensors: Tensors) -> _Content:
        from fleetfoot.kernels.quantized.packed import quantize_groups

        codes, scales = quantize_groups(tensors["weight"], part.group or part.num_columns)
        return _Content(codes[:, part.columns], scales[:, part.groups], None)

    def write(self, part: _Part, content: _Content) -> Tensors:
        import torch

        index = torch.arange(part.columns.start, part.columns.stop, device=content.codes.device)
        group = index // (part.group or part.num_columns) - part.groups.start
        whole = torch.zeros(len(content.codes), part.num_columns, dtype=self.dtype, device=content.codes.device)
        whole[:, part.columns] = ((content.codes.float() - 8) * content.scales[:, group].float()).to(self.dtype)
        return {"weight": whole}


_LAYOUTS: dict[str, type[_Layout]] = {
    **dict.fromkeys(("awq", "gptq", "gptq_v2"), _ByColumns),
    "pack-quantized": _CompressedTensors,
    **dict.fromkeys(("mxfp4", "mxfp4-pack-quantized"), _MXFP4),
    "float": _Plain,
}


class PackedWeight(QuantizedWeight):
    """Codes in the layout of `PackedMatrix`, filled part by part."""

    def __init__(
        self, form: WeightFormat, shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        import torch

        self._shape = shape
        self._multiply: Any = ops.scaled_linear if form.has_8_bits else ops.packed_linear
        self._chain = ops.quantized_chain if dtype is torch.bfloat16 else None
        self._layout = _LAYOUTS[form.tensors](form, torch.float32 if form.has_8_bits else dtype)
        columns, group, per_word = shape.columns, form.block[1], 32 // self._layout.bits
        if columns.start % per_word or (form.is_ordered and columns != slice(0, shape.in_features)):
            names, problem = ", ".join(name for name, _ in shape.parts), f"are not whole words of {per_word}"
            if form.is_ordered:
                problem = "are those of groups in another order (desc_act)"
            raise ValueError(
                f"{names}: the inputs {columns.start} to {columns.stop} of a rank {problem}; use fewer ranks"
            )
        self._parts = [
            _Part(name, size, rows, columns, shape.in_features, span, group, per_word)
            for name, size, rows, span in shape.row_spans()
        ]
        num_rows, num_inputs = shape.num_outputs + shape.padding, shape.num_inputs
        self._stored_group = math.gcd(group, columns.start) if group else max(1, num_inputs)
        bias = torch.zeros(num_rows, dtype=dtype, device=device) if shape.has_bias else None
        self._matrix = self._make_matrix(form, (num_rows, num_inputs), bias, dtype, device)
        self._group_of: torch.Tensor | None = None  # of `PackedMatrix.order`
        self._open: dict[int, Tensors] = {}  # part -> its tensors in the form of files
        self._filled: dict[int, set[str]] = {}  # part -> names of tensors that are filled
        self._loaded: set[int] = set()

    def _make_matrix(
        self, form: WeightFormat, size: tuple[int, int], bias: torch.Tensor | None, dtype: torch.dtype, device: Any
    ) -> Any:
        import torch

        from fleetfoot.kernels.quantized.packed import BLOCK, SPAN, PackedMatrix

        (num_rows, num_inputs), stored_group = size, self._stored_group
        num_groups = -(-num_inputs // stored_group)
        num_blocks = -(-num_inputs // BLOCK)
        words = torch.zeros(num_rows, num_blocks * SPAN, dtype=torch.int32, device=device)
        scales = torch.zeros(num_rows, num_groups, dtype=dtype, device=device)
        if form.values == "mxfp4":
            scales = torch.zeros(num_rows, num_blocks * BLOCK // stored_group, dtype=torch.uint8, device=device)
        zeros = torch.zeros(num_rows, num_groups, dtype=torch.uint8, device=device) if form.has_zeros else None
        order = torch.arange(num_inputs, device=device) if form.is_ordered else None
        return PackedMatrix(words, scales, zeros, stored_group, num_inputs, form.values == "mxfp4", order, bias)

    def tensors(self) -> list[torch.Tensor]:
        matrix = self._matrix
        found = (matrix.words, matrix.scales, matrix.zeros, matrix.bias if self._shape.has_bias else None)
        return [each for each in found if each is not None]

    def stored(self) -> Iterator[Span]:
        for tensor in self.tensors():
            yield tensor.data_ptr(), tensor.nbytes

    def weight_specs(self, prefix: str) -> Iterator[WeightSpec]:
        for index, part in enumerate(self._parts):
            for suffix, fields in self._layout.fields(part).items():
                destination = partial(self._opened, index, suffix)
                filled = partial(self._mark_filled, index, suffix)
                dtype = self._dtype_of(suffix, fields["kind"])
                yield WeightSpec(
                    f"{prefix}{part.name}.{suffix}", destination=destination, filled=filled, dtype=dtype, **fields
                )
            yield from bias_specs(self._shape, self._matrix.bias, prefix, part.name, part.size, part.rows, part.span)

    def process_weights_after_loading(self) -> None:
        for index in tuple(self._open):
            self._close(index)

    def _dtype_of(self, suffix: str, kind: Literal["float", "integer"]) -> torch.dtype:
        import torch

        if kind == "float":
            return self._layout.dtype
        is_bytes = isinstance(self._layout, _MXFP4)
        return torch.int64 if suffix == "weight_shape" else torch.uint8 if is_bytes else torch.int32

    def _opened(self, index: int, suffix: str) -> torch.Tensor:
        import torch

        part, device = self._parts[index], self._matrix.scales.device
        tensors = self._open.setdefault(index, {})
        if suffix not in tensors and index in self._loaded:
            tensors |= self._layout.write(part, self._content(index))
        if suffix not in tensors:
            fields = self._layout.fields(part)[suffix]
            size = _part_shape(fields["shape"], fields["part"])
            tensors[suffix] = torch.empty(size, dtype=self._dtype_of(suffix, fields["kind"]), device=device)
        found: torch.Tensor = tensors[suffix]
        return found

    def _mark_filled(self, index: int, suffix: str) -> None:
        filled = self._filled.setdefault(index, set())
        filled.add(suffix)
        if filled >= self._layout.fields(self._parts[index]).keys():
            self._close(index)

    def _close(self, index: int) -> None:
        tensors = self._open.pop(index)
        self._filled.pop(index, None)
        if tensors.keys() != self._layout.fields(self._parts[index]).keys():
            return  # nothing was written to them
        part = self._parts[index]
        content = self._layout.read(part, tensors)
        columns, group = part.columns, part.group or part.num_columns
        groups: Any = [
            start // group - part.groups.start for start in range(columns.start, columns.stop, self._stored_group)
        ]
        if self._layout.form.is_ordered:
            content, groups = self._ordered(content, part), slice(None)
        zeros = None if content.zeros is None else content.zeros[:, groups]
        self._store(part, content.codes, content.scales[:, groups], zeros)
        self._loaded.add(index)

    def _store(self, part: _Part, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        """Write a part, with its scales in the groups that are stored."""
        from fleetfoot.kernels.quantized.packed import pack_words

        matrix = self._matrix
        matrix.words[part.span] = pack_words(codes)
        matrix.scales[part.span, : scales.shape[1]] = scales.to(matrix.scales.dtype)
        if matrix.zeros is not None:
            assert zeros is not None
            matrix.zeros[part.span] = zeros

    def _stored(self, part: _Part) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`_store` backwards."""
        from fleetfoot.kernels.quantized.packed import unpack_words

        matrix = self._matrix
        zeros = None if matrix.zeros is None else matrix.zeros[part.span]
        return unpack_words(matrix.words[part.span])[:, : matrix.num_inputs], matrix.scales[part.span], zeros

    def _ordered(self, content: _Content, part: _Part) -> _Content:
        """Columns by group; all parts of the matrix read the same inputs."""
        import torch

        assert content.group_of is not None and self._matrix.order is not None
        counts, full = content.group_of.bincount(minlength=part.num_groups), part.group
        if len(counts) > part.num_groups or bool((counts[:-1] != full).any()):
            raise WeightError(f"{part.name}.g_idx does not have {full} inputs for each group")
        if self._group_of is None or (not self._loaded - {self._parts.index(part)}):
            self._group_of = content.group_of.clone()
            self._matrix.order.copy_(content.group_of.argsort(stable=True))
        elif not torch.equal(content.group_of, self._group_of):
            names = ", ".join(each.name for each in self._parts)
            raise WeightError(f"{names} are one product, and their g_idx differ")
        return replace(content, codes=content.codes[:, self._matrix.order])

    def _content(self, index: int) -> _Content:
        """What is stored of a part."""
        part = self._parts[index]
        codes, scales, zeros = self._stored(part)
        columns, group = part.columns, part.group or part.num_columns
        first = [
            max(0, each * group - columns.start) // self._stored_group
            for each in range(part.groups.start, part.groups.stop)
        ]
        if self._layout.form.is_ordered:
            first, codes = list(range(scales.shape[1])), codes[:, self._matrix.order.argsort()]
        return _Content(codes, scales[:, first], None if zeros is None else zeros[:, first], self._group_of)


class PackedBytes(PackedWeight):
    """Codes of 8 bits, which become int8 by a flipped sign: their zero points are 128."""

    def _make_matrix(
        self, form: WeightFormat, size: tuple[int, int], bias: torch.Tensor | None, dtype: torch.dtype, device: Any
    ) -> Any:
        import torch

        from fleetfoot.kernels.quantized.scaled import ScaledMatrix

        values = torch.zeros(size, dtype=torch.int8, device=device)
        scales = torch.zeros(size[0], -(-size[1] // self._stored_group), device=device)
        return ScaledMatrix(values, scales, 1, self._stored_group, form.activations, None, bias)

    def tensors(self) -> list[torch.Tensor]:
        matrix = self._matrix
        found = (matrix.values, matrix.scales, matrix.bias if self._shape.has_bias else None)
        return [each for each in found if each is not None]

    def _store(self, part: _Part, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        if zeros is not None and bool((zeros != 128).any()):
            raise WeightError(f"{part.name}.qzeros has zero points other than 128; 8 bits are supported symmetric")
        self._matrix.values[part.span] = (codes ^ 128).view(self._matrix.values.dtype)
        self._matrix.scales[part.span] = scales

    def _stored(self, part: _Part) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        import torch

        scales = self._matrix.scales[part.span]
        zeros = torch.full_like(scales, 128, dtype=torch.uint8) if self._layout.form.has_zeros else None
        return self._matrix.values[part.span].view(torch.uint8) ^ 128, scales, zeros


def _part_shape(shape: tuple[int, ...], part: tuple[Any, ...]) -> list[int]:
    sizes = [sum(run.stop - run.start for run in slices_of(rows)) for rows in part]
    return [*sizes, *shape[len(sizes) :]]


class Packed(LinearMethod):
    """`PackedWeight` in a format."""

    def __init__(self, form: WeightFormat) -> None:
        self.form = form
        self.name = str(form)

    @property
    def experts(self) -> ExpertMethod:
        return QuantizedExpertMethod(self)

    def make_weight(self, shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device) -> PackedWeight:
        return PackedWeight(self.form, shape, ops, dtype, device)

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: str) -> int:
        num_blocks = -(-num_inputs // 128)
        words = num_outputs * num_blocks * 64
        if self.form.values == "mxfp4":
            return words + num_outputs * num_blocks * 4
        num_groups = -(-num_inputs // (self.form.block[1] or num_inputs))
        order = 8 * num_inputs * self.form.is_ordered
        return words + num_outputs * num_groups * (DTYPE_BYTES[dtype] + self.form.has_zeros) + order

    def workspace_bytes(self, num_outputs: int, num_inputs: int, num_rows: int, dtype: str) -> int:
        """A part of the weight in ``dtype``, and the input in another order."""
        return (min(num_outputs, WRITTEN_OUTPUTS) + num_rows * self.form.is_ordered) * num_inputs * DTYPE_BYTES[dtype]


class ScaledInWords(Scaled):
    """`PackedBytes` in a format."""

    def make_weight(self, shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device) -> PackedBytes:
        return PackedBytes(self.form, shape, ops, dtype, device)

"""What tests need of Triton: its interpreter, which runs kernels on a CPU, or its compiler.

Importing this module closes three gaps of Triton 3.6's interpreter. With numpy 2.4 it cannot turn a runtime value into
a bound of ``tl.range``, it multiplies and subtracts bfloat16 as if their bits were integers, and where e4m3 rounds up
to the next power of two it loses the carry. Work that has no effect, and
takes most of the time, is left out: each call of a device function patches the language again, overflows are computed
for assertions that are off, types are made for tuples, those of every value are made and compared anew, and operands
that have one type and shape are broadcast.
"""

import math
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.zygote import ForkedPopen

HAS_TRITON = find_spec("triton") is not None
HAS_INTERPRETER = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.interpreter
"""Skipped without the interpreter: `tests/conftest.py`. On a GPU, tests/gpu runs such cases compiled."""
compiled = pytest.mark.compiler
"""Skipped without Triton."""


def run_python(*arguments: str, is_forked: bool = False, **environment: str) -> str:
    """The standard output of a Python process that compiles kernels instead of interpreting them.

    Args:
        is_forked: whether it has torch and much of the package from the start, see `tests.helpers.zygote`.
        environment: further variables.
    """
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    command = [sys.executable, *arguments]
    root = Path(__file__).parents[2]
    start = ForkedPopen if is_forked else subprocess.Popen
    with start(command, cwd=root, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output


def _patch_interpreter() -> None:
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    patch_tensor, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    convert, subtract = interpreter._convert_float, interpreter.InterpreterBuilder.create_fsub

    def patched_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar not in (tl.bfloat16, tl.float8e4nv):
            return handle
        values = interpreter._convert_float(handle.data, handle.dtype.scalar, tl.float32, None).view("float32")
        return interpreter.TensorHandle(values, tl.float32)

    def patched_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widen(a), widen(b), *rest)

    def patched_sub(self: Any, a: Any, b: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return subtract(self, a, b)
        difference = widen(a).data - widen(b).data
        return interpreter.TensorHandle(rounded(difference, tl.float32, tl.bfloat16, None), tl.bfloat16)

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) == (tl.float32, tl.float8e4nv):
            return torch.from_numpy(values.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if source == tl.float8e4nv:
            e4m3 = torch.from_numpy(values.copy()).view(torch.uint8).view(torch.float8_e4m3fn)
            names = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
            bits = torch.int32 if target.primitive_bitwidth == 32 else torch.int16
            return e4m3.to(names[target.name]).view(bits).numpy().view(f"uint{target.primitive_bitwidth}")
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(values, source, target, mode)
        bits = np.frombuffer(values.tobytes(), np.uint32)
        nearest = np.where(bits << 1 > 0xFF000000, 0x7FC0, bits + 0x7FFF + (bits >> 16 & 1) >> 16)  # NaN stays NaN
        return nearest.astype(np.uint16).reshape(values.shape)

    interpreter._convert_float = rounded
    interpreter._patch_lang_tensor = patched_tensor
    interpreter.InterpreterBuilder.create_dot = patched_dot
    interpreter.InterpreterBuilder.create_fsub = patched_sub

    numpy_dtype = cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda type: numpy_dtype(tl.uint64 if type.scalar.is_ptr() else type.scalar)
    interpreter._patch_lang = cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda scope: None
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    tl.core._type_for_tuple_values = lambda values, fields=None: None
    _keep_types()


def _keep_types() -> None:
    """Compute what depends on types and shapes alone once for each of them."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    constexpr, unwrap = core.constexpr, core._unwrap_if_constexpr
    sequences = (list, tuple, core.tuple)

    def unwrapped(value: Any) -> Any:
        if type(value) is constexpr:
            return value.value
        return unwrap(value) if isinstance(value, sequences) else value

    core._unwrap_if_constexpr = unwrapped

    make_block_type = core.block_type.__init__
    block_types: dict[Any, dict[str, Any]] = {}

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, getattr(element_ty, "address_space", 0), tuple(map(unwrapped, shape))
        if (fields := block_types.get(key)) is None:
            make_block_type(self, element_ty, shape)
            self.sizes = sizes(key[-1])
            fields = block_types[key] = dict(self.__dict__)
        self.__dict__.update(fields)

    @cache
    def sizes(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return constexpr(math.prod(shape)), core.tuple(map(constexpr, shape))

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.sizes

    core.block_type.__init__ = init_block_type
    core.dtype.sizes = sizes(())  # of scalars
    core.tensor.__init__ = init_tensor

    def by_name(method: Any) -> Any:
        found: dict[str, Any] = {}

        def get(self: Any) -> Any:
            if (value := found.get(self.name)) is None:
                value = found[self.name] = method(self)
            return value

        return get

    is_same = core.dtype.__eq__
    core.dtype.__eq__ = lambda self, other: self is other or is_same(self, other)
    for name in ("kind", "is_int", "is_int_signed", "is_int_unsigned", "get_int_max_value", "get_int_min_value"):
        setattr(core.dtype, name, by_name(getattr(core.dtype, name)))

    check, check_bits = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.bitwise_op_type_checking_impl
    broadcast = TritonSemantic.broadcast_impl_value
    plain = {
        id(getattr(core, name))
        for name in ("int1", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32")
    }
    constants: dict[Any, Any] = {}

    def check_operands(self: Any, lhs: Any, rhs: Any, *rest: Any, **options: Any) -> Any:
        kinds = type(lhs), type(rhs)
        if kinds == (core.tensor, core.tensor):
            is_same = lhs.dtype is rhs.dtype and lhs.shape is rhs.shape and id(lhs.dtype) in plain
            is_division = options.get("div_or_mod", len(rest) > 3 and rest[3])
            return (lhs, rhs) if is_same and not is_division else check(self, lhs, rhs, *rest, **options)
        place = kinds.index(core.tensor) if core.tensor in kinds else 0
        given = lhs, rhs
        if kinds[1 - place] not in (int, float) or kinds[place] is not core.tensor:
            return check(self, lhs, rhs, *rest, **options)
        # by its text: -0.0 equals 0.0
        key = place, given[place].type.name, kinds, repr(given[1 - place]), rest, *options.items()
        if (constant := constants.get(key)) is not None:
            return (lhs, constant) if place == 0 else (constant, rhs)
        checked = check(self, lhs, rhs, *rest, **options)
        if checked[place] is given[place] and id(given[place].dtype) in plain:
            constants[key] = checked[1 - place]
        return checked

    def check_bits_of_operands(self: Any, lhs: Any, rhs: Any) -> Any:
        lhs, rhs = self.binary_op_type_checking_impl(lhs, rhs)
        return (lhs, rhs) if lhs.dtype is rhs.dtype and lhs.dtype.is_int() else check_bits(self, lhs, rhs)

    def broadcast_operands(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    TritonSemantic.binary_op_type_checking_impl = check_operands
    TritonSemantic.bitwise_op_type_checking_impl = check_bits_of_operands
    TritonSemantic.broadcast_impl_value = broadcast_operands

    def patch_attribute(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function, semantic = getattr(member, "__wrapped__", member), TritonSemantic(builder)
        scope.set_attr(place, name, lambda *args, _semantic=None, **kw: function(*args, **kw, _semantic=semantic))

    interpreter._patch_attr = patch_attribute


if HAS_INTERPRETER:
    _patch_interpreter()

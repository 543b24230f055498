"""Two gaps of Triton 3.6's interpreter that the kernels would fall into, closed for the tests.

With numpy 2.4 it cannot turn a runtime value into a bound of ``tl.range``, and it multiplies bfloat16 matrices as if
their bits were integers.
"""

from __future__ import annotations

from typing import Any


def mend_interpreter() -> None:
    """Patch the interpreter, if it is the one in use."""
    from triton import knobs
    from triton import language as tl
    from triton.runtime import interpreter

    if not knobs.runtime.interpret or hasattr(interpreter, "mended"):
        return
    patch_tensor, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        values = interpreter._convert_float(handle.data, tl.bfloat16, tl.float32, None).view("float32")
        return interpreter.TensorHandle(values, tl.float32)

    def patched_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widen(a), widen(b), *rest)

    interpreter._patch_lang_tensor = patched_tensor
    interpreter.InterpreterBuilder.create_dot = patched_dot
    interpreter.mended = True

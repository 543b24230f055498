"""`fleetfoot.kernels.runtime.dependent_launch` for kernels in Gluon. This module imports Triton."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def launch_dependents(overlap: gl.constexpr):
    """See `fleetfoot.kernels.runtime.dependent_launch.launch_dependents`."""
    if overlap:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def wait_for_inputs(overlap: gl.constexpr):
    """See `fleetfoot.kernels.runtime.dependent_launch.wait_for_inputs`."""
    if overlap:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )

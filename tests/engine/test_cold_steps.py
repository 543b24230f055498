"""Steps that meet kernels which are not compiled: they wait for none, and change over when a kernel is ready.

The kernels run in Triton's interpreter; what compiles them is a script.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.interpreter import interpreted
from tests.helpers.kernels import reference_kernels, triton_kernels
from tests.helpers.recording_device import RecordingDevice
from tests.helpers.runner_lives import Life, assert_same, in_one_runner, live, make_runner, params_of

from fleetfoot.kernels.runtime.triton_support import KernelNotReadyError, Launch, instead_of_launching
from fleetfoot.runner.v2.runner import ModelRunnerV2
from fleetfoot.runner.v2.warm_up import KernelCompiler

PARAMS = [params_of(number) for number in (0, 1, 2, 3, 4)]


class ScriptedAhead:
    """`CompileAhead` as steps use it. Kernel after kernel becomes ready in the order of their first launch, one in
    every ``pace`` steps."""

    def __init__(self, pace: int) -> None:
        self.pace = pace
        self.kernels: dict[str, SimpleNamespace] = {}
        self.num_steps = self.num_launched = self.num_refused = 0
        self._missed: dict[Any, str] = {}

    def launcher(self, jit: Any, grid: tuple[int, ...]) -> Launch:
        name = jit.__name__

        def launch(*arguments: Any, **options: Any) -> Any:
            kernel = self.kernels.setdefault(name, Kernel())
            if kernel.kernel is None:
                self.num_refused += 1
                self._missed[kernel] = name
                raise KernelNotReadyError(name)
            self.num_launched += 1
            return jit[grid](*arguments, **options)

        return launch

    @contextmanager
    def serving(self) -> Iterator[None]:
        before = instead_of_launching.set(self.launcher)
        yield
        instead_of_launching.reset(before)

    def advance(self, num_kernels: int | None) -> None:
        self.num_steps += 1
        count = self.num_steps // self.pace if num_kernels is None else num_kernels
        for kernel in list(self.kernels.values())[:count]:
            kernel.kernel = "compiled"

    def take_missed(self) -> dict[Any, str]:
        missed, self._missed = self._missed, {}
        return missed

    def take_missed_optional(self) -> dict[Any, str]:
        return {}


class Kernel(SimpleNamespace):
    """A ``FutureKernel``."""

    kernel: str | None = None
    __hash__ = object.__hash__


def serve_cold(runner: ModelRunnerV2, ahead: Any) -> None:
    """From now on as behind a start."""
    runner._compiler = KernelCompiler(runner._step_graphs.step, lambda: pytest.fail("a dry pass"), ahead)
    runner._serving = ahead.serving


@pytest.fixture(scope="module")
def expected() -> dict[str, Life]:
    return live(in_one_runner(make_runner("v2", ops=reference_kernels())), PARAMS)


@interpreted
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # padding may hold any values
@pytest.mark.parametrize("pace", [1, 2, 10**9])
def test_steps_never_wait_and_change_over(expected: dict[str, Life], pace: int) -> None:
    device, ahead = RecordingDevice(has_graphs=True), ScriptedAhead(pace)
    runner = make_runner("v2", ops=triton_kernels(), device=device)
    serve_cold(runner, ahead)
    assert_same(live(in_one_runner(runner), PARAMS), expected, tolerance=1e-4)
    assert ahead.num_refused > 0
    assert (ahead.num_launched > 0, device.counts["replay"] > 0) == (pace < 10**9, pace < 10**9)
    notes = runner.take_notes()
    assert any("not compiled" in note for note in notes)
    assert any(note.startswith("captured") for note in notes) == (pace < 10**9)

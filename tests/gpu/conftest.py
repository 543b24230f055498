"""What tests on a GPU share."""

from functools import partial

import pytest

from fleetfoot.kernels.runtime import compile_ahead
from fleetfoot.kernels.runtime.compile_worker import CompilePool
from fleetfoot.runner.v2 import runner


@pytest.fixture(autouse=True)
def only_kernels_that_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's engine lives for seconds: kernels that it might need later are not compiled, and others in its process,
    because tests run side by side."""
    monkeypatch.setattr(runner, "later_shapes", lambda *_: [])
    monkeypatch.setattr(compile_ahead, "CompilePool", partial(CompilePool, command=("/no/such/program",)))

"""What tests on a GPU share."""

import pytest

from fleetfoot.runner.v2 import runner


@pytest.fixture(autouse=True)
def only_kernels_that_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's engine lives for seconds: kernels that it might need later are not compiled behind its back."""
    monkeypatch.setattr(runner, "later_shapes", lambda *_: [])

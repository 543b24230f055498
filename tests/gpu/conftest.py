"""What tests on a GPU share."""

from collections.abc import Iterator

import pytest
import torch

from fleetfoot.runner.v2 import runner


@pytest.fixture(autouse=True)
def only_kernels_that_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's engine lives for seconds: kernels that it might need later are not compiled behind its back."""
    monkeypatch.setattr(runner, "later_shapes", lambda *_: [])


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """For the CPU's part: on tensors this small, threads do nothing but wait for each other, and worse so where several
    processes test side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

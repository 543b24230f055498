"""What tests on a GPU share."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
"""Thousands of tests that would all be skipped. (`tests/unit/test_package.py` imports them.)"""
_SLOW = ("test_cold_start_gpu.py",)
"""Files with tests that take a minute: they compile all kernels of an engine."""
_LOCK = Path(tempfile.gettempdir()) / f"fleetfoot-gpu-tests-{os.getuid()}.lock"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let each process of pytest-xdist begin with slow tests, and one of them go on with those that run alone.

    With ``--dist worksteal`` a process gets a continuous part of the tests, and others take from its end.
    """
    count = getattr(config, "workerinput", {"workercount": 1})["workercount"]
    if count == 1:
        return
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    slow = [item for item in here if item.path.name in _SLOW]
    alone = [item for item in here if item.get_closest_marker("alone")]
    apart = {*slow, *alone}
    others = [item for item in items if item not in apart]
    total = len(items)
    items.clear()
    for number in range(count):
        part = [*slow[number::count], *(alone if number == count - 1 else ())]
        size = max(0, (total - len(items)) // (count - number) - len(part))
        items += [*part, *others[:size]]
        del others[:size]


@pytest.fixture(autouse=True)
def alone_or_beside_others(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests run side by side in several processes, but for those that take all of the GPU's memory."""
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH)
        yield


@pytest.fixture
def exact_products() -> Iterator[None]:
    """Products of float32 are not rounded to TF32. (`pytest.MonkeyPatch` cannot undo this attribute: its object has it
    neither as an entry nor as a descriptor.)"""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = tf32

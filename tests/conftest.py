"""What all tests share.

Where there is no GPU, Triton kernels run in Triton's interpreter, which must be chosen before Triton is imported.
"""

import gc
import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from fleetfoot.native.loading import native_problem
from tests.helpers import zygote
from tests.helpers.commands import CommandRunner

# No test asserts on a duration: a busy machine is no failure.
settings.register_profile("fleetfoot", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fleetfoot")

# On tensors this small, threads do nothing but wait for each other; so it is in child processes.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# Tests make no key in the user's folder.
os.environ.setdefault("FLEETFOOT_CLUSTER_KEY", "a key of tests alone")

# A shell without job control starts background commands with interrupts ignored, and child processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

_PROBLEM = native_problem()


def pytest_collection() -> None:
    """What is collected stays: looking for garbage among it takes a sixth of the collection's time."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of kernels that `make test-kernels` runs."""
    for item in items:
        if item.get_closest_marker("interpreter") or item.get_closest_marker("compiler"):
            item.add_marker("kernels")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of kernels that cannot run here."""
    from tests.helpers.interpreter import HAS_INTERPRETER, HAS_TRITON

    if item.get_closest_marker("interpreter") and not HAS_INTERPRETER:
        pytest.skip("needs Triton's interpreter; on a GPU, tests/gpu runs such cases compiled")
    if item.get_closest_marker("compiler") and not HAS_TRITON:
        pytest.skip("needs Triton's compiler")


@pytest.fixture(scope="session", autouse=True)
def forked_processes() -> Iterator[None]:
    """Processes of workers, and engines in processes of their own, are forked from one that has imported torch."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            zygote.fork_processes(patch.setattr)
        yield


@pytest.fixture(autouse=True)
def no_warning_of_missing_c_kernels() -> Iterator[None]:
    """Where the C library was not built, each engine warns of it; tests that compare all that is logged do not expect
    that. Other causes, which tests provoke, are logged."""

    def is_expected(record: logging.LogRecord) -> bool:
        return not (_PROBLEM and _PROBLEM in record.getMessage())

    logger = logging.getLogger("fleetfoot.engine.engine")
    logger.addFilter(is_expected)
    yield
    logger.removeFilter(is_expected)


@pytest.fixture
def own_garbage() -> Iterator[None]:
    """Collections look at what the test makes, and not at all that pytest has collected, which takes a second each."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def text_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a tiny random checkpoint with a real tokenizer, and its reference model."""
    from tests.helpers.engines import make_text_checkpoint

    folder = tmp_path_factory.mktemp("text-model")
    return folder, make_text_checkpoint(folder)


@pytest.fixture(scope="session")
def text_model(text_checkpoint: tuple[Path, Any]) -> Path:
    """The folder alone."""
    return text_checkpoint[0]


@pytest.fixture(params=["v1", "v2"])
def runner(request: pytest.FixtureRequest) -> str:
    """Each model runner."""
    return request.param


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CommandRunner:
    """Runs commands of the CLI."""
    return CommandRunner(capsys)


@pytest.fixture
def port() -> int:
    """A TCP port of this machine that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]

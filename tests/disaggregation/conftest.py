"""What these tests share."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.helpers.engines import make_engine, make_text_checkpoint, run_requests
from tests.helpers.kv_bench import Clock
from tests.helpers.kv_pair import join_threads
from tests.helpers.prefill_decode import REQUESTS, SIZE

from fleetfoot.outputs import RequestOutput


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """On tensors this small, threads do nothing but wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random checkpoint with a real tokenizer."""
    folder = tmp_path_factory.mktemp("text-model")
    make_text_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def expected(text_model: Path) -> dict[str, RequestOutput]:
    """The outputs of REQUESTS on one engine without a connector."""
    engine = make_engine(text_model, runner="v1", **SIZE)
    outputs = run_requests(engine, REQUESTS)
    engine.shutdown()
    return outputs


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of transfers in this process."""
    clock = Clock()
    monkeypatch.setattr("fleetfoot.kv_transfer.nixl.worker.time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """Threads of connectors and lines end with them."""
    yield
    join_threads()

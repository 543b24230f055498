"""What these tests share: a model, what one engine makes of the requests, and that no thread of a transfer is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.helpers.engines import make_engine, make_text_checkpoint, run_requests
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
    """What one engine without a connector makes of REQUESTS."""
    engine = make_engine(text_model, runner="v1", **SIZE)
    outputs = run_requests(engine, REQUESTS)
    engine.shutdown()
    return outputs


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """Threads of connectors and lines end with them."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith(("kv-", "line")):
            thread.join(20)
            assert not thread.is_alive(), thread.name

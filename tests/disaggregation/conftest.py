"""What these tests share."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.helpers.engines import make_engine, make_text_checkpoint, run_requests
from tests.helpers.kv_bench import Clock
from tests.helpers.kv_pair import join_threads
from tests.helpers.paged_models import MODELS
from tests.helpers.prefill_decode import REQUESTS, ROOMY, SIZE
from tests.helpers.processes import HANG

from fleetfoot.outputs import RequestOutput
from fleetfoot.server import engine_group


@pytest.fixture(scope="session")
def expected(text_model: Path) -> dict[str, RequestOutput]:
    """The outputs of REQUESTS on one engine without a connector."""
    engine = make_engine(text_model, model_runner="v1", **SIZE)
    outputs = run_requests(engine, REQUESTS)
    engine.shutdown()
    return outputs


@pytest.fixture(scope="session")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with recurrent states, with the tokenizer of `text_model`."""
    folder = tmp_path_factory.mktemp("hybrid")
    make_text_checkpoint(folder, "qwen3_next", **MODELS["qwen3-next"][1], num_hidden_layers=3)
    return folder


@pytest.fixture(scope="session")
def expected_of_hybrid(hybrid_model: Path) -> dict[str, RequestOutput]:
    engine = make_engine(hybrid_model, model_runner="v1", **ROOMY)
    outputs = run_requests(engine, REQUESTS)
    engine.shutdown()
    return outputs


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """On tensors this small, threads do nothing but wait for each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(autouse=True)
def groups_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups in this process wait for all of their engines, however long those take to start."""
    monkeypatch.setattr(engine_group, "_JOIN_S", HANG)


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

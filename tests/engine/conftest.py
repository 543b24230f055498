"""What the engine's tests share."""

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.engines import make_engine, make_text_checkpoint, run_requests
from tests.helpers.prefill_decode import REQUESTS, SIZE, Tokens, tokens_of


@pytest.fixture(scope="session")
def text_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a tiny random checkpoint with a real tokenizer, and its reference model."""
    folder = tmp_path_factory.mktemp("text-model")
    return folder, make_text_checkpoint(folder)


@pytest.fixture(scope="session")
def text_model(text_checkpoint: tuple[Path, Any]) -> Path:
    """The folder alone."""
    return text_checkpoint[0]


@pytest.fixture(scope="session")
def no_connector(text_model: Path) -> Tokens:
    """The tokens of REQUESTS on an engine without a KV connector."""
    engine = make_engine(text_model, runner="v1", **SIZE)
    try:
        return tokens_of(run_requests(engine, REQUESTS))
    finally:
        engine.shutdown()

"""What the engine's tests share."""

from pathlib import Path

import pytest
from tests.helpers.engines import make_engine, run_requests
from tests.helpers.prefill_decode import REQUESTS, SIZE, Tokens, tokens_of


@pytest.fixture(scope="session")
def no_connector(text_model: Path) -> Tokens:
    """The tokens of REQUESTS on an engine without a KV connector."""
    engine = make_engine(text_model, model_runner="v1", **SIZE)
    try:
        return tokens_of(run_requests(engine, REQUESTS))
    finally:
        engine.shutdown()

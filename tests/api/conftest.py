"""A server of the embedded model on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.helpers.server import RunningServer


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """With two names of the model, a key, and small limits."""
    flags = ["--served-model-name", "story", "story-llama", "--api-key", "secret", "--max-body-bytes", "100000"]
    with RunningServer(*flags, "--max-queue", "64", "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    """A client with the key, for raw bodies."""
    with httpx.Client(base_url=server.url, headers={"Authorization": "Bearer secret"}, timeout=60) as made:
        yield made

"""What tests with worker processes share."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def always_one_thread(one_thread: None) -> None: ...

"""Random requests, valid and invalid ones, for every operation of ``/openapi.json``."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.helpers.server import RunningServer

MOST = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 16, "n": 2, "best_of": 2}
CHECKED = [check for check in CHECKS.get_all() if check is not positive_data_acceptance]
"""Not all limits are in the document: a valid body may be refused with 400."""


def shorten(body: Any) -> None:
    """Reach the engine with the model that is served, and keep generations short."""
    if not isinstance(body, dict):
        return
    for field, most in MOST.items():
        if isinstance(value := body.get(field), int) and value > most:
            body[field] = most
    if isinstance(body.get("model"), str):
        body["model"] = "story"


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
def test_all_operations(server: RunningServer, mode: GenerationMode) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for operation in (result.ok() for result in document.get_all_operations()):
        if mode is GenerationMode.NEGATIVE and "requestBody" not in operation.definition.raw:
            continue

        @settings(max_examples=3, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            shorten(case.body)
            case.call_and_validate(headers={"Authorization": "Bearer secret"}, checks=CHECKED)

        check()

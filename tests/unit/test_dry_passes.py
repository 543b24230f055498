"""Dry passes of every kind of engine: they read and write nothing, and request the kernels that are launched."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.helpers.interpreter import compiled, run_python

pytestmark = compiled
KINDS = (
    "plain",
    "eager",
    "small heads",
    "norms and windows",
    "float16",
    "float32",
    "ngram",
    "draft model",
    "eagle",
    "eagle, float32",
    "draft model, eager",
    "tensor rank",
    "tensor rank, NCCL",
    "first of a pipeline",
    "last of a pipeline",
)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    reports: dict[str, Any] = json.loads(run_python("-m", "tests.helpers.dry_passes_without_gpu", *KINDS))
    return reports


@pytest.mark.parametrize("kind", KINDS)
def test_a_dry_pass_is_dry_and_complete(report: dict[str, Any], kind: str) -> None:
    of_kind = report[kind]
    assert of_kind["changed"] == of_kind["kept"] == of_kind["warnings"] == []
    assert of_kind["missing"] == of_kind["needless"] == []
    assert of_kind["requested"] > 20


def test_a_start_does_not_wait_for_large_imports(report: dict[str, Any]) -> None:
    """Torch's own rules for shapes would import them: see `fleetfoot.kernels.runtime.dry_tensors`."""
    assert report["imports"] == []

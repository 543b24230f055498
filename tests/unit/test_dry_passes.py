"""Dry passes of every kind of engine: they read and write nothing, and ask for the kernels that are launched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
REPOSITORY = Path(__file__).parent.parent.parent
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
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    arguments = [sys.executable, "-m", "tests.helpers.dry_passes_without_gpu", *KINDS]
    result = subprocess.run(arguments, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    reports: dict[str, Any] = json.loads(result.stdout)
    return reports


@pytest.mark.parametrize("kind", KINDS)
def test_a_dry_pass_is_dry_and_complete(report: dict[str, Any], kind: str) -> None:
    of_kind = report[kind]
    assert of_kind["changed"] == of_kind["kept"] == of_kind["warnings"] == []
    assert of_kind["missing"] == of_kind["needless"] == []
    assert of_kind["asked"] > 20


def test_a_start_does_not_wait_for_large_imports(report: dict[str, Any]) -> None:
    """Torch's own rules for shapes would import them: see `fleetfoot.kernels.runtime.dry_shapes`."""
    assert report["imports"] == []

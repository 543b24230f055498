"""Kernels compiled ahead on a GPU: the warm-up finds all that it launches, and tokens are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

REPOSITORY = Path(__file__).parent.parent.parent


def start(cache: Path, how: str) -> dict[str, Any]:
    """What `tests.helpers.start_on_gpu` reports, in a process of its own."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    arguments = [sys.executable, "-m", "tests.helpers.start_on_gpu", how]
    result = subprocess.run(arguments, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return report


def test_a_start_compiles_ahead(tmp_path: Path) -> None:
    lazily = start(tmp_path / "lazily", "lazily")
    cold, warm = (start(tmp_path / "ahead", "ahead") for _ in range(2))
    assert lazily["compiled"] == lazily["found"] == 0
    assert cold["compiled"] > 15
    assert cold["late"] == warm["late"] == []
    assert warm["compiled"] == 0
    assert warm["found"] > 15
    assert cold["tokens"] == warm["tokens"] == lazily["tokens"]
    assert cold["threads"] == warm["threads"] == []

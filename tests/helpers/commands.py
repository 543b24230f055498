"""Runs commands in this process, and reads what they have written."""

import itertools
import json
from typing import Any

import pytest

from fleetfoot.cli import bench_roofline
from fleetfoot.cli.main import main


def shrink_peak_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let benchmarks measure the rates of this machine with little work: theirs takes a CPU seconds."""
    sizes = {device: size // 32 for device, size in bench_roofline._MATRIX_SIZE.items()}
    monkeypatch.setattr(bench_roofline, "_MATRIX_SIZE", sizes)
    monkeypatch.setattr(bench_roofline, "_COPY_BYTES", bench_roofline._COPY_BYTES >> 12)


class CommandRunner:
    """Runs commands with ``flags``, which those of a call override."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *flags: str) -> None:
        self.capsys, self.flags = capsys, flags
        self.out = self.err = ""

    def __call__(self, *argv: str, code: int = 0) -> str:
        """Returns what is on standard output; ``err`` has the rest."""
        words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
        assert main([*words, *self.flags, *argv[len(words) :]]) == code
        self.out, self.err = self.capsys.readouterr()
        return self.out

    def json(self, *argv: str, code: int = 0) -> Any:
        """What is on standard output, which must be JSON."""
        return json.loads(self(*argv, code=code), parse_constant=pytest.fail)

    def refused(self, *argv: str) -> str:
        """The message of a usage error, which is all that is written."""
        assert self(*argv, code=2) == ""
        assert "Traceback" not in self.err
        return self.err

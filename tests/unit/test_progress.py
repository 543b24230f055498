"""Bars: what reports show on a terminal, and that they are silent elsewhere."""

import io
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from fleetfoot import LLM, AsyncLLM
from fleetfoot.utils import progress
from fleetfoot.utils.progress import download_bar, loading_bar, progress_bar, report_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """Puts standard error on a terminal, in the test itself: pytest sets it before."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")

    def put() -> Terminal:
        made = Terminal()
        monkeypatch.setattr(sys, "stderr", made)
        return made

    return put


def test_a_start_shows_one_phase_at_a_time(on_terminal: Callable[[], Terminal]) -> None:
    terminal = on_terminal()
    shown: list[tuple[str, int, int | None]] = []
    with loading_bar(is_shown=True), mock.patch.object(progress, "_bar", wraps=progress._bar) as bars:
        assert progress.is_shown()
        for phase, done, total in [
            ("weights", 0, 2),
            ("weights", 1, 2),
            ("KV cache", 0, None),
            ("kernels", 0, 3),
            ("kernels", 3, 3),
        ]:
            report_progress(phase, done, total)
            handler = next(one for one in progress._LOGGER.handlers if isinstance(one, progress._BarHandler))
            task = handler._shown.tasks[0] if handler._shown else None
            shown.append(("", 0, None) if task is None else (task.description, task.completed, task.total))
        assert bars.call_count == 3
    assert shown == [("weights", 0, 2), ("weights", 1, 2), ("KV cache", 0, None), ("kernels", 0, 3), ("", 0, None)]
    assert "weights" in terminal.getvalue() and "kernels" in terminal.getvalue()
    assert not progress.is_shown()


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_an_engine_of_a_program_shows_its_start(on_terminal: Callable[[], Terminal], kind: Any) -> None:
    terminal = on_terminal()

    def build(config: object) -> None:
        report_progress("weights", 1, 2)
        raise MemoryError

    with mock.patch("fleetfoot.engine.engine.build_engine", build), pytest.raises(MemoryError):
        kind()
    assert "weights" in terminal.getvalue() and not progress.is_shown()


def test_requests_are_counted_with_their_tokens(on_terminal: Callable[[], Terminal]) -> None:
    terminal = on_terminal()
    with progress_bar(True, total=4, description="Generating") as advance:
        advance(1200)
        advance(34, by=2)
    assert (
        "Generating" in terminal.getvalue() and "3/4" in terminal.getvalue() and "1,234 tokens" in terminal.getvalue()
    )


def test_nothing_is_shown_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with loading_bar(is_shown=False), progress_bar(False, total=3, description="x") as advance:
        report_progress("weights", 1, 2)
        advance(3, by=2)
        assert download_bar() is None
    with loading_bar(), progress_bar(True, total=3, description="x") as advance:
        report_progress("weights", 1, 2)
        advance(3, by=2)
    assert capsys.readouterr() == ("", "")


def test_a_download_reports_its_bytes(on_terminal: Callable[[], Terminal]) -> None:
    on_terminal()
    with loading_bar(is_shown=True), mock.patch.object(progress, "report_progress") as report:
        kind = download_bar()
        assert kind is not None
        with kind(total=8_000_000, unit="B", unit_scale=True, desc="Downloading", mininterval=0) as bar:
            bar.update(2_000_000)
            bar.update(6_000_000)
        list(kind([1, 2], desc="Fetching 2 files", total=2))  # of files: not shown
    calls = [one.args for one in report.call_args_list]
    assert calls[-1] == ("download, MB", 8, 8) and ("download, MB", 2, 8) in calls
    assert {name for name, *_ in calls} == {"download, MB"}

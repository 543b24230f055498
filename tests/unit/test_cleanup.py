"""Clean-up that runs to its end."""

from __future__ import annotations

import pytest

from fleetfoot.utils.process import run_all


def test_every_action_runs_and_the_first_error_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    def action(name: str, error: BaseException | None = None) -> None:
        calls.append(name)
        if error is not None:
            raise error

    first = KeyboardInterrupt("first")
    with pytest.raises(KeyboardInterrupt, match="first") as raised:
        run_all(
            lambda: action("a"),
            lambda: action("b", first),
            lambda: action("c", OSError("second")),
            lambda: action("d"),
        )
    assert raised.value is first
    assert calls == ["a", "b", "c", "d"]
    assert "second" in caplog.text


def test_nothing_to_raise() -> None:
    run_all()
    run_all(lambda: 1, lambda: 2)

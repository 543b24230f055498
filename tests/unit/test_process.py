"""Interrupts, garbage collections and clean-up of a process with an engine."""

import gc
import signal
import weakref
from functools import partial
from unittest import mock

import pytest
from tests.helpers.engines import ScriptedExecutor, scripted_engine

from fleetfoot import SamplingParams
from fleetfoot.records.request import Request
from fleetfoot.utils.process import SHORT_COLLECTIONS, StopSignal, deferred_interrupts, run_all


class Knot:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


def test_short_collections() -> None:
    """Only new garbage is collected within; all of it afterwards."""
    gc.collect()
    old = weakref.ref(Knot())
    with SHORT_COLLECTIONS:
        new = weakref.ref(Knot())
        gc.collect()
        assert new() is None
        assert old() is not None
    gc.collect()
    assert old() is None
    with pytest.raises(KeyError), SHORT_COLLECTIONS:
        with mock.patch("gc.get_freeze_count") as visit, SHORT_COLLECTIONS:  # of another thread
            assert not visit.called
        assert gc.get_freeze_count() > 0
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_what_python_freezes_at_its_start_does_not_count() -> None:
    with mock.patch("gc.get_freeze_count", return_value=375), mock.patch("gc.freeze") as freeze, SHORT_COLLECTIONS:
        assert freeze.called


def test_objects_that_were_frozen_before_stay_so() -> None:
    gc.collect()
    frozen = weakref.ref(Knot())
    gc.freeze()
    try:
        with SHORT_COLLECTIONS:
            pass
        gc.collect()
        assert frozen() is not None
    finally:
        gc.unfreeze()
    gc.collect()
    assert frozen() is None


def num_requests() -> int:
    gc.collect()
    return sum(type(entry) is Request for entry in gc.get_objects())


@pytest.mark.parametrize("aborted", ["none", "running", "waiting"])
def test_ended_requests_leave_no_garbage(aborted: str) -> None:
    engine, before = scripted_engine(ScriptedExecutor()), num_requests()
    gc.set_debug(gc.DEBUG_SAVEALL)  # keeps what collections find
    try:
        for number in range(3):
            engine.add_request(str(number), [5, 6], SamplingParams(max_tokens=4, n=2, detokenize=False))
        if aborted != "waiting":
            engine.step()
        if aborted != "none":
            engine.abort_request(["0", "1", "2"])
        while engine.has_unfinished_requests():
            engine.step()
        gc.collect()
        found = [kind for kind in map(type, gc.garbage) if kind.__module__.startswith("fleetfoot")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert found == []
    assert aborted != "waiting" or num_requests() == before


def test_every_action_runs_and_the_first_error_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    errors: dict[str, BaseException] = {"b": KeyboardInterrupt("first"), "c": OSError("second")}

    def action(name: str) -> None:
        calls.append(name)
        if name in errors:
            raise errors[name]

    with pytest.raises(KeyboardInterrupt, match="first") as raised:
        run_all(*(partial(action, name) for name in "abcd"))
    assert raised.value is errors["b"]
    assert calls == ["a", "b", "c", "d"]
    assert "second" in caplog.text
    run_all()
    run_all(partial(action, "a"), partial(action, "d"))


def test_second_ctrl_c_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopSignal() as stop:
        assert not stop.is_set
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_deferred_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught, deferred_interrupts():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("a prompt is refused")
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(ValueError, match="refused"), deferred_interrupts():
        raise ValueError("a prompt is refused")
    with deferred_interrupts() as stop:
        stop.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_deferred_interrupts_within_a_stop_signal() -> None:
    with StopSignal() as outer:
        with deferred_interrupts() as inner:
            signal.raise_signal(signal.SIGINT)
        assert (outer.is_set, inner.is_set) == (True, False)

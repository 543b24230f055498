"""Interrupts, garbage collections and clean-up of a process with an engine."""

from __future__ import annotations

import gc
import signal
import weakref

import pytest
from tests.helpers.engines import ScriptedExecutor, scripted_engine

from fleetfoot import SamplingParams
from fleetfoot.utils.process import StopSignal, deferred_interrupts, run_all, short_collections


class Knot:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


def test_only_new_garbage_is_collected_within() -> None:
    gc.collect()
    old = weakref.ref(Knot())
    with short_collections():
        new = weakref.ref(Knot())
        gc.collect()
        assert new() is None
        assert old() is not None
    gc.collect()
    assert old() is None
    assert gc.get_freeze_count() == 0


def test_what_others_have_frozen_stays_so() -> None:
    gc.collect()
    frozen = weakref.ref(Knot())
    gc.freeze()
    try:
        with short_collections():
            pass
        gc.collect()
        assert frozen() is not None
    finally:
        gc.unfreeze()
    gc.collect()
    assert frozen() is None


def test_an_error_ends_it() -> None:
    with pytest.raises(KeyError), short_collections(), short_collections():
        assert gc.get_freeze_count() > 0
        raise KeyError
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_request_that_has_ended_leaves_nothing_to_collect(is_aborted: bool) -> None:
    engine = scripted_engine(ScriptedExecutor())
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)  # what collections find is kept for us to see
    try:
        for number in range(3):
            engine.add_request(str(number), [5, 6], SamplingParams(max_tokens=4, n=2, detokenize=False))
        engine.step()
        if is_aborted:
            engine.abort_request(["0", "1", "2"])
        while engine.has_unfinished_requests():
            engine.step()
        gc.collect()
        found = [kind for kind in map(type, gc.garbage) if kind.__module__.startswith("fleetfoot")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert found == []


# --- clean-up ---------------------------------------------------------------------------------------------------------


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


# --- interrupts -------------------------------------------------------------------------------------------------------


def test_the_first_ctrl_c_waits_and_the_second_does_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopSignal() as stop:
        assert not stop.is_set
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_no_interrupt_is_lost() -> None:
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


def test_inside_another_one_nothing_changes() -> None:
    with StopSignal() as outer:
        with deferred_interrupts() as inner:
            signal.raise_signal(signal.SIGINT)
        assert (outer.is_set, inner.is_set) == (True, False)

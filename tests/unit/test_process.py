"""Interrupts, garbage collections and clean-up of a process with an engine."""

import gc
import signal
import weakref
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from tests.helpers.engines import ScriptedExecutor, scripted_engine

from fleetfoot import SamplingParams
from fleetfoot.kernels.cpu_threads import StepThreads
from fleetfoot.records.request import Request
from fleetfoot.utils.process import SHORT_COLLECTIONS, StopSignal, deferred_interrupts, num_cores, run_all


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/", {}, 8),
        ("0::/", {"cpu.max": "300000 100000"}, 3),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/a.slice/b.service", {"a.slice/b.service/cpu.max": "200000 100000"}, 2),
        (
            "0::/a.slice/b.service",
            {"a.slice/cpu.max": "400000 100000", "a.slice/b.service/cpu.max": "max 100000"},
            4,
        ),
        ("0::/docker/1234", {"cpu.max": "200000 100000"}, 2),
        ("4:memory:/m\n3:cpu,cpuacct:/c", {"cpu/c/cpu.cfs_quota_us": "200000", "cpu/c/cpu.cfs_period_us": "50000"}, 4),
        ("3:cpu:/c", {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_cores_follow_affinity_and_quotas(
    membership: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("fleetfoot.utils.process._CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr("fleetfoot.utils.process._MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text(membership + "\n")
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text + "\n")
    assert num_cores() == cores


def test_threads_of_steps() -> None:
    """As many as the cores and the pool have, and afterwards as many as before, also where steps nest or fail."""
    before, pool = torch.get_num_threads(), [8]
    threads = StepThreads(3, lambda wanted: min(wanted, pool[0]))
    try:
        torch.set_num_threads(4)
        with threads:
            assert torch.get_num_threads() == 3
            pool[0] = 1
            with pytest.raises(KeyError), threads:
                assert torch.get_num_threads() == 1
                raise KeyError
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 4
        torch.set_num_threads(1)
        pool[0] = 8
        with threads:
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


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


@pytest.mark.parametrize("aborted", ["none", "running", "waiting"])
def test_ended_requests_leave_no_garbage(aborted: str) -> None:
    gc.freeze()  # collections look at what is new alone, and not at what pytest has collected
    gc.set_debug(gc.DEBUG_SAVEALL)  # keeps what collections find
    try:
        engine = scripted_engine(ScriptedExecutor())
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
        num_requests = sum(type(entry) is Request for entry in gc.get_objects())
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
    assert found == []
    assert aborted != "waiting" or num_requests == 0


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

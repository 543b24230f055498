"""Collections that look at what is new alone."""

from __future__ import annotations

import gc
import weakref

import pytest
from tests.helpers.engines import ScriptedExecutor, scripted_engine

from fleetfoot import SamplingParams
from fleetfoot.utils.process import short_collections


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

"""The thread pool of the C library: its size under injected times, and work whose threads are held up."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.helpers.kernels import NATIVE_VARIANTS, native_kernels

from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.sampling.sample import RandomRows
from fleetfoot.native import loading

pytestmark = pytest.mark.skipif(bool(loading.native_problem()), reason="needs the C library")

TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
WATCH = ctypes.CFUNCTYPE(None, ctypes.c_int)
MS = 10**6
PATIENCE_S = 60.0
"""Only a failing test waits so long."""


class Policy(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("allowed", "pause", "next_try", "lost_core"))

    def threads(self, wanted: int, now: int) -> int:
        return int(loading.open_library().ff_threads_for(ctypes.byref(self), *map(ctypes.c_int64, (wanted, now))))

    def waited(self, num_threads: int, began: int, idle: int, ended: int) -> None:
        times = map(ctypes.c_int64, (num_threads, began, idle, ended))
        loading.open_library().ff_threads_waited(ctypes.byref(self), *times)


@pytest.fixture
def library() -> Iterator[ctypes.CDLL]:
    """The library, with a pool that stays as large as it is when its machine holds up threads."""
    library = loading.open_library()
    library.ff_threads_policy.restype = ctypes.POINTER(Policy)
    policy = library.ff_threads_policy().contents
    policy.allowed = -1
    yield library
    library.ff_threads_watch(None)
    policy.allowed = policy.pause = policy.next_try = policy.lost_core = 0


def run(library: ctypes.CDLL, task: Callable[[int, int, int], None], count: int, grain: int, threads: int) -> None:
    kept = TASK(lambda _, begin, end, thread: task(begin, end, thread))
    library.ff_run(kept, None, ctypes.c_int64(count), ctypes.c_int64(grain), threads)


def test_a_delay_makes_the_pool_smaller_for_a_while() -> None:
    policy = Policy()
    assert policy.threads(4, 0) == 4
    policy.waited(4, 0, 20_000, 3 * MS)  # 20 microseconds of work, and a time slice of another process
    assert [policy.threads(wanted, 4 * MS) for wanted in (1, 2, 3, 4, 8)] == [1, 2, 3, 3, 3]
    assert policy.threads(4, 12 * MS) == 3
    assert policy.threads(4, 13 * MS) == 4


def test_delays_that_follow_a_growth_make_longer_pauses() -> None:
    policy, now, pauses = Policy(), 0, []
    for _ in range(9):
        policy.waited(2, now, now + 20_000, now + 3 * MS)
        now += 3 * MS
        assert policy.threads(2, now + policy.pause - 1) == 1
        pauses.append(policy.pause // MS)
        now += policy.pause
        assert policy.threads(2, now) == 2
    assert pauses == [10, 20, 40, 80, 160, 320, 640, 1000, 1000]
    now += 60_000 * MS
    policy.waited(2, now, now + 20_000, now + 3 * MS)  # long after the others
    assert policy.pause == 10 * MS


def test_a_pool_grows_by_one_thread_at_a_time() -> None:
    policy, now = Policy(), 0
    for num_threads in (8, 7, 6):
        policy.waited(num_threads, now, now + 1, now + 3 * MS)
    grown = [policy.threads(8, now) for now in range(0, 400 * MS, 43 * MS)]
    assert grown == [5, 6, 7, 8, 8, 8, 8, 8, 8, 8]


def test_a_core_that_others_took_between_chunks_makes_the_pool_smaller(library: ctypes.CDLL) -> None:
    policy = Policy(lost_core=5 * MS)
    assert policy.threads(4, 6 * MS) == 3
    policy.lost_core = 7 * MS
    assert [policy.threads(4, now * MS) for now in (8, 26, 27)] == [2, 2, 3]
    library.ff_threads_policy().contents.allowed, library.ff_threads_policy().contents.lost_core = 0, 1
    library.ff_threads_of_step(2)
    assert library.ff_threads_policy().contents.allowed


@pytest.mark.parametrize(
    ("began", "idle", "ended"),
    [(0, 20_000, 200_000), (0, 20 * MS, 21 * MS)],
    ids=["a short wait", "the last chunk of much work"],
)
def test_ordinary_waits_change_nothing(began: int, idle: int, ended: int) -> None:
    policy = Policy()
    policy.waited(2, began, idle, ended)
    assert policy.threads(2, ended) == 2


def test_each_item_is_computed_once(library: ctypes.CDLL) -> None:
    for count, grain, threads in ((0, 1, 2), (1, 1, 2), (7, 3, 2), (1000, 7, 3), (50, 1, 1), (33, 100, 4)):
        found: Counter[int] = Counter()
        numbers = set()

        def task(begin: int, end: int, thread: int, found: Counter[int] = found, numbers: set[int] = numbers) -> None:
            found.update(range(begin, end))
            numbers.add(thread)

        run(library, task, count, grain, threads)
        assert found == Counter(range(count))
        assert numbers <= set(range(threads))


def test_a_thread_that_is_held_up_holds_nobody_up(library: ctypes.CDLL) -> None:
    """It has begun one chunk; all others are computed meanwhile."""
    others: list[int] = []
    joined, released = threading.Event(), threading.Event()

    def task(begin: int, _: int, thread: int) -> None:
        if thread == 1 and not joined.is_set():
            joined.set()
            assert released.wait(PATIENCE_S)
            return
        assert joined.wait(PATIENCE_S)
        others.append(begin)
        if len(others) == 99:
            released.set()

    run(library, task, 100, 1, 2)
    assert released.is_set() and len(others) == 99


def test_a_second_caller_computes_alone(library: ctypes.CDLL) -> None:
    joined, released, found = threading.Event(), threading.Event(), []

    def long_task(_begin: int, _end: int, thread: int) -> None:
        joined.set()
        assert released.wait(PATIENCE_S)

    first = threading.Thread(target=run, args=(library, long_task, 2, 1, 2))
    first.start()
    assert joined.wait(PATIENCE_S)
    run(library, lambda begin, end, thread: found.append((begin, end, thread)), 10, 1, 2)
    released.set()
    first.join()
    assert found == [(0, 10, 0)]


@pytest.mark.parametrize("variant", NATIVE_VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_threads(library: ctypes.CDLL, variant: str, dtype: torch.dtype) -> None:
    """With one, two and three threads, and with workers that are held up in their first chunk until the caller has
    computed two further ones."""
    kernels: Kernels = native_kernels(variant)
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((90, 400), (1200, 400)))
    logits, numbers = torch.randn(3, 50000, generator=generator).to(dtype), torch.arange(3)
    linear = kernels.prepare_linear(weight)

    def results() -> list[torch.Tensor]:
        drawn = kernels.sample(logits, RandomRows(torch.ones(3), numbers, numbers))
        normed = (kernels.rms_norm(x, x[0], 1e-5), *kernels.add_rms_norm(x, x, x[0], 1e-5))
        return [linear(x[:1]), linear(x), *normed, kernels.silu_and_mul(x), drawn]

    def hold(thread: int) -> None:
        if thread == 0:
            assert joined.wait(PATIENCE_S)
            callers_chunks.append(thread)
            if len(callers_chunks) == 3:
                released.set()
        else:
            joined.set()
            assert released.wait(PATIENCE_S)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = results()
        for num_threads in (2, 3):
            torch.set_num_threads(num_threads)
            assert all(map(torch.equal, results(), expected))
            joined, released = threading.Event(), threading.Event()
            callers_chunks: list[int] = []
            kept = WATCH(hold)
            library.ff_threads_watch(kept)
            assert all(map(torch.equal, results(), expected))
            library.ff_threads_watch(None)
            assert released.is_set()
    finally:
        torch.set_num_threads(before)

"""Kernels compiled ahead: dry passes launch nothing, and request the kernels that are launched later; the process that
compiles them."""

import io
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.interpreter import compiled, run_python
from tests.helpers.processes import SILENT

from fleetfoot.kernels import elementwise
from fleetfoot.kernels.runtime import compile_ahead, compile_jobs, compile_worker, direct_launch
from fleetfoot.kernels.runtime.compile_ahead import CompileAhead, can_compile_ahead
from fleetfoot.kernels.runtime.compile_jobs import BUSY_FACTOR, IDLE_S, CompileJobs, LoadPacer
from fleetfoot.kernels.runtime.compile_worker import CompilePool, CompileWorker, KernelSource, parse_again, serve
from fleetfoot.kernels.runtime.dry_tensors import DryPassError
from fleetfoot.kernels.runtime.triton_support import KernelNotReadyError, launcher, or_reference
from fleetfoot.runner.graphs import CaptureTable, GraphKey
from fleetfoot.runner.v2.warm_up import KernelCompiler, eager_shape, later_shapes, prompt_shapes, warm_up_steps
from fleetfoot.sampling.shape import EVERYTHING, PLAIN

pytest.importorskip("triton")
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITCallable


class FakeKernel:
    """A ``triton.JITFunction`` as far as a dry pass uses it."""

    def __init__(self) -> None:
        self.requested: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def warmup(self, *arguments: Any, **options: Any) -> None:
        self.requested.append(arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.launched.append(arguments)


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job has the source of a kernel."""
    monkeypatch.setattr(KernelSource, "of", lambda job: KernelSource("module", "name", {}, {}, {}, (), {}))


@pytest.fixture
def ahead() -> Iterator[CompileAhead]:
    ahead = CompileAhead(2)
    yield ahead
    ahead.close()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.interpreter)])
def test_a_cpu_and_the_interpreter_compile_nothing(device: str) -> None:
    assert not can_compile_ahead(torch.device(device))


def test_a_dry_pass_requests_once_and_launches_nothing(ahead: CompileAhead) -> None:
    kernel, numbers = FakeKernel(), torch.zeros(64)

    def dry_pass() -> None:
        launcher(kernel, (2,))(numbers, 1, width=16)
        launch = launcher(kernel, (1,))
        launch(numbers, 1, width=16)
        launch(numbers, True, width=16)  # equal to 1, and another type
        launch(numbers[1:], 1, width=16)  # not aligned
        launch(numbers.double(), 1, width=16)
        launch([1], 1, width=16)  # not hashable, so it is requested again
        launch([1], 1, width=16)

    assert ahead.queue(dry_pass).wait() == 0
    assert len(kernel.requested) == 4 + 2
    assert not kernel.launched
    launcher(kernel, (1,))(numbers)
    assert (len(kernel.requested), len(kernel.launched)) == (6, 1)


def test_launches_are_real_after_a_dry_pass_that_raises(ahead: CompileAhead) -> None:
    def dry_pass() -> None:
        raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer"):
        ahead.queue(dry_pass)
    kernel = FakeKernel()
    launcher(kernel, (1,))(3)
    assert kernel.launched == [(3,)]
    ahead.queue(lambda: launcher(kernel, (1,))(4))  # and the next dry pass is one
    assert kernel.requested == [(4,)]


def test_a_dry_pass_touches_no_memory(ahead: CompileAhead) -> None:
    kernel, indices = FakeKernel(), torch.full((64,), 2**30, dtype=torch.int64)

    def dry_pass() -> None:
        gathered = torch.empty(64, 8).index_select(0, indices)  # never written, and far out of range
        launcher(kernel, (1,))(gathered, gathered[:, 1:], indices.add_(1))

    assert ahead.queue(dry_pass).wait() == 0
    assert indices.eq(2**30).all()
    ((gathered, shifted, written),) = kernel.requested
    assert written is indices
    for tensor in (gathered, shifted):  # invalid after the pass
        with pytest.raises(DryPassError, match="has no memory"):
            tensor.data_ptr()


SLOW_COMPILER = f"""
from functools import partial
from fleetfoot.kernels.runtime import compile_ahead, compile_jobs, compile_worker, direct_launch
from fleetfoot.kernels.runtime.compile_ahead import CompileAhead
compile_ahead.CompilePool = partial(compile_worker.CompilePool, command={SILENT})
compile_worker.KernelSource.of = lambda job: compile_worker.KernelSource("m", "n", {{}}, {{}}, {{}}, (), {{}})
ahead = CompileAhead(2)
ahead._collect = lambda dry_pass: [ahead._jobs.submit(print, "compiled here") for _ in range(5)]
ahead.finish()
ahead.queue(lambda: None)
print("served")
"""


@pytest.mark.slow
def test_a_process_that_ends_waits_for_no_kernel() -> None:
    result = subprocess.run([sys.executable, "-c", SLOW_COMPILER], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "served\n", "")


@pytest.mark.usefixtures("source")
def test_closing_ends_workers_and_pending_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "CompilePool", partial(CompilePool, command=SILENT))
    ahead = CompileAhead(2)
    done: list[int] = []
    futures = [ahead._jobs.submit(done.append, n) for n in range(5)]
    monkeypatch.setattr(ahead, "_collect", lambda dry_pass: futures)
    ahead.finish()  # from now on processes compile
    ahead.queue(lambda: None)
    ahead.close()
    assert done == []
    assert all(future.cancelled() or future.exception() is not None for future in futures)
    assert not any(thread.is_alive() for thread in ahead._threads)


class SlowKernel(FakeKernel):
    """One whose compilations wait for the jobs of `CompileAhead` to be run."""

    __name__ = "SlowKernel"
    is_optional = False

    def __init__(self) -> None:
        super().__init__()
        self.ready: dict[Any, str] = {}

    def warmup(self, *arguments: Any, **options: Any) -> Any:
        super().warmup(*arguments)
        mode = active_mode.get()
        assert mode is not None
        name = arguments[-1]
        return self.ready.get(name) or mode.submit(name, lambda: name, lambda kernel: self.ready.update({name: kernel}))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            if arguments[-1] not in self.ready:
                raise KernelNotReadyError(self.__name__)
            self.launched.append(arguments)

        return launch


def attempt(ahead: CompileAhead, kernel: SlowKernel, *names: str) -> list[str]:
    """How an operation that launches a kernel under these names is computed, twice."""
    numbers = torch.zeros(4)

    def operation() -> str:
        for name in names:
            launcher(kernel, (1,))(numbers, name)
        return "launched"

    with ahead.serving():
        return [or_reference(operation, lambda: "reference")() for _ in range(2)]


def test_a_step_waits_for_no_kernel(monkeypatch: pytest.MonkeyPatch, ahead: CompileAhead) -> None:
    """Its compilation is queued once, with those of the whole operation, and it is ready after `advance`."""
    monkeypatch.setattr(ahead, "_start_work", lambda: None)
    kernel = SlowKernel()
    assert attempt(ahead, kernel, "a", "b") == ["reference"] * 2
    assert [arguments[-1] for arguments in kernel.requested] == ["a", "a", "b"]
    assert list(ahead.take_missed().values()) == ["SlowKernel"]
    ahead.advance()
    ahead._jobs.work()
    assert attempt(ahead, kernel, "a", "b") == ["reference"] * 2  # no change within a step
    ahead.advance()
    assert attempt(ahead, kernel, "a", "b") == ["launched"] * 2
    assert not ahead._requested
    assert ahead.wait_for_all() == 0


def test_ranks_change_over_in_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 compiles in another order. Both use what both have, in the order in which it was queued."""
    monkeypatch.setattr(CompileAhead, "_start_work", lambda ahead: None)
    counts = [0, 0]
    ranks = [CompileAhead(1, on_compiled=partial(counts.__setitem__, rank)) for rank in range(2)]
    kernels = [SlowKernel(), SlowKernel()]

    def compile_next(rank: int, number: int) -> None:
        jobs = ranks[rank]._jobs
        rest = [*jobs._to_compile][number:]
        for _ in rest:
            jobs._to_compile.pop()
        jobs.work()
        jobs._to_compile.extend(rest)

    def step() -> list[list[str]]:
        for ahead in ranks:
            ahead.advance(min(counts))
        return [[attempt(ranks[rank], kernels[rank], name)[0] for name in "abc"] for rank in range(2)]

    for rank, begin in enumerate((0.0, 0.34)):
        ranks[rank].queue(lambda rank=rank: [launcher(kernels[rank], (1,))(torch.zeros(4), n) for n in "abc"], begin)
    reference, launched = "reference", "launched"
    assert step() == [[reference] * 3] * 2
    compile_next(1, 2)  # b and c
    compile_next(0, 2)  # a and b
    assert (counts, step()) == ([2, 0], [[reference] * 3] * 2)
    compile_next(1, 1)
    assert (counts, step()) == ([2, 3], [[launched, launched, reference]] * 2)
    compile_next(0, 1)
    assert (counts, step()) == ([3, 3], [[launched] * 3] * 2)
    for ahead in ranks:
        ahead.close()


def test_a_graph_without_an_optional_kernel_is_outdated_when_it_is_ready(
    monkeypatch: pytest.MonkeyPatch, ahead: CompileAhead
) -> None:
    monkeypatch.setattr(ahead, "_start_work", lambda: None)
    kernels, key = (SlowKernel(), SlowKernel()), GraphKey("decode", 1, 1)
    kernels[1].is_optional = True
    compiler = KernelCompiler(lambda shape: lambda: None, nullcontext, ahead)

    def capture(may_capture: Callable[[], bool]) -> Any:
        tried = [attempt(ahead, kernel, name)[0] for kernel, name in zip(kernels, "ab", strict=True)]
        return tried if may_capture() else None

    assert compiler.capture(key, capture) is None
    assert compiler.take_notes() == ["tried to capture decode 1 1", "SlowKernel not compiled"]
    optional = ahead._jobs._to_compile.pop()
    ahead._jobs.work()
    ahead._jobs._to_compile.append(optional)
    ahead.advance()
    assert compiler.capture(key, capture) == ["launched", "reference"]
    assert compiler.take_outdated() == []
    ahead._jobs.work()
    ahead.advance()
    assert compiler.take_outdated() == [key]
    assert compiler.capture(key, capture) == ["launched", "launched"]
    assert compiler.take_outdated() == []


def test_nothing_is_queued_after_the_end(ahead: CompileAhead) -> None:
    ahead.close()
    with pytest.raises(RuntimeError, match="after close"):
        ahead.queue(lambda: None)


def test_the_previous_compilation_listener_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    events: list[dict[str, Any]] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **event: events.append(event))
    before = knobs.compilation.listener
    ahead = CompileAhead(1)
    for is_found in (True, False, True):
        knobs.compilation.listener(src="kernel", cache_hit=is_found)
    assert (ahead.num_compiled, ahead.num_found) == (1, 2)
    assert [event["cache_hit"] for event in events] == [True, False, True]
    ahead.finish()
    ahead.close()
    assert knobs.compilation.listener is before


def test_shapes() -> None:
    prefill, decode = warm_up_steps(max_num_batched_tokens=64, max_model_len=128, block_size=16)
    assert eager_shape(prefill, None) == GraphKey("mixed", 1, 4)
    assert eager_shape(decode, 0) == GraphKey("decode", 1, 1, drafting=0, max_context=1)
    assert prompt_shapes(300) == [GraphKey("mixed", 1, 300)]
    assert prompt_shapes(9000) == [GraphKey("mixed", 1, 1024), GraphKey("mixed", 1, 9000)]
    assert later_shapes((), (), 0) == []
    table = CaptureTable(decode=(1, 2), uniform=(1,), num_drafts=3, mixed=(16,), max_num_seqs=2)
    later = later_shapes(table.keys, (), 3)
    kinds = {(shape.kind, shape.num_tokens, shape.drafting) for shape in later}
    assert kinds == {("decode", 1, 3), ("decode", 2, 3), ("uniform", 4, 3), ("mixed", 16, 3)}
    full = replace(table, full_step=8192, mixed=(16, 2048))
    assert 8192 not in [shape.num_tokens for shape in later_shapes(full.keys, (), 3)]  # an eager one launches the same
    many = CaptureTable.of(
        device="cuda", enforce_eager=False, max_num_seqs=64, max_num_batched_tokens=700, short_contexts=((2, 50),)
    )
    later = later_shapes(many.keys, many.fine, 0)
    assert GraphKey("mixed", 64, 640) in later
    sampled = [shape.num_reqs for shape in later if shape.sampling not in (PLAIN, None)]
    assert {*sampled} == {1, 2, 64} and len(sampled) % 3 == 0
    variants = [shape.sampling for shape in later if shape.sampling not in (PLAIN, None)]
    for field in ("filters", "logits_processors", "logprobs"):
        assert any(getattr(variant, field) for variant in variants)


def test_slow_kernels_are_compiled_first() -> None:
    """Behind those that a step has missed."""
    jobs = CompileJobs()
    done: list[str] = []
    futures = {name: jobs.submit(partial(done.append, name)) for name in ("plain", "slow", "other", "urgent")}
    jobs.begin_with(futures["slow"])
    jobs.hurry([futures["urgent"]])
    jobs.claim_threads(1)
    jobs.work(lambda job: bool(job()) or True)
    assert [*dict.fromkeys(done)] == ["urgent", "slow", "plain", "other"]


@pytest.mark.parametrize("num_cores", [4, 16])
def test_processes_start_beside_the_imports_where_cores_are_many(
    num_cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(compile_worker, "num_cores", lambda: num_cores)
    monkeypatch.setattr(CompilePool, "__init__", lambda _, size: started.append(size))
    assert (CompilePool.beside_imports(2) is not None) == bool(started)
    assert started == ([8] if num_cores == 16 else [])


class StartAhead:
    """`CompileAhead` as a start uses it. ``uncached``: shapes, here their numbers of tokens, whose kernels are not in
    the cache."""

    compiles_here, num_processes, num_compiled, num_found = True, 1, 0, 0

    def __init__(self, uncached: set[int]) -> None:
        self._uncached, self.num_uncached = uncached, 0
        self.events: list[tuple[str, int]] = []
        self.how = ""

    def queue(self, dry_pass: Callable[[], object], begin: float) -> Any:
        self.how, first = "queued", len(self.events)
        dry_pass()
        self.how, queued = "", self.events[first:]
        self.num_uncached += sum(tokens in self._uncached for _, tokens in queued)
        return SimpleNamespace(wait=lambda: self.events.extend(("awaited", tokens) for _, tokens in queued) or 0)

    def serving(self) -> Any:
        self.how = "run"
        return nullcontext()

    def leave_cores(self) -> None:
        self.compiles_here = False

    def finish(self) -> None:
        self.events.append(("finish", 0))


@pytest.mark.parametrize(
    ("uncached", "num_ranks", "events"),
    [
        (set(), 1, "queued 1 2 3 4, awaited 1 2 3 4, run 3 4, finish 0"),
        (set(), 2, "queued 1 2 3 4, library 9, awaited 1 2 3 4, finish 0"),
        ({4}, 1, "queued 1 2 3 4, library 9, awaited 1 2 3, finish 0"),
        ({2}, 1, "queued 1 2 3, library 9, awaited 1 2 3, queued 4, finish 0"),
    ],
)
def test_a_start_waits_for_all_kernels_if_all_are_cached(uncached: set[int], num_ranks: int, events: str) -> None:
    """And runs steps with them. Else it runs steps without any of ours, as several ranks do in any case."""
    ahead: Any = StartAhead(uncached)

    def make_step(shape: GraphKey) -> Callable[[], object]:
        return lambda: ahead.events.append((ahead.how or "library", shape.num_tokens))

    group: Any = SimpleNamespace(rank=0, size=num_ranks)
    compiler = KernelCompiler(make_step, nullcontext, ahead, group)
    one, two, three, four, nine = (GraphKey("mixed", 1, tokens) for tokens in (1, 2, 3, 4, 9))
    compiler.compile_first([one, two, three], [nine], [three, four])
    assert ahead.compiles_here == (2 in uncached)
    has_all = not uncached and num_ranks == 1  # what one rank finds, others may not find
    assert compiler.compiled == ({one, two, three, four} if has_all else {one, two, three})
    assert [compiler.has_kernels(replace(key, num_reqs=7)) for key in (two, four, nine)] == [True, has_all, has_all]
    assert compiler.has_kernels(replace(two, sampling=EVERYTHING)) == has_all
    compiler.compile_later([three, four])
    kinds = [
        [kind, *(str(tokens) for _, tokens in of)] for kind, of in groupby(ahead.events, key=lambda event: event[0])
    ]
    assert ", ".join(" ".join(kind) for kind in kinds) == events


@pytest.mark.parametrize("waits", [False, True])
def test_a_start_that_waits_for_plain_sampling_has_the_kernels_of_all_mixed_sizes(waits: bool) -> None:
    ahead: Any = StartAhead({4})

    def make_step(shape: GraphKey) -> Callable[[], object]:
        return lambda: ahead.events.append((ahead.how, shape.num_tokens))

    mixed, decode, between = GraphKey("mixed", 1, 16), GraphKey("decode", 4, 4), GraphKey("mixed", 8, 96)
    compiler = KernelCompiler(make_step, nullcontext, ahead)
    later = [mixed, decode, replace(decode, sampling=EVERYTHING)]
    compiler.compile_first([mixed, decode] if waits else [mixed], later_shapes=later)
    assert compiler.has_kernels(mixed)
    for key in (decode, between, replace(between, sampling=None)):
        assert compiler.has_kernels(key) == waits
    for key in (decode, between):
        assert not compiler.has_kernels(replace(key, sampling=EVERYTHING))


@compiled
def test_a_start_compiles_before_it_launches(tmp_path: Path) -> None:
    """With the compiler, for an H100, in another process; twice, for the second finds what the first has compiled."""
    command = ("-m", "tests.helpers.warm_up_without_gpu")
    reports = [json.loads(run_python(*command, is_forked=True, TRITON_CACHE_DIR=str(tmp_path))) for _ in range(2)]
    for report in reports:
        assert report["start"]["late"] == report["eager"]["late"] == report["threads"] == []
        assert report["fail"] == {"failed": 1, "raised": "CompilationError"}
    cold, warm = (report["start"] for report in reports)
    assert min(cold["later"], cold["compiled_later"]) > 3
    assert cold["compiled"] == warm["found"] > 15
    assert warm["found_later"] == cold["compiled_later"]
    assert cold["found"] == cold["found_later"] == cold["failed_later"] == cold["texts"] == 0
    assert warm["compiled"] == warm["compiled_later"] == 0


@pytest.mark.parametrize("version", ["3.5.1", "3.7.0"])
def test_an_unknown_triton_launches_itself(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel()
    monkeypatch.setattr(kernel, "device_caches", {}, raising=False)
    monkeypatch.setattr("triton.__version__", version)
    direct_launch._has_internals.cache_clear()
    launcher(kernel, (1,))(1, 2)
    direct_launch._has_internals.cache_clear()
    assert kernel.launched == [(1, 2)]


@compiled
def test_direct_launches_are_those_of_triton(tmp_path: Path) -> None:
    command = ("-m", "tests.helpers.launches_without_gpu")
    report = json.loads(run_python(*command, is_forked=True, TRITON_CACHE_DIR=str(tmp_path)))
    assert min(report.pop("kernels"), report["launches"] // 3) > 15
    assert report.pop("equal") == [True] * 6
    num = report.pop("launches")
    assert report == {"by_triton": [0, num, num, 0], "observed": 2 * num}  # hooks see every launch


LISTS = ("late", "missing", "needless", "unmasked", "changed", "kept", "warnings")
"""Of a report."""


@compiled
def test_graphs_of_all_samplers_have_their_kernels() -> None:
    report = json.loads(run_python("-m", "tests.helpers.later_kernels_without_gpu"))
    assert report.pop("compiled") > 50
    assert report == {"missing": []}


@compiled
def test_dry_passes_of_every_kind_of_engine_are_dry_and_complete() -> None:
    """They read and write nothing, request the kernels that are launched, and import nothing large."""
    reports = json.loads(run_python("-m", "tests.helpers.dry_passes_without_gpu"))
    assert reports.pop("imports") == []  # see `fleetfoot.kernels.runtime.dry_tensors`
    assert len(reports) == 22
    requested = {kind: report.pop("requested") for kind, report in reports.items()}
    for kind, report in reports.items():
        assert len(requested[kind]) > 20, kind
        assert report == {name: [] for name in LISTS}, kind
    # ranks count their kernels in this order, see `SchedulerOutput.num_kernels`
    others = [kind for kind in requested if kind.endswith(", other")]
    assert len(others) == 3
    for kind in others:
        assert requested[kind] == requested[kind.removesuffix(", other")], kind


def test_a_cache_that_cannot_be_written_holds_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert not compile_worker.is_cached(SimpleNamespace(_key="a kernel"))


@pytest.mark.parametrize("num_errors", [2, 6])
def test_errors_of_parsing_in_threads_are_tried_again(
    num_errors: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few of them: an interpreter that raises them always is broken."""
    errors = iter(range(num_errors))

    def parse(function: object) -> str:
        for number in errors:
            raise SystemError(f"AST constructor recursion depth mismatch (before=33, after={number})")
        return "kernel"

    monkeypatch.setattr(JITCallable, "parse", parse)
    for _ in range(2):
        parse_again()
    jobs = CompileJobs()
    future = jobs.submit(JITCallable.parse, None)
    jobs.work()
    if num_errors == 2:
        assert (future.result(0), caplog.messages) == ("kernel", [])
    else:
        assert isinstance(future.exception(0), SystemError)
        assert len(caplog.messages) == 1


def test_jobs_wait_for_work(caplog: pytest.LogCaptureFixture) -> None:
    jobs = CompileJobs()
    done: list[int] = []
    futures = [jobs.submit(done.append, number) for number in range(3)]
    failing = jobs.submit(lambda: 1 // 0)
    assert done == []
    assert futures[1].cancel()
    jobs.work()
    assert done == [0, 2]
    assert isinstance(failing.exception(0), ZeroDivisionError)
    error = "ZeroDivisionError: integer division or modulo by zero"
    assert caplog.messages == [f"a kernel cannot be compiled ahead: {error}"]
    dropped = jobs.submit(done.append, 3)
    jobs.drop()
    jobs.work()
    assert dropped.cancelled()
    assert done == [0, 2]


class Engine:
    """A clock, the steps of an engine, and what is loaded beside them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: float = 0.001, cached: bool = True) -> None:
        self.now, self.step_s, self.loaded = 0.0, step_s, []  # type: float, float, list[tuple[int, float]]
        self.pacer = LoadPacer(lambda: self.now, lambda: 0.003 * len(self.loaded))
        self.jobs = CompileJobs(pacer=self.pacer)
        self.busy_until = 0.0
        monkeypatch.setattr(compile_jobs, "is_cached", lambda future: cached)
        monkeypatch.setattr(self.jobs._changed, "wait", self.wait)

    def wait(self, seconds: float) -> None:
        """The engine's steps while a thread waits."""
        assert seconds > 0
        end = self.now + seconds
        while self.now < min(end, self.busy_until):
            self.pacer.step_begins()
            self.now += self.step_s
            self.pacer.step_ends()
        self.now = max(self.now, end)

    def submit(self, *numbers: int) -> list[Any]:
        return [self.jobs.submit(lambda number=n: self.loaded.append((number, self.now))) for n in numbers]

    def serve(self, until: float) -> None:
        """From now on."""
        self.busy_until = until
        self.pacer.step_begins()
        self.pacer.step_ends()


def test_kernels_are_loaded_at_once_before_the_first_step_and_while_the_engine_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(monkeypatch)
    engine.submit(0, 1)
    engine.jobs.find_cached()
    engine.jobs.work()
    assert engine.loaded == [(0, 0.0), (1, 0.0)]
    engine.serve(until=0.05)
    engine.submit(2, 3, 4)
    engine.jobs.work()
    assert [number for number, _ in engine.loaded[2:]] == [2, 3, 4]
    at = [now for _, now in engine.loaded[2:]]
    assert 0.05 + IDLE_S <= at[0] == at[2] <= 0.05 + IDLE_S + 0.1
    engine.pacer.step_begins()
    engine.now += 60.0  # a long step
    assert not engine.pacer.is_idle


def test_a_busy_engine_loses_little_time_and_gets_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    engine.serve(until=1e9)
    futures = engine.submit(*range(20))
    engine.jobs.work()
    assert [future.done() for future in futures] == [True] * 20
    at = [now for _, now in engine.loaded]
    pauses = [later - sooner for sooner, later in pairwise(at)]
    assert all(BUSY_FACTOR * 0.003 <= pause < BUSY_FACTOR * 0.003 + 0.101 for pause in pauses)


def test_threads_that_hold_steps_up_compile_while_the_engine_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, cached=False)
    engine.jobs.only_while_idle = True
    engine.serve(until=0.5)
    futures = engine.submit(0, 1)
    engine.jobs.hurry(futures)
    engine.jobs.work()
    assert [number for number, _ in engine.loaded] == [0, 1]
    assert all(0.5 + IDLE_S <= at <= 0.5 + IDLE_S + 0.101 for _, at in engine.loaded)


@pytest.mark.parametrize("cached", [True, False])
def test_missed_kernels_are_first_and_do_not_wait(monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    """Also those that are missed while a thread pauses."""
    engine = Engine(monkeypatch, cached=cached)
    engine.serve(until=1e9)
    futures = engine.submit(*range(6))
    engine.jobs.hurry(futures[4:5])
    wait = engine.wait

    def miss(seconds: float) -> None:
        wait(seconds)
        if not engine.jobs._urgent and not futures[5].done():
            engine.jobs.hurry(futures[5:])

    monkeypatch.setattr(engine.jobs._changed, "wait", miss)
    engine.jobs.work()
    order = [number for number, _ in engine.loaded]
    assert sorted(order) == [*range(6)]
    if cached:
        assert (order[0], order.index(5)) == (4, 1)
        assert engine.loaded[0][1] == 0.0
    else:  # compiled one by one
        assert order[0] == 4


def test_ranks_keep_the_order_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompileAhead, "_start_work", lambda ahead: None)
    for is_ordered in (False, True):
        ahead = CompileAhead(1, is_ordered=is_ordered)
        kernel = SlowKernel()
        ahead.queue(lambda kernel=kernel: [launcher(kernel, (1,))(torch.zeros(4), name) for name in "abc"])
        assert attempt(ahead, kernel, "c") == ["reference"] * 2
        first = ahead._jobs._first(ahead._jobs._to_compile)
        assert first.run() == ("a" if is_ordered else "c")
        assert len(ahead._jobs._urgent) == (3 if is_ordered else 1)  # none of those before it pauses
        ahead.close()


@pytest.mark.parametrize(("size", "behind_the_start"), [(1, 1), (16, 8)])
def test_half_of_the_processes_compile_beside_steps(size: int, behind_the_start: int) -> None:
    ahead = CompileAhead(size)
    assert ahead._jobs.most_compiling == size
    ahead.leave_cores()
    assert ahead._jobs.most_compiling == behind_the_start
    ahead.close()


def test_one_thread_loads_and_the_others_compile() -> None:
    jobs = CompileJobs(most_compiling=2)
    for _ in range(5):
        jobs.submit(print)
    assert jobs.claim_threads(3) == 3
    assert jobs.claim_threads(3) == 0
    assert [jobs._next() is not None for _ in range(3)] == [True, True, False]  # a third thread compiles nothing
    assert jobs.claim_threads(3) == 1
    jobs.drop()


def test_the_launcher_of_a_kernel_is_built_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import driver

    built: list[tuple[object, object]] = []

    def build(src: object, metadata: object) -> None:
        built.append((src, metadata))
        if src == "no C compiler":
            raise FileNotFoundError(src)

    monkeypatch.setattr(driver, "CudaLauncher", build)
    jobs = CompileJobs()
    kernels = [SimpleNamespace(src=name, metadata=index) for index, name in enumerate(("a kernel", "no C compiler"))]
    futures = [jobs.submit(lambda kernel=kernel: kernel) for kernel in kernels]
    futures.append(jobs.submit(lambda: "something else"))
    jobs.work()
    assert built == [("a kernel", 0), ("no C compiler", 1)]
    assert [future.result(0) for future in futures] == [*kernels, "something else"]


def test_a_step_that_cannot_be_dry_does_not_stop_a_start(ahead: CompileAhead, caplog: pytest.LogCaptureFixture) -> None:
    """What it launches is compiled when it is launched; the other steps go on."""
    kernel, numbers = FakeKernel(), torch.ones(4)

    def make_step(shape: GraphKey) -> Callable[[], object]:
        def step() -> None:
            if shape.num_tokens == 2:
                numbers.sum().item()
            launcher(kernel, (1,))(numbers, shape.num_tokens)

        return step

    compiler = KernelCompiler(make_step, nullcontext, ahead)
    compiler.compile_first([GraphKey("decode", tokens, tokens) for tokens in (1, 2, 3)])
    compiler.close()
    assert [arguments[1] for arguments in kernel.requested] == [1, 3]
    (warning,) = caplog.messages
    assert "_local_scalar_dense" in warning
    assert "num_tokens=2" in warning


DEAD = (sys.executable, "-c", "pass")


def job(kernel: object) -> Callable[[], object]:
    """As Triton makes them."""
    attributes = {(0,): [["tt.divisibility", 16]]}
    src = SimpleNamespace(fn=kernel, signature={"x": "*fp32"}, constants={(1,): 4}, attrs=attributes)
    target = SimpleNamespace(backend="cuda", arch=90, warp_size=32)
    options = SimpleNamespace(num_warps=4)

    def compile_it() -> object:
        return src, target, options

    return compile_it


def kernel_named(name: str) -> SimpleNamespace:
    return SimpleNamespace(fn=SimpleNamespace(__module__=elementwise.__name__, __name__=name))


def test_what_is_to_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_named("a_kernel")
    monkeypatch.setattr(elementwise, "a_kernel", kernel, raising=False)
    source = KernelSource.of(job(kernel))
    assert source is not None
    assert pickle.loads(pickle.dumps(source)) == source
    assert (source.module, source.name) == ("fleetfoot.kernels.elementwise", "a_kernel")
    assert source.target == ("cuda", 90, 32)
    assert source.options == {"num_warps": 4}
    assert KernelSource.of(job(kernel_named("another"))) is None  # its module has no such kernel
    assert KernelSource.of(job(kernel_named("a_kernel"))) is None  # its module has another one of that name
    assert KernelSource.of(lambda: kernel) is None
    assert KernelSource.of(print) is None


def test_replies_report_success(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile_it(source: KernelSource) -> None:
        compiled.append(source.name)
        if source.name == "bad":
            raise KeyError("bad")

    monkeypatch.setattr(KernelSource, "compile", compile_it)
    sources = [KernelSource("module", name, {}, {}, {}, (), {}) for name in ("good", "bad", "better")]
    requests, replies = io.BytesIO(b"".join(map(pickle.dumps, sources))), io.BytesIO()
    serve(requests, replies)
    replies.seek(0)
    assert replies.read() == b"++-+"  # a greeting first
    assert compiled == ["good", "bad", "better"]


@pytest.fixture
def pool() -> Iterator[Callable[..., CompileWorker]]:
    """Makes a worker of a process with a command, or None: the one that compiles."""
    pools: list[CompilePool] = []

    def worker(command: tuple[str, ...] | None) -> CompileWorker:
        pools.append(CompilePool(2, command))
        return pools[-1].workers[0]

    yield worker
    for each in pools:
        each.close()
        each.close()  # does nothing


@pytest.mark.usefixtures("source")
def test_a_process_that_has_ended_compiles_nothing(pool: Callable[..., CompileWorker]) -> None:
    worker = pool(DEAD)
    assert [worker.compile(lambda: None) for _ in range(3)] == [False] * 3
    assert worker.has_ended
    assert not pool(("/no/such/program",)).compile(lambda: None)


@pytest.mark.usefixtures("source")
def test_threads_compile_where_processes_have_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_ahead, "CompilePool", partial(CompilePool, command=DEAD))
    ahead = CompileAhead(4)
    ahead.leave_cores()
    ahead.finish()
    monkeypatch.setattr(ahead, "_collect", lambda dry_pass: [])
    futures = [ahead._jobs.submit(lambda number=n: number) for n in range(6)]
    ahead.queue(lambda: None)
    assert [future.result(60) for future in futures] == [*range(6)]
    assert ahead._jobs.most_compiling == 1 and ahead._jobs.only_while_idle
    assert len(caplog.messages) == 1 and "processes that compile have ended" in caplog.messages[0]
    ahead.close()


def test_threads_do_not_share_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CPython's import of a second file with the name of the first does."""
    from triton.runtime import build

    shared = SimpleNamespace(launch="")

    def load(name: str, path: str) -> Any:
        shared.launch = path
        return shared

    monkeypatch.setattr(build, "_load_module_from_path", load)
    compile_worker.keep_launchers_apart()
    compile_worker.keep_launchers_apart()  # does nothing
    one, other = (build._load_module_from_path("launcher", path) for path in ("one", "other"))
    assert (one.launch, other.launch) == ("one", "other")


@pytest.mark.usefixtures("source")
def test_closing_ends_pending_calls(monkeypatch: pytest.MonkeyPatch, pool: Callable[..., CompileWorker]) -> None:
    waits = threading.Event()
    worker = pool(SILENT)
    receive = CompileWorker._receive

    def notify_and_receive(worker: CompileWorker) -> bool:
        waits.set()
        return receive(worker)

    monkeypatch.setattr(CompileWorker, "_receive", notify_and_receive)
    with ThreadPoolExecutor(1) as threads:
        pending = threads.submit(worker.compile, lambda: None)
        assert waits.wait(timeout=60)
        worker.close()
        assert isinstance(pending.exception(timeout=60), RuntimeError)
    with pytest.raises(RuntimeError, match="the compile worker is closed"):
        worker.compile(lambda: None)


def test_a_worker_sends_jobs_of_triton_only(pool: Callable[..., CompileWorker]) -> None:
    assert not pool(SILENT).compile(lambda: None)


@pytest.mark.usefixtures("source")
def test_the_process_that_compiles_replies(pool: Callable[..., CompileWorker]) -> None:
    """That there is no module of this name, three times."""
    worker = pool(None)
    assert [worker.compile(lambda: None) for _ in range(3)] == [False] * 3
    assert worker._has_greeted
    assert not worker.has_ended and not worker._is_closed

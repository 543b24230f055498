"""Kernels compiled ahead: dry passes launch nothing, and request the kernels that are launched later; the process that
compiles them."""

import io
import json
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.interpreter import compiled, run_python
from tests.helpers.processes import SILENT

from fleetfoot.kernels import elementwise
from fleetfoot.kernels.runtime import compile_ahead, compile_worker, internals
from fleetfoot.kernels.runtime.compile_ahead import CompileAhead, KernelCompileError, can_compile_ahead
from fleetfoot.kernels.runtime.compile_worker import CompilePool, CompileWorker, KernelSource, serve
from fleetfoot.kernels.runtime.dry_tensors import DryPassError
from fleetfoot.kernels.runtime.triton_support import launcher

pytest.importorskip("triton")
from triton.runtime.jit import JITCallable

DEAD = (sys.executable, "-c", "pass")


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

    ahead.queue(dry_pass)
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

    ahead.queue(dry_pass)
    assert indices.eq(2**30).all()
    ((gathered, shifted, written),) = kernel.requested
    assert written is indices
    for tensor in (gathered, shifted):  # invalid after the pass
        with pytest.raises(DryPassError, match="has no memory"):
            tensor.data_ptr()


class Compiled(SimpleNamespace):
    """A compiled kernel. ``src``, ``metadata``: for its launcher."""

    def __init__(self, name: str) -> None:
        super().__init__(src=name, metadata=None, asm={"ptx": "text", "cubin": b""}, is_loaded=False)


class SlowKernel(FakeKernel):
    """One whose compilations wait for `CompileAhead`; that of ``bad`` raises."""

    __name__ = "SlowKernel"

    def __init__(self) -> None:
        super().__init__()
        self.ready: dict[Any, Compiled] = {}
        self.compiled: list[str] = []

    def warmup(self, *arguments: Any, **options: Any) -> Any:
        name, mode = arguments[-1], internals.active_mode()

        def compile_it() -> Compiled:
            self.compiled.append(name)
            if name == "bad":
                raise KeyError(name)
            return Compiled(name)

        return mode.submit(name, compile_it, lambda kernel: self.ready.update({name: kernel}))


def compile_here(monkeypatch: pytest.MonkeyPatch, cached: str = "") -> None:
    """Let one thread of this process compile. ``cached``: names of kernels in the cache."""
    monkeypatch.setattr(compile_ahead, "CompilePool", partial(CompilePool, command=DEAD))
    monkeypatch.setattr(compile_ahead, "is_cached", lambda future: future._key in cached)
    monkeypatch.setattr(CompileAhead, "_start_threads", CompileAhead._load_all)


def test_kernels_are_ready_behind_a_wait(monkeypatch: pytest.MonkeyPatch, ahead: CompileAhead) -> None:
    """Those that take seconds are compiled first, and none is queued twice."""
    compile_here(monkeypatch, cached="cd")
    kernel, slow, numbers = SlowKernel(), SlowKernel(), torch.zeros(4)
    slow.compiles_slowly = True  # type: ignore[attr-defined]
    slow.compiled = kernel.compiled

    def dry_pass() -> None:
        for name in "abc":
            launcher(kernel, (1,))(numbers, name)
        launcher(slow, (1,))(numbers, "s")

    ahead.queue(dry_pass)
    ahead.queue(dry_pass)
    ahead.queue(lambda: launcher(kernel, (1,))(numbers, "d"))
    assert ahead.wait() == (2, 3)
    assert [*dict.fromkeys(kernel.compiled)] == [*"csabd"]
    assert [each.asm for each in kernel.ready.values()] == [{"cubin": b""}] * 4


def test_a_cached_kernel_that_comes_while_all_threads_compile_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, is_queued = threading.Semaphore(0), threading.Event()

    def compile_slowly(ahead: CompileAhead, job: Any) -> None:
        compiling.release()
        is_queued.wait()

    monkeypatch.setattr(compile_ahead, "is_cached", lambda future: future._key == "cached")
    monkeypatch.setattr(CompileAhead, "_compile", compile_slowly)
    ahead, kernel = CompileAhead(1), SlowKernel()
    ahead.queue(lambda: [launcher(kernel, (1,))(torch.zeros(4), name) for name in "ab"])
    for _ in range(2):
        compiling.acquire()
    ahead.queue(lambda: launcher(kernel, (1,))(torch.zeros(4), "cached"))
    is_queued.set()
    ahead.wait()
    assert set(kernel.ready) == {"a", "b", "cached"}
    ahead.close()


def test_a_kernel_that_does_not_compile_ends_the_start_with_its_name(
    monkeypatch: pytest.MonkeyPatch, ahead: CompileAhead
) -> None:
    compile_here(monkeypatch)
    kernel = SlowKernel()
    ahead.queue(lambda: [launcher(kernel, (1,))(torch.zeros(4), name) for name in ("good", "bad")])
    with pytest.raises(KernelCompileError) as raised:
        ahead.wait()
    assert raised.value.name == "SlowKernel"
    assert isinstance(raised.value.__cause__, KeyError)


def test_ranks_begin_at_different_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_here(monkeypatch)
    ahead, kernel = CompileAhead(1), SlowKernel()
    ahead.queue(lambda: [launcher(kernel, (1,))(torch.zeros(4), name) for name in "abcd"], begin=0.5)
    assert [*dict.fromkeys(kernel.compiled)] == [*"cdab"]
    ahead.close()


@pytest.mark.usefixtures("source")
def test_closing_ends_workers_and_pending_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "CompilePool", partial(CompilePool, command=SILENT))
    ahead, kernel = CompileAhead(8), SlowKernel()
    ahead.queue(lambda: [launcher(kernel, (1,))(torch.zeros(4), name) for name in "abcdefghijkl"])
    futures = [each.future for _, each in ahead.kernels]
    ahead.close()
    assert kernel.compiled == []
    assert all(future.cancelled() or future.exception() is not None for future in futures)
    assert not any(thread.is_alive() for thread in ahead._threads)


def test_nothing_is_queued_after_the_end(ahead: CompileAhead) -> None:
    ahead.close()
    with pytest.raises(RuntimeError, match="after close"):
        ahead.queue(lambda: None)


@pytest.mark.parametrize("num_cores", [4, 16])
def test_processes_start_beside_the_imports_where_cores_are_many(
    num_cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(compile_worker, "num_cores", lambda: num_cores)
    monkeypatch.setattr(CompilePool, "__init__", lambda _, size: started.append(size))
    assert (CompilePool.beside_imports(2) is not None) == bool(started)
    assert started == ([8] if num_cores == 16 else [])


@compiled
def test_a_start_compiles_before_it_launches(tmp_path: Path) -> None:
    """With the compiler, for an H100, in another process; twice, for the second finds what the first has compiled."""
    command = ("-m", "tests.helpers.warm_up_without_gpu")
    reports = [json.loads(run_python(*command, is_forked=True, TRITON_CACHE_DIR=str(tmp_path))) for _ in range(2)]
    for report in reports:
        assert report["late"] == report["threads"] == []
        assert report["failed"] == ["cannot_be_compiled", "CompilationError"]
    (found, compiled), (found_again, compiled_again) = (report["kernels"] for report in reports)
    assert (found, compiled > 10) == (0, True)
    assert (found_again, compiled_again) == (compiled, 0)


@pytest.mark.parametrize("version", ["3.5.1", "3.7.0"])
def test_an_unknown_triton_launches_itself(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel()
    monkeypatch.setattr(kernel, "device_caches", {}, raising=False)
    monkeypatch.setattr(internals, "version", lambda name: version)
    internals.is_tested_triton.cache_clear()
    launcher(kernel, (1,))(1, 2)
    internals.is_tested_triton.cache_clear()
    assert kernel.launched == [(1, 2)]


@compiled
@pytest.mark.parametrize("part", range(2))
def test_dry_passes_of_every_kind_of_engine_are_dry_and_complete(part: int) -> None:
    """They read and write nothing, request the kernels that random steps launch, and import nothing large."""
    command = ("-m", "tests.helpers.dry_passes_without_gpu", str(part), "2")
    reports = json.loads(run_python(*command, is_forked=True))
    assert reports.pop("imports") == []  # see `fleetfoot.kernels.runtime.dry_tensors`
    assert len(reports) > 6
    for kind, report in reports.items():
        assert min(report.pop("requested"), report.pop("launched")) > 20, kind
        assert report == {"missing": [], "changed": [], "kept": []}, kind


@compiled
def test_a_plan_counts_the_kernels_that_the_bar_of_a_start_counts_to() -> None:
    reports = json.loads(run_python("-m", "tests.helpers.counted_kernels", is_forked=True))
    assert len(reports) == 3
    for kind, report in reports.items():
        number, num_graphs = report.pop("plan")
        assert number > 60, kind
        assert report == {"bar": [[0, number], [number, number]], "compiled": number, "graphs": num_graphs}, kind


def test_a_cache_that_cannot_be_written_holds_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert not internals.is_cached(SimpleNamespace(_key="a kernel"))


@pytest.mark.parametrize("num_errors", [2, 6])
def test_errors_of_parsing_in_threads_are_tried_again(num_errors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of them: an interpreter that raises them always is broken."""
    errors = iter(range(num_errors))

    def parse(function: object) -> str:
        for number in errors:
            raise SystemError(f"AST constructor recursion depth mismatch (before=33, after={number})")
        return "kernel"

    monkeypatch.setattr(JITCallable, "parse", parse)
    for _ in range(2):
        internals.parse_again()
    with pytest.raises(SystemError) if num_errors > 5 else nullcontext():
        assert JITCallable.parse(None) == "kernel"


@pytest.mark.parametrize("compiler", ["a C compiler", None])
def test_the_launcher_of_a_kernel_is_built(compiler: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import driver

    built: list[tuple[object, object]] = []

    def build(src: object, metadata: object) -> None:
        built.append((src, metadata))
        if compiler is None:
            raise FileNotFoundError

    monkeypatch.setattr(driver, "CudaLauncher", build)
    internals.build_launcher(SimpleNamespace(src="a kernel", metadata=7))
    internals.build_launcher("something else")
    assert built == [("a kernel", 7)]


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
def test_threads_compile_where_processes_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "CompilePool", partial(CompilePool, command=DEAD))
    ahead, kernel = CompileAhead(4), SlowKernel()
    ahead.queue(lambda: [launcher(kernel, (1,))(torch.zeros(4), name) for name in "abcdef"])
    assert ahead.wait() == (0, 6)
    assert {*kernel.ready} == {*"abcdef"}
    ahead.close()


def test_threads_do_not_share_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CPython's import of a second file with the name of the first does."""
    from triton.runtime import build

    shared = SimpleNamespace(launch="")

    def load(name: str, path: str) -> Any:
        shared.launch = path
        return shared

    monkeypatch.setattr(build, "_load_module_from_path", load)
    internals.keep_launchers_apart()
    internals.keep_launchers_apart()  # does nothing
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

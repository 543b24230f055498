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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.interpreter import compiled, run_python
from tests.helpers.processes import SILENT

from fleetfoot.kernels import elementwise
from fleetfoot.kernels.runtime import compile_ahead, compile_worker
from fleetfoot.kernels.runtime.compile_ahead import CompileAhead, can_compile_ahead
from fleetfoot.kernels.runtime.compile_worker import CompileWorker, KernelSource, serve
from fleetfoot.kernels.runtime.dry_tensors import DryPassError
from fleetfoot.kernels.runtime.triton_support import launcher
from fleetfoot.runner.graphs import CaptureTable, GraphKey
from fleetfoot.runner.v2.warm_up import KernelCompiler, eager_shape, later_shapes, warm_up_steps
from fleetfoot.sampling.shape import PLAIN

pytest.importorskip("triton")


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
from fleetfoot.kernels.runtime import compile_ahead, compile_worker
from fleetfoot.kernels.runtime.compile_ahead import CompileAhead
compile_ahead.CompileWorker = lambda: compile_worker.CompileWorker({SILENT})
compile_worker.KernelSource.of = lambda job: compile_worker.KernelSource("m", "n", {{}}, {{}}, {{}}, (), {{}})
ahead = CompileAhead(2)
ahead._collect = lambda dry_pass: [ahead._jobs.submit(print, "compiled here") for _ in range(5)]
ahead.queue(lambda: None, at_once=2)
ahead.finish()
print("served")
"""


@pytest.mark.slow
def test_a_process_that_ends_waits_for_no_kernel() -> None:
    result = subprocess.run([sys.executable, "-c", SLOW_COMPILER], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "served\n", "")


@pytest.mark.usefixtures("source")
def test_closing_ends_workers_and_pending_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "CompileWorker", lambda: CompileWorker(SILENT))
    ahead = CompileAhead(2)
    done: list[int] = []
    futures: list[Any] = []
    monkeypatch.setattr(
        ahead, "_collect", lambda dry_pass: futures.extend(ahead._jobs.submit(done.append, n) for n in range(5))
    )
    ahead.queue(lambda: None, at_once=2)
    ahead.close()
    assert done == []
    assert all(future.cancelled() or future.exception() is not None for future in futures)
    assert not any(thread.is_alive() for _, thread in ahead._workers)


@pytest.mark.parametrize("at_once", [None, 1])
@pytest.mark.parametrize("end", ["finish", "close"])
def test_nothing_is_queued_after_the_end(ahead: CompileAhead, end: str, at_once: int | None) -> None:
    getattr(ahead, end)()
    with pytest.raises(RuntimeError, match="after finish"):
        ahead.queue(lambda: None, at_once)


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
    assert eager_shape(decode, 0) == GraphKey("decode", 1, 1, drafting=0)
    assert later_shapes((), 0, 300) == [GraphKey("mixed", 1, 300)]
    assert later_shapes((), 0, 9000) == [GraphKey("mixed", 1, 1024), GraphKey("mixed", 1, 9000)]
    table = CaptureTable(decode=(1, 2), uniform=(1,), num_drafts=3, mixed=(16,), max_num_seqs=2)
    _, *later = later_shapes(table.keys, 3, 64)
    kinds = {(shape.kind, shape.num_tokens, shape.drafting) for shape in later}
    assert kinds == {("decode", 1, 3), ("decode", 2, 3), ("uniform", 4, 3), ("mixed", 16, 3)}
    full = replace(table, full_step=8192, mixed=(16, 2048))
    assert [shape.num_tokens for shape in later_shapes(full.keys, 3, 8192)].count(8192) == 1  # an eager one
    variants = [shape.sampling for shape in later if shape.sampling not in (PLAIN, None)]
    for field in ("filters", "logits_processors", "logprobs"):
        assert any(getattr(variant, field) for variant in variants)


@compiled
def test_a_start_compiles_before_it_launches(tmp_path: Path) -> None:
    """With the compiler, for an H100, in another process; twice, for the second finds what the first has compiled."""
    command = ("-m", "tests.helpers.warm_up_without_gpu")
    reports = [json.loads(run_python(*command, TRITON_CACHE_DIR=str(tmp_path))) for _ in range(2)]
    for report in reports:
        assert report["start"]["late"] == report["eager"]["late"] == report["threads"] == []
        assert report["fail"] == {"failed": 1, "raised": "CompilationError"}
    cold, warm = (report["start"] for report in reports)
    assert min(cold["later"], cold["found_later"]) > 3  # found after other processes had compiled them
    assert min(cold["compiled"], warm["found"]) > 15
    assert cold["found"] == cold["compiled_later"] == cold["failed_later"] == cold["texts"] == 0
    assert warm["compiled"] == warm["found_later"] == 0


@compiled
def test_dry_passes_of_every_kind_of_engine_are_dry_and_complete() -> None:
    """They read and write nothing, request the kernels that are launched, and import nothing large."""
    reports = json.loads(run_python("-m", "tests.helpers.dry_passes_without_gpu"))
    assert reports.pop("imports") == []  # see `fleetfoot.kernels.runtime.dry_tensors`
    assert len(reports) == 17
    for kind, report in reports.items():
        assert report.pop("requested") > 20, kind
        assert report == {name: [] for name in ("missing", "needless", "changed", "kept", "warnings")}, kind


def test_jobs_wait_for_work(caplog: pytest.LogCaptureFixture) -> None:
    jobs = compile_ahead._Jobs()
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


def test_the_launcher_of_a_kernel_is_built_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import driver

    built: list[tuple[object, object]] = []

    def build(src: object, metadata: object) -> None:
        built.append((src, metadata))
        if src == "no C compiler":
            raise FileNotFoundError(src)

    monkeypatch.setattr(driver, "CudaLauncher", build)
    jobs = compile_ahead._Jobs()
    kernels = [SimpleNamespace(src=name, metadata=index) for index, name in enumerate(("a kernel", "no C compiler"))]
    futures = [jobs.submit(lambda kernel=kernel: kernel) for kernel in kernels]
    futures.append(jobs.submit(lambda: "something else"))
    jobs.work()
    assert built == [("a kernel", 0), ("no C compiler", 1)]
    assert [future.result(0) for future in futures] == [*kernels, "something else"]


def test_a_step_that_cannot_be_dry_does_not_stop_a_start(caplog: pytest.LogCaptureFixture) -> None:
    """What it launches is compiled when it is launched; the other steps go on."""
    kernel, numbers = FakeKernel(), torch.ones(4)

    def make_step(shape: GraphKey) -> Callable[[], object]:
        def step() -> None:
            if shape.num_tokens == 2:
                numbers.sum().item()
            launcher(kernel, (1,))(numbers, shape.num_tokens)

        return step

    compiler = KernelCompiler(make_step, nullcontext)
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
    assert [pickle.load(replies) for _ in sources] == [True, False, True]
    assert compiled == ["good", "bad", "better"]


@pytest.mark.usefixtures("source")
def test_a_process_that_has_ended_compiles_nothing() -> None:
    with CompileWorker(DEAD) as worker:
        assert [worker.compile(lambda: None) for _ in range(3)] == [False] * 3
    with CompileWorker(("/no/such/program",)) as worker:
        assert not worker.compile(lambda: None)


@pytest.mark.usefixtures("source")
def test_closing_ends_pending_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()
    worker = CompileWorker(SILENT)
    load: Callable[[Any], object] = pickle.load

    def load_and_notify(stream: Any) -> object:
        waits.set()
        return load(stream)

    monkeypatch.setattr(compile_worker.pickle, "load", load_and_notify)

    def work() -> None:
        with worker:
            worker.compile(lambda: None)

    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(work)
        assert waits.wait(timeout=60)
        worker.close()
        assert isinstance(pending.exception(timeout=60), RuntimeError)
    assert worker._process is not None and worker._process.returncode is not None
    with pytest.raises(RuntimeError, match="the compile worker is closed"):
        worker.compile(lambda: None)


def test_a_worker_that_was_never_compiled_starts_no_process() -> None:
    with CompileWorker() as worker:
        assert not worker.compile(lambda: None)  # which is no job of Triton's
        assert worker._process is None

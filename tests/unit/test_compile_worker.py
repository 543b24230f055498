"""The compile worker process: its requests, its replies, and how it ends."""

from __future__ import annotations

import io
import pickle
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.silent_process import SILENT

from fleetfoot.kernels import elementwise
from fleetfoot.kernels.runtime import compile_worker
from fleetfoot.kernels.runtime.compile_worker import CompileWorker, KernelSource, serve

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


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelSource, "of", lambda job: KernelSource("module", "name", {}, {}, {}, (), {}))


@pytest.mark.usefixtures("source")
def test_a_process_that_has_ended_compiles_nothing() -> None:
    with CompileWorker(DEAD) as worker:
        assert [worker.compile(lambda: None) for _ in range(3)] == [False] * 3
    with CompileWorker(("/no/such/program",)) as worker:
        assert not worker.compile(lambda: None)


@pytest.mark.usefixtures("source")
def test_closing_ends_pending_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()
    errors: list[BaseException] = []
    worker = CompileWorker(SILENT)
    load: Callable[[Any], object] = pickle.load

    def load_and_say_so(stream: Any) -> object:
        waits.set()
        return load(stream)

    monkeypatch.setattr(compile_worker.pickle, "load", load_and_say_so)

    def work() -> None:
        with worker:
            try:
                worker.compile(lambda: None)
            except RuntimeError as error:
                errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert waits.wait(timeout=60)
    worker.close()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert len(errors) == 1
    assert worker._process is not None and worker._process.returncode is not None
    with pytest.raises(RuntimeError, match="the compile worker is closed"):
        worker.compile(lambda: None)


def test_a_worker_that_was_never_compiled_starts_no_process() -> None:
    with CompileWorker() as worker:
        assert not worker.compile(lambda: None)  # which is no job of Triton's
        assert worker._process is None

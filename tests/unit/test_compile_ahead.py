"""Kernels compiled ahead: dry passes launch nothing, and request the kernels that are launched later."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.interpreter import HAS_INTERPRETER, compiled, run_python
from tests.helpers.silent_process import SILENT

from fleetfoot.kernels.runtime import compile_ahead, compile_worker
from fleetfoot.kernels.runtime.compile_ahead import CompileAhead, can_compile_ahead
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

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.requested.append(arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.launched.append(arguments)


@pytest.fixture
def ahead() -> Iterator[CompileAhead]:
    ahead = CompileAhead(2)
    yield ahead
    ahead.close()


def test_a_cpu_compiles_nothing() -> None:
    assert not can_compile_ahead(torch.device("cpu"))


@pytest.mark.skipif(not HAS_INTERPRETER, reason="kernels are compiled here")
def test_the_interpreter_compiles_nothing() -> None:
    assert not can_compile_ahead(torch.device("cuda"))


def test_a_dry_pass_requests_once_and_launches_nothing(ahead: CompileAhead) -> None:
    kernel, numbers = FakeKernel(), torch.zeros(64)

    def dry_pass() -> None:
        for grid in ((1,), (2,)):
            launcher(kernel, grid)(numbers, 1, width=16)
        launcher(kernel, (1,))(numbers, True, width=16)  # equal to 1, and another type
        launcher(kernel, (1,))(numbers[1:], 1, width=16)  # not aligned
        launcher(kernel, (1,))(numbers.double(), 1, width=16)
        for _ in range(2):
            launcher(kernel, (1,))([1], 1, width=16)  # not hashable, so it is requested again

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
        chosen = torch.empty(64, 8).index_select(0, indices)  # never written, and far out of range
        launcher(kernel, (1,))(chosen, chosen[:, 1:], indices.add_(1))

    assert ahead.queue(dry_pass).wait() == 0
    assert indices.eq(2**30).all()
    ((chosen, shifted, written),) = kernel.requested
    assert written is indices
    for tensor in (chosen, shifted):  # invalid after the pass
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


def test_closing_ends_workers_and_pending_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    source = compile_worker.KernelSource("m", "n", {}, {}, {}, (), {})
    monkeypatch.setattr(compile_worker.KernelSource, "of", lambda job: source)
    monkeypatch.setattr(compile_ahead, "CompileWorker", lambda: compile_worker.CompileWorker(SILENT))
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
    assert {(shape.kind, shape.num_tokens) for shape in later} == {
        ("decode", 1),
        ("decode", 2),
        ("uniform", 4),
        ("mixed", 16),
    }
    assert all(shape.drafting == 3 for shape in later)
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
    cold, warm = reports
    for report in reports:
        assert report["start"]["late"] == report["eager"]["late"] == []
        assert report["fail"] == {"failed": 1, "raised": "CompilationError"}
        assert report["threads"] == []
    assert cold["start"]["later"] > 3
    assert cold["start"]["compiled"] > 15
    assert cold["start"]["found"] == 0
    assert cold["start"]["compiled_later"] == 0
    assert cold["start"]["failed_later"] == 0
    assert cold["start"]["found_later"] > 3  # after other processes had compiled them
    assert warm["start"]["compiled"] == warm["start"]["found_later"] == 0
    assert warm["start"]["found"] > 15


def test_jobs_wait_for_work() -> None:
    jobs = compile_ahead._Jobs()
    done: list[int] = []
    futures = [jobs.submit(done.append, number) for number in range(3)]
    failing = jobs.submit(lambda: 1 // 0)
    assert done == []
    assert futures[1].cancel()
    jobs.work()
    assert done == [0, 2]
    assert isinstance(failing.exception(0), ZeroDivisionError)
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


def test_a_kernel_that_does_not_compile_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    jobs = compile_ahead._Jobs()
    failing = jobs.submit(lambda: 1 // 0)
    jobs.work()
    assert failing.exception(0)
    assert caplog.messages == [
        "a kernel cannot be compiled ahead: ZeroDivisionError: integer division or modulo by zero"
    ]

"""The block stores, files and host memory: blocks are loaded bitwise equal, and nothing invalid is ever loaded."""

import errno
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import kv_bench
from tests.helpers.kv_bench import BLOCKS, FINGERPRINT, PLACES, TOKENS, Bench, same

from fleetfoot.kv_transfer.base.connector import TransferContext
from fleetfoot.kv_transfer.base.io_threads import IOThreads
from fleetfoot.kv_transfer.blockstore import blocks
from fleetfoot.kv_transfer.blockstore.blocks import FilesystemSettings
from fleetfoot.kv_transfer.blockstore.connector import BlockStoreScheduler, HostIndex, SharedStorageConnector
from fleetfoot.kv_transfer.blockstore.worker import FileStoreWorker

OTHERS = list(range(100, 117))
BLOCK_BYTES = kv_bench.LAYOUT.bytes_per_block
MakeBench = Callable[..., Bench]


@pytest.fixture(params=["files", "host"])
def store(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> MakeBench:
    """Makes engines. Those with files share a folder, and read and write at once unless they get jobs."""

    def make_bench(store: str = "files", *, role: str = "kv_both", timeout: float = 60.0, **options: Any) -> Bench:
        readers, writers = options.pop("jobs", (kv_bench.InlineJobs(), kv_bench.InlineJobs()))
        limits = {name: options.pop(name) for name in ("num_cpu_blocks", "max_bytes_in_flight") if name in options}
        if store == "host":
            config = kv_bench.transfer_config("OffloadingConnector", role=role, **{"num_cpu_blocks": 8, **limits})
            bench = Bench(config, **options)
            request.addfinalizer(index_of(bench).check_integrity)
        else:
            # of blocks as small as these, the default is millions of slots, which are listed
            extra = {"shared_storage_path": str(tmp_path / "kv"), "max_bytes_in_flight": 1 << 20, **limits}
            config = kv_bench.transfer_config("SharedStorageConnector", role=role, timeout=timeout, **extra)
            settings = FilesystemSettings.of(config)
            make_worker = partial(FileStoreWorker, settings=settings, readers=readers, writers=writers)
            bench = Bench(config, make_worker=make_worker, **options)
        request.addfinalizer(bench.shutdown)
        return bench

    return make_bench


def index_of(bench: Bench) -> HostIndex:
    assert isinstance(bench.scheduler, BlockStoreScheduler) and isinstance(bench.scheduler.index, HostIndex)
    return bench.scheduler.index


def saved(bench: Bench) -> list[Any]:
    """The contents of the full blocks of TOKENS, which are computed, saved and overwritten."""
    request = bench.request("r", TOKENS, BLOCKS)
    bench.save(request, 0, 3)
    bench.save(request, 3, 4)
    contents = bench.contents(BLOCKS[:4])
    bench.step()  # counts what was written
    bench.scramble(BLOCKS)
    return contents


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_reset_cache(make: MakeBench, store: str) -> None:
    bench = make(store)
    request = bench.request("r", TOKENS, BLOCKS)
    bench.save(request, 0, 2)
    bench.scheduler.blocks_filled(request, 2, 4, by_this_step=False)
    early = bench.request("early", TOKENS, PLACES[:2])
    bench.begin(early)
    bench.scheduler.reset_cache()  # before the workers have either
    assert bench.matched(request) == 0
    reason = "does not hold KV block" if store == "host" else "does not exist any more"
    assert reason in bench.until_ended(early).failed["early"].reason
    contents = saved(bench)
    assert bench.load(bench.request("again", TOKENS, PLACES)).loaded == {"again"}
    assert same(bench.contents(PLACES[:4]), contents)
    bench.scheduler.reset_cache()
    assert bench.matched(request) == 0


def test_the_least_recently_used_are_evicted_the_end_of_a_prefix_first(make: MakeBench) -> None:
    bench = make("host", num_cpu_blocks=6)
    one, two = bench.request("one", TOKENS, BLOCKS), bench.request("two", OTHERS, PLACES)
    for request in (one, two):
        bench.save(request, 0, 4)
        bench.scheduler.request_finished(request)
    assert (bench.matched(one), bench.matched(two)) == (8, 16)
    assert bench.load(one).loaded == {"one"}  # the more recent one now
    bench.save(bench.request("three", range(200, 213), [6, 10, 11]), 0, 2)
    assert (bench.matched(one), bench.matched(two)) == (8, 8)


def test_a_save_that_was_lost_is_not_taken_for_kv(make: MakeBench) -> None:
    bench = make("host")
    request = bench.request("r", TOKENS, BLOCKS)
    bench.scheduler.blocks_filled(request, 0, 4, by_this_step=True)
    assert bench.matched(request) == 0  # a step stores for later steps

    def fail() -> None:
        raise RuntimeError("the forward pass")

    with pytest.raises(RuntimeError, match="the forward pass"):
        bench.step(during=fail)
    for step in bench.steps:
        step.abandon()
    failure = bench.load(bench.request("again", TOKENS, PLACES)).failed["again"]
    assert "does not hold KV block" in failure.reason
    assert bench.counters == {"loads_failed": 1}
    assert bench.matched(request) == 0  # the lost blocks are not matched again


def test_blocks_in_the_prefix_cache_are_not_taken_for_files(make: MakeBench) -> None:
    """The count of cached tokens changes while a request waits for free blocks."""
    nothing = make()
    request = nothing.request("waits", TOKENS)
    assert [nothing.matched(request, count) for count in (12, 4, 0)] == [0, 0, 0]
    saved(make())
    other = make()
    request = other.request("waits", TOKENS)
    assert [other.matched(request, count) for count in (8, 0, 12)] == [8, 16, 4]


def change(path: Path, offset: int, content: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[offset : offset + len(content) or None] = content
    path.write_bytes(whole)


def flip(path: Path, offset: int = -1) -> None:
    change(path, offset, bytes([path.read_bytes()[offset] ^ 1]))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "vanished": (os.unlink, "does not exist any more"),
    "empty": (lambda path: os.truncate(path, 0), "ends within its header, after 0 bytes"),
    "short-header": (lambda path: os.truncate(path, 20), "ends within its header, after 20 bytes"),
    "short": (lambda path: os.truncate(path, path.stat().st_size - 1), "has the wrong size: it has"),
    "long": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "has the wrong size: it has"),
    "magic": (lambda path: flip(path, 0), "is not a KV block file"),
    "version": (lambda path: change(path, 8, b"c"), "has version 99 of the format, and this engine reads 1"),
    "checksum": (lambda path: flip(path, 30), "is corrupt: its checksum is wrong"),
    "description": (lambda path: change(path, 40, b"[" * 30), "is corrupt: its header does not describe a KV block"),
    "payload-begin": (lambda path: flip(path, -BLOCK_BYTES), "is corrupt: its checksum is wrong"),
    "payload-end": (flip, "is corrupt: its checksum is wrong"),
    "folder": (lambda path: (os.unlink(path), os.mkdir(path)), "it cannot be read (IsADirectoryError"),
    "other-block": (
        lambda path: path.write_bytes(next(other for other in path.parent.iterdir() if other != path).read_bytes()),
        "holds another block: its block is {other}, and it must be {block}",
    ),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", DAMAGE)
def test_invalid_files_fail_the_load_once(make: MakeBench, tmp_path: Path, case: str, rank: int) -> None:
    saved(make(num_ranks=2))
    damage, reason = DAMAGE[case]
    bench = make(num_ranks=2)
    request = bench.request("again", TOKENS, PLACES)
    block = request.block_hashes[2].hex()
    bad = next(path for path in files(tmp_path) if path.stem == block and f"rank{rank}" in path.parts[-2])
    other = next(path for path in bad.parent.iterdir() if path != bad)
    bench.begin(request)
    damage(bad)
    output = bench.until_ended(request)
    failure = output.failed["again"]
    assert output.loaded == set() and not failure.timed_out
    assert reason.format(other=other.stem, block=block) in failure.reason and block in failure.reason
    assert bench.counters["loads_failed"] == 1
    assert bench.step(idle=True).failed == {}


def test_an_invalid_file_fails_one_load_and_is_written_again(make: MakeBench, tmp_path: Path) -> None:
    saved(make())
    bench = make()
    request, waiting = bench.request("first", TOKENS, PLACES), bench.request("second", TOKENS, BLOCKS)
    flip(next(path for path in files(tmp_path) if path.stem == request.block_hashes[2].hex()))
    assert bench.matched(waiting) == 16
    assert "first" in bench.load(request).failed
    assert bench.matched(waiting) == 8
    bench.save(request, 0, 4)  # its tokens were computed
    contents = bench.contents(PLACES[2:3])
    assert bench.matched(waiting) == 16
    assert bench.load(waiting).loaded == {"second"}
    assert same(bench.contents(BLOCKS[2:3]), contents)


def test_a_block_is_stored_once_every_rank_has_written_it(make: MakeBench, tmp_path: Path) -> None:
    saved(make(num_ranks=2))
    other = make(num_ranks=2)
    request = other.request("r", TOKENS)
    next(path for path in files(tmp_path / "kv" / FINGERPRINT / "tp2-pp1-rank1")
         if path.stem == request.block_hashes[1].hex()).unlink()  # fmt: skip
    assert other.matched(request) == 4


def test_files_of_another_engine_are_refused_with_both_fingerprints(make: MakeBench, tmp_path: Path) -> None:
    saved(make())
    theirs = "f" * 32
    os.rename(tmp_path / "kv" / FINGERPRINT, tmp_path / "kv" / theirs)
    other = make(fingerprint=theirs)
    request = other.request("r", TOKENS, PLACES)
    assert f"its fingerprint is {FINGERPRINT}, and it must be {theirs}" in other.load(request).failed["r"].reason
    assert make(fingerprint="e" * 32).matched(request) == 0


def test_files_of_new_weights_are_for_this_engine_alone(make: MakeBench, tmp_path: Path) -> None:
    saved(make())
    bench = make()
    bench.scheduler.reset_cache()
    before = set(files(tmp_path))
    request = bench.request("r", TOKENS, BLOCKS)
    bench.save(request, 0, 3)
    assert len(set(files(tmp_path)) - before) == 3
    assert (bench.matched(request), make().matched(request)) == (12, 16)


def test_files_appear_whole(make: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    replace = os.replace

    def watch(source: Path, target: Path) -> None:
        assert not os.path.exists(target)
        seen.append(os.path.getsize(source))
        replace(source, target)

    monkeypatch.setattr(blocks.os, "replace", watch)
    saved(make())
    assert len(seen) == 4 and {path.stat().st_size for path in files(tmp_path)} == set(seen)


def test_a_slow_disk_drops_saves_instead_of_taking_memory(make: MakeBench, tmp_path: Path) -> None:
    jobs = kv_bench.InlineJobs(), kv_bench.ManualJobs()
    waiting = jobs[1].waiting
    bench = make(jobs=jobs, max_bytes_in_flight=2 * BLOCK_BYTES)
    request = bench.request("r", TOKENS, BLOCKS)
    for last in (4, 1):  # the first block is being written already
        bench.save(request, 0, last)
        assert len(waiting) == 2 and bench.counters == {"saves_dropped": 2}
    jobs[1].run()
    bench.save(request, 2, 4)
    jobs[1].run()
    bench.step()
    assert bench.counters == {"saves_dropped": 2, "blocks_saved": 4, "bytes_saved": 4 * BLOCK_BYTES}
    assert len(files(tmp_path)) == 4


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_cannot_be_written(
    make: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    bench = make()
    request = bench.request("r", TOKENS, BLOCKS)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(blocks.os, "replace", refuse)
        bench.save(request, 0, 4)
        bench.step()
    assert bench.counters == {"saves_failed": 4}
    assert [os.strerror(error) in record.getMessage() for record in caplog.records] == [True]
    assert files(tmp_path) == []  # no temporary files either
    bench.save(request, 0, 4)
    bench.step()
    assert bench.counters["blocks_saved"] == 4


@pytest.mark.parametrize("case", ["timeout", "finished"])
def test_a_load_that_is_given_up_writes_nothing_later(make: MakeBench, case: str) -> None:
    saved(make())
    clock, readers = kv_bench.Clock(), kv_bench.ManualJobs()
    bench = make(jobs=(readers, kv_bench.InlineJobs()), clock=clock, timeout=5.0)
    request = bench.request("again", TOKENS, PLACES)
    bench.begin(request)
    if case == "timeout":
        bench.step()
        readers.run(1)
        clock.now += 4.9
        assert not bench.step().failed
        clock.now += 0.2
        failure = bench.step().failed["again"]
        assert failure.timed_out
        assert "3 of 4 KV blocks had not been read after 5 s" in failure.reason
        assert bench.matched(request) == 16  # no file is marked as invalid
    else:
        assert bench.step(["again"]).failed == {}  # an earlier request with this id
        assert "has ended" in bench.step(["again"]).failed["again"].reason
    before = bench.contents(PLACES[:4])
    readers.run()
    assert bench.step().is_empty
    assert same(bench.contents(PLACES[:4]), before)


def test_shutdown_before_anything_was_registered(tmp_path: Path) -> None:
    config = kv_bench.transfer_config("FilesystemConnector", shared_storage_path=str(tmp_path))
    SharedStorageConnector.worker_side(TransferContext(config, 4, FINGERPRINT, "engine")).shutdown()


def test_threads_finish_their_jobs_when_they_are_stopped() -> None:
    threads, done, gate = IOThreads("test", 2), [], threading.Event()
    threads.submit(gate.wait)
    for number in range(20):
        threads.submit(lambda number=number: done.append(number))
    gate.set()
    assert threads.stop(60.0, finish=True)
    assert sorted(done) == list(range(20))
    with pytest.raises(RuntimeError, match="were stopped"):
        threads.submit(lambda: None)


def test_a_hung_thread_does_not_delay_the_end() -> None:
    threads, begun, gate, done = IOThreads("test", 1), threading.Event(), threading.Event(), []

    def hang() -> None:
        begun.set()
        gate.wait()
        raise OSError("at last")

    threads.submit(hang)
    threads.submit(lambda: done.append(1))
    assert begun.wait(60.0)
    assert not threads.stop(0.0, finish=True)
    gate.set()
    assert threads.stop(60.0, finish=True)
    assert done == []

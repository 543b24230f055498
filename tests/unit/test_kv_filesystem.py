"""The filesystem connector: blocks are loaded bitwise equal, and invalid files are never loaded."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.kv_bench import FINGERPRINT, LAYOUT, Bench, Clock, ManualJobs, same, transfer_config

from fleetfoot.kv_transfer.base.connector import TransferContext
from fleetfoot.kv_transfer.base.io_threads import IOThreads
from fleetfoot.kv_transfer.blockstore import blocks
from fleetfoot.kv_transfer.blockstore.blocks import FilesystemSettings
from fleetfoot.kv_transfer.blockstore.connector import SharedStorageConnector
from fleetfoot.kv_transfer.blockstore.worker import FileStoreWorker

TOKENS = list(range(17))  # four full blocks, and a token that must be computed
MakeBench = Callable[..., Bench]


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> MakeBench:
    """Makes engines that share a folder."""

    def make_bench(
        *, role: str = "kv_both", timeout: float = 60.0, extra: dict[str, Any] | None = None, **options: Any
    ) -> Bench:
        extra = {"shared_storage_path": str(tmp_path / "kv"), **(extra or {})}
        bench = Bench(transfer_config("SharedStorageConnector", role=role, timeout=timeout, **extra), **options)
        request.addfinalizer(bench.shutdown)
        return bench

    return make_bench


class Manual:
    """Worker sides that read and write files when the test runs their jobs."""

    def __init__(self) -> None:
        self.readers, self.writers = ManualJobs(), ManualJobs()

    def __call__(self, context: TransferContext) -> FileStoreWorker:
        settings = FilesystemSettings.of(context.config)
        return FileStoreWorker(context, settings, self.readers, self.writers)  # type: ignore[arg-type]


def saved(make: MakeBench, **options: Any) -> tuple[Bench, list[Any]]:
    """An engine that has computed TOKENS, saved their blocks and is gone; what they held."""
    bench = make(**options)
    request = bench.request("r", TOKENS, [3, 7, 1, 12, 5])
    bench.save(request, 0, 3)
    bench.save(request, 3, 4)
    contents = bench.contents([3, 7, 1, 12])
    bench.shutdown()
    return bench, contents


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_another_engine_finds_what_one_has_computed(make: MakeBench, num_ranks: int, tmp_path: Path) -> None:
    _, contents = saved(make, num_ranks=num_ranks)
    names = [path.relative_to(tmp_path / "kv").parts for path in files(tmp_path)]
    assert len(names) == 4 * num_ranks
    assert {parts[:2] for parts in names} == {(FINGERPRINT, f"tp{num_ranks}-pp1-rank{r}") for r in range(num_ranks)}

    other = make(num_ranks=num_ranks)
    request = other.request("again", TOKENS, [9, 8, 2, 0, 4])
    untouched = other.contents([4, 5, 6])
    assert other.matched(request) == 16
    assert other.matched(request, 8) == 8
    output = other.load(request)
    assert (output.loaded, output.failed) == ({"again"}, {})
    assert same(other.contents([9, 8, 2, 0]), contents)
    assert same(other.contents([4, 5, 6]), untouched)
    assert other.counters == {"blocks_loaded": 4 * num_ranks, "bytes_loaded": 4 * num_ranks * LAYOUT.bytes_per_block}


def test_cached_blocks_are_not_loaded(make: MakeBench) -> None:
    _, contents = saved(make)
    other = make()
    request = other.request("again", TOKENS, [9, 8, 2, 0, 4])
    mine = other.contents([9, 8])
    assert other.load(request, num_computed_tokens=8).loaded == {"again"}
    assert same(other.contents([9, 8]), mine)
    assert same(other.contents([2, 0]), [[layer[2:] for layer in layers] for layers in contents])


def test_a_token_is_always_left_to_compute(make: MakeBench) -> None:
    saved(make)
    other = make()
    assert other.matched(other.request("whole blocks", TOKENS[:16])) == 12
    assert other.matched(other.request("a token more", TOKENS[:13])) == 12
    assert other.matched(other.request("other tokens", [99, *TOKENS[1:]])) == 0
    assert other.matched(other.request("another end", [*TOKENS[:8], *range(50, 59)]), 0) == 8


def test_roles(make: MakeBench, tmp_path: Path) -> None:
    saved(make, role="kv_consumer")
    assert files(tmp_path) == []
    saved(make, role="kv_producer")
    assert len(files(tmp_path)) == 4
    producer, consumer = make(role="kv_producer"), make(role="kv_consumer")
    assert producer.matched(producer.request("r", TOKENS)) == 0
    assert consumer.load(consumer.request("r", TOKENS, [1, 2, 3, 4, 5])).loaded == {"r"}


def test_freed_blocks_are_flushed_before_they_are_overwritten(make: MakeBench) -> None:
    bench = make()
    request = bench.request("r", TOKENS, [3, 7, 1, 12, 5])
    contents = bench.contents([3, 7, 1, 12])
    assert not bench.scheduler.has_pending
    bench.scheduler.blocks_filled(request, 0, 4, by_this_step=False)
    assert bench.scheduler.has_pending
    assert bench.scheduler.request_finished(request) == (False, None)
    bench.step(["r"], during=lambda: bench.scramble([3, 7, 1, 12]), new_blocks=[3, 7, 1, 12])
    assert not bench.scheduler.has_pending
    bench.shutdown()
    other = make()
    assert other.load(other.request("again", TOKENS, [9, 8, 2, 0, 4])).loaded == {"again"}
    assert same(other.contents([9, 8, 2, 0]), contents)


def test_a_request_that_waits_for_room_is_asked_again(make: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(make)
    other = make()
    request = other.request("waits", TOKENS)
    assert [other.matched(request) for _ in range(2)] == [16, 16]
    monkeypatch.setattr(os.path, "exists", lambda path: pytest.fail("files are looked up once"))
    assert [other.matched(request, 4) for _ in range(2)] == [12, 12]


def test_what_the_prefix_cache_held_for_a_request_that_waits_is_not_taken_for_a_file(make: MakeBench) -> None:
    nothing = make()
    request = nothing.request("waits", TOKENS)
    assert [nothing.matched(request, count) for count in (12, 4, 0)] == [0, 0, 0]
    saved(make)
    other = make()
    request = other.request("waits", TOKENS)
    assert [other.matched(request, count) for count in (8, 0, 12)] == [8, 16, 4]


# --- files that are not what they should be -------------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def truncate_header(path: Path) -> None:
    os.truncate(path, 20)


def lengthen(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"x")


def flip(offset: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)

    return change


def make_old(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8] = 99
    path.write_bytes(content)


def describe_nothing(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:40] + b"[" * 30 + content[70:])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "vanished": (os.unlink, "does not exist any more"),
    "empty": (lambda path: os.truncate(path, 0), "ends within its header, after 0 bytes"),
    "short-header": (truncate_header, "ends within its header, after 20 bytes"),
    "short": (truncate, "has the wrong size: it has"),
    "long": (lengthen, "has the wrong size: it has"),
    "magic": (flip(0), "is not a KV block file"),
    "version": (make_old, "has version 99 of the format, and this engine reads 1"),
    "checksum": (flip(30), "is corrupt: its checksum is wrong"),
    "description": (describe_nothing, "is corrupt: its header does not describe a KV block"),
    "payload-begin": (flip(-LAYOUT.bytes_per_block), "is corrupt: its checksum is wrong"),
    "payload-end": (flip(-1), "is corrupt: its checksum is wrong"),
    "folder": (lambda path: (os.unlink(path), os.mkdir(path)), "it cannot be read (IsADirectoryError"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found(make: MakeBench, tmp_path: Path, case: str) -> None:
    saved(make)
    damage, reason = DAMAGE[case]
    other = make()
    request = other.request("again", TOKENS, [9, 8, 2, 0, 4])
    bad = next(path for path in files(tmp_path) if path.stem == request.block_hashes[2].hex())
    matched = other.matched(request)
    damage(bad)
    other.scheduler.update_state_after_alloc(request, 0, matched)
    output = other.until_ended(request)
    assert output.loaded == set()
    failure = output.failed["again"]
    assert reason in failure.reason and bad.name.removesuffix(".kv") in failure.reason
    assert not failure.timed_out
    assert other.counters["loads_failed"] == 1
    assert other.step(idle=True).failed == {}  # reported once


def test_a_damaged_file_is_written_anew(make: MakeBench, tmp_path: Path) -> None:
    saved(make)
    flip(-1)(files(tmp_path)[0])
    other = make()
    request = other.request("again", TOKENS, [9, 8, 2, 0, 4])
    assert "again" in other.load(request).failed
    other.save(request, 0, 4)  # its tokens were computed
    contents = other.contents([9, 8, 2, 0])
    other.shutdown()
    third = make()
    assert third.load(third.request("third", TOKENS, [1, 2, 3, 4, 5])).loaded == {"third"}
    index = request.block_hashes.index(bytes.fromhex(files(tmp_path)[0].stem))
    assert torch.equal(third.contents([index + 1])[0][0], contents[0][0][index : index + 1])


def test_one_damaged_file_fails_no_second_load(make: MakeBench, tmp_path: Path) -> None:
    saved(make)
    other = make()
    request = other.request("first", TOKENS, [9, 8, 2, 0, 4])
    flip(-1)(next(path for path in files(tmp_path) if path.stem == request.block_hashes[2].hex()))
    waiting = other.request("second", TOKENS, [1, 3, 5, 6, 7])
    assert other.matched(waiting) == 16
    assert "first" in other.load(request).failed
    assert other.matched(waiting) == 8
    other.save(request, 0, 4)  # its tokens were computed
    other.shutdown()  # by then the file has been written anew
    assert other.matched(waiting) == 16


def test_a_timeout_does_not_mark_files_as_invalid(make: MakeBench) -> None:
    saved(make)
    manual, clock = Manual(), Clock()
    other = make(make_worker=manual, clock=clock, timeout=5.0)
    request = other.request("r", TOKENS, [9, 8, 2, 0, 4])
    other.begin(request)
    other.step(idle=True)
    clock.now += 6.0
    assert other.until_ended(request).failed["r"].timed_out
    assert other.matched(request) == 16


def test_files_of_another_engine_are_refused_with_both_fingerprints(make: MakeBench, tmp_path: Path) -> None:
    saved(make)
    theirs = "f" * 32
    os.rename(tmp_path / "kv" / FINGERPRINT, tmp_path / "kv" / theirs)
    other = make(fingerprint=theirs)
    failure = other.load(other.request("r", TOKENS, [1, 2, 3, 4, 5])).failed["r"]
    assert f"its fingerprint is {FINGERPRINT}, and it must be {theirs}" in failure.reason
    assert make(fingerprint="e" * 32).scheduler.get_num_new_matched_tokens(other.request("r", TOKENS), 0) == 0


def test_a_file_under_another_name_is_refused(make: MakeBench, tmp_path: Path) -> None:
    saved(make)
    one, another = files(tmp_path)[:2]
    one.write_bytes(another.read_bytes())
    other = make()
    failure = other.load(other.request("r", TOKENS, [1, 2, 3, 4, 5])).failed["r"]
    assert f"its block is {another.stem}, and it must be {one.stem}" in failure.reason


# --- disks that are slow, full or hung ------------------------------------------------------------------------------


def test_readers_see_whole_files_alone(make: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    replace = os.replace

    def watch(source: Path, target: Path) -> None:
        assert not os.path.exists(target)
        seen.append(os.path.getsize(source))
        replace(source, target)

    monkeypatch.setattr(blocks.os, "replace", watch)
    saved(make)
    assert len(seen) == 4 and {path.stat().st_size for path in files(tmp_path)} == set(seen)


def test_a_slow_disk_drops_saves_instead_of_taking_memory(make: MakeBench, tmp_path: Path) -> None:
    manual = Manual()
    bench = make(make_worker=manual, extra={"max_bytes_in_flight": 2 * LAYOUT.bytes_per_block})
    request = bench.request("r", TOKENS, [3, 7, 1, 12, 5])
    bench.save(request, 0, 4)
    assert len(manual.writers.waiting) == 2 and bench.counters == {"saves_dropped": 2}
    bench.save(request, 0, 1)  # it is on its way already
    assert len(manual.writers.waiting) == 2 and bench.counters == {"saves_dropped": 2}
    manual.writers.run()
    bench.save(request, 2, 4)
    manual.writers.run()
    bench.step()
    assert bench.counters == {
        "saves_dropped": 2,
        "blocks_saved": 4,
        "bytes_saved": 4 * LAYOUT.bytes_per_block,
    }
    assert len(files(tmp_path)) == 4


def test_what_is_there_is_not_written_again(make: MakeBench, tmp_path: Path) -> None:
    saved(make)
    before = {path: path.stat().st_mtime_ns for path in files(tmp_path)}
    bench = make()
    bench.save(bench.request("r", TOKENS, [1, 2, 3, 4, 5]), 0, 4)
    bench.shutdown()
    assert {path: path.stat().st_mtime_ns for path in files(tmp_path)} == before


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_cannot_be_written(
    make: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(blocks.os, "replace", refuse)
    manual = Manual()
    bench = make(make_worker=manual)
    request = bench.request("r", TOKENS, [3, 7, 1, 12, 5])
    with caplog.at_level(logging.WARNING):
        bench.save(request, 0, 4)
        manual.writers.run()
        bench.step()
    assert bench.counters == {"saves_failed": 4}
    assert [os.strerror(error) in record.getMessage() for record in caplog.records] == [True]
    assert files(tmp_path) == []  # no temporary files either
    monkeypatch.undo()
    bench.save(request, 0, 4)
    manual.writers.run()
    bench.step()
    assert bench.counters["blocks_saved"] == 4


def test_loads_wait_for_memory(make: MakeBench) -> None:
    _, contents = saved(make)
    manual = Manual()
    other = make(make_worker=manual, extra={"max_bytes_in_flight": 4 * LAYOUT.bytes_per_block})  # one to read
    request = other.request("again", TOKENS, [9, 8, 2, 0, 4])
    other.begin(request)
    for _ in range(4):
        assert not other.step().loaded
        assert len(manual.readers.waiting) == 1
        manual.readers.run()
    assert other.step().loaded == {"again"}
    assert same(other.contents([9, 8, 2, 0]), contents)


def test_a_disk_that_never_answers_times_out(make: MakeBench) -> None:
    saved(make)
    clock, manual = Clock(), Manual()
    other = make(make_worker=manual, clock=clock, timeout=5.0)
    request = other.request("again", TOKENS, [9, 8, 2, 0, 4])
    other.begin(request)
    other.step()
    manual.readers.run(1)
    clock.now += 4.9
    assert not other.step().failed
    clock.now += 0.2
    failure = other.step().failed["again"]
    assert failure.timed_out
    assert "3 of 4 KV blocks had not been read after 5 s" in failure.reason
    before = other.contents([9, 8, 2, 0])
    manual.readers.run()  # they answer after all
    assert other.step().is_empty
    assert same(other.contents([9, 8, 2, 0]), before)


def test_a_request_that_ends_gives_up_its_load(make: MakeBench) -> None:
    saved(make)
    manual = Manual()
    other = make(make_worker=manual)
    request = other.request("again", TOKENS, [9, 8, 2, 0, 4])
    other.begin(request)
    assert other.step(["again"]).failed == {}  # an earlier one of the same name
    assert "has ended" in other.step(["again"]).failed["again"].reason
    before = other.contents([9, 8, 2, 0])
    manual.readers.run()
    assert other.step().is_empty
    assert same(other.contents([9, 8, 2, 0]), before)


def test_one_rank_that_fails_fails_the_load(make: MakeBench, tmp_path: Path) -> None:
    saved(make, num_ranks=2)
    flip(-1)(next(path for path in files(tmp_path) if "rank1" in path.parts[-2]))
    other = make(num_ranks=2)
    output = other.load(other.request("r", TOKENS, [1, 2, 3, 4, 5]))
    assert output.loaded == set() and "checksum" in output.failed["r"].reason


def test_a_block_is_there_once_every_rank_has_it(make: MakeBench, tmp_path: Path) -> None:
    saved(make, num_ranks=2)
    other = make(num_ranks=2)
    request = other.request("r", TOKENS)
    missing = next(
        path for path in files(tmp_path) if path.stem == request.block_hashes[1].hex() and "rank1" in path.parts[-2]
    )
    missing.unlink()
    assert other.matched(request) == 4


def test_reset_cache(make: MakeBench, tmp_path: Path) -> None:
    saved(make)
    other = make()
    request = other.request("r", TOKENS, [3, 7, 1, 12, 5])
    matched = other.matched(request)
    other.scheduler.update_state_after_alloc(request, 0, matched)
    other.scheduler.reset_cache()  # before the workers have the load
    assert "does not exist any more" in other.until_ended(request).failed["r"].reason
    assert other.matched(request) == 0
    before = set(files(tmp_path))
    other.save(request, 0, 4)
    other.shutdown()
    assert len(set(files(tmp_path)) - before) == 4
    assert other.matched(request) == 16  # within this engine they count
    other.scheduler.reset_cache()
    assert other.matched(request) == 0
    assert make().scheduler.get_num_new_matched_tokens(request, 0) == 16  # what the first weights have computed


def test_shutdown_before_anything_was_registered(tmp_path: Path) -> None:
    config = transfer_config("FilesystemConnector", shared_storage_path=str(tmp_path))
    SharedStorageConnector.worker_side(TransferContext(config, 4, FINGERPRINT, "engine")).shutdown()


# --- threads --------------------------------------------------------------------------------------------------------


def test_threads_finish_what_they_have_when_they_are_stopped() -> None:
    threads, done, gate = IOThreads("test", 2), [], threading.Event()
    threads.submit(gate.wait)  # type: ignore[arg-type]
    for number in range(20):
        threads.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    gate.set()
    assert threads.stop(60.0, finish=True)
    assert sorted(done) == list(range(20))
    with pytest.raises(RuntimeError, match="were stopped"):
        threads.submit(lambda: None)


def test_a_hung_thread_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
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

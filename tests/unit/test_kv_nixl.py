"""KV that is lent and read: bit by bit the same, or not at all, and every block comes back."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.helpers.kv_bench import BLOCK_SIZE, FINGERPRINT, LAYOUT, Clock, ManualJobs, same
from tests.helpers.kv_pair import TOKENS, Engine, Gate, cut_at, flip_at, skip_without, whole

from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.nixl.params import NixlSettings
from fleetfoot.kv_transfer.nixl.producer import DECLINED, LeaseError, Leases
from fleetfoot.records.kv_layout import KVCacheSpec, KVLayout
from fleetfoot.records.request import RequestStatus

MakeEngine = Callable[..., Engine]
LENT, TAKEN = [3, 7, 1, 12], [9, 8, 2, 0]
"""Blocks of TOKENS there, and here."""


@pytest.fixture(params=["tcp", "nixl"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each agent that there is."""
    skip_without(request.param)
    return str(request.param)


@pytest.fixture
def make() -> Iterator[MakeEngine]:
    engines: list[Engine] = []

    def make_engine(**options: Any) -> Engine:
        engines.append(Engine(**options))
        return engines[-1]

    yield make_engine
    for engine in engines:
        engine.shutdown()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_reader_gets_what_was_computed(make: MakeEngine, num_ranks: int, backend: str) -> None:
    lender = make(role="kv_producer", num_ranks=num_ranks, backend=backend)
    reader = make(role="kv_consumer", num_ranks=num_ranks, backend=backend)
    params = lender.lend("p")
    untouched = reader.contents([4, 5, 6])
    request = reader.wants(params)
    assert reader.scheduler.get_num_new_matched_tokens(request, 0) == 16
    output = reader.load(request)
    assert (output.loaded, output.failed) == ({"r"}, {})
    assert same(reader.contents(TAKEN), lender.contents(LENT))
    assert same(reader.contents([4, 5, 6]), untouched)
    lender.until_sent("p")
    num_bytes = 4 * num_ranks * LAYOUT.bytes_per_block
    assert reader.counters == {"blocks_loaded": 4 * num_ranks, "bytes_loaded": num_bytes}
    assert lender.counters == {"sends_sent": num_ranks, "blocks_sent": 4 * num_ranks, "bytes_sent": num_bytes}
    assert not reader.scheduler.has_pending and not lender.scheduler.has_pending


def test_through_a_buffer_that_holds_a_block(make: MakeEngine, backend: str) -> None:
    lender, reader = make(backend=backend), make(backend=backend, extra={"buffer_bytes": 1, "num_threads": 1})
    for name in ("one", "two"):
        assert reader.load(reader.wants(lender.lend(name), name)).loaded == {name}
        assert same(reader.contents(TAKEN), lender.contents(LENT))
        lender.until_sent(name)


def test_a_cache_of_another_size(make: MakeEngine, backend: str) -> None:
    small = KVLayout(13, LAYOUT.block_size, LAYOUT.dtype, LAYOUT.layers)
    lender, reader = make(backend=backend), make(backend=backend, layout=small)
    assert reader.load(reader.wants(lender.lend("p"))).loaded == {"r"}
    assert same(reader.contents(TAKEN), lender.contents(LENT))


def test_what_is_here_already_is_not_read(make: MakeEngine) -> None:
    lender, reader = make(), make()
    mine = reader.contents([9, 8])
    assert reader.load(reader.wants(lender.lend("p")), num_computed_tokens=8).loaded == {"r"}
    assert same(reader.contents([9, 8]), mine)
    assert same(reader.contents([2, 0]), lender.contents([1, 12]))
    assert reader.counters["blocks_loaded"] == 2


def test_the_order_does_not_matter(make: MakeEngine) -> None:
    """The reader may ask before the lender's workers have heard of the lease: it waits."""
    lender, reader = make(), make()
    request = reader.wants(lender.lend("p", tells=False))
    reader.begin(request)
    reader.step(idle=True)
    lender.step()
    assert reader.until_ended(request).loaded == {"r"}
    lender.until_sent("p")


def test_only_whole_blocks_without_the_last_token_are_lent(make: MakeEngine) -> None:
    lender, reader = make(), make()
    assert lender.lend("sixteen", TOKENS[:16])["remote_num_tokens"] == 12
    assert lender.lend("five", TOKENS[:5])["remote_num_tokens"] == 4
    assert lender.lend("four", TOKENS[:4]) is None
    longer = reader.wants(lender.lend("p"), tokens=[*TOKENS, 1, 2, 3, 4, 5], blocks=[9, 8, 2, 0, 4, 5])
    assert reader.scheduler.get_num_new_matched_tokens(longer, 0) == 16
    assert reader.scheduler.get_num_new_matched_tokens(longer, 16) == 0


# --- who may -----------------------------------------------------------------------------------------------------


def refused(reader: Engine, lender: Engine, params: Any, **options: Any) -> str:
    """The reason why a load fails at once; its lender has its blocks back."""
    mine = reader.contents(range(13))
    output = reader.load(reader.wants(params, **options))
    assert output.loaded == set()
    assert same(reader.contents(range(13)), mine)
    lender.until_sent("p")
    assert set(lender.counters) == {"sends_declined"}
    return output.failed["r"].reason


def test_other_fingerprints_are_refused(make: MakeEngine) -> None:
    lender, reader = make(fingerprint="f" * 32), make()
    reason = refused(reader, lender, lender.lend("p"))
    assert f"its fingerprint is '{'f' * 32}', and '{FINGERPRINT}' here" in reason


def test_other_numbers_of_ranks_are_refused(make: MakeEngine) -> None:
    lender, reader = make(), make(num_ranks=2)
    assert "its tp_size is 1, and 2 here" in refused(reader, lender, lender.lend("p"))
    lender, reader = make(num_ranks=3), make()  # each of its ranks hears of it
    assert "its tp_size is 3, and 1 here" in refused(reader, lender, lender.lend("p"))


@pytest.mark.parametrize("name, value", [("block_size", 16), ("dtype", "bfloat16"), ("pp_size", 2)])
def test_other_settings_are_refused(make: MakeEngine, name: str, value: Any) -> None:
    lender, reader = make(), make()
    params = lender.lend("p")
    params["remote_engine"] = {**params["remote_engine"], name: value}
    assert f"its {name} is {value!r}, and " in refused(reader, lender, params)


def test_other_layouts_are_refused_by_the_lender(make: MakeEngine) -> None:
    """Two engines that call themselves the same, and are not."""
    other = KVLayout(16, BLOCK_SIZE, "float32", (*[KVCacheSpec(2, 6)] * 2, KVCacheSpec(2, 4)))
    lender, reader = make(), make(layout=other)
    request = reader.wants(lender.lend("p"))
    reason = reader.load(request).failed["r"].reason
    assert f"its layout is '{LAYOUT.fingerprint}', and '{other.fingerprint}' here" in reason
    lender.until_sent("p")
    assert lender.counters == {"sends_declined": 1}


def test_other_tokens_are_refused(make: MakeEngine) -> None:
    lender, reader = make(), make()
    reason = refused(reader, lender, lender.lend("p"), tokens=[1, *TOKENS[1:]])
    assert "other tokens or another cache_salt" in reason
    lender.sent.clear()
    assert "and the request has 12" in refused(reader, lender, lender.lend("p"), tokens=TOKENS[:12])


def test_replaced_weights(make: MakeEngine) -> None:
    lender, reader = make(), make()
    params = lender.lend("p")
    reader.scheduler.reset_cache()
    assert "were replaced" in refused(reader, lender, params)
    lender.scheduler.reset_cache()
    assert lender.lend("again") is None


def test_another_life_of_an_engine(make: MakeEngine) -> None:
    lender, other, reader = make(), make(), make()
    params = lender.lend("p")
    params["remote_addresses"] = other.lend("q")["remote_addresses"]
    params["remote_engine_id"] = "gone"
    output = reader.load(reader.wants(params))
    assert "this is engine 'bench', and 'gone' was asked for" in output.failed["r"].reason


def test_kv_transfer_params_are_checked(make: MakeEngine) -> None:
    producer, consumer = make(role="kv_producer"), make(role="kv_consumer")
    params = producer.lend("p")
    for wrong, message in [
        ({"do_remote": True}, "do_remote"),
        ({"do_remote_decode": 1}, "do_remote_decode is 1; it must be true or false"),
        ({**params, "do_remote_decode": True}, "exclude each other"),
        ({**params, "remote_lease": ""}, "remote_lease is ''; it must be a string that is not empty"),
        ({**params, "remote_num_tokens": 0}, "remote_num_tokens is 0"),
        ({**params, "remote_engine": None}, "remote_engine is None"),
        ({**params, "remote_addresses": ["here"]}, "it must be a list of host:port"),
        ({"do_remote_decode": True}, "kv_role is 'kv_consumer' in this engine's"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            consumer.wants(wrong)
    with pytest.raises(ValueError, match="kv_role is 'kv_producer' in this engine's"):
        producer.wants(params)
    assert not consumer.scheduler.has_pending
    request = consumer.wants({"do_remote_prefill": False, "remote_lease": None})
    assert consumer.scheduler.get_num_new_matched_tokens(request, 0) == 0


def test_settings_are_checked() -> None:
    def of(**extra: Any) -> NixlSettings:
        config = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both", kv_connector_extra_config=extra)
        return NixlSettings.of(config)

    assert of() == NixlSettings("nixl", "127.0.0.1", 0, 480, 64 << 20, 4)
    with pytest.raises(ValueError, match="backend is 'udp'; it must be nixl or tcp"):
        of(backend="udp")
    with pytest.raises(ValueError, match="abort_timeout is 0"):
        of(abort_timeout=0)
    with pytest.raises(ValueError, match=r"side_channel_host is '0\.0\.0\.0'; it must be an address of this machine"):
        of(side_channel_host="0.0.0.0")
    with pytest.raises(TypeError, match="side_chanel_port"):
        of(side_chanel_port=3)


def test_a_port_that_is_taken(make: MakeEngine) -> None:
    port = int(make().lend("p")["remote_addresses"][0].split(":")[1])
    with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}"):
        make(extra={"side_channel_port": port})
    with pytest.raises(ValueError, match="side_channel_port is 99999; it must be at most 65535"):
        make(extra={"side_channel_port": 99999})


# --- what goes wrong ---------------------------------------------------------------------------------------------


SPOIL: dict[str, tuple[Callable[[bytes, int], bytes], str]] = {
    "damaged": (flip_at(500), "is corrupt: its CRC-32 is"),
    "cut": (cut_at(0), "closed the connection after 0 of 3,584 bytes"),
    "truncated": (cut_at(1000), "closed the connection after 991 of 3,584 bytes"),
    "of another length": (flip_at(1), "sends 3,585 bytes instead of 3,584"),
}


@pytest.mark.parametrize("how", SPOIL)
def test_bytes_that_are_spoiled_on_their_way_never_become_kv(make: MakeEngine, how: str) -> None:
    lender, reader = make(line=True), make()
    params = lender.lend("p")
    lender.lines[0].spoil, reason = SPOIL[how]
    mine = reader.contents(range(13))
    output = reader.load(reader.wants(params))
    assert output.loaded == set()
    assert reason in output.failed["r"].reason
    assert same(reader.contents(range(13)), mine)
    lender.until_sent("p")  # the reader's connection is gone, so nobody reads them any more
    assert lender.counters == {"sends_lost": 1}
    lender.lines[0].spoil = whole
    assert reader.load(reader.wants(lender.lend("q"))).loaded == {"r"}
    assert same(reader.contents(TAKEN), lender.contents(LENT))


@pytest.fixture
def held(make: MakeEngine) -> Iterator[tuple[Engine, Engine, Gate, Clock, Any]]:
    """A lender and a reader, of which a load is under way and gets no further."""
    clock = Clock()
    lender, reader = make(line=True, clock=clock, extra={"abort_timeout": 30}), make(clock=clock, timeout=20.0)
    gate = Gate()
    lender.lines[0].spoil = gate
    request = reader.wants(lender.lend("p"))
    reader.begin(request)
    assert reader.step().is_empty
    assert gate.reached.wait(30)
    yield lender, reader, gate, clock, request
    gate.opened.set()


Held = tuple[Engine, Engine, Gate, Clock, Any]


def test_a_slow_load(held: Held) -> None:
    lender, reader, gate, clock, request = held
    clock.now += 19
    for _ in range(3):
        assert reader.step().is_empty
    gate.opened.set()
    assert reader.until_ended(request).loaded == {"r"}
    assert same(reader.contents(TAKEN), lender.contents(LENT))


def test_a_load_that_takes_too_long(held: Held) -> None:
    lender, reader, gate, clock, _ = held
    mine = reader.contents(range(13))
    clock.now += 20
    output = reader.step()
    assert output.failed["r"].timed_out
    assert "4 of 4 KV blocks had not come from engine 'bench' after 20 s" in output.failed["r"].reason
    lender.until_sent("p")  # the reader has hung up
    gate.opened.set()
    assert reader.load(reader.wants(lender.lend("q"), "again", blocks=[10, 11, 12, 13, 14])).loaded == {"again"}
    assert same(reader.contents([9, 8, 2, 0]), [[layer[[9, 8, 2, 0]] for layer in layers] for layers in mine])


def test_a_request_that_ends_while_it_loads(held: Held) -> None:
    lender, reader, _, _, _ = held
    output = reader.step(["r"])
    assert "ended before its KV arrived" in output.failed["r"].reason
    lender.until_sent("p")
    assert lender.counters == {"sends_lost": 1}


def test_blocks_that_were_given_back_meanwhile_do_not_count(held: Held) -> None:
    """What was read of them may be another request's KV."""
    lender, reader, gate, clock, request = held
    clock.now += 31
    assert lender.step(idle=True).sent == {"p"}
    assert lender.counters == {"sends_expired": 1}
    lender.scramble(LENT)
    clock.now -= 31
    gate.opened.set()
    output = reader.until_ended(request)
    assert "has ended: it was not read in time (abort_timeout)" in output.failed["r"].reason


def test_a_reader_that_comes_too_late(make: MakeEngine) -> None:
    clock = Clock()
    lender, reader = make(clock=clock, extra={"abort_timeout": 30}), make()
    params = lender.lend("p")
    clock.now += 29
    assert not lender.step(idle=True).sent
    clock.now += 1
    assert lender.step(idle=True).sent == {"p"}
    reason = reader.load(reader.wants(params)).failed["r"].reason
    assert "has ended: it was not read in time (abort_timeout)" in reason
    assert lender.counters == {"sends_expired": 1}


def test_a_lease_that_is_declined_before_it_is_granted() -> None:
    """Its reader is faster than the step that tells the lender's workers of it."""
    leases = Leases(30.0, Clock())
    leases.give_up("early", DECLINED)
    with pytest.raises(LeaseError, match="it was declined"):
        leases.acquire("early", 30.0)
    leases.grant("early", "p", [1, 2], None)
    leases.grant("other", "q", [3], None)
    assert [(lease.request_id, how) for lease, how in leases.get_finished()] == [("p", DECLINED)]
    assert leases.acquire("other", 0.0) == [3]
    with pytest.raises(LeaseError, match="there is no lease late here"):
        leases.acquire("late", 0.0)  # no step has told of it in all the time that a reader waits
    leases.grant("late", "r", [4], None)
    assert [(lease.request_id, how) for lease, how in leases.get_finished()] == [("r", DECLINED)]


def test_a_lease_is_read_once(make: MakeEngine) -> None:
    lender, reader, other = make(), make(), make()
    params = lender.lend("p")
    assert reader.load(reader.wants(params)).loaded == {"r"}
    assert "it was read before" in other.load(other.wants(params)).failed["r"].reason


def test_an_engine_that_is_gone(make: MakeEngine, backend: str) -> None:
    lender, reader = make(backend=backend), make(backend=backend)
    params = lender.lend("p")
    lender.shutdown()
    assert "cannot be reached" in reader.load(reader.wants(params)).failed["r"].reason


def test_nothing_is_left_open() -> None:
    """Neither connections nor threads, whatever became of the loads."""

    def num_open() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before, threads_before = num_open(), set(threading.enumerate())
    lender, reader = Engine(line=True), Engine(extra={"num_threads": 2})
    for number in range(5):
        for spoil in (damaged, cut_at(0), whole):
            lender.lines[0].spoil = spoil
            output = reader.load(reader.wants(lender.lend(name := f"{number}")))
            assert bool(output.loaded) == (spoil is whole)
            lender.until_sent(name)
            lender.sent.clear()
        gone = Engine()
        params = gone.lend("p")
        gone.shutdown()
        assert reader.load(reader.wants(params)).failed
    busy = num_open()
    reader.shutdown()
    lender.shutdown()
    for thread in set(threading.enumerate()) - threads_before:
        thread.join(20)
        assert not thread.is_alive(), thread.name
    assert num_open() == before
    assert busy < before + 20  # 20 loads, of which most have failed


def damaged(content: bytes, offset: int) -> bytes:
    """The last bit of each piece."""
    return content[:-1] + bytes([content[-1] ^ 1])


def test_one_rank_that_fails(make: MakeEngine) -> None:
    """What has come on the others does not count."""
    lender, reader = make(num_ranks=2, line=True), make(num_ranks=2)
    lender.lines[1].spoil = flip_at(500)
    output = reader.load(reader.wants(lender.lend("p")))
    assert output.loaded == set() and "is corrupt" in output.failed["r"].reason
    lender.until_sent("p")
    assert lender.counters["sends_sent"] == lender.counters["sends_lost"] == 1


# --- requests that do not load after all -------------------------------------------------------------------------


def test_a_request_that_has_all_of_it_declines(make: MakeEngine) -> None:
    lender, reader = make(), make()
    request = reader.wants(lender.lend("p"))
    assert reader.scheduler.get_num_new_matched_tokens(request, 16) == 0
    reader.run(request)
    lender.until_sent("p")
    assert lender.counters == {"sends_declined": 1}


def test_a_request_that_ends_before_it_loads_declines(make: MakeEngine) -> None:
    lender, reader = make(), make()
    request = reader.wants(lender.lend("p"))
    assert reader.scheduler.request_finished(request) == (False, None)
    reader.step()
    lender.until_sent("p")
    assert lender.counters == {"sends_declined": 1}


def test_requests_that_did_not_end_well_lend_nothing(make: MakeEngine) -> None:
    lender = make()
    for status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
        request = lender.request("p", TOKENS, [1, 2, 3, 4, 5])
        request.kv_transfer_params = {"do_remote_decode": True}
        request.status = status
        assert lender.scheduler.request_finished(request) == (False, None)
    assert not lender.scheduler.has_pending


def test_loads_that_wait_for_a_thread(make: MakeEngine) -> None:
    jobs = ManualJobs()
    lender, reader = make(), make(jobs=jobs, clock=(clock := Clock()), timeout=5.0)
    first, second = reader.wants(lender.lend("p"), "one"), reader.wants(lender.lend("q"), "two")
    reader.begin(first)
    reader.begin(second)
    assert reader.step().is_empty
    jobs.run(1)
    assert reader.step().loaded == {"one"}
    clock.now += 5
    assert set(reader.step().failed) == {"two"}
    jobs.run()  # finds that nobody waits for it any more, and says so
    assert reader.step().is_empty
    lender.until_sent("p")
    lender.until_sent("q")
    assert lender.counters["sends_sent"] == lender.counters["sends_declined"] == 1

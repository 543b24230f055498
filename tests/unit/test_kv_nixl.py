"""KV between engines: it arrives bitwise equal or not at all, and all blocks are released."""

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
from fleetfoot.kv_transfer.nixl.side_channel import DECLINED, LeaseError, Leases
from fleetfoot.records.kv_layout import KVCacheSpec, KVLayout
from fleetfoot.records.request import RequestStatus

MakeEngine = Callable[..., Engine]
HELD, LOADED = [3, 7, 1, 12], [9, 8, 2, 0]
"""Blocks of TOKENS on the producer, and on the consumer."""


@pytest.fixture(params=["tcp", "nixl"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each transfer agent."""
    skip_without(request.param)
    return str(request.param)


@pytest.fixture
def make(request: pytest.FixtureRequest) -> MakeEngine:
    def make_engine(**options: Any) -> Engine:
        engine = Engine(**options)
        request.addfinalizer(engine.shutdown)
        return engine

    return make_engine


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_reader_gets_what_was_computed(make: MakeEngine, num_ranks: int, backend: str) -> None:
    producer = make(role="kv_producer", num_ranks=num_ranks, backend=backend)
    consumer = make(role="kv_consumer", num_ranks=num_ranks, backend=backend)
    params = producer.hold("p")
    untouched = consumer.contents([4, 5, 6])
    request = consumer.remote(params)
    assert consumer.matched(request) == 16
    output = consumer.load(request)
    assert (output.loaded, output.failed) == ({"r"}, {})
    assert same(consumer.contents(LOADED), producer.contents(HELD))
    assert same(consumer.contents([4, 5, 6]), untouched)
    producer.until_sent("p")
    num_bytes = 4 * num_ranks * LAYOUT.bytes_per_block
    assert consumer.counters == {"blocks_loaded": 4 * num_ranks, "bytes_loaded": num_bytes}
    assert producer.counters == {"sends_sent": num_ranks, "blocks_sent": 4 * num_ranks, "bytes_sent": num_bytes}
    assert not consumer.scheduler.has_pending and not producer.scheduler.has_pending


def test_through_a_buffer_that_holds_a_block(make: MakeEngine, backend: str) -> None:
    producer, consumer = make(backend=backend), make(backend=backend, extra={"buffer_bytes": 1, "num_threads": 1})
    for name in ("one", "two"):
        assert consumer.load(consumer.remote(producer.hold(name), name)).loaded == {name}
        assert same(consumer.contents(LOADED), producer.contents(HELD))
        producer.until_sent(name)


def test_a_cache_of_another_size(make: MakeEngine, backend: str) -> None:
    small = KVLayout(13, LAYOUT.block_size, LAYOUT.dtype, LAYOUT.layers)
    producer, consumer = make(backend=backend), make(backend=backend, layout=small)
    assert consumer.load(consumer.remote(producer.hold("p"))).loaded == {"r"}
    assert same(consumer.contents(LOADED), producer.contents(HELD))


def test_cached_blocks_are_not_read(make: MakeEngine) -> None:
    producer, consumer = make(), make()
    before = consumer.contents([9, 8])
    assert consumer.load(consumer.remote(producer.hold("p")), num_computed_tokens=8).loaded == {"r"}
    assert same(consumer.contents([9, 8]), before)
    assert same(consumer.contents([2, 0]), producer.contents([1, 12]))
    assert consumer.counters["blocks_loaded"] == 2


def test_the_order_does_not_matter(make: MakeEngine) -> None:
    """A consumer that is faster than the producer's step waits for its lease."""
    producer, consumer = make(), make()
    request = consumer.remote(producer.hold("p", step=False))
    consumer.begin(request)
    consumer.step(idle=True)
    producer.step()
    assert consumer.until_ended(request).loaded == {"r"}
    producer.until_sent("p")


def test_only_whole_blocks_without_the_last_token_are_lent(make: MakeEngine) -> None:
    producer, consumer = make(), make()
    assert producer.hold("sixteen", TOKENS[:16])["remote_num_tokens"] == 12
    assert producer.hold("five", TOKENS[:5])["remote_num_tokens"] == 4
    assert producer.hold("four", TOKENS[:4]) is None
    longer = consumer.remote(producer.hold("p"), tokens=[*TOKENS, 1, 2, 3, 4, 5], blocks=[9, 8, 2, 0, 4, 5])
    assert consumer.matched(longer) == 16
    assert consumer.matched(longer, 16) == 0


# --- refusals -----------------------------------------------------------------------------------------------------


def refused(consumer: Engine, producer: Engine, params: Any, **options: Any) -> str:
    """The reason of a load that fails at once; the producer releases its blocks."""
    before = consumer.contents(range(13))
    output = consumer.load(consumer.remote(params, **options))
    assert output.loaded == set()
    assert same(consumer.contents(range(13)), before)
    producer.until_sent("p")
    assert set(producer.counters) == {"sends_declined"}
    return output.failed["r"].reason


@pytest.mark.parametrize(
    ("producer_options", "consumer_options", "reason"),
    [
        ({"fingerprint": "f" * 32}, {}, f"its fingerprint is '{'f' * 32}', and '{FINGERPRINT}' here"),
        ({}, {"num_ranks": 2}, "its tp_size is 1, and 2 here"),
        ({"num_ranks": 3}, {}, "its tp_size is 3, and 1 here"),  # each of its ranks is told
    ],
)
def test_other_engines_are_refused(
    make: MakeEngine, producer_options: dict[str, Any], consumer_options: dict[str, Any], reason: str
) -> None:
    producer, consumer = make(**producer_options), make(**consumer_options)
    assert reason in refused(consumer, producer, producer.hold("p"))


@pytest.mark.parametrize("name, value", [("block_size", 16), ("dtype", "bfloat16"), ("pp_size", 2)])
def test_other_settings_are_refused(make: MakeEngine, name: str, value: Any) -> None:
    producer, consumer = make(), make()
    params = producer.hold("p")
    params["remote_engine"] = {**params["remote_engine"], name: value}
    assert f"its {name} is {value!r}, and " in refused(consumer, producer, params)


def test_other_layouts_are_refused_by_the_lender(make: MakeEngine) -> None:
    """Two engines with the same description, and different layouts."""
    other = KVLayout(16, BLOCK_SIZE, "float32", (*[KVCacheSpec(2, 6)] * 2, KVCacheSpec(2, 4)))
    producer, consumer = make(), make(layout=other)
    request = consumer.remote(producer.hold("p"))
    reason = consumer.load(request).failed["r"].reason
    assert f"its layout is '{LAYOUT.fingerprint}', and '{other.fingerprint}' here" in reason
    producer.until_sent("p")
    assert producer.counters == {"sends_declined": 1}


def test_other_tokens_are_refused(make: MakeEngine) -> None:
    producer, consumer = make(), make()
    reason = refused(consumer, producer, producer.hold("p"), tokens=[1, *TOKENS[1:]])
    assert "other tokens or another cache_salt" in reason
    producer.sent.clear()
    assert "and the request has 12" in refused(consumer, producer, producer.hold("p"), tokens=TOKENS[:12])


def test_replaced_weights(make: MakeEngine) -> None:
    producer, consumer = make(), make()
    params = producer.hold("p")
    consumer.scheduler.reset_cache()
    assert "were replaced" in refused(consumer, producer, params)
    producer.scheduler.reset_cache()
    assert producer.hold("again") is None


def test_an_engine_that_was_restarted(make: MakeEngine) -> None:
    producer, other, consumer = make(), make(), make()
    params = producer.hold("p")
    params["remote_addresses"] = other.hold("q")["remote_addresses"]
    params["remote_engine_id"] = "gone"
    output = consumer.load(consumer.remote(params))
    assert "this is engine 'bench', and 'gone' was asked for" in output.failed["r"].reason


def test_kv_transfer_params_are_checked(make: MakeEngine) -> None:
    producer, consumer = make(role="kv_producer"), make(role="kv_consumer")
    params = producer.hold("p")
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
            consumer.remote(wrong)
    with pytest.raises(ValueError, match="kv_role is 'kv_producer' in this engine's"):
        producer.remote(params)
    assert not consumer.scheduler.has_pending
    request = consumer.remote({"do_remote_prefill": False, "remote_lease": None})
    assert consumer.matched(request) == 0


def test_default_settings() -> None:
    config = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    assert NixlSettings.of(config) == NixlSettings("nixl", "127.0.0.1", 0, 480, 64 << 20, 4)


def test_a_port_that_is_taken(make: MakeEngine) -> None:
    port = int(make().hold("p")["remote_addresses"][0].split(":")[1])
    with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}"):
        make(extra={"side_channel_port": port})


# --- what goes wrong ---------------------------------------------------------------------------------------------


SPOIL: dict[str, tuple[Callable[[bytes, int], bytes], str]] = {
    "damaged": (flip_at(500), "is corrupt: its CRC-32 is"),
    "cut": (cut_at(0), "closed the connection after 0 of 3,584 bytes"),
    "truncated": (cut_at(1000), "closed the connection after 991 of 3,584 bytes"),
    "of another length": (flip_at(1), "sends 3,585 bytes instead of 3,584"),
}


@pytest.mark.parametrize("how", SPOIL)
def test_bytes_that_are_spoiled_on_their_way_never_become_kv(make: MakeEngine, how: str) -> None:
    producer, consumer = make(line=True), make()
    params = producer.hold("p")
    producer.lines[0].spoil, reason = SPOIL[how]
    before = consumer.contents(range(13))
    output = consumer.load(consumer.remote(params))
    assert output.loaded == set()
    assert reason in output.failed["r"].reason
    assert same(consumer.contents(range(13)), before)
    producer.until_sent("p")  # the consumer's connection is closed
    assert producer.counters == {"sends_lost": 1}
    producer.lines[0].spoil = whole
    assert consumer.load(consumer.remote(producer.hold("q"))).loaded == {"r"}
    assert same(consumer.contents(LOADED), producer.contents(HELD))


@pytest.fixture
def stalled(make: MakeEngine) -> Iterator[tuple[Engine, Engine, Gate, Clock, Any]]:
    """A producer and a consumer with a load that is under way and stalled."""
    clock = Clock()
    producer, consumer = make(line=True, clock=clock, extra={"abort_timeout": 30}), make(clock=clock, timeout=20.0)
    gate = Gate()
    producer.lines[0].spoil = gate
    request = consumer.remote(producer.hold("p"))
    consumer.begin(request)
    assert consumer.step().is_empty
    assert gate.reached.wait(30)
    yield producer, consumer, gate, clock, request
    gate.opened.set()


Stalled = tuple[Engine, Engine, Gate, Clock, Any]


def test_a_slow_load(stalled: Stalled) -> None:
    producer, consumer, gate, clock, request = stalled
    clock.now += 19
    for _ in range(3):
        assert consumer.step().is_empty
    gate.opened.set()
    assert consumer.until_ended(request).loaded == {"r"}
    assert same(consumer.contents(LOADED), producer.contents(HELD))


def test_a_load_that_takes_too_long(stalled: Stalled) -> None:
    producer, consumer, gate, clock, _ = stalled
    before = consumer.contents(range(13))
    clock.now += 20
    output = consumer.step()
    assert output.failed["r"].timed_out
    assert "4 of 4 KV blocks had not come from engine 'bench' after 20 s" in output.failed["r"].reason
    producer.until_sent("p")  # the consumer has closed its connection
    gate.opened.set()
    assert consumer.load(consumer.remote(producer.hold("q"), "again", blocks=[10, 11, 12, 13, 14])).loaded == {"again"}
    assert same(consumer.contents([9, 8, 2, 0]), [[layer[[9, 8, 2, 0]] for layer in layers] for layers in before])


def test_a_request_that_ends_while_it_loads(stalled: Stalled) -> None:
    producer, consumer, _, _, _ = stalled
    output = consumer.step(["r"])
    assert "ended before its KV arrived" in output.failed["r"].reason
    producer.until_sent("p")
    assert producer.counters == {"sends_lost": 1}


def test_blocks_that_were_released_meanwhile_do_not_count(stalled: Stalled) -> None:
    """They may have been overwritten while they were read."""
    producer, consumer, gate, clock, request = stalled
    clock.now += 31
    assert producer.step(idle=True).sent == {"p"}
    assert producer.counters == {"sends_expired": 1}
    producer.scramble(HELD)
    clock.now -= 31
    gate.opened.set()
    output = consumer.until_ended(request)
    assert "has ended: it was not read in time (abort_timeout)" in output.failed["r"].reason


def test_a_reader_that_comes_too_late(make: MakeEngine) -> None:
    clock = Clock()
    producer, consumer = make(clock=clock, extra={"abort_timeout": 30}), make()
    params = producer.hold("p")
    clock.now += 29
    assert not producer.step(idle=True).sent
    clock.now += 1
    assert producer.step(idle=True).sent == {"p"}
    reason = consumer.load(consumer.remote(params)).failed["r"].reason
    assert "has ended: it was not read in time (abort_timeout)" in reason
    assert producer.counters == {"sends_expired": 1}


def test_a_lease_that_is_declined_before_it_is_granted() -> None:
    """Its consumer is faster than the step that tells the producer's workers of it."""
    leases = Leases(30.0, Clock())
    leases.give_up("early", DECLINED)
    with pytest.raises(LeaseError, match="it was declined"):
        leases.acquire("early", 30.0)
    leases.grant("early", "p", [1, 2], None)
    leases.grant("other", "q", [3], None)
    assert [(lease.request_id, how) for lease, how in leases.get_finished()] == [("p", DECLINED)]
    assert leases.acquire("other", 0.0) == [3]
    with pytest.raises(LeaseError, match="there is no lease late here"):
        leases.acquire("late", 0.0)  # no step has granted it within the timeout
    leases.grant("late", "r", [4], None)
    assert [(lease.request_id, how) for lease, how in leases.get_finished()] == [("r", DECLINED)]


def test_a_lease_is_read_once(make: MakeEngine) -> None:
    producer, consumer, other = make(), make(), make()
    params = producer.hold("p")
    assert consumer.load(consumer.remote(params)).loaded == {"r"}
    assert "it was read before" in other.load(other.remote(params)).failed["r"].reason


def test_an_engine_that_is_gone(make: MakeEngine, backend: str) -> None:
    producer, consumer = make(backend=backend), make(backend=backend)
    params = producer.hold("p")
    producer.shutdown()
    assert "cannot be reached" in consumer.load(consumer.remote(params)).failed["r"].reason


def test_nothing_is_left_open() -> None:
    """Neither connections nor threads, after loads of every outcome."""

    def num_open() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before, threads_before = num_open(), set(threading.enumerate())
    producer, consumer = Engine(line=True), Engine(extra={"num_threads": 2})
    for number in range(5):
        for spoil in (damaged, cut_at(0), whole):
            producer.lines[0].spoil = spoil
            output = consumer.load(consumer.remote(producer.hold(name := f"{number}")))
            assert bool(output.loaded) == (spoil is whole)
            producer.until_sent(name)
            producer.sent.clear()
        gone = Engine()
        params = gone.hold("p")
        gone.shutdown()
        assert consumer.load(consumer.remote(params)).failed
    busy = num_open()
    consumer.shutdown()
    producer.shutdown()
    for thread in set(threading.enumerate()) - threads_before:
        thread.join(20)
        assert not thread.is_alive(), thread.name
    assert num_open() == before
    assert busy < before + 20  # 20 loads, of which most have failed


def damaged(content: bytes, offset: int) -> bytes:
    """The last bit of each piece."""
    return content[:-1] + bytes([content[-1] ^ 1])


def test_one_rank_that_fails(make: MakeEngine) -> None:
    """The load fails on all."""
    producer, consumer = make(num_ranks=2, line=True), make(num_ranks=2)
    producer.lines[1].spoil = flip_at(500)
    output = consumer.load(consumer.remote(producer.hold("p")))
    assert output.loaded == set() and "is corrupt" in output.failed["r"].reason
    producer.until_sent("p")
    assert producer.counters["sends_sent"] == producer.counters["sends_lost"] == 1


# --- requests that do not load after all -------------------------------------------------------------------------


def test_a_request_that_has_all_of_it_declines(make: MakeEngine) -> None:
    producer, consumer = make(), make()
    request = consumer.remote(producer.hold("p"))
    assert consumer.matched(request, 16) == 0
    consumer.run(request)
    producer.until_sent("p")
    assert producer.counters == {"sends_declined": 1}


def test_a_request_that_ends_before_it_loads_declines(make: MakeEngine) -> None:
    producer, consumer = make(), make()
    request = consumer.remote(producer.hold("p"))
    assert consumer.scheduler.request_finished(request) == (False, None)
    consumer.step()
    producer.until_sent("p")
    assert producer.counters == {"sends_declined": 1}


def test_failed_requests_hold_nothing(make: MakeEngine) -> None:
    producer = make()
    for status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
        request = producer.request("p", TOKENS, [1, 2, 3, 4, 5])
        request.kv_transfer_params = {"do_remote_decode": True}
        request.status = status
        assert producer.scheduler.request_finished(request) == (False, None)
    assert not producer.scheduler.has_pending


def test_loads_that_wait_for_a_thread(make: MakeEngine) -> None:
    jobs = ManualJobs()
    producer, consumer = make(), make(jobs=jobs, clock=(clock := Clock()), timeout=5.0)
    first, second = (
        consumer.remote(producer.hold("p"), "one"),
        consumer.remote(producer.hold("q"), "two"),
    )
    consumer.begin(first)
    consumer.begin(second)
    assert consumer.step().is_empty
    jobs.run(1)
    assert consumer.step().loaded == {"one"}
    clock.now += 5
    assert set(consumer.step().failed) == {"two"}
    jobs.run()  # the load was given up, so its lease is declined
    assert consumer.step().is_empty
    producer.until_sent("p")
    producer.until_sent("q")
    assert producer.counters["sends_sent"] == producer.counters["sends_declined"] == 1

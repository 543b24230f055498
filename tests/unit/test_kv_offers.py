"""Offers of KV: only those that an engine of the deployment has signed for this prompt are accepted, once, and nothing
is sent for others."""

import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.helpers.kv_bench import TOKENS, Clock
from tests.helpers.kv_pair import KEY, Engine, changed, opened

from fleetfoot.kv_transfer.base import offers
from fleetfoot.kv_transfer.base.offers import OfferError, Offers
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.utils.cluster_key import ClusterKey

OTHER_KEY = ClusterKey(b"another key of tests")


def request(tokens: list[int] = TOKENS, salt: str | None = None) -> Request:
    return Request("r", tokens, SamplingParams(), max_tokens=8, seed=0, cache_salt=salt)


def made(maker: Offers, *addresses: str) -> str:
    about: dict[str, Any] = {"engine_id": "p", "engine": {}, "num_tokens": 16}
    return maker.make(request(), addresses=list(addresses) or ["127.0.0.1:9"], **about)[1]


def test_an_offer_is_accepted_once_until_it_expires() -> None:
    clock = Clock()
    maker, taker = Offers(KEY, (), 30.0, clock), Offers(KEY, (), 5.0, clock)
    first, second, third = (made(maker) for _ in range(3))
    offer = taker.accept(first, request())
    assert (offer.request_id, offer.engine_id, offer.addresses, offer.num_tokens) == ("r", "p", ["127.0.0.1:9"], 16)
    with pytest.raises(OfferError, match="accepted once"):
        taker.accept(first, request())
    clock.now += 29
    taker.accept(second, request())
    clock.now += 1
    for text in (first, second, third):
        with pytest.raises(OfferError, match="has expired"):
            taker.accept(text, request())
    assert len(taker._used) == 2
    taker.accept(made(maker), request())
    assert len(taker._used) == 1  # those that have expired are forgotten


def test_offers_that_are_remembered_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "MAX_REMEMBERED", 2)
    clock = Clock()
    both = Offers(KEY, (), 30.0, clock)
    texts = [made(both) for _ in range(3)]
    for text in texts[:2]:
        both.accept(text, request())
    with pytest.raises(OfferError, match="more than 2"):
        both.accept(texts[2], request())
    clock.now += 30
    both.accept(made(both), request())


@pytest.mark.parametrize(
    ("peers", "address", "is_listed"),
    [
        ((), "127.0.0.1:9", True),
        ((), "127.8.9.1:9", True),
        ((), "localhost:9", True),
        ((), "10.0.0.1:9", False),
        ((), "localhost.example.com:9", False),
        (("10.0.0.1",), "10.0.0.1:9", True),
        (("10.0.0.1",), "10.0.0.11:9", False),
        (("10.0.0.1",), "127.0.0.1:9", False),
        (("10.0.0.1:9",), "10.0.0.1:9", True),
        (("10.0.0.1:9",), "10.0.0.1:10", False),
        (("10.1.0.0/16", "other"), "10.1.255.9:9", True),
        (("10.1.0.0/16", "other"), "10.2.0.1:9", False),
        (("10.1.0.0/16", "other"), "other:9", True),
        (("10.1.0.0/16", "other"), "another:9", False),
    ],
)
def test_peers(peers: tuple[str, ...], address: str, is_listed: bool) -> None:
    maker, taker = Offers(KEY, (), 30.0), Offers(KEY, peers, 30.0)
    for addresses in ([address], ["127.0.0.1:9", address] if not peers else [address, address]):
        text = made(maker, *addresses)
        if is_listed:
            assert taker.accept(text, request()).addresses == addresses
        else:
            with pytest.raises(OfferError, match=f"names the peer {address}, which is not among"):
                taker.accept(text, request())


def _flipped(text: str, place: int) -> str:
    return text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :]


FORGED: dict[str, Callable[[Any], Any]] = {
    "no text": lambda params: 7,
    "empty": lambda params: "",
    "no base64": lambda params: "not an offer",
    "not ASCII": lambda params: "ÄÖ" * 40,
    "a signature alone": lambda params: params["offer"][:40],
    "cut off": lambda params: params["offer"][:-4],
    "another signature": lambda params: _flipped(params["offer"], 3),
    "another content": lambda params: _flipped(params["offer"], 60),
    "huge": lambda params: "A" * (offers.MAX_OFFER_CHARS + 4),
    "another key": lambda params: changed(params, OTHER_KEY)["offer"],
    "another form": lambda params: _of_another_form(params),
}


def _of_another_form(params: Any) -> str:
    class Other(msgspec.Struct, array_like=True, tag="fleetfoot-offer-0"):
        address: str

    content: Any = Other("127.0.0.1:9")
    return Offers(KEY, (), 30.0).text_of(content)


@pytest.fixture
def no_connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Connections that this process has opened, by address."""
    found: list[Any] = []
    connect = socket.create_connection

    def noted(address: Any, *arguments: Any, **options: Any) -> socket.socket:
        found.append(address)
        return connect(address, *arguments, **options)

    monkeypatch.setattr(socket, "create_connection", noted)
    return found


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    **{
        name: (lambda params, forge=forge: {**params, "offer": forge(params)}, "offer is")
        for name, forge in FORGED.items()
    },
    "expired": (lambda params: changed(params, expires_at=1.0), "has expired"),
    "a peer that is not listed": (lambda params: changed(params, addresses=["192.0.2.1:9"]), "192.0.2.1:9"),
    "another prompt": (lambda params: changed(params, prompt_hash=b"0" * 32), "another prompt"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_nothing_is_sent_for_an_offer_that_is_refused(what: str, no_connections: list[Any]) -> None:
    producer, consumer = Engine(role="kv_producer"), Engine(role="kv_consumer")
    try:
        spoil, message = REFUSED[what]
        params = producer.hold("p")
        with pytest.raises(ValueError, match=message):
            consumer.remote(spoil(params))
        for tokens in ([1, *TOKENS[1:]], TOKENS[:12], [*TOKENS, 1]):
            with pytest.raises(OfferError, match="another prompt"):
                consumer.remote(params, tokens=tokens)
        assert not consumer.scheduler.has_pending
        consumer.step(idle=True)
        assert not producer.step(idle=True).sent and not no_connections
        assert consumer.load(consumer.remote(params)).loaded == {"r"}  # the genuine one was not used up
        assert {opened(params).addresses[0].rpartition(":")[2]} <= {str(port) for _, port in no_connections}
        no_connections.clear()
        with pytest.raises(OfferError, match="accepted once"):
            consumer.remote(params, "again")
        consumer.step(idle=True)
        assert not no_connections
    finally:
        consumer.shutdown()
        producer.shutdown()


def test_requests_of_another_cache_salt() -> None:
    both = Offers(KEY, (), 30.0)
    with pytest.raises(OfferError, match="another cache_salt"):
        both.accept(made(both), request(salt="s"))


def test_a_restart_of_the_workers_keeps_what_was_accepted() -> None:
    """A request that had not begun is checked again; an offer that was used stays used."""
    producer, before, after = Engine(role="kv_producer"), Engine(role="kv_consumer"), Engine(role="kv_consumer")
    try:
        used, waiting = producer.hold("used"), producer.hold("waiting")
        assert before.load(before.remote(used)).loaded == {"r"}
        before.remote(waiting, "w")
        after.scheduler.inherit(before.scheduler)
        with pytest.raises(OfferError, match="accepted once"):
            after.remote(used)
        assert after.load(after.remote(waiting, "w")).loaded == {"w"}
        with pytest.raises(OfferError, match="accepted once"):
            after.remote(waiting, "again")
    finally:
        for engine in (producer, before, after):
            engine.shutdown()

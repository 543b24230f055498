"""Offers of KV: a description of KV that an engine holds, as one string that its clients can carry and cannot make.

The engine signs it with the cluster key. Another engine accepts it once, for the same prompt, before it expires,
and only if it names peers that the operator has listed. All of that is checked before anything is sent.

A request for the prefill engine has ``kv_transfer_params`` ``{"do_remote_decode": True}``. Those of its output,
``{"do_remote_prefill": True, "offer": ...}``, go unchanged into the request for the decode engine, as llm-d's sidecar
and vllm-router pass them on. Names are vLLM's where the meaning is the same. Those of addresses and blocks are accepted
as null: the offer has them.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import ipaddress
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from fleetfoot.records.request import Request
from fleetfoot.utils.cluster_key import SIGNATURE_BYTES, ClusterKey
from fleetfoot.utils.sockets import parse_address
from fleetfoot.utils.validation import FieldError, as_network, is_loopback, unknown_keyword

MAX_OFFER_CHARS = 1 << 16
MAX_REMEMBERED = 1 << 18
"""Accepted offers that have not expired. Further ones are refused: a replay would not be noticed."""
DO_REMOTE_DECODE = "do_remote_decode"
DO_REMOTE_PREFILL = "do_remote_prefill"
OFFER = "offer"
_SWITCHES = (DO_REMOTE_DECODE, DO_REMOTE_PREFILL)
_NULLS = frozenset(f"remote_{name}" for name in ("engine_id", "request_id", "block_ids", "host", "port", "num_tokens"))
"""Names of vLLM's that routers send without values to a prefill engine."""
FIELD = "kv_transfer_params.offer"
_PURPOSE = "kv-offer"


class OfferError(FieldError):
    """An offer is refused, and nothing was sent."""


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="fleetfoot-offer-1"):
    """KV that an engine holds for a request."""

    request_id: str
    """The request of the engine that has computed it."""
    prompt_hash: bytes
    """`prompt_hash` of it."""
    engine_id: str
    engine: dict[str, Any]
    """What must be equal on both engines, the identity of the weights included."""
    addresses: list[str]
    """``host:port`` of the side channel of each rank."""
    lease: str
    """A secret name for the held blocks."""
    num_tokens: int
    """From the beginning of the prompt."""
    expires_at: float
    """Seconds since the epoch."""
    nonce: bytes


_DECODER = msgspec.msgpack.Decoder(Offer)


def prompt_hash(request: Request) -> bytes:
    """A digest of a request's prompt and ``cache_salt``, 32 bytes."""
    salt = (request.cache_salt or "").encode()
    digest = hashlib.blake2b(len(salt).to_bytes(8, "big") + salt, digest_size=32)
    digest.update(request.prompt_token_ids)
    return digest.digest()


class Offers:
    """Makes the offers of an engine, and accepts those of others.

    Args:
        key: of the deployment.
        peers: ``host``, ``host:port`` or the network of the engines whose offers are accepted; (): those on loopback.
        lifetime: seconds for which an offer can be accepted.
        clock: seconds since the epoch; other engines' clocks must agree with it much better than ``lifetime``.
    """

    def __init__(
        self, key: ClusterKey, peers: Sequence[str], lifetime: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._key, self._peers, self._lifetime, self._clock = key, frozenset(peers), lifetime, clock
        self._networks = tuple(network for peer in peers if (network := as_network(peer)))
        self._used: dict[bytes, float] = {}  # nonce of an accepted offer -> when it expires

    def make(
        self, request: Request, *, engine_id: str, engine: dict[str, Any], addresses: list[str], num_tokens: int
    ) -> tuple[Offer, str]:
        """An offer of the request's KV, with a new lease, and its text."""
        lease, now = secrets.token_hex(16), self._clock()
        about = request.request_id, prompt_hash(request), engine_id, engine, addresses, lease, num_tokens
        offer = Offer(*about, now + self._lifetime, secrets.token_bytes(16))
        return offer, self.text_of(offer)

    def text_of(self, offer: Offer) -> str:
        """The signature and the content, in base64."""
        content = msgspec.msgpack.encode(offer)
        return base64.urlsafe_b64encode(self._key.sign(_PURPOSE, content) + content).decode()

    def accept(self, text: Any, request: Request) -> Offer:
        """The offer of a request, once. Raises OfferError: it is none of this deployment, has expired, was accepted
        before, or is of another prompt or of an engine that is not listed."""
        offer, now = self._verified(text), self._clock()
        if offer.expires_at <= now:
            raise OfferError(FIELD, f"has expired {now - offer.expires_at:.0f} seconds ago; compute the prompt again")
        if offer.prompt_hash != prompt_hash(request):
            raise OfferError(FIELD, "is of another prompt, or of another cache_salt")
        for address in offer.addresses:
            if not self._is_listed(address):
                raise OfferError(
                    FIELD,
                    f"names the peer {address}, which is not among the peers of this engine "
                    f"({', '.join(sorted(self._peers)) or 'those on loopback'}); list it in "
                    "kv_connector_extra_config['peers']",
                )
        self._remember(offer, now)
        return offer

    def release(self, offer: Offer) -> None:
        """Let an offer be accepted again: its request was not computed, and is checked once more."""
        self._used.pop(offer.nonce, None)

    def _verified(self, text: Any) -> Offer:
        try:
            if not isinstance(text, str) or len(text) > MAX_OFFER_CHARS:
                raise ValueError
            data = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True)
            content = data[SIGNATURE_BYTES:]
            if not self._key.verify(data[:SIGNATURE_BYTES], _PURPOSE, content):
                raise ValueError
            return _DECODER.decode(content)
        except (ValueError, binascii.Error, msgspec.MsgspecError):
            raise OfferError(
                FIELD,
                f"is {text!r:.40}, which no engine with this cluster key has made; give the string in a "
                "prefill engine's output, unchanged",
            ) from None

    def _is_listed(self, address: str) -> bool:
        host = parse_address(address)[0]
        if not self._peers:
            return is_loopback(host)
        with contextlib.suppress(ValueError):  # of a name, which no network has
            if any(ipaddress.ip_address(host) in network for network in self._networks):
                return True
        return not self._peers.isdisjoint((host, address))

    def _remember(self, offer: Offer, now: float) -> None:
        if offer.nonce in self._used:
            raise OfferError(FIELD, "is that of an earlier request; each offer is accepted once")
        while self._used and next(iter(self._used.values())) <= now:
            del self._used[next(iter(self._used))]
        if len(self._used) >= MAX_REMEMBERED:
            raise OfferError(FIELD, f"is one of more than {MAX_REMEMBERED} within its lifetime; try again later")
        self._used[offer.nonce] = offer.expires_at


# --- kv_transfer_params ---------------------------------------------------------------------------------------------


def is_remote_decode(params: Mapping[str, Any] | None) -> bool:
    """Whether the parameters hold the prompt's KV for another engine."""
    return params is not None and bool(params.get(DO_REMOTE_DECODE))


def parse_params(params: Mapping[str, Any]) -> str | None:
    """The offer of KV that a request is to be loaded from; None: ``do_remote_prefill`` is not set.

    Raises:
        ValueError, TypeError: a name is unknown, or a value is missing or invalid.
    """
    for name, value in params.items():
        if name in _NULLS:
            if value is not None:
                text = f"is {value!r}; requests name no address and no block, those of KV are in {OFFER}"
                raise FieldError(f"kv_transfer_params.{name}", text, value)
        elif name not in (*_SWITCHES, OFFER):
            raise unknown_keyword("kv_transfer_params", name, [*_SWITCHES, OFFER])
    for name in _SWITCHES:
        if not isinstance(params.get(name, False), bool):
            raise FieldError(
                f"kv_transfer_params.{name}", f"is {params[name]!r}; it must be true or false", params[name]
            )
    if not params.get(DO_REMOTE_PREFILL):
        return None
    if params.get(DO_REMOTE_DECODE):
        raise FieldError(
            "kv_transfer_params", f"has {DO_REMOTE_DECODE} and {DO_REMOTE_PREFILL}, which exclude each other"
        )
    offer = params.get(OFFER)
    if not isinstance(offer, str) or not offer:
        raise FieldError(
            f"kv_transfer_params.{OFFER}", f"is {offer!r}; it must be that of the prefill engine's output", offer
        )
    return offer


def offer_params(offer: str) -> dict[str, Any]:
    """The ``kv_transfer_params`` of the prefill engine's output."""
    return {DO_REMOTE_PREFILL: True, DO_REMOTE_DECODE: False, OFFER: offer}

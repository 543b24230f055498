"""The NIXL connector's settings, and a step's metadata. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fleetfoot.config import env
from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.base.connector import MAX_THREADS, ConnectorSettings, TransferContext
from fleetfoot.kv_transfer.base.offers import Offer
from fleetfoot.utils.sockets import parse_address
from fleetfoot.utils.validation import as_network, is_host

BACKENDS = ("nixl", "tcp")
DEFAULT_HOST = "127.0.0.1"
MAX_PORT = 65535
DEFAULT_LEASE_SECONDS = 30
RENEW_SECONDS = 2.0
"""Between a consumer's renewals of its leases."""
DEFAULT_ABORT_SECONDS = 480
DEFAULT_BUFFER_BYTES = 64 << 20
DEFAULT_NUM_THREADS = 4


# --- settings -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NixlSettings:
    """``kv_connector_extra_config`` of the connector."""

    backend: str
    """``nixl``, or ``tcp``: plain sockets."""
    side_channel_host: str
    """The address of this machine for other engines."""
    side_channel_port: int
    """The port of rank 0; rank r uses this plus r. 0: any free ports."""
    kv_lease_duration: int
    """Seconds after which blocks that were not read are released, unless their consumer renews the lease."""
    abort_timeout: int
    """Seconds after which blocks that were not read are released in any case."""
    buffer_bytes: int
    """Bytes of receive memory on each rank."""
    num_threads: int
    """Concurrent loads of a rank."""
    peers: tuple[str, ...] = ()
    """``host``, ``host:port`` or a network (``10.1.0.0/16``) of the engines that KV is loaded from, as their
    ``side_channel_host``; (): engines on loopback."""

    @classmethod
    def of(cls, config: KVTransferConfig, *, num_ranks: int = 1) -> NixlSettings:
        """Settings of an engine of ``num_ranks``, each with its own port; ValueError or TypeError if a setting is
        invalid."""
        settings = ConnectorSettings(config)
        backend = settings.text("backend") or BACKENDS[0]
        if backend not in BACKENDS:
            raise settings.error("backend", backend, " or ".join(BACKENDS))
        given = env.nixl_side_channel()
        host = settings.text("side_channel_host") or given.host or DEFAULT_HOST
        if host == "0.0.0.0" or not is_host(host):  # other engines connect to this very address
            expected = "an address of this machine that other engines reach it by, a name or an IPv4 address"
            raise settings.error("side_channel_host", host, f"{expected}; the port is side_channel_port")
        port = settings.integer("side_channel_port", given.port, minimum=0, maximum=MAX_PORT)
        if port > MAX_PORT + 1 - num_ranks:
            expected = f"at most {MAX_PORT + 1 - num_ranks}: rank r of {num_ranks} takes this plus r"
            raise settings.error("side_channel_port", port, expected)
        lease_duration = settings.integer("kv_lease_duration", DEFAULT_LEASE_SECONDS, minimum=5)
        abort_timeout = settings.integer("abort_timeout", DEFAULT_ABORT_SECONDS)
        buffer_bytes = settings.integer("buffer_bytes", DEFAULT_BUFFER_BYTES)
        num_threads = settings.integer("num_threads", DEFAULT_NUM_THREADS, maximum=MAX_THREADS)
        peers = settings.texts("peers")
        for peer in peers:
            if not _is_peer(peer):
                raise settings.error("peers", peer, "a list of hosts, host:port or networks of other engines")
        settings.check_all_read()
        return cls(backend, host, port, lease_duration, abort_timeout, buffer_bytes, num_threads, peers)


def _is_peer(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return as_network(text) is not None or is_host(text) or is_host(parse_address(text)[0])
    return False


# --- descriptions ---------------------------------------------------------------------------------------------------


def engine_description(context: TransferContext, weights: str = "") -> dict[str, Any]:
    """What must be equal on both engines. ``weights``: as of `SchedulerConnector.reset_cache`."""
    return {
        "tp_size": context.tensor_parallel_size,
        "pp_size": context.pipeline_parallel_size,
        "block_size": context.block_size,
        "dtype": context.dtype,
        "fingerprint": weights or context.fingerprint,
    }


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """How the description of another engine differs from this engine's; empty: it does not."""
    return "; ".join(
        f"its {name} is {theirs.get(name)!r}, and {ours.get(name)!r} here"
        for name in {**ours, **theirs}
        if theirs.get(name) != ours.get(name)
    )


# --- a step's metadata ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Hold:
    """Blocks of a request that has ended, which a consumer may read."""

    lease: str
    request_id: str
    block_ids: list[list[int]]
    """The last ones of the prompt in each group of layers: of a window as many as are read after it."""


@dataclass(slots=True)
class LoadSpec:
    """Blocks that a request waits for."""

    request_id: str
    offer: Offer
    block_ids: list[list[int]]
    """The destination: of each group, for as many blocks from the end of those of the lease."""
    refusal: str = ""
    """Why they cannot be loaded, and the lease is declined; empty if they can."""


@dataclass(slots=True)
class NixlMetadata:
    """The transfers of a step."""

    holds: list[Hold] = field(default_factory=list)
    loads: list[LoadSpec] = field(default_factory=list)
    declines: list[Offer] = field(default_factory=list)
    """Leases that will not be read."""
    renewals: list[Offer] = field(default_factory=list)
    """Leases of requests that wait or load."""
    evictions: list[str] = field(default_factory=list)
    """Leases of blocks that other requests need."""

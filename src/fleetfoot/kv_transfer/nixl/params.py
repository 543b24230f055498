"""The NIXL connector's settings, the ``kv_transfer_params`` of requests and outputs, and a step's metadata. No torch.

A request for the prefill engine has ``{"do_remote_decode": True}``. The ``kv_transfer_params`` of its output, the
fields of `RemotePrefill` with ``do_remote_prefill`` True, go unchanged into the request for the decode engine. Names
are vLLM's where the meaning is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.base.connector import MAX_THREADS, ConnectorSettings, TransferContext
from fleetfoot.kv_transfer.base.sockets import parse_address
from fleetfoot.utils.validation import is_host, unknown_keyword

BACKENDS = ("nixl", "tcp")
DEFAULT_HOST = "127.0.0.1"
MAX_PORT = 65535
DEFAULT_LEASE_SECONDS = 30
RENEW_SECONDS = 2.0
"""Between a consumer's renewals of its leases."""
DEFAULT_ABORT_SECONDS = 480
DEFAULT_BUFFER_BYTES = 64 << 20
DEFAULT_NUM_THREADS = 4
DO_REMOTE_DECODE = "do_remote_decode"
DO_REMOTE_PREFILL = "do_remote_prefill"
_SWITCHES = (DO_REMOTE_DECODE, DO_REMOTE_PREFILL)


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

    @classmethod
    def of(cls, config: KVTransferConfig, *, num_ranks: int = 1) -> NixlSettings:
        """For an engine of ``num_ranks``, each with its own port; ValueError or TypeError if a setting is invalid."""
        settings = ConnectorSettings(config)
        backend = settings.text("backend") or BACKENDS[0]
        if backend not in BACKENDS:
            raise settings.error("backend", backend, " or ".join(BACKENDS))
        host = settings.text("side_channel_host") or DEFAULT_HOST
        if host == "0.0.0.0" or not is_host(host):  # other engines connect to this very address
            expected = "an address of this machine that other engines reach it by, a name or an IPv4 address"
            raise settings.error("side_channel_host", host, f"{expected}; the port is side_channel_port")
        port = settings.integer("side_channel_port", 0, minimum=0, maximum=MAX_PORT)
        if port > MAX_PORT + 1 - num_ranks:
            expected = f"at most {MAX_PORT + 1 - num_ranks}: rank r of {num_ranks} takes this plus r"
            raise settings.error("side_channel_port", port, expected)
        lease_duration = settings.integer("kv_lease_duration", DEFAULT_LEASE_SECONDS, minimum=5)
        abort_timeout = settings.integer("abort_timeout", DEFAULT_ABORT_SECONDS)
        buffer_bytes = settings.integer("buffer_bytes", DEFAULT_BUFFER_BYTES)
        num_threads = settings.integer("num_threads", DEFAULT_NUM_THREADS, maximum=MAX_THREADS)
        settings.check_all_read()
        return cls(backend, host, port, lease_duration, abort_timeout, buffer_bytes, num_threads)


# --- kv_transfer_params ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """The ``kv_transfer_params`` of a request for the decode engine: KV that an engine holds for it."""

    remote_engine_id: str
    remote_request_id: str
    remote_addresses: list[str]
    """``host:port`` of the side channel of each rank."""
    remote_lease: str
    """A secret name for the held blocks."""
    remote_num_tokens: int
    """From the beginning of the prompt."""
    remote_prefix_hash: str
    """The chain hash of the last block."""
    remote_engine: dict[str, Any]
    """`engine_description`."""

    def as_params(self) -> dict[str, Any]:
        """The ``kv_transfer_params`` of the prefill engine's output."""
        return {DO_REMOTE_PREFILL: True, DO_REMOTE_DECODE: False, **asdict(self)}


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


def is_remote_decode(params: Mapping[str, Any] | None) -> bool:
    """Whether the parameters hold the prompt's KV for another engine."""
    return params is not None and bool(params.get(DO_REMOTE_DECODE))


def parse_params(params: Mapping[str, Any]) -> RemotePrefill | None:
    """The KV that a request is to be loaded from; None: ``do_remote_prefill`` is not set.

    Raises:
        ValueError, TypeError: a name is unknown, or a value is missing or invalid.
    """
    names = [entry.name for entry in fields(RemotePrefill)]
    for name in params:
        if name not in (*_SWITCHES, *names):
            raise unknown_keyword("kv_transfer_params", name, [*_SWITCHES, *names])
    for name in _SWITCHES:
        if not isinstance(params.get(name, False), bool):
            raise _invalid(name, params[name], "true or false")
    if not params.get(DO_REMOTE_PREFILL):
        return None
    if params.get(DO_REMOTE_DECODE):
        raise ValueError(f"kv_transfer_params: {DO_REMOTE_DECODE} and {DO_REMOTE_PREFILL} exclude each other")
    for name in names:
        is_valid, expected = _RULES.get(name, _TEXT)
        if not is_valid(params.get(name)):
            raise _invalid(name, params.get(name), expected)
    return RemotePrefill(**{name: params[name] for name in names})


def _are_addresses(value: Any) -> bool:
    try:
        return isinstance(value, list | tuple) and bool([parse_address(str(address)) for address in value])
    except ValueError:
        return False


_TEXT = (lambda value: isinstance(value, str) and value != "", "a string that is not empty")
_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "remote_num_tokens": (lambda value: type(value) is int and value > 0, "an integer of at least 1"),
    "remote_engine": (lambda value: isinstance(value, dict), "an object"),
    "remote_addresses": (_are_addresses, "a list of host:port, one for each rank"),
}
"""Field of `RemotePrefill` -> whether a value is valid, and what it must be; `_TEXT` for the others."""


def _invalid(name: str, value: Any, expected: str) -> ValueError:
    return ValueError(
        f"kv_transfer_params: {name} is {value!r}; it must be {expected}, as in the prefill engine's output"
    )


# --- a step's metadata ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Hold:
    """Blocks of a request that has ended, which a consumer may read."""

    lease: str
    request_id: str
    block_ids: list[int]


@dataclass(slots=True)
class LoadSpec:
    """Blocks that a request waits for."""

    request_id: str
    remote: RemotePrefill
    first: int
    """Index of the first block to read among those of the lease."""
    block_ids: list[int]
    """The destination."""
    refusal: str = ""
    """Why they cannot be loaded, and the lease is declined; empty if they can."""


@dataclass(slots=True)
class NixlMetadata:
    """The transfers of a step."""

    holds: list[Hold] = field(default_factory=list)
    loads: list[LoadSpec] = field(default_factory=list)
    declines: list[RemotePrefill] = field(default_factory=list)
    """Leases that will not be read."""
    renewals: list[RemotePrefill] = field(default_factory=list)
    """Leases of requests that wait or load."""
    evictions: list[str] = field(default_factory=list)
    """Leases of blocks that other requests need."""

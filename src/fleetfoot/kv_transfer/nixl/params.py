"""``kv_transfer_params`` of requests and outputs, with vLLM's names where there are such. No torch.

A request for the prefill engine says ``{"do_remote_decode": True}``. Its output then says where its KV can be had, and
that goes into the request for the decode engine as it is:

    do_remote_prefill   True
    remote_engine_id    the engine that lends
    remote_request_id   which request of it
    remote_addresses    host:port of the side channel of each of its ranks
    remote_lease        what is lent; nobody else knows the name
    remote_num_tokens   how many tokens of the prompt's beginning
    remote_prefix_hash  which tokens those are: the chain hash of their last block
    remote_engine       what must be equal there and here: fingerprint, dtype, block_size, tp_size, pp_size
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fleetfoot.kv_transfer.base.connector import TransferContext
from fleetfoot.kv_transfer.base.sockets import parse_address
from fleetfoot.utils.validation import unknown_keyword

DO_REMOTE_DECODE = "do_remote_decode"
DO_REMOTE_PREFILL = "do_remote_prefill"


@dataclass(frozen=True, slots=True)
class Source:
    """Where the KV of a request can be had."""

    engine_id: str
    addresses: list[str]
    """Of each rank's side channel."""
    lease: str


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """What a decode engine's request says."""

    remote_engine_id: str
    remote_request_id: str
    remote_addresses: list[str]
    remote_lease: str
    remote_num_tokens: int
    remote_prefix_hash: str
    remote_engine: dict[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> Source:
        return Source(self.remote_engine_id, self.remote_addresses, self.remote_lease)

    def as_params(self) -> dict[str, Any]:
        """What the prefill engine's output says."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {DO_REMOTE_PREFILL: True, DO_REMOTE_DECODE: False, **values}


def engine_description(context: TransferContext, fingerprint: str) -> dict[str, Any]:
    """``remote_engine``."""
    return {
        "tp_size": context.tensor_parallel_size,
        "pp_size": context.pipeline_parallel_size,
        "block_size": context.block_size,
        "dtype": context.dtype,
        "fingerprint": fingerprint,
    }


def wants_remote_decode(params: Mapping[str, Any] | None) -> bool:
    return params is not None and bool(params.get(DO_REMOTE_DECODE))


def parse_params(params: Mapping[str, Any]) -> RemotePrefill | None:
    """The KV that a request wants to have; None: it wants none.

    Raises:
        ValueError, TypeError: there are names that mean nothing, values of other types, or some are missing.
    """
    names = [entry.name for entry in fields(RemotePrefill)]
    for name in params:
        if name not in (DO_REMOTE_DECODE, DO_REMOTE_PREFILL, *names):
            raise unknown_keyword("kv_transfer_params", name, [DO_REMOTE_DECODE, DO_REMOTE_PREFILL, *names])
    for name in (DO_REMOTE_DECODE, DO_REMOTE_PREFILL):
        if not isinstance(params.get(name, False), bool):
            raise _wrong(name, params[name], "true or false")
    if params.get(DO_REMOTE_DECODE) and params.get(DO_REMOTE_PREFILL):
        raise ValueError(f"kv_transfer_params: {DO_REMOTE_DECODE} and {DO_REMOTE_PREFILL} exclude each other")
    if not params.get(DO_REMOTE_PREFILL):
        return None
    for name in ("remote_engine_id", "remote_request_id", "remote_lease", "remote_prefix_hash"):
        if not isinstance(params.get(name), str) or not params[name]:
            raise _wrong(name, params.get(name), "a string that is not empty")
    num_tokens = params.get("remote_num_tokens")
    if not isinstance(num_tokens, int) or isinstance(num_tokens, bool) or num_tokens < 1:
        raise _wrong("remote_num_tokens", num_tokens, "an integer of at least 1")
    if not isinstance(params.get("remote_engine"), dict):
        raise _wrong("remote_engine", params.get("remote_engine"), "an object")
    _check_addresses(params.get("remote_addresses"))
    return RemotePrefill(**{name: params[name] for name in names})


def _check_addresses(addresses: Any) -> None:
    expected = "a list of host:port, one for each rank"
    if not isinstance(addresses, list | tuple) or not addresses:
        raise _wrong("remote_addresses", addresses, expected)
    for address in addresses:
        try:
            parse_address(str(address))
        except ValueError:
            raise _wrong("remote_addresses", addresses, expected) from None


def _wrong(name: str, value: Any, expected: str) -> ValueError:
    return ValueError(
        f"kv_transfer_params: {name} is {value!r}; it must be {expected}, as the prefill engine's output says it"
    )

"""The settings of the NIXL connector."""

from __future__ import annotations

from dataclasses import dataclass

from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.base.connector import MAX_THREADS, ConnectorSettings
from fleetfoot.kv_transfer.nixl.agents import BACKENDS
from fleetfoot.utils.validation import is_host

DEFAULT_HOST = "127.0.0.1"


LAST_PORT = 65535


DEFAULT_ABORT_SECONDS = 480


DEFAULT_BUFFER_BYTES = 64 << 20


DEFAULT_NUM_THREADS = 4


@dataclass(frozen=True, slots=True)
class NixlSettings:
    """What ``kv_connector_extra_config`` says."""

    backend: str
    """``nixl``, or ``tcp``: plain sockets."""
    side_channel_host: str
    """The address that other engines reach this machine by."""
    side_channel_port: int
    """Of rank 0; rank r has this plus r. 0: any that are free."""
    abort_timeout: int
    """Seconds after which blocks that nobody has read are given back."""
    buffer_bytes: int
    """Of memory on each rank that KV arrives in."""
    num_threads: int
    """Loads of a rank that go on at the same time."""

    @classmethod
    def of(cls, config: KVTransferConfig, *, num_ranks: int = 1) -> NixlSettings:
        """
        Args:
            num_ranks: of the engine; each has a port of its own.

        Raises:
            ValueError, TypeError: a setting is unknown or has a value that means nothing.
        """
        settings = ConnectorSettings(config)
        backend = settings.text("backend") or BACKENDS[0]
        if backend not in BACKENDS:
            raise settings.error("backend", backend, " or ".join(BACKENDS))
        host = settings.text("side_channel_host") or DEFAULT_HOST
        if host == "0.0.0.0" or not is_host(host):  # other engines are told to come to this very address
            raise settings.error(
                "side_channel_host",
                host,
                "an address of this machine that other engines reach it by, a name or an IPv4 address; the port is "
                "side_channel_port",
            )
        port = settings.integer("side_channel_port", 0, minimum=0, maximum=LAST_PORT)
        abort_timeout = settings.integer("abort_timeout", DEFAULT_ABORT_SECONDS)
        buffer_bytes = settings.integer("buffer_bytes", DEFAULT_BUFFER_BYTES)
        num_threads = settings.integer("num_threads", DEFAULT_NUM_THREADS, maximum=MAX_THREADS)
        settings.check_all_read()
        assert port is not None and abort_timeout is not None
        assert buffer_bytes is not None and num_threads is not None  # their defaults are not
        if port > LAST_PORT + 1 - num_ranks:
            raise settings.error(
                "side_channel_port",
                port,
                f"at most {LAST_PORT + 1 - num_ranks}: rank r of {num_ranks} takes this plus r",
            )
        return cls(backend, host, port, abort_timeout, buffer_bytes, num_threads)

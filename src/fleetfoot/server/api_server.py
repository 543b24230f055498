"""An API server: HTTP in front of an engine, in the process of `serve` or, beside others, in one of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import uvicorn
import uvloop

from fleetfoot.config import env
from fleetfoot.engine.client import EngineClient
from fleetfoot.server.app import CorsSettings, make_app
from fleetfoot.server.connections import ConnectionChannel, accepted
from fleetfoot.server.engine_group import EngineGroup, GroupLink
from fleetfoot.server.http_protocol import LimitedHttp, no_callback
from fleetfoot.server.liveness import Liveness, cpu_use
from fleetfoot.server.own_engine import OwnEngine, OwnEngineLink
from fleetfoot.server.replicas import Replicas, ReplicasLink
from fleetfoot.server.service import Service, ServiceSettings
from fleetfoot.server.store import ResponseStore, StoreClient
from fleetfoot.utils.logs import log_to_stderr
from fleetfoot.utils.process import tune_collections
from fleetfoot.utils.validation import is_loopback

logger = logging.getLogger(__name__)

EXIT_INTERRUPTED = 130
BACKLOG = 2048
"""Connections that wait to be accepted."""
_SWITCH_S = 0.001
"""Seconds after which a thread that reads a large body leaves the interpreter to the event loop."""
_LAST_SECONDS = 2
"""Seconds for clients to take what ends their requests."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of ``fleetfoot serve`` besides the engine's."""

    service: ServiceSettings
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""
    uds: str | None = None
    """Path of a Unix socket, in place of host and port."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key: str | None = field(default=None, repr=False)
    """The key of the routes that change the engine; None: there are no such routes."""
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    """Certificates that clients must have one of."""
    api_server_count: int = 1
    shutdown_timeout: float = 30.0
    """Seconds that unfinished requests have after SIGTERM."""
    log_level: int = logging.INFO
    log_format: str = "text"
    """``text`` or ``json``."""
    access_log: bool = False
    cors: CorsSettings | None = None
    """None: pages of other origins may send no requests."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that the Host header may have besides the machine's own, on loopback; ``*``: any."""

    @property
    def is_loopback(self) -> bool:
        """Whether other machines cannot reach the address."""
        return is_loopback(self.host)

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """See `fleetfoot.server.http.RequestGate`."""
        is_checked = self.uds is None and self.is_loopback and "*" not in self.allowed_hosts
        return tuple(map(str.lower, self.allowed_hosts)) if is_checked else None


Address = str | OwnEngine | Replicas | EngineGroup
"""An engine's process, one that may be started again, several of them, or engines that run elsewhere as one."""


def connected(address: Address) -> EngineClient:
    """A client of an engine, or of several as one."""
    if isinstance(address, str):
        return EngineClient(address)
    if isinstance(address, OwnEngine):
        return EngineClient(OwnEngineLink(address))
    return EngineClient(ReplicasLink(address) if isinstance(address, Replicas) else GroupLink(address))


class ApiServer:
    """HTTP in front of an engine's process, in this process.

    Args:
        address: of the engine's socket.
        store: of responses.
        listener: accepts connections.
        channel: brings connections that a supervisor has accepted.
    """

    def __init__(
        self,
        address: Address,
        settings: ServerSettings,
        store: ResponseStore,
        listener: socket.socket | None = None,
        channel: ConnectionChannel | None = None,
    ) -> None:
        self.client = connected(address)
        self.exit_code = 0
        self.stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done after the first signal."""
        self._settings = settings
        self._listener = listener
        self._channel = channel
        is_here = not isinstance(address, EngineGroup)
        self._service = Service(
            self.client, settings.service, Liveness(self.client, cpu_use=cpu_use if is_here else None)
        )
        self._store = store
        self._server: _Uvicorn | None = None

    def watch_signals(self) -> None:
        """SIGTERM lets unfinished requests end; a second one, or SIGINT, aborts them."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._receive_signal, number)

    def _receive_signal(self, number: int) -> None:
        is_second = self.stopped.done()
        if number == signal.SIGINT:
            self.exit_code = EXIT_INTERRUPTED
        if not is_second:
            self.stopped.set_result(None)
            notify_service_manager("STOPPING=1\nSTATUS=waiting for unfinished requests")
            cause = "the server was stopped, and the time for unfinished requests is over"
            asyncio.get_running_loop().call_later(self._settings.shutdown_timeout, self.client.fail, cause)
        self._service.is_draining = True
        if self._server is not None:
            self._server.should_exit = True
            if is_second or number == signal.SIGINT:
                self._abort("the server was stopped")

    def _abort(self, cause: str) -> None:
        self.client.fail(cause)
        if self._server is not None:
            self._server.force_exit = True

    def fail(self, cause: str) -> None:
        """The engine has ended: end all requests, and the server."""
        logger.error(cause)
        self.exit_code = 1
        self.client.fail(cause)
        if self._server is not None:
            self._server.should_exit = True

    async def start(self) -> None:
        """Wait until the engine is ready."""
        await self.client.start()

    async def run(self) -> None:
        """Serve until a signal, or `fail`."""
        settings = self._settings
        config = uvicorn.Config(
            make_app(
                *(self._service, self._store, settings.api_keys, settings.root_path, settings.admin_key, settings.cors),
                logs_requests=settings.access_log,
                hosts=settings.hosts,
            ),
            http=LimitedHttp,
            ws="none",
            log_config=None,
            access_log=False,
            root_path=settings.root_path,
            backlog=BACKLOG,
            timeout_keep_alive=75,
            lifespan="off",
            timeout_graceful_shutdown=round(settings.shutdown_timeout) + _LAST_SECONDS,
            server_header=False,
            proxy_headers=False,  # a client would choose the address that it is known by
            ssl_keyfile=settings.ssl_keyfile,
            ssl_certfile=settings.ssl_certfile,
            ssl_ca_certs=settings.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_NONE if settings.ssl_ca_certs is None else ssl.CERT_REQUIRED,
        )
        self._server = _Uvicorn(config, self._listener, self._channel)
        if self.stopped.done():
            return
        tune_collections()
        sys.setswitchinterval(_SWITCH_S)
        watching = asyncio.ensure_future(self._service.liveness.run())
        await self._server.serve(sockets=[])
        watching.cancel()

    def close(self) -> None:
        self.client.fail("the API server has ended")  # requests that run in the background
        self._service.close()
        self.client.close()


class _Uvicorn(uvicorn.Server):
    """Leaves signals to `ApiServer`, and takes connections from a listener, or from a channel."""

    def __init__(
        self, config: uvicorn.Config, listener: socket.socket | None, channel: ConnectionChannel | None
    ) -> None:
        super().__init__(config)
        self._listener, self._channel = listener, channel
        self._accepting: asyncio.Task[None] | None = None
        self._connecting: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._channel is not None:
            self._channel.start(self._take)
        if self._listener is not None:
            self._accepting = asyncio.ensure_future(self._accept(self._listener))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._channel is not None:
            self._channel.stop()
        if self._accepting is not None and self._listener is not None:
            self._accepting.cancel()
            await asyncio.wait((self._accepting,))
            self._listener.close()
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        async for connection in accepted(listener):
            self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        task = asyncio.ensure_future(self._connect(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket) -> None:
        report = no_callback if self._channel is None else self._channel.report
        state = self.server_state
        protocol = LimitedHttp(config=self.config, server_state=state, app_state=self.lifespan.state)
        protocol.on_lost = report
        connect = asyncio.get_running_loop().connect_accepted_socket
        try:
            await connect(lambda: protocol, connection, ssl=self.config.ssl)
        except OSError:  # a TLS handshake has failed
            report()


@dataclass(frozen=True, slots=True)
class ChildSettings:
    """What an API server's process reads from standard input, pickled."""

    address: Address
    store: str
    """The address of the store that the API servers share."""
    settings: ServerSettings
    descriptor: int
    """The file descriptor of the channel for connections."""


def notify_service_manager(state: str) -> None:
    """Systemd's protocol; nothing without a service manager."""
    if address := env.notify_socket():
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)


async def _run(given: ChildSettings) -> int:
    channel = ConnectionChannel(socket.socket(fileno=given.descriptor))
    store = StoreClient(given.store)
    server = ApiServer(given.address, given.settings, store, channel=channel)
    server.watch_signals()

    def read_cause() -> None:
        """Read why all ends from the supervisor, or end with it."""
        if not (cause := os.read(0, 1 << 16)):
            os._exit(1)
        server.fail(cause.decode())

    asyncio.get_running_loop().add_reader(0, read_cause)
    await server.start()
    await server.run()
    server.close()
    return server.exit_code


def main() -> int:
    """Run an API server for the supervisor."""
    given: ChildSettings = pickle.load(sys.stdin.buffer)
    with log_to_stderr(given.settings.log_level, given.settings.log_format):
        return uvloop.run(_run(given))


if __name__ == "__main__":
    sys.exit(main())

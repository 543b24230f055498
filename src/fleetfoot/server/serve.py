"""Runs an engine's process and the API servers in front of it, until a signal ends them.

With one API server, this process is the server. With several, each is a child process, and this one passes connections
to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import uvloop

from fleetfoot.config.engine import EngineConfig
from fleetfoot.engine.client import EngineClient
from fleetfoot.server.api_server import (
    BACKLOG,
    EXIT_INTERRUPTED,
    Address,
    ApiServer,
    ServerSettings,
    connected,
    notify_service_manager,
)
from fleetfoot.server.api_servers import ApiServers
from fleetfoot.server.connections import Balancer
from fleetfoot.server.engine_group import EngineGroup
from fleetfoot.server.own_engine import OwnEngineProcess
from fleetfoot.server.replicas import ReplicaProcesses
from fleetfoot.server.store import MemoryStore, StoreServer
from fleetfoot.server.tracing import make_tracing
from fleetfoot.utils.logs import log_to_stderr
from fleetfoot.utils.own_files import OwnFolder, bound_unix_socket
from fleetfoot.utils.process import num_cores, raise_file_limit

logger = logging.getLogger(__name__)

_FILES_BESIDE = 128
"""What a server has open besides connections."""


def serve(engine: EngineConfig | EngineGroup, settings: ServerSettings) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code: 1 if the engine has failed.

    Args:
        engine: the settings of an engine, which is started in a process of its own; or engines that run elsewhere.

    Raises ValueError: the address cannot be listened on, or a file of the TLS settings cannot be read.
    """
    begin = time.perf_counter()
    with log_to_stderr(settings.log_level, settings.log_format), listening(settings) as listener:
        check_tls(settings)
        make_tracing(settings.service.otlp_traces_endpoint, "").close()  # so that an error ends the start
        if (limit := raise_file_limit()) < (needed := settings.service.max_queue + _FILES_BESIDE):
            logger.warning(
                "this process may open %d files (ulimit -Hn), and with as many connections as requests (--max-queue) "
                "needs about %d; further connections will wait",
                *(limit, needed),
            )
        notify_service_manager("STATUS=loading the model")
        if isinstance(engine, EngineGroup):
            backend: Backend = _Elsewhere(engine)
        else:
            kind = OwnEngineProcess if engine.num_replicas == 1 else ReplicaProcesses
            backend = kind(engine, settings.log_level, settings.log_format)
        try:
            run = _serve_here if settings.api_server_count == 1 else _supervise
            return uvloop.run(run(backend, settings, listener, begin))
        finally:
            backend.stop()


class Backend(Protocol):
    """What serves the engine's clients: `OwnEngineProcess`, `ReplicaProcesses`, or engines that run elsewhere."""

    @property
    def address(self) -> Address:
        """The argument of `connected`."""
        ...

    async def wait(self, client: EngineClient) -> str:
        """The cause, once it has ended for good. ``client``: of the engine."""
        ...

    def stop(self) -> int:
        """End it. Returns the exit code."""
        ...


class _Elsewhere:
    """Engines that neither start nor end with the server."""

    def __init__(self, group: EngineGroup) -> None:
        self.address = group

    async def wait(self, client: EngineClient) -> str:
        return await asyncio.get_running_loop().create_future()

    def stop(self) -> int:
        return 0


async def _serve_here(engine: Backend, settings: ServerSettings, listener: socket.socket, begin: float) -> int:
    server = ApiServer(engine.address, settings, make_store(settings), listener)
    ended = asyncio.ensure_future(engine.wait(server.client))
    server.watch_signals()
    starting = asyncio.ensure_future(server.start())
    await asyncio.wait((ended, starting, server.stopped), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        server.close()
        return engine.stop() if ended.done() else server.exit_code
    starting.result()
    try:
        _check_chat_template(server.client, settings)
    except ValueError:
        server.close()
        raise
    listener.setblocking(False)
    listener.listen(BACKLOG)  # connections wait until the server accepts them
    announce(settings, listener, begin)
    serving = asyncio.ensure_future(server.run())
    await asyncio.wait((ended, serving), return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        server.fail(ended.result())
    await serving
    exit_code = server.exit_code
    if not ended.done():
        await server.client.stop()
    server.close()
    return exit_code


def make_store(settings: ServerSettings) -> MemoryStore:
    return MemoryStore(settings.service.max_stored_responses, settings.service.max_stored_bytes)


async def _supervise(engine: Backend, settings: ServerSettings, listener: socket.socket, begin: float) -> int:
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.put_nowait, number)
    client = connected(engine.address)
    ended = asyncio.ensure_future(engine.wait(client))
    first = asyncio.ensure_future(signals.get())
    folder = OwnFolder("fleetfoot-store-")
    address = f"ipc://{folder.path / 'store'}"
    store = StoreServer(make_store(settings), address)
    balancer = Balancer(listener)
    servers = ApiServers(engine.address, address, settings, balancer)
    servers.start()
    lost, all_ended = asyncio.ensure_future(servers.lost()), asyncio.ensure_future(servers.ended())
    starting = asyncio.ensure_future(client.start())
    exit_code, is_ready = 0, False
    try:
        await asyncio.wait((ended, starting, first, lost), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            if first.done():
                return EXIT_INTERRUPTED if first.result() == signal.SIGINT else 0
            if ended.done():
                return engine.stop()
            logger.error(lost.result())
            return 1
        starting.result()
        is_ready = True
        _check_chat_template(client, settings)
        accepting = asyncio.ensure_future(_accept(balancer, servers, settings, listener, begin))
        await asyncio.wait((ended, first, accepting, lost), return_when=asyncio.FIRST_COMPLETED)
        if accepting.done():
            accepting.result()
        accepting.cancel()
        await asyncio.wait((accepting,))
        listener.close()
        if first.done():
            notify_service_manager("STOPPING=1\nSTATUS=waiting for unfinished requests")
            exit_code = EXIT_INTERRUPTED if first.result() == signal.SIGINT else 0
            servers.stop(first.result())
            while not all_ended.done():
                second = asyncio.ensure_future(signals.get())
                await asyncio.wait((ended, second, all_ended), return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    servers.fail(ended.result())
                    break
                if second.done():
                    servers.stop(signal.SIGINT)
                    break
                second.cancel()
        else:
            exit_code = 1
            cause = ended.result() if ended.done() else lost.result()
            logger.error(cause)
            servers.fail(cause)
        await all_ended
    finally:
        balancer.close()
        servers.kill()
        store.close()
        folder.close()
        if is_ready and not ended.done():
            await client.stop()
        client.close()
    return exit_code


async def _accept(
    balancer: Balancer, servers: ApiServers, settings: ServerSettings, listener: socket.socket, begin: float
) -> None:
    """Accept connections once all servers are ready."""
    await balancer.wait_ready()
    servers.are_replaced = True
    listener.setblocking(False)
    listener.listen(BACKLOG)
    announce(settings, listener, begin)
    await balancer.run()


@contextlib.contextmanager
def listening(settings: ServerSettings) -> Iterator[socket.socket]:
    """A bound socket, which is removed at the end. Connections are refused until it listens."""
    where = settings.uds or f"{settings.host}:{settings.port}"
    with contextlib.ExitStack() as stack:
        try:
            if settings.uds is not None:
                listener = stack.enter_context(bound_unix_socket(settings.uds))
            else:
                family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
                listener = stack.enter_context(socket.socket(family))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((settings.host, settings.port))
        except (OSError, OverflowError) as error:
            raise ValueError(f"cannot listen on {where} ({error}); choose another address") from error
        yield listener


def check_tls(settings: ServerSettings) -> None:
    """Raises ValueError: a file of the TLS settings cannot be used."""
    certificate, key, authorities = settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs
    for name, path in (("ssl_certfile", certificate), ("ssl_keyfile", key), ("ssl_ca_certs", authorities)):
        if path is not None:
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise ValueError(f"{name} is {path!r}, which cannot be read: {error.strerror}") from error
    if certificate is None:
        if given := [name for name in ("ssl_keyfile", "ssl_ca_certs") if getattr(settings, name)]:
            raise ValueError(f"{' and '.join(given)} need ssl_certfile")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for name, path in (("ssl_certfile", certificate), ("ssl_ca_certs", authorities)):
        if path is not None:
            try:
                context.load_verify_locations(path)
            except OSError as error:
                raise ValueError(f"{name} is {path!r}, which has no certificate that can be used: {error}") from error
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except (OSError, ValueError) as error:
        name = "ssl_certfile" if key is None else "ssl_keyfile"
        problem = f"no key for the certificate {certificate!r} that can be used"
        raise ValueError(f"{name} is {key or certificate!r}, which has {problem}: {error}") from error


def _no_password() -> str:
    raise ValueError("it needs a password, which cannot be given; write it without one")


def _check_chat_template(client: EngineClient, settings: ServerSettings) -> None:
    """Raises ValueError: the chat template is no Jinja, and the model has none of this name."""
    name, tokenizer = settings.service.chat_template, client.get_tokenizer()
    if name is None or "{" in name or tokenizer is None or name in tokenizer.chat_templates:
        return
    names = ", ".join(sorted(tokenizer.chat_templates)) or "none"
    raise ValueError(f"--chat-template {name} is neither a file nor a template of the model's ({names})")


def announce(settings: ServerSettings, listener: socket.socket, begin: float) -> None:
    """Log where the server listens, and notify a service manager."""
    if settings.uds is not None:
        where = settings.uds
    else:
        host, port = listener.getsockname()[:2]
        where = f"{'https' if settings.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    logger.info("ready after %.1f s, listening on %s", time.perf_counter() - begin, where)
    if settings.uds is None and not settings.is_loopback and not settings.api_keys:
        logger.warning("%s can be reached from other machines, and no key is required (--api-key)", where)
    notify_service_manager(f"READY=1\nSTATUS=listening on {where}")


def default_api_servers() -> int:
    """One for every four cores, up to four: a stream's event takes a server 10 to 30 µs."""
    return max(1, min(4, num_cores() // 4))

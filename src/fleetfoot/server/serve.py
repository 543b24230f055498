"""Runs an engine's process and the API servers in front of it, until a signal ends them.

With one API server, this process is the server. With several, each is a child process, and this one passes connections
to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import uvloop

from fleetfoot.config import env
from fleetfoot.config.engine import EngineConfig
from fleetfoot.engine.child_process import EngineProcess, process_end
from fleetfoot.engine.client import EngineClient
from fleetfoot.server.api_server import (
    BACKLOG,
    EXIT_INTERRUPTED,
    ApiServer,
    ChildSettings,
    ServerSettings,
    connected,
    notify_service_manager,
)
from fleetfoot.server.connections import Balancer
from fleetfoot.server.disaggregation.group import EngineGroup
from fleetfoot.server.store import MemoryStore, StoreServer
from fleetfoot.utils.logs import log_to_stderr
from fleetfoot.utils.process import num_cores

logger = logging.getLogger(__name__)


def serve(engine: EngineConfig | EngineGroup, settings: ServerSettings) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code: 1 if the engine has failed.

    Args:
        engine: the settings of an engine, which is started in a process of its own; or engines that run elsewhere.

    Raises ValueError: the address cannot be listened on, or a file of the TLS settings cannot be read.
    """
    begin = time.perf_counter()
    with log_to_stderr(settings.log_level, settings.log_format), listening(settings) as listener:
        check_tls(settings)
        notify_service_manager("STATUS=loading the model")
        if isinstance(engine, EngineGroup):
            backend: Backend = _Elsewhere(engine)
        else:
            backend = EngineProcess(engine, settings.log_level, settings.log_format)
        try:
            run = _serve_here if settings.api_server_count == 1 else _supervise
            return uvloop.run(run(backend, settings, listener, begin))
        finally:
            backend.stop()


class Backend(Protocol):
    """What serves the engine's clients: `EngineProcess`, or engines that run elsewhere."""

    @property
    def address(self) -> str | EngineGroup:
        """For `connected`."""
        ...

    async def wait(self) -> int:
        """The exit code, once it has ended."""
        ...

    def stop(self) -> int:
        """End it. Returns the exit code."""
        ...


class _Elsewhere:
    """Engines that neither start nor end with the server."""

    def __init__(self, group: EngineGroup) -> None:
        self.address = group

    async def wait(self) -> int:
        return await asyncio.get_running_loop().create_future()

    def stop(self) -> int:
        return 0


async def _serve_here(engine: Backend, settings: ServerSettings, listener: socket.socket, begin: float) -> int:
    ended = asyncio.ensure_future(engine.wait())
    server = ApiServer(engine.address, settings, make_store(settings), [listener])
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
    listener.listen(BACKLOG)  # connections wait until the server accepts them
    announce(settings, listener, begin)
    serving = asyncio.ensure_future(server.run())
    await asyncio.wait((ended, serving), return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        server.fail(f"the engine's process has ended with code {ended.result()}")
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
    ended = asyncio.ensure_future(engine.wait())
    first = asyncio.ensure_future(signals.get())
    client = connected(engine.address)
    folder = tempfile.TemporaryDirectory(prefix="fleetfoot-store-")
    address = f"ipc://{Path(folder.name) / 'store'}"
    store = StoreServer(make_store(settings), address)
    balancer = Balancer(listener)
    children = [_start_child(engine.address, address, settings, balancer) for _ in range(settings.api_server_count)]
    waits = {asyncio.ensure_future(process_end(child)): child for child in children}
    starting = asyncio.ensure_future(client.start())
    exit_code, is_ready = 0, False
    try:
        await asyncio.wait((ended, starting, first, *waits), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            if first.done():
                return EXIT_INTERRUPTED if first.result() == signal.SIGINT else 0
            return engine.stop() if ended.done() else 1
        starting.result()
        is_ready = True
        _check_chat_template(client, settings)
        accepting = asyncio.ensure_future(_accept(balancer, settings, listener, begin))
        await asyncio.wait((ended, first, accepting, *waits), return_when=asyncio.FIRST_COMPLETED)
        if accepting.done():
            accepting.result()
        accepting.cancel()
        await asyncio.wait((accepting,))
        listener.close()
        if first.done():
            notify_service_manager("STOPPING=1\nSTATUS=waiting for unfinished requests")
            exit_code = EXIT_INTERRUPTED if first.result() == signal.SIGINT else 0
            _signal_all(children, first.result())
            while not all(wait.done() for wait in waits):
                second = asyncio.ensure_future(signals.get())
                await asyncio.wait((ended, second, *waits), return_when=asyncio.FIRST_COMPLETED)
                if second.done() or ended.done():
                    _signal_all(children, signal.SIGINT)
                    break
                second.cancel()
        else:
            exit_code = 1
            lost = "the engine's process" if ended.done() else "an API server"
            logger.error("%s has ended", lost)
            _signal_all(children, signal.SIGINT)
        await asyncio.gather(*waits)
    finally:
        balancer.close()
        for child in children:
            child.kill()
        store.close()
        folder.cleanup()
        if is_ready and not ended.done():
            await client.stop()
        client.close()
    return exit_code


async def _accept(balancer: Balancer, settings: ServerSettings, listener: socket.socket, begin: float) -> None:
    """Accept connections once all servers are ready."""
    await balancer.wait_ready()
    listener.setblocking(False)
    listener.listen(BACKLOG)
    announce(settings, listener, begin)
    await balancer.run()


def _start_child(
    address: str | EngineGroup, store: str, settings: ServerSettings, balancer: Balancer
) -> subprocess.Popen[bytes]:
    with balancer.add_server() as channel:
        child = subprocess.Popen(
            [sys.executable, "-m", "fleetfoot.server.api_server"],
            stdin=subprocess.PIPE,
            pass_fds=(channel.fileno(),),
            env=env.for_child({}),
            start_new_session=True,  # the terminal's signals reach the supervisor alone
        )
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(pickle.dumps(ChildSettings(address, store, settings, channel.fileno())))
            child.stdin.flush()  # and stays open: its end is that of the supervisor
    return child


def _signal_all(children: list[subprocess.Popen[bytes]], number: int) -> None:
    for child in children:
        child.send_signal(number)


@contextlib.contextmanager
def listening(settings: ServerSettings) -> Iterator[socket.socket]:
    """A bound socket, which is removed at the end. Connections are refused until it listens."""
    is_path = settings.uds is not None
    listener = socket.socket(socket.AF_UNIX if is_path else _family(settings.host))
    target: Any = settings.uds if is_path else (settings.host, settings.port)
    try:
        if is_path:
            with contextlib.suppress(FileNotFoundError):
                if Path(target).is_socket():
                    Path(target).unlink()  # of a server that was killed
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
    except (OSError, OverflowError) as error:
        listener.close()
        where = target if is_path else f"{settings.host}:{settings.port}"
        raise ValueError(f"cannot listen on {where} ({error}); choose another address") from error
    try:
        yield listener
    finally:
        listener.close()
        if is_path:
            with contextlib.suppress(OSError):
                Path(target).unlink()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def check_tls(settings: ServerSettings) -> None:
    """Raises ValueError: a file of the TLS settings cannot be used."""
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile or settings.ssl_ca_certs:
            raise ValueError("ssl_keyfile and ssl_ca_certs need ssl_certfile")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
        if settings.ssl_ca_certs is not None:
            context.load_verify_locations(settings.ssl_ca_certs)
    except OSError as error:
        raise ValueError(f"the certificate or its key cannot be used: {error}") from error


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
    if settings.uds is None and not _is_loopback(settings.host) and not settings.api_keys:
        logger.warning("%s can be reached from other machines, and no key is required (--api-key)", where)
    notify_service_manager(f"READY=1\nSTATUS=listening on {where}")


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def default_api_servers() -> int:
    """One for every four cores, up to four: a stream's event takes a server 10 to 30 µs."""
    return max(1, min(4, num_cores() // 4))

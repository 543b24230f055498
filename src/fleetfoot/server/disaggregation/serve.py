"""Serves an engine on a TCP port, for a proxy and for clients in Python. What `fleetfoot engine` runs.

When requests are accepted, a line ``{"address": "host:port"}`` is written to standard output.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from fleetfoot.config.engine import EngineConfig
from fleetfoot.utils.cluster_key import ClusterKey

logger = logging.getLogger(__name__)


def serve_engine(config: EngineConfig, host: str, port: int, key: ClusterKey) -> int:
    """Load an engine and serve it until SIGINT or SIGTERM. Returns the exit code: 1 if the engine has failed.

    Args:
        port: 0: any free one.
        key: clients must have it.

    Raises:
        ValueError: the address cannot be listened on, or settings, model and machine do not fit together.
    """
    from fleetfoot.engine.engine import build_engine
    from fleetfoot.engine.link import engine_keys
    from fleetfoot.engine.output_router import OutputRouter
    from fleetfoot.engine.process import EngineServer, RemoteServer
    from fleetfoot.utils.curve import ClientCheck

    own, clients = engine_keys(key)
    context = zmq.Context()
    check = ClientCheck(context, clients[0])
    try:
        server = RemoteServer(context, own)
        with server.pollable as listener:
            address = bind(listener, host, port)  # before the engine is loaded, which may take minutes
            engine = build_engine(config, output_processor=OutputRouter)
            with _signal_pipe() as lifeline:
                print(json.dumps({"address": address}), flush=True)
                exit_code = EngineServer(engine, server, lifeline, can_stop=False).run()
            engine.shutdown()
    finally:
        check.close()
        context.term()
    return exit_code


def bind(listener: zmq.Socket[Any], host: str, port: int) -> str:
    """Listen; returns ``host:port``. Raises ValueError, with the reason, if the address cannot be bound."""
    try:
        if not 0 <= port < 1 << 16:
            raise OverflowError("a port is in [0, 65535]")
        family, _, _, _, (number, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        listener.ipv6 = family == socket.AF_INET6
        listener.bind(f"tcp://{f'[{number}]' if listener.ipv6 else number}:{port}")
    except (OSError, OverflowError, zmq.ZMQError) as error:
        raise ValueError(f"cannot listen on {host}:{port} ({error}); choose another host or port") from error
    endpoint: Any = listener.last_endpoint
    return str(endpoint, "ascii").removeprefix("tcp://").rstrip("\0")


@contextmanager
def _signal_pipe() -> Iterator[int]:
    """A file descriptor that gets data at SIGINT and SIGTERM."""
    reader, writer = os.pipe()
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.signal(number, lambda *_: os.write(writer, b".")) for number in numbers]
    try:
        yield reader
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)

"""Stores of torch.distributed that listen at one address, where torch's own listen on all interfaces."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def make_store(host: str, port: int = 0, *, timeout: timedelta = timedelta(seconds=300)) -> TCPStore:
    """A store that listens at ``host`` alone; port 0: any free one. Its clients are not authenticated. Raises OSError:
    nothing can listen there."""
    from torch.distributed import TCPStore  # importing torch takes seconds, which an engine on one machine saves

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=128)
    number = listener.getsockname()[1]
    descriptor = listener.detach()  # the store closes it
    return TCPStore(host, number, None, True, timeout, False, master_listen_fd=descriptor)

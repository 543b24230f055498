"""Ports of this machine, at vLLM's path."""

from __future__ import annotations

import socket


def get_open_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])

"""The sockets on which a process and its descendants listen."""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LISTENS = "0A"
"""The state of a TCP socket."""
_ACCEPTS = 0x10000
"""The flag of a Unix socket."""


def descendants(pid: int) -> Iterator[int]:
    """A process, and those that it or they have started."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in children.read_text().split():
                yield from descendants(int(child))


def listening(pids: Iterator[int]) -> set[str]:
    """``tcp HOST:PORT`` and ``unix PATH`` of each listening socket of processes."""
    inodes = set()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # it ends, or closes a file
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with suppress(FileNotFoundError):
                    if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{descriptor}")):
                        inodes.add(match[1])
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            (
                _,
                address,
                _,
                state,
                *_,
            ) = fields = line.split()
            if state == _LISTENS and fields[9] in inodes:
                host, _, port = address.partition(":")
                words = struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host))
                packed = struct.pack(f"={len(words)}I", *words)
                found.add(f"tcp {socket.inet_ntop(family, packed)}:{int(port, 16)}")
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & _ACCEPTS and fields[6] in inodes:
            found.add(f"unix {fields[7] if len(fields) > 7 else ''}")
    return found

"""Network interfaces, so that libraries which listen by themselves use those of the address that was given."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15


def interface_of(host: str) -> str | None:
    """The name of this machine's network interface with the address of ``host`` as its first IPv4 address; None: none
    has it."""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(host)
        if address.startswith("127."):
            address = "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # it has no IPv4 address
                    request = struct.pack("256s", name.encode()[:_NAME_BYTES])
                    if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]) == address:
                        return name
    return None


def local_address_to(host: str) -> str:
    """This machine's IPv4 address on the way to another one. Raises ValueError: there is no way."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(f"{host} cannot be reached from this machine: {error}") from error


def rdma_ports(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """``DEVICE:PORT`` of all RDMA devices, which have no addresses that strangers could connect to."""
    return [f"{port.parents[1].name}:{port.name}" for port in sorted(root.glob("*/ports/*"))]

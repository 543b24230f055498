"""The transfer agents by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetfoot.kv_transfer.nixl.transfer_agent import TransferAgent

if TYPE_CHECKING:
    pass


BACKENDS = ("nixl", "tcp")


def make_agent(backend: str, name: str, host: str) -> TransferAgent:
    """The agent that the setting ``backend`` names.

    Args:
        host: the address that peers reach this machine by.

    Raises:
        ValueError: it is not installed, or there is no such agent.
    """
    if backend == "nixl":
        from fleetfoot.kv_transfer.nixl.nixl_agent import NixlAgent

        return NixlAgent(name)
    if backend == "tcp":
        from fleetfoot.kv_transfer.nixl.tcp_agent import TcpAgent

        return TcpAgent(name, host)
    raise ValueError(f"backend is {backend!r}; it can be {', '.join(BACKENDS)}")

"""What the scheduler's side of the NIXL connector tells the workers' side in a step: plain records. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleetfoot.kv_transfer.nixl.params import Source


@dataclass(slots=True)
class Grant:
    """Blocks of a request that has ended, to be lent."""

    lease: str
    request_id: str
    block_ids: list[int]


@dataclass(slots=True)
class PullOrder:
    """Blocks that a request waits for."""

    request_id: str
    source: Source
    first: int
    """The first of them, counted among the lender's."""
    block_ids: list[int]
    """Where they go to."""
    refusal: str = ""
    """Not empty: they are not to be had, and why; the lender is to know that nobody comes."""


@dataclass(slots=True)
class NixlOrders:
    """A step's."""

    grants: list[Grant] = field(default_factory=list)
    pulls: list[PullOrder] = field(default_factory=list)
    declines: list[Source] = field(default_factory=list)
    """What nobody wants any more."""

    @property
    def is_empty(self) -> bool:
        return not (self.grants or self.pulls or self.declines)


NO_ORDERS = NixlOrders()


def orders_of(metadata: object | None) -> NixlOrders:
    """A step's metadata as these records; None: nothing.

    Raises:
        TypeError: the metadata is another connector's.
    """
    if metadata is None:
        return NO_ORDERS
    if not isinstance(metadata, NixlOrders):
        raise TypeError(f"KV connector metadata is a {type(metadata).__name__}; it must be NixlOrders or None")
    return metadata

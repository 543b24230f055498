"""What happens to the blocks of the prefix cache, for whoever wants to know it."""

from __future__ import annotations

from collections.abc import Sequence

from fleetfoot.records.request import Request


class KVEvents:
    """Gets the events of an engine's prefix cache, in their order. This one ignores them."""

    def stored(self, group: int, request: Request, blocks: Sequence[int]) -> None:
        """Blocks can be hit from now on. ``blocks``: their numbers in the request, in ascending order."""

    def state_stored(self, digest: bytes, group: int) -> None:
        """A recurrent state after the block with this hash can be hit from now on."""

    def removed(self, group: int, digest: bytes) -> None:
        """A block with this hash cannot be hit any more."""

    def cleared(self) -> None:
        """No block of any group can be hit any more."""

    def flush(self) -> None:
        """A step is scheduled, or has ended: send what has happened."""

    def close(self) -> None:
        """The engine ends."""


NO_KV_EVENTS = KVEvents()

"""Which KV block lies in which slot of host memory, and which one goes when a slot is wanted. No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class SlotIndex:
    """Whole blocks by their chain hash, the least recently used first. A pinned slot is not given away.

    Args:
        num_slots: slots are 0 .. num_slots - 1.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._digests: dict[int, bytes] = {}  # the other way round
        self._pins: dict[int, int] = {}  # slot -> how often it is pinned
        self._free = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._slots)

    def slot(self, digest: bytes) -> int | None:
        """Where the block is; None: it is not here."""
        return self._slots.get(digest)

    def add(self, digest: bytes) -> int | None:
        """A slot for a block that is not here yet, at the cost of the least recently used one that is not pinned.

        Returns:
            None: every slot is pinned.
        """
        if not self._free and not self._evict():
            return None
        slot = self._free.pop()
        self._slots[digest] = slot
        self._digests[slot] = digest
        return slot

    def touch(self, digests: Iterable[bytes]) -> None:
        """These have just been used, the last of them most recently; those that are not here are passed over."""
        for digest in digests:
            if digest in self._slots:
                self._slots.move_to_end(digest)

    def remove(self, digest: bytes) -> None:
        """The block is not here any more; its slot is free, once nothing pins it."""
        slot = self._slots.pop(digest, None)
        if slot is not None:
            del self._digests[slot]
            self._free_if_unused(slot)

    def clear(self) -> None:
        """No block is here any more."""
        for digest in list(self._slots):
            self.remove(digest)

    def pin(self, slot: int) -> None:
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        """Undo one `pin`."""
        left = self._pins.pop(slot) - 1
        if left:
            self._pins[slot] = left
        self._free_if_unused(slot)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every slot is free, or taken or pinned, and none twice."""
        used = set(self._digests) | set(self._pins)
        slots = sorted([*self._free, *used])
        if slots != list(range(self._num_slots)) or self._digests != {s: d for d, s in self._slots.items()}:
            raise RuntimeError(
                f"the slots of host memory are not consistent: free {self._free}, taken {dict(self._slots)}, "
                f"pinned {self._pins}"
            )

    def _evict(self) -> bool:
        victim = next((digest for digest, slot in self._slots.items() if slot not in self._pins), None)
        if victim is None:
            return False
        self.remove(victim)
        return True

    def _free_if_unused(self, slot: int) -> None:
        if slot not in self._pins and slot not in self._digests:
            self._free.append(slot)

"""Memory that processes share."""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np


class SharedWords:
    """int32 words in a file of memory, or in this process alone where the platform has no such files.

    Pages are there once they are written. ``descriptor``: of a file that another process has made; it is mapped, and
    stays open.
    """

    def __init__(self, num_words: int = 0, *, descriptor: int = -1, name: str = "fleetfoot") -> None:
        self.descriptor = descriptor
        """Other processes can map it; -1: they cannot."""
        if descriptor >= 0:
            num_words = os.fstat(descriptor).st_size // 4
        elif hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create(name)
            weakref.finalize(self, os.close, self.descriptor)
            os.ftruncate(self.descriptor, 4 * num_words)
        self.words = np.frombuffer(mmap.mmap(self.descriptor, 4 * num_words), dtype=np.int32)
        """``[num_words]``, 0 at first."""

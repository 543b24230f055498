"""Chained hashes of full KV blocks: equal hashes mean the same tokens in the same order from the very first one."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16
"""128 bits: a chance collision, which would give wrong tokens, is out of reach."""


def root_hash(cache_salt: str | None) -> bytes:
    """The start of a chain. Requests with different salts never share a block."""
    return hashlib.blake2b((cache_salt or "").encode(), digest_size=DIGEST_BYTES).digest()


def extend_chain(parent: bytes, token_ids: Sequence[int], start: int, stop: int, block_size: int) -> list[bytes]:
    """Hashes of the full blocks of ``token_ids[start:stop]``, which follow on from `parent`.

    Args:
        start: a block border; stop: anywhere behind it, the rest of a block is left out.
    """
    # one conversion for all blocks, then slices of bytes: 4 bytes a token
    data = array("I", token_ids[start:stop]).tobytes()
    step = 4 * block_size
    hashes = []
    for offset in range(0, len(data) - step + 1, step):
        parent = hashlib.blake2b(parent + data[offset : offset + step], digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)
    return hashes

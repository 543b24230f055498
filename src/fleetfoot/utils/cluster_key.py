"""The secret that the processes of one deployment share, and what it proves.

Nodes, engines, side channels and proxies show each other that they belong together before they exchange anything else.
The key is read from a file that only its owner can read, or from the environment. It is never an argument, because
arguments are visible to every user of a machine.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

MIN_KEY_BYTES = 16
"""The shortest secret that is accepted, in bytes."""
MAX_KEY_BYTES = 4096
"""The longest secret that is accepted, in bytes: a path that names another file is found out early."""


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """A secret of at least 16 bytes. It never appears in a `repr`, a log or a message."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not MIN_KEY_BYTES <= len(self.secret) <= MAX_KEY_BYTES:
            raise ValueError(
                f"the cluster key has {len(self.secret)} bytes; it must have {MIN_KEY_BYTES} to {MAX_KEY_BYTES}"
            )

    def sign(self, purpose: str, *parts: bytes) -> bytes:
        """HMAC-SHA256 over ``purpose`` and ``parts``, 32 bytes. Each part is preceded by its length, so that different
        parts never make the same message; a signature for one purpose is none for another."""
        mac = hmac.new(self.secret, digestmod=hashlib.sha256)
        for part in (purpose.encode(), *parts):
            mac.update(len(part).to_bytes(8, "big"))
            mac.update(part)
        return mac.digest()

    def verify(self, signature: bytes, purpose: str, *parts: bytes) -> bool:
        """Whether ``signature`` is that of `sign`, compared in constant time."""
        return hmac.compare_digest(signature, self.sign(purpose, *parts))


def read_cluster_key(path: Path) -> ClusterKey:
    """The key in a file, without surrounding whitespace.

    Raises ValueError: the file cannot be read, others than its owner have access to it, or its length is wrong.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(MAX_KEY_BYTES + 2).strip()
    except OSError as error:
        raise ValueError(f"cluster_key_file is {str(path)!r}, which cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise ValueError(
            f"cluster_key_file is {str(path)!r}, whose mode {mode:04o} lets others use it; run chmod 600 on it"
        )
    return ClusterKey(content)


def create_cluster_key(path: Path) -> ClusterKey:
    """Write a new random key of 256 bits to ``path``, which must not exist, with mode 0600."""
    text = secrets.token_hex(32)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")
    return ClusterKey(text.encode())

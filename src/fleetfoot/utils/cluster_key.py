"""The secret that the processes of one deployment share, and what it proves.

Nodes, engines, side channels and proxies show each other that they belong together before they exchange anything else.
The key is read from a file that only its owner can read, or from the environment. It is never an argument, because
arguments are visible to every user of a machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fleetfoot.utils.validation import is_loopback

logger = logging.getLogger(__name__)

SIGNATURE_BYTES = 32
"""What `ClusterKey.sign` returns."""
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

    Raises ValueError: it is no plain file or cannot be read, others than this user or root own it or have access to
    it, or its length is wrong.
    """
    named = f"cluster_key_file is {str(path)!r}"
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a FIFO without a writer does not block
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{named}, which is no plain file")
            if found.st_uid not in (os.geteuid(), 0):
                raise ValueError(f"{named}, which belongs to user {found.st_uid}; it must belong to this user or root")
            if (mode := stat.S_IMODE(found.st_mode)) & 0o077:
                raise ValueError(f"{named}, and its mode {mode:04o} lets others use it; run chmod 600 on it")
            return ClusterKey(file.read(MAX_KEY_BYTES + 2).strip())
    except OSError as error:
        raise ValueError(f"{named}, which cannot be read: {error.strerror}") from error


def create_cluster_key(path: Path) -> ClusterKey:
    """Write a new random key of 256 bits to ``path``, which must not exist, with mode 0600. A process that reads the
    file at the same time finds all of it."""
    text = secrets.token_hex(32)
    draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
        os.link(draft, path, follow_symlinks=False)
    finally:
        draft.unlink()
    return ClusterKey(text.encode())


def find_cluster_key(
    file: str | None, variable: str | None, hosts: Iterable[str], own_file: Path | None = None
) -> ClusterKey:
    """The key of a deployment. Its source is ``file``; else ``variable``; else, if all ``hosts`` are loopback
    addresses, ``own_file``, which is made, and logged, at the first use.

    Args:
        file: the setting ``cluster_key_file``.
        variable: `fleetfoot.config.env.cluster_key`.
        hosts: where the processes listen, or what they connect to.
        own_file: of this user, by default ``~/.config/fleetfoot/cluster_key``.

    Raises ValueError: there is no key, or the one that is given cannot be used.
    """
    if file is not None:
        return read_cluster_key(Path(file).expanduser())
    if variable is not None:
        return ClusterKey(variable.strip().encode())
    if remote := [host for host in hosts if not is_loopback(host)]:
        raise ValueError(
            f"cluster_key_file is not set, and {remote[0]} can be reached from other machines: all processes of a "
            "deployment must share a secret; give each of them a file (mode 0600) with the same one, for instance of "
            "`openssl rand -hex 32`, or set FLEETFOOT_CLUSTER_KEY"
        )
    try:
        path = own_file or Path.home() / ".config" / "fleetfoot" / "cluster_key"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):
            key = create_cluster_key(path)
            logger.warning("a new cluster key is in %s; processes on other machines need it as cluster_key_file", path)
            return key
    except (OSError, RuntimeError) as error:
        raise ValueError(f"cluster_key_file is not set, and no file can be made for a key: {error}; set it") from error
    logger.info("the cluster key is that of %s", path)
    return read_cluster_key(path)

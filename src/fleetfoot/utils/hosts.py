"""Names of hosts in settings."""

from __future__ import annotations

import re

_HOST = re.compile(r"[^\s:/]+")


def is_host(text: str) -> bool:
    """Whether this may be a name or an IPv4 address of a host: there is no port with it, nor a scheme."""
    return _HOST.fullmatch(text) is not None

"""The end of a JSON text that has only begun."""

from __future__ import annotations

import re

_CLOSERS = {"{": "}", "[": "]"}
_TOKEN = re.compile(r'["{}\[\],:]|[^\s"{}\[\],:]+')
_STRING_PART = re.compile(r'["\\]')


def completion(text: str) -> str:
    """What makes the beginning of a JSON value a whole one; an empty text begins an object."""
    closers: list[str] = []
    position, last, is_key = 0, "", False
    while match := _TOKEN.search(text, position):
        position, before, last = match.end(), last, match[0]
        if last == '"':
            is_key = closers[-1:] == ["}"] and before in ("{", ",")
            while (part := _STRING_PART.search(text, position)) and part[0] != '"':
                position = part.start() + 2
            if part is None:
                return _rest_of_string(text) + ": null" * is_key + "".join(reversed(closers))
            position = part.end()
        elif last in _CLOSERS:
            closers.append(_CLOSERS[last])
        elif last in "}]" and closers:
            closers.pop()
    if not last:
        return "{}"
    rest = "null" if last == ":" else ": null" if last == '"' and is_key else ""
    return rest + "".join(reversed(closers))


def _rest_of_string(text: str) -> str:
    """The end of a string that is cut, perhaps within an escaped character."""
    slashes = len(text) - len(text.rstrip("\\"))
    if slashes % 2:
        return '\\"'
    escape = re.search(r"(\\+)u([0-9a-fA-F]{0,3})\Z", text)
    return ("0" * (4 - len(escape[2])) if escape and len(escape[1]) % 2 else "") + '"'

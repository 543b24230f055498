"""Validation shared by settings of several packages: unknown keywords, host names; and free ports."""

from __future__ import annotations

import functools
import inspect
import re
import socket
from collections.abc import Iterable
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)

_HOST = re.compile(r"[^\s:/]+")


def unknown_keyword(owner: str, name: str, known: Iterable[str], advice: str | None = None) -> TypeError:
    """The error for an unknown keyword.

    Args:
        owner: the class or function, by its public name.
        name: the unknown keyword.
        known: valid keywords; near matches are listed.
        advice: what to do instead; replaces the near matches.
    """
    import difflib  # only needed for errors

    known = list(known)
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it takes {', '.join(known)}"
    return TypeError(f"{owner} got an unknown keyword {name!r}; {advice or hint}")


def checked_keywords(cls: _Class) -> _Class:
    """Class decorator: a keyword that the constructor does not take raises `unknown_keyword`.

    The constructor must name all of its parameters. `inspect.signature` still shows its signature. A class attribute
    ``unsupported`` can have further keywords: the value of each that changes nothing, and advice about others.
    """
    init = cls.__init__  # type: ignore[misc]  # looked up on the class on purpose
    known = frozenset(list(inspect.signature(init).parameters)[1:])  # without self

    @functools.wraps(init)
    def checked_init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() - known:
            neutral, advice = getattr(cls, "unsupported", {}).get(name, (None, None))
            if advice is None or kwargs.pop(name) not in (None, neutral):
                raise unknown_keyword(cls.__name__, name, sorted(known), advice)
        init(self, *args, **kwargs)

    cls.__init__ = checked_init  # type: ignore[misc]
    return cls


def is_host(text: str) -> bool:
    """Whether ``text`` can be a host name or an IPv4 address, without port and scheme."""
    return _HOST.fullmatch(text) is not None


def get_open_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])

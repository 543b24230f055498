"""Errors for keywords that do not exist, with the names that were probably meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)


def unknown_keyword(owner: str, name: str, known: Iterable[str], advice: str | None = None) -> TypeError:
    """The error to raise where ``owner`` (a class or function, as the user knows it) was given the keyword ``name``.

    Args:
        known: the keywords that there are; near matches are listed.
        advice: what to do, where that is known; it stands in the place of near matches.
    """
    import difflib  # only an error needs it

    known = list(known)
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it takes {', '.join(known)}"
    return TypeError(f"{owner} got an unknown keyword {name!r}; {advice or hint}")


def checked_keywords(cls: _Class) -> _Class:
    """Class decorator: a keyword that the constructor does not take raises `unknown_keyword`.

    The constructor must name all of its parameters; its signature, as `inspect.signature` shows it, stays.
    """
    init = cls.__init__  # type: ignore[misc]  # the class's own, looked up once on purpose
    known = frozenset(list(inspect.signature(init).parameters)[1:])  # without self

    @functools.wraps(init)
    def checked_init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() - known:
            raise unknown_keyword(cls.__name__, name, sorted(known))
        init(self, *args, **kwargs)

    cls.__init__ = checked_init  # type: ignore[misc]
    return cls

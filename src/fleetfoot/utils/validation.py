"""Validation shared by settings of several packages: unknown keywords, host names; and free ports."""

from __future__ import annotations

import contextlib
import functools
import inspect
import ipaddress
import json
import re
import socket
from collections.abc import Iterable
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)

_HOST = re.compile(r"[^\s:/]+")


class FieldError(ValueError):
    """A value that a field of a request, or a setting, cannot have. The text is the field and the problem.

    Args:
        field: path of the field, such as ``tools[0].function.name``.
        problem: what the text says after the field.
        value: what was given.
        code: kind of the error for programs, such as ``context_length_exceeded``; None: an invalid value.
    """

    def __init__(self, field: str, problem: str, value: Any = None, code: str | None = None) -> None:
        super().__init__(field, problem, value, code)  # of which copies are made in other processes
        self.field, self.problem, self.value, self.code = field, problem, value, code

    def __str__(self) -> str:
        return f"{self.field} {self.problem}"

    def at(self, field: str) -> FieldError:
        """The same error of a field that has another name in what the user gave."""
        return type(self)(field, self.problem, self.value, self.code)


class FieldTypeError(FieldError, TypeError):
    """A value of a type that a field cannot have."""


def is_neutral(value: Any, neutral: Iterable[Any]) -> bool:
    """Whether a value is None, empty or one of ``neutral``, or a dict of such values; a boolean equals no number.

    A dict within a dict is never neutral: it can be a JSON schema, which allows any JSON if it is empty.
    """
    if isinstance(value, dict):
        return all(not isinstance(each, dict) and is_neutral(each, neutral) for each in value.values())
    if isinstance(value, bool | int | float | str) and value != "":
        return is_one_of(value, neutral)
    return value is None or (isinstance(value, str | list | tuple) and not value)


def is_one_of(value: Any, values: Iterable[Any]) -> bool:
    """Whether a value is None or one of ``values``; a boolean equals no number."""
    return value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def unknown_keyword(owner: str, name: str, known: Iterable[str], advice: str | None = None) -> TypeError:
    """The error for an unknown keyword. ``owner``: the class or function, by its public name; ``known``: valid ones, of
    which near matches are listed; ``advice``: what to do instead, in place of these."""
    import difflib  # only needed for errors

    known = list(known)
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it takes {', '.join(known)}"
    return TypeError(f"{owner} got an unknown keyword {name!r}; {advice or hint}")


def checked_keywords(cls: _Class) -> _Class:
    """Class decorator: a keyword that the constructor does not take raises `unknown_keyword`.

    The constructor must name all of its parameters. `inspect.signature` still shows its signature. A class attribute
    ``unsupported`` can have further keywords: the value of each that changes nothing, and advice about others; a class
    attribute ``renamed`` older names of keywords.
    """
    init = cls.__init__  # type: ignore[misc]  # looked up on the class on purpose
    known = frozenset(list(inspect.signature(init).parameters)[1:])  # without self

    @functools.wraps(init)
    def checked_init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() - known:
            current = getattr(cls, "renamed", {}).get(name)
            if current is not None and kwargs.get(current) is None:
                kwargs[current] = kwargs.pop(name)
                continue
            neutral, advice = getattr(cls, "unsupported", {}).get(name, (None, None))
            value = kwargs.pop(name)
            # an empty value is one, too: guided_json={} is a schema, guided_choice=[] allows nothing
            is_empty = isinstance(value, str | list | tuple) and not value
            if advice is None or is_empty or isinstance(value, dict) or not is_neutral(value, (neutral,)):
                raise unknown_keyword(cls.__name__, name, sorted(known), advice)
        init(self, *args, **kwargs)

    cls.__init__ = checked_init  # type: ignore[misc]
    return cls


def is_deeper(value: Any, levels: int) -> bool:
    """Whether a value of JSON has more lists and objects in each other."""
    level = [value]
    for _ in range(levels):
        parts = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [part for some in parts for part in some]
    return any(isinstance(one, dict | list) for one in level)


def is_host(text: str) -> bool:
    """Whether ``text`` can be a host name or an IPv4 address, without port and scheme."""
    return _HOST.fullmatch(text) is not None


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone: ``localhost``, or a loopback address. Other names are not resolved."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    return host == "localhost"


def as_network(text: str) -> ipaddress.IPv4Network | None:
    """The network of a text with a prefix length, such as ``10.1.0.0/16``; None: it is none."""
    with contextlib.suppress(ValueError):
        return ipaddress.IPv4Network(text) if "/" in text else None
    return None


def get_open_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def shown(value: Any) -> str:
    """The beginning of a value of a request, in an error: null, true and false are JSON's words."""
    if value is None or isinstance(value, bool | dict | list):
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            return json.dumps(value, ensure_ascii=False)[:100]
    return repr(value)[:100]

"""Bodies as types; and, of a value that does not fit, the place that is the cause.

msgspec names that place in a text alone. Here such a value is taken apart, until the smallest part is left that does
not fit.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, TypeVar, Union

import msgspec

from fleetfoot.server.http import ApiError
from fleetfoot.server.unknown_fields import NO_UNKNOWN_FIELDS, UnknownFields, advice
from fleetfoot.utils.validation import shown

_T = TypeVar("_T")

_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]", re.DOTALL)
_TOKEN, _BACKSLASH = re.compile(rb'["\[\]{},]'), 92
_MANY = 256
"""Entries from which on a list or an object is not tried as a whole: a call of msgspec keeps the interpreter."""


def converted(
    value: Any,
    kind: type[_T],
    unknown_fields: UnknownFields = NO_UNKNOWN_FIELDS,
    *,
    place: str = "",
    first: int = 0,
    strict: bool = True,
) -> _T:
    """The value as a type: without unknown fields that may be ignored, and with 1.0 as 1 where only integers fit.

    Args:
        place: of the value in the body; empty: it is the body.
        first: the number of the first entry, of a value that is a part of a list.
        strict: whether numbers in texts do not fit.

    Raises:
        ApiError: 400; ``param`` is the place that does not fit.
    """
    fitting = _Fitting(unknown_fields, strict)
    return fitting.convert(fitting.fit(value, kind, place, first), kind)


def decode_body(
    body: bytes,
    decoder: msgspec.json.Decoder[_T],
    unknown_fields: UnknownFields = NO_UNKNOWN_FIELDS,
    *,
    place: str = "",
    first: int = 0,
) -> _T:
    """The body, or the value of a place in it, as the decoder's type. Raises ApiError as `converted`."""
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError:
            content = msgspec.json.decode(body)
        return converted(content, decoder.type, unknown_fields, place=place, first=first)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        for half in _LONE_SURROGATE.finditer(body):
            if not _num_backslashes(body, half.start()) % 2:
                field = place_of(body, half.start(), place, first)
                problem = (
                    f"{field or 'the body'} has {half[0][:6].decode(errors='replace')}, half of a character in UTF-16"
                )
                raise ApiError(400, f"{problem}; send both halves, or \\ufffd", param=field or None) from None
        raise ApiError(400, f"the body is not valid JSON: {error}", param=place or None) from None


def place_of(body: bytes, offset: int, place: str = "", first: int = 0) -> str:
    """The path of what has an offset in a body, or in the value of a place in it; ``first`` as of `converted`."""
    path: list[str | int | None] = []
    position = 0
    while (token := _TOKEN.search(body, position, offset)) is not None:
        kind, position = token[0], token.end()
        if kind == b'"':
            while (end := body.find(b'"', position, offset)) >= 0 and _num_backslashes(body, end) % 2:
                position = end + 1
            if end < 0:
                break
            if path and path[-1] is None:
                path[-1] = body[token.end() : end].decode(errors="replace")
            position = end + 1
        elif kind in (b"{", b"["):
            path.append(None if kind == b"{" else 0 if path else first)
        elif path and kind == b",":
            path[-1] = path[-1] + 1 if isinstance(path[-1], int) else None
        elif path:
            path.pop()
    names = (f"[{one}]" if isinstance(one, int) else f".{one}" for one in path if one is not None)
    return (place + "".join(names)).removeprefix(".")


def _num_backslashes(body: bytes, end: int) -> int:
    """Those right before a place."""
    begin = end
    while begin and body[begin - 1] == _BACKSLASH:
        begin -= 1
    return end - begin


class _Fitting:
    def __init__(self, unknown_fields: UnknownFields, strict: bool) -> None:
        self._unknown_fields = unknown_fields
        self._strict = strict

    def convert(self, value: Any, kind: Any) -> Any:
        """Raises ValidationError: it does not fit."""
        return msgspec.convert(value, kind, strict=self._strict, str_keys=True)

    def _fits(self, value: Any, kind: Any) -> bool:
        try:
            self.convert(value, kind)
        except msgspec.ValidationError:
            return False
        return True

    def fit(self, value: Any, kind: Any, place: str, first: int = 0) -> Any:
        """A value that fits, in which parts may have been changed. Raises ApiError."""
        is_composite = isinstance(value, dict | list)
        if not (is_composite and len(value) > _MANY) and self._fits(value, kind):
            return value
        if isinstance(value, float) and value.is_integer() and self._fits(int(value), kind):
            return int(value)
        if is_composite and not self._fit_parts(value, list(_options(kind)), place, first):
            raise self._refusal(value, kind, place)
        if not is_composite or not self._fits(value, kind):
            raise self._refusal(value, kind, place)
        return value

    def _fit_parts(self, value: Any, options: list[Any], place: str, first: int) -> bool:
        """Whether one of the types is a list or an object, as the value is. Raises ApiError for a part."""
        if isinstance(value, list):
            for one in options:
                if typing.get_origin(one) is list:
                    (kind,) = typing.get_args(one)
                    value[:] = [self.fit(entry, kind, f"{place}[{first + i}]") for i, entry in enumerate(value)]
                    return True
            return False
        structs = [one for one in options if isinstance(one, type) and issubclass(one, msgspec.Struct)]
        if structs:
            self._fit_fields(value, self._tagged(value, structs, place), place)
            return True
        for one in options:
            if typing.get_origin(one) is dict:
                _, kind = typing.get_args(one)
                value.update([(key, self.fit(entry, kind, _joined(place, key))) for key, entry in value.items()])
                return True
        return False

    def _tagged(self, value: dict[str, Any], structs: list[Any], place: str) -> Any:
        """The type that the tag of an object names."""
        name = structs[0].__struct_config__.tag_field
        if name is None:
            return structs[0]
        by_tag = {one.__struct_config__.tag: one for one in structs}
        if name not in value:
            raise _error(f"Object missing required field `{name}`", place, _joined(place, name))
        tag = value[name]
        if not isinstance(tag, str) or tag not in by_tag:
            where = _joined(place, name)
            raise ApiError(400, f"{where} is {shown(tag)}; it can be {', '.join(by_tag)}", None, where)
        return by_tag[tag]

    def _fit_fields(self, value: dict[str, Any], kind: Any, place: str) -> None:
        fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
        config = kind.__struct_config__
        for name, entry in list(value.items()):
            if name in fields:
                value[name] = self.fit(entry, fields[name].type, _joined(place, name))
            elif config.forbid_unknown_fields and name != config.tag_field:
                if not self._unknown_fields.takes(name, entry, is_top=not place):
                    hint = advice(name, kind if not place else None)
                    message = f"Object contains unknown field `{name}`"
                    raise _error(message, place, _joined(place, name), f"; {hint}", "unknown_field")
                del value[name]
        for name, field in fields.items():
            if field.required and name not in value:
                raise _error(f"Object missing required field `{name}`", place, _joined(place, name))

    def _refusal(self, value: Any, kind: Any, place: str) -> ApiError:
        try:
            self.convert(value, kind)
        except msgspec.ValidationError as error:
            return _error(str(error), place, place or None)
        raise AssertionError("the value fits")


def _error(text: str, place: str, param: str | None, more: str = "", code: str | None = None) -> ApiError:
    where = f" - at `${'' if place.startswith('[') else '.'}{place}`" if place else ""
    return ApiError(400, f"{text}{where}{more}", code, param)


def _joined(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _options(kind: Any) -> Iterator[Any]:
    """The types of a union, or the one type."""
    if typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) in (Union, UnionType):
        for one in typing.get_args(kind):
            yield from _options(one)
    else:
        yield kind

"""Limits of what a body holds, counted in its bytes before anything of it is built, and the decoding of large bodies.

The scan is made of operations of numpy on a part of the body at a time, which leave the interpreter to other threads.
A large list is decoded in pieces for the same reason: msgspec keeps the interpreter for the length of a call.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import secrets
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from fleetfoot.server.conversion import decode_body, place_of
from fleetfoot.server.http import ApiError, invalid
from fleetfoot.server.unknown_fields import NO_UNKNOWN_FIELDS, UnknownFields

_T = TypeVar("_T")

SMALL_BYTES, SMALL_VALUES = 1 << 18, 1 << 13
"""A body of at most so many bytes and values is decoded by the event loop: it takes about a millisecond."""
_MANY_CONTAINERS = 512
_CHUNK = 1 << 20
"""Bytes that are scanned at a time."""
_PIECE = 1 << 14
"""Values that are decoded at a time."""
_LONG_TEXT = 1 << 19
"""Bytes of a text that are decoded at a time."""
_MAX_FIELDS = 256
_QUOTE, _COMMA, _COLON, _OPENING, _CLOSING = 34, 44, 58, (91, 123), (93, 125)
_STRUCTURE = np.zeros(256, np.bool_)
_STRUCTURE[[_COMMA, *_OPENING, *_CLOSING]] = True
_KEY = re.compile(rb'"(?:[^"\\]|\\.){0,200}"$')
_TEXT = re.compile(rb'\s*(?:"(?:[^"\\]|\\.){0,200}"\s*:\s*)?"')
"""The begin of a text, after the name of its field."""
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]..", re.DOTALL)
_TEXT_DECODER = msgspec.json.Decoder(str)
_FIRST = re.compile(rb"[\[{]\s*(.?)", re.DOTALL)
_ID_FIELDS = ("prompt", "input", "tokens", "token_ids")
"""Fields that can hold token ids."""
_SCORED = ("documents", "text_1", "text_2", "queries", "data_1", "data_2")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Most entries of each list and object of a body."""

    tools: int = 1024
    messages: int = 16384
    """Items of a response's ``input``, too."""
    prompts: int = 2048
    """Texts or lists of token ids in ``prompt`` and ``input``; prompts times ``n``."""
    token_ids: int = 1 << 20
    """Those of all prompts, and ``tokens``."""
    logit_bias: int = 16384
    allowed_token_ids: int = 1 << 17
    stop_token_ids: int = 1024
    bad_words: int = 1024
    documents: int = 4096
    """Texts of scores and reranking, too."""
    entries: int = 16384
    """Those of any other list or object: content parts, choices, properties of a schema."""
    objects: int = 1 << 16
    """Lists and objects of the whole body."""
    values: int = 1 << 18
    """Those of the whole body, token ids apart."""
    characters: int = 1 << 22
    """Those of a text that is tokenized before its length is checked, as by ``/tokenize``."""
    depth: int = 256
    """Lists and objects in each other."""

    def of(self, name: str, first: bytes) -> str:
        """The limit of a field, the list or object of which begins with ``first``."""
        if name in _ID_FIELDS:
            is_flat = name in ("tokens", "token_ids") or first in b"-0123456789"
            return "token_ids" if is_flat else "messages" if first == b"{" else "prompts"
        if name in _SCORED:
            return "documents"
        named = ("tools", "messages", "logit_bias", "allowed_token_ids", "stop_token_ids", "bad_words")
        return name if name in named else "entries"


def over_limit(field: str, what: str, count: int, name: str, limits: BodyLimits) -> ApiError:
    """The error of a limit, with its name for an operator."""
    most = getattr(limits, name)
    hint = f"an operator sets this limit with --limit-per-request '{{\"{name}\": {most}}}'"
    return invalid(field, f"{what} {count:,}; {most:,} are the most ({hint})")


def _count_openings(body: bytes) -> int:
    """Lists and objects of a body, and opening brackets in its texts."""
    return body.count(b"[") + body.count(b"{")


def cost_of(body: bytes) -> int:
    """The bytes of a body; more than SMALL_BYTES if it has many lists and objects, each of which costs as much as
    hundreds of characters: 1,000 tools in 0.13 MB take 0.2 s, and so do 300 lists of depth 200 in a template; or many
    values in the arguments of calls, which are texts that are read."""
    has_values = b'"arguments"' in body and body.count(b",") > SMALL_VALUES
    return max(len(body), SMALL_BYTES + 1) if has_values or _count_openings(body) > _MANY_CONTAINERS else len(body)


def must_scan(body: bytes, limits: BodyLimits) -> bool:
    """Whether a body can exceed a limit: commas and brackets in its texts count here."""
    num_opening = _count_openings(body)
    return num_opening >= limits.depth or num_opening + body.count(b",") >= _smallest(limits)


@functools.cache
def _smallest(limits: BodyLimits) -> int:
    """The smallest limit of entries."""
    counted = [one.name for one in dataclasses.fields(limits) if one.name not in ("depth", "characters")]
    return min(getattr(limits, name) for name in counted)


@dataclass(frozen=True, slots=True)
class Scan:
    """The structure of a body: its commas and brackets, those in texts apart."""

    body: bytes
    places: np.ndarray
    """Their offsets in the body, ``[n]`` int64."""
    kinds: np.ndarray
    """The characters, ``[n]`` uint8."""
    depths: np.ndarray
    """The depth of the list or object that each belongs to, from 1, ``[n]`` int32."""

    @property
    def num_values(self) -> int:
        return len(self.places)


def scan(body: bytes, limits: BodyLimits) -> Scan:
    """Count what a body holds.

    A body that is not valid JSON is counted up to the error that a decoder finds at the latest. Raises ApiError 400
    that names the field, the count and the limit.
    """
    most = limits.token_ids + limits.values + 2 * limits.objects
    parts: list[tuple[np.ndarray, ...]] = []
    begin, num_values, depth, in_text = 0, 0, 0, np.bool_(False)
    while begin < len(body):
        chunk = body[begin : begin + _CHUNK]
        num_escapes = len(chunk) - len(chunk.rstrip(b"\\"))
        if num_escapes % 2 and begin + len(chunk) < len(body):  # the last one belongs to the next character
            chunk = chunk[:-1] or body[begin : begin + 2]
        text = chunk.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in chunk else chunk
        codes = np.frombuffer(text, np.uint8)
        is_text = np.bitwise_xor.accumulate(codes == _QUOTE)
        is_text ^= in_text
        in_text = is_text[-1]
        places = np.flatnonzero(_STRUCTURE[codes] & ~is_text)
        kinds = codes[places]
        opens, closes = np.isin(kinds, _OPENING), np.isin(kinds, _CLOSING)
        levels = depth + np.cumsum(opens.astype(np.int32) - closes, dtype=np.int32)
        if len(levels):
            depth = int(levels[-1])
            if (deepest := int(levels.max())) > limits.depth:
                parts.append((places + begin, kinds, levels + closes))
                name = _field_around(parts, body, begin + int(places[(levels > limits.depth).argmax()]))
                raise over_limit(name, f"{name} is nested to a depth of", deepest, "depth", limits)
        parts.append((places + begin, kinds, levels + closes))
        num_values += len(places)
        begin += len(chunk)
        if num_values > most:
            break
    result = Scan(body, *(np.concatenate(column) for column in zip(*parts, strict=True)))
    _check(result, limits)
    return result


def _check(found: Scan, limits: BodyLimits) -> None:
    body, places, kinds, depths = found.body, found.places, found.kinds, found.depths
    if not len(places):
        return
    order = np.argsort(depths, kind="stable")  # what belongs to one list or object follows its bracket
    opens = np.isin(kinds, _OPENING)
    containers = order[opens[order]]  # indices of opening brackets
    owners = np.cumsum(opens[order]) - 1
    commas = np.bincount(owners[(kinds[order] == _COMMA) & (owners >= 0)], minlength=len(containers))
    counts = commas + 1
    levels = depths[containers]
    fields = containers[levels == 2]
    closing = np.append(np.flatnonzero((depths == 2) & np.isin(kinds, _CLOSING)), len(places))
    if (count := int(counts[levels == 1].max(initial=0))) > _MAX_FIELDS:
        raise invalid("body", f"the body has {count:,} fields; {_MAX_FIELDS} are the most")
    num_ids, exempt = 0, np.zeros(len(places), np.bool_)
    for index, count in zip(fields.tolist(), counts[levels == 2].tolist(), strict=True):
        name, first = _field(body, int(places[index])), _first(body, int(places[index]))
        limit = limits.of(name, first)
        if count > getattr(limits, limit):
            raise over_limit(name, f"{name} has", count, limit, limits)
        if limit == "token_ids" or (name in _ID_FIELDS and first == b"["):
            end = int(closing[np.searchsorted(closing, index)])
            exempt[index : end + 1] = True
            num_ids += end - index
    if num_ids > limits.token_ids + 2 * limits.prompts:
        raise over_limit("prompt", "all prompts together have this many token ids:", num_ids, "token_ids", limits)
    nested = (levels > 2) & ~exempt[containers]
    if (count := int(counts[nested].max(initial=0))) > limits.entries:
        index = int(containers[nested][counts[nested].argmax()])
        name = _field_around([(places, kinds, depths)], body, int(places[index]))
        raise over_limit(name, f"{name} holds a list or an object with this many entries:", count, "entries", limits)
    if len(containers) > limits.objects:
        name = _largest(found, fields)
        raise over_limit(name, "the lists and objects of the whole body are", len(containers), "objects", limits)
    if (count := len(places) - int(exempt.sum())) > limits.values:
        raise over_limit(_largest(found, fields), "the values of the whole body are", count, "values", limits)


def _field(body: bytes, place: int) -> str:
    """The name of the field with the list or object at a place."""
    colon = _end_before(body, place) - 1
    if colon < 0 or body[colon] != _COLON:
        return "body"
    end = _end_before(body, colon)
    match = _KEY.search(body[max(0, end - 256) : end])
    try:
        return str(msgspec.json.decode(match[0])) if match else "body"
    except msgspec.DecodeError:  # as the decoder of the body will find
        return "body"


def _end_before(body: bytes, end: int) -> int:
    """Where what comes before the white space before ``end`` ends."""
    while part := body[max(0, end - 1024) : end]:
        end -= len(part) - len(kept := part.rstrip(b" \t\r\n"))
        if kept:
            break
    return end


def _first(body: bytes, place: int) -> bytes:
    match = _FIRST.match(body, place)
    return match[1] if match else b""


def _field_around(parts: list[tuple[np.ndarray, ...]], body: bytes, place: int) -> str:
    """The name of the field with a place in it."""
    for places, kinds, depths in reversed(parts):
        begins = places[(depths == 2) & np.isin(kinds, _OPENING) & (places <= place)]
        if len(begins):
            return _field(body, int(begins[-1]))
    return "body"


def _largest(found: Scan, fields: np.ndarray) -> str:
    """The field that holds most."""
    if not len(fields):
        return "body"
    return _field(found.body, int(found.places[fields[np.diff(fields, append=len(found.places)).argmax()]]))


# --- decoding ---------------------------------------------------------------------------------------------------------


def decode(found: Scan, decoder: msgspec.json.Decoder[_T], unknown_fields: UnknownFields = NO_UNKNOWN_FIELDS) -> _T:
    """The body as `decode_body` returns it; long lists and texts are decoded in pieces. Raises ApiError 400."""
    kind: Any = decoder.type
    content, texts = _take_texts(found)
    if texts:
        return _with_texts(decode_body(content, decoder, unknown_fields), texts)
    rest, lists = _split(found, kind)
    body = decode_body(rest, decoder, unknown_fields)
    for name, pieces in lists:
        entries = getattr(body, name)
        for piece in pieces:
            entries += decode_body(piece, _list_decoder(kind, name), unknown_fields, place=name, first=len(entries))
    return body


def _take_texts(found: Scan) -> tuple[bytes, dict[str, str]]:
    """The body with a name in place of each long text, and the texts by name."""
    body, places = found.body, found.places
    kept, texts, copied = [], {}, 0
    for index in np.flatnonzero(np.diff(places) > _LONG_TEXT).tolist():
        begin, end = int(places[index]) + 1, _end_before(body, int(places[index + 1])) - 1
        match = _TEXT.match(body, begin, begin + 1024)
        if match is None or match.end() > end or body[end] != _QUOTE:
            continue
        begin = match.end()
        if not _is_one_text(body, begin, end):
            continue  # several texts, such as a long name of a field
        name = secrets.token_hex(16)
        texts[name] = "".join([_decode_text(body, begin, piece) for piece in _text_pieces(body, begin, end)])
        kept += [body[copied:begin], name.encode()]
        copied = end
    return b"".join([*kept, body[copied:]]) if texts else body, texts


def _is_one_text(body: bytes, begin: int, end: int) -> bool:
    """Whether all quotes are escaped. A part at a time: a call keeps the interpreter."""
    parts = range(begin, end, _CHUNK)
    quotes = sum(body.count(b'"', part, min(part + _CHUNK, end)) for part in parts)
    return quotes == sum(body.count(b'\\"', part, min(part + _CHUNK + 1, end)) for part in parts)


def _text_pieces(body: bytes, begin: int, end: int) -> Iterator[bytes]:
    """The parts of a text in JSON, cut between characters and escape sequences."""
    while begin < end:
        cut = min(begin + _LONG_TEXT, end)
        if cut < end:
            while body[cut] & 0xC0 == 0x80:  # within a character
                cut -= 1
            escape = body.rfind(b"\\", cut - 6, cut)
            if escape >= 0 and _is_escape(body, begin, escape):
                length = 6 if body[escape + 1 : escape + 2] == b"u" else 2
                cut = escape if escape + length > cut else cut
            if _HIGH_SURROGATE.match(body, cut - 6) and _is_escape(body, begin, cut - 6):  # the other half follows
                cut -= 6
        yield body[begin:cut]
        begin = cut


def _is_escape(body: bytes, begin: int, place: int) -> bool:
    """Whether the backslash at a place of a text begins an escape sequence."""
    chunk = body[begin : place + 1]
    num_backslashes = len(chunk) - len(chunk.rstrip(b"\\"))
    return num_backslashes % 2 == 1


def _decode_text(body: bytes, begin: int, piece: bytes) -> str:
    text = b'"%b"' % piece
    try:
        return decode_body(text, _TEXT_DECODER)
    except ApiError:  # again, with its place
        return decode_body(text, _TEXT_DECODER, place=place_of(body, begin))


def _with_texts(value: Any, texts: dict[str, str]) -> Any:
    """A decoded body with its long texts in place of their names."""
    if isinstance(value, str):
        return texts.get(value, value)
    if isinstance(value, list):
        value[:] = [_with_texts(one, texts) for one in value]
    elif isinstance(value, dict):
        value.update([(key, _with_texts(one, texts)) for key, one in value.items()])
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            setattr(value, name, _with_texts(getattr(value, name), texts))
    return value


def _split(found: Scan, kind: Any) -> tuple[bytes, list[tuple[str, list[bytes]]]]:
    """The body with the first piece of each long list, and the further pieces by field."""
    body, places, kinds, depths = found.body, found.places, found.kinds, found.depths
    kept, lists, copied = [], [], 0
    marks = np.flatnonzero(depths == 2)
    begins, ends = marks[np.isin(kinds[marks], _OPENING)], marks[np.isin(kinds[marks], _CLOSING)]
    if len(begins) != len(ends) or np.any(begins >= ends):
        return body, []  # not JSON
    names = [_field(body, int(places[begin])) for begin in begins]
    for name, begin, end in zip(names, begins.tolist(), ends.tolist(), strict=True):
        if end - begin <= _PIECE or body[places[begin]] != _OPENING[0] or names.count(name) > 1:
            continue
        if name not in _lists_of(kind):
            continue
        commas = marks[(marks > begin) & (marks < end)]
        cuts = places[commas[1:][np.diff(commas // _PIECE) > 0]].tolist()
        if cuts:
            spans = zip(cuts, [*cuts[1:], int(places[end])], strict=True)
            lists.append((name, [b"[%b]" % body[first + 1 : last] for first, last in spans]))
            kept.append(body[copied : cuts[0]])
            copied = int(places[end])
    return b"".join([*kept, body[copied:]]), lists


@functools.cache
def _lists_of(kind: Any) -> dict[str, Any]:
    """The fields of a type that can be lists, and their types as those."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        options = typing.get_args(hint) if typing.get_origin(hint) is not list else (hint,)
        found.update((name, one) for one in options if typing.get_origin(one) is list)
    return found


@functools.cache
def _list_decoder(kind: Any, name: str) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(_lists_of(kind)[name])

"""Matchers of grammars, with token masks of their own within strings of limited length.

llguidance has a state for each position of such a string, and looks at most of the vocabulary in each. Here a mask is
put together: tokens of characters alone, of which the number matters; and tokens that close the string, where the text
from the quote on must fit, too, which is the same at all positions. Elsewhere masks are llguidance's. With a version
whose masks in such strings take as long as in others, this file can go: `plain_matcher` is `new_matcher`.
"""

from __future__ import annotations

import copy
import ctypes
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from fleetfoot.structured.grammars import WHITESPACE, GrammarText
from fleetfoot.structured.vocabulary import make_tokenizer, plain_matcher
from fleetfoot.utils.json_schema import NOTES, find, first_items

_KEYWORDS = NOTES | frozenset(
    ("type", "enum", "const", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
     "exclusiveMaximum", "multipleOf", "properties", "patternProperties", "additionalProperties", "required",
     "minProperties", "maxProperties", "items", "prefixItems", "additionalItems", "minItems", "maxItems")
)  # fmt: skip
_REPEATED = re.compile(r"\^(\.|\\[dswDSW]|\[(?:[^\[\]\\]|\\.)+\])(?:\{(\d+)(,?)(\d*)\}|([*+?]?))\$", re.DOTALL)
"""A pattern of any number of characters of one class."""
_QUANTIFIERS: Mapping[str, tuple[int, int | None]] = {"": (1, 1), "?": (0, 1), "*": (0, None), "+": (1, None)}
_ANY: Mapping[str, Any] = {}
_MAX_DEPTH = 64
_MAX_OPTIONS = 1 << 12

_CHARACTER = (
    rb"\\(?:u[0-9a-fA-F]{4}|[^u])|[\x00-!#-\[\]-\x7f]|[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}"
    rb"|[\xf0-\xf4][\x80-\xbf]{3}"
)
_CHARACTERS = re.compile(rb"(?:%b)*" % _CHARACTER, re.DOTALL)
_EACH = re.compile(_CHARACTER, re.DOTALL)
_MARK = re.compile(rb'[{}\[\]:,"]')
_QUOTE = 0x22
_MAX_GRAMMAR = 1 << 16  # characters; larger ones take long to be compiled twice
_MAX_CLASSES = 64  # classes of characters that are kept
_MAX_BASES = 32  # sets of tokens that are kept for a class of characters


def new_matcher(tokenizer: Any, grammar: GrammarText, plain: Any = None) -> Any:
    """The matcher of a grammar, or a `StringMatcher` in its place. ``plain``: the `plain_matcher` of its text, if there
    is one already."""
    matcher, schema = plain or plain_matcher(tokenizer, grammar.text), grammar.schema
    if matcher.is_error() or schema is None or len(grammar.text) > _MAX_GRAMMAR:
        return matcher
    kinds = {*all_strings(schema)}
    space = schema.get("x-guidance", {}).get("whitespace_pattern", WHITESPACE)
    if space != WHITESPACE or all(kind.most is None for kind in kinds):
        return matcher
    texts = _texts_of(tokenizer)
    follower = plain_matcher(texts.tokenizer, json.dumps({"grammars": [{"json_schema": schema}]}))
    classes = {kind.characters: texts.characters(kind.characters) for kind in kinds}
    if texts.quote < 0 or follower.is_error() or not all(found.sample for found in classes.values()):
        return matcher
    marks = [texts.texts[mark] if isinstance(mark, int) else mark.encode() for mark in grammar.marks]
    return StringMatcher(matcher, follower, texts, Place.root(schema), classes, marks)


# --- tokens -----------------------------------------------------------------------------------------------------------


def _content_end(text: bytes) -> int:
    """Where the whole characters of a string end: at the quote that closes it, before a part of one, or after the
    last."""
    match = _CHARACTERS.match(text)
    assert match is not None
    return match.end()


def _count(text: bytes) -> int:
    """Number of whole characters in the content of a string."""
    return len(text) if text.isascii() and b"\\" not in text else len(_EACH.findall(text))


def _bits(flags: np.ndarray) -> np.ndarray:
    """``[num]`` bool as a mask, ``[words]`` uint32."""
    words = np.zeros(-(-len(flags) // 32), dtype=np.uint32)
    packed = np.packbits(flags, bitorder="little")
    words.view(np.uint8)[: len(packed)] = packed
    return words


def _flags(mask: bytes, num: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=num, bitorder="little").view(bool)


class _Texts:
    """The tokens of a vocabulary as text within a string."""

    def __init__(self, tokenizer: Any) -> None:
        self.source, num = tokenizer, tokenizer.vocab_size
        special = {token for token in range(num) if tokenizer.is_special_token(token)} | {*tokenizer.eos_tokens}
        self.texts = [
            b"\xff%d\xff" % token if token in special else tokenizer.decode_bytes([token]) for token in range(num)
        ]  # no text has such bytes
        self.counts = [0] * num  # characters, up to the quote that closes the string; the last one may be a part
        self.is_content = bytearray(num)  # tokens of whole characters
        closing: dict[bytes, list[tuple[int, bytes]]] = {}
        matcher = plain_matcher(tokenizer, "start: /(?s:.*)/")  # no special tokens, and none without text
        for token in np.flatnonzero(_flags(matcher.compute_bitmask(), num)).tolist():
            text, end = self.texts[token], _content_end(self.texts[token])
            is_closing = text[end : end + 1] == b'"'
            self.is_content[token] = is_whole = end == len(text)
            self.counts[token] = _count(text[:end]) + (not is_whole and not is_closing)
            if is_closing:
                closing.setdefault(text[end:], []).append((token, text[:end]))
        self.longest = max(self.counts)
        self.quote = self.texts.index(b'"') if b'"' in self.texts else -1
        # a vocabulary of the bytes, and of the texts from the quote on that closes a string
        tokens = [*(bytes([byte]) for byte in range(256)), *(text for text in closing if len(text) > 1)]
        end = len(tokens)
        self.tokenizer = make_tokenizer([*tokens, b"<end>"], [end], [end], lambda text: list(text.encode()))
        self.closing = [closing.get(text, []) for text in tokens]  # the tokens with each text, and the text before it
        counts, is_closing = np.array(self.counts), np.zeros(num, dtype=bool)
        is_closing[[token for found in self.closing for token, _ in found]] = True
        # masks: the tokens with at most so many characters, and those that close no string before so many
        self.fitting = cache(lambda most: _bits(counts <= most))
        self.late = cache(lambda least: _bits(~is_closing | (counts >= least)))
        self.characters = lru_cache(_MAX_CLASSES)(lambda pattern: _Class(self, pattern))


_texts_of = lru_cache(maxsize=2)(_Texts)


class _Class:
    """The tokens that may be in strings of a class of characters. ``pattern``: of one character."""

    def __init__(self, texts: _Texts, pattern: str) -> None:
        most = texts.longest + 1
        limits: dict[str, Any] = {"pattern": f"^{pattern}{{0,{most}}}$"} if pattern else {"maxLength": most}
        schema = {"type": "string", **limits, "x-guidance": {"lenient": False, "whitespace_flexible": False}}
        grammar = json.dumps({"grammars": [{"json_schema": schema}]})
        matcher, by_byte = plain_matcher(texts.source, grammar), plain_matcher(texts.tokenizer, grammar)
        matcher.consume_token(texts.quote)
        by_byte.consume_token(_QUOTE)
        fits = _flags(by_byte.compute_bitmask(), 256)
        samples = [bytes([byte]) for byte in range(0x20, 0x7F) if fits[byte] and byte not in b'"\\']
        # a character of one byte; empty: there is none, or no other, which llguidance would force
        self.sample = samples[0] if len(samples) > 1 else b""
        starts = {start for found in texts.closing for _, start in found}
        valid = {start for start in starts if by_byte.validate_tokens([*start]) == len(start)}
        content = _flags(matcher.compute_bitmask(), len(texts.texts))
        content[[token for found in texts.closing for token, _ in found]] = False
        closing = [[token for token, start in found if start in valid] for found in texts.closing]

        def base(fitting: bytes) -> np.ndarray:
            flags = content.copy()
            for text in np.flatnonzero(_flags(fitting, len(closing))):
                flags[closing[text]] = True
            return _bits(flags)

        self.base = lru_cache(_MAX_BASES)(base)
        """The tokens of a string, as a mask. ``fitting``: the mask of `_Texts.tokenizer`."""


# --- what a schema says about strings ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Strings:
    """The strings of ``least`` to ``most`` characters of a class, as a pattern writes it; empty: of any characters."""

    characters: str
    least: int
    most: int | None


class Place:
    """A place in a document: its value is under one of some schemas. None: it is not known under which."""

    def __init__(self, root: Mapping[str, Any], options: Sequence[Mapping[str, Any]] | None, known: dict[Any, Place]):
        self._root, self._options, self._known = root, options, known
        self._names = {name for option in options or () for name in option.get("properties", ())}
        self._num_first = max((len(first_items(option)) for option in options or ()), default=0)
        self._parts: dict[str | int | None, Place] = {}  # by the name or index; None: of other names
        kinds = {_strings(option) for option in options or () if _allows(option, "string")}
        self.strings = kinds.pop() if len(kinds) == 1 else None
        """Those that the value can be, if it is a string; None: not known, or others."""

    @classmethod
    def root(cls, schema: Any) -> Place:
        return cls(schema, (), {})._find([schema])

    def part(self, key: str | int | None) -> Place:
        """The place of an item by its index, or of a property's value by its name; None: its name is not known."""
        if key is None or self._options is None:
            return self._find([None])
        kind, found = "object", key if key in self._names else None
        if isinstance(key, int):
            kind, found = "array", min(key, self._num_first)
        if found not in self._parts:
            self._parts[found] = self._find([_part(one, found) for one in self._options if _allows(one, kind)])
        return self._parts[found]

    def _find(self, schemas: Iterable[Any]) -> Place:
        """The place that is under these schemas; equal ones are one object."""
        options = self._expand(schemas)
        unique = None if options is None else {id(option): option for option in options}
        key = None if unique is None else frozenset(unique)
        if key not in self._known:
            self._known[key] = Place(self._root, None if unique is None else [*unique.values()], self._known)
        return self._known[key]

    def _expand(self, schemas: Iterable[Any], depth: int = 0) -> list[Mapping[str, Any]] | None:
        """The schemas without alternatives; None: one is not understood."""
        options: list[Mapping[str, Any]] = []
        for schema in schemas:
            if schema is False:
                continue
            schema = _ANY if schema is True else schema
            if not isinstance(schema, dict) or depth > _MAX_DEPTH or len(options) > _MAX_OPTIONS:
                return None
            found: list[Mapping[str, Any]] | None = [schema] if schema.keys() <= _KEYWORDS else None
            match [*(schema.keys() - NOTES)]:
                case ["$ref"]:
                    found = self._expand([find(self._root, schema["$ref"])], depth + 1)
                case ["anyOf" | "oneOf" as choice]:
                    found = self._expand(schema[choice], depth + 1)
            if found is None:
                return None
            options += found
        return options


def _allows(schema: Mapping[str, Any], kind: str) -> bool:
    types = schema.get("type", kind)
    return kind in types if isinstance(types, list) else bool(kind == types)


def all_strings(part: Any) -> Iterator[Strings]:
    """All strings of all schemas in a schema, and some more."""
    if isinstance(part, dict) and _allows(part, "string") and (found := _strings(part)) is not None:
        yield found
    for child in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from all_strings(child)


def _strings(schema: Mapping[str, Any]) -> Strings | None:
    """Those that are valid under a schema. None: they are no `Strings`."""
    if schema.keys() & {"enum", "const", "format"}:
        return None
    characters, least, most = "", 0, None
    if "pattern" in schema:
        match = _REPEATED.fullmatch(str(schema["pattern"]))
        if match is None:
            return None
        characters, fewest, comma, largest, quantifier = match.groups()
        if fewest is None:
            least, most = _QUANTIFIERS[quantifier]
        else:
            least = int(fewest)
            most = int(largest) if largest else None if comma else least
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(shortest, int) or not isinstance(longest, int | None):
        return None  # names of properties
    bounds = [bound for bound in (most, longest) if bound is not None]
    return Strings(characters, max(least, shortest), min(bounds, default=None))


def _part(schema: Mapping[str, Any], key: str | int | None) -> Any:
    """The schema of a property (None: of other names) or of an item; None: it is not clear."""
    if schema.keys() & {"enum", "const"}:
        return None
    if isinstance(key, int):
        first = first_items(schema)
        other = schema.get("additionalItems" if isinstance(schema.get("items"), list) else "items", True)
        return first[key] if key < len(first) else other
    others = schema.get("patternProperties", {})
    if not all(pattern == "^" and part in ({}, True) for pattern, part in others.items()):
        return None
    return schema.get("properties", {}).get(key, True if others else schema.get("additionalProperties", True))


# --- the matcher ------------------------------------------------------------------------------------------------------


class StringMatcher:
    """An `llguidance.LLMatcher` with the same masks, of which those within strings take less time: it reads the JSON
    along, to find the place in the schema, and the position in the string.

    Args:
        matcher: at the beginning.
        follower: of the same grammar and the tokenizer of ``texts``.
        place: of the document's value.
        classes: of all strings in the schema, by their patterns.
        marks: what a text may begin with, and end with, that is before the document; none: it begins at once.
    """

    def __init__(
        self, matcher: Any, follower: Any, texts: _Texts, place: Place, classes: dict[str, _Class], marks: list[bytes]
    ) -> None:
        self._follower, self._texts, self._classes = follower, texts, classes
        self._size = 4 * -(-len(texts.texts) // 32)
        self._base: np.ndarray | None = None  # of the string that it is in
        self._place = place  # of the value that comes next, or is there
        self._marks = marks  # that are ahead
        self._frames: list[tuple[Place, int]] = []  # of what is open: its place, and the index in an array; -1: object
        self._name: bytes | None = None  # of the value; None: it comes next, in an object
        self._is_open = self._is_name = False  # a string
        self._strings: Strings | None = None  # those that the open string is one of; None: none is open, or others
        self._characters = 0  # whole ones that it has
        self._rest = b""  # the part of a character after them
        # what the follower has not consumed; the content of strings does not matter to it, once they are long enough
        self._pending = bytearray()
        self._is_followed = False  # whether the follower is in the open string
        self._use(matcher)

    def _use(self, matcher: Any) -> None:
        self._matcher, self.is_error, self.validate_tokens = matcher, matcher.is_error, matcher.validate_tokens

    def __getattr__(self, name: str) -> Any:
        """What changes nothing: whether it accepts an end, has ended, or has an error."""
        if name.startswith(("is_", "get_")):
            return getattr(self._matcher, name)
        raise AttributeError(name)

    def deep_copy(self) -> StringMatcher:
        other = copy.copy(self)
        other._use(self._matcher.deep_copy())
        other._follower, other._pending = self._follower.deep_copy(), self._pending[:]
        other._frames, other._marks = self._frames[:], self._marks[:]
        return other

    def consume_token(self, token_id: int) -> bool:
        if not self._matcher.consume_token(token_id):
            return False
        texts = self._texts
        if self._strings is not None and not self._rest and texts.is_content[token_id]:
            self._characters += texts.counts[token_id]
        else:
            self._read(texts.texts[token_id])
        return True

    def consume_tokens(self, token_ids: Iterable[int]) -> bool:
        return all(self.consume_token(token_id) for token_id in token_ids)

    def try_consume_tokens(self, token_ids: Sequence[int]) -> int:
        num = int(self._matcher.validate_tokens(token_ids))
        self.consume_tokens(token_ids[:num])
        return num

    def compute_bitmask(self) -> bytes:
        mask = ctypes.create_string_buffer(self._size)
        self.unsafe_compute_mask_ptr(ctypes.addressof(mask), self._size)
        return mask.raw

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        """Write the mask to ``size`` bytes at an address."""
        mask = self._string_mask() if size == self._size else None
        if mask is None:
            self._matcher.unsafe_compute_mask_ptr(address, size)
        else:
            ctypes.memmove(address, mask.tobytes(), size)

    def _string_mask(self) -> np.ndarray | None:
        """The mask within a string. None: llguidance has to compute it."""
        texts, strings = self._texts, self._strings
        if strings is None or self._rest or self._characters == strings.most:  # llguidance may force what follows
            return None
        if not self._is_followed:
            self._enter()
            is_there = self._follower.consume_tokens([*self._pending])
            self._pending.clear()
            fitting = self._follower.compute_bitmask() if is_there else None
            self._base = None if fitting is None else self._classes[strings.characters].base(fitting)
        mask = self._base
        if mask is not None and strings.most is not None and strings.most - self._characters < texts.longest:
            mask = mask & texts.fitting(strings.most - self._characters)
        if mask is not None and self._characters < strings.least:
            mask = mask & texts.late(min(strings.least - self._characters, texts.longest + 1))
        return mask

    def _enter(self) -> None:
        """Let the follower enter the open string, as far as it must be before it can be closed."""
        if self._strings is not None and not self._is_followed:
            self._pending += self._classes[self._strings.characters].sample * self._strings.least
            self._is_followed = True

    def _skip(self, text: bytes) -> bytes:
        """Read before the document. Returns the part that is in it."""
        if len(self._marks) == 2:
            self._marks = self._marks[1:] if text.startswith(self._marks[0][:1]) else []
        if not self._marks:
            return text
        before, mark, after = (self._rest + text).partition(self._marks[0])
        self._rest = b"" if mark else before[-len(self._marks[0]) :]
        self._marks = [] if mark else self._marks
        return after

    def _read(self, text: bytes) -> None:
        text = self._skip(text) if self._marks else text
        place = 0
        while place < len(text):
            if self._is_open:
                place = self._read_string(text, place)
                continue
            match = _MARK.search(text, place)
            end = match.end() if match is not None else len(text)
            self._pending += text[place:end]
            place = end
            if match is not None:
                self._read_mark(match[0])

    def _read_mark(self, mark: bytes) -> None:
        frames = self._frames
        if mark == b'"':
            is_name = bool(frames) and frames[-1][1] < 0 and self._name is None
            self._name = b"" if is_name else self._name
            self._is_open, self._is_name, self._is_followed, self._characters = True, is_name, False, 0
            self._strings = None if is_name else self._place.strings
        elif mark == b"{":
            frames.append((self._place, -1))
            self._name = None
        elif mark == b"[":
            frames.append((self._place, 0))
            self._place = self._place.part(0)
        elif mark == b":":
            name = self._name or b""  # with escapes, it may be none of the schema's
            self._place = frames[-1][0].part(None if b"\\" in name else name.decode())
        elif mark == b",":
            place, index = frames[-1]
            if index < 0:
                self._name = None
            else:
                frames[-1] = place, index + 1
                self._place = place.part(index + 1)
        else:
            frames.pop()
            self._name = b""

    def _read_string(self, text: bytes, place: int) -> int:
        """Read on in a string. Returns where that ends in ``text``."""
        content = self._rest + text[place:]
        end = _content_end(content)
        self._characters += _count(content[:end])
        if self._strings is None:
            self._pending += content[:end]
        if self._is_name:
            self._name = (self._name or b"") + content[:end]
        if end == len(content) or content[end] != _QUOTE:
            self._rest = content[end:]
            return len(text)
        self._enter()
        self._pending.append(_QUOTE)
        place += end - len(self._rest) + 1
        self._is_open, self._strings, self._rest = False, None, b""
        return place

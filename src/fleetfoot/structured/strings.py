"""Matchers of grammars, and token masks within the strings of JSON.

In a string of at most n characters, llguidance has a state for each position, and looks at most of the vocabulary in
each. Here a mask is put together: tokens of characters alone, of which the number matters; and tokens that close the
string, where the text from the quote on must fit, too. Which of these texts fit is the same at all positions of a
string, so a second matcher, with a vocabulary of such texts alone, finds it once.

`StringMatcher` reads the JSON beside llguidance to find the place in the schema and the position in the string. Where
the schema is not understood, within escapes and split characters, and outside of strings, masks are llguidance's. With
a version of llguidance whose masks in such strings take as long as in others, `new_matcher` is `plain_matcher`, and all
else here and `places` can go.
"""

from __future__ import annotations

import copy
import ctypes
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from fleetfoot.structured.grammars import WHITESPACE, GrammarText
from fleetfoot.structured.places import Place, Strings, all_strings
from fleetfoot.structured.vocabulary import make_tokenizer

_CHARACTER = (
    rb"\\(?:u[0-9a-fA-F]{4}|[^u])|[\x00-!#-\[\]-\x7f]|[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}"
    rb"|[\xf0-\xf4][\x80-\xbf]{3}"
)
_CHARACTERS = re.compile(rb"(?:%b)*" % _CHARACTER, re.DOTALL)
_EACH = re.compile(_CHARACTER, re.DOTALL)
_MARK = re.compile(rb'[{}\[\]:,"]')
_QUOTE = 0x22
_MAX_ITEMS = 8000  # of a parser's row: an object has four for each property that is not required
_MAX_GRAMMAR = 1 << 16  # characters; larger ones take long to be compiled twice
_MAX_CLASSES = 64  # classes of characters that are kept
_MAX_BASES = 32  # sets of tokens that are kept for a class of characters


def plain_matcher(tokenizer: Any, text: str) -> Any:
    """An `llguidance.LLMatcher` at the beginning, or with an error. ``tokenizer``: an `llguidance.LLTokenizer`."""
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(max_items_in_row=_MAX_ITEMS))


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
    return StringMatcher(matcher, follower, texts, _Reader(Place.root(schema), classes, marks))


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


# --- the document -----------------------------------------------------------------------------------------------------


class _Reader:
    """Where a document is that is read in pieces.

    Args:
        place: of its value.
        classes: of all strings in the schema, by their patterns.
        marks: what a text may begin with, and end with, that is before the document; none: it begins at once.
    """

    __slots__ = (
        "_frames", "_is_name", "_is_open", "_marks", "_name", "_place", "characters", "classes", "is_followed",
        "pending", "rest", "strings",
    )  # fmt: skip

    def __init__(self, place: Place, classes: Mapping[str, _Class], marks: Sequence[bytes]) -> None:
        self.classes = classes
        self._place = place  # of the value that comes next, or is there
        self._marks = [*marks]  # that are ahead
        self._frames: list[tuple[Place, int]] = []  # of what is open: its place, and the index in an array; -1: object
        self._name: bytes | None = None  # of the value; None: it comes next, in an object
        self._is_open = self._is_name = False  # a string
        self.strings: Strings | None = None  # those that the open string is one of; None: none is open, or others
        self.characters = 0  # whole ones that it has
        self.rest = b""  # the part of a character after them
        # what a follower has not consumed; the content of strings does not matter to it, once they are long enough
        self.pending = bytearray()
        self.is_followed = False  # whether the follower is in the open string

    def copy(self) -> _Reader:
        other = copy.copy(self)
        other._frames, other._marks, other.pending = self._frames[:], self._marks[:], self.pending[:]
        return other

    def enter(self) -> None:
        """Let the follower enter the open string, as far as it must be before it can be closed."""
        if self.strings is not None and not self.is_followed:
            self.pending += self.classes[self.strings.characters].sample * self.strings.least
            self.is_followed = True

    def _skip(self, text: bytes) -> bytes:
        """Read before the document. Returns the part that is in it."""
        if len(self._marks) == 2:
            self._marks = self._marks[1:] if text.startswith(self._marks[0][:1]) else []
        if not self._marks:
            return text
        before, mark, after = (self.rest + text).partition(self._marks[0])
        self.rest = b"" if mark else before[-len(self._marks[0]) :]
        self._marks = [] if mark else self._marks
        return after

    def read(self, text: bytes) -> None:
        text = self._skip(text) if self._marks else text
        place = 0
        while place < len(text):
            if self._is_open:
                place = self._read_string(text, place)
                continue
            match = _MARK.search(text, place)
            end = match.end() if match is not None else len(text)
            self.pending += text[place:end]
            place = end
            if match is not None:
                self._read_mark(match[0])

    def _read_mark(self, mark: bytes) -> None:
        frames = self._frames
        if mark == b'"':
            is_name = bool(frames) and frames[-1][1] < 0 and self._name is None
            self._name = b"" if is_name else self._name
            self._is_open, self._is_name, self.is_followed, self.characters = True, is_name, False, 0
            self.strings = None if is_name else self._place.strings
        elif mark == b"{":
            frames.append((self._place, -1))
            self._name = None
        elif mark == b"[":
            frames.append((self._place, 0))
            self._place = self._place.item(0)
        elif mark == b":":
            name = self._name or b""  # with escapes, it may be none of the schema's
            self._place = frames[-1][0].property(None if b"\\" in name else name.decode())
        elif mark == b",":
            place, index = frames[-1]
            if index < 0:
                self._name = None
            else:
                frames[-1] = place, index + 1
                self._place = place.item(index + 1)
        else:
            frames.pop()
            self._name = b""

    def _read_string(self, text: bytes, place: int) -> int:
        """Read on in a string. Returns where that ends in ``text``."""
        content = self.rest + text[place:]
        end = _content_end(content)
        self.characters += _count(content[:end])
        if self.strings is None:
            self.pending += content[:end]
        if self._is_name:
            self._name = (self._name or b"") + content[:end]
        if end == len(content) or content[end] != _QUOTE:
            self.rest = content[end:]
            return len(text)
        self.enter()
        self.pending.append(_QUOTE)
        place += end - len(self.rest) + 1
        self._is_open, self.strings, self.rest = False, None, b""
        return place


# --- the matcher ------------------------------------------------------------------------------------------------------


class StringMatcher:
    """An `llguidance.LLMatcher` with the same masks, of which those within strings take less time.

    Args:
        matcher: at the beginning.
        follower: of the same grammar and the tokenizer of ``texts``.
        reader: at the beginning.
    """

    def __init__(self, matcher: Any, follower: Any, texts: _Texts, reader: _Reader) -> None:
        self._matcher, self._follower, self._texts, self._reader = matcher, follower, texts, reader
        self.is_error, self.validate_tokens = matcher.is_error, matcher.validate_tokens
        self._size = 4 * -(-len(texts.texts) // 32)
        self._base: np.ndarray | None = None  # of the string that it is in

    def __getattr__(self, name: str) -> Any:
        """What changes nothing: whether it accepts an end, has ended, or has an error."""
        if name.startswith(("is_", "get_")):
            return getattr(self._matcher, name)
        raise AttributeError(name)

    def deep_copy(self) -> StringMatcher:
        copied = self._matcher.deep_copy(), self._follower.deep_copy()
        other = StringMatcher(*copied, self._texts, self._reader.copy())
        other._base = self._base
        return other

    def consume_token(self, token_id: int) -> bool:
        if not self._matcher.consume_token(token_id):
            return False
        reader, texts = self._reader, self._texts
        if reader.strings is not None and not reader.rest and texts.is_content[token_id]:
            reader.characters += texts.counts[token_id]
        else:
            reader.read(texts.texts[token_id])
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
        reader, texts = self._reader, self._texts
        strings = reader.strings
        if strings is None or reader.rest or reader.characters == strings.most:  # llguidance may force what follows
            return None
        if not reader.is_followed:
            reader.enter()
            is_there = self._follower.consume_tokens([*reader.pending])
            reader.pending.clear()
            fitting = self._follower.compute_bitmask() if is_there else None
            self._base = None if fitting is None else reader.classes[strings.characters].base(fitting)
        mask = self._base
        if mask is not None and strings.most is not None and strings.most - reader.characters < texts.longest:
            mask = mask & texts.fitting(strings.most - reader.characters)
        if mask is not None and reader.characters < strings.least:
            mask = mask & texts.late(min(strings.least - reader.characters, texts.longest + 1))
        return mask

"""Token masks within the strings of JSON.

In a string of at most n characters, llguidance has a state for each position, and looks at most of the vocabulary in
each. Here a mask is put together: tokens of characters alone, of which the number matters; and tokens that close the
string, where the text from the quote on must fit, too. Which of these texts fit is the same at all positions of a
string, so a second matcher, with a vocabulary of such texts alone, finds it once.

`StringMatcher` reads the JSON beside llguidance to find the place in the schema and the position in the string. Where
the schema is not understood, within escapes and split characters, and outside of strings, masks are llguidance's.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
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
_NUM_BYTES = 256
_MAX_GRAMMAR = 1 << 16
"""Characters. Larger ones take long to be compiled twice."""
_MAX_CLASSES = 64
"""Classes of characters that are kept."""
_MAX_BASES = 32
"""Sets of tokens that are kept for a class of characters."""

MakeMatcher = Callable[[Any, str], Any]
"""An `llguidance.LLMatcher` of a tokenizer and a grammar."""


def with_strings(tokenizer: Any, grammar: GrammarText, matcher: Any, make: MakeMatcher) -> Any:
    """A matcher of a grammar, or a `StringMatcher` in its place."""
    schema = grammar.schema
    if matcher.is_error() or schema is None or len(grammar.text) > _MAX_GRAMMAR:
        return matcher
    kinds = {*all_strings(schema)}
    space = schema.get("x-guidance", {}).get("whitespace_pattern", WHITESPACE)
    if space != WHITESPACE or all(kind.most is None for kind in kinds):
        return matcher
    texts = _texts_of(tokenizer)
    follower = make(texts.tokenizer, json.dumps({"grammars": [{"json_schema": schema}]}))
    classes = {kind.characters: texts.characters(kind.characters, make) for kind in kinds}
    if texts.quote < 0 or follower.is_error() or not all(found.sample for found in classes.values()):
        return matcher
    samples = {pattern: found.sample for pattern, found in classes.items()}
    reader = _Reader(Place.root(schema), samples, texts.marks(grammar.marks))
    return StringMatcher(matcher, follower, texts, classes, reader)


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


def _tokenizer_of(texts: Iterable[bytes]) -> tuple[Any, dict[bytes, int]]:
    """An `llguidance.LLTokenizer` with the bytes, these texts, and an end token; and the tokens of the texts."""
    tokens = [bytes([byte]) for byte in range(_NUM_BYTES)]
    tokens += [text for text in texts if len(text) > 1]
    end = len(tokens)
    made = make_tokenizer([*tokens, b"<end>"], [end], [end], lambda text: list(text.encode()))
    return made, {text: token for token, text in enumerate(tokens)}


class _Texts:
    """The tokens of a vocabulary as text within a string."""

    def __init__(self, tokenizer: Any) -> None:
        from llguidance import LLMatcher

        self.source = tokenizer
        num = tokenizer.vocab_size
        special = {token for token in range(num) if tokenizer.is_special_token(token)} | {*tokenizer.eos_tokens}
        self.texts = [
            b"\xff%d\xff" % token if token in special else tokenizer.decode_bytes([token]) for token in range(num)
        ]  # no text has such bytes
        self.counts = [0] * num
        """Characters of each, up to the quote that closes the string; the last one may be a part."""
        self.is_content = bytearray(num)
        """Tokens of whole characters."""
        closing: dict[bytes, list[tuple[int, bytes]]] = {}
        matcher = LLMatcher(tokenizer, "start: /(?s:.*)/", log_level=0)  # no special tokens, and none without text
        for token in np.flatnonzero(_flags(matcher.compute_bitmask(), num)).tolist():
            text, end = self.texts[token], _content_end(self.texts[token])
            is_closing = text[end : end + 1] == b'"'
            self.is_content[token] = is_whole = end == len(text)
            self.counts[token] = _count(text[:end]) + (not is_whole and not is_closing)
            if is_closing:
                closing.setdefault(text[end:], []).append((token, text[:end]))
        self.longest = max(self.counts)
        self.quote = self.texts.index(b'"') if b'"' in self.texts else -1
        self.tokenizer, tokens = _tokenizer_of(closing)
        """Tokenizer of the bytes, and of the texts from the quote on that closes a string."""
        self.closing = {tokens[text]: found for text, found in closing.items()}
        """The tokens with such texts, and the text before it."""
        self._all_counts = np.array(self.counts)
        self._is_closing = np.zeros(len(self.texts), dtype=bool)
        self._is_closing[[token for found in self.closing.values() for token, _ in found]] = True
        self._fitting: dict[int, np.ndarray] = {}
        self._late: dict[int, np.ndarray] = {}
        self._classes: OrderedDict[str, _Class] = OrderedDict()

    def marks(self, marks: Iterable[int | str]) -> list[bytes]:
        """Marks as `texts` has them: a token, or a text."""
        return [self.texts[mark] if isinstance(mark, int) else mark.encode() for mark in marks]

    def fitting(self, most: int) -> np.ndarray:
        """The tokens with at most so many characters, as a mask."""
        mask = self._fitting.get(most)
        if mask is None:
            mask = self._fitting[most] = _bits(self._all_counts <= most)
        return mask

    def late(self, least: int) -> np.ndarray:
        """The tokens that close no string before so many characters, as a mask."""
        least = min(least, self.longest + 1)
        mask = self._late.get(least)
        if mask is None:
            mask = self._late[least] = _bits(~self._is_closing | (self._all_counts >= least))
        return mask

    def characters(self, pattern: str, make: MakeMatcher) -> _Class:
        """A class of characters."""
        if pattern not in self._classes:
            self._classes[pattern] = _Class(self, pattern, make)
            if len(self._classes) > _MAX_CLASSES:
                self._classes.popitem(last=False)
        return self._classes[pattern]


@lru_cache(maxsize=2)
def _texts_of(tokenizer: Any) -> _Texts:
    return _Texts(tokenizer)


class _Class:
    """The tokens that may be in strings of a class of characters."""

    def __init__(self, texts: _Texts, pattern: str, make: MakeMatcher) -> None:
        most = texts.longest + 1
        options = {"lenient": False, "whitespace_flexible": False}
        schema = {"type": "string", "maxLength": most, "x-guidance": options}
        if pattern:
            schema = {"type": "string", "pattern": f"^{pattern}{{0,{most}}}$", "x-guidance": options}
        grammar = json.dumps({"grammars": [{"json_schema": schema}]})
        matcher = make(texts.source, grammar)
        matcher.consume_token(texts.quote)
        allowed = _flags(matcher.compute_bitmask(), len(texts.texts))
        starts = {start for found in texts.closing.values() for _, start in found}
        tokenizer, tokens = _tokenizer_of(starts)
        matcher = make(tokenizer, grammar)
        matcher.consume_token(_QUOTE)
        fits = _flags(matcher.compute_bitmask(), len(tokens))
        samples = [bytes([byte]) for byte in range(0x20, 0x7F) if fits[byte] and byte not in b'"\\']
        self.sample = samples[0] if len(samples) > 1 else b""
        """A character of one byte; empty: there is none, or no other, which llguidance would force."""
        valid = {start for start in starts if not start or fits[tokens[start]]}
        self._content = allowed
        self._closing = {}
        for text, found in texts.closing.items():
            self._content[[token for token, _ in found]] = False
            self._closing[text] = [token for token, start in found if start in valid]
        self._bases: OrderedDict[bytes, np.ndarray] = OrderedDict()

    def base(self, fitting: bytes) -> np.ndarray:
        """The tokens of a string, as a mask. ``fitting``: the mask of `_Texts.tokenizer`."""
        base = self._bases.get(fitting)
        if base is None:
            flags = self._content.copy()
            for text in np.flatnonzero(np.unpackbits(np.frombuffer(fitting, dtype=np.uint8), bitorder="little")):
                flags[self._closing.get(int(text), [])] = True
            base = self._bases[fitting] = _bits(flags)
            if len(self._bases) > _MAX_BASES:
                self._bases.popitem(last=False)
        return base


# --- the document -----------------------------------------------------------------------------------------------------


class _Reader:
    """Where a document is that is read in pieces.

    Args:
        place: of its value.
        samples: a character of each class.
        marks: what a text may begin with, and end with, that is before the document; none: it begins at once.
    """

    __slots__ = (
        "_frames", "_is_name", "_is_open", "_marks", "_name", "_place", "_samples", "characters", "is_followed",
        "pending", "rest", "strings",
    )  # fmt: skip

    def __init__(self, place: Place, samples: Mapping[str, bytes], marks: Sequence[bytes]) -> None:
        self._place = place  # of the value that comes next, or is there
        self._samples = samples
        self._marks = [*marks]  # that are ahead
        self._frames: list[tuple[Place, int]] = []  # of what is open: its place, and the index in an array; -1: object
        self._name: bytes | None = None  # of the value; None: it comes next, in an object
        self._is_open = self._is_name = False  # a string
        self.strings: Strings | None = None
        """Those that the open string is one of. None: none is open, or it is in none."""
        self.characters = 0
        """Whole ones that it has."""
        self.rest = b""
        """The part of a character after them."""
        self.pending = bytearray()
        """What a follower has not consumed. The content of strings does not matter to it, once they are long enough."""
        self.is_followed = False
        """Whether the follower is in the open string."""

    def copy(self) -> _Reader:
        other = _Reader.__new__(_Reader)
        for name in _Reader.__slots__:
            setattr(other, name, getattr(self, name))
        other._frames, other._marks, other.pending = self._frames[:], self._marks[:], self.pending[:]
        return other

    def enter(self) -> None:
        """Let the follower enter the open string, as far as it must be before it can be closed."""
        if self.strings is not None and not self.is_followed:
            self.pending += self._samples[self.strings.characters] * self.strings.least
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
        classes: of all strings in the schema.
        reader: at the beginning.
    """

    def __init__(
        self, matcher: Any, follower: Any, texts: _Texts, classes: Mapping[str, _Class], reader: _Reader
    ) -> None:
        self._matcher, self._follower = matcher, follower
        self._texts, self._classes, self._reader = texts, classes, reader
        self._size = 4 * -(-len(texts.texts) // 32)
        self._base: np.ndarray | None = None  # of the string that it is in

    def deep_copy(self) -> StringMatcher:
        other = StringMatcher.__new__(StringMatcher)
        other.__dict__.update(self.__dict__)
        other._matcher, other._follower = self._matcher.deep_copy(), self._follower.deep_copy()
        other._reader = self._reader.copy()
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

    def consume_tokens(self, token_ids: Sequence[int]) -> bool:
        return all(self.consume_token(token_id) for token_id in token_ids)

    def try_consume_tokens(self, token_ids: Sequence[int]) -> int:
        num = int(self._matcher.validate_tokens(token_ids))
        self.consume_tokens(token_ids[:num])
        return num

    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        return int(self._matcher.validate_tokens(token_ids))

    def is_accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    def is_error(self) -> bool:
        return bool(self._matcher.is_error())

    def get_error(self) -> str:
        return str(self._matcher.get_error())

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
            is_there = self._follower.consume_tokens(list(reader.pending))
            reader.pending.clear()
            fitting = self._follower.compute_bitmask() if is_there else None
            self._base = None if fitting is None else self._classes[strings.characters].base(fitting)
        mask = self._base
        if mask is not None and strings.most is not None and strings.most - reader.characters < texts.longest:
            mask = mask & texts.fitting(strings.most - reader.characters)
        if mask is not None and reader.characters < strings.least:
            mask = mask & texts.late(strings.least - reader.characters)
        return mask

    def unsafe_compute_mask_ptr_with_draft_token(self, address: int, size: int, drafts: Sequence[int]) -> None:
        """Write the masks before and after drafts, as far as they are accepted. It has consumed those then."""
        for place, token_id in enumerate(drafts):
            self.unsafe_compute_mask_ptr(address + place * size, size)
            if self.validate_tokens([token_id]) != 1:
                return
            self.consume_token(token_id)
        self.unsafe_compute_mask_ptr(address + len(drafts) * size, size)

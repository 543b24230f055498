"""Texts that are cut before they are tokenized, where one end of their tokens is needed.

A text is cut between a letter and a space before a letter, or a mark of Chinese and Japanese punctuation, where the
tokenizer provably ends a token whatever stands elsewhere: the tokens of both parts are those of the whole. It does if

- its pre-tokenizer splits there. Those with regular expressions are known by their alternatives, none of which matches
  a letter and what follows it, or looks beyond a letter at its end;
- or it is BPE without a token that has a letter and what follows it: each merge makes a token (Sennrich et al. 2016).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers.models import BPE

from fleetfoot.utils.validation import FieldError

_LETTER = "A-Za-zÀ-ÖØ-öø-ɏА-яЁёа-яא-ת一-龥ぁ-ゖァ-ヺ가-힣"
"""Letters in every version of Unicode, which compose with nothing that follows here."""
_MARKS = "。，、！？；：」）"  # noqa: RUF001
_MOST_UNCUT = 1 << 20
"""Characters that are tokenized at once where a text cannot be cut."""
_LEAST_PIECE, _MOST_PIECE = 1 << 10, 1 << 16
"""Characters that are tokenized at a time."""

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ALTERNATIVES = {
    *_CONTRACTIONS.split("|"),
    f"(?i:{_CONTRACTIONS})",
    *(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{end}" for end in ("", f"(?i:{_CONTRACTIONS})?")),
    *(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{end}" for end in ("", f"(?i:{_CONTRACTIONS})?")),
    *(r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?\p{L}+", r"[\p{Han}]+"),
    *("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""),
    *(r"\p{N}", r"\p{N}+", r" ?\p{N}+", r"\p{N}{1,3}"),
    *(rf" ?[^\s\p{{L}}\p{{N}}]+{end}" for end in ("", r"[\r\n]*", r"[\r\n/]*")),
    *(r" ?[\p{P}\p{S}]+[\r\n]*", r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
}
"""Those in the expressions of GPT-2, GPT-4, GPT-4o, Llama 3, Qwen 2, Mistral's Tekken, DeepSeek V3 and Kimi K2."""
_SPLITTING = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer"}
_LOCAL = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"}
_NEUTRAL = {"Digits", "Punctuation"}


@dataclass(frozen=True, slots=True)
class TextCutter:
    """Cuts texts of one tokenizer.

    Args:
        places: a match is a place where a text can be cut.
        drops_space: whether the tokenizer adds a space before a text, so that the one after a cut is left out.
        count: the number of tokens of a part.
    """

    places: re.Pattern[str]
    drops_space: bool
    count: Callable[[str], int]

    def last(self, text: str, most: int) -> str:
        """An end of the text, the last ``most`` tokens of which are those of the text; or all of it."""
        num_tokens, begin = 0, len(text)
        for begin, end in self._parts_from_end(text, most):
            num_tokens += self.count(self._part(text, begin, end))
            if num_tokens >= most:
                break
        return self._part(text, begin, len(text))

    def first(self, text: str, most: int) -> str:
        """A beginning of the text, the first ``most`` tokens of which are those of the text; or all of it."""
        num_tokens, begin, size = 0, 0, _piece_size(most)
        while begin < len(text) and num_tokens < most:
            end = self._place(text, begin + size)
            _check_part(end - begin)
            num_tokens += self.count(self._part(text, begin, end))
            begin = end
        return text[:begin]

    def parts(self, text: str) -> Iterator[str]:
        """Parts of the text, the tokens of which one after another are those of the text."""
        begin = 0
        while begin < len(text):
            end = self._place(text, begin + _MOST_PIECE)
            yield self._part(text, begin, end)
            begin = end

    def check(self, text: str) -> None:
        """Raise ValueError for a text with a part that is too long to be tokenized at once."""
        begin = 0
        while begin < len(text):
            end = self._place(text, begin + _MOST_PIECE)
            _check_part(end - begin)
            begin = end

    def _place(self, text: str, low: int) -> int:
        """The first place from ``low`` on, or the end of the text. A search keeps the interpreter, so each is short."""
        while low < len(text):
            high = low + _MOST_PIECE
            if place := self.places.search(text, low, high + 1):  # up to two characters follow a place
                return place.start()
            low = high
        return len(text)

    def _part(self, text: str, begin: int, end: int) -> str:
        return text[begin + (begin > 0 and self.drops_space) : end]

    def _parts_from_end(self, text: str, most: int) -> Iterator[tuple[int, int]]:
        size, end = _piece_size(most), len(text)
        while end:
            low = high = end
            place = None
            while place is None and low:
                low, high = max(0, low - size), low
                _check_part(end - low)
                place = self.places.search(text, max(1, low), min(len(text), high + 1))
                if place is not None and place.start() >= end:
                    place = None
            begin = place.start() if place else 0
            yield begin, end
            end = begin


def _piece_size(most: int) -> int:
    return min(_MOST_PIECE, max(_LEAST_PIECE, 8 * most))


def _check_part(size: int) -> None:
    if size > _MOST_UNCUT:
        raise FieldError(
            "prompt",
            f"has {size:,} characters without a place where it can be cut; {_MOST_UNCUT:,} are the most: shorten it "
            "before it is sent",
        )


def check_uncut(text: str) -> None:
    """Raise ValueError for a text that is too long for a tokenizer of which no place for a cut is known."""
    _check_part(len(text))


def text_cutter(backend: tokenizers.Tokenizer) -> TextCutter | None:
    """The cutter of a tokenizer; None: no place is known where its texts can be cut."""
    normalizers, prepends = _normalizers(backend)
    pre_tokenizers = _steps(backend.pre_tokenizer, "pretokenizers")
    if normalizers is None:
        return None
    kinds = [_splits(step) for step in pre_tokenizers]
    if None in kinds:
        return None
    schemes = [step.get("prepend_scheme", "always") for step in pre_tokenizers if step["type"] == "Metaspace"]
    prepends |= any(step.get("add_prefix_space") for step in pre_tokenizers) or bool({*schemes} - {"never"})
    needs_spaces = bool({step["type"] for step in pre_tokenizers} & {"Metaspace", "WhitespaceSplit"})
    marks = "" if prepends or needs_spaces else _MARKS
    if not any(kinds):
        model: Any = backend.model
        is_bytes = any(step["type"] == "ByteLevel" for step in pre_tokenizers)  # the vocabulary has no spaces
        if not isinstance(model, BPE) or is_bytes or (model.fuse_unk and not model.byte_fallback):
            return None
        vocabulary = "\n".join(backend.get_vocab(with_added_tokens=False))
        marks = "".join(mark for mark in marks if not re.search(f"[{_LETTER}]{mark}", vocabulary))
        if re.search(f"[{_LETTER}][ ▁]", vocabulary):
            return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip or re.search(f"[{_LETTER}][ {_MARKS}]", token.content) for token in added):
        return None
    after = f" [{_LETTER}]" + (f"|[{marks}]" if marks else "")
    # a prefix space is not added where one stands, and `Prepend` adds another
    drops_space = any(step["type"] == "Prepend" for step in normalizers)
    return TextCutter(
        re.compile(f"(?<=[{_LETTER}])(?={after})"),
        drops_space,
        lambda text: len(backend.encode_batch_fast([text], add_special_tokens=False)[0]),
    )


def _normalizers(backend: tokenizers.Tokenizer) -> tuple[list[dict[str, Any]] | None, bool]:
    """The steps, None if one is not known to be local; and whether they add a text at the beginning."""
    steps = _steps(backend.normalizer, "normalizers")
    for step in steps:
        is_space = step["type"] == "Replace" and (step["pattern"], step["content"]) == ({"String": " "}, "▁")
        is_prefix = step["type"] == "Prepend" and step["prepend"] == "▁"
        if not (is_space or is_prefix or step["type"] in _LOCAL):
            return None, False
    return steps, any(step["type"] == "Prepend" for step in steps)


def _splits(step: dict[str, Any]) -> bool | None:
    """Whether a pre-tokenizer splits at each place; None: that is not known."""
    kind = step["type"]
    if kind in _SPLITTING or (kind == "ByteLevel" and step.get("use_regex", True)):
        return True
    if kind == "Metaspace":
        return bool(step.get("split", True)) if step.get("replacement") == "▁" else None
    if kind in _NEUTRAL or kind == "ByteLevel":
        return False
    if kind != "Split" or step.get("invert"):
        return None
    pattern = step["pattern"]
    if "String" in pattern:  # after a normalizer that has replaced spaces it does nothing
        return False if pattern["String"] == " " else None
    if step["behavior"] not in ("Isolated", "Removed") or not set(_alternatives(pattern["Regex"])) <= _ALTERNATIVES:
        return None
    return any(r"\p{L}" in one or r"\p{Ll}" in one for one in _alternatives(pattern["Regex"]))


def _alternatives(pattern: str) -> list[str]:
    """The alternatives of a regular expression."""
    parts, depth, in_class, position = [""], 0, False, 0
    while position < len(pattern):
        size = 2 if pattern[position] == "\\" else 1
        piece = pattern[position : position + size]
        position += size
        if in_class:
            in_class = piece != "]"
        else:
            in_class = piece == "["
            depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth and not in_class:
            parts.append("")
        else:
            parts[-1] += piece.replace("\r", r"\r").replace("\n", r"\n") if size == 1 else piece
    return parts


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer."""
    if part is None:
        return []
    step: dict[str, Any] = json.loads(part.__getstate__())
    steps = [step]
    while any(one["type"] == "Sequence" for one in steps):
        steps = [inner for one in steps for inner in (one[name] if one["type"] == "Sequence" else [one])]
    return steps

"""JSON as models write it: read as it arrives, passed on as valid JSON."""

from __future__ import annotations

import json
import math
import re
from typing import cast

from fleetfoot.parsers.completion import completion
from fleetfoot.parsers.reader import Reader, Sink, Wait
from fleetfoot.parsers.typed import MAX_DEPTH, json_text, python_value

_MAX_SCALAR = 300
"""Characters of a number or a word."""
_CLOSERS = {"{": "}}", "[": "]]", "(": ")]"}
_SET = "}]"
"""What ends a value, and what is written then."""
_MAX_HELD = 1000
"""Characters that wait for what decides where a value ends."""
_ENDS = "<`"
"""Begin a mark of the format, or the end of a block of code."""
_STRING_ENDS = ",:]})"
_STRING_CLOSERS = "]})"
_COMMENTS = {"//": "\n", "/*": "*/"}
_SPECIAL = {
    '"': re.compile(r'["\\\x00-\x1f]'),
    "'": re.compile(r"""['"\\\x00-\x1f]"""),
    "`": re.compile(r'[`"\\\x00-\x1f]'),
}
"""What is not passed on as it is, by the quote of a string."""
_DEEP = re.compile(r'[^"\\\[\]{}()<`]+|\\.|.', re.DOTALL)
"""A part of a value that is passed on as a string: a bracket, a quote, an escape, or what is between."""
_SUFFIX = re.compile(r"\[|\.\w*[(\[]?")
_NEXT_KEY = {
    quote: re.compile(
        rf"(?P<rest>[^{quote}]*?)\s*,\s*{quote}(?:[^{quote}\\]|\\.)+{quote}\s*:"
        rf"|[^{quote}]*[^{quote},\s]\s*{quote}|[^{quote}]*{quote}(?:[^{quote}\\]|\\.)*{quote}\s*[^\s:]",
        re.DOTALL,
    )
    for quote in _SPECIAL
}
"""The rest of a value before a comma and the next key; or two quotes that are no such key."""
_PROSE = {
    quote: re.compile(
        rf"(?P<text>,[^:,{{}}\[\]\n{quote}]*[^:,{{}}\[\]\s{quote}][^:,{{}}\[\]\n{quote}]*{quote}[^\S\n]*[,}}])"
        rf"|,\s*[:,{{}}\[\]{quote}]|,[^:,{{}}\[\]\n{quote}]*(?:[:,{{}}\[\]\n]|{quote}[^\S\n]*[^\s,}}]|{quote}\s*\n)",
        re.DOTALL,
    )
    for quote in _SPECIAL
}
"""A comma that does not end a string, since words and another quote follow, which does; or one that does."""
_BARE_END = re.compile(r"""[,\[\]{}()<`\n"']|(?<=\s/)[/*]""")
_BARE_KEY_END = re.compile(r"""[:,\[\]{}()<`\n"']""")
_PREFIX = re.compile(r"[rRbBuUfF]{1,2}")
_ESCAPED = re.compile(r"u[0-9a-fA-F]{4}")
_HIGH, _LOW = re.compile(r"u[dD][89abAB]"), re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)


def read_json(reader: Reader, sink: Sink, *, drops: bool = True) -> Wait[bool]:
    """Read a value and pass it on as it comes. False: the text has ended within it (`completion`).

    Valid JSON is passed on as it is. Else control characters and quotes within strings are escaped, commas added or
    dropped, comments left out, and strings, words, tuples and sets of Python become JSON. Anything else is a string.

    Args:
        drops: whether the reader forgets what was read. Without, the text can still become something else.
    """
    return (yield from _Value(reader, sink, drops=drops).read())


def read_string(reader: Reader) -> Wait[str | None]:
    """Read a string. None: it is none, or is cut."""
    quote = yield from reader.peek()
    if not quote or quote not in _SPECIAL:
        return None
    pieces = ['"']
    reader.position += 1
    is_whole = yield from _Value(reader, pieces.append, drops=False).string(quote)
    return json.loads("".join(pieces)) if is_whole else None


def object_text(text: str) -> str | None:
    """The text of arguments that were read, which may be encoded twice, or null. None: they are no object."""
    value = json.loads(text)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        reader, pieces = Reader(), list[str]()
        reader.text, reader.is_over = value.lstrip(), True
        for _ in read_json(reader, pieces.append):
            pass
        return "".join(pieces) + completion("".join(pieces))
    return text if isinstance(value, dict) else "{}" if value in (None, "") else None


class _Value:
    def __init__(self, reader: Reader, sink: Sink, *, drops: bool) -> None:
        self._reader, self._sink, self._drops = reader, sink, drops
        self._held = ""
        """White space, and perhaps a comma, that precede what is written next."""
        self._closers: list[str] = []
        self._open = ""
        """A brace that was read and not written, since what it begins may be a set, and what precedes it."""
        self._is_doubled = False
        """Whether the braces are those of a template: ``{{"a": 1}}``."""

    def _write(self, text: str) -> None:
        self._sink(self._open + self._held + text)
        self._open = self._held = ""

    def _drop(self) -> None:
        if self._drops:
            self._reader.drop()

    def read(self) -> Wait[bool]:
        expects = "value"
        """``value``, ``key``, ``item`` of a list, or ``more`` of what is open."""
        while True:
            character = yield from self._next()
            self._drop()
            if not character:
                return False
            is_mark = character in _ENDS and (yield from self._reader.at_mark())
            if is_mark or (character in "]})" and not self._closers):
                if expects == "value":
                    self._write("null")
                while self._closers:
                    self._close()
                return True
            if character in ",]})" and expects == "value" and self._closers:
                self._write("null")
                expects = "more"
            if character in "]})":
                self._reader.position += 1
                self._close_up_to(character)
                expects = "more"
            elif character == ",":
                self._reader.position += 1
                if expects == "more":
                    self._held += ","
                    expects = self._item
            elif character == ":" and expects in ("key", "more"):
                self._reader.position += 1
            else:
                if expects == "more":
                    self._held, expects = "," + self._held, self._item
                found = yield from (self._key() if expects == "key" else self._any(character))
                if not found:
                    return False
                expects = found
            if not self._closers and expects == "more":
                if self._is_doubled:
                    yield from self._reader.literal("}")
                self._drop()
                return True

    @property
    def _item(self) -> str:
        return "key" if self._closers[-1] == "}}" else "item"

    def _next(self) -> Wait[str]:
        """Hold white space back, and return the next character; "" at the end. Comments are dropped."""
        reader, character = self._reader, "/"
        while character == "/":
            start = reader.position
            yield from reader.space()
            self._held += "".join(one if one in " \t\r\n" else " " for one in reader.text[start : reader.position])
            character = yield from reader.peek()
            end = (yield from self._comment()) if character == "/" else ""
            if not end:
                break
            begin = reader.position + 2
            while (place := reader.text.find(end, begin)) < 0:
                begin = max(begin, len(reader.text) - 1)
                if not (yield from reader.more()):
                    break
            reader.position = len(reader.text) if place < 0 else place + len(end.strip())
        return character

    def _comment(self) -> Wait[str]:
        """What ends the comment of JavaScript that begins here; "": none does."""
        reader = self._reader
        if not (yield from self._has(2)):
            return ""
        return _COMMENTS.get(reader.text[reader.position : reader.position + 2], "")

    def _close(self) -> None:
        self._held = self._held.replace(",", "")
        self._write(self._closers.pop()[1])

    def _close_up_to(self, closer: str) -> None:
        """Close what is open up to a bracket; the innermost one, if there is none of its kind."""
        is_open = any(one[0] == closer for one in self._closers)
        while is_open and self._closers[-1][0] != closer:
            self._close()
        self._close()

    def _key(self) -> Wait[str]:
        """Read a key and its colon, or a member of a set. "" at the end of the text."""
        reader, pieces = self._reader, list[str]()
        character = yield from reader.peek()
        can_be_set = self._open and len(self._closers) > 1
        if character in "{[(" and can_be_set:
            self._begin_set()
            return (yield from self._any(character))
        if character == "{" and self._open:
            reader.position += 1
            self._is_doubled = True
            return "key"
        is_string = character in _SPECIAL
        if is_string:
            reader.position += 1
            pieces.append('"')
            if not (yield from _Value(reader, pieces.append, drops=False).string(character)):
                return ""
        else:
            text = yield from self._bare(_BARE_KEY_END)
            pieces.append(json.dumps(text, ensure_ascii=False))
        held, self._held = self._held, ""
        following = yield from self._next()
        space, self._held = self._held, held
        if following == ":":
            reader.position += 1
            self._write("".join(pieces) + space + ":")
            return "value"
        if not following:
            return ""
        if can_be_set:
            self._begin_set()
            self._write("".join(pieces) if is_string else _scalar(text))
        else:
            self._write("".join(pieces) + ": null")
        self._held = space
        return "more"

    def _begin_set(self) -> None:
        self._open, self._closers[-1] = self._open[:-1], _SET
        self._write("[")

    def _any(self, character: str) -> Wait[str]:
        """Read a value, or the bracket that begins one. "" at the end of the text."""
        reader = self._reader
        if character in _CLOSERS and len(self._closers) < MAX_DEPTH:
            reader.position += 1
            if character == "{":
                self._open, self._held = self._held + "{", ""
            else:
                self._write("[")
            self._closers.append(_CLOSERS[character])
            return "key" if character == "{" else "item"
        if character in _CLOSERS:
            return (yield from self._deep())
        text = ""
        if character not in _SPECIAL:
            text = yield from self._bare(_BARE_END)
            character = yield from reader.peek()
            while character in _SPECIAL and not _PREFIX.fullmatch(text):  # as in 5" or don't
                if reader.text[reader.position - 1].isspace() and not _scalar(text).startswith('"'):
                    self._write(_scalar(text))
                    return "more"
                reader.position += 1
                text += character + (yield from self._bare(_BARE_END))
                character = yield from reader.peek()
            if not character and reader.is_cut:
                return ""
        if character and character in _SPECIAL:
            reader.position += 1
            self._write('"')
            whole = yield from self.string(character, is_raw="r" in text.lower())
            return "more" if whole else ""
        self._write(_scalar(text))
        return "more"

    def _deep(self) -> Wait[str]:
        """Pass on a value that is deeper than values can be as a string. "" at the end of the text."""
        reader, depth, is_string = self._reader, 0, False
        self._write('"')
        while character := (yield from reader.peek()):
            if character in _ENDS and (yield from reader.at_mark()):
                break
            if character == "\\" and not (yield from self._has(2)):
                return ""
            part = cast("re.Match[str]", _DEEP.match(reader.text, reader.position))[0]
            reader.position += len(part)
            self._sink(json.dumps(part, ensure_ascii=False)[1:-1])
            self._drop()
            is_string ^= part == '"'
            depth += 0 if is_string else (part in _CLOSERS) - (part in _STRING_CLOSERS)
            if not depth:
                break
        else:
            return ""
        self._sink('"')
        return "more"

    def _bare(self, end: re.Pattern[str]) -> Wait[str]:
        """Read text without quotes: up to what ends a value, or a key, outside of brackets that are closed."""
        reader = self._reader
        start = reader.position
        closers, quote, inner = "", "", -1
        while True:
            match = end.search(reader.text, reader.position)
            if match is None:
                reader.position = len(reader.text)
                if not (yield from reader.more()):
                    break
                continue
            reader.position, character = match.start(), match[0]
            if closers and reader.position - start > _MAX_HELD:
                break
            if character in _ENDS:
                if (yield from reader.at_mark()):
                    break
            elif quote:
                quote = quote.replace(character, "")
            elif character in _CLOSERS:
                closers += _CLOSERS[character][0]
            elif not closers:
                if character != "," or not (yield from self._goes_on()):
                    reader.position -= character in "/*"
                    return reader.text[start : reader.position].strip()
            else:
                inner = reader.position if inner < 0 else inner
                quote = character if character in _SPECIAL else ""
                if character == closers[-1]:
                    closers = closers[:-1]
                    inner = inner if closers else -1
                elif character in "]})":
                    break
            reader.position += 1
        if closers and inner >= 0:
            reader.position = inner
        return reader.text[start : reader.position].strip()

    def _goes_on(self) -> Wait[bool]:
        """Whether a value of an object goes on after the comma here, since no key follows."""
        if not self._closers or self._closers[-1] != "}}":
            return False
        reader = self._reader
        place = reader.position + 1
        while (match := _BARE_KEY_END.search(reader.text, place)) is None and len(reader.text) - place < _MAX_HELD:
            if not (yield from reader.more()):
                return False
        text = reader.text[place : match.start() if match else place].strip()
        return match is not None and match[0] in ",})" and bool(text) and not text.startswith(tuple(_COMMENTS))

    def string(self, quote: str, *, is_raw: bool = False) -> Wait[bool]:
        """Pass on a string after its first quote, and the last one. False: it is cut."""
        reader = self._reader
        is_triple = yield from reader.literal(quote * 2)
        is_doubtful = False
        """Whether a quote that seemed to be part of the string was perhaps its end."""
        while True:
            if is_doubtful:
                quoted = reader.text.find(quote, reader.position)
                place, mark = reader.marks.search(reader.text, reader.position, is_over=reader.is_over)
                is_doubtful = len(reader.text) - reader.position < _MAX_HELD and not 0 <= quoted < place
                if is_doubtful and not (mark or reader.is_over):
                    yield from reader.more()
                    continue
                if is_doubtful and (mark or not reader.is_cut):
                    text = _balanced(reader.text[reader.position : place])
                    self._sink(json.dumps(text, ensure_ascii=False)[1:])
                    reader.position += len(text)
                    return True
            match = _SPECIAL[quote].search(reader.text, reader.position)
            end = match.start() if match else len(reader.text)
            if end > reader.position:
                self._sink(reader.text[reader.position : end])
            reader.position = end
            self._drop()
            if match is None:
                if not (yield from reader.more()):
                    return False
                continue
            reader.position += 1
            if match[0] == "\\":
                escaped = yield from self._escape(is_raw=is_raw)
                if not escaped:
                    return False
                self._sink(escaped)
            elif match[0] != quote:
                self._sink(json.dumps(match[0])[1:-1])
            elif is_triple and (yield from reader.literal(quote * 2)):
                self._sink('"')
                return True
            else:
                found = "" if is_triple else (yield from self._after_quote(quote))
                if found is None:
                    return False
                if found in _SPECIAL:  # a sum
                    quote = found
                elif found:
                    self._sink('"')
                    return True
                else:
                    is_doubtful = not is_triple
                    self._sink(json.dumps(quote)[1:-1])

    def _after_quote(self, own: str) -> Wait[str | None]:
        """A text if a quote ends a string, "" if it is part of it, and None if the text is cut.

        A string is followed by a comma or a bracket, by another line, or by the rest of an expression, which is passed
        on. After a plus and a quote, which are read then, it goes on; they are returned.
        """
        reader = self._reader
        start = reader.position
        yield from reader.space()
        has_line = "\n" in reader.text[start : reader.position]
        character = yield from reader.peek()
        if not character:
            return None if reader.is_cut else "end"
        if character == "+":
            reader.position += 1
            yield from reader.space()
            quote = yield from reader.peek()
            if quote in _SPECIAL:
                reader.position += 1
                return quote
        is_comment = character == "/" and reader.position > start and (yield from self._comment())
        is_mark = character in _ENDS and (yield from reader.at_mark())
        if has_line or is_comment or is_mark or character in _STRING_ENDS:
            is_inner = character == "," and bool((yield from self._ahead(_PROSE[own], "text")))
            reader.position = start
            return "" if is_inner else "end"
        reader.position = start
        rest = yield from self._expression(own)
        if rest:
            self._sink(json.dumps(own + rest, ensure_ascii=False)[1:-1])
            reader.position = start + len(rest)
        return "end" if rest else ""

    def _expression(self, quote: str) -> Wait[str]:
        """What follows the quote of a string that is part of an expression, as in ``"x"[0]`` or ``"%d" % 3``. Reads
        nothing."""
        reader, start = self._reader, self._reader.position
        while (suffix := _SUFFIX.match(reader.text, start)) and suffix.end() == len(reader.text):
            if not (yield from reader.more()):
                break
        if suffix and suffix[0][-1] in _CLOSERS:
            text = yield from self._bare(_BARE_END)
            character = yield from reader.peek()
            is_end = (
                not character or character in _STRING_ENDS or (character in _ENDS and (yield from reader.at_mark()))
            )
            reader.position = start
            if is_end and not reader.is_cut:
                return text
        return _balanced((yield from self._ahead(_NEXT_KEY[quote], "rest")))

    def _ahead(self, pattern: re.Pattern[str], group: str) -> Wait[str]:
        """What a group of a pattern matches here in an object, as soon as that is known; else "". Reads nothing."""
        reader, match = self._reader, None
        while self._closers[-1:] == ["}}"] and not match:
            match = pattern.match(reader.text, reader.position, reader.position + _MAX_HELD)
            if not match and (len(reader.text) - reader.position >= _MAX_HELD or not (yield from reader.more())):
                break
        return (match[group] or "") if match else ""

    def _escape(self, *, is_raw: bool) -> Wait[str]:
        """Read what follows a backslash. "": the text is cut."""
        reader = self._reader
        character = yield from reader.peek()
        if not character:
            return ""
        if character == "'" and not is_raw:
            reader.position += 1
            return "'"
        if is_raw or character not in 'u"\\/bfnrt':
            return "\\\\"
        if character != "u":
            reader.position += 1
            return "\\" + character
        if not (yield from self._has(5)):
            return ""
        found = _ESCAPED.match(reader.text, reader.position)
        if not found:
            return "\\\\"
        reader.position += 5
        if found[0][1] not in "dD" or found[0][2] in "01234567":
            return "\\" + found[0]
        if not _HIGH.match(found[0]):
            return "\\ufffd"
        if not (yield from self._has(6)):
            return ""
        low = _LOW.match(reader.text, reader.position)
        if not low:
            return "\\ufffd"
        reader.position += 6
        return "\\" + found[0] + low[0]

    def _has(self, size: int) -> Wait[bool]:
        """Wait for so many characters. False: a text that is cut has fewer."""
        reader = self._reader
        while len(reader.text) - reader.position < size:
            if not (yield from reader.more()):
                return not reader.is_cut
        return True


def _balanced(text: str) -> str:
    """The text up to a bracket that closes none of it."""
    closers = ""
    for place, character in enumerate(text):
        if character in _CLOSERS:
            closers += _CLOSERS[character][0]
        elif character in _STRING_CLOSERS:
            if character != closers[-1:]:
                return text[:place].rstrip()
            closers = closers[:-1]
    return text.rstrip()


def _scalar(text: str) -> str:
    """The JSON text of a number, a word, or of anything else, which is a string."""
    if len(text) > _MAX_SCALAR or "," in text:
        return json_text(text)
    if _NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return text
    return json_text(python_value(text))

"""Calls as XML-like tags, with one for each argument: Qwen3-Coder's, Seed-OSS's, MiniMax-M2's, GLM's, DeepSeek's since
V3.2 and others. Values have no quotes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fleetfoot.parsers.base import Tool
from fleetfoot.parsers.grammar import Rules, arguments_schema, json_rules, text_terminal
from fleetfoot.parsers.json_values import read_json
from fleetfoot.parsers.reader import Markers, Reader, Wait, Writer, skip_text
from fleetfoot.parsers.typed import argument_variants, is_text, json_text, property_schema, typed_json, types_of

_NAME_CHARACTERS = "_-.:/$@ "


@dataclass(frozen=True)
class XmlFormat:
    """The tags. Those around names are pairs. Values are strings unless the tool's schema has another type."""

    section: tuple[str, str] = ("", "")
    """Around calls."""
    call: str = "<tool_call>"
    call_end: str = "</tool_call>"
    function: tuple[str, str] = ("<function=", ">")
    """("", ""): the name follows ``call``."""
    function_end: str = "</function>"
    """"": ``call_end`` ends the function."""
    key: tuple[str, str] = ("<parameter=", ">")
    kinds: tuple[str, str] = ("", "")
    """The ends of ``key`` for strings and for other values, where they differ."""
    value: str = ""
    quotes: tuple[str, str] = ("", "")
    """Around values that may have tags in them."""
    value_end: str = "</parameter>"
    newline: str = "\n"
    """Between the tags of forced calls."""
    padding: str = ""
    """Around values, of which it is no part."""
    has_json: bool = False
    """Whether forced calls have a JSON object instead of tags for arguments."""
    guesses_types: bool = False
    """Whether values without a type in the schema may be JSON; else they are strings."""
    id_length: int | None = None

    @property
    def begin(self) -> tuple[str, ...]:
        return tuple(text for text in (self.section[0], self.call, self.function[0]) if text)

    @property
    def markers(self) -> tuple[str, ...]:
        texts = (self.call_end, *self.function, self.function_end, *self.key, self.value, self.value_end)
        return tuple(text for text in (*self.begin, *texts, self.section[1]) if len(text) > 2)

    @cached_property
    def _value_ends(self) -> Markers:
        return Markers({self.value_end, self.padding + self.value_end})

    @cached_property
    def _quoted_ends(self) -> Markers:
        return Markers({self.quotes[1] + self.value_end})

    def read(self, reader: Reader, writer: Writer, marker: str, tools: Mapping[str, Tool]) -> Wait[bool]:
        for head in self.begin[self.begin.index(marker) + 1 :]:
            yield from reader.space()
            if not (yield from reader.literal(head)):
                return False
        if not (yield from self._read_function(reader, writer, tools)):
            return False
        while not reader.is_at_end:
            start = reader.position
            if not (yield from self._read_next(reader, writer, tools)):
                reader.position = start
                break
        yield from skip_text(reader, self.call_end)
        if self.section[1]:
            yield from skip_text(reader, self.section[1])
        return True

    def _read_next(self, reader: Reader, writer: Writer, tools: Mapping[str, Tool]) -> Wait[bool]:
        """Read a further function of the same call, or the next call of a section."""
        yield from reader.space()
        if not self.function[0] or not (yield from reader.literal(self.function[0])):
            if not self.section[0]:
                return False
            yield from skip_text(reader, self.call_end)
            for head in self.begin[1:]:
                yield from reader.space()
                if not (yield from reader.literal(head)):
                    return False
        return (yield from self._read_function(reader, writer, tools))

    def _read_function(self, reader: Reader, writer: Writer, tools: Mapping[str, Tool]) -> Wait[bool]:
        yield from reader.space()
        name = (yield from reader.name(_NAME_CHARACTERS)).strip()
        if not name or not (yield from reader.literal(self.function[1])):
            return False
        yield from reader.space()
        if (yield from reader.peek()) == "{":
            writer.begin_call(name)
            yield from read_json(reader, writer.arguments)
            yield from skip_text(reader, self.function_end or self.call_end)
            return True
        if not self.function[1] and not (yield from self._is_tag(reader)):
            return False
        writer.begin_call(name)
        text = "{"
        while True:
            yield from reader.space()
            if not (yield from reader.literal(self.key[0])):
                break
            key = yield from reader.name(_NAME_CHARACTERS)
            if not (yield from reader.literal(self.key[1])):
                return True
            is_string: bool | None = None
            if self.kinds[0]:
                is_string = yield from reader.literal(self.kinds[0])
                if not is_string and not (yield from reader.literal(self.kinds[1])):
                    return True
            yield from reader.space() if self.value else ()
            if not (yield from reader.literal(self.value)):
                return True
            schema = property_schema(tools.get(name), key)
            if is_string is None and is_text(schema) and (types_of(schema) or not self.guesses_types):
                is_string = True
            writer.arguments(f"{text}{json_text(key)}: ")
            if not (yield from self._read_value(reader, writer, schema, is_string=is_string is True)):
                return True
            text = ", "
        yield from self._read_end(reader, writer, "{}" if text == "{" else "}")
        return True

    def _is_tag(self, reader: Reader) -> Wait[bool]:
        """Whether an argument or the end of the function follows."""
        start = reader.position
        for tag in (self.key[0], self.function_end or self.call_end):
            if (yield from reader.literal(tag)):
                reader.position = start
                return True
        return False

    def _read_end(self, reader: Reader, writer: Writer, closing: str) -> Wait[None]:
        end = self.function_end or self.call_end
        is_whole = yield from reader.literal(end)
        rest = reader.text[reader.position :]
        if is_whole or not (self.key[0].startswith(rest) or end.startswith(rest)):
            writer.arguments(closing)
        else:  # cut
            reader.position += len(rest)

    def _read_value(self, reader: Reader, writer: Writer, schema: Mapping[str, Any], *, is_string: bool) -> Wait[bool]:
        """False: it is cut."""
        yield from reader.literal(self.padding)
        is_quoted = self.quotes[0] and (yield from reader.literal(self.quotes[0]))
        if reader.is_over and not is_quoted and self.quotes[0].startswith(reader.text[reader.position :] or " "):
            return False
        ends = self._quoted_ends if is_quoted else self._value_ends
        if is_string:
            write = lambda piece: writer.arguments(_escaped(piece))  # noqa: E731
            writer.arguments('"')
            marker, space = yield from reader.until(ends, write, keeps_cut=False)
            if marker:
                writer.arguments(_escaped(space) + '"')
            return bool(marker)
        pieces: list[str] = []
        marker, space = yield from reader.until(ends, pieces.append)
        if marker or not reader.is_cut:
            is_any = self.guesses_types or bool(self.kinds[0])
            writer.arguments(typed_json("".join(pieces) + space, schema, is_any=is_any))
        return bool(marker)

    # --- forced calls -------------------------------------------------------------------------------------------------

    def grammar(self, tools: Sequence[Tool], rules: Rules, *, is_single: bool) -> str:
        call = rules.each(tools, lambda tool: self._call(tool, rules))
        if not self.section[0]:
            return rules.list_of(call, f"{self.newline}{self.begin[0]}", is_single=is_single)
        one = rules.add(f"{rules.text(self.newline + self.call)} {call}")
        return f"{one if is_single else one + '+'} {rules.text(self.newline + self.section[1])}"

    def _call(self, tool: Tool, rules: Rules) -> str:
        head = f"{self.newline}{self.function[0]}" if self.call and self.function[0] else ""
        end = self.call_end
        if self.function_end:
            end = self.function_end + (self.newline + end if end else "")
        if self.has_json:
            return f"{rules.text(head, tool.name, self.function[1])} {rules.arguments(tool)} {rules.text(end)}"
        begin = rules.text(head, tool.name, self.function[1] + self.newline)
        return " ".join(filter(None, (begin, self._arguments(tool, rules), rules.text(end))))

    def _arguments(self, tool: Tool, rules: Rules) -> str:
        schema, variants = arguments_schema(tool), []
        json_rule = json_rules(schema, rules, is_strict=tool.is_strict)
        for properties, required in argument_variants(schema):
            parts = []
            for key, value in properties.items():
                parameter = rules.add(self._value(key, value, rules, json_rule))
                parts.append(parameter if key in required else f"{parameter}?")
            variants.append(" ".join(parts))
        return variants[0] if len(variants) == 1 else rules.any_of([rules.add(one or '""') for one in variants])

    def _value(self, key: str, schema: Mapping[str, Any], rules: Rules, json_rule: Callable[[Any], str]) -> str:
        """The tag of a key, a value and its end."""
        before, after = f"{self.newline + self.value if self.value else ''}{self.padding}", self.padding
        heads = [rules.text(self.key[0], key, f"{self.key[1]}{kind}{before}") for kind in self.kinds]
        after += f"{self.value_end}{self.newline}"
        if options := schema.get("anyOf") or schema.get("oneOf"):
            return rules.any_of([self._value(key, one, rules, json_rule) for one in options])
        types = types_of(schema)
        if types and "string" not in types:
            return f"{heads[1]} {json_rule(schema)} {rules.text(after)}"
        if choices := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
            return rules.any_of([f"{heads[0]} {rules.text('', str(choice), after)}" for choice in choices])
        return (
            f"{heads[0]} {rules.until(after, text_terminal(rules.prepared(schema)) if types == {'string'} else 'TEXT')}"
        )


def _escaped(text: str) -> str:
    """Text within a JSON string."""
    return json_text(text)[1:-1]

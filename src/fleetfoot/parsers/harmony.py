"""Harmony, the format of GPT-OSS: a message has parts in channels, for reasoning, content and calls of tools."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from fleetfoot.parsers.base import Tool
from fleetfoot.parsers.grammar import Rules
from fleetfoot.parsers.json_values import read_json
from fleetfoot.parsers.reader import GeneratorParser, Reader, Sink, Wait, Writer, markers_of

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_MARKERS = (_CHANNEL, _START, _MESSAGE, _CONSTRAIN, _END, _CALL, _RETURN)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
FINAL = f"{_CHANNEL}final{_MESSAGE}"
"""What the content of an answer follows."""


THOUGHT, THOUGHT_END = f"{_CHANNEL}analysis{_MESSAGE}", f"{_END}{_START}assistant"
"""What reasoning is between, if another part follows."""


class HarmonyFormat:
    """The grammar of its messages; `HarmonyParser` reads them."""

    begin = (_CHANNEL,)
    markers = _MARKERS
    id_length = None

    def read(self, reader: Reader, writer: Writer, marker: str, tools: Mapping[str, Tool]) -> Wait[bool]:
        """Calls are parts of a whole message in this format."""
        raise NotImplementedError
        yield

    def grammar(self, tools: Sequence[Tool], rules: Rules, *, is_single: bool) -> str:
        return rules.each(tools, lambda tool: _call(tool, rules))

    @staticmethod
    def message(tools: Sequence[Tool], rules: Rules, *, answer: str | None, can_think: bool = True) -> str:
        """A whole message, as an expression: reasoning, then a call of a tool or an answer.

        Args:
            answer: the expression of its text; None: there must be a call.
            can_think: whether reasoning may come first.
        """
        channel, kinds, ends = rules.text(_CHANNEL), ["analysis"] * can_think, []
        if answer == "TEXT":  # else a preamble would be content beside the answer, or beside calls alone
            kinds.append("commentary")
        if tools:
            ends.append(f"{channel} {rules.each(tools, lambda tool: _call(tool, rules))}")
            ends.append(rules.each(tools, lambda tool: _call_of_role(tool, rules)))
        if answer is not None:
            ends.append(f'{channel} "final" (" "? {rules.text(_CONSTRAIN)} "json")? {rules.text(_MESSAGE)} {answer}')
        # in a model of another format, the end token may be a mark
        parts = [f"({channel} {_part(kind, rules)})" for kind in kinds if rules.is_special(_CHANNEL)]
        before = f"{rules.any_of(parts)}* " if parts else ""
        return before + rules.any_of([f"({end})" for end in ends])


def _part(kind: str, rules: Rules) -> str:
    """A part after the mark of its channel, and what the next one begins with."""
    return rules.add(f"{rules.text(kind + _MESSAGE)} {rules.until(_END)} {rules.text(_START + 'assistant')}")


def _call(tool: Tool, rules: Rules) -> str:
    before = rules.text("commentary to=functions.", tool.name, f" {_CONSTRAIN}json{_MESSAGE}")
    return f"{before} {rules.arguments(tool)}"


def _call_of_role(tool: Tool, rules: Rules) -> str:
    """A call with the recipient after the role."""
    before = rules.text(" to=functions.", tool.name, f"{_CHANNEL}commentary ")
    return f'{before} {rules.text(_CONSTRAIN)}? "json" {rules.text(_MESSAGE)} {rules.arguments(tool)}'


class HarmonyParser(GeneratorParser):
    """A `MessageParser`; arguments as of `TextParser`."""

    def __init__(
        self,
        functions: Mapping[str, Tool] | None = None,
        *,
        hidden: Iterable[str] = (),
        max_calls: int | None = None,
    ) -> None:
        self._functions = functions or {}
        self._recipient = ""
        """The function that the next part calls."""
        self._markers = markers_of(frozenset((*_MARKERS, *hidden)))
        super().__init__(Reader((*_MARKERS, *hidden)), Writer(max_calls), self._message())

    def _message(self) -> Wait[None]:
        reader, writer = self._reader, self._writer
        sink: Sink = writer.content
        yield from reader.space()
        marker = ""
        if (yield from reader.literal("to=")):  # the prompt ends within the header
            sink, marker = yield from self._read_header("to=")
        elif reader.is_cut and reader.misses_text:
            return
        while True:
            if marker not in (_CHANNEL, _START):
                if self._recipient:
                    yield from self._read_call()
                marker, space = yield from reader.until(self._markers, sink)
            if not marker:
                return
            if marker in (_CHANNEL, _START):
                sink, marker = yield from self._read_header("")
            elif marker in (_END, _CALL, _RETURN):
                writer.end_part()
                sink = writer.content
            else:
                sink(space)

    def _read_header(self, header: str) -> Wait[tuple[Sink, str]]:
        """Read up to the text of a part. Returns where that goes."""
        pieces = [header]
        marker = _CHANNEL
        while marker in (_CHANNEL, _CONSTRAIN):
            marker, space = yield from self._reader.until(self._markers, pieces.append)
            pieces.append(space or " ")
        return (self._sink("".join(pieces)) if marker else self._writer.content), marker

    def _sink(self, header: str) -> Sink:
        writer, recipient = self._writer, _RECIPIENT.search(header)
        writer.end_part()
        if recipient and (recipient[0].startswith("to=functions.") or recipient[1] in self._functions):
            self._recipient = recipient[1]
            return writer.content
        if recipient or "analysis" in header:
            writer.begin_reasoning()
            return writer.reasoning
        return writer.content

    def _read_call(self) -> Wait[None]:
        """Read the arguments of a call; nothing, if they are no object."""
        reader, writer = self._reader, self._writer
        name, self._recipient = self._recipient, ""
        yield from reader.space()
        first = yield from reader.peek()
        if first == "{":
            writer.begin_call(name)
            if (yield from read_json(reader, writer.arguments)):
                writer.end_part()
        elif first == "<":
            for end in (_CALL, _END, _RETURN):
                if (yield from reader.literal(end)):
                    reader.position -= len(end)
                    return writer.begin_call(name)
        elif not first and not reader.is_cut:  # its end is no part of the text
            writer.begin_call(name)

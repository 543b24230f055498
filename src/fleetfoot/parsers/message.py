"""The parser of messages: reasoning, then content with tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fleetfoot.parsers.base import Tool
from fleetfoot.parsers.grammar import Rules
from fleetfoot.parsers.json_calls import PLAIN
from fleetfoot.parsers.reader import GeneratorParser, Reader, Wait, Writer, markers_of, skip_text


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model marks its reasoning."""

    begin: tuple[str, ...]
    end: tuple[str, ...]
    is_implied: bool = False
    """Whether a message begins with reasoning, with or without a mark."""
    stops: tuple[str, ...] = ()
    """Special tokens that end reasoning, too, and begin what follows."""
    wrappers: tuple[str, ...] = ()
    """Texts around content."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.begin, *self.end)

    def is_open(self, prompt: str, *, is_continued: bool = False) -> bool:
        """Whether a message begins with reasoning, after the end of a prompt, or after its own beginning."""
        prompt = prompt.rstrip()
        if is_continued:
            begin = max((prompt.rfind(mark) for mark in self.begin), default=-1)
            end = max(prompt.rfind(mark) for mark in self.end)
            return begin > end or (self.is_implied and end < 0)
        if prompt.endswith(self.end):
            return False
        return self.is_implied or prompt.endswith(self.begin)

    def is_possible(self, prompt: str) -> bool:
        """Whether a message after the end of a prompt may have reasoning."""
        return not prompt.rstrip().endswith(self.end)


class ToolFormat(Protocol):
    """How a model writes calls of tools."""

    @property
    def begin(self) -> tuple[str, ...]:
        """Texts that calls begin with."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All fixed texts, those of ``begin`` too."""

    @property
    def id_length(self) -> int | None:
        """Length of the ids of calls; None: OpenAI's form."""

    def read(self, reader: Reader, writer: Writer, marker: str, tools: Mapping[str, Tool]) -> Wait[bool]:
        """Read calls after one of ``begin``. False: the text is no call, and nothing was written or dropped."""
        ...

    def grammar(self, tools: Sequence[Tool], rules: Rules, *, is_single: bool) -> str:
        """What follows the first one of ``begin`` in calls, as an expression of llguidance's Lark.

        Args:
            rules: takes further rules.
            is_single: for one call only.
        """
        ...


class TextParser(GeneratorParser):
    """A `MessageParser` of one sequence.

    Args:
        reasoning, tools: None: the text has none.
        functions: those that can be called, by name.
        is_reasoning: whether the text begins with reasoning.
        hidden: special tokens; those without a meaning in the formats are dropped.
        max_calls: later calls are dropped; None: no limit.
        is_forced: whether nothing but calls follows reasoning.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        tools: ToolFormat | None = None,
        functions: Mapping[str, Tool] | None = None,
        *,
        is_reasoning: bool = False,
        hidden: Iterable[str] = (),
        max_calls: int | None = None,
        is_forced: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._functions = functions or {}
        self._is_forced = is_forced
        self._begins = reasoning.begin if reasoning else ()
        self._wrappers = reasoning.wrappers if reasoning else ()
        self._hidden = frozenset((*hidden, *self._wrappers))
        self._markers = markers_of(self._hidden.union(self._begins, tools.begin if tools else ()))
        self._stops = reasoning.stops if reasoning else ()
        self._ends = (*reasoning.end, *self._stops) if reasoning else ()
        self._calls = [mark for mark in tools.begin if mark not in PLAIN] if tools else []
        self._reasoning_ends = markers_of(self._hidden.union(self._ends, self._calls))
        marks = self._hidden.union(tools.markers if tools else (), self._begins, self._ends)
        super().__init__(
            Reader(marks), Writer(max_calls, tools.id_length if tools else None), self._message(is_reasoning)
        )

    def _message(self, is_reasoning: bool) -> Wait[None]:
        reader, writer = self._reader, self._writer
        if is_reasoning:
            yield from self._read_reasoning()
        while True:
            marker, space = yield from reader.until(self._markers, writer.content)
            if not marker:
                return
            start, reader.misses_text = reader.position, False
            if marker in self._begins and (writer.is_fresh or marker in self._hidden):
                yield from self._read_reasoning()
            elif (yield from self._read_call(marker)):
                if reader.misses_text:  # half a call
                    return
                writer.end_part()
            elif reader.is_cut and reader.misses_text and (self._is_forced or marker not in PLAIN):  # half its head
                return
            elif marker in self._wrappers:
                reader.position = start
                writer.end_part()
            else:
                reader.position = start
                writer.content(space + marker * (marker not in self._hidden))

    def _read_call(self, marker: str) -> Wait[bool]:
        tools = self._tools
        if tools is None or marker not in tools.begin:
            return False
        return (yield from tools.read(self._reader, self._writer, marker, self._functions))

    def _read_reasoning(self) -> Wait[None]:
        writer = self._writer
        writer.begin_reasoning()
        for begin in self._begins:  # although the prompt has it
            yield from skip_text(self._reader, begin)
        while True:
            marker, space = yield from self._reader.until(self._reasoning_ends, writer.reasoning)
            if marker in self._stops or (marker in self._calls and (yield from self._is_call(marker))):
                self._reader.position -= len(marker)
                return writer.end_part()
            if not marker or marker in self._ends:
                return writer.end_part()
            writer.reasoning(space + marker * (marker not in self._hidden))

    def _is_call(self, marker: str) -> Wait[bool]:
        """Whether a call of a known function follows, which ends reasoning without a mark. Reads nothing."""
        assert self._tools is not None
        start, name = self._reader.position, ""
        try:
            yield from self._tools.read(self._reader, _Name(), marker, self._functions)
        except _NameFoundError as found:
            name = found.name
        self._reader.position = start
        return name in self._functions


class _NameFoundError(Exception):
    """Ends the reading of a call with a valid beginning."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Name(Writer):
    """Stops at the name of a call: nothing has been dropped then."""

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        raise _NameFoundError(name)

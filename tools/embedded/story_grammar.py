"""Templates with typed slots that can be written and read back.

A template is a line of text with slots. `{hero}` and `{hero.he}` name a variable of a role and are bound once per
story; `{*weather}` is free each time. A line may start with a guard such as `[obstacle=river]`: it belongs to stories
in which that variable has that value. Writing picks values with a seeded chooser; reading matches a text against the
same parts and finds the values back, so one table of templates is both the generator and the checker.
"""

import functools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from story_words import FREE, ROLES, Field

Bindings = Mapping[str, str]
_T = TypeVar("_T")
_SLOT = re.compile(r"\{([^}]*)\}")
_GUARD = re.compile(r"\[(\w+)=(\w+)\] ")


@dataclass(frozen=True)
class Slot:
    """A hole in a template. `variable` is None for a free slot."""

    variable: str | None
    field: Field


@dataclass(frozen=True)
class Template:
    """One line of the grammar: literal text and slots, and the guard (variable, value) under which it may be used."""

    parts: tuple[str | Slot, ...]
    guard: tuple[str, str] | None = None


@dataclass(frozen=True)
class Beat:
    """One step of a plot: one of its templates is told, or none with probability `1 - probability`."""

    templates: tuple[Template, ...]
    probability: float = 1.0
    paragraph: bool = False

    def separator(self, is_first: bool) -> str:
        """What stands before this beat's text."""
        if is_first:
            return ""
        return "\n\n" if self.paragraph else " "


@dataclass(frozen=True)
class Plot:
    """A named sequence of beats."""

    name: str
    beats: tuple[Beat, ...]


@functools.cache
def parse_slot(name: str) -> Slot:
    """The slot that `{name}` stands for.

    Raises:
        KeyError: the role, the form or the free word class does not exist.
    """
    if name.startswith("*"):
        return Slot(None, Field("", FREE[name[1:]]))
    role, _, form = name.partition(".")
    entry = ROLES[role][form]
    return Slot(f"{role}.{entry.suffix}" if entry.suffix else role, entry)


def template(line: str) -> Template:
    """Read a template from its line of text."""
    guard_match = _GUARD.match(line)
    guard = (guard_match[1], guard_match[2]) if guard_match else None
    pieces = _SLOT.split(line[guard_match.end() :] if guard_match else line)
    parts: list[str | Slot] = []
    for index, piece in enumerate(pieces):
        if index % 2:
            parts.append(parse_slot(piece))
        elif piece:
            parts.append(piece)
    return Template(tuple(parts), guard)


def beat(*lines: str, probability: float = 1.0, paragraph: bool = False) -> Beat:
    """A beat from the lines of its templates."""
    return Beat(tuple(template(line) for line in lines), probability, paragraph)


class Chooser:
    """A seeded source of choices that adds up their information, in nats.

    The sum over a document is an upper bound of the document's information content (different choices can give the
    same text), so it tells how low a perfect model's loss could be.
    """

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)
        self.nats = 0.0

    def pick(self, options: Sequence[_T]) -> _T:
        """One of the options, uniformly."""
        self.nats += math.log(len(options))
        return options[self._random.randrange(len(options))]

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        if probability >= 1.0:
            return True
        happens = self._random.random() < probability
        self.nats -= math.log(probability if happens else 1.0 - probability)
        return happens


def _values_in_use(bindings: Bindings, slot: Slot) -> set[str]:
    """Values that the slot's variable must not take, because another variable of its class has them."""
    if not slot.field.words.distinct:
        return set()
    family = slot.field.words
    return {value for name, value in bindings.items() if name != slot.variable and _class_of(name) is family}


@functools.cache
def _class_of(variable: str) -> object:
    role, _, suffix = variable.partition(".")
    return next(entry.words for entry in ROLES[role].values() if entry.suffix == suffix)


def choose_value(slot: Slot, bindings: dict[str, str], chooser: Chooser) -> str:
    """The slot's value: the bound one, or a new one that is then bound."""
    if slot.variable is not None and slot.variable in bindings:
        return bindings[slot.variable]
    taken = _values_in_use(bindings, slot)
    value = chooser.pick([value for value in slot.field.words.values if value not in taken])
    if slot.variable is not None:
        bindings[slot.variable] = value
    return value


def write(line: Template, bindings: dict[str, str], chooser: Chooser) -> str:
    """The template's text; variables that it mentions first are bound in place."""
    if line.guard is not None:
        bindings.setdefault(*line.guard)
    return "".join(
        part if isinstance(part, str) else part.field.form(choose_value(part, bindings, chooser)) for part in line.parts
    )


def allowed(line: Template, bindings: Bindings) -> bool:
    """Whether the template's guard agrees with the bindings."""
    return line.guard is None or bindings.get(line.guard[0], line.guard[1]) == line.guard[1]


def write_plot(plot: Plot, bindings: dict[str, str], chooser: Chooser) -> str:
    """A whole story; `bindings` may hold values to use, and holds all of them afterwards."""
    text = ""
    for step in plot.beats:
        if chooser.chance(step.probability):
            line = chooser.pick([line for line in step.templates if allowed(line, bindings)])
            text += step.separator(not text) + write(line, bindings, chooser)
    return text


@dataclass(frozen=True)
class Mismatch:
    """A bound slot whose place in the text holds another value of its class."""

    position: int
    found: str
    expected: str
    variable: str
    word_class: str

    def __str__(self) -> str:
        return f"{self.word_class} {self.found!r} where the story needs {self.expected!r} ({self.variable})"


@dataclass
class Reading:
    """One attempt to read a text: how far it got, the wrong words there, and whether the text ended within a part."""

    text: str
    furthest: int = 0
    truncated: bool = False
    mismatches: list[Mismatch] = field(default_factory=list)

    def fail(self, position: int, mismatch: Mismatch | None = None) -> None:
        """Note that a part did not match at `position`; only what happens furthest on is kept."""
        if position > self.furthest:
            self.furthest = position
            self.mismatches = []
        if position == self.furthest and mismatch is not None and mismatch not in self.mismatches:
            self.mismatches.append(mismatch)

    def end_of(self, literal: str, position: int) -> int | None:
        """Where `literal` ends if it stands at `position`, else None; notes when the text ends within the literal."""
        if self.text.startswith(literal, position):
            return position + len(literal)
        if literal.startswith(self.text[position:]):
            self.truncated = True
        return None


def _read_bound(slot: Slot, value: str, reading: Reading, position: int, bindings: Bindings) -> int | None:
    """Where a slot with a known value ends; on failure, notes which other value stands in its place."""
    expected = slot.field.form(value)
    end = reading.end_of(expected, position)
    if end is not None:
        return end
    reading.fail(position)
    words = slot.field.words
    others = {*words.values, *(other for name, other in bindings.items() if _class_of(name) is words)}
    surfaces = [slot.field.form(other) for other in others]
    found = max((s for s in surfaces if reading.text.startswith(s, position)), key=len, default="")
    if found and slot.variable is not None:
        reading.fail(position, Mismatch(position, found, expected, slot.variable, words.name))
    return None


def _read_slot(slot: Slot, reading: Reading, position: int, bindings: Bindings) -> Iterator[tuple[int, Bindings]]:
    """The ways in which the slot can be read at `position`: (end, bindings)."""
    if slot.variable is not None and slot.variable in bindings:
        end = _read_bound(slot, bindings[slot.variable], reading, position, bindings)
        if end is not None:
            yield end, bindings
        return
    words = slot.field.words
    if words.pattern is None:
        candidates = words.values
    else:
        match = words.pattern.match(reading.text, position)
        candidates = (match[0],) if match else ()
        reading.truncated |= position == len(reading.text)
    taken = _values_in_use(bindings, slot)
    for value in candidates:
        end = reading.end_of(slot.field.form(value), position) if value not in taken else None
        if end is not None:
            yield end, bindings if slot.variable is None else {**bindings, slot.variable: value}
    reading.fail(position)


def read(
    line: Template, reading: Reading, position: int, bindings: Bindings, part: int = 0
) -> Iterator[tuple[int, Bindings]]:
    """The ways in which the template can be read from `position` on: (end, bindings with what it bound)."""
    if part == 0 and line.guard is not None:
        if not allowed(line, bindings):
            return
        bindings = {**bindings, line.guard[0]: line.guard[1]}
    if part == len(line.parts):
        yield position, bindings
        return
    piece = line.parts[part]
    if isinstance(piece, Slot):
        for end, bound in _read_slot(piece, reading, position, bindings):
            yield from read(line, reading, end, bound, part + 1)
        return
    literal_end = reading.end_of(piece, position)
    if literal_end is None:
        reading.fail(position)
    else:
        yield from read(line, reading, literal_end, bindings, part + 1)


def read_plot(plot: Plot, reading: Reading, bindings: Bindings, position: int = 0, step: int = 0) -> Bindings | None:
    """The variables of the story if the whole text is a telling of the plot, else None.

    A text that is the beginning of a telling gives None too, with `reading.truncated` set.
    """
    if step == len(plot.beats):
        if position == len(reading.text):
            return bindings
        reading.fail(position)
        return None
    current = plot.beats[step]
    start = reading.end_of(current.separator(position == 0), position)
    if start is None:
        reading.fail(position)
    else:
        for line in current.templates:
            for end, bound in read(line, reading, start, bindings):
                result = read_plot(plot, reading, bound, end, step + 1)
                if result is not None:
                    return result
    if current.probability < 1.0:
        return read_plot(plot, reading, bindings, position, step + 1)
    return None

"""Short stories from a grammar, and a checker that reads them back.

`generate_story(seed)` tells one story; the same seed tells the same story. `check_story(text)` says what is wrong with
a text as a story of this grammar, so that a test can say whether a model's continuation is fluent: every sentence must
be one that the grammar could write at that place, with the characters, pronouns, objects and places of this story.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from story_grammar import Chooser, Plot, Reading, read_plot, write_plot
from story_plots import PLOTS
from story_words import NAME_SYLLABLES

MADE_UP_NAME_SHARE = 0.12
MAX_VIOLATIONS = 8
SNIPPET_LENGTH = 60


@dataclass(frozen=True)
class Story:
    """A story with what it is made of.

    Attributes:
        text: the story, paragraphs separated by an empty line.
        plot: its plot.
        bindings: variable -> value, for example `{"hero.name": "Pip", "hero.kind": "fox", ...}`.
        nats: the information in the choices that made it, an upper bound of -log p(text).
    """

    text: str
    plot: Plot
    bindings: Mapping[str, str]
    nats: float


def _make_up_names(bindings: dict[str, str], chooser: Chooser) -> None:
    """Give some characters a name that no list has: a model must learn to copy names, not only to know them."""
    for variable in ("hero.name", "helper.name"):
        if variable not in bindings and chooser.chance(MADE_UP_NAME_SHARE):
            syllables = [chooser.pick(NAME_SYLLABLES) for _ in range(chooser.pick((2, 3)))]
            name = "".join(syllables).capitalize()
            if name not in bindings.values():
                bindings[variable] = name


def tell(plot: Plot, chooser: Chooser, given: Mapping[str, str] | None = None) -> Story:
    """A story of the plot, with the given bindings and free choices for the rest."""
    bindings = dict(given or {})
    before = chooser.nats
    _make_up_names(bindings, chooser)
    text = write_plot(plot, bindings, chooser)
    return Story(text, plot, bindings, chooser.nats - before)


def generate_story(seed: int | str) -> Story:
    """The story of this seed."""
    chooser = Chooser(f"story {seed}")
    return tell(chooser.pick(PLOTS), chooser)


def _read(text: str, given: Mapping[str, str]) -> tuple[bool, bool, Reading]:
    """(is a whole story, is the beginning of one, the reading)."""
    reading = Reading(text)
    for plot in PLOTS:
        if read_plot(plot, reading, given) is not None:
            return True, True, reading
    return False, reading.truncated, reading


def check_story(text: str, *, allow_truncated: bool = True, given: Mapping[str, str] | None = None) -> list[str]:
    """What is wrong with the text as a story; an empty list for a good one.

    Args:
        text: the story from its first word on.
        allow_truncated: accept a text that stops anywhere within a story, even within a word.
        given: values that some variables must have, as in `Story.bindings`.

    Returns:
        One message per violation, in the order of the text. A wrong word is put right and the check goes on behind it;
        where no sentence of the grammar fits at all, the check ends.
    """
    violations: list[str] = []
    while len(violations) < MAX_VIOLATIONS:
        complete, begins, reading = _read(text, given or {})
        if complete or (begins and allow_truncated):
            return violations
        if begins:
            return [*violations, "the story stops before its end"]
        if not reading.mismatches:
            snippet = text[reading.furthest : reading.furthest + SNIPPET_LENGTH]
            return [
                *violations,
                f"at character {reading.furthest}: no sentence of the grammar goes on with {snippet!r}",
            ]
        wrong = reading.mismatches[0]
        violations.append(f"at character {wrong.position}: {wrong}")
        text = text[: wrong.position] + wrong.expected + text[wrong.position + len(wrong.found) :]
    return violations

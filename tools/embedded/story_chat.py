"""Chat examples: requests for stories, questions about them, small talk, and polite refusals.

The requests name a story's entities with the same slots as the plots, so that the story which answers is about them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stories import Story, tell
from story_grammar import Beat, Chooser, Template, beat, template, write
from story_plots import BAKE, FEAR, GIFT, JOURNEY, LOST, PLOTS, REPAIR, SHARE
from story_small_talk import OTHER_QUESTIONS, REFUSALS, SMALL_TALK, SYSTEM_PROMPTS, TOPICS
from story_words import KINDS

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLE_TOKENS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Chat:
    """A chat, and the story that is told in it, if there is one."""

    messages: tuple[Message, ...]
    story: Story | None


_ABOUT = (
    "Tell me a story about {about}.",
    "Please tell me a story about {about}.",
    "Can you tell me a story about {about}?",
    "Write a short story about {about}.",
    "Write a story about {about}.",
    "I would like to hear a story about {about}.",
    "Do you know a story about {about}?",
    "A story about {about}, please.",
)
_ANY_ABOUT = (
    "{hero.a_kind}",
    "{hero.a_kind} named {hero}",
    "a {hero.trait} {hero.kind}",
    "{hero}, the {hero.trait} {hero.kind}",
)
_PLOT_ABOUT = {
    LOST.name: ("{hero.a_kind} who lost {thing.a}", "{hero.a_kind} and a {thing.look} {thing}", "a lost {thing}"),
    JOURNEY.name: (
        "{hero.a_kind} who goes {goal.to}",
        "a {hero.trait} {hero.kind} who looks for {thing.a}",
        "a journey {goal.to}",
    ),
    GIFT.name: ("a birthday", "{hero.a_kind} who needs a present for {friend}", "{thing.a} for {friend.a_kind}"),
    BAKE.name: ("{hero.a_kind} who makes a {dish}", "a {dish} with {first} and {second}", "a {dish}"),
    SHARE.name: ("{hero.a_kind} who shares some {snack}", "sharing", "{hero.a_kind} and a hungry {helper.kind}"),
    REPAIR.name: ("{hero.a_kind} with a broken {repair}", "a broken {repair}", "{hero.a_kind} who needs some {tool}"),
    FEAR.name: ("a brave {hero.kind}", "{hero.a_kind} who is afraid", "a {hero.trait} {hero.kind} who is not so brave"),
}
_ANY_REQUEST = beat(
    "Tell me a story.",
    "Please tell me a story.",
    "Can you tell me a story?",
    "Another story, please.",
    "I want to hear a story.",
)
_FOLLOW_UPS = {
    "": (
        ("What was the name of the {hero.kind}?", "The {hero.kind} was named {hero}."),
        ("Where did {hero} live?", "{hero} lived {home.at}."),
        ("What kind of animal was {hero}?", "{hero} was {hero.a_kind}."),
        ("Who helped {hero}?", "{helper} the {helper.kind} helped {hero}."),
    ),
    LOST.name: (
        ("What did {hero} lose?", "{hero} lost a {thing.look} {thing}."),
        ("Where was the {thing}?", "The {thing} was {found.at}."),
    ),
    JOURNEY.name: (
        ("Where was the {thing}?", "The {thing} was {goal.at}."),
        ("What did {hero} eat?", "{hero} had some {snack}."),
    ),
    GIFT.name: (
        ("What did {friend} get?", "{friend} got a {thing.look} {thing}."),
        ("How much was the {thing}?", "The {thing} cost {price} coins."),
    ),
    BAKE.name: (("What was in the {dish}?", "There was {first}, {second}, and {third} in the {dish}."),),
    SHARE.name: (("What did {hero} share?", "{hero} shared some {snack} with {helper}."),),
    REPAIR.name: (("What was broken?", "The {repair} was broken."), ("How did they fix it?", "They used some {tool}.")),
    FEAR.name: (("What did {hero} do against the fear?", "{hero} {trick.past}."),),
}


def render(messages: tuple[Message, ...] | list[Message], *, add_generation_prompt: bool = False) -> str:
    """The chat as the model sees it; the tokenizer's chat template renders the same text."""
    turns = "".join(f"{ROLE_TOKENS[message.role]}{message.content.strip()}{END}" for message in messages)
    return BEGIN + turns + (ROLE_TOKENS["assistant"] if add_generation_prompt else "")


def _any_case(text: str, chooser: Chooser) -> str:
    """Sometimes the text as people type it in a hurry: no capital, no full stop."""
    return text[0].lower() + text[1:].rstrip(".!?") if chooser.chance(0.15) else text


def _request_line(plot_name: str, chooser: Chooser) -> Template:
    about = chooser.pick(_ANY_ABOUT if chooser.chance(0.5) else _PLOT_ABOUT[plot_name])
    return template(chooser.pick(_ABOUT).replace("{about}", about))


def _write_one(step: Beat, bindings: dict[str, str], chooser: Chooser) -> str:
    return write(chooser.pick(step.templates), bindings, chooser)


@dataclass(frozen=True)
class Request:
    """A request for a story: its text, the variables that it names, and a story that answers it."""

    text: str
    asked: Mapping[str, str]
    story: Story


def story_request(chooser: Chooser) -> Request:
    """A request for a story, in the words of a user."""
    plot = chooser.pick(PLOTS)
    bindings: dict[str, str] = {}
    if chooser.chance(0.15):
        request = _write_one(_ANY_REQUEST, bindings, chooser)
    else:
        request = write(_request_line(plot.name, chooser), bindings, chooser)
    return Request(_any_case(request, chooser), bindings, tell(plot, chooser, bindings))


def _small_talk(chooser: Chooser) -> list[Message]:
    if chooser.chance(0.35):
        question = chooser.pick(OTHER_QUESTIONS)
        for hole in ("{x}", "{y}"):
            if hole in question:
                question = question.replace(hole, chooser.pick((*TOPICS, *KINDS.values)))
        answers: tuple[str, ...] = REFUSALS
    else:
        questions, answers = chooser.pick(SMALL_TALK)
        question = chooser.pick(questions)
    return [Message("user", _any_case(question, chooser)), Message("assistant", chooser.pick(answers))]


def _follow_up(story: Story, chooser: Chooser) -> list[Message]:
    """A question about the story with its answer, if the story knows it."""
    question, answer = chooser.pick((*_FOLLOW_UPS[""], *_FOLLOW_UPS[story.plot.name]))
    needed = {
        part.variable for line in (question, answer) for part in template(line).parts if not isinstance(part, str)
    }
    if not needed <= story.bindings.keys() or (story.plot is GIFT and question.startswith("Who helped")):
        return []
    bindings = dict(story.bindings)
    texts = [write(template(line), bindings, chooser) for line in (question, answer)]
    return [Message("user", _any_case(texts[0], chooser)), Message("assistant", texts[1])]


def make_chat(chooser: Chooser) -> Chat:
    """A chat of one to four exchanges."""
    messages = [Message("system", chooser.pick(SYSTEM_PROMPTS))] if chooser.chance(0.2) else []
    if chooser.chance(0.4):
        messages += _small_talk(chooser)
        if chooser.chance(0.5):
            return Chat(tuple(messages), None)
    request = story_request(chooser)
    story = request.story
    messages += [Message("user", request.text), Message("assistant", story.text)]
    while chooser.chance(0.5) and len(messages) < 8:
        messages += _follow_up(story, chooser) if chooser.chance(0.75) else _small_talk(chooser)
    return Chat(tuple(messages), story)

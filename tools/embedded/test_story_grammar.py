"""The generator of the embedded models' training text, its checker, and the tokenizer that was trained on it."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stories import check_story, generate_story, tell
from story_chat import Message, make_chat, render, story_request
from story_grammar import Chooser, template, write
from story_plots import GIFT, JOURNEY, LOST, PLOTS
from tokenizers import Tokenizer

TOOLS = Path(__file__).parent
ROOT = TOOLS.parents[1]
ASSET_FOLDERS = [
    ROOT / "src" / "fleetfoot" / "assets" / "story-llama",
    *(ROOT / "tests" / "assets" / name for name in ("story-qwen3", "story-mistral", "story-draft")),
]

GOOD = (
    "The Wolf and the Round Compass\n\n"
    "There once was a patient wolf named Dusty, and his home was near the train station. "
    "His grandmother had given him a round compass.\n\n"
    'Then, on a windy afternoon, Dusty lost the compass. "I must find my round compass," said Dusty. '
    "He looked in the orchard, but he found only a rusty nail.\n\n"
    "A tiny tiger was sitting next to the path. Her name was Wren. "
    '"Did you see a round compass?" asked Dusty. "No," said Wren, "but I can help you." '
    '"Maybe it is on the beach," said Wren. "Come with me." '
    "They ran to the beach as fast as they could. "
    "Dusty looked under an old log, and there it was, the round compass! "
    "Dusty was so happy that he hugged Wren.\n\n"
    "And so the patient wolf and the tiny tiger became friends. The end."
)
NO_SENTENCE = "no sentence of the grammar goes on with"


def test_a_seed_gives_the_same_story_in_every_process():
    stories = [generate_story(seed).text for seed in range(300)]
    assert len(set(stories)) == 300
    program = "from stories import generate_story; print(repr([generate_story(seed).text for seed in range(20)]))"
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONPATH": str(TOOLS), "PYTHONHASHSEED": hash_seed}
        run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, check=True, text=True)
        assert run.stdout == repr(stories[:20]) + "\n"


def test_generated_stories_pass_the_check():
    stories = [generate_story(seed) for seed in range(500)]
    assert {story.plot.name for story in stories} == {plot.name for plot in PLOTS}
    for text in [GOOD, *(story.text for story in stories)]:
        assert check_story(text, allow_truncated=False) == [], text
    for story in stories[:12]:  # every beginning passes too, unless the end is required
        for end in range(0, len(story.text), 5):
            assert check_story(story.text[:end]) == [], story.text[:end]
        for end in range(0, len(story.text) // 2, 5):
            assert check_story(story.text[:end], allow_truncated=False) == ["the story stops before its end"]


def test_chats_alternate_and_articles_fit_their_nouns():
    texts = []
    for seed in range(600):
        messages = make_chat(Chooser(seed)).messages
        roles = [message.role for message in messages if message.role != "system"]
        assert messages[-len(roles)].role == "user"  # only the first message is a system's
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        texts += [message.content for message in messages if message.role == "assistant"]
    assert any("was an owl" in text for text in texts)
    for text in texts:
        assert not re.search(r"\b[Aa] [aeiouAEIOU]|\b[Aa]n [^aeiouAEIOU]", text), text


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("that he hugged", "that she hugged", "pronoun 'she' where the story needs 'he' (hero.gender)"),
        ("He looked in the orchard", "She looked in the orchard", "pronoun 'She' where the story needs 'He'"),
        ("said Dusty", "said Wren", "name 'Wren' where the story needs 'Dusty' (hero.name)"),
        ("hugged Wren", "hugged Pepper", "name 'Pepper' where the story needs 'Wren' (helper.name)"),
        ("lost the compass", "lost the kite", "object 'kite' where the story needs 'compass' (thing)"),
        ("was, the round compass", "was, the red compass", "look 'red' where the story needs 'round' (thing.look)"),
        ("ran to the beach", "ran to the lake", "place 'to the lake' where the story needs 'to the beach' (found)"),
        ("the tiny tiger became", "the tiny mouse became", "kind of animal 'mouse' where the story needs 'tiger'"),
        ("and the tiny tiger became", "and the brave tiger became", "trait 'brave' where the story needs 'tiny'"),
        ("He looked in the orchard", "He sneezed in the orchard", f"{NO_SENTENCE} ' sneezed"),
        ("in the orchard", "at the orchard", NO_SENTENCE),
        ("an old log", "a old log", f"{NO_SENTENCE} 'a old log"),
        ("\n\nA tiny tiger", " A tiny tiger", f"{NO_SENTENCE} 'A tiny tiger"),
        ("path. Her name was Wren", "path. Her name was Dusty", f"{NO_SENTENCE} 'Dusty"),
        ("The end.", "The end. The end.", f"{NO_SENTENCE} ' The end.'"),
    ],
)
def test_a_corrupted_story_fails(right: str, wrong: str, message: str):
    text = GOOD.replace(right, wrong, 1)
    assert text != GOOD
    violations = check_story(text)
    assert len(violations) == 1
    assert message in violations[0]


def test_several_wrong_words_are_all_listed():
    text = GOOD
    for right, wrong in (
        ("lost the compass", "lost the kite"),
        ("hugged Wren", "hugged Dusty"),
        ("that he", "that she"),
    ):
        text = text.replace(right, wrong)
    assert [violation.split(": ")[1].split(" '")[0] for violation in check_story(text)] == ["object", "pronoun", "name"]


def test_a_wrong_object_or_name_near_the_end_of_any_story_is_caught():
    for seed in range(200):
        story = generate_story(seed)
        for variable, other in (("thing", "cushion"), ("thing", "drum"), ("hero.name", "Zelda"), ("dish", "soup")):
            value = story.bindings.get(variable, other)
            start = max(story.text.rfind(f" {value}{mark}") for mark in " ,.!?")
            if value != other and start > 0:
                corrupted = f"{story.text[:start]} {other}{story.text[start + 1 + len(value) :]}"
                assert check_story(corrupted), corrupted


@pytest.mark.parametrize(
    "text", ["the the the the", "Hello!", "Once upon a time, there was a key named fox.", "\n\nOnce upon a time"]
)
def test_text_without_sense_fails(text: str):
    assert check_story(text)


def test_given_bindings_are_told_and_checked():
    asked = {"hero.kind": "fox", "hero.name": "Bree", "thing": "key"}
    story = tell(LOST, Chooser("a fox"), asked)
    assert asked.items() <= story.bindings.items()
    assert "Bree" in story.text
    assert check_story(story.text, given=asked) == []
    assert "object 'key' where the story needs 'drum'" in check_story(story.text, given={"thing": "drum"})[0]
    # a guard keeps later sentences true to the obstacle
    text = tell(JOURNEY, Chooser("rope"), {"obstacle": "hole"}).text
    assert " hole." in text and "rope" in text
    for seed in range(100):
        bindings = tell(GIFT, Chooser(seed)).bindings
        assert len({bindings[f"{role}.name"] for role in ("hero", "helper", "friend")}) == 3


def test_answers_are_about_what_the_user_asked_for():
    requests = [story_request(Chooser(seed)) for seed in range(150)]
    for request in requests:
        assert check_story(request.story.text, allow_truncated=False, given=request.asked) == [], request.text
    for request, other in itertools.pairwise(requests):
        if any(other.story.bindings.get(name, value) != value for name, value in request.asked.items()):
            assert check_story(other.story.text, given=request.asked)


def test_choices_add_up_their_information():
    chooser = Chooser(0)
    write(template("{*season} {hero.he}"), {}, chooser)
    assert chooser.nats == pytest.approx(math.log(4) + math.log(2))
    chooser.chance(1.0)
    assert chooser.nats == pytest.approx(math.log(8))


@pytest.mark.parametrize("line", ["{villain} came.", "{hero.shoe} came.", "{*planet} came."])
def test_a_template_with_an_unknown_slot_is_an_error(line: str):
    with pytest.raises(KeyError):
        template(line)


@pytest.mark.parametrize("folder", ASSET_FOLDERS, ids=lambda folder: folder.name)
def test_the_chat_template_renders_what_the_models_were_trained_on(folder: Path):
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    chat_template = jinja2.Environment().from_string(config["chat_template"])
    tokens = {name: config[name] for name in ("bos_token", "eos_token")}
    for seed in range(20):
        messages = (*make_chat(Chooser(seed)).messages, Message("user", " Goodbye! \n"))
        rendered = chat_template.render(messages=[vars(m) for m in messages], add_generation_prompt=True, **tokens)
        assert rendered == render(messages, add_generation_prompt=True)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_all_models_have_the_same_tokenizer(name: str):
    assert len({(folder / name).read_bytes() for folder in ASSET_FOLDERS}) == 1


@settings(max_examples=100)
@given(st.text(max_size=60).filter(lambda text: "<|" not in text))
def test_the_tokenizer_round_trips_any_text(text: str):
    tokenizer = Tokenizer.from_file(str(ASSET_FOLDERS[0] / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.get_vocab_size() == 2048
    assert ids[0] == tokenizer.token_to_id("<|begin|>")
    assert tokenizer.decode(ids) == text

"""Stop strings: the checker against an oracle on the whole text, and the text stream of a request."""

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_builders import byte_level_backend

from fleetfoot.tokenizer.text_stream import StopStringChecker, TextStream
from fleetfoot.tokenizer.tokenizer import Tokenizer

# Few letters make overlaps and near misses common.
LETTERS = st.text("ab^]-é😀", max_size=5)
STOPS = st.lists(LETTERS.filter(bool), min_size=1, max_size=4)
CHUNKS = st.lists(st.tuples(LETTERS, st.booleans()), max_size=12)


def first_match(chunks: list[tuple[str, bool]], stop: list[str]) -> tuple[int, str] | None:
    """The end and the stop string of the match that ends first, of those the longest, by trying every end."""
    text = "".join(chunk for chunk, _ in chunks)
    allowed = [can_stop for chunk, can_stop in chunks for _ in chunk]
    for end in range(1, len(text) + 1):
        matches = [s for s in stop if text[:end].endswith(s)]
        if matches and allowed[end - 1]:
            return end, max(matches, key=len)
    return None


def longest_held_back(text: str, stop: list[str]) -> str:
    suffixes = (text[start:] for start in range(len(text)))
    return next((suffix for suffix in suffixes if any(s.startswith(suffix) for s in stop)), "")


@settings(max_examples=150)
@given(chunks=CHUNKS, stop=STOPS, include=st.booleans(), cuts=st.lists(st.integers(0, 60)))
def test_checker_and_oracle(chunks: list[tuple[str, bool]], stop: list[str], include: bool, cuts: list[int]) -> None:
    checker = StopStringChecker(stop, include)
    match = first_match(chunks, stop)
    whole = text = "".join(chunk for chunk, _ in chunks)
    if match is not None:
        end, expected_stop = match
        text = text[: end if include else end - len(expected_stop)]
    released, seen, found = "", "", None
    can_always_stop = all(can_stop for _, can_stop in chunks)
    for chunk, can_stop in chunks:
        part, found = checker.feed(chunk, can_stop)
        released += part
        seen += chunk
        assert text.startswith(released)
        if found is not None:
            break
        if can_always_stop:  # exactly the longest possible beginning of a stop string waits
            assert released + longest_held_back(seen, stop) == seen
    released += checker.finish()
    assert (found, released) == (match[1] if match else None, text)
    if can_always_stop:  # any other cut into chunks gives the same
        bounds = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
        other = StopStringChecker(stop, include)
        again = ""
        for a, b in itertools.pairwise(bounds):
            part, other_found = other.feed(whole[a:b])
            again += part
            if other_found is not None:
                break
        assert (again + other.finish(), other_found) == (released, found)


@pytest.mark.parametrize("stop", [[], [""], ["a", ""]])
def test_empty_stop_strings_are_refused(stop: list[str]) -> None:
    with pytest.raises(ValueError, match="stop="):
        StopStringChecker(stop)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_backend())


def ids_of(text: str) -> list[int]:
    """One token per byte, so that tests choose the token borders."""
    return [tokenizer().backend.encode(character, add_special_tokens=False).ids[0] for character in text]


@pytest.mark.parametrize(("include", "text"), [(False, "hi"), (True, "hi<|end|>")])
def test_the_text_of_a_stop_token_is_left_out(include: bool, text: str) -> None:
    stream = TextStream(tokenizer(), skip_special_tokens=False, include_stop_str_in_output=include)
    ids = [*ids_of("hi"), tokenizer().backend.token_to_id("<|end|>")]
    assert stream.push(ids, ends_with_stop_token=True) is None
    stream.finish()
    assert (stream.num_tokens_kept, stream.text) == (3, text)


@pytest.mark.parametrize("stream", [TextStream(None), TextStream(tokenizer(), detokenize=False)])
def test_without_text(stream: TextStream) -> None:
    assert stream.push([1, 2, 3]) is None
    stream.finish()
    assert (stream.num_tokens_kept, stream.text, stream.take_delta()) == (3, "", "")


def test_stop_strings_need_text() -> None:
    with pytest.raises(ValueError, match=r"stop=\['x'\] needs text"):
        TextStream(tokenizer(), detokenize=False, stop=["x"])

"""Stop strings: the checker against an oracle on the whole text, and the text stream of a request."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_builders import byte_fallback_backend, byte_level_backend

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


@settings(max_examples=400, deadline=None)
@given(chunks=CHUNKS, stop=STOPS, include=st.booleans())
def test_checker_agrees_with_the_oracle(chunks: list[tuple[str, bool]], stop: list[str], include: bool) -> None:
    checker = StopStringChecker(stop, include)
    match = first_match(chunks, stop)
    text = "".join(chunk for chunk, _ in chunks)
    if match is not None:
        end, expected_stop = match
        text = text[: end if include else end - len(expected_stop)]
    released, seen, found = "", "", None
    for chunk, can_stop in chunks:
        piece, found = checker.feed(chunk, can_stop)
        released += piece
        seen += chunk
        assert text.startswith(released)
        if found is not None:
            break
        if all(can_stop for _, can_stop in chunks):
            # Exactly the longest possible beginning of a stop string waits, no more.
            assert released + longest_held_back(seen, stop) == seen
    released += checker.finish()
    assert (found, released) == (match[1] if match else None, text)


@settings(max_examples=100, deadline=None)
@given(text=LETTERS, pieces=st.lists(st.integers(0, 5)), stop=STOPS)
def test_the_cut_into_pieces_does_not_matter(text: str, pieces: list[int], stop: list[str]) -> None:
    def run(chunks: list[str]) -> tuple[str, str | None]:
        checker, released, found = StopStringChecker(stop), "", None
        for chunk in chunks:
            piece, found = checker.feed(chunk)
            released += piece
        return released + checker.finish(), found

    bounds = [0, *sorted(min(cut, len(text)) for cut in pieces), len(text)]
    assert run([text]) == run([text[a:b] for a, b in itertools.pairwise(bounds)])


def test_what_is_fed_after_a_match_is_dropped() -> None:
    checker = StopStringChecker(["END"])
    assert checker.feed("one EN") == ("one ", None)
    assert checker.feed("D two") == ("", "END")
    assert checker.feed("three END") == ("", "END")
    assert checker.finish() == ""


def test_which_of_two_matches_wins() -> None:
    assert StopStringChecker(["bcd", "c"]).feed("abcd") == ("ab", "c"), "the match that ends first"
    assert StopStringChecker(["c", "bc"]).feed("abcd") == ("a", "bc"), "of those the one that begins first"
    assert StopStringChecker(["abx", "b"]).feed("ab") == ("a", "b"), "a match within a longer attempt"


def test_no_work_is_repeated_on_a_long_text() -> None:
    checker = StopStringChecker(["a" * 50 + "b"])
    steps = 0
    next_state = checker._next_state

    def count(state: int, character: str) -> int:
        nonlocal steps
        steps += 1
        return next_state(state, character)

    checker._next_state = count  # type: ignore[method-assign]
    released = [checker.feed("a")[0] for _ in range(2000)]
    assert steps == 2000
    assert "".join(released) == "a" * 1950
    assert StopStringChecker(["zz"]).feed("x" * 100 + "z") == ("x" * 100, None)


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


def test_stop_string_across_token_borders_never_leaks() -> None:
    stream = TextStream(tokenizer(), stop=["</s>", "zzz"])
    deltas = []
    for token_id in ids_of("a </b></"):
        assert stream.push([token_id]) is None
        assert stream.num_tokens_kept == 1
        deltas.append(stream.take_delta())
    assert deltas == ["a", " ", "", "", "</b", ">", "", ""]
    assert stream.push(ids_of("s>xyz")) == "</s>"
    assert stream.num_tokens_kept == 2
    assert (stream.text, stream.stop_string, stream.take_delta()) == ("a </b>", "</s>", "")
    assert stream.push(ids_of("more")) == "</s>"
    assert stream.num_tokens_kept == 0
    stream.finish()
    assert stream.text == "a </b>"


def test_without_stop_strings_text_is_released_at_once() -> None:
    stream = TextStream(tokenizer())
    for character in "STOP":
        assert stream.push(ids_of(character)) is None
        assert stream.take_delta() == character


def test_a_match_at_a_pushs_last_token_keeps_all() -> None:
    stream = TextStream(tokenizer(), stop=["!"], include_stop_str_in_output=True)
    assert stream.push(ids_of("go!")) == "!"
    assert (stream.num_tokens_kept, stream.text) == (3, "go!")


@pytest.mark.parametrize(
    ("min_tokens", "kept", "text", "found"),
    [(0, 2, "a", "."), (1, 2, "a", "."), (2, 4, "a.b", "."), (3, 4, "a.b", "."), (4, 5, "a.b.c", None)],
)
def test_min_tokens_delays_stop_strings(min_tokens: int, kept: int, text: str, found: str | None) -> None:
    stream = TextStream(tokenizer(), stop=["."], min_tokens=min_tokens)
    assert stream.push(ids_of("a.b.c")) == found
    assert (stream.num_tokens_kept, stream.text) == (kept, text)


def test_a_match_may_begin_within_min_tokens() -> None:
    stream = TextStream(tokenizer(), stop=["ab"], min_tokens=1)
    assert stream.push(ids_of("a")) is None
    assert stream.take_delta() == ""
    assert stream.push(ids_of("b")) == "ab"
    assert stream.text == ""


def test_deltas_add_up_to_the_text() -> None:
    stream = TextStream(tokenizer(), stop=["xyz"])
    deltas = []
    for chunk in ("Grü", "ße xy", "", "x", "y"):
        stream.push(tokenizer().encode(chunk, add_special_tokens=False))
        if chunk != "ße xy":
            deltas.append(stream.take_delta())
        assert stream.text == stream.text
    assert "".join(deltas) == stream.text == "Grüße xy"
    stream.finish()
    stream.finish()
    assert (stream.take_delta(), stream.text) == ("xy", "Grüße xyxy")


def test_finish_releases_unfinished_bytes() -> None:
    stream = TextStream(tokenizer(), stop=["\ufffd"])
    face = tokenizer().encode("😀", add_special_tokens=False)
    stream.push([*ids_of("a"), *face[:-1]])
    assert stream.text == "a"
    stream.finish()
    assert (stream.text, stream.stop_string) == ("a\ufffd", None)


@pytest.mark.parametrize(("include", "text"), [(False, "hi"), (True, "hi<|end|>")])
def test_the_stop_tokens_text_is_left_out(include: bool, text: str) -> None:
    stream = TextStream(tokenizer(), skip_special_tokens=False, include_stop_str_in_output=include)
    ids = [*ids_of("hi"), tokenizer().backend.token_to_id("<|end|>")]
    assert stream.push(ids, ends_with_stop_token=True) is None
    stream.finish()
    assert (stream.num_tokens_kept, stream.text) == (3, text)


def test_the_prompts_tail_keeps_a_leading_space() -> None:
    fallback = Tokenizer(byte_fallback_backend())
    ids = fallback.encode("the fox", add_special_tokens=False)
    alone, behind = TextStream(fallback), TextStream(fallback, fallback.encode("run"))
    alone.push(ids)
    behind.push(ids)
    assert (alone.text, behind.text) == ("the fox", " the fox")


@pytest.mark.parametrize("stream", [TextStream(None), TextStream(tokenizer(), detokenize=False)])
def test_without_text(stream: TextStream) -> None:
    assert stream.push([1, 2, 3]) is None
    stream.finish()
    assert (stream.num_tokens_kept, stream.text, stream.take_delta()) == (3, "", "")


def test_stop_strings_need_text() -> None:
    with pytest.raises(ValueError, match=r"stop=\['x'\] needs text"):
        TextStream(tokenizer(), detokenize=False, stop=["x"])

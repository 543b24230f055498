"""The incremental detokenizer: any cut into calls gives the text of a full decode, and no part splits a character."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_builders import BACKENDS as TOKENIZERS
from tokenizer_builders import byte_fallback_backend, byte_level_backend
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from fleetfoot.tokenizer.detokenizer import (
    IncrementalDetokenizer,
    TokenPieces,
    WindowStream,
    make_detokenizer,
)
from fleetfoot.tokenizer.tokenizer import Tokenizer

SPACES = decoders.Replace("▁", " ")


def with_decoder(backend: Backend, *steps: Any) -> Backend:
    backend.decoder = decoders.Sequence(list(steps))
    return backend


BACKENDS: dict[str, Callable[[], Backend]] = {
    **TOKENIZERS,
    "byte_fallback_without_strip": lambda: byte_fallback_backend(strip_left=False),
    # the same texts by decoders that are not recognised
    "byte_level_in_window": lambda: with_decoder(byte_level_backend(), decoders.ByteLevel(), decoders.Fuse()),
    "byte_fallback_in_window": lambda: with_decoder(
        byte_fallback_backend(), decoders.ByteFallback(), SPACES, decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ),
    # more at the beginning of a text than one token shows
    "double_strip": lambda: with_decoder(byte_fallback_backend(), SPACES, decoders.Fuse(), decoders.Strip(" ", 2, 0)),
}
EXACT_ON_INVALID_BYTES = ["byte_level", "metaspace", "word_level"]


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(BACKENDS[kind]())


@functools.cache
def byte_ids(kind: str) -> list[int]:
    """The ids of tokens that are less than a character, and of a few that are more."""
    unfinished = [i for i in range(len(tokenizer(kind))) if "\ufffd" in tokenizer(kind).decode_token(i)]
    return [*unfinished, *range(min(8, len(tokenizer(kind))))]


def encode(kind: str, text: str) -> list[int]:
    return tokenizer(kind).encode(text, add_special_tokens=False)


def id_of_byte(kind: str, value: int) -> int:
    token_id = tokenizer(kind).convert_tokens_to_ids(f"<0x{value:02X}>" if "fallback" in kind else chr(value))
    assert token_id is not None
    return token_id


def ids_of(kind: str, max_size: int = 24) -> st.SearchStrategy[list[int]]:
    any_id = st.integers(0, len(tokenizer(kind)) + 40)
    return st.lists(any_id | st.sampled_from(byte_ids(kind)), max_size=max_size)


def detokenizer_of(kind: str, prompt: Sequence[int] = (), **options: bool) -> IncrementalDetokenizer:
    return make_detokenizer(tokenizer(kind).pieces, prompt, **options)


def stream_text(detokenizer: IncrementalDetokenizer, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """The text of `ids` cut at `cuts`, the last part from finish()."""
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    parts = [detokenizer.update(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return [*parts, detokenizer.finish()]


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=40)
@given(data=st.data())
def test_any_ids(kind: str, data: st.DataObject) -> None:
    """Any cut gives the same text; that of a full decode, where this does not spoil the neighbours of invalid bytes."""
    ids, prompt = data.draw(ids_of(kind)), data.draw(ids_of(kind, max_size=8))
    cuts, skip, spaces = data.draw(st.lists(st.integers(0, 24))), data.draw(st.booleans()), data.draw(st.booleans())

    def run(cuts: Sequence[int], prompt: Sequence[int], spaces: bool = True) -> str:
        options = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
        return "".join(stream_text(detokenizer_of(kind, prompt, **options), ids, cuts))

    def decode(ids: Sequence[int]) -> str:
        return tokenizer(kind).decode(ids, skip_special_tokens=skip)

    assert run(cuts, prompt, spaces) == run([], prompt, spaces) == run(range(len(ids)), prompt, spaces)
    with mock.patch("fleetfoot.tokenizer.detokenizer._PART", 3), mock.patch("fleetfoot.tokenizer.tokenizer._MANY", 0):
        in_parts = decode(ids)
    assert in_parts == decode(ids)
    if kind in EXACT_ON_INVALID_BYTES:
        assert run(range(len(ids)), []) == decode(ids)
    if kind == "byte_level":
        # a character that the prompt begins and the output completes belongs to the output
        before, text = decode(prompt), run([], prompt)
        assert decode([*prompt, *ids]) in (before + text, before.removesuffix("\ufffd") + text)


@pytest.mark.parametrize("kind", ["byte_fallback", "byte_fallback_in_window"])
def test_a_run_of_bytes_that_continues_a_prompt(kind: str) -> None:
    prompt, ids = ([id_of_byte(kind, value) for value in text.encode()] for text in ("😀😀", "é"))
    assert detokenizer_of(kind, prompt).update(ids) == "é"


@pytest.mark.parametrize("kind", ["byte_fallback", "byte_fallback_without_strip"])
def test_invalid_bytes_keep_their_neighbours(kind: str) -> None:
    data = (*"é".encode(), 0xFF, *"你".encode()[:2], 0x41, *"😀".encode(), 0x80, 0xE2)
    detokenizer = detokenizer_of(kind)
    parts = [detokenizer.update([id_of_byte(kind, value)]) for value in data]
    assert parts == ["", "é", "\ufffd", "", "", "\ufffd\ufffdA", "", "", "", "😀", "\ufffd", ""]
    assert detokenizer.finish() == "\ufffd"


def test_special_and_added_tokens() -> None:
    ids, bos = encode("byte_fallback", "the"), [tokenizer("byte_fallback").convert_tokens_to_ids("<s>") or 0]
    for skip, text in ((True, "the"), (False, " the")):  # skipped, BOS is no text before the space
        assert detokenizer_of("byte_fallback", bos, skip_special_tokens=skip).update(ids) == text

    kind, backend = "word_level", tokenizer("word_level")
    ids = encode(kind, "the <a><b> fox <a>")
    shown = "the <a> <b> fox <a>"
    assert shown == backend.decode(ids, skip_special_tokens=False)
    assert detokenizer_of(kind).update(ids) == "the fox"
    assert detokenizer_of(kind, skip_special_tokens=False).update(ids) == shown
    joined = detokenizer_of(kind, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert joined.update(ids) == "the <a><b> fox <a>"

    text = "x<think>a spaced tokeny"  # outside of the byte alphabet
    assert detokenizer_of("byte_level").update(encode("byte_level", text)) == text


@pytest.mark.parametrize("kind", ["byte_level_in_window", "byte_fallback_in_window"])
def test_a_run_of_undecodable_tokens_keeps_the_window_short(kind: str) -> None:
    backend = tokenizer(kind)
    pieces = TokenPieces(backend.backend)
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return pieces.decode_window(ids)

    invalid = id_of_byte(kind, 0xFF)
    stream = WindowStream(decode, pieces.tables[True], [])
    released = stream.update([invalid] * 500)
    assert 490 <= len(released) <= 500
    assert released + stream.finish() == "\ufffd" * 500
    assert longest < 60


def test_a_character_behind_a_run_of_undecodable_tokens_is_not_split() -> None:
    kind = "byte_level_in_window"
    face = encode(kind, "😀")
    for length in range(1, 30):
        text = detokenizer_of(kind).update([id_of_byte(kind, 0xFF)] * length + face)
        assert text == "\ufffd" * length + "😀"

"""The incremental detokenizer: any cut into calls gives the text of a full decode, and no piece splits a character."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_builders import (
    CORPUS,
    byte_fallback_backend,
    byte_level_backend,
    metaspace_backend,
    word_level_backend,
)
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from fleetfoot.tokenizer.detokenizer import (
    ByteFallbackDecoder,
    ByteFallbackStream,
    ByteLevelDecoder,
    ByteLevelStream,
    IncrementalDetokenizer,
    TokenPieces,
    WindowStream,
    make_detokenizer,
)
from fleetfoot.tokenizer.tokenizer import Tokenizer


def byte_fallback_in_window() -> Backend:
    """The same text as byte_fallback_backend, by a decoder that is not recognised."""
    backend = byte_fallback_backend()
    steps = [decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return backend


def double_strip() -> Backend:
    """A decoder that does more at the beginning of a text than one token shows."""
    backend = byte_fallback_backend()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)])
    return backend


def byte_level_in_window() -> Backend:
    backend = byte_level_backend()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend


BACKENDS: dict[str, Callable[[], Backend]] = {
    "byte_level": byte_level_backend,
    "byte_fallback": byte_fallback_backend,
    "byte_fallback_without_strip": lambda: byte_fallback_backend(strip_left=False),
    "metaspace": metaspace_backend,
    "word_level": word_level_backend,
    "byte_level_in_window": byte_level_in_window,
    "byte_fallback_in_window": byte_fallback_in_window,
    "double_strip": double_strip,
}
EXACT_ON_INVALID_BYTES = ["byte_level", "metaspace", "word_level"]


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(BACKENDS[kind]())


@functools.cache
def byte_ids(kind: str) -> list[int]:
    """The ids of tokens that are less than a character, and of a few that are more."""
    unfinished = [i for i in range(tokenizer(kind).vocab_size) if "\ufffd" in tokenizer(kind).decode_token(i)]
    return [*unfinished, *range(min(8, tokenizer(kind).vocab_size))]


def id_of_byte_ff(kind: str) -> int:
    token_id = tokenizer(kind).token_to_id("ÿ" if "byte_level" in kind else "<0xFF>")
    assert token_id is not None
    return token_id


def ids_of(kind: str, max_size: int = 24) -> st.SearchStrategy[list[int]]:
    any_id = st.integers(0, tokenizer(kind).vocab_size + 40)
    return st.lists(any_id | st.sampled_from(byte_ids(kind)), max_size=max_size)


def stream_text(detokenizer: IncrementalDetokenizer, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """The pieces of `ids` cut at `cuts`, the last one from finish()."""
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pieces = [detokenizer.update(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_cut_of_any_ids_gives_the_same_text(kind: str, data: st.DataObject) -> None:
    ids, prompt = data.draw(ids_of(kind)), data.draw(ids_of(kind, max_size=8))
    cuts, skip, spaces = data.draw(st.lists(st.integers(0, 24))), data.draw(st.booleans()), data.draw(st.booleans())

    def run(cuts: Sequence[int]) -> str:
        detokenizer = make_detokenizer(tokenizer(kind).pieces, prompt, skip, spaces)
        return "".join(stream_text(detokenizer, ids, cuts))

    assert run(cuts) == run([]) == run(range(len(ids)))


@pytest.mark.parametrize("kind", EXACT_ON_INVALID_BYTES)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_ids_give_the_text_of_a_full_decode(kind: str, data: st.DataObject) -> None:
    ids, skip = data.draw(ids_of(kind)), data.draw(st.booleans())
    pieces = stream_text(make_detokenizer(tokenizer(kind).pieces, (), skip), ids, range(len(ids)))
    assert "".join(pieces) == tokenizer(kind).decode(ids, skip_special_tokens=skip)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_byte_level_text_continues_the_prompts(data: st.DataObject) -> None:
    kind = "byte_level"
    prompt, ids, skip = data.draw(ids_of(kind)), data.draw(ids_of(kind)), data.draw(st.booleans())
    text = "".join(stream_text(make_detokenizer(tokenizer(kind).pieces, prompt, skip), ids, []))
    before = tokenizer(kind).decode(prompt, skip_special_tokens=skip)
    whole = tokenizer(kind).decode([*prompt, *ids], skip_special_tokens=skip)
    # A character that the prompt begins and the output completes belongs to the output.
    assert whole in (before + text, before.removesuffix("\ufffd") + text)


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(before=st.sampled_from([*CORPUS, "", " "]), text=st.sampled_from(CORPUS) | st.text(max_size=12), data=st.data())
def test_valid_text_round_trips_behind_a_prompt(kind: str, before: str, text: str, data: st.DataObject) -> None:
    backend = tokenizer(kind)
    prompt, ids = backend.encode(before), backend.encode(text, add_special_tokens=False)
    skip, cuts = data.draw(st.booleans()), data.draw(st.lists(st.integers(0, 40), max_size=6))
    pieces = stream_text(make_detokenizer(backend.pieces, prompt, skip), ids, cuts)
    whole = backend.decode([*prompt, *ids], skip_special_tokens=skip)
    assert "".join(pieces) == whole[len(backend.decode(prompt, skip_special_tokens=skip)) :]
    if "\ufffd" not in whole:
        assert "\ufffd" not in "".join(pieces)
        assert pieces[-1] == ""


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_level_in_window", "byte_fallback_in_window"])
def test_characters_come_whole(kind: str) -> None:
    backend = tokenizer(kind)
    ids = backend.encode("é你😀", add_special_tokens=False)
    detokenizer = make_detokenizer(backend.pieces, backend.encode("prompt"))
    pieces = [piece for token_id in ids if (piece := detokenizer.update([token_id]))]
    assert len(ids) > len(pieces)
    assert "".join(pieces).strip() == "é你😀"
    assert set("".join(pieces)) <= set(" é你😀")
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_level_in_window", "byte_fallback_in_window"])
def test_unfinished_bytes_wait_and_finish_gives_them_up(kind: str) -> None:
    backend = tokenizer(kind)
    ids = [*backend.encode("a", add_special_tokens=False), *backend.encode("😀", add_special_tokens=False)[:-1]]
    detokenizer = make_detokenizer(backend.pieces, backend.encode("prompt"))
    assert detokenizer.update(ids).strip() == "a"
    assert detokenizer.update([]) == ""
    flushed = detokenizer.finish()
    assert flushed == backend.decode(ids).lstrip(" a")
    assert set(flushed) == {"\ufffd"}
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("kind", ["byte_level", "byte_level_in_window", "byte_fallback", "byte_fallback_in_window"])
def test_a_character_that_the_prompt_begins(kind: str) -> None:
    backend = tokenizer(kind)
    face = backend.encode("x😀", add_special_tokens=False)
    letter = backend.encode("x", add_special_tokens=False)[-1:]
    completed = make_detokenizer(backend.pieces, face[:-1])
    assert completed.update([*face[-1:], *letter]).strip() == "😀" + backend.decode_token(letter[0])
    broken = make_detokenizer(backend.pieces, face[:-1])
    assert broken.update(letter) + broken.finish() == backend.decode_token(letter[0])
    unused = make_detokenizer(backend.pieces, face[:-1])
    assert unused.finish() == ""


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(("before", "text"), [("😀😀", "é"), ("x", "a b c  d e   f"), ("", "  two  spaces")])
def test_bytes_and_spaces_at_borders(kind: str, before: str, text: str) -> None:
    backend = tokenizer(kind)
    prompt = backend.encode(before, add_special_tokens=False)
    ids = backend.encode(text, add_special_tokens=False)
    pieces = stream_text(make_detokenizer(backend.pieces, prompt), ids, range(len(ids)))
    assert "".join(pieces) == backend.decode([*prompt, *ids])[len(backend.decode(prompt)) :]


@pytest.mark.parametrize("kind", ["byte_fallback", "byte_fallback_in_window"])
def test_a_run_of_bytes_that_goes_on_behind_a_prompt(kind: str) -> None:
    backend = tokenizer(kind)
    prompt, ids = ([backend.token_to_id(f"<0x{b:02X}>") or 0 for b in text.encode()] for text in ("😀😀", "é"))
    assert make_detokenizer(backend.pieces, prompt).update(ids) == "é"


@pytest.mark.parametrize("kind", ["byte_fallback", "byte_fallback_without_strip"])
def test_invalid_bytes_do_not_spoil_their_neighbours(kind: str) -> None:
    backend = tokenizer(kind)
    byte = {value: backend.token_to_id(f"<0x{value:02X}>") for value in range(256)}
    ids = [byte[value] for value in (*"é".encode(), 0xFF, *"你".encode()[:2], 0x41, *"😀".encode(), 0x80, 0xE2)]
    detokenizer = make_detokenizer(backend.pieces, ())
    pieces = [detokenizer.update([token_id]) for token_id in ids if token_id is not None]
    assert pieces == ["", "é", "\ufffd", "", "", "\ufffd\ufffdA", "", "", "", "😀", "\ufffd", ""]
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize(
    ("kind", "text", "alone", "behind"),
    [
        ("byte_level", " the fox", " the fox", " the fox"),
        ("byte_fallback", "the fox", "the fox", " the fox"),
        ("byte_fallback", "  the fox", "  the fox", "   the fox"),
        ("byte_fallback_without_strip", "the fox", " the fox", " the fox"),
        ("metaspace", "the fox", "the fox", " the fox"),
        ("word_level", "the fox", "the fox", " the fox"),
    ],
)
def test_leading_space(kind: str, text: str, alone: str, behind: str) -> None:
    backend = tokenizer(kind)
    ids = backend.encode(text, add_special_tokens=False)
    prompt = backend.encode("runs", add_special_tokens=False)
    assert make_detokenizer(backend.pieces, ()).update(ids) == alone
    assert make_detokenizer(backend.pieces, prompt).update(ids) == behind


def test_a_prompt_of_special_tokens_is_no_text_when_they_are_skipped() -> None:
    backend = tokenizer("byte_fallback")
    ids = backend.encode("the", add_special_tokens=False)
    bos = [backend.token_to_id("<s>") or 0]
    assert make_detokenizer(backend.pieces, bos, skip_special_tokens=True).update(ids) == "the"
    assert make_detokenizer(backend.pieces, bos, skip_special_tokens=False).update(ids) == " the"


def test_special_tokens_and_the_spaces_between_them() -> None:
    backend = tokenizer("word_level")
    ids = backend.encode("the <a><b> fox <a>", add_special_tokens=False)

    def text(**options: bool) -> str:
        return make_detokenizer(backend.pieces, (), **options).update(ids)

    assert text() == "the fox"
    assert text(skip_special_tokens=False) == "the <a> <b> fox <a>" == backend.decode(ids, skip_special_tokens=False)
    assert text(skip_special_tokens=False, spaces_between_special_tokens=False) == "the <a><b> fox <a>"


def test_added_tokens_outside_of_the_byte_alphabet() -> None:
    backend = tokenizer("byte_level")
    ids = backend.encode("x<think>a spaced tokeny", add_special_tokens=False)
    assert make_detokenizer(backend.pieces, ()).update(ids) == "x<think>a spaced tokeny"


@pytest.mark.parametrize("kind", BACKENDS)
def test_ids_beyond_the_vocabulary_are_silent(kind: str) -> None:
    backend = tokenizer(kind)
    ids = backend.encode("the fox", add_special_tokens=False)
    with_gaps = [padding for token_id in ids for padding in (token_id, backend.vocab_size + token_id)]
    detokenizer = make_detokenizer(backend.pieces, [backend.vocab_size])
    assert detokenizer.update(with_gaps) + detokenizer.finish() == backend.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level_in_window", "byte_fallback_in_window"])
def test_a_run_of_undecodable_tokens_keeps_the_window_short(kind: str) -> None:
    backend = tokenizer(kind)
    pieces = TokenPieces(backend.backend)
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return pieces.decode_window(ids)

    invalid = id_of_byte_ff(kind)
    stream = WindowStream(decode, pieces.table(True), [])
    released = stream.update([invalid] * 500)
    assert 490 <= len(released) <= 500
    assert released + stream.finish() == "\ufffd" * 500
    assert longest < 60


def test_a_character_behind_a_run_of_undecodable_tokens_is_not_split() -> None:
    kind = "byte_level_in_window"
    face = tokenizer(kind).encode("😀", add_special_tokens=False)
    for length in range(1, 30):
        text = make_detokenizer(tokenizer(kind).pieces, ()).update([id_of_byte_ff(kind)] * length + face)
        assert text == "\ufffd" * length + "😀"


@pytest.mark.parametrize(
    ("kind", "decoder", "stream"),
    [
        ("byte_level", ByteLevelDecoder, ByteLevelStream),
        ("byte_fallback", ByteFallbackDecoder, ByteFallbackStream),
        ("byte_fallback_without_strip", ByteFallbackDecoder, ByteFallbackStream),
        ("metaspace", type(None), WindowStream),
        ("word_level", type(None), WindowStream),
    ],
)
def test_which_stream_reads_which_decoder(kind: str, decoder: type, stream: type) -> None:
    assert isinstance(tokenizer(kind).pieces.decoder, decoder)
    assert isinstance(make_detokenizer(tokenizer(kind).pieces, ()), stream)

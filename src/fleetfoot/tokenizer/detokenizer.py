"""Incremental detokenization: turns the output tokens of a request into text as they arrive.

A `tokenizers` decoder is a function of a whole list of tokens. Two kinds work token by token, and are recognised by the
decoder's own description: byte-level BPE (GPT-2, Llama 3, Qwen) joins bytes, and SentencePiece-style BPE with byte
fallback (Llama 2, Mistral) joins strings and bytes. Their streams only need a table from token id to piece, which is
filled on demand. Every other decoder runs its own code on short windows of tokens.

The text is that of prompt and output together less the prompt's own text, so a first token that begins with a space
keeps it. A character that the prompt begins and the output completes belongs to the output.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from encodings.utf_8 import IncrementalDecoder as UTF8Decoder
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import tokenizers

Piece = TypeVar("Piece")

REPLACEMENT = "\ufffd"

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
# An unfinished UTF-8 character has at most three bytes, so no more of a prompt can reach into the output.
_MAX_EMPTY = 64
"""Tokens without text after which the end of a prompt is not searched further for an unfinished character."""
_MAX_UNFINISHED_BYTES = 3
_PART = 1 << 13
"""Tokens that are decoded at a time, where there are many: such a call keeps the interpreter."""
# Releases (usually of one token) that are decoded before the window, because a decoder may drop a space at the
# beginning of a text. Each release begins with a character, so they are never split.
_CONTEXT_RELEASES = 5
# Pending tokens after which a run counts as invalid bytes rather than as an unfinished character.
_MAX_PENDING_TOKENS = 8


class PieceTable(dict[int, Piece], Generic[Piece]):
    """Token id -> piece, computed on first access: a vocabulary can have 150 000 entries."""

    def __init__(self, make: Callable[[int], Piece]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> Piece:
        piece = self[token_id] = self._make(token_id)
        return piece


@dataclass(frozen=True)
class ByteLevelDecoder:
    """Each character of a token stands for one byte."""

    def piece(self, token: str) -> bytes:
        try:
            return token.translate(_LATIN_1).encode("latin-1")
        except UnicodeEncodeError:  # an added token with characters outside the byte alphabet, for example a space
            return token.encode()


@dataclass(frozen=True)
class ByteFallbackDecoder:
    """A token is text, or `<0xNN>` for one byte of a character that is not in the vocabulary."""

    replacements: Sequence[tuple[str, str]]
    """(from, to) pairs applied to each token in order; ("▁", " ") in practice."""
    strip_character: str = " "
    strip_left: int = 0
    """Number of leading `strip_character`s that the decoder removes from the whole text."""

    def piece(self, token: str) -> bytes | str:
        for old, new in self.replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token


class TokenPieces:
    """The piece tables of one tokenizer, shared by all of its streams.

    Args:
        backend: The tokenizer; its vocabulary must not change afterwards.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.decoder = read_decoder(backend)
        added_tokens = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added_tokens)
        self.skipped_ids = frozenset(token_id for token_id, token in added_tokens.items() if token.special)
        """Ids that are left out with skip_special_tokens."""
        self.tables = self._table(frozenset()), self._table(self.skipped_ids)
        """By skip_special_tokens: token id -> bytes or str, depending on `decoder`; without one the token. Empty for
        ids without text."""
        self.texts = tuple(PieceTable(partial(_whole_text, table)) for table in self.tables)
        """Texts of `tables` with bytes: token id -> text; None for bytes that are no whole characters."""

    def decode(self, token_ids: Sequence[int], *, skips_special: bool) -> str | None:
        """The text of many tokens by the tokenizer's own decoder, in parts. None: that one reads all at once."""
        table, texts = self.tables[skips_special], list[str]()
        parts = (token_ids[begin : begin + _PART] for begin in range(0, len(token_ids), _PART))
        if isinstance(self.decoder, ByteLevelDecoder):
            utf8 = UTF8Decoder("replace")
            texts += [utf8.decode(b"".join(map(table.__getitem__, part))) for part in parts]
            return "".join(texts) + utf8.decode(b"", final=True)
        if not isinstance(self.decoder, ByteFallbackDecoder):
            return None
        pending = bytearray()  # of a run of bytes, each of which is replaced if they are no characters
        for part in parts:
            for kind, run in itertools.groupby(filter(None, map(table.__getitem__, part)), type):
                if kind is bytes:
                    pending += b"".join(run)
                else:
                    texts += (_run_text(pending), "".join(run))
                    pending.clear()
        text = "".join(texts) + _run_text(pending)
        end = self.decoder.strip_left
        return text[:end].lstrip(self.decoder.strip_character) + text[end:]

    def decode_window(self, token_ids: Sequence[int]) -> str:
        """The text of a few tokens by the tokenizer's own decoder, special tokens included."""
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def _table(self, skipped_ids: frozenset[int]) -> PieceTable[Any]:
        def make(token_id: int) -> bytes | str:
            token = "" if token_id in skipped_ids else self._backend.id_to_token(token_id) or ""
            return token if self.decoder is None else self.decoder.piece(token)

        return PieceTable(make)


def _whole_text(table: PieceTable[bytes], token_id: int) -> str | None:
    try:
        return table[token_id].decode()
    except UnicodeDecodeError:
        return None


def _run_text(data: bytearray) -> str:
    """The text of a run of single bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return REPLACEMENT * len(data)


def read_decoder(backend: tokenizers.Tokenizer) -> ByteLevelDecoder | ByteFallbackDecoder | None:
    """The decoder if it is one of the two that work token by token, else None."""
    if backend.decoder is None:
        return None
    description = json.loads(backend.decoder.__getstate__())
    steps = description["decoders"] if description["type"] == "Sequence" else [description]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteLevelDecoder()
    replaces = list(itertools.takewhile(_replaces_string, steps))
    replacements = [(step["pattern"]["String"], step["content"]) for step in replaces]
    match steps[len(replaces) :]:
        case [{"type": "ByteFallback"}, {"type": "Fuse"}]:
            return ByteFallbackDecoder(replacements)
        case [{"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "stop": 0} as strip]:
            return ByteFallbackDecoder(replacements, strip["content"], strip["start"])
    return None


def _replaces_string(step: dict[str, Any]) -> bool:
    return step["type"] == "Replace" and "String" in step["pattern"]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_LATIN_1 = dict.fromkeys(range(0x100), 0x100) | {ord(letter): byte for letter, byte in _byte_alphabet().items()}
"""Characters of the alphabet as those of Latin-1 with the bytes' numbers, and other characters as none of it."""


class IncrementalDetokenizer(Protocol):
    """Turns tokens into text as they arrive.

    The concatenated results do not depend on how the tokens are split into calls. For valid UTF-8 they are
    `decode(prompt + output)` without the prompt's text. No result ends within a character: unfinished bytes are held
    back, and `finish` returns them as U+FFFD. Ids outside the tokenizer's vocabulary have no text, because models pad
    their vocabulary. The cost per token is constant.
    """

    def update(self, new_token_ids: Sequence[int]) -> str:
        """Append tokens; returns the text that they complete."""

    def finish(self) -> str:
        """End the output; returns what was held back, as replacement characters."""


def make_detokenizer(
    pieces: TokenPieces,
    prompt_token_ids: Sequence[int] = (),
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> IncrementalDetokenizer:
    """The detokenizer of one request.

    Args:
        pieces: Of the tokenizer.
        prompt_token_ids: Its end decides about a leading space.
        skip_special_tokens: Whether special tokens are left out of the text.
        spaces_between_special_tokens: If False, the space with which some decoders join tokens is left out between two
            adjacent added tokens. Byte-level and byte-fallback decoders never join tokens with a space.
    """
    table, decoder = pieces.tables[skip_special_tokens], pieces.decoder
    if isinstance(decoder, ByteLevelDecoder):
        return ByteLevelStream(table, pieces.texts[skip_special_tokens], prompt_token_ids)
    if isinstance(decoder, ByteFallbackDecoder):
        return ByteFallbackStream(table, prompt_token_ids, decoder)
    unspaced = frozenset() if spaces_between_special_tokens else pieces.added_ids
    return WindowStream(pieces.decode_window, table, prompt_token_ids, unspaced)


class PromptReplacements:
    """Removes the replacement characters of bytes that the prompt left unfinished and the output did not complete."""

    def __init__(self, count: int) -> None:
        self.prefix = REPLACEMENT * count
        """What is to be removed; empty afterwards."""

    def remove(self, text: str) -> str:
        if self.prefix and text:
            text = text.removeprefix(self.prefix)
            self.prefix = ""
        return text


class ByteLevelStream:
    """Byte-level BPE: an incremental UTF-8 decoder. Invalid bytes become U+FFFD as in a full decode.

    Args:
        texts: of tokens that are whole characters, as most are: they need no decoder while it holds nothing back.
    """

    def __init__(
        self, pieces: PieceTable[bytes], texts: PieceTable[str | None], prompt_token_ids: Sequence[int]
    ) -> None:
        self._pieces = pieces
        self._texts = texts
        self._utf8 = UTF8Decoder("replace")
        self._utf8.decode(_last_bytes(pieces, prompt_token_ids))
        unfinished, _ = self._utf8.getstate()
        # The decoder writes one replacement for the bytes that begin a character.
        self._prompt = PromptReplacements(1 if unfinished else 0)

    def update(self, new_token_ids: Sequence[int]) -> str:
        if len(new_token_ids) == 1 and not self._utf8.buffer and not self._prompt.prefix:
            text = self._texts[new_token_ids[0]]
            if text is not None:
                return text
        data = b"".join(map(self._pieces.__getitem__, new_token_ids))
        return self._prompt.remove(self._utf8.decode(data))

    def finish(self) -> str:
        return self._prompt.remove(self._utf8.decode(b"", final=True))


class ByteFallbackStream:
    """BPE with byte fallback: strings, and runs of single bytes that encode rare characters.

    A full decode turns every byte of a run into U+FFFD if any byte of it is invalid. The end of a run is not known in a
    stream, so here each complete character is kept, and each invalid byte becomes U+FFFD.
    """

    def __init__(
        self, pieces: PieceTable[bytes | str], prompt_token_ids: Sequence[int], decoder: ByteFallbackDecoder
    ) -> None:
        self._pieces = pieces
        self._strip_character = decoder.strip_character
        # Leading spaces are stripped from prompt and output together, so only an empty prompt leaves any to strip.
        self._strip_left = 0 if any(map(pieces.__getitem__, prompt_token_ids)) else decoder.strip_left
        self._pending = bytearray(_last_bytes(pieces, prompt_token_ids))
        self._pop_characters()
        self._prompt = PromptReplacements(len(self._pending))

    def update(self, new_token_ids: Sequence[int]) -> str:
        texts = []
        for piece in map(self._pieces.__getitem__, new_token_ids):
            if isinstance(piece, bytes):
                self._pending += piece
                texts.append(self._pop_characters())
            elif piece:
                texts.append(self._flush() + piece)
        return self._release("".join(texts))

    def finish(self) -> str:
        return self._release(self._flush())

    def _pop_characters(self) -> str:
        """Remove complete characters and invalid bytes from the pending bytes, not the beginning of a character."""
        text = ""
        while True:
            try:
                characters, num_bytes = codecs.utf_8_decode(self._pending, "strict", False)
            except UnicodeDecodeError as error:
                characters = self._pending[: error.start].decode() + REPLACEMENT * (error.end - error.start)
                num_bytes = error.end
            if num_bytes == 0:
                return text
            text += characters
            del self._pending[:num_bytes]

    def _flush(self) -> str:
        text = REPLACEMENT * len(self._pending)
        self._pending.clear()
        return text

    def _release(self, text: str) -> str:
        text = self._prompt.remove(text)
        while self._strip_left and text:
            if text[0] != self._strip_character:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


class WindowStream:
    """Any other decoder: decodes two short windows of tokens for each new token, and returns the difference.

    Args:
        decode: Token ids to text, special tokens included.
        tokens: Token id -> token, or "" for an id that has no text or is to be skipped.
        prompt_token_ids: The tokens before the output.
        unspaced_token_ids: Tokens between which the decoder's joining space is left out.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        tokens: PieceTable[str],
        prompt_token_ids: Sequence[int],
        unspaced_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._decode = decode
        self._tokens = tokens
        self._unspaced = unspaced_token_ids
        self._last_unspaced = False
        self._context = deque([self._prompt_tail(prompt_token_ids)], maxlen=_CONTEXT_RELEASES)
        self._pending: list[int] = []
        text = decode(self._context[0])
        self._context_text = text.rstrip(REPLACEMENT)
        self._prompt = PromptReplacements(len(text) - len(self._context_text))

    def update(self, new_token_ids: Sequence[int]) -> str:
        return "".join([self._step(token_id) for token_id in new_token_ids if self._tokens[token_id]])

    def finish(self) -> str:
        return self._release(len(self._pending), self._decode_after_context(self._pending))

    def _step(self, token_id: int) -> str:
        self._pending.append(token_id)
        joined = self._last_unspaced
        self._last_unspaced = token_id in self._unspaced
        num_tokens = len(self._pending)
        window_text = self._decode_after_context(self._pending)
        if window_text.endswith(REPLACEMENT):
            if num_tokens <= _MAX_PENDING_TOKENS:
                return ""
            num_tokens -= _MAX_UNFINISHED_BYTES  # a token of an unfinished character has at least one byte
            window_text = self._decode_after_context(self._pending[:num_tokens])
        text = self._release(num_tokens, window_text)
        if joined and self._last_unspaced and not self._tokens[token_id].startswith(" "):
            text = text.removeprefix(" ")
        return text

    def _release(self, num_tokens: int, window_text: str) -> str:
        """Move the first pending tokens to the context; returns their text, the end of `window_text`."""
        text = window_text[len(self._context_text) :]
        self._context.append(self._pending[:num_tokens])
        del self._pending[:num_tokens]
        self._context_text = self._decode_after_context([])
        return self._prompt.remove(text)

    def _decode_after_context(self, token_ids: list[int]) -> str:
        return self._decode([*itertools.chain(*self._context), *token_ids])

    def _prompt_tail(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The last tokens of the prompt that have text; more if the first of them begins within a character."""
        visible = (token_id for token_id in reversed(prompt_token_ids) if self._tokens[token_id])
        tail = list(itertools.islice(visible, _CONTEXT_RELEASES))[::-1]
        for token_id in itertools.islice(visible, _MAX_UNFINISHED_BYTES):
            if not self._decode(tail).startswith(REPLACEMENT):
                break
            tail.insert(0, token_id)
        return tail


def _last_bytes(pieces: PieceTable[Any], token_ids: Sequence[int]) -> bytes:
    """The last bytes of a prompt, enough to hold any unfinished character."""
    tail = b""
    for piece in map(pieces.__getitem__, itertools.islice(reversed(token_ids), _MAX_EMPTY)):
        if piece and isinstance(piece, str):
            break
        tail = (piece or b"") + tail
        if len(tail) >= _MAX_UNFINISHED_BYTES:
            break
    return tail[-_MAX_UNFINISHED_BYTES:]

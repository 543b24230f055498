"""The text of single tokens, for the two kinds of decoder that work token by token.

A `tokenizers` decoder is a function of a whole list of tokens. For byte-level BPE (GPT-2, Llama 3, Qwen) it joins
bytes, and for SentencePiece-style BPE with byte fallback (Llama 2, Mistral) it joins strings and bytes, so a stream
only needs a table from token id to piece, which is filled on demand. `read_decoder` recognises these two from the
decoder's own description. Every other decoder runs its own code on short windows of tokens
(`detokenizer.WindowStream`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import tokenizers

Piece = TypeVar("Piece")

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


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
            return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
        except KeyError:  # an added token with characters outside the byte alphabet, for example a space
            return token.encode()


@dataclass(frozen=True)
class ByteFallbackDecoder:
    """A token is text, or `<0xNN>` for one byte of a character that is not in the vocabulary."""

    replacements: tuple[tuple[str, str], ...]
    """(from, to) pairs applied to each token in order; ("▁", " ") in practice."""
    strip_character: str
    strip_left: int
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
        self._tables = {skip: self._table(self.skipped_ids if skip else frozenset()) for skip in (False, True)}

    def table(self, skip_special_tokens: bool) -> PieceTable[Any]:
        """Token id -> bytes or str, depending on `decoder`; without one the token. Empty for ids without text."""
        return self._tables[skip_special_tokens]

    def decode_window(self, token_ids: Sequence[int]) -> str:
        """The text of a few tokens by the tokenizer's own decoder, special tokens included."""
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; b"" for an id without text."""
        piece = self._tables[False][token_id]
        if self.decoder is None:
            piece = self.decode_window([token_id])
        return piece if isinstance(piece, bytes) else piece.encode()

    def _table(self, skipped_ids: frozenset[int]) -> PieceTable[Any]:
        piece_of: Callable[[str], bytes | str] = self.decoder.piece if self.decoder is not None else str

        def make(token_id: int) -> bytes | str:
            token = None if token_id in skipped_ids else self._backend.id_to_token(token_id)
            return piece_of(token or "")

        return PieceTable(make)


def read_decoder(backend: tokenizers.Tokenizer) -> ByteLevelDecoder | ByteFallbackDecoder | None:
    """The decoder of `backend` if it is one of the two that work token by token, else None."""
    if backend.decoder is None:
        return None
    description = json.loads(backend.decoder.__getstate__())
    steps = description["decoders"] if description["type"] == "Sequence" else [description]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteLevelDecoder()
    return _read_byte_fallback(steps)


def _read_byte_fallback(steps: list[dict[str, Any]]) -> ByteFallbackDecoder | None:
    """Recognises Replace..., ByteFallback, Fuse and an optional Strip on the left, in this order."""
    replacements = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        replacements.append((steps[0]["pattern"]["String"], steps[0]["content"]))
        steps = steps[1:]
    types = [step["type"] for step in steps]
    if types == ["ByteFallback", "Fuse"]:
        return ByteFallbackDecoder(tuple(replacements), strip_character=" ", strip_left=0)
    if types == ["ByteFallback", "Fuse", "Strip"] and steps[2]["stop"] == 0:
        return ByteFallbackDecoder(tuple(replacements), steps[2]["content"], steps[2]["start"])
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()

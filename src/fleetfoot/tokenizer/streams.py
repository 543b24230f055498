"""Streams that turn token ids into text as they come, one for each kind of decoder in `pieces.py`.

A stream starts behind a prompt. Its text is what the decoder makes of prompt and output together, less the prompt's own
text, so a first token that begins with a space keeps it. A character that the prompt begins and the output completes
belongs to the output.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from fleetfoot.tokenizer.pieces import PieceTable

REPLACEMENT = "\ufffd"

# An unfinished UTF-8 character is at most three bytes long, so no more of a prompt can reach into the output.
_MAX_UNFINISHED_BYTES = 3


class TextDecoder(Protocol):
    """Text from token ids, as they come."""

    def update(self, new_token_ids: Sequence[int]) -> str:
        """The text that these tokens finish; never a part of a character."""

    def finish(self) -> str:
        """Ends the output: what was held back, as replacement characters."""


class NullDecoder:
    """The stream of a request that wants no text."""

    def update(self, new_token_ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class PromptReplacements:
    """Removes the replacement characters of bytes that the prompt left unfinished and the output did not complete."""

    def __init__(self, count: int) -> None:
        self._prefix = REPLACEMENT * count

    def remove(self, text: str) -> str:
        if self._prefix and text:
            text = text.removeprefix(self._prefix)
            self._prefix = ""
        return text


class ByteLevelStream:
    """Byte-level BPE: an incremental UTF-8 decoder. Invalid bytes become U+FFFD as in a full decode."""

    def __init__(self, pieces: PieceTable[bytes], prompt_token_ids: Sequence[int]) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(_last_bytes(map(pieces.__getitem__, reversed(prompt_token_ids))))
        unfinished, _ = self._utf8.getstate()
        # The decoder writes one replacement for the bytes that begin a character.
        self._prompt = PromptReplacements(1 if unfinished else 0)

    def update(self, new_token_ids: Sequence[int]) -> str:
        data = b"".join(map(self._pieces.__getitem__, new_token_ids))
        return self._prompt.remove(self._utf8.decode(data))

    def finish(self) -> str:
        return self._prompt.remove(self._utf8.decode(b"", final=True))


class ByteFallbackStream:
    """BPE with byte fallback: strings, and runs of single bytes that spell out rare characters.

    A full decode turns every byte of a run into U+FFFD when any byte of it is invalid. A stream cannot know the end of
    a run, so here each character stands once it is complete, and only invalid bytes become U+FFFD, one for each.
    """

    def __init__(
        self, pieces: PieceTable[bytes | str], prompt_token_ids: Sequence[int], strip_character: str, strip_left: int
    ) -> None:
        self._pieces = pieces
        self._strip_character = strip_character
        # Leading spaces are stripped from the whole text, of which any text of the prompt is the beginning.
        self._strip_left = 0 if any(map(pieces.__getitem__, prompt_token_ids)) else strip_left
        self._pending = bytearray(_last_bytes(map(pieces.__getitem__, reversed(prompt_token_ids))))
        self._take_characters()
        self._prompt = PromptReplacements(len(self._pending))

    def update(self, new_token_ids: Sequence[int]) -> str:
        texts = []
        for piece in map(self._pieces.__getitem__, new_token_ids):
            if isinstance(piece, bytes):
                self._pending += piece
                texts.append(self._take_characters())
            elif piece:
                texts.append(self._flush() + piece)
        return self._release("".join(texts))

    def finish(self) -> str:
        return self._release(self._flush())

    def _take_characters(self) -> str:
        """Takes complete characters and invalid bytes from the pending bytes; leaves the beginning of a character."""
        text = ""
        while self._pending:
            try:
                characters, num_bytes = codecs.utf_8_decode(self._pending, "strict", False)
            except UnicodeDecodeError as error:
                characters = self._pending[: error.start].decode() + REPLACEMENT * (error.end - error.start)
                num_bytes = error.end
            text += characters
            del self._pending[:num_bytes]
            if num_bytes == 0:
                break
        return text

    def _flush(self) -> str:
        text = REPLACEMENT * len(self._pending)
        self._pending.clear()
        return text

    def _release(self, text: str) -> str:
        text = self._prompt.remove(text)
        while self._strip_left and text:
            if text[0] != self._strip_character:
                self._strip_left = 0
            else:
                text = text[1:]
                self._strip_left -= 1
        return text


def _last_bytes(pieces_backwards: Iterable[bytes | str]) -> bytes:
    """The last bytes of a prompt, enough to hold any unfinished character."""
    tail = b""
    for piece in pieces_backwards:
        if isinstance(piece, bytes):
            tail = piece + tail
        elif piece:
            break
        if len(tail) >= _MAX_UNFINISHED_BYTES:
            break
    return tail[-_MAX_UNFINISHED_BYTES:]

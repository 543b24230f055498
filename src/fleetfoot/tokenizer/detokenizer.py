"""The incremental detokenizer of one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fleetfoot.tokenizer.pieces import ByteFallbackDecoder, ByteLevelDecoder, TokenPieces
from fleetfoot.tokenizer.streams import ByteFallbackStream, ByteLevelStream, TextDecoder
from fleetfoot.tokenizer.window import WindowStream

if TYPE_CHECKING:
    from fleetfoot.tokenizer.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns the output tokens of one request into text as they come.

    The concatenation of all that `update` and `finish` return does not depend on how the tokens are cut into calls. For
    an output of valid UTF-8 it is `decode(prompt + output)` without the prompt's text. No returned piece ends within a
    character: the bytes of an unfinished one are held back, and `finish` gives them as U+FFFD. Ids that the tokenizer
    does not know (models pad their vocabulary) give no text. The cost per token is constant.

    Args:
        tokenizer: The tokenizer of the request's model.
        prompt_token_ids: The prompt; its tail decides about a leading space.
        skip_special_tokens: Whether special tokens are left out of the text.
        spaces_between_special_tokens: When False, the space with which some decoders join tokens is left out between
            two neighbouring added tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        pieces = tokenizer.pieces
        self._stream = _open_stream(pieces, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)

    def update(self, new_token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that they finish."""
        return self._stream.update(new_token_ids)

    def finish(self) -> str:
        """Ends the output; returns what was held back, as replacement characters."""
        return self._stream.finish()


def _open_stream(
    pieces: TokenPieces,
    prompt_token_ids: Sequence[int],
    skip_special_tokens: bool,
    spaces_between_special_tokens: bool,
) -> TextDecoder:
    table = pieces.table(skip_special_tokens)
    match pieces.decoder:  # the first two never join tokens with a space
        case ByteLevelDecoder():
            return ByteLevelStream(table, prompt_token_ids)
        case ByteFallbackDecoder(strip_character=strip_character, strip_left=strip_left):
            return ByteFallbackStream(table, prompt_token_ids, strip_character, strip_left)
    unspaced = frozenset() if spaces_between_special_tokens else pieces.added_ids
    return WindowStream(pieces.decode_window, table, prompt_token_ids, unspaced)

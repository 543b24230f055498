"""The text of one request as its tokens come: detokenized, and cut at its stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fleetfoot.tokenizer.detokenizer import IncrementalDetokenizer
from fleetfoot.tokenizer.stop import stop_checker
from fleetfoot.tokenizer.streams import NullDecoder, TextDecoder

if TYPE_CHECKING:
    from fleetfoot.tokenizer.tokenizer import Tokenizer


class TextStream:
    """Output tokens in, released text out. A stop string never leaks, not even in part, across token borders.

    Args:
        tokenizer: The tokenizer; None for an engine that runs on token ids alone, which gives no text.
        prompt_token_ids: The prompt; its tail decides about a leading space.
        detokenize: False for no text.
        skip_special_tokens: Whether special tokens are left out of the text.
        spaces_between_special_tokens: See `IncrementalDetokenizer`.
        stop: Stop strings.
        include_stop_str_in_output: Whether the text keeps what stopped it, a stop string or a stop token.
        min_tokens: A stop string counts only if more than this many tokens were pushed when it is complete.

    Raises:
        ValueError: Stop strings without text to find them in.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int] = (),
        *,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer: TextDecoder
        if tokenizer is None or not detokenize:
            if stop:
                raise ValueError(f"stop={list(stop)!r} needs text: detokenize=True and a tokenizer")
            self._detokenizer = NullDecoder()
        else:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens
            )
        self._checker = stop_checker(stop, include_stop_str_in_output)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._taken: list[str] = []  # the released text that take_delta gave
        self._delta: list[str] = []  # the released text since then
        self.num_tokens_kept = 0
        """How many tokens of the last push belong to the output: those up to the one that completed the stop string."""
        self.stop_string: str | None = None
        """The stop string that ended the text, or None."""

    @property
    def text(self) -> str:
        """All text released so far. Joined when asked for, not with each token."""
        self._taken = ["".join(self._taken)]
        self._delta = ["".join(self._delta)]
        return self._taken[0] + self._delta[0]

    def take_delta(self) -> str:
        """The text released since the last call."""
        delta = "".join(self._delta)
        self._delta.clear()
        self._taken.append(delta)
        return delta

    def push(self, new_token_ids: Sequence[int], ends_with_stop_token: bool = False) -> str | None:
        """Takes the next tokens, one or several.

        Args:
            new_token_ids: The tokens.
            ends_with_stop_token: Whether the last of them is the EOS or stop token that ended the request. Its text is
                left out, unless the text is to keep what stopped it.

        Returns:
            The stop string that ended the text, or None. After it, `num_tokens_kept` says how many of these tokens are
            part of the output; tokens that are pushed later are not.
        """
        self.num_tokens_kept = 0
        if self.stop_string is not None:
            return self.stop_string
        num_shown = len(new_token_ids) - (ends_with_stop_token and not self._include_stop)
        for token_id in new_token_ids[:num_shown]:
            self._num_tokens += 1
            self.num_tokens_kept += 1
            text = self._detokenizer.update((token_id,))
            released, self.stop_string = self._checker.feed(text, can_stop=self._num_tokens > self._min_tokens)
            if released:
                self._delta.append(released)
            if self.stop_string is not None:
                return self.stop_string
        self.num_tokens_kept = len(new_token_ids)
        return None

    def finish(self) -> None:
        """Ends the text: releases what was held back for a stop string or an unfinished character."""
        if self.stop_string is None:
            self._delta += [self._checker.finish(), self._detokenizer.finish()]

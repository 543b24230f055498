"""The tokenizer as llguidance reads it.

llguidance's own reader of tokenizer.json takes every added token of the form ``<...>`` for a special one, and encodes
forced texts with tokens that it refuses then. Here an added token is special if the tokenizer marks it so, or if it
ends outputs. The others are text, wherever it comes from: a grammar's ``"<think>"`` is that token, or its spelling in
several. A special token is in a text as its spelling alone, and in a grammar by its id.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers


_MOST_ENCODED = 512
"""Characters of a text without a choice that are encoded: each mask asks for all of the rest anew, and needs its first
token."""


_MAX_ITEMS = 8000  # of a parser's row: an object has four for each property that is not required


@dataclass(frozen=True, slots=True)
class VocabularySource:
    """What a process makes an `llguidance.LLTokenizer` of."""

    tokenizer: str  # the text of a tokenizer.json
    vocab_size: int  # of the model's logits; a tokenizer may have more tokens, or less
    eos_token_ids: Sequence[int]

    def read(self) -> Any:
        """The `llguidance.LLTokenizer`. Takes about two seconds for 150,000 tokens. Raises ValueError: its decoder is
        of another kind."""
        from llguidance import LLTokenizer
        from tokenizers import Tokenizer

        backend = Tokenizer.from_str(self.tokenizer)
        texts = token_texts(backend)
        tokens = [texts.get(token_id, b"") for token_id in range(self.vocab_size)]
        marked = (token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special)
        special = {token_id for token_id in (*marked, *self.eos_token_ids) if token_id < self.vocab_size}
        content = {token_id: text for token_id, text in enumerate(tokens) if token_id not in special}
        make = functools.partial(make_tokenizer, tokens, sorted(special), self.eos_token_ids)
        found = make(_encoder(backend, content, functools.cache(lambda: make(lambda _: []).greedy_tokenize)))
        return found.with_slices(LLTokenizer.general_slices())  # a call of its own: each keeps Python's lock


def make_tokenizer(
    tokens: Sequence[bytes], special: Sequence[int], ends: Sequence[int], encode: Callable[[str], list[int]]
) -> Any:
    """An `llguidance.LLTokenizer` without slices.

    Args:
        tokens: the text of each.
        special: tokens that are no text.
        ends: end tokens.
        encode: the tokens of a text, none of them special.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    class Vocabulary(SimpleNamespace):
        def __call__(self, text: str) -> list[int]:
            if not isinstance(text, str):  # asked once, whether it takes bytes
                raise TypeError(f"expected a text, got {type(text).__name__}")
            return encode(text)

    vocabulary = Vocabulary(eos_token_id=ends[0], bos_token_id=None, tokens=tokens, special_token_ids=special)
    return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=list(ends), slices=[])


def plain_matcher(tokenizer: Any, text: str) -> Any:
    """An `llguidance.LLMatcher` at the beginning, or with an error. ``tokenizer``: an `llguidance.LLTokenizer`."""
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(max_items_in_row=_MAX_ITEMS))


def token_texts(backend: tokenizers.Tokenizer) -> Mapping[int, bytes]:
    """The text of each token. Raises ValueError: they have none by themselves."""
    from fleetfoot.tokenizer.detokenizer import read_decoder

    decoder = read_decoder(backend)
    if decoder is None:
        raise ValueError(f"its decoder is {backend.decoder}; it must be byte-level, or have byte fallback")
    pieces = ((token_id, decoder.piece(token)) for token, token_id in backend.get_vocab(with_added_tokens=True).items())
    return {token_id: piece if isinstance(piece, bytes) else piece.encode() for token_id, piece in pieces}


def _encoder(
    backend: tokenizers.Tokenizer, content: Mapping[int, bytes], greedy: Callable[[], Callable[[str], list[int]]]
) -> Callable[[str], list[int]]:
    """Encodes texts as a model writes them within an output: with tokens of ``content``, and nothing put before them.
    ``greedy``: makes what finds the longest tokens, one by one."""
    from tokenizers import normalizers

    backend.encode_special_tokens = True
    if (normalizer := backend.normalizer) is not None:
        parts = [part for part in _parts(normalizer) if not isinstance(part, normalizers.Prepend)]
        backend.normalizer = normalizers.Sequence(parts)
    for part in _parts(backend.pre_tokenizer):
        if hasattr(part, "prepend_scheme"):
            part.prepend_scheme = "never"
        if hasattr(part, "add_prefix_space"):
            part.add_prefix_space = False

    def encode(text: str) -> list[int]:
        text = text[:_MOST_ENCODED]
        found: list[int] = backend.encode(text, add_special_tokens=False).ids
        is_same = b"".join(content.get(token_id, b"\xff") for token_id in found) == text.encode()
        return found if is_same else greedy()(text)  # a normalizer has changed it, or it has an end token

    return encode


def _parts(sequence: Any) -> list[Any]:
    """The parts of a normalizer or pre-tokenizer; [] for none."""
    if sequence is None:
        return []
    return list(sequence) if type(sequence).__name__ == "Sequence" else [sequence]

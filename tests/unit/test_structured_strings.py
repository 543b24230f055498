"""Token masks within the strings of JSON: those of llguidance, in walks through random outputs."""

import random
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from tests.helpers.engines import EOS

from fleetfoot import StructuredOutputsParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.structured.compiler import GrammarCompiler
from fleetfoot.structured.mask_space import fill_masks
from fleetfoot.structured.strings import StringMatcher
from fleetfoot.tokenizer.tokenizer import Tokenizer

VOCAB = 2048 + 70
"""More than the tokenizer has."""


def string(**limits: Any) -> dict[str, Any]:
    return {"type": "string", **limits}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


ITEM = closed(a=string(maxLength=6), kind={"const": "x"})
SCHEMAS: dict[str, Any] = {
    "lengths": closed(a=string(minLength=3, maxLength=40), b=string(minLength=2), c=string(maxLength=3)),
    "none": closed(a=string(maxLength=0), b=string(minLength=1, maxLength=1)),
    "long": closed(a=string(maxLength=3000), b=string(minLength=200, maxLength=1000)),
    "patterns": closed(
        a=string(pattern="^.{1,24}$"), b=string(pattern="^[a-z]{3,40}$"), c=string(pattern="^[A-Z _-]+$", maxLength=11),
        d=string(pattern=r"^\w{2}$"), e=string(pattern="^[^x]*$", maxLength=14),
    ),
    "other patterns": closed(
        a=string(pattern="^a.{1,24}$"), b=string(format="email", maxLength=30), c={"enum": ["a"]}, d=string(maxLength=9)
    ),
    "open": {"type": "object", "properties": {"a": string(maxLength=12), "b": string(maxLength=3)}, "required": ["a"]},
    "names": {"type": "object", "additionalProperties": string(maxLength=9)},
    "escaped names": closed(**{"ä": string(maxLength=4), 'q"x': string(maxLength=5), "a b": string(maxLength=6)}),
    "optional": closed(a={"anyOf": [string(maxLength=20), {"type": "null"}]}, b=string(maxLength=7)),
    "options": closed(a={"anyOf": [string(maxLength=4), string(maxLength=8)]}, b={"allOf": [string(maxLength=8)]}),
    "objects": {"type": "array", "items": {"anyOf": [ITEM, closed(a=string(maxLength=9), m=string(maxLength=4))]}},
    "equal limits": {"type": "array", "items": {"anyOf": [ITEM, closed(a=string(maxLength=6), m=string())]}},
    "references": {
        "$ref": "#/$defs/node",
        "$defs": {"node": closed(v=string(maxLength=15), c={"type": "array", "items": {"$ref": "#/$defs/node"}})},
    },
    "arrays": {
        "type": "array", "prefixItems": [string(maxLength=3), string(minLength=5, maxLength=6)], "minItems": 2,
        "items": string(maxLength=30),
    },
    "anything": {"type": "array", "prefixItems": [string(maxLength=5)], "items": {}},
}  # fmt: skip
CONSTRAINTS = {name: {"json": schema} for name, schema in SCHEMAS.items()} | {
    "fixed white space": {"json": SCHEMAS["lengths"], "disable_any_whitespace": True},
    "behind text": {"json": SCHEMAS["arrays"], "reasoning_begin": "<think>", "reasoning_end": "</think>"},
    "behind tokens": {"json": SCHEMAS["arrays"], "reasoning_begin": "<|user|>", "reasoning_end": "<|assistant|>"},
}
WITHOUT = {"options"}
"""Schemas with no string whose limits are known."""


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    tokenizer = Tokenizer.from_path(embedded_model_path())
    return GrammarCompiler(lambda: tokenizer, VOCAB, [EOS, 2])


def masks(matcher: Any, drafts: list[int]) -> np.ndarray:
    found = np.empty((len(drafts) + 1, -(-VOCAB // 32)), dtype=np.int32)
    fill_masks(matcher, drafts, found)
    return found


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_masks_are_those_of_llguidance(name: str, grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = grammars.compile(StructuredOutputsParams(**CONSTRAINTS[name]))
    texts = [grammar.tokenizer.decode_bytes([token]) for token in range(VOCAB)]
    beginning = LLMatcher(grammar.tokenizer, grammar.text.text)
    assert isinstance(grammar.matcher, StringMatcher)
    end = Tokenizer.from_path(embedded_model_path()).get_vocab()["<|assistant|>"]
    num_own = 0
    compute = StringMatcher._string_mask

    def count(self: StringMatcher) -> Any:
        nonlocal num_own
        mask = compute(self)
        num_own += mask is not None
        return mask

    monkeypatch.setattr(StringMatcher, "_string_mask", count)
    rng = random.Random(name)

    def pick(mask: np.ndarray) -> int:
        """Prefers tokens with quotes, escapes or parts of characters, and long ones."""
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        if end in allowed:
            return end
        special = [token for token in allowed if not texts[token].isascii() or {*b'"\\'} & {*texts[token]}]
        if special and rng.random() < 0.25:
            return int(rng.choice(special))
        return int(max(rng.choices(allowed, k=rng.choice([1, 8])), key=lambda token: len(texts[token])))

    for _ in range(5):
        matcher, expected = grammar.matcher.deep_copy(), beginning.deep_copy()
        for _ in range(60):
            mask = masks(expected, [])[0]
            np.testing.assert_array_equal(masks(matcher, [])[0], mask)
            token = pick(mask)
            if rng.random() < 0.2:
                drafts = [token, pick(masks(expected, [token])[1]), rng.randrange(2048)]
                np.testing.assert_array_equal(masks(matcher, drafts), masks(expected, drafts))
                matcher = matcher.deep_copy()
            assert matcher.consume_token(token) and expected.consume_token(token)
            if expected.is_stopped():
                break
    assert (num_own > 0) == (name not in WITHOUT)


@pytest.mark.parametrize("limits", [{}, {"maxLength": 9}])
def test_masks_behind_drafts_are_not_kept(limits: dict[str, Any], grammars: GrammarCompiler) -> None:
    """Both texts have as many lexemes, and end in white space that may go on."""
    grammar = grammars.compile(StructuredOutputsParams(json=closed(a=string(**limits))))
    tokens = {grammar.tokenizer.decode_bytes([token]): token for token in range(2048)}
    begin, drafts, real = ([tokens[bytes([byte])] for byte in text] for text in (b'{"a"', b':""\n', b" :\n"))
    matcher, expected = grammar.matcher.deep_copy(), grammar.matcher.deep_copy()
    matcher.consume_tokens(begin)
    masks(matcher, drafts)
    matcher.consume_tokens(real)
    expected.consume_tokens([*begin, *real])
    np.testing.assert_array_equal(masks(matcher, []), masks(expected, []))


def test_other_grammars_have_matchers_of_llguidance(grammars: GrammarCompiler) -> None:
    """Without limits, with a single character, and with white space or reasoning that could be JSON."""
    for fields in (
        {"regex": "[a-z]{3,40}"},
        {"json": string()},
        {"json": string(pattern="^[a]{2,5}$")},
        {"json": string(maxLength=9), "whitespace_pattern": '[ "]*'},
        {"json": string(maxLength=9), "reasoning_begin": "[think]", "reasoning_end": "[end]"},
    ):
        assert isinstance(grammars.compile(StructuredOutputsParams(**fields)).matcher, LLMatcher)

"""Grammars with the added tokens of real tokenizers: as marks by their ids, in users' texts as text."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from fleetfoot.records.structured_outputs import StructuredOutputsParams
from fleetfoot.structured.compiler import Grammar, GrammarCompiler
from fleetfoot.structured.mask_space import fill_masks
from fleetfoot.structured.strings import StringMatcher
from fleetfoot.structured.vocabulary import VocabularySource
from fleetfoot.tokenizer.tokenizer import Tokenizer

ASSETS = Path(__file__).parents[1] / "assets"
PADDING = 40
"""Ids of a model behind those of its tokenizer."""


@lru_cache(None)
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer.from_path(ASSETS / f"tokenizer-{name}")


@lru_cache(None)
def compiler_of(name: str) -> GrammarCompiler:
    tokenizer = tokenizer_of(name)
    return GrammarCompiler(lambda: tokenizer, len(tokenizer) + PADDING, [tokenizer.eos_token_id])


def compiled(name: str, **constraint: Any) -> Grammar:
    return compiler_of(name).compile(StructuredOutputsParams(**constraint))


def allowed(matcher: Any) -> list[int]:
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    assert not matcher.is_error(), matcher.get_error()
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


def test_a_literal_that_is_forced_is_the_token_that_the_tokenizer_makes_of_it() -> None:
    grammar = compiled("qwen3", choice=["<think>x"])
    assert allowed(grammar.matcher.deep_copy()) == [tokenizer_of("qwen3").get_vocab()["<think>"]]


def test_a_name_in_a_lark_grammar_is_the_token() -> None:
    vocab = tokenizer_of("qwen3").get_vocab()
    lark = 'start: <think> TEXT "</think>" <|im_start|> // <think>\nTEXT: /<think>?/'
    for grammar in (lark, json.dumps({"grammars": [{"lark_grammar": lark}]})):
        matcher = compiled("qwen3", grammar=grammar).matcher.deep_copy()
        assert allowed(matcher) == [vocab["<think>"]]
        spelled = tokenizer_of("qwen3").backend.encode("</think>", add_special_tokens=False).ids
        text = [vocab["<"], *(vocab[letter] for letter in "think"), vocab[">"]]
        assert matcher.consume_tokens([vocab["<think>"], *text, *spelled, vocab["<|im_start|>"]])
        assert matcher.is_accepting()
    with pytest.raises(ValueError, match="<nothing>"):
        compiled("qwen3", grammar="start: <nothing>")


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}}, "required": ["a"]}
SCHEMA["additionalProperties"] = False


@pytest.mark.parametrize("is_spelled", [False, True])
def test_reasoning_is_free_before_json(is_spelled: bool) -> None:
    tokenizer = tokenizer_of("qwen3")
    grammar = compiled(
        "qwen3", json=SCHEMA, reasoning_begin="<think>", reasoning_end="</think>", disable_any_whitespace=True
    )
    vocab = tokenizer.get_vocab()
    begin, end = vocab["<think>"], vocab["</think>"]
    matcher, expected = grammar.matcher.deep_copy(), LLMatcher(grammar.tokenizer, grammar.text.text)
    assert isinstance(matcher, StringMatcher)
    first = allowed(matcher)
    assert begin in first and end not in first and vocab["<"] not in first
    tail = [vocab[letter] for letter in "</think>"] if is_spelled else [end]
    answer = tokenizer.encode('{"a":"<think>"', add_special_tokens=False)
    thought = tokenizer.encode('Hm, <tool_call> or {"', add_special_tokens=False)
    for token in [begin, *thought, *tail, *answer[: answer.index(begin)]]:
        assert token in allowed(matcher)
        assert allowed(matcher) == allowed(expected)
        matcher.consume_token(token)
        expected.consume_token(token)
    assert begin not in allowed(matcher) and vocab["<"] in allowed(matcher)  # seven characters, of four
    draft = tokenizer.encode('no"', add_special_tokens=False)
    found, masks = (np.empty((1 + len(draft), matcher._size // 4), dtype=np.int32) for _ in range(2))
    fill_masks(matcher, draft, found)
    fill_masks(expected, draft, masks)
    assert (found == masks).all()
    assert matcher.consume_tokens(draft) and allowed(matcher) == [vocab["}"]]


@pytest.mark.parametrize("is_spelled", [False, True])
@pytest.mark.parametrize(("name", "trigger"), [("qwen3", "<tool_call>"), ("llama3_1", "<|start_header_id|>")])
def test_a_structural_tag_begins_at_its_trigger(name: str, trigger: str, is_spelled: bool) -> None:
    tokenizer = tokenizer_of(name)
    end = "</tool_call>" if name == "qwen3" else "<|end_header_id|>"
    structure = {"begin": f'{trigger}{{"f":', "schema": {"const": 1}, "end": f"}}{end}"}
    tag = {"structures": [structure, {**structure, "begin": "<f>"}], "triggers": [trigger, "<f"]}
    matcher = compiled(name, structural_tag=tag).matcher.deep_copy()
    vocab = tokenizer.get_vocab()
    spelled = [vocab[letter] for letter in trigger]
    free = tokenizer.encode("Hm <think> ", add_special_tokens=False)
    assert matcher.consume_tokens([*free, *(spelled if is_spelled else [vocab[trigger]])])
    is_special = tokenizer.added_tokens_decoder[vocab[trigger]].special
    assert (len(allowed(matcher)) < 10) == (not (is_special and is_spelled))
    if not (is_special and is_spelled):
        assert matcher.consume_tokens([*tokenizer.encode('{"f":1}', add_special_tokens=False), vocab[end]])
    assert matcher.consume_tokens(tokenizer.encode("<f", add_special_tokens=False))
    assert not matcher.consume_tokens(tokenizer.encode("x", add_special_tokens=False))


def test_tokens_of_a_vocabulary_with_holes_and_with_what_a_normalizer_changes() -> None:
    """Llama 2's kind: a space before each text, and bytes for what is not in the vocabulary."""
    letters = ["▁", *"abé", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(models.BPE({letter: index for index, letter in enumerate(letters)}, [], byte_fallback=True))
    parts = [normalizers.NFC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(parts)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    read = VocabularySource(backend.to_str(), len(letters) + 9, [len(letters) + 3]).read()
    for text, tokens in (("ab a", [1, 2, 0, 1]), ("e\u0301", [4 + 0x65, 4 + 0xCC, 4 + 0x81]), ("é", [3])):
        assert read.tokenize_str(text) == tokens
        matcher = LLMatcher(read, LLMatcher.grammar_from_lark(f'start: "{text}"'))
        for token in tokens:
            assert allowed(matcher) == [token] and matcher.consume_token(token)
    backend.pre_tokenizer, backend.normalizer = pre_tokenizers.Metaspace(), None
    read = VocabularySource(backend.to_str(), len(letters) + 9, [len(letters) + 3]).read()
    assert read.tokenize_str("ab a") == [1, 2, 0, 1]
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="its decoder is"):
        VocabularySource(backend.to_str(), len(letters), [0]).read()

"""Structured outputs: parameters, grammars, the compiler's cache and limits, and masks of matchers."""

import json
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from tests.helpers.engines import EOS

from fleetfoot import SamplingParams, StructuredOutputsParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.records.request import Request
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.records.structured_outputs import with_closed_objects
from fleetfoot.structured import compiler, processes
from fleetfoot.structured.compiler import GrammarCompiler
from fleetfoot.structured.grammars import MAX_CHARS, MAX_DEPTH
from fleetfoot.structured.mask_space import MaskMemory, clear_bits
from fleetfoot.structured.masks import GrammarState, TokenMasker, num_mask_processes
from fleetfoot.structured.trial import GrammarTrial
from fleetfoot.structured.vocabulary import VocabularySource
from fleetfoot.tokenizer.tokenizer import Tokenizer

VOCAB = 2048
PADDED = VOCAB + 70
"""Of a model with more logits than its tokenizer has tokens."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_path(embedded_model_path())


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, PADDED, [EOS, 2])


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, regex, .*; got none"),
        ({"json": {}, "regex": "a"}, "exactly one of .*; got json and regex"),
        ({"json_object": False}, "got none"),
        ({"json_object": 1}, "json_object must be True, got 1"),
        ({"json": 5}, "json must be an object or its JSON text, got 5"),
        ({"regex": ""}, "regex must be a string that is not empty, got ''"),
        ({"grammar": b"x"}, "grammar must be a string"),
        ({"choice": []}, r"choice must be a list of strings .*, got \[\]"),
        ({"choice": "yes"}, "choice must be a list .*, got 'yes'"),
        ({"choice": ["a", 1]}, "choice must be a list .*, got 1 in it"),
        ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace must be True or False, got 1"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "give one of them"),
        ({"json": {}, "reasoning_end": ""}, "reasoning_end must be a string"),
        ({"jsn": {}}, "unknown keyword 'jsn'; did you mean 'json'"),
        ({"json": {}, "backend": "outlines"}, "unknown keyword 'backend'; .*llguidance"),
        (5, "must be a StructuredOutputsParams, a dict, or not set, got 5"),
    ],
)
def test_bad_fields_are_named(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"structured_outputs.*{message}"):
        SamplingParams(structured_outputs=fields)


# --- schemas ----------------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 5, 7, 10, 100, 0.5, 1.5, -2.5, "", "a", "ab", "abc", "foo", "é💩", "2024-02-29",
    "x@y.org", [], [1], ["a"], [1, 2], [1, "a"], [1, 1], [[1]], [1, 2, 3], {}, {"a": 1}, {"a": "x"}, {"b": 1},
    {"a": 1, "b": 2}, {"a": 1, "b": "x"}, {"a": 1, "b": 2, "c": 3}, {"aa": 1}, {"a": {"a": {}}}, {"k": "x", "v": 1},
    {"k": "y", "v": "z"}, {"k": 1}, {"": None},
]  # fmt: skip
KEYWORDS: dict[str, Any] = {
    "types": {"type": ["integer", "null", "boolean"]},
    "enum": {"enum": [1, "a", None, [1], {"a": 1}]},
    "enum and type": {"enum": [1, "a", "abc"], "type": "string", "maxLength": 2},
    "const": {"const": {"a": 1, "b": 2}},
    "range": {"type": "integer", "minimum": 2, "exclusiveMaximum": 10},
    "numbers": {"minimum": -1.5, "maximum": 1.5},
    "multiple": {"type": "integer", "multipleOf": 5},
    "lengths": {"type": "string", "minLength": 1, "maxLength": 2},
    "pattern": {"type": "string", "pattern": "^[a-f]+$"},
    "format": {"type": "string", "format": "date"},
    "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
    "properties": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]},
    "closed": {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False},
    "others": {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
    "patterns": {"type": "object", "patternProperties": {"^a+$": {"type": "integer"}}, "additionalProperties": False},
    "counts": {"type": "object", "minProperties": 1, "maxProperties": 2},
    "anyOf": {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "array", "maxItems": 0}, {"const": 5}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 3}]},
    "oneOf": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    "oneOf of constants": {"oneOf": [{"const": 1}, {"enum": ["a", 2]}, {"const": None}]},
    "oneOf of tags": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "x"}, "v": {"type": "integer"}}, "required": ["k"]},
            {"type": "object", "properties": {"k": {"enum": ["y", 1]}, "v": {"type": "string"}}, "required": ["k"]},
        ]
    },
    "ref": {"$defs": {"n": {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
    "definitions": {"definitions": {"i": {"type": "integer"}}, "items": {"$ref": "#/definitions/i"}, "type": "array"},
    "neutral": {"type": "array", "uniqueItems": False, "title": "A", "description": "b", "default": []},
    "any": {},
}


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_what_a_grammar_takes_is_valid_under_its_schema(keyword: str, grammars: GrammarCompiler) -> None:
    """And what is valid is taken, with properties in the order of the schema."""
    schema = KEYWORDS[keyword]
    matcher = grammars.compile(StructuredOutputsParams(json=schema)).matcher
    vocabulary = grammars._load_vocabulary().tokenizer
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    taken = []
    for value in VALUES:
        copy, tokens = matcher.deep_copy(), vocabulary.tokenize_str(json.dumps(value, ensure_ascii=False))
        if copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting():
            taken.append(value)
    assert taken == [value for value in VALUES if checker.is_valid(value)]


NAMES = [str(number) for number in range(9)]
TREES: dict[str, Any] = {
    "$defs": {
        name: {
            "type": "object",
            "properties": {other: {"$ref": f"#/$defs/{other}"} for other in NAMES},
            "required": NAMES,
        }
        for name in NAMES
    }
}
"""Of any depth: to compare two of them would take forever."""
SET = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
REFUSED: list[tuple[Any, str]] = [
    ({"not": {"multipleOf": 2}}, r"keywords that are not supported: \[\"not\"\] \(at #\)"),
    ({"properties": {"a": {"items": {"uniqueItems": True}}}}, r"uniqueItems.* \(at #/properties/a/items\)"),
    ({"anyOf": [{"type": "null"}, {"if": {"pattern": "a"}, "then": {}}]}, r"\(at #/anyOf/1\)"),
    ({"$defs": {"x/y": {"contains": {}}}, "items": {"$ref": "#/$defs/x~1y"}}, r"contains.* \(at #/\$defs/x~1y\)"),
    ({"properties": {"a": {"type": "strin"}}}, r"Invalid type: strin \(at #/properties/a\)"),
    ({"properties": {"a": {"format": "regex", "type": "string"}}}, r"Unknown format: regex \(at #/properties/a\)"),
    ({"properties": {"a": {"pattern": "(?=a)", "type": "string"}}}, r"look-ahead.* \(at #/properties/a\)"),
    ({"$ref": "#/$defs/none"}, "does not exist"),
    ({"$ref": "https://example.org/schema.json"}, "example.org"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, r"Unsatisfiable.* \(at #\)"),
    ({"items": {"oneOf": [{"type": "integer"}, {"minimum": 2}]}}, r"where no two options can be met.* \(at #/items\)"),
    ({"x-guidance": {"lenient": True}, "not": {"multipleOf": 2}}, "not supported"),
    ({"not": {}}, r"Unsatisfiable schema: .* \(at #\)"),
    ({"items": {"type": "array", "uniqueItems": True, "items": {"type": "string"}}}, r"uniqueItems.* \(at #/items\)"),
    (
        {"properties": {"a": {"$ref": "#/$defs/S"}}, "$defs": {"S": {"properties": {"q": SET}}}},
        r"uniqueItems.* \(at #/\$defs/S/properties/q\)",
    ),
    (
        {"properties": {"a": {"$ref": "#/$defs/S"}}, "$defs": {"T": {"type": "string"}, "S": SET}},
        r"uniqueItems.* \(at #/\$defs/S\)",
    ),
    ({"items": SET}, r'needs "type": "array" and .* with both bounds, below 4,096 values.* \(at #/items\)'),
    (
        {"items": SET | {"items": {"type": "integer", "minimum": 0, "maximum": 99}}},
        r"uniqueItems of 100 values makes more than 4,096 lists; it needs a maxItems of at most 1 \(at #/items\)",
    ),
    (SET | {"items": {"enum": list("abcdefghijklmnop")}, "minItems": 9}, "minItems is 9 and can be at most 4 "),
    ({"items": {"minimum": 1e-300, "maximum": 2e-300}}, r"minimum is 1e-300 and maximum is 2e-300; no .* 80 decimals"),
    ({"exclusiveMinimum": 1e19}, r"exclusiveMinimum is 1e\+19; it must allow numbers below 10\^18 in size"),
    ({"propertyNames": {"pattern": "^a"}, "properties": {"b": {"type": "null"}}}, "propertyNames"),
    ({"propertyNames": {"enum": ["a"], "maxLength": 3}}, "propertyNames"),
    ({"items": {"const": [2**53 + 1]}}, r"const has 9007199254740993, which is too large.* \(at #/items\)"),
    ({"enum": ["a", 1e19]}, "enum has 1e[+]19"),
    ({"minProperties": 3, "required": ["a"]}, "minProperties is 3, and 1 properties are required"),
    ({"minProperties": 2, "patternProperties": {"^a": {}}, "additionalProperties": False}, "minProperties is 2"),
    ({"unevaluatedProperties": False, "anyOf": [{"properties": {"a": {}}}, {}]}, "unevaluatedProperties"),
    ({"items": {"properties": {str(number): {} for number in range(1001)}}}, r"properties has 1,001.* \(at #/items\)"),
    ({**TREES, "oneOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/1"}]}, "where no two options can be met"),
    ({"allOf": 5, "dependentRequired": {"a": ["b"]}}, "must be an object"),
    (False, "is false"),
    ("{", "is not JSON"),
    ("[1]", r"a JSON schema is an object"),
    ({"minimum": float("nan")}, r"expected value .* \(at #\)"),
    ({"enum": ["x" * MAX_CHARS]}, "characters; it can have at most"),
    (json.loads('{"items":' * MAX_DEPTH + "{}" + "}" * MAX_DEPTH), f"nested deeper than {MAX_DEPTH}"),
    ('{"a":' * 9999 + "1" + "}" * 9999, "nested deeper"),
    ({"oneOf": [{"type": "object", "required": True}, {"type": "object", "required": [[]]}]}, r"at #/oneOf/0"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=[message[:20] for _, message in REFUSED])
def test_what_cannot_be_compiled_has_a_reason_and_a_place(schema: Any, message: str, grammars: GrammarCompiler) -> None:
    with pytest.raises(ValueError, match=rf"structured_outputs\.json.*{message}"):
        grammars.compile(StructuredOutputsParams(json=schema))


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(0, 2000)},
        lambda: {"type": "string", "minLength": (low := rng.randint(0, 3)), "maxLength": low + rng.randint(0, 5)},
        lambda: {"enum": rng.sample(["red", "blue", 1, 2.5, None, True, 'gr"een', "ü"], 3)},
        lambda: {"type": rng.choice(["boolean", "null"])},
        lambda: {"type": "string", "pattern": rng.choice(["^[a-z]{2,4}$", "^(ab|c)*$", r"^\d{1,3}-x$"])},
    ]
    if depth:
        kinds += [
            lambda: {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": 3},
            lambda: {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]},
        ] + [lambda: random_object(rng, depth)] * 3
    return rng.choice(kinds)()


def random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["a", "name", "x y", "ключ", 'q"'], rng.randint(1, 4))
    properties = {name: random_schema(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def allowed(mask: bytes) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))


@pytest.mark.parametrize("seed", range(30))
def test_random_walks_through_random_schemas_are_valid(
    seed: int, grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    rng = random.Random(seed)
    schema = random_object(rng, 3)
    options = {"disable_any_whitespace": True} if seed % 2 else {"whitespace_pattern": "[ \n]{1,2}"}
    matcher = grammars.compile(StructuredOutputsParams(json=schema, **options)).matcher.deep_copy()  # type: ignore[arg-type]
    tokens: list[int] = []
    while True:
        tokens_now = allowed(matcher.compute_bitmask())
        assert len(tokens_now) and tokens_now.max() < VOCAB  # padding is never allowed
        token = int(rng.choice(tokens_now))
        if token in (EOS, 2):
            break
        assert matcher.consume_token(token)
        tokens.append(token)
    jsonschema.validate(json.loads(tokenizer.decode(tokens)), schema)


# --- other constraints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "taken", "refused"),
    [
        ({"regex": r"^\d{2}$"}, ["12"], ["1", "123", "a", "١٢"]),
        ({"regex": 'a/"\n\\\\.'}, ['a/"\n\\x'], ["a/"]),
        ({"regex": "a|b"}, ["a", "b"], ["ab", ""]),
        ({"regex": r"\<b\>[\>&&[a~~]]{2}"}, ["<b>>]]", "<b>&]]", "<b>[]]", "<b>a]]", "<b>~]]"], ["b", "<b>b", "<b>a]"]),
        ({"regex": r"[[:digit:]\]][]a]\\<"}, ["1a\\<", "]]\\<"], ["[a\\<", ":a\\<"]),
        ({"choice": ["a\"b\\", "ü\n", "/x/"]}, ["a\"b\\", "ü\n", "/x/"], ["a", "/"]),
        ({"choice": [f"c{one}" for one in range(9000)]}, ["c0", "c12", "c8999"], ["c", "c9000", "c01"]),
        ({"grammar": 'start: "a" b*\nb: "b" | "c"'}, ["a", "abcb"], ["b", ""]),
        ({"grammar": 'root ::= "a" item*\nitem ::= "b" | [0-9]'}, ["a", "ab7"], ["b"]),
        ({"grammar": json.dumps({"grammars": [{"json_schema": {"type": "null"}}]})}, ["null"], ["1"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a"}', "{"]),
        ({"json": True}, ["1", "[]"], ["x"]),
        ({"json": {"properties": {"a": {}}}, "disable_additional_properties": True}, ['{"a": 1}'], ['{"b": 1}']),
        ({"json": {"type": "array"}, "disable_any_whitespace": True}, ["[1,2]"], ["[1, 2]"]),
        ({"json": {"type": "array"}, "whitespace_pattern": "_"}, ["[1,_2]", "[1,2]"], ["[1, 2]"]),
        ({"json": {"type": "array"}}, ["[1,\n  2]"], ["[1," + " " * 40 + "2]"]),
        (
            {"structural_tag": {"structures": [{"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}],
                                "triggers": ["<f"]}},
            ["text", "a <f>null</f> b", "<f>null</f><f>null</f>"],
            ["a <f>1</f>", "<fx"],
        ),
        (
            {"structural_tag": {"structures": [{"begin": "<f>", "schema": {}}], "triggers": ["<f>"],
                                "type": "structural_tag"}},
            ["a", "<f>1", "<f>[]"],
            ["<f>x"],
        ),
    ],
)  # fmt: skip
def test_other_constraints(
    constraint: dict[str, Any], taken: list[str], refused: list[str], grammars: GrammarCompiler
) -> None:
    matcher, vocabulary = grammars.compile(StructuredOutputsParams(**constraint)).matcher, grammars._load_vocabulary()

    def takes(text: str) -> bool:
        copy, tokens = matcher.deep_copy(), vocabulary.tokenizer.tokenize_str(text)
        return copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()

    assert [takes(text) for text in [*taken, *refused]] == [True] * len(taken) + [False] * len(refused)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"regex": "[a-z"}, "regex cannot be compiled: .*unclosed character class"),
        ({"regex": "a" * (MAX_CHARS + 1)}, "regex has .* characters"),
        ({"grammar": "start: missing"}, "grammar cannot be compiled: .*missing"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"grammar": "{}"}, "grammar cannot be compiled: it is not JSON"),
        ({"grammar": '{"grammars": [{}'}, "grammar cannot be compiled: it is not JSON"),
        ({"grammar": '{"grammars": [{}]}'}, "grammar cannot be compiled"),
        ({"structural_tag": "{}"}, "must have 'structures' and 'triggers'"),
        ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "at least one"),
        ({"structural_tag": {"structures": [{"begin": "x"}], "triggers": ["<"]}}, "begins with none of the triggers"),
        ({"structural_tag": {"structures": [{"begin": "<f", "schema": {"not": {}}}], "triggers": ["<"]}}, "not"),
        ({"structural_tag": {"structures": 5, "triggers": 6}}, "structural_tag"),
        ({"structural_tag": {"structures": [{"begin": "<"}], "triggers": ["<", 5]}}, r"triggers\[1\] is 5"),
        ({"structural_tag": {"structures": [{"begin": "<"}], "triggers": ["<", ""]}}, r"triggers\[1\] is ''"),
        ({"structural_tag": {"structures": [{"begin": "<", "end": 5}], "triggers": ["<"]}}, r"end is 5"),
        (
            {"structural_tag": {"structures": [{"begin": "<", "shema": {}}], "triggers": ["<"]}},
            r"structures\[0\] has an unknown key 'shema'; it takes begin, schema, end",
        ),
        (
            {"structural_tag": {"structures": [{"begin": "<"}], "triggers": ["<"], "format": {}}},
            "has an unknown key 'format'",
        ),
        ({"structural_tag": {"structures": [{"begin": "<"}], "triggers": ["<"], "type": "x"}}, "type is 'x'"),
    ],
)
def test_other_constraints_that_cannot_be_compiled(
    constraint: dict[str, Any], message: str, grammars: GrammarCompiler
) -> None:
    with pytest.raises(ValueError, match=rf"structured_outputs\..*{message}"):
        grammars.compile(StructuredOutputsParams(**constraint))


# --- the compiler -----------------------------------------------------------------------------------------------------


def test_equal_constraints_are_compiled_once_and_few_are_kept(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_MAX_CACHED", 3)
    grammars = GrammarCompiler(lambda: tokenizer, VOCAB, [EOS])
    first = StructuredOutputsParams(choice=["a", "b"])
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(grammars.compile, [first] * 20))
    assert len({id(grammar) for grammar in found}) == 1
    others = [StructuredOutputsParams(regex="a" * length) for length in range(1, 4)]
    last = [grammars.compile(params) for params in others][-1]
    assert grammars.compile(others[-1]) is last
    assert grammars.compile(first) is not found[0]  # was dropped
    monkeypatch.setattr(compiler, "_MAX_CACHED", 100)
    monkeypatch.setattr(compiler, "_MAX_CACHED_CHARS", 3000)
    long = [StructuredOutputsParams(choice=[letter * 1000]) for letter in "abcd"]
    kept = [grammars.compile(params) for params in long]
    assert grammars.compile(long[-1]) is kept[-1] and grammars.compile(long[0]) is not kept[0]  # by their length


def test_a_long_text_costs_a_mask_no_more_than_a_short_one(tokenizer: Tokenizer) -> None:
    """The text that is left is not encoded anew for each token."""
    found = VocabularySource(tokenizer.backend.to_str(), VOCAB, [EOS]).read()
    assert len(found.tokenize_str("word " * 100_000)) < 1000


def test_the_limit_is_not_for_reading_the_vocabulary_and_for_the_queue(tokenizer: Tokenizer) -> None:
    gate, asked = threading.Event(), threading.Event()

    def load() -> Tokenizer:
        asked.set()
        gate.wait()
        return tokenizer

    grammars = GrammarCompiler(load, VOCAB, [EOS], timeout_s=0.0)
    with ThreadPoolExecutor() as threads:
        found = threads.map(grammars.compile, [StructuredOutputsParams(choice=[name]) for name in "abcdefgh"])
        asked.wait()
        gate.set()
        assert all(grammar.matcher is not None for grammar in found)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tokenizer: GrammarCompiler(None, VOCAB, [EOS]), "needs a tokenizer"),
        (lambda tokenizer: GrammarCompiler(lambda: tokenizer, VOCAB, []), "needs an end token"),
    ],
)
def test_engines_that_cannot_have_grammars(make: Any, message: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=f"structured_outputs {message}"):
        make(tokenizer).compile(StructuredOutputsParams(choice=["a"]))


# --- the state of a sequence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("marker", "split"), [("</think>", 1), ("ab", 3), ("</think>\n", 2)])
def test_the_end_of_reasoning_is_found_in_any_split(
    marker: str, split: int, grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    params = StructuredOutputsParams(choice=["xy"], reasoning_end=marker)
    state = grammars.start(params, min_tokens=0, ignore_eos=False)
    vocabulary = tokenizer.get_vocab()
    text = f"<think>aa</{marker}"
    tokens = [vocabulary[letter.replace("\n", "Ċ")] for letter in text]
    for place in range(1, len(tokens)):
        state.read(tokens[:place])
        assert not state.has_begun and state.walk(3)[0] == 4
    state.drafts = [tokens[-1], vocabulary["x"], vocabulary["y"]]
    assert state.walk(3)[::2] == (1, state.drafts[1:])
    state.read(tokens)
    assert state.has_begun and state.tokens(tokens, 0) == (False, [])
    state.drafts = [vocabulary["x"], -1, -1]
    assert state.walk(3) == (0, None, state.drafts[:1])
    whole = [*tokens, vocabulary["x"], vocabulary["y"]]
    state.read(whole)
    assert state.catch_up(whole) == "" and state.matcher.is_stopped()
    state.read(tokens[:split])
    assert not state.has_begun
    state.read(whole)
    assert state.tokens(whole, 1) == (False, whole[-1:]) and state.tokens(whole, 9) == (True, whole[-2:])


# --- masks of steps ---------------------------------------------------------------------------------------------------


def step_of(num_requests: int, num_others: int = 0) -> SchedulerOutput:
    """Of decodes. ``num_others``: have no grammar."""
    indices = list(range(num_requests + num_others))
    sizes = [len(indices)] * 3
    return SchedulerOutput(0, indices, [1] * len(indices), *sizes, structured=indices[:num_requests])


def request_of(state: GrammarState, name: str = "0") -> Request:
    request = Request(name, [5], SamplingParams(), max_tokens=9, seed=0)  # type: ignore[arg-type]
    request.grammar = state
    return request


def new_masker(num_processes: int, grammars: GrammarCompiler) -> TokenMasker:
    masker = TokenMasker(MaskMemory(-(-PADDED // 32), max_masks=32, num_steps=2), num_processes)
    masker.start(grammars._load_vocabulary().source)
    return masker


@pytest.fixture(scope="module", params=[0, 2])
def masker(request: pytest.FixtureRequest, grammars: GrammarCompiler) -> Iterator[TokenMasker]:
    masker = new_masker(request.param, grammars)
    yield masker
    masker.close()


@pytest.mark.parametrize("behind", [None, "</think>"])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_masks_of_random_walks(
    behind: str | None, ignore_eos: bool, masker: TokenMasker, grammars: GrammarCompiler
) -> None:
    """Masks are those of a matcher of one sequence, here and in processes; a token that its grammar refuses ends its
    request alone, and an output that has lost its last tokens goes on."""
    schema = {"type": "array", "items": KEYWORDS["oneOf of tags"]} if ignore_eos else KEYWORDS["oneOf of tags"]
    params, rng = StructuredOutputsParams(json=schema, reasoning_end=behind), random.Random(0)
    states = [grammars.start(params, min_tokens=0, ignore_eos=ignore_eos) for _ in range(20)]
    requests = [request_of(state, str(number)) for number, state in enumerate(states)]
    reference = [state.matcher.deep_copy() for state in states]
    if behind is not None:
        for request in requests:
            request.output_token_ids.extend(grammars._load_vocabulary().text.encode("so </think>"))
    num_before = len(requests[3].output_token_ids)
    for turn in range(6):
        masks, failed = masker.compute(step_of(20), requests)
        assert masks is not None and sorted(masks.rows) == list(range(20)) and not failed
        for row, mask in zip(masks.rows, masks.masks, strict=True):
            expected = np.frombuffer(bytearray(reference[row].compute_bitmask()), dtype=np.int32)
            clear_bits(expected, [EOS, 2] if ignore_eos else [])
            assert mask.tobytes() == expected.tobytes()
            requests[row].output_token_ids.append(int(rng.choice(allowed(mask.tobytes()))))
            reference[row].consume_token(requests[row].output_token_ids[-1])
        if turn == 3:
            requests[3].output_token_ids.pop()
            reference[3].reset()
            for token_id in requests[3].output_token_ids[num_before:]:
                reference[3].consume_token(token_id)
        if turn in (0, 1):  # the processes have read the vocabulary, and compiled the grammar
            masker.settle()
    assert all(state.replica is not None and state.replica.is_ready for state in states) == bool(masker._num_processes)
    requests[7].output_token_ids.append(2047)
    masks, failed = masker.compute(step_of(20), requests)
    assert [request for request, _ in failed] == [requests[7]] and "refuses token 2047" in failed[0][1]
    assert masks is not None
    free = masks.masks[masks.rows.index(7)].copy()
    clear_bits(free, [EOS, 2])
    assert free[0] == ~0b110 and np.all(free[1:] == -1)


def test_processes_that_end(grammars: GrammarCompiler, caplog: pytest.LogCaptureFixture) -> None:
    masker = new_masker(2, grammars)
    params = StructuredOutputsParams(regex="[a-z]{9}")
    states = [grammars.start(params, min_tokens=0, ignore_eos=False) for _ in range(6)]
    requests = [request_of(state, str(number)) for number, state in enumerate(states)]
    for turn in range(5):
        masks, failed = masker.compute(step_of(6), requests)
        masker.settle()
        assert masks is not None and not failed
        for row, mask in zip(masks.rows, masks.masks, strict=True):
            requests[row].output_token_ids.append(allowed(mask.tobytes())[row])
        if turn == 2:
            for one in masker._processes._processes:
                one.process.kill()
    assert "computes token masks itself" in caplog.text
    assert not any(state.catch_up(request.output_token_ids) for state, request in zip(states, requests, strict=True))


def test_few_cores_and_cpus_have_no_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr("fleetfoot.utils.process._CGROUPS", tmp_path)
    monkeypatch.setattr("fleetfoot.utils.process._MEMBERSHIP", tmp_path / "none")
    found = []
    cases = (2, ""), (8, ""), (16, "max 100000"), (200, ""), (200, "950000 100000"), (200, "50000 100000")
    for cores, text in cases:
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: range(cores))
        quota.write_text(text)
        found.append((num_mask_processes("cuda"), num_mask_processes("cpu")))
    assert found == [(0, 0), (3, 0), (6, 0), (8, 0), (3, 0), (0, 0)]


def test_a_process_keeps_the_grammars_used_last(monkeypatch: pytest.MonkeyPatch, grammars: GrammarCompiler) -> None:
    monkeypatch.setattr(processes, "_MAX_GRAMMARS", 2)
    masker = new_masker(1, grammars)
    for letter in "abacaddb":
        params = StructuredOutputsParams(regex=f"{letter}[a-z]")
        states = [grammars.start(params, min_tokens=0, ignore_eos=False) for _ in "12"]
        requests = [request_of(state, str(number)) for number, state in enumerate(states)]
        for _ in range(3):
            masks, _ = masker.compute(step_of(2), requests)
            masker.settle()
            assert masks is not None
            assert [mask.tobytes() for mask in masks.masks] == [states[0].matcher.compute_bitmask()] * 2
        assert all(state.replica is not None and state.replica.is_ready for state in states)
    assert len(masker._processes._processes[0].grammars) == 2
    masker.close()


def test_steps_that_repeat_have_the_same_masks(grammars: GrammarCompiler) -> None:
    """As others, with sequences that end, that are paused, and that come back; slots are used again."""
    masker, rng = new_masker(1, grammars), random.Random(1)
    params = [StructuredOutputsParams(regex=f"[{letters}]{{9}}") for letters in ("ab", "cd", "ef")]
    running: list[tuple[Request, Any]] = []
    num_repeated = 0
    for turn in range(60):
        if turn % 4 == 0:
            running = [one for one in running if rng.random() < 0.6]
            for number in range(rng.randint(0, 3)):
                state = grammars.start(rng.choice(params), min_tokens=rng.choice([0, 0, 3]), ignore_eos=turn % 8 == 0)
                running.append((request_of(state, f"{turn}-{number}"), state.matcher.deep_copy()))
        running = [one for one in running if len(one[0].output_token_ids) < 9]
        chosen = running[: len(running) - (turn % 12 == 6)]
        if not chosen:
            continue
        last = masker._last
        masks, failed = masker.compute(step_of(len(chosen), turn % 3), [request for request, _ in chosen])
        num_repeated += last is not None and masker._last is last
        masker.settle()
        assert masks is not None and not failed and masks.rows == list(range(len(chosen)))
        for (request, reference), mask in zip(chosen, masks.masks, strict=True):
            assert mask.tobytes() == reference.compute_bitmask()
            request.output_token_ids.append(rng.choice(allowed(mask.tobytes())))
            assert reference.consume_token(request.output_token_ids[-1])
    (process,) = masker._processes._processes
    assert num_repeated > 10
    assert process.free[:1012] == [*range(1023, 11, -1)]  # never used
    masker.close()


# --- the trial --------------------------------------------------------------------------------------------------------

CHAIN = {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}, "$ref": "#/$defs/d0"}
"""Ends the process of its compiler: the stack overflows."""
SLOW = {"allOf": [{"type": "string", "pattern": f"a{{{length}}}.*b"} for length in range(1, 40)]}
"""Takes minutes."""


def test_what_ends_its_compiler_is_refused(tokenizer: Tokenizer) -> None:
    trial = GrammarTrial()
    grammars = GrammarCompiler(lambda: tokenizer, VOCAB, [EOS], trial=trial)
    try:
        grammars.compile(StructuredOutputsParams(choice=["a"]))
        (process,) = trial._idle
        with pytest.raises(ValueError, match=r"cannot be compiled in .* within the depth of recursion"):
            grammars.compile(StructuredOutputsParams(json=CHAIN))
        assert process.returncode is not None and trial._idle == []
        with pytest.raises(ValueError, match=r"\(at #/items\)"):  # found by this process
            grammars.compile(StructuredOutputsParams(json={"items": {"not": {"multipleOf": 2}}}))
        (process,) = trial._idle
        with pytest.raises(ValueError, match="cannot be compiled in 0 seconds of a core"):
            trial.run(LLMatcher.grammar_from_json_schema(SLOW), timeout_s=0.0)
        assert process.returncode == -signal.SIGPROF  # by the time that it has had
        grammars.compile(StructuredOutputsParams(choice=["b"]))
        (process,) = trial._idle
    finally:
        grammars.close()
    assert process.returncode is not None


def test_a_schema_without_outputs_is_refused(grammars: GrammarCompiler) -> None:
    loop = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    with pytest.raises(ValueError, match="structured_outputs has no output that fits it"):
        grammars.compile(StructuredOutputsParams(json=loop))


@pytest.mark.parametrize("as_text", [False, True])
def test_objects_are_closed_by_default(as_text: bool) -> None:
    schema = {"properties": {"a": {"type": "array", "items": {"properties": {"b": {}}}}, "c": {"type": "object"}}}
    is_open = {"properties": {"a": {}}, "additionalProperties": True}
    inner = {"properties": {"b": {}}, "additionalProperties": False}
    named = {"a": {"type": "array", "items": inner}, "c": {"type": "object"}}
    for given, expected in ((schema, {"properties": named, "additionalProperties": False}), (is_open, is_open)):
        constraint = StructuredOutputsParams(json=json.dumps(given) if as_text else given, whitespace_pattern=" ")
        found = with_closed_objects(constraint)
        assert found is not None and found.json == expected and found.whitespace_pattern == " "
        assert constraint.json == (json.dumps(given) if as_text else given)
    for other in (StructuredOutputsParams(regex="a"), StructuredOutputsParams(json="{"), None):
        assert with_closed_objects(other) == other

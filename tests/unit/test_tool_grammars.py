"""Grammars of forced tool calls: what they allow is read as calls of the tools, with valid arguments."""

import json
import random
from functools import cache
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from fleetfoot.engine.chat import ToolUse, find_schema_error, prepared_schema
from fleetfoot.parsers.base import Tool
from fleetfoot.parsers.grammar import Rules, forced_calls, loosened, pattern_terminal, split_added, strict_calls
from fleetfoot.parsers.harmony import HarmonyFormat
from fleetfoot.parsers.registry import TOOL_FORMATS, MessageFormat
from fleetfoot.parsers.typed import argument_variants
from fleetfoot.structured.mask_space import set_only
from fleetfoot.structured.masks import ReasoningEnd
from fleetfoot.structured.vocabulary import VocabularySource

ASSETS = Path(__file__).parents[1] / "assets"

SPECIAL = ["<|eos|>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>"]


def _schema(**properties):
    return {"type": "object", "properties": properties, "required": [name for name in properties if name[0] != "x"]}


TOOLS = [
    Tool(
        "paint",
        _schema(
            color={"enum": ["red", "blue"]},
            layers={"type": "integer", "minimum": 1, "maximum": 3},
            shiny={"type": "boolean"},
            xsize={"$ref": "#/$defs/size"},
            xtags={"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        )
        | {"$defs": {"size": _schema(w={"enum": [1, 2.5]})}},
        is_strict=True,
    ),
    Tool("stop-now", _schema(xwhy={"enum": ["done"]}, xhow={"const": "fast"})),
    Tool("noop"),
]


@pytest.fixture(scope="module")
def vocabulary():
    letters = sorted(ByteLevel.alphabet())
    backend = Tokenizer(BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    ids = {token: backend.token_to_id(token) for token in SPECIAL}
    return backend, LLTokenizer(backend.to_str(), eos_token=ids["<|eos|>"]), ids


REAL = {"deepseek_v3": "deepseek_v3", "deepseek_v31": "deepseek_v3", "llama3_json": "llama3_1", "openai": "gptoss"}
"""Formats whose marks are in a tokenizer among the assets; the others get theirs beside those of Qwen3, as text."""


@cache
def _real(name):
    """As `vocabulary`, with the added tokens that are text."""
    backend = Tokenizer.from_file(str(ASSETS / f"tokenizer-{REAL.get(name, 'qwen3')}" / "tokenizer.json"))
    if name not in REAL:
        marks = [mark for mark in TOOL_FORMATS[name].markers if len(mark) > 3 and mark[0] in "<["]
        backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    special, texts = split_added(backend.get_added_tokens_decoder())
    end = next(iter(special.values()))
    tokenizer = VocabularySource(backend.to_str(), backend.get_vocab_size(), [end]).read()
    return (backend, tokenizer, {**special, "<|eos|>": end}), special, texts


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_marks_that_are_added_tokens_go_by_their_ids(name):
    vocabulary, special, texts = _real(name)
    form, backend = TOOL_FORMATS[name], vocabulary[0]
    grammar = forced_calls(form, TOOLS[:1], special, is_single=True, text_tokens=texts)
    begin = {**texts, **special}.get(form.begin[0])
    for seed in range(4):
        text, tokens = _generate(vocabulary, grammar, seed, most=2000, with_tokens=True)
        content, calls = _parse(name, special, text)
        assert len(calls) == 1 and not content.strip()
        _check(*calls[0])
        assert begin is None or tokens[0] == begin
    if len(form.begin[0]) == 1:
        return
    strict = strict_calls(form, TOOLS[:1], special, is_single=True, text_tokens=texts)
    free, call = backend.encode("Hm. ").ids, tokens
    assert _accepts_tokens(vocabulary, strict, [*free, *call])
    assert not _accepts_tokens(vocabulary, strict, [*free, *call[: len(call) // 2]])
    if begin is not None and begin in texts.values():
        words = backend.pre_tokenizer.pre_tokenize_str(form.begin[0])
        spelled = [backend.token_to_id(letter) for word, _ in words for letter in word]
        assert _accepts_tokens(vocabulary, strict, [*free, *spelled, *call[1:]])
        assert not _accepts_tokens(vocabulary, strict, [*free, *spelled])


def _accepts_tokens(vocabulary, grammar, tokens):
    matcher = LLMatcher(vocabulary[1], LLMatcher.grammar_from_lark(grammar), log_level=0)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def _generate(vocabulary, grammar, seed, most=600, *, with_tokens=False):
    """A random text of the grammar."""
    backend, tokenizer, ids = vocabulary
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.get_error()
    draw, tokens, newline = random.Random(seed), [], backend.token_to_id("Ċ")
    while len(tokens) < most:
        mask = matcher.compute_logit_bias()
        allowed = [index for index, value in enumerate(mask) if value]
        if ids["<|eos|>"] in allowed and (len(allowed) == 1 or draw.random() < 0.5):
            text = backend.decode(tokens, skip_special_tokens=False)
            return (text, tokens) if with_tokens else text
        allowed = [index for index in allowed if index != ids["<|eos|>"]]
        special = [index for index in allowed if index >= 256] if draw.random() < 0.3 else []
        plain = [index for index in allowed if backend.decode([index]).isprintable() or index == newline]
        tokens.append(draw.choice(special or plain or allowed))
        assert matcher.consume_token(tokens[-1])
    return None


def _parse(name, ids, text):
    parser = MessageFormat(TOOL_FORMATS[name], None, ids).parser(TOOLS)
    deltas = [parser.feed(text, []), parser.finish()]
    calls: list[list[str]] = []
    for call in (call for delta in deltas for call in delta.tool_calls):
        if call.name is not None:
            calls.append([call.name, ""])
        calls[-1][1] += call.arguments
    return "".join(delta.content for delta in deltas), [(name, json.loads(text)) for name, text in calls]


def _check(name, arguments):
    tool = next(tool for tool in TOOLS if tool.name == name)
    if tool.parameters:
        assert set(arguments) <= set(tool.parameters["properties"])
        assert set(arguments) >= set(tool.parameters["required"])
    if name == "paint":
        assert arguments["color"] in ("red", "blue")
        assert type(arguments["layers"]) is int and 1 <= arguments["layers"] <= 3
        assert type(arguments["shiny"]) is bool
        assert arguments.get("xsize", {"w": 1})["w"] in (1, 2.5)


def test_a_length_of_text_without_quotes(vocabulary):
    tool = Tool("f", {"properties": {"a": {"type": "string", "minLength": 1, "maxLength": 3}}, "required": ["a"]})
    grammar = forced_calls(TOOL_FORMATS["qwen3_coder"], [tool], vocabulary[2], is_single=True)
    text = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    accepted = [_accepts(vocabulary, grammar, text.format(value)) for value in ("", "abc", "a\nb", "abcd")]
    assert accepted == [False, True, True, False]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_forced_calls_are_valid(vocabulary, name):
    seen, most = set(), 0
    for seed in range(12):
        tools = TOOLS[:2]  # the third one takes any object
        text = _generate(
            vocabulary, forced_calls(TOOL_FORMATS[name], tools, vocabulary[2], is_single=seed < 4), seed, most=2000
        )
        assert text is not None
        content, calls = _parse(name, vocabulary[2], text)
        assert calls and not content.strip()
        assert seed >= 4 or len(calls) == 1
        most = max(most, len(calls))
        for call, arguments in calls:
            _check(call, arguments)
            seen.add(call)
    assert seen == {"paint", "stop-now"}
    assert most > 1 or name == "openai"


SCHEMAS = {
    "nulls": {"type": "object", "properties": None, "required": None},
    "reference": {"$ref": "#/$defs/x~1y~0", "$defs": {"x/y~": _schema(a={"enum": ["q"]})}},
    "alternatives": {"type": "object", "anyOf": [_schema(a={"const": 1}), _schema(b={"const": "x"})]},
    "all": {"allOf": [_schema(a={"enum": [1]}), _schema(b={"enum": [True]})]},
    "keys": _schema(**{"a-b": {"const": 1}, "c d": {"const": 2}, "é": {"const": "ü"}, "$z": {"enum": [None]}}),
    "optional": _schema(
        a={"anyOf": [{"enum": ["x", "y\n"]}, {"type": "null"}]},
        b={"anyOf": [{"$ref": "#/$defs/i"}, {"type": "null"}]},
    )
    | {"$defs": {"i": _schema(w={"enum": [1, 2]})}},
    "formats": _schema(
        **{name: {"type": "string", "format": name} for name in ("date", "ipv4", "ipv6", "uuid", "time")},
        day={"type": "string", "format": "date", "pattern": "^20"},
    ),
    "union": _schema(
        a={
            "oneOf": [_schema(kind={"const": "x"}, n={"enum": [1, 2]}), _schema(kind={"const": "y"})],
            "discriminator": {"propertyName": "kind"},
        },
        xb={
            "type": "array",
            "items": _schema(c={"enum": ["q"]}, xd={"$ref": "#/$defs/tree"}),
            "minItems": 1,
            "maxItems": 2,
        },
    )
    | {"$defs": {"tree": _schema(xleft={"$ref": "#/$defs/tree"}, xset={"type": ["boolean", "null"]})}},
    "pattern": _schema(
        a={"type": "string", "pattern": "^[ab]{1,3}$"}, b={"type": "string", "pattern": r"^\w[^$x\n]\$\d(m|/)$"}
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "glm45", "pythonic", "deepseek_v32", "gemma4"])
def test_arguments_of_forced_calls_are_valid(vocabulary, name, form):
    tool, ids = Tool("f", SCHEMAS[name]), vocabulary[2]
    grammar = forced_calls(TOOL_FORMATS[form], [tool], ids, is_single=True, prepared=prepared_schema)
    for seed in range(3):
        text = _generate(vocabulary, grammar, seed, most=1500)
        parser = MessageFormat(TOOL_FORMATS[form], None, ids).parser([tool])
        (call,) = parser.feed(text, []).tool_calls
        schema = {key: value for key, value in SCHEMAS[name].items() if value is not None}
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.validate(json.loads(call.arguments), schema, format_checker=checker)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}] * 50},
        {"allOf": [{"anyOf": [{}, {}]}] * 40},
        {"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}] * 9, "oneOf": [{"$ref": "#"}] * 9}}},
        {"properties": ["a"], "required": True, "anyOf": {}},
        {"properties": {"a": "string", "b": {"type": 3, "anyOf": 3}}, "required": [{"a": 1}]},
        {"$ref": "#/nothing"},
    ],
    ids=str,
)
def test_schemas_that_are_circular_or_invalid(vocabulary, schema):
    """They are refused by the compiler of grammars, or not at all."""
    assert 1 <= len(argument_variants(schema)) <= 16
    for name in ("hermes", "qwen3_coder", "pythonic"):
        assert forced_calls(TOOL_FORMATS[name], [Tool("f", schema)], vocabulary[2], is_single=True)


def test_patterns_with_other_anchors_are_any_text():
    assert pattern_terminal("^a$|^b$") == "TEXT"
    assert pattern_terminal("a") == "/(?s:.*)(a)(?s:.*)/"


def _accepts(vocabulary, grammar, text):
    """Whether a text is whole under a grammar."""
    backend, tokenizer, ids = vocabulary
    if not grammar.startswith("{"):
        grammar = LLMatcher.grammar_from_lark(grammar)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.get_error()
    tokens = [*backend.encode(text).ids, ids["<|eos|>"]]
    return matcher.validate_tokens(tokens) == len(tokens)


PAINT = '{"color": "red", "layers": 2, "shiny": true}'


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '<tool_call>\n{{"name": "paint", "arguments": {}}}\n</tool_call>'),
        ("mistral", "[TOOL_CALLS]paint[ARGS]{}"),
        ("llama3_json", '\n{{"name": "paint", "parameters": {}}}'),
        ("json", '{{"name": "paint", "arguments": {}}}'),
        ("json", '[{{"name": "paint", "arguments": {}}}]'),
    ],
)
def test_strict_tools_are_valid_wherever_they_are_called(vocabulary, name, call):
    grammar = strict_calls(TOOL_FORMATS[name], TOOLS, vocabulary[2], is_single=False)
    assert _accepts(vocabulary, grammar, "Just text, a {brace} and a [list].\n")
    assert _accepts(vocabulary, grammar, call.format(PAINT))
    assert not _accepts(vocabulary, grammar, call.format('{"color": "green"}'))
    assert _accepts(vocabulary, grammar, "")
    if name in ("hermes", "mistral"):
        assert _accepts(vocabulary, grammar, f"Hm.\n{call.format(PAINT)}")
        assert not _accepts(vocabulary, grammar, f"Hm.\n{call.format('{}')}")
        loose = call.format('{"any": [1]}').replace("paint", "noop")
        assert _accepts(vocabulary, grammar, f"{loose}\n{call.format(PAINT)}")


@pytest.mark.parametrize(
    ("name", "call", "argument"),
    [
        ("qwen3_coder", "<tool_call>\n<function=stop>\n{}</function>\n</tool_call>",
         "<parameter=why>\nA\n</parameter>\n"),
        ("glm45", "<tool_call>stop\n{}</tool_call>", "<arg_key>why</arg_key>\n<arg_value>It's late</arg_value>\n"),
        ("pythonic", "[stop({})]", 'why="It is late"'),
        ("gemma4", "<|tool_call>call:stop{{{}}}<tool_call|>", 'why:<|"|>It is late<|"|>'),
    ],
)  # fmt: skip
def test_beside_a_strict_tool_others_keep_their_arguments_without_json(vocabulary, name, call, argument):
    tools = [TOOLS[0], Tool("stop", _schema(why={"type": "string"}))]
    grammar = strict_calls(TOOL_FORMATS[name], tools, vocabulary[2], is_single=True)
    assert _accepts(vocabulary, grammar, call.format(argument))
    assert _accepts(vocabulary, grammar, call.format(""))
    paint = call.replace("stop", "paint")
    assert not _accepts(vocabulary, grammar, paint.format(argument))


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.paint <|constrain|>json<|message|>"


@pytest.mark.parametrize("can_think", [True, False])
def test_strict_messages_of_harmony(vocabulary, can_think):
    rules = Rules(vocabulary[2])
    grammar = rules.render(HarmonyFormat.message(loosened(TOOLS), rules, answer="TEXT", can_think=can_think))
    preamble = THOUGHT.replace("analysis", "commentary")
    by_role = f" to=functions.paint{CALL.replace(' to=functions.paint', '')}{PAINT}"
    for text in (f"{FINAL}Hi.", f"{preamble}{FINAL}", f"{CALL}{PAINT}", by_role):
        assert _accepts(vocabulary, grammar, text)
    assert _accepts(vocabulary, grammar, f"{THOUGHT}{CALL}{PAINT}") == can_think
    assert _accepts(vocabulary, grammar, f'{CALL.replace("paint", "noop")}{{"any": [1]}}')
    for text in ("Hi.", f"{CALL}{{}}", f"{CALL.replace('paint', 'other')}{{}}", f"{preamble}{CALL}"):
        assert not _accepts(vocabulary, grammar, text)


def test_a_schema_that_cannot_be_compiled_is_named():
    def tool(name, **parameters):
        return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}

    wrong = {"properties": {"a": {"type": "string", "pattern": "(?=x)"}}}
    tools = ToolUse.of([tool("good"), tool("bad", **wrong)], "required")
    error = find_schema_error(tools, LLMatcher.validate_grammar)
    assert (error.field, error.code) == ("tools[1].function.parameters", "invalid_schema")
    assert error.value == "#/properties/a"
    unsupported = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [tool("good"), tool("loose", **unsupported)]
    assert find_schema_error(ToolUse.of(tools, "required"), LLMatcher.validate_grammar) is None
    tools[1]["function"]["strict"] = True
    error = find_schema_error(ToolUse.of(tools), LLMatcher.validate_grammar)
    assert (error.field, error.value) == ("tools[1].function.parameters", "#/properties/a")


def test_the_end_of_reasoning_is_forced_after_a_budget():
    """With drafts, each position has the token of its own place."""
    reasoning = ReasoningEnd(b"</t>", {}, 2, begin=[1, 2], end=list(b"</t>"))
    assert [reasoning.forced(position) for position in range(10)] == [1, 2, None, None, *b"</t>", None, None]
    mask = np.full(4, -1, dtype=np.int32)
    set_only(mask, 95)
    assert [int(word) for word in mask.view(np.uint32)] == [0, 0, 1 << 31, 0]

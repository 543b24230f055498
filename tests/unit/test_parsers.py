"""Parsers of generated messages: transcripts of every format, in one piece and in random ones."""

import itertools
import json
from dataclasses import KW_ONLY, dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetfoot.engine.chat import ChatFormats, ToolUse
from fleetfoot.parsers.base import Tool
from fleetfoot.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, MessageFormat, message_format
from fleetfoot.sampling_params import SamplingParams
from fleetfoot.tokenizer.chat_template import ChatTemplate

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"type": ["string", "null"]},
            "points": {"type": "array", "items": {"type": "number"}},
            "place": {"$ref": "#/$defs/place"},
            "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
        "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
    },
)
CLOCK = Tool("clock.now")
SPECIALS = {
    "[TOOL_CALLS]": 1,
    "[ARGS]": 2,
    "[CALL_ID]": 3,
    "[THINK]": 4,
    "[/THINK]": 5,
    "<|im_end|>": 6,
    "<|eot|>": 7,
    "<|channel|>": 8,
    "<|message|>": 9,
    "<|start|>": 10,
    "<|end|>": 11,
    "<|call|>": 12,
    "<|constrain|>": 13,
    "<|python_tag|>": 14,
    "<|tool_calls_section_begin|>": 15,
    "<|START_RESPONSE|>": 16,
}
NOW = ("clock.now", {"a": 1})
IN_ROME = ("get_weather", {"city": "Rome"})
BOTH = [("get_weather", {"city": "Rome", "days": 2}), ("clock.now", {})]


@dataclass
class Case:
    """A transcript, and what it means."""

    text: str
    calls: list
    _: KW_ONLY
    tools: str = "json"
    reasoning: str | None = None
    content: str = ""
    thought: str = ""
    is_open: bool = False

    def parse(self, pieces, **options):
        prompt = "<|im_start|>assistant\n" + "<think>\n" * self.is_open
        return parse(make(self.tools, self.reasoning, prompt), pieces, **options)


DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
XML = """<tool_call>
<function=get_weather>
<parameter=city>
 a "b"
c\\

</parameter>
<parameter=days>
3.0
</parameter>
<parameter=units>
null
</parameter>
<parameter=points>[1, 2.5]</parameter>
<parameter=place>
{'lat': 1.5}
</parameter>
<parameter=exact>
True
</parameter>
<parameter=unknown>
12
</parameter>
</function>
</tool_call>"""
XML_ARGUMENTS = {
    "city": ' a "b"\nc\\\n',
    "days": 3,
    "units": None,
    "points": [1, 2.5],
    "place": {"lat": 1.5},
    "exact": True,
    "unknown": "12",
}
GLM = """<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value> a "b"
c\\

</arg_value>
<arg_key>days</arg_key>
<arg_value>3.0</arg_value>
<arg_key>units</arg_key>
<arg_value>null</arg_value>
<arg_key>points</arg_key>
<arg_value>[1, 2.5]</arg_value>
<arg_key>place</arg_key>
<arg_value>{"lat": 1.5}</arg_value>
<arg_key>unknown</arg_key>
<arg_value>12</arg_value>
</tool_call>"""
GLM_ARGUMENTS = {
    "city": ' a "b"\nc\\\n\n',
    "days": 3,
    "units": None,
    "points": [1, 2.5],
    "place": {"lat": 1.5},
    "unknown": 12,
}
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
CALLS = '[{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}, {"name": "clock.now", "arguments": {}}]'
DSML = """<｜DSML｜{0}>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">12</｜DSML｜parameter>
<｜DSML｜parameter name="points" string="false">[1, 2.5]</｜DSML｜parameter>
<｜DSML｜parameter name="unknown" string="false">{{"a": 1}}</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="clock.now">
</｜DSML｜invoke>
</｜DSML｜{0}>"""
DSML_CALLS = [("get_weather", {"city": "12", "points": [1, 2.5], "unknown": {"a": 1}}), BOTH[1]]
TRANSCRIPTS = [
    Case("Hello {name}!  ", [], content="Hello {name}!  "),
    Case(CALLS, BOTH),
    Case(f"I look.\n```json\n{CALLS}\n```\nDone", BOTH, content="I look.Done"),
    Case(
        '{"type": "function", "function": {"name": "clock.now", "arguments": "{\\"a\\": 1}"}}',
        [NOW],
    ),
    Case('{"parameters": {"city": "Rome"}, "name": "get_weather"} end', [IN_ROME], content="end"),
    Case('{"name": "Bob", "arguments": {}}', [], content='{"name": "Bob", "arguments": {}}'),
    Case('{"name": "get_weather"}', [], content='{"name": "get_weather"}'),
    Case('{"name": "get_weather", "age": 3', [], content='{"name": "get_weather", "age": 3'),
    Case("[1, 2]\n", [], content="[1, 2]\n"),
    Case(HERMES, BOTH[:1], tools="hermes"),
    Case(
        f'Sure.\n\n{HERMES}\n<tool_call>\n{{"name": "clock.now"}}\n</tool_call>\n',
        BOTH,
        tools="hermes",
        content="Sure.",
    ),
    Case('<tool_call>{"arguments": null, "name": "clock.now"}', BOTH[1:], tools="hermes"),
    Case("Use `<tool_call>` here <tool", [], tools="hermes", content="Use `<tool_call>` here <tool"),
    Case(' <tool_call>{"nam', [], tools="hermes", content=' <tool_call>{"nam'),
    Case('{"name": "get_weather", "parameters": {"city": "Rome"}}<|eot|>', [IN_ROME], tools="llama3_json"),
    Case(
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "a\\"}"}}; '
        '{"name": "clock.now", "parameters": {}}',
        [("get_weather", {"city": 'a"}'}), ("clock.now", {})],
        tools="llama3_json",
    ),
    Case("<|python_tag|>print(1)", [], tools="llama3_json", content="print(1)"),
    Case('[get_weather(city="Rome", days=2), clock.now()]', BOTH, tools="pythonic"),
    Case(
        "<|python_start|>[get_weather('R, ()', points=[1, {'a': (None, True)}], exact=false)]<|python_end|>",
        [("get_weather", {"city": "R, ()", "points": [1, {"a": [None, True]}], "exact": False})],
        tools="pythonic",
    ),
    Case("<function_calls>\nget_weather(city='Rome', days=2)\nclock.now()\n</function_calls>", BOTH, tools="pythonic"),
    Case("[link](x) and [other()]", [], tools="pythonic", content="[link](x) and [other()]"),
    Case(f"[TOOL_CALLS] {CALLS}", BOTH, tools="mistral"),
    Case(
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 2}[TOOL_CALLS]clock.now[CALL_ID]abc[ARGS]{}<|im_end|>',
        BOTH,
        tools="mistral",
    ),
    Case("[TOOL_CALLS]no call", [], tools="mistral", content="no call"),
    Case(f"On it. {XML}", [("get_weather", XML_ARGUMENTS)], tools="qwen3_coder", content="On it."),
    Case("<function=clock.now>\n</function>\nDone", [("clock.now", {})], tools="qwen3_coder", content="Done"),
    Case("<tool_call>\n<fun>", [], tools="qwen3_coder", content="<tool_call>\n<fun>"),
    Case(
        DEEPSEEK.format(V3.format("get_weather", '{"city": "Rome", "days": 2}') + "\n" + V3.format("clock.now", "{}")),
        BOTH,
        tools="deepseek_v3",
    ),
    Case(
        "Hm"
        + DEEPSEEK.format(V31.format("get_weather", '{"city": "Rome", "days": 2}') + V31.format("clock.now", "{}")),
        BOTH,
        tools="deepseek_v31",
        content="Hm",
    ),
    Case(f"I look.\n{GLM}", [("get_weather", GLM_ARGUMENTS)], tools="glm45", content="I look."),
    Case(
        "<think></think>\n<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key>"
        "<arg_value>2</arg_value></tool_call><tool_call>clock.now\n</tool_call>\n",
        BOTH,
        tools="glm47",
        reasoning="qwen3",
    ),
    Case("A <tool_call> is a tag", [], tools="glm45", content="A <tool_call> is a tag"),
    Case(
        f"<seed:tool_call>\n{XML.removeprefix('<tool_call>').removesuffix('</tool_call>')}</seed:tool_call>".replace(
            ">\n<", "><"
        ),
        [("get_weather", XML_ARGUMENTS | {"city": '\n a "b"\nc\\\n\n', "unknown": "\n12\n"})],
        tools="seed_oss",
    ),
    Case(
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="clock.now">\n</invoke>\n</minimax:tool_call>',
        BOTH,
        tools="minimax_m2",
    ),
    Case(
        '<function=get_weather>{"city": "Rome", "days": 2}</function>\n<function=clock.now>{}</function>',
        BOTH,
        tools="functionary",
    ),
    Case(
        "Hm"
        + KIMI.format(
            KIMI_CALL.format("functions.get_weather:0", '{"city": "Rome", "days": 2}')
            + KIMI_CALL.format(" clock.now ", " {}")
        ),
        BOTH,
        tools="kimi_k2",
        content="Hm",
    ),
    Case(
        "<think>Hm" + KIMI.format(KIMI_CALL.format("functions.clock.now:7", '{"a": 1}')),
        [NOW],
        tools="kimi_k2",
        reasoning="kimi_k2",
        thought="Hm",
    ),
    Case(
        '<|START_THINKING|>Hm<|END_THINKING|><|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "get_weather", '
        '"parameters": {"city": "Rome"}}\n]<|END_ACTION|>',
        [IN_ROME],
        tools="cohere_command3",
        reasoning="cohere_command3",
        thought="Hm",
    ),
    Case("<|START_RESPONSE|>Yes", [], tools="cohere_command3", reasoning="cohere_command3", content="Yes"),
    Case('<function_call> {"name": "clock.now", "arguments": {"a": 1}}', [NOW], tools="granite-20b-fc"),
    Case("<|tool_call_start|>[clock.now(a=1)]<|tool_call_end|>Done", [NOW], tools="pythonic", content="Done"),
    Case(f"<|tool_call|>{CALLS}", BOTH, tools="granite"),
    Case(f"<tool_calls>{CALLS}</tool_calls>", BOTH, tools="jamba"),
    Case(f"functools{CALLS}", BOTH, tools="phi4_mini_json"),
    Case(
        "<|channel|>analysis<|message|>Weather?<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Rome"}<|call|>',
        [IN_ROME],
        tools="openai",
        reasoning="openai",
        thought="Weather?",
    ),
    Case(
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is <b>12</b>.\n",
        [],
        tools="openai",
        reasoning="openai",
        thought="One.\nTwo.",
        content="It is <b>12</b>.\n",
    ),
    Case(
        ' to=functions.clock.now<|channel|>commentary json<|message|>{"a": 1}',
        [NOW],
        tools="openai",
        reasoning="openai",
    ),
    Case("No channel", [], tools="openai", reasoning="openai", content="No channel"),
    Case("<think>\nHm, {1}.\n</think>\n\nYes", [], reasoning="qwen3", thought="Hm, {1}.", content="Yes"),
    Case("Hm.\n</think>\n\nYes", [], reasoning="qwen3", is_open=True, thought="Hm.", content="Yes"),
    Case("Yes, <think> is a tag", [], reasoning="qwen3", content="Yes, <think> is a tag"),
    Case("Hm </thin", [], reasoning="qwen3", is_open=True, thought="Hm </thin"),
    Case("Hm</think>Yes", [], reasoning="deepseek_r1", thought="Hm", content="Yes"),
    Case("<think>Hm</think>Yes", [], reasoning="deepseek_r1", thought="Hm", content="Yes"),
    Case(
        "<think>\nHm\n</think>\n<answer>\nYes\n</answer>",
        [],
        reasoning="hunyuan_a13b",
        thought="Hm",
        content="Yes",
    ),
    Case(
        "<|inner_prefix|>Hm<|inner_suffix|><|tools_prefix|>"
        '[{"get_weather": {"city": "Rome", "days": 2}}, {"clock.now": {}}]<|tools_suffix|>',
        BOTH,
        tools="apertus",
        reasoning="apertus",
        thought="Hm",
    ),
    Case("<|tools_prefix|>[1]", [], tools="apertus", content="<|tools_prefix|>[1]"),
    Case(
        f"<think>Hm</think>\n\n{DSML.format('function_calls')}Yes",
        DSML_CALLS,
        tools="deepseek_v32",
        reasoning="qwen3",
        thought="Hm",
        content="Yes",
    ),
    Case(DSML.format("tool_calls"), DSML_CALLS, tools="deepseek_v4"),
    Case(
        '<|channel>thought\nHm\n<channel|>On it.<|tool_call>call:get_weather{city:<|"|>R {"x"},\nme<|"|>,days:2,'
        'place:{lat:1.5,<|"|>a b<|"|>:[<|"|>c<|"|>,true,null]}}<tool_call|><|tool_call>call:clock.now{}<tool_call|>',
        [
            ("get_weather", {"city": 'R {"x"},\nme', "days": 2, "place": {"lat": 1.5, "a b": ["c", True, None]}}),
            BOTH[1],
        ],
        tools="gemma4",
        reasoning="gemma4",
        thought="Hm",
        content="On it.",
    ),
    Case("<|tool_call>no call", [], tools="gemma4", content="<|tool_call>no call"),
    Case(
        "<start_function_call>call:get_weather{city:<escape>Rome<escape>,days:2}<end_function_call>"
        "<start_function_call>call:clock.now{}<end_function_call>",
        BOTH,
        tools="functiongemma",
    ),
    Case('<|function_call|>{"name": "clock.now", "arguments": {"a": 1}}', [NOW], tools="gigachat3"),
    Case(
        "<think:opensource>Hm</think:opensource><tool_calls:opensource>\n<tool_call:opensource>get_weather"
        "<tool_sep:opensource>\n<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Rome"
        "</arg_value:opensource>\n<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>2"
        "</arg_value:opensource>\n</tool_call:opensource>\n<tool_call:opensource>clock.now<tool_sep:opensource>\n"
        "</tool_call:opensource>\n</tool_calls:opensource>",
        BOTH,
        tools="hy_v3",
        reasoning="hy_v3",
        thought="Hm",
    ),
    Case(
        'On it.<|action_start|><|plugin|>\n{"name": "clock.now", "parameters": {"a": 1}}<|action_end|>\n',
        [NOW],
        tools="internlm",
        content="On it.",
    ),
    Case(
        '<longcat_think>\nHm\n</longcat_think>\n<longcat_tool_call>{"name": "clock.now", "arguments": {"a": 1}}'
        "</longcat_tool_call>",
        [NOW],
        tools="longcat",
        reasoning="longcat",
        thought="Hm",
    ),
    Case(
        '<function name="get_weather"><param name="city"><![CDATA[<b></param>]]></param><param name="days">2</param>'
        '</function><function name="clock.now"></function>',
        [("get_weather", {"city": "<b></param>", "days": 2}), BOTH[1]],
        tools="minicpm5",
    ),
    Case(
        "Hm<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="get_weather">\n<steptml:parameter name="city">Rome</steptml:parameter>\n'
        '<steptml:parameter name="days">2</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="clock.now">\n</steptml:invoke>'
        "<｜tool_call_end｜>\n<｜tool_calls_end｜>",
        BOTH,
        tools="step3",
        content="Hm",
    ),
    Case("<think>\nHm\n</think>\n<response>\nYes\n</response>\n", [], reasoning="ernie45", thought="Hm", content="Yes"),
    Case(
        "Here are my reasoning steps:\nHm\n[BEGIN FINAL RESPONSE]\nYes\n[END FINAL RESPONSE]",
        [],
        reasoning="apriel",
        thought="Hm",
        content="Yes",
    ),
    Case(f"<TOOLCALL>{CALLS}</TOOLCALL>", BOTH, tools="nemotron_json"),
    Case("[THINK]Hm[/THINK]Yes", [], reasoning="mistral", thought="Hm", content="Yes"),
    Case("<seed:think>Hm</seed:think>Yes", [], reasoning="seed_oss", thought="Hm", content="Yes"),
    Case(
        "Here is my thought process: Hm. Here is my response: Yes",
        [],
        reasoning="granite",
        thought="Hm.",
        content="Yes",
    ),
    Case(
        f"<think>a <tool_call> perhaps</think>\n\n{HERMES}<|im_end|>",
        BOTH[:1],
        tools="hermes",
        reasoning="qwen3",
        thought="a <tool_call> perhaps",
    ),
]


def parse(parser, pieces, *, is_cut=False):
    """Content, reasoning and calls: name and text of the arguments."""
    deltas = [parser.feed(piece, []) for piece in pieces]
    deltas.append(parser.finish(is_cut=is_cut))
    calls: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        assert (call.index in calls) == (call.name is None) == (call.id is None)
        calls.setdefault(call.index, [call.name or "", ""])[1] += call.arguments
    assert list(calls) == list(range(len(calls)))
    return "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), [tuple(c) for c in calls.values()]


def make(tools="json", reasoning=None, prompt="", **options):
    form = MessageFormat(TOOL_FORMATS[tools], REASONING_FORMATS[reasoning] if reasoning else None, SPECIALS)
    is_reasoning = form.reasoning is not None and form.reasoning.is_open(prompt)
    return form.parser([WEATHER, CLOCK], is_reasoning=is_reasoning, **options)


def split(text, cuts):
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:stop] for start, stop in itertools.pairwise(places)]


def test_every_format_has_a_transcript():
    assert {case.tools for case in TRANSCRIPTS} >= set(TOOL_FORMATS) - {"mistral_json"}
    assert {case.reasoning for case in TRANSCRIPTS} >= set(REASONING_FORMATS)


@pytest.mark.parametrize("case", TRANSCRIPTS, ids=lambda case: f"{case.tools}-{case.reasoning}")
def test_transcripts(case):
    content, thought, calls = whole = case.parse([case.text])
    parsed = [(name, json.loads(arguments)) for name, arguments in calls]
    assert (content, thought, parsed) == (case.content, case.thought, case.calls)
    assert case.parse(list(case.text)) == whole


FRAGMENTS = sorted({piece for case in TRANSCRIPTS for piece in split(case.text, range(7, 400, 13))})


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.sampled_from([None, *sorted(REASONING_FORMATS)]),
    st.booleans(),
    st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join) | st.sampled_from([c.text for c in TRANSCRIPTS]),
    st.lists(st.integers(0, 10_000), max_size=12),
    st.booleans(),
)
def test_the_split_makes_no_difference(tools, reasoning, is_open, text, cuts, is_cut):
    prompt = "<think>" if is_open else ""
    whole = parse(make(tools, reasoning, prompt), [text], is_cut=is_cut)
    assert parse(make(tools, reasoning, prompt), split(text, cuts), is_cut=is_cut) == whole


@pytest.mark.parametrize("case", TRANSCRIPTS, ids=lambda case: f"{case.tools}-{case.reasoning}")
def test_a_cut_text_keeps_what_there_is(case):
    """The message of a prefix of the text begins that of the whole: half a mark is no content."""
    content, thought, whole = case.parse([case.text])
    has_plain_marks = case.tools in ("json", "llama3_json", "pythonic", "phi4_mini_json")  # brackets and words
    for size in range(len(case.text)):
        cut_content, cut_thought, cut = case.parse([case.text[:size]], is_cut=True)
        assert has_plain_marks or content.startswith(cut_content.rstrip())
        assert case.reasoning == "granite" or thought.startswith(cut_thought.rstrip())
        assert [name for name, _ in cut] == [name for name, _ in whole[: len(cut)]]
        for (_, arguments), (_, whole_arguments) in zip(cut, whole, strict=False):
            assert whole_arguments.startswith(arguments)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]}, '{"lat": 1}', {"lat": 1}),
        ({"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]}, "null", None),
        ({"allOf": [{"$ref": "#/$defs/place"}]}, "{'lat': 1}", {"lat": 1}),
        ({"$ref": "#/$defs/loop"}, "[1]", "[1]"),
        ({"const": 3}, "3", 3),
        ({"const": "3"}, "3", "3"),
        ({"enum": [1, "a", None]}, "null", None),
        ({"enum": [1, "a", None]}, "a", "a"),
        ({"type": ["integer", "string"]}, "12", 12),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "number"}, "1e999", "1e999"),
    ],
)
def test_values_without_quotes_have_the_types_of_the_schema(schema, text, value):
    definitions = {**WEATHER.parameters["$defs"], "loop": {"$ref": "#/$defs/loop"}}
    tool = Tool("f", {"properties": {"a": schema}, "$defs": definitions})
    parser = MessageFormat(TOOL_FORMATS["qwen3_coder"]).parser([tool])
    ((_, arguments),) = parse(parser, [f"<function=f><parameter=a>{text}</parameter></function>"])[2]
    assert json.loads(arguments) == {"a": value}


def test_later_calls_are_dropped():
    assert [name for name, _ in parse(make(max_calls=1), [CALLS])[2]] == ["get_weather"]


def test_ids_that_a_model_writes():
    """Each once, although a model repeats them or leaves them out."""
    names = ("functions.clock.now:4", "functions.clock.now:4", "clock.now", "functions.get_weather")
    text = KIMI.format("".join(KIMI_CALL.format(name, "{}") for name in names))
    ids = [call.id for call in make("kimi_k2").feed(text, []).tool_calls]
    assert ids == [*(f"functions.clock.now:{number}" for number in (4, 5, 2)), "functions.get_weather:3"]


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages }}", "json", None),
        ("<tool_call> <think> </think>", "hermes", "qwen3"),
        ("<tool_call><function=x><parameter=y>", "qwen3_coder", None),
        ("<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key> <think>", "glm45", "qwen3"),
        ("<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>", "glm47", None),
        ("<|im_middle|>{{ tools }} tool_declare", "kimi_k2", None),
        ("<think><|tool_calls_section_begin|>", "kimi_k2", "kimi_k2"),
        ("[TOOL_CALLS] x [ARGS] [THINK]", "mistral", "mistral"),
        ("[TOOL_CALLS] [", "mistral_json", None),
        ("<|python_tag|>", "llama3_json", None),
        ("<|start|><|channel|>analysis<|message|>", "openai", "openai"),
        ("<｜tool▁calls▁begin｜> ```json <think>", "deepseek_v3", "qwen3"),
        ("<｜tool▁calls▁begin｜><｜tool▁sep｜>", "deepseek_v31", None),
        ("{% set dsml_token = '｜DSML｜' %}<think></think> function_calls", "deepseek_v32", "qwen3"),
        ("{% set dsml_token = '｜DSML｜' %}</think> tool_calls", "deepseek_v4", "qwen3"),
        ("<|tools_prefix|> <|inner_prefix|>", "apertus", "apertus"),
        ("<|tool_call>call: <|channel>thought", "gemma4", "gemma4"),
        ("<start_function_call>call:", "functiongemma", None),
        ("<|role_sep|> message.tool_calls <|message_sep|>", "gigachat3", None),
        ("{% set HYTK = ':opensource' %}<think{}> <tool_sep{}> <arg_key{}>", "hy_v3", "hy_v3"),
        ("<|action_start|> <|plugin|>", "internlm", None),
        ("<longcat_tool_call> <longcat_think>", "longcat", "longcat"),
        ('<function name="f"><param name="p">', "minicpm5", None),
        ("<｜tool_calls_begin｜> </think>", "step3", "qwen3"),
        ("List of tools: [ keep_past_thinking </think>", "pythonic", "qwen3"),
        ("<|tool_call|> <think> <response>", "granite", "ernie45"),
        ("<minimax:tool_call> <response> <think>", "minimax_m2", "qwen3"),
        ("Here are my reasoning steps:\\n [BEGIN FINAL RESPONSE] <tool_calls>", "jamba", "apriel"),
    ],
)
def test_the_template_names_the_format(template, tools, reasoning):
    form = message_format(template, SPECIALS)
    assert form.tools == TOOL_FORMATS[tools]
    assert form.reasoning == (REASONING_FORMATS[reasoning] if reasoning else None)


COMMAND = """{{ bos_token }}{% macro calls(message) %}<|START_ACTION|>[
{%- for call in message.tool_calls %}
    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ call.function.name }}", "parameters":
    {{- call.function.arguments | tojson }}}{{ "," if not loop.last }}
{%- endfor %}]<|END_ACTION|>{% endmacro %}
{%- if tools %}Plan between <|START_THINKING|> and <|END_THINKING|>. Tools:
```json
{{ tools | tojson }}
```{% endif %}
{%- for message in messages %}{{ calls(message) if message.tool_calls else message.content }}{% endfor %}"""
GRANITE = """{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson(indent=2) }}<|end_of_text|>{% endif %}
{%- for message in messages %}<|start_of_role|>{{ message.role }}<|end_of_role|>{{ message.content }}<|end_of_text|>
{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""
PHI = """{% for message in messages %}<|{{ message.role }}|>{{ message.content }}
{%- if loop.first and tools %}<|tool|>{{ tools | tojson }}<|/tool|>{% endif %}<|end|>{% endfor %}<|assistant|>"""
HUNYUAN = """{% if tools %}Write calls as <tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>:
{{ tools | tojson }}{% endif %}
{%- for message in messages %}{{ message.content.split('<answer>')[-1] }}{% endfor %}
{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>{% endif %}"""
LLAMA = """{%- for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>
{% if loop.first and tools %}Answer with {"name": function name, "parameters": the arguments by name}.
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}
{{- message.content }}<|eot_id|>{% endfor %}"""
FUNCTIONARY = """{% if tools %}{% for tool in tools %}Use '{{ tool.function.name }}' to {{ tool.function.description }}
{% endfor %}Call with <function=example>{"argument": "value"}</function>{% endif %}
{%- for message in messages %}{{ message.content }}{% for call in message.tool_calls %}
{{- '<function=' + call.function.name + '>' }}{{ call.function.arguments | tojson }}</function>{% endfor %}
{%- endfor %}"""
RECIPIENTS = """{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>{{ message.content }}
{%- for call in message.tool_calls or [] %}>>>{{ call.function.name }}
{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}>>>"""


@pytest.mark.parametrize(
    ("template", "tools", "reasoning", "text"),
    [
        (
            COMMAND,
            "cohere_command3",
            "cohere_command3",
            '<|START_ACTION|>[{"tool_name": "clock.now", "parameters": {"a": 1}}]',
        ),
        (GRANITE, "granite", None, '<|tool_call|>[{"name": "clock.now", "arguments": {"a": 1}}]'),
        (PHI, "phi4_mini_json", None, '<|tool_call|>[{"name": "clock.now", "arguments": {"a": 1}}]<|/tool_call|>'),
        (HUNYUAN, "jamba", "hunyuan_a13b", '<tool_calls>[{"name": "clock.now", "arguments": {"a": 1}}]</tool_calls>'),
        (LLAMA, "llama3_json", None, '{"name": "clock.now", "parameters": {"a": 1}}'),
        (FUNCTIONARY, "functionary", None, '<function=clock.now>{"a": 1}</function>'),
        (RECIPIENTS, None, None, '{"name": "clock.now", "arguments": {"a": 1}}'),
    ],
    ids=["command", "granite", "phi", "hunyuan", "llama", "functionary", "unknown"],
)
def test_templates_of_known_families(template, tools, reasoning, text, caplog):
    function = {"name": "clock.now", "description": "tell the time", "parameters": {}}
    options = {"tools": [{"type": "function", "function": function}], "add_generation_prompt": True}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", "tool_calls": []}]
    assert "clock.now" in ChatTemplate(template).render(messages, variables={"bos_token": "<s>"}, **options)
    tokenizer = SimpleNamespace(added_tokens_decoder={}, get_chat_template=lambda *arguments: template)
    form = ChatFormats(tokenizer).of(None, has_tools=True)
    assert form.tools == TOOL_FORMATS[tools or "json"]
    assert form.reasoning == (REASONING_FORMATS[reasoning] if reasoning else None)
    assert ("--tool-call-parser: apertus, cohere_command3," in caplog.text) == (tools is None)
    (call,) = parse(form.parser([CLOCK]), [text])[2]
    assert (call[0], json.loads(call[1])) == NOW


@pytest.mark.parametrize(
    "source", ["<|python_tag|>", "<|python_tag|> This model only supports single tool-calls at once!"]
)
def test_a_template_of_one_call_has_one_forced_call(source):
    tokenizer = SimpleNamespace(added_tokens_decoder={}, get_chat_template=lambda *arguments: source + "{{ tools }}")
    use = ToolUse.of([{"type": "function", "function": {"name": "f"}}], "required")
    expected = ChatFormats(tokenizer).expect(None, use, SamplingParams(), [])
    calls = expected.parse('{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}').tool_calls
    assert len(calls) == (1 if "single" in source else 2)


def test_special_tokens_are_kept_for_their_formats_alone():
    keeps = {name: message_format("", SPECIALS, name).keeps_special_tokens(has_tools=True) for name in TOOL_FORMATS}
    assert {name for name, value in keeps.items() if value} == {
        *("mistral", "mistral_json", "openai", "llama3_json", "kimi_k2"),
    }
    assert not message_format("", SPECIALS, "mistral").keeps_special_tokens(has_tools=False)
    parser = make("mistral", hides_special_tokens=False)
    assert parse(parser, ["a<|im_end|>[ARGS]"])[0] == "a<|im_end|>[ARGS]"


XML_CALL = "<tool_call>\n<function=clock.now>\n</function>\n</tool_call>"


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    ("tools", "reasoning", "call"),
    [
        ("qwen3_coder", "qwen3", XML_CALL),
        ("hermes", "qwen3", '<tool_call>\n{"name": "clock.now", "arguments": {}}\n</tool_call>'),
        ("glm45", "qwen3", "<tool_call>clock.now\n</tool_call>"),
        ("mistral", "qwen3", "[TOOL_CALLS]clock.now[ARGS]{}"),
        ("deepseek_v31", "deepseek_r1", DEEPSEEK.format(V31.format("clock.now", "{}"))),
        ("pythonic", "qwen3", "<|tool_call_start|>[clock.now()]<|tool_call_end|>"),
    ],
)
def test_a_call_ends_reasoning_that_has_no_end(tools, reasoning, call, is_open):
    text = "<think>" * (not is_open) + f"I call <tool_call> or <tool_call><function=other> {call}\nDone"
    prompt = "<think>\n" * is_open
    whole = parse(make(tools, reasoning, prompt), [text])
    content, thought, calls = whole
    assert thought == "I call <tool_call> or <tool_call><function=other>"
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [BOTH[1]]
    assert content == "Done"
    assert parse(make(tools, reasoning, prompt), list(text)) == whole


def test_calls_that_are_only_thought_of_do_not_end_reasoning():
    thought = 'Use <tool_call>{"name": "other", "arguments": {}} or <tool_call>\n{"name"'
    assert parse(make("hermes", "qwen3"), [f"<think>{thought}</think>Yes"]) == ("Yes", thought, [])

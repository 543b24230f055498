"""Arguments of calls are JSON objects, whatever a model writes, and however its text arrives."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetfoot.engine.chat_messages import template_message
from fleetfoot.parsers.base import Tool
from fleetfoot.parsers.completion import completion
from fleetfoot.parsers.registry import TOOL_FORMATS, MessageFormat
from fleetfoot.parsers.typed import MAX_DEPTH

TOOLS = [Tool("run", {"properties": {"command": {"type": "string"}, "a": {}, "b": {"type": "array"}}}), Tool("now")]
SPECIALS = {"<|channel|>": 1, "<|message|>": 2, "<|start|>": 3, "<|end|>": 4, "<|call|>": 5, "<|constrain|>": 6}
JSON_CALL = '{"name": "run", "arguments": %s}'
DEEPSEEK = ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
# the text of a call of each format in which arguments are JSON
BODIES = {
    "apertus": '<|tools_prefix|>[{"run": %s}]<|tools_suffix|>',
    "cohere_command3": '<|START_ACTION|>[{"tool_name": "run", "parameters": %s}]<|END_ACTION|>',
    "deepseek_v3": f"{DEEPSEEK[0]}function<｜tool▁sep｜>run\n```json\n%s\n```{DEEPSEEK[1]}",
    "deepseek_v31": f"{DEEPSEEK[0]}run<｜tool▁sep｜>%s{DEEPSEEK[1]}",
    "functionary": "<function=run>%s</function>",
    "gigachat3": f"<|function_call|>{JSON_CALL}<|message_sep|>",
    "granite": f"<|tool_call|>[{JSON_CALL}]",
    "granite-20b-fc": f"<function_call> {JSON_CALL}",
    "hermes": f"<tool_call>\n{JSON_CALL}\n</tool_call>",
    "internlm": '<|action_start|><|plugin|>\n{"name": "run", "parameters": %s}<|action_end|>',
    "jamba": f"<tool_calls>[{JSON_CALL}]</tool_calls>",
    "json": JSON_CALL,
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>%s"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "llama3_json": '<|python_tag|>{"name": "run", "parameters": %s}',
    "longcat": f"<longcat_tool_call>{JSON_CALL}</longcat_tool_call>",
    "mistral": "[TOOL_CALLS]run[ARGS]%s",
    "mistral_json": f"[TOOL_CALLS] [{JSON_CALL}]",
    "nemotron_json": f"<TOOLCALL>[{JSON_CALL}]</TOOLCALL>",
    "openai": "<|channel|>commentary to=functions.run <|constrain|>json<|message|>%s<|call|>",
    "phi4_mini_json": f"functools[{JSON_CALL}]",
    "qwen3_coder": "<tool_call>\n<function=run>\n%s\n</function>\n</tool_call>",
}


def nested(value):
    """A value in as many objects as there can be."""
    for _ in range(MAX_DEPTH):
        value = {"a": value}
    return value


MENDED = [
    ('{"a": "x\n\ty\x00\x1b"}', {"a": "x\n\ty\x00\x1b"}),
    ('{"a": [1, 2,], "b": {"c": 1,},}', {"a": [1, 2], "b": {"c": 1}}),
    ("{'a': True, 'b': [None, False]}", {"a": True, "b": [None, False]}),
    ("""{'a': 'it\\'s "x"', 'b': ('y',)}""", {"a": 'it\'s "x"', "b": ["y"]}),
    ("{'a': {1, 'x'}, 'b': {}}", {"a": [1, "x"], "b": {}}),
    ('{a: 1, b-c: "x"}', {"a": 1, "b-c": "x"}),
    ('{"a": "he said "hi" to me", "b": 1}', {"a": 'he said "hi" to me', "b": 1}),
    ("{'a': 'it's', 'b': 1}", {"a": "it's", "b": 1}),
    ('{"a": "x"\n"b": 1}', {"a": "x", "b": 1}),
    ('{"a": 1 "b": 2}', {"a": 1, "b": 2}),
    ('{"a": "\\d\\s\\x41\\u12", "b": "\\/\\u00e9"}', {"a": "\\d\\s\\x41\\u12", "b": "/é"}),
    ('{"a": "\\ud83d\\ude00 \\ud83d \\ude00"}', {"a": "😀 \ufffd \ufffd"}),
    ('{"a": """x "y" z""", "b": r"\\d"}', {"a": 'x "y" z', "b": "\\d"}),
    ('{"a": "x" + "y", "b": "x" +\n \'z"\'}', {"a": "xy", "b": 'xz"'}),
    ('{"a": Rome and Milan, "b": 12:30}', {"a": "Rome and Milan", "b": "12:30"}),
    ('{"a": 01, "b": [+1, .5, 1e999, NaN, -1.5e3]}', {"a": "01", "b": [1, 0.5, "1e999", "NaN", -1500.0]}),
    ('{"a": , "b": [,1,,2]}', {"a": None, "b": [1, 2]}),
    ('{"a"\u00a0:\u00a01}', {"a": 1}),
    ('{"a": [1, {"b": 2}', {"a": [1, {"b": 2}]}),
    ('{"a": ' + "9" * 5000 + "}", {"a": "9" * 5000}),
    ('{{"a": 1}}', {"a": 1}),
    ('{"a": 1, // x, "y"\n /* "z": */ "b": [2 /* 3, */, /**/ 4] // "c"\n}', {"a": 1, "b": [2, 4]}),
    ('{"a": "x" // y\n, "b": "z" /* } */}', {"a": "x", "b": "z"}),
    ('{"a": http://x/y, "b": "//" / "/*"}', {"a": "http://x/y", "b": '//" / "/*'}),
    ('{"a": `x, "y"`, `b`: [<b>, 1 < 2, ls `pwd`]}', {"a": 'x, "y"', "b": ["<b>", "1 < 2", "ls `pwd`"]}),
    ('{"a": <b>x</b>, "b": a<b}', {"a": "<b>x</b>", "b": "a<b"}),
    ('{"a": date(2020, 1, 1), "b": [f(x=[1, 2], y={"z": "()"})]}',
     {"a": "date(2020, 1, 1)", "b": ['f(x=[1, 2], y={"z": "()"})']}),
    ('{"a": new Date("x").y(), "b": x => {1}}', {"a": 'new Date("x").y()', "b": "x => {1}"}),
    ('{"a": Rome (Italy, "b": 1}', {"a": "Rome (Italy", "b": 1}),
    ('{"a": Rome, Italy, "b": 1,234}', {"a": "Rome, Italy", "b": "1,234"}),
    ('{"a": 1, "b": "x" * 3}', {"a": 1, "b": 'x" * 3'}),
    ('{"a": [0x10, 1_000, -1.], "b": [2024-11-12, 1/2, --1, ::1, -Infinity]}',
     {"a": [16, 1000, -1], "b": ["2024-11-12", "1/2", "--1", "::1", "-Infinity"]}),
    ('{"a": "x"[0], "b": ["y".f(), "z".join(["1", "2"])], "c": 1}',
     {"a": 'x"[0]', "b": ['y".f()', 'z".join(["1", "2"])'], "c": 1}),
    ('{"a": {"c": "%d" % 3}, "b": "x" -- y\n, "d": \'z\'.f(a=1)}',
     {"a": {"c": '%d" % 3'}, "b": 'x" -- y', "d": "z'.f(a=1)"}),
    ('{"a": "he said "hi", and left", "b": "x", c: 1}', {"a": 'he said "hi", and left', "b": "x", "c": 1}),
    ('{"a": [1][0], "b": {}.x}', {"a": [1], "[0]": None, "b": {}, ".x": None}),
    ('{"a": ' * MAX_DEPTH + '[{"b": "]\\""}]' + "}" * MAX_DEPTH, nested('[{"b": "]\\""}]')),
    ('{"a": ' * 3 * MAX_DEPTH + "1" + "}" * 3 * MAX_DEPTH,
     nested('{"a": ' * 2 * MAX_DEPTH + "1" + "}" * 2 * MAX_DEPTH)),
    ("{}", {}),
]  # fmt: skip
MENDED_PYTHON = [
    ("command='cat << E\nx\nE'", {"command": "cat << E\nx\nE"}),
    ("command=\"a\n'b'\n\", a=1", {"command": "a\n'b'\n", "a": 1}),
    ("command='''a\n'b' \"c\"'''", {"command": "a\n'b' \"c\""}),
    ("a=[1, {'x': (None, true)}], b={'y': -1.5}", {"a": [1, {"x": [None, True]}], "b": {"y": -1.5}}),
    ("command='a' + \"b\" 'c', a=[1] + [2]", {"command": "abc", "a": [1, 2]}),
    ("command=f'a{1 + 1}b', a={1, 2}, b=b'x'", {"command": "a2b", "a": [1, 2], "b": "x"}),
    ("a=60 * 60, b=+1", {"a": 3600, "b": 1}),
    ("command='\\d+\\n', a=r'\\d', b='\\ud83d\\ude00\\ud83d'", {"command": "\\d+\n", "a": "\\d", "b": "😀\ufffd"}),
    ("'ls', 2, b={True: None, 1: 'x'}", {"command": "ls", "a": 2, "b": {"true": None, "1": "x"}}),
    ("class='x', from=1, b-c=[true, None,],", {"class": "x", "from": 1, "b-c": [True, None]}),
    ("**{'a': 1}, command='f(a=\\'x\\')]'", {"a": 1, "command": "f(a='x')]"}),
    ("a='x\r\ny\0'", {"a": "x\r\ny\0"}),
    ("", {}),
]
NO_VALUES = [
    "command=f'{x}'",
    "command='a' + x",
    "command='it's'",
    "command='a', a=x",
    "a=f(1)",
    "a=`x`",
    "a=<b>",
    "a=date(2020, 1, 1)",
    "'ls', 1, [], 4",
    "a=1, a=2",
    "'ls', command='x'",
    "a=[1, 2",
    "a=1e999",
    "a='x' * 3",
    "a=9 ** 9",
    "a='x' 1",
    "a=" + "9" * 5000,
    "a=" + "[" * 5000 + "]" * 5000,
    "a=" + "[" * MAX_DEPTH + "]" * MAX_DEPTH,
]


def parse(tools, pieces, *, is_cut=False):
    parser = MessageFormat(TOOL_FORMATS[tools], special_tokens=SPECIALS).parser(TOOLS)
    deltas = [parser.feed(piece, []) for piece in pieces] + [parser.finish(is_cut=is_cut)]
    calls = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        calls.setdefault(call.index, [call.name, ""])[1] += call.arguments
    return "".join(delta.content for delta in deltas), [tuple(call) for call in calls.values()]


def split(text, cuts):
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:stop] for start, stop in itertools.pairwise(places)]


def sent_back(calls):
    """The arguments in a later request."""
    functions = [{"function": {"name": name, "arguments": text}} for name, text in calls]
    message = template_message("messages[0]", {"role": "assistant", "content": None, "tool_calls": functions})
    return [call["function"]["arguments"] for call in message.get("tool_calls", ())]


@pytest.mark.parametrize("tools", BODIES)
def test_what_is_almost_json_is_mended(tools):
    for body, expected in MENDED:
        text = BODIES[tools] % body
        content, calls = whole = parse(tools, [text])
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [("run", expected)], body
        assert content.strip("]} \n") == "" or body.endswith('{"b": 2}')
        assert sent_back(calls) == [expected]
        assert parse(tools, list(text)) == whole


@pytest.mark.parametrize("tools", BODIES)
def test_json_is_passed_on_as_it_is_and_other_arguments_are_text(tools):
    for body in ('{"b" : [1.50, "\\u00e9"],\n\t"a":{ } , "c":[ ]}', '{ "a": "\\"x\\\\" }'):
        assert parse(tools, [BODIES[tools] % body])[1] == [("run", body)]
    for body in ("[1, 2]", '"x"', "5", "ls -l"):
        content, calls = parse(tools, [BODIES[tools] % body])
        if tools in ("qwen3_coder", "functionary"):  # tags would follow
            assert [json.loads(arguments) for _, arguments in calls] == [{}]
        else:
            assert calls == []
            assert body in content


def test_a_long_string_streams():
    parser = MessageFormat(TOOL_FORMATS["hermes"]).parser(TOOLS)
    pieces = ['<tool_call>{"name": "run", "arguments": {"command": "', "one\n", "two ", 'three"}}</tool_call>']
    found = [[call.arguments for call in parser.feed(piece, []).tool_calls] for piece in pieces]
    assert found == [['{"command": "'], ["one\\n"], ["two "], ['three"}']]


@pytest.mark.parametrize(("source", "expected"), MENDED_PYTHON)
def test_python_values(source, expected):
    text = f"[run({source}), now()]"
    content, calls = whole = parse("pythonic", [text])
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("run", expected), ("now", {})]
    assert content == ""
    assert sent_back(calls) == [expected, {}]
    assert parse("pythonic", list(text)) == whole


@pytest.mark.parametrize("source", NO_VALUES)
def test_a_python_call_without_values_is_text(source):
    text = f"[run({source})]"
    assert parse("pythonic", [text]) == parse("pythonic", list(text)) == (text, [])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('"Rome, Italy"', "Rome, Italy"),
        ("'a\nb'", "a\nb"),
        ("", None),
        ("{\"x\": '1'}", {"x": "1"}),
        ("[1,'a,b',True]", [1, "a,b", True]),
    ],
)
def test_gemma_values_of_other_languages(value, expected):
    ((name, arguments),) = parse("gemma4", [f'<|tool_call>call:run{{a:{value},"b":2}}<tool_call|>'])[1]
    assert (name, json.loads(arguments)) == ("run", {"a": expected, "b": 2})


XML = "<tool_call>\n<function=run>\n<parameter=command>\nls\n</parameter>\n<parameter=b>\n%s\n</parameter>\n</function>"
PIECES = st.sampled_from(
    [
        *"{}[]()\"':,\\+-.<`#%",
        "<b>",
        "</",
        "```",
        "//",
        " /*",
        "*/",
        "\n",
        "\t",
        "\x01",
        '"""',
        "\\u",
        "\\ud83d",
        "\\n",
        "true",
        "None",
        "1",
        "1e9",
        " a",
        "é",
    ]
)
WRAPPERS = [
    *BODIES.items(),
    ("pythonic", "[run(%s)]"),
    ("gemma4", "<|tool_call>call:run{%s}<tool_call|>"),
    ("qwen3_coder", XML),
    ("glm45", "<tool_call>run\n<arg_key>b</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"),
    ("deepseek_v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="run">\n<｜DSML｜parameter name="a" string="false">%s'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "expected"), [("2024-11-12", "2024-11-12"), ("1/2", "1/2"), ("0x10", 16), ("-1.5", -1.5), ("NaN", "NaN")]
)
def test_a_value_of_any_type_is_no_arithmetic(value, expected):
    ((_, arguments),) = parse("deepseek_v4", [dict(WRAPPERS)["deepseek_v4"] % value])[1]
    assert json.loads(arguments) == {"a": expected}


@pytest.mark.parametrize("tools", ["deepseek_v4", "glm45", "pythonic"])
@pytest.mark.parametrize("number", ["1", "True"])
def test_a_value_is_as_deep_as_others_can_be(tools, number):
    deep, too_deep = ("[" * depth + number + "]" * depth for depth in (MAX_DEPTH - 1, MAX_DEPTH))
    prefix = "a=" * (tools == "pythonic")
    ((_, arguments),) = parse(tools, [dict(WRAPPERS)[tools] % (prefix + deep)])[1]
    (value,) = json.loads(arguments).values()
    assert json.dumps(value) == deep.lower()
    if tools != "pythonic":
        ((_, arguments),) = parse(tools, [dict(WRAPPERS)[tools] % too_deep])[1]
        assert list(json.loads(arguments).values()) == [too_deep]


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(WRAPPERS),
    st.lists(PIECES, max_size=25).map("".join) | st.sampled_from([body for body, _ in MENDED + MENDED_PYTHON]),
    st.integers(0, 10_000) | st.none(),
    st.lists(st.integers(0, 10_000), max_size=12),
    st.booleans(),
)
def test_calls_of_any_text_are_json(wrapper, body, end, cuts, is_cut):
    tools, frame = wrapper
    text = frame % body
    text = text if end is None else text[: end % (len(text) + 1)]
    whole = parse(tools, [text], is_cut=is_cut)
    assert parse(tools, split(text, cuts), is_cut=is_cut) == whole
    calls = whole[1]
    if not is_cut:
        assert sent_back(calls) == [json.loads(arguments) for _, arguments in calls]
    sent_back(calls)


@settings(max_examples=80, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=4),
        max_leaves=12,
    ),
    st.booleans(),
    st.integers(0, 10_000),
)
def test_the_completion_of_any_beginning_is_json(value, is_ascii, end):
    text = json.dumps({"a": value}, ensure_ascii=is_ascii)
    assert completion(text) == ""
    begun = text[: end % (len(text) + 1)].rstrip(", ")
    if not begun[-1:].isalnum() and not begun.endswith(("-", ".", "+")):  # of a number or a word
        json.loads(begun + completion(begun))

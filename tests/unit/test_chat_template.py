"""Chat templates render as transformers renders them, and refuse what they cannot render with a reason."""

import functools
import json
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizer_builders import CHATML, byte_level_backend, save

from fleetfoot.tokenizer.chat_template import ChatTemplate
from fleetfoot.tokenizer.tokenizer import Tokenizer

TEMPLATES = {
    "chatml": CHATML,
    # Llama 3: trims content, begins with BOS, writes tools as JSON.
    "trimming": """{{- bos_token }}
{%- if tools is not none and tools %}
    {{- "Tools: " }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n\\n' }}
{%- endif %}""",
    # Mistral: roles must alternate; a namespace, loop controls and an undefined variable.
    "alternating": """{{ bos_token }}{% set ns = namespace(count=0) %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate user/assistant/user/...') }}
    {% endif %}
    {% if message['content'] == 'skip me' %}{% continue %}{% endif %}
    {% set ns.count = ns.count + 1 %}
    {% if message['role'] == 'user' %}
[INST] {{ message['content'] }} [/INST]
    {% else %}
{{ message['content'] }}{{ eos_token }}
    {% endif %}
{% endfor %}{{ ns.count }}{{ not_defined }}""",
    # Qwen3: variables of the caller, reasoning, documents.
    "reasoning": """{% for message in messages %}
{% if message.reasoning_content is defined and enable_thinking is not false %}
<think>{{ message.reasoning_content }}|{{ message.thinking }}</think>
{% endif %}
{{ message.role }}: {{ message.content }}
{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}
{% endfor %}
{% for d in documents or [] %}{{ d.title }}: {{ d.text }};{% endfor %}""",
    # SmolLM3: marks what the model is trained on.
    "generation": """{% for message in messages %}{% if message.role == 'assistant' %}
    {% generation %}{% set x = message.content %}{{ x }}{{ eos_token }}{% endgeneration %}
{% else %}
    {{ message.content }}
{% endif %}{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}{{ dict(a=1) }}{{ x }}""",
    # Multimodal families: content is a list of parts.
    "parts": """{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}
{% endfor %}""",
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi <b>&'\" 你好 😀"}],
    "spaces": [{"role": "user", "content": "  padded \n"}, {"role": "assistant", "content": " yes "}],
    "long": [{"role": ["user", "assistant"][i % 2], "content": f"turn {i}"} for i in range(5)],
    "skip": [{"role": "user", "content": "skip me"}, {"role": "assistant", "content": "{{ not a template }}"}],
    "reasoning": [
        {"role": "user", "content": "think", "name": None},
        {"role": "assistant", "content": "done", "reasoning": "hm"},
        {"role": "user", "content": "more"},
    ],
    "tool": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "é"}}}]},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"b": 1, "a": None}}}]


USER = [{"role": "user", "content": "hi"}]


@functools.cache
def both() -> tuple[Tokenizer, Any]:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        templates = [{"name": name, "template": source} for name, source in TEMPLATES.items()]
        names = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
        save(byte_level_backend(), Path(folder), chat_template=templates, **names)
        return Tokenizer.from_path(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False, "tools": TOOLS, "enable_thinking": False},
        {"add_generation_prompt": False, "documents": [{"title": "t", "text": "x"}], "bos_token": "<other>"},
    ],
)
def test_rendering_matches_transformers(template: str, conversation: str, options: dict[str, Any]) -> None:
    ours, theirs = both()
    messages = CONVERSATIONS[conversation]
    arguments = {"chat_template": template, **options}
    text = ours.apply_chat_template(messages, tokenize=False, **arguments)
    assert text == theirs.apply_chat_template(messages, tokenize=False, **arguments)
    ids = ours.apply_chat_template_ids(messages, **arguments)
    assert ids == theirs.apply_chat_template(messages, return_dict=False, **arguments)


@pytest.mark.parametrize("template", ["chatml", "trimming", "parts"])
@pytest.mark.parametrize(
    "content", ["The answer is", " The answer is  ", "", "turn 0", [{"type": "text", "text": "ab "}]]
)
def test_continue_final_message_matches_transformers(template: str, content: Any) -> None:
    ours, theirs = both()
    if isinstance(content, list) and template != "parts":
        content = content[0]["text"]
    messages = [*CONVERSATIONS["long"], {"role": "assistant", "content": content}]
    arguments: dict[str, Any] = {"chat_template": template, "add_generation_prompt": False}
    text = ours.apply_chat_template(messages, continue_final_message=True, tokenize=False, **arguments)
    # transformers looks up no template by name here, so the source is passed
    arguments["chat_template"] = TEMPLATES[template]
    assert text == theirs.apply_chat_template(messages, continue_final_message=True, tokenize=False, **arguments)
    assert messages[-1]["content"] is content


@pytest.mark.parametrize(
    ("source", "messages", "adds_prompt", "message"),
    [
        (CHATML, USER, True, "pass add_generation_prompt=False"),
        ("{{ messages }}", [{"role": "assistant", "tool_calls": [{}]}], False, "text to continue"),
        ("nothing", USER, False, "does not render the last message"),
    ],
)
def test_no_message_to_continue(source: str, messages: Any, adds_prompt: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source).render(messages, add_generation_prompt=adds_prompt, continue_final_message=True)


@pytest.mark.parametrize("separate_files", [False, True])
def test_which_template_is_used(tmp_path: Path, separate_files: bool) -> None:
    named = {"default": "plain {{ messages[0].content }}", "tool_use": "tools {{ tools[0].type }}"}
    config: Any = [{"name": name, "template": source} for name, source in named.items()]
    if separate_files:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "chat_template.jinja").write_text(named["default"])
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
        config = "the files outrank this"
    tokenizer = Tokenizer.from_path(save(byte_level_backend(), tmp_path, chat_template=config))
    render = functools.partial(tokenizer.apply_chat_template, USER, tokenize=False)
    assert render() == "plain hi"
    assert render(tools=TOOLS) == "tools function"
    assert render(tools=TOOLS, chat_template="default") == "plain hi"
    assert render(chat_template="mine {{ messages[0].role }}") == "mine user"


@pytest.mark.parametrize(
    ("templates", "chat_template", "message"),
    [
        ({}, None, r"no default chat template \(the tokenizer has none\). Pass chat_template="),
        ({"rag": "x"}, None, r"the tokenizer has \['rag'\]"),
        ({"rag": "x"}, "tool_use", r"chat_template='tool_use' is neither .* \['rag'\]"),
    ],
)
def test_an_unknown_template(templates: dict[str, str], chat_template: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tokenizer(byte_level_backend(), chat_templates=templates).apply_chat_template(USER, chat_template=chat_template)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no system role') }}", "refuses these messages: no system role"),
        ("{{ messages[0].content + 1 }}", "fails on these messages: TypeError"),
        ("{{ nothing.at.all }}", "fails on these messages: UndefinedError"),
        ("{{ messages.append(1) }}", "fails on these messages: SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "fails on these messages: SecurityError"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "fails on these messages: SecurityError"),
        ("{{ namespace(__call__=raise_exception)() }}", "fails on these messages: SecurityError"),
        ("fine\n{% for %}", "not valid Jinja, line 2: "),
    ],
)
def test_a_template_that_fails_gives_its_reason(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages must be a list"),
        ({"role": "user", "content": "hi"}, "messages must be a list"),
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] is a str"),
        ([{"content": "hi"}], r"messages\[0\].role is None"),
        ([{"role": 1, "content": "hi"}], r"messages\[0\].role is 1"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], r"messages\[1\] has no content"),
        ([{"role": "user", "content": None}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content is a int"),
        ([{"role": "user", "content": ["hi"]}], r"messages\[0\].content\[0\] is a str"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "type is 'image_url'; only 'text'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\].text is None"),
        ([{"role": "user", "content": "a", "extra": [object()]}], r"messages\[0\].extra\[0\] is a object"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(CHATML).render(messages)


@pytest.mark.parametrize(("name", "value"), [("tools", [print]), ("documents", "text")])
def test_malformed_tools_and_documents_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a list of dicts"):
        ChatTemplate(CHATML).render(USER, **{name: value})


PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]


SHOW = "{% for p in x %}<{{ p.text }}>{% endfor %}"


@pytest.mark.parametrize(
    ("source", "takes_parts", "text"),
    [
        ("{{ messages[0]['content'] | trim }}", False, "one\ntwo"),
        ("{% for line in messages[0].content.split('\\n') %}<{{ line }}>{% endfor %}", False, "<one><two>"),
        ("{% for part in messages[0]['content'] %}<{{ part.text }}>{% endfor %}", True, "<one><two>"),
        ("{% set x = messages[0].content %}" + SHOW, True, "<one><two>"),
        ("{% set x = messages[0].content if true else [] %}" + SHOW, True, "<one><two>"),
        (
            "{% macro show(content) %}{% for p in content | list %}<{{ p.text }}>{% endfor %}{% endmacro %}"
            "{{ show(messages[0].content) }}",
            True,
            "<one><two>",
        ),
    ],
)
def test_text_parts_are_joined_for_templates_that_take_strings_only(source: str, takes_parts: bool, text: str) -> None:
    template = ChatTemplate(source)
    assert template.takes_content_parts is takes_parts
    assert template.render(PARTS) == text


def test_strftime_now_and_tojson_options() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render(USER) == "26 Jul 2024"
    value = {"b": "<é>", "a": [1, None, True]}
    template = ChatTemplate("{{ v | tojson(sort_keys=true, separators=(',', ':'), ensure_ascii=true) }}")
    expected = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert template.render(USER, variables={"v": value}) == expected


CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "None"}}}]
CALLED = [*USER, {"role": "assistant", "content": None, "tool_calls": CALLS}]
DEEPSEEK_CALL = """<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{"a": "None"}
```<｜tool▁call▁end｜>"""
QWEN_CALL = """<|im_start|>user
hi<|im_end|>
<|im_start|>assistant
<think>

</think>

<tool_call>
{"name": "f", "arguments": {"a": "None"}}
</tool_call><|im_end|>
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("deepseek_v3", f"<bos><｜User｜>hi{DEEPSEEK_CALL}"),
        ("qwen3", QWEN_CALL),
        ("{{ messages[1].content is none }} {{ messages[1].tool_calls[0].function.arguments.a }}", "True None"),
        ("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", "[hi][]"),
        ("{{ messages[1].content }}{{ messages[1].tool_calls | tojson }}None", json.dumps(CALLS) + "None"),
        ("{{ '<' + messages[1].content + '>' }}", "<>"),
        ("{{ messages[1].content.split('x')[-1] }}{{ messages[1].tool_calls | length }}", "1"),
        ("{% if messages[1].content is not string %}{{ raise_exception('content') }}{% endif %}<>", "<>"),
        ("{{ '<' + messages[1].tool_calls[0].function.arguments + '>' }}", '<{"a": "None"}>'),
    ],
)
@pytest.mark.parametrize("content", [None, "absent"])
def test_no_content_beside_calls(source: str, expected: str, content: Any) -> None:
    """It is null for templates that ask for that, and an empty text for those that print it or cannot take it."""
    path = Path(__file__).parents[1] / "assets" / "chat_templates" / f"{source[:20]}.jinja"
    template = ChatTemplate(path.read_text() if path.exists() else source)
    messages = [{key: value for key, value in m.items() if value is not None or content is None} for m in CALLED]
    assert template.render(messages, add_generation_prompt=False, variables={"bos_token": "<bos>"}) == expected

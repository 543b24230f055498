"""Tools and reasoning of `LLM.chat`."""

import json
import shutil
from importlib.resources import files

import pytest

from fleetfoot import LLM, SamplingParams
from fleetfoot.outputs import CompletionOutput, RequestOutput

ASK = [{"role": "user", "content": "What is the weather?"}]
CITY = {"enum": ["Rome", "Linz"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("get_weather", "get_mood")]
NAMED = {"type": "function", "function": {"name": "get_mood"}}
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{% if think %}<think>{% endif %}{# </think> #}"


@pytest.fixture(scope="module")
def llm():
    with LLM(device="cpu", dtype="float32", max_num_seqs=4) as made:
        yield made


def test_a_conversation_with_calls(llm):
    function = {"name": "get_mood", "arguments": '{"city": "Rome"}'}
    call = {"id": "a", "type": "function", "function": function}
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "a", "content": "good"})
    (output,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)
    assert '{"name": "get_mood", "arguments": {"city": "Rome"}}' in output.prompt
    function["arguments"] = "{]"
    with pytest.raises(ValueError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is not JSON"):
        llm.chat(messages, use_tqdm=False)
    function["arguments"] = "[" + "[]," * 50_000
    with pytest.raises(
        ValueError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments has up to 100,001 lists"
    ):
        llm.chat(messages, use_tqdm=False)


def test_a_template_that_takes_arguments_as_text(llm):
    """As that of DeepSeek V3."""
    loop = "{% for c in m.tool_calls or [] %}{{ '>' + c.function.arguments }}{% endfor %}"
    template = "{% for m in messages %}" + loop + "{% endfor %}"
    call = {"id": "a", "type": "function", "function": {"name": "get_mood", "arguments": '{"city":  "Rome"}'}}
    messages = [*ASK, {"role": "assistant", "tool_calls": [call]}]
    (output,) = llm.chat(messages, SamplingParams(max_tokens=1), chat_template=template, use_tqdm=False)
    assert output.prompt == '>{"city": "Rome"}'


def test_a_tool_that_does_not_exist_is_refused(llm):
    with pytest.raises(ValueError, match=r"tool_choice\.function\.name is 'x'; the tools are get_weather, get_mood"):
        llm.chat(ASK, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "x"}})


@pytest.mark.parametrize("opens", [True, False])
def test_a_budget_of_reasoning(llm, opens):
    options = {"chat_template": THINKS, "chat_template_kwargs": {"think": opens}, "use_tqdm": False}
    params = SamplingParams(max_tokens=30, temperature=0)
    (output,) = llm.chat(ASK, params, thinking_token_budget=3, **options)
    (message,) = llm.parse_chat(output, chat_template=THINKS)
    assert message.reasoning and message.content
    assert output.outputs[0].text.startswith("<think>") == (not opens)
    with pytest.raises(ValueError, match="thinking_token_budget is 3; it needs a model that marks"):
        llm.chat(ASK, params, thinking_token_budget=3, use_tqdm=False)


CHANNELS = "{% for m in messages %}{{ m.content }}{% endfor %}<|start|>assistant{# <|channel|> <|message|> #}"
HARMONY_TOKENS = {
    "<|end|>": "<|return|>",
    "<|begin|>": "<|end|>",
    "<|pad|>": "<|channel|>",
    "<|user|>": "<|message|>",
    "<|assistant|>": "<|start|>",
    "<|system|>": "<|constrain|>",
}


@pytest.fixture(scope="module")
def harmony(tmp_path_factory):
    """The model, with the tokens of GPT-OSS."""
    folder = tmp_path_factory.mktemp("harmony")
    shutil.copytree(files("fleetfoot.assets") / "story-llama", folder, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        for old, new in HARMONY_TOKENS.items():
            text = text.replace(old, new)
        (folder / name).write_text(text)
    with LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=4) as made:
        yield made


@pytest.mark.parametrize("budget", [3, 0])
@pytest.mark.parametrize("constraint", [None, {"choice": ["yes", "no"]}, {"json_object": True}], ids=str)
def test_a_budget_of_reasoning_in_channels(harmony, constraint, budget):
    params = SamplingParams(max_tokens=60, temperature=0, structured_outputs=constraint)
    options = {"chat_template": CHANNELS, "use_tqdm": False}
    (output,) = harmony.chat(ASK, params, thinking_token_budget=budget, **options)
    (message,) = harmony.parse_chat(output, chat_template=CHANNELS)
    assert bool(message.reasoning) == bool(budget) and "<|" not in message.reasoning + message.content
    assert message.content
    assert constraint is None or message.content.startswith("{" if "json_object" in constraint else ("yes", "no"))


@pytest.mark.parametrize("budget", [3, None])
def test_a_call_is_forced_after_reasoning_in_channels(harmony, budget):
    options = {"tools": TOOLS, "tool_choice": NAMED, "thinking_token_budget": budget, "chat_template": CHANNELS}
    params = SamplingParams(max_tokens=200, temperature=0, bad_words=[] if budget else ["analysis"])
    (output,) = harmony.chat(ASK, params, use_tqdm=False, **options)
    (message,) = harmony.parse_chat(output, TOOLS, chat_template=CHANNELS)
    assert bool(message.reasoning) == bool(budget) and not message.content
    assert [call.name for call in message.tool_calls] == ["get_mood"]
    assert json.loads(message.tool_calls[0].arguments)["city"] in CITY["enum"]


def test_parsers_by_name(llm):
    tokenizer = llm.get_tokenizer()
    text = '<think>Hm.</think>\n\n<tool_call>\n{"name": "get_mood", "arguments": {"city": "Rome"}}\n</tool_call>'
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    output = RequestOutput("a", None, [1], [CompletionOutput(0, text, token_ids, finish_reason="stop")], True)
    (message,) = llm.parse_chat(output, TOOLS, tool_call_parser="hermes", reasoning_parser="qwen3")
    assert (message.content, message.reasoning) == ("", "Hm.")
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("get_mood", '{"city": "Rome"}')]
    with pytest.raises(ValueError, match="tool_call_parser is 'x'"):
        llm.parse_chat(output, TOOLS, tool_call_parser="x")

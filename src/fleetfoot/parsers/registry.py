"""The formats by name, and the ones of a model's chat template."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from fleetfoot.parsers.base import MessageParser, PlainParser, Tool
from fleetfoot.parsers.gemma import GemmaFormat
from fleetfoot.parsers.harmony import FINAL, HarmonyFormat, HarmonyParser
from fleetfoot.parsers.json_calls import JsonFormat
from fleetfoot.parsers.message import ReasoningFormat, TextParser, ToolFormat
from fleetfoot.parsers.mistral import MistralFormat
from fleetfoot.parsers.pythonic import PythonicFormat
from fleetfoot.parsers.sections import SectionFormat
from fleetfoot.parsers.xml_calls import XmlFormat

logger = logging.getLogger(__name__)

_F = TypeVar("_F")

_DEEPSEEK = partial(
    SectionFormat,
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
)
_KIMI_SECTION = "<|tool_calls_section_begin|>"
_GLM = partial(
    XmlFormat, function=("", ""), function_end="", key=("<arg_key>", "</arg_key>"), value="<arg_value>",
    value_end="</arg_value>", guesses_types=True,
)  # fmt: skip
_DSML = partial(
    XmlFormat, function=('<｜DSML｜invoke name="', '">'), function_end="</｜DSML｜invoke>",
    key=('<｜DSML｜parameter name="', ""), kinds=('" string="true">', '" string="false">'),
    value_end="</｜DSML｜parameter>",
)  # fmt: skip
_HY_V3 = XmlFormat(
    section=("<tool_calls:opensource>", "</tool_calls:opensource>"), call="<tool_call:opensource>",
    call_end="</tool_call:opensource>", function=("", "<tool_sep:opensource>"), function_end="",
    key=("<arg_key:opensource>", "</arg_key:opensource>"), value="<arg_value:opensource>",
    value_end="</arg_value:opensource>", guesses_types=True,
)  # fmt: skip
_MINICPM5 = XmlFormat(
    call="", call_end="", function=('<function name="', '">'), key=('<param name="', '">'),
    value_end="</param>", quotes=("<![CDATA[", "]]>"), newline="", guesses_types=True,
)  # fmt: skip
_STEP3 = XmlFormat(
    section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"), call="<｜tool_call_begin｜>function<｜tool_sep｜>",
    call_end="<｜tool_call_end｜>", function=('<steptml:invoke name="', '">'), function_end="</steptml:invoke>",
    key=('<steptml:parameter name="', '">'), value_end="</steptml:parameter>",
)  # fmt: skip
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "apertus": JsonFormat(("<|tools_prefix|>",), "<|tools_suffix|>", is_list=True, is_keyed=True),
    "cohere_command3": JsonFormat(
        ("<|START_ACTION|>",), "<|END_ACTION|>", name_key="tool_name", arguments_key="parameters", is_list=True
    ),
    "deepseek_v3": _DEEPSEEK(has_fence=True),
    "deepseek_v31": _DEEPSEEK(),
    "deepseek_v32": _DSML(call="<｜DSML｜function_calls>", call_end="</｜DSML｜function_calls>"),
    "deepseek_v4": _DSML(call="<｜DSML｜tool_calls>", call_end="</｜DSML｜tool_calls>"),
    "functionary": XmlFormat(call="", call_end="", has_json=True),
    "functiongemma": GemmaFormat("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": GemmaFormat("<|tool_call>", "<tool_call|>", '<|"|>'),
    "gigachat3": JsonFormat(("<|function_call|>", "function call<|role_sep|>"), "<|message_sep|>"),
    "glm45": _GLM(),
    "glm47": _GLM(newline=""),
    "granite": JsonFormat(("<|tool_call|>", "<tool_call>"), is_list=True),
    "granite-20b-fc": JsonFormat(("<function_call>",), separator="\n", padding=" "),
    "hermes": JsonFormat(("<tool_call>",), "</tool_call>", separator="\n", padding="\n"),
    "hy_v3": _HY_V3,
    "internlm": JsonFormat(("<|action_start|><|plugin|>",), "<|action_end|>", arguments_key="parameters", padding="\n"),
    "jamba": JsonFormat(("<tool_calls>",), "</tool_calls>", is_list=True),
    "json": JsonFormat(("[", "{", "```json", "<tool_call>"), "```"),
    "kimi_k2": SectionFormat(
        *(_KIMI_SECTION, "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        has_ids=True,
    ),
    "llama3_json": JsonFormat(("{", "<|python_tag|>"), separator="; ", arguments_key="parameters"),
    "longcat": JsonFormat(("<longcat_tool_call>",), "</longcat_tool_call>", separator="\n", padding="\n"),
    "minicpm5": _MINICPM5,
    "minimax_m2": XmlFormat(
        call="<minimax:tool_call>",
        call_end="</minimax:tool_call>",
        function=('<invoke name="', '">'),
        function_end="</invoke>",
        key=('<parameter name="', '">'),
    ),
    "mistral": MistralFormat(has_list=False),
    "mistral_json": MistralFormat(has_list=True),
    "nemotron_json": JsonFormat(("<TOOLCALL>",), "</TOOLCALL>", is_list=True),
    "openai": HarmonyFormat(),
    "phi4_mini_json": JsonFormat(("<|tool_call|>", "functools"), "<|/tool_call|>", is_list=True),
    "pythonic": PythonicFormat(),
    "qwen3_coder": XmlFormat(padding="\n"),
    "seed_oss": XmlFormat(call="<seed:tool_call>", call_end="</seed:tool_call>"),
    "step3": _STEP3,
}
TOOL_ALIASES = {
    "deepseek_r1": "deepseek_v3",
    "ernie45": "hermes",
    "granite4": "hermes",
    "harmony": "openai",
    "hunyuan_a13b": "jamba",
    "lfm2": "pythonic",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "mimo": "qwen3_coder",
    "minimax": "jamba",
    "minimax_m1": "jamba",
    "olmo3": "pythonic",
    "poolside_v1": "glm45",
    "qwen3": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "xlam": "json",
}
_THINK = partial(ReasoningFormat, ("<think>",), ("</think>",))
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "apertus": ReasoningFormat(("<|inner_prefix|>",), ("<|inner_suffix|>",)),
    "apriel": ReasoningFormat(
        ("Here are my reasoning steps:",), ("[BEGIN FINAL RESPONSE]",), wrappers=("[END FINAL RESPONSE]",)
    ),
    "cohere_command3": ReasoningFormat(("<|START_THINKING|>",), ("<|END_THINKING|>",)),
    "deepseek_r1": _THINK(is_implied=True),
    "ernie45": _THINK(wrappers=("<response>", "</response>")),
    "gemma4": ReasoningFormat(("<|channel>thought",), ("<channel|>",)),
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    "hunyuan_a13b": _THINK(wrappers=("<answer>", "</answer>")),
    "hy_v3": ReasoningFormat(("<think:opensource>",), ("</think:opensource>",)),
    "kimi_k2": _THINK(stops=(_KIMI_SECTION,)),
    "longcat": ReasoningFormat(("<longcat_think>",), ("</longcat_think>",)),
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",)),
    "openai": ReasoningFormat((), (FINAL,)),
    "qwen3": _THINK(),
    "seed_oss": ReasoningFormat(("<seed:think>",), ("</seed:think>",)),
}
REASONING_ALIASES = {
    "deepseek_v3": "qwen3",
    "deepseek_v31": "qwen3",
    "deepseek_v32": "qwen3",
    "deepseek_v4": "qwen3",
    "glm45": "qwen3",
    "glm47": "qwen3",
    "holo2": "qwen3",
    "mimo": "qwen3",
    "minimax_m2": "qwen3",
    "nemotron_v3": "qwen3",
    "openai_gptoss": "openai",
    "harmony": "openai",
    "olmo3": "deepseek_r1",
    "poolside_v1": "qwen3",
    "qwq": "deepseek_r1",
    "step3": "deepseek_r1",
    "step3p5": "qwen3",
    "think": "qwen3",
}

_SINGLE_CALL = "only supports single tool-calls"
"""In an error of Llama's chat templates."""

# The first row of which all texts are in a chat template names its format.
_TOOL_MARKS = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("apertus", ("<|tools_prefix|>",)),
    ("deepseek_v32", ("｜DSML｜", "function_calls")),
    ("deepseek_v4", ("｜DSML｜",)),
    ("gemma4", ("<|tool_call>call:",)),
    ("functiongemma", ("<start_function_call>",)),
    ("gigachat3", ("<|role_sep|>", "<|message_sep|>", "tool_calls")),
    ("hy_v3", ("<tool_sep", ":opensource")),
    ("internlm", ("<|plugin|>", "<|action_start|>")),
    ("longcat", ("<longcat_tool_call>",)),
    ("minicpm5", ('<function name="', '<param name="')),
    ("step3", ("<｜tool_calls_begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("kimi_k2", ("<|im_middle|>", "tool_declare")),
    ("glm47", ("<tool_call>{function-name}<arg_key>",)),
    ("glm45", ("<arg_key>",)),
    ("cohere_command3", ("<|START_ACTION|>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral_json", ("[TOOL_CALLS]",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("jamba", ("<tool_calls>",)),
    ("hermes", ("<tool_call>",)),
    ("functionary", ("<function=", "</function>")),
    ("granite-20b-fc", ("<function_call>",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("pythonic", ("<|tool_list_start|>",)),
    ("phi4_mini_json", ("<|/tool_call|>",)),
    ("phi4_mini_json", ("<|tool|>",)),
    ("phi4_mini_json", ("functools[",)),
    ("granite", ("<|tool_call|>",)),
    ("granite", ("<|start_of_role|>", "tools")),
    ("nemotron_json", ("<TOOLCALL>",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters": ', "function name")),
    ("pythonic", ("[func_name1(",)),
    ("pythonic", ("<function_calls>", "pythonic")),
    ("pythonic", ("List of tools: [", "keep_past_thinking")),
)
_REASONING_MARKS = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("apertus", ("<|inner_prefix|>",)),
    ("apriel", ("Here are my reasoning steps", "[BEGIN FINAL RESPONSE]")),
    ("gemma4", ("<|channel>thought",)),
    ("hy_v3", ("<think", ":opensource")),
    ("longcat", ("<longcat_think>",)),
    ("mistral", ("[THINK]",)),
    ("seed_oss", ("<seed:think>",)),
    ("cohere_command3", ("<|START_THINKING|>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "<think>")),
    ("granite", ("Here is my thought process",)),
    ("hunyuan_a13b", ("<think>", "<answer>")),
    ("qwen3", ("<minimax:tool_call>",)),
    ("ernie45", ("<think>", "<response>")),
    ("qwen3", ("</think>",)),
    ("qwen3", ("<think>",)),
)


@dataclass(frozen=True)
class MessageFormat:
    """How a model writes messages: its reasoning and its calls of tools."""

    tools: ToolFormat
    reasoning: ReasoningFormat | None = None
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """The tokenizer's: token -> id."""
    text_tokens: Mapping[str, int] = field(default_factory=dict)
    """Its other added tokens, which are text, too."""
    is_guessed: bool = False
    """Whether the chat template has no mark of a known format of calls."""
    is_single: bool = False
    """Whether the chat template refuses messages with several calls."""

    @property
    def is_harmony(self) -> bool:
        return isinstance(self.tools, HarmonyFormat)

    def keeps_special_tokens(self, *, has_tools: bool) -> bool:
        """Whether the text must have the special tokens, for the parser to see them. It drops the others."""
        markers = (*(self.tools.markers if has_tools else ()), *(self.reasoning.markers if self.reasoning else ()))
        return self.is_harmony or any(marker in self.special_tokens for marker in markers)

    def parser(
        self,
        functions: Sequence[Tool],
        *,
        is_reasoning: bool = False,
        hides_special_tokens: bool = True,
        max_calls: int | None = None,
        is_forced: bool = False,
    ) -> MessageParser:
        """The parser of one sequence.

        Args:
            functions: those that can be called; (): calls are content.
            is_reasoning: whether the text begins with reasoning.
            hides_special_tokens: whether special tokens without a meaning in the format are dropped.
            is_forced: whether nothing but calls follows reasoning.
        """
        by_name = {tool.name: tool for tool in functions}
        hidden = self.special_tokens if hides_special_tokens else ()
        if self.is_harmony:
            return HarmonyParser(by_name, hidden=hidden, max_calls=max_calls)
        tools = self.tools if functions else None
        if tools is None and self.reasoning is None:
            return PlainParser()
        options: Any = {"hidden": hidden, "max_calls": max_calls, "is_forced": is_forced}
        return TextParser(self.reasoning, tools, by_name, is_reasoning=is_reasoning, **options)


def tool_format(name: str) -> ToolFormat:
    """Raises ValueError for an unknown name."""
    return _find("tool_call_parser", name, TOOL_FORMATS, TOOL_ALIASES)


def reasoning_format(name: str) -> ReasoningFormat:
    """Raises ValueError for an unknown name."""
    return _find("reasoning_parser", name, REASONING_FORMATS, REASONING_ALIASES)


def _find(setting: str, name: str, formats: Mapping[str, _F], aliases: Mapping[str, str]) -> _F:
    found = formats.get(aliases.get(name, name))
    if found is None:
        known = ", ".join(sorted({*formats, *aliases}))
        raise ValueError(f"{setting} is {name!r}; it must be one of {known}")
    return found


def check_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raises ValueError for an unknown name."""
    if tool_call_parser is not None:
        tool_format(tool_call_parser)
    if reasoning_parser is not None:
        reasoning_format(reasoning_parser)


def message_format(
    template: str,
    special_tokens: Mapping[str, int],
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    text_tokens: Mapping[str, int] = MappingProxyType({}),
) -> MessageFormat:
    """The format of a model.

    Args:
        template: the source of its chat template, which names the format unless the parsers are given.
        special_tokens: token -> id.
        text_tokens: other added tokens.
    """
    known = tool_parser or _detect(template, _TOOL_MARKS)
    tools = known or "json"
    reasoning = reasoning_parser or _detect(template, _REASONING_MARKS)
    form = reasoning_format(reasoning) if reasoning else None
    logger.info("format of tool calls: %s; of reasoning: %s", tools, reasoning or "none")
    kinds = {"is_guessed": known is None, "is_single": _SINGLE_CALL in template}
    return MessageFormat(tool_format(tools), form, special_tokens, text_tokens, **kinds)


def _detect(template: str, marks: Sequence[tuple[str, tuple[str, ...]]]) -> str | None:
    return next((name for name, texts in marks if all(text in template for text in texts)), None)

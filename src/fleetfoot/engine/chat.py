"""Tools and reasoning of a conversation: from the fields of a request to the parser of what is generated."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fleetfoot.parsers.base import MessageDelta, MessageParser, Tool
from fleetfoot.parsers.grammar import arguments_schema, forced_calls, strict_calls
from fleetfoot.parsers.registry import MessageFormat, message_format
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from fleetfoot.tokenizer.tokenizer import Tokenizer

_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,256}")
_NUM_LAST_TOKENS = 32  # of a prompt: the marks of reasoning at its end have fewer


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and which calls it takes. Errors name the field of OpenAI's form."""

    schemas: tuple[Mapping[str, Any], ...] = ()
    """As chat templates take them; empty if no call is taken."""
    functions: tuple[Tool, ...] = ()
    """Those that can be called."""
    is_forced: bool = False
    """Whether there must be a call."""
    is_single: bool = False
    """Whether there can be only one call."""

    @property
    def is_strict(self) -> bool:
        return any(tool.is_strict for tool in self.functions)

    @classmethod
    def of(cls, tools: Sequence[Any] | None, choice: Any = "auto", *, is_parallel: bool = True) -> ToolUse:
        """Raises ValueError, which begins with the path of the field.

        Args:
            tools: ``{"type": "function", "function": {"name", "description", "parameters", "strict"}}``.
            choice: ``auto``, ``none``, ``required``, ``{"type": "function", "function": {"name": ...}}``, or
                ``{"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}``.
        """
        functions = _read_tools(tools)
        if choice is None or choice == "none" or (choice == "auto" and not functions):
            return cls()
        names, is_forced, is_named = _read_choice(choice, functions)
        chosen = tuple(tool for name, tool in functions.items() if name in names)
        return cls(tuple(tools or ()), chosen, is_forced, is_named or not is_parallel)


def _read_tools(tools: Any) -> dict[str, Tool]:
    if tools is not None and not isinstance(tools, list | tuple):
        raise ValueError(f"tools is {tools!r:.100}; it must be a list")
    functions: dict[str, Tool] = {}
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}]"
        kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
        if kind != "function":
            shown = repr(kind) if isinstance(tool, Mapping) else f"{tool!r:.100}"
            raise ValueError(f"{where}.type is {shown}; only 'function' is supported")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise ValueError(f"{where}.function is {function!r:.100}; it must be an object with a name")
        name = _checked_name(f"{where}.function.name", function.get("name"))
        if name in functions:
            raise ValueError(f"{where}.function.name is {name!r}, as that of another tool; names must differ")
        for field, type_, expected in (
            ("parameters", Mapping, "a JSON schema"),
            ("description", str, "a string"),
            ("strict", bool, "true or false"),
        ):
            value = function.get(field)
            if value is not None and not isinstance(value, type_):
                raise ValueError(f"{where}.function.{field} is {value!r:.100}; it must be {expected}")
        parameters = function.get("parameters") or {}
        if parameters.get("type", "object") != "object":
            kind = parameters["type"]
            raise ValueError(f"{where}.function.parameters.type is {kind!r:.100}; arguments are an 'object'")
        functions[name] = Tool.of(tool)
    return functions


def _checked_name(where: str, name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{where} is {name!r:.300}; it must have 1 to 256 letters, digits or _ . : / -")
    return name


def _read_choice(choice: Any, functions: Mapping[str, Tool]) -> tuple[list[str], bool, bool]:
    """The names that can be called, whether one must be, and whether it is a named one."""
    if choice in ("auto", "required"):
        if not functions:
            raise ValueError(f"tool_choice is {choice!r}, but there are no tools; give tools")
        return list(functions), choice == "required", False
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        return [_known(f"tool_choice.function.name is {name!r:.100}", name, functions)], True, True
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
        if mode not in ("auto", "required"):
            raise ValueError(f"tool_choice.allowed_tools.mode is {mode!r:.100}; it must be 'auto' or 'required'")
        names = []
        for index, tool in enumerate(allowed.get("tools") or ()):
            name = (tool.get("function") or tool).get("name") if isinstance(tool, Mapping) else None
            names.append(_known(f"tool_choice.allowed_tools.tools[{index}] is {name!r:.100}", name, functions))
        return names, mode == "required", False
    raise ValueError(
        f"tool_choice is {choice!r:.100}; it must be 'auto', 'none', 'required' or "
        "{'type': 'function', 'function': {'name': ...}}"
    )


def _known(begin: str, name: Any, functions: Mapping[str, Tool]) -> str:
    if name not in functions:
        raise ValueError(f"{begin}; the tools are {', '.join(functions) or 'none'}")
    return str(name)


# --- messages ---------------------------------------------------------------------------------------------------------


def template_message(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates take it: arguments of calls as objects, and no content as an empty text.

    Raises ValueError, which begins with the path of the field.
    """
    calls = message.get("tool_calls")
    if message.get("role") == "tool" and not isinstance(message.get("tool_call_id", ""), str):
        raise ValueError(f"{where}.tool_call_id is {message['tool_call_id']!r:.100}; it must be a string")
    if calls is None or calls == []:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    if not isinstance(calls, list | tuple):
        raise ValueError(f"{where}.tool_calls is {calls!r:.100}; it must be a list")
    read = [_read_call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)]
    content = message.get("content")
    return {**message, "content": "" if content is None else content, "tool_calls": read}


def _read_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}.function is {function!r:.100}; it must be an object with a name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"{where}.function.arguments is not JSON: {error}") from None
    arguments = arguments or {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{where}.function.arguments is {arguments!r:.100}; it must be the text of a JSON object")
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


# --- formats ----------------------------------------------------------------------------------------------------------


class ChatFormats:
    """The formats of a model's messages, by chat template.

    Args:
        tool_parser, reasoning_parser: their names; None: as the template has it.
    """

    def __init__(self, tokenizer: Tokenizer, tool_parser: str | None = None, reasoning_parser: str | None = None):
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        special_tokens = {token.content: token_id for token_id, token in added if token.special}
        self._of = lru_cache(16)(
            lambda source: message_format(source, special_tokens, tool_parser, reasoning_parser),
        )

    def of(self, chat_template: str | None, *, has_tools: bool) -> MessageFormat:
        """Raises ValueError: there is no template."""
        return self._of(self.tokenizer.get_chat_template(chat_template, True if has_tools else None))

    def expect(
        self,
        chat_template: str | None,
        tools: ToolUse,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        continued: str | None = None,
    ) -> ExpectedMessages:
        """What a request generates.

        Args:
            params: changed to what the request needs.
            continued: the text of a last message that is continued.

        Raises:
            ValueError: the parameters do not fit.
        """
        form = self.of(chat_template, has_tools=bool(tools.schemas))
        reasoning, is_reasoning, end = form.reasoning, False, continued
        if reasoning is not None:
            if end is None:
                end = self.tokenizer.decode(list(prompt_token_ids[-_NUM_LAST_TOKENS:]))
            is_reasoning = reasoning.is_open(end, is_continued=continued is not None)
        constraint = _constraint(form, tools, params.structured_outputs)
        if constraint is not None and reasoning is not None and end is not None and constraint.reasoning_end is None:
            if is_reasoning:
                constraint.reasoning_end = reasoning.end[0]
            elif continued is None and reasoning.is_possible(end) and not (form.is_harmony and tools.is_forced):
                constraint.reasoning_end = reasoning.end[0]
                constraint.reasoning_begin = reasoning.begin[0] if reasoning.begin else None
        params.structured_outputs = constraint
        hides = params.skip_special_tokens
        if hides and form.keeps_special_tokens(has_tools=bool(tools.functions)):
            params.skip_special_tokens = False
        return ExpectedMessages(form, tools, is_reasoning=is_reasoning, hides_special_tokens=hides)


def _constraint(
    form: MessageFormat, tools: ToolUse, given: StructuredOutputsParams | None
) -> StructuredOutputsParams | None:
    """What the output must look like, reasoning apart: that of the request, or with valid calls of tools."""
    is_json = given is not None and (given.json is not None or given.json_object)
    if not tools.functions or (given is not None and not is_json and not tools.is_forced):
        return copy(given)
    options: dict[str, Any] = {"special_tokens": form.special_tokens, "is_single": tools.is_single}
    if tools.is_forced:
        text = forced_calls(form.tools, tools.functions, **options)
    elif given is not None:
        schema = json.loads(given.json) if isinstance(given.json, str) else given.json
        text = forced_calls(
            form.tools, tools.functions, answer={"type": "object"} if schema is None else schema, **options
        )
    elif tools.is_strict and not form.is_harmony:
        text = strict_calls(form.tools, tools.functions, **options)
    else:
        return None
    return StructuredOutputsParams(grammar=json.dumps({"grammars": [{"lark_grammar": text}]}))


def find_schema_error(tools: ToolUse) -> str | None:
    """The tool with parameters that cannot be compiled, and the reason."""
    from llguidance import LLMatcher

    from fleetfoot.structured.grammars import make_grammar

    for index, tool in enumerate(tools.schemas):
        schema = arguments_schema(Tool.of(tool))
        try:
            make_grammar(StructuredOutputsParams(json=schema), (), LLMatcher.validate_grammar)
        except ValueError as error:
            return str(error).replace("structured_outputs.json", f"tools[{index}].function.parameters")
    return None


class ExpectedMessages:
    """The messages of one request, before they are generated."""

    def __init__(self, form: MessageFormat, tools: ToolUse, *, is_reasoning: bool, hides_special_tokens: bool) -> None:
        self._form = form
        self._tools = tools
        self._is_reasoning = is_reasoning
        self._hides = hides_special_tokens

    @property
    def can_reason(self) -> bool:
        return self._form.reasoning is not None

    def parser(self) -> MessageParser:
        """The parser of one sequence."""
        return self._form.parser(
            self._tools.functions,
            is_reasoning=self._is_reasoning,
            hides_special_tokens=self._hides,
            max_calls=1 if self._tools.is_single else None,
        )

    def parse(self, text: str, token_ids: Sequence[int]) -> MessageDelta:
        """A whole text."""
        parser = self.parser()
        return merge_deltas(parser.feed(text, token_ids), parser.finish())


def merge_deltas(first: MessageDelta, second: MessageDelta) -> MessageDelta:
    """One delta of two, in which each call has one entry."""
    calls = list(first.tool_calls)
    for call in second.tool_calls:
        if calls and calls[-1].index == call.index:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + call.arguments)
        else:
            calls.append(call)
    return MessageDelta(first.content + second.content, first.reasoning + second.reasoning, calls)

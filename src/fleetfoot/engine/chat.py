"""Tools and reasoning of a conversation: from the fields of a request to the parser of what is generated."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from fleetfoot.outputs import CompletionOutput, RequestOutput
from fleetfoot.parsers.base import MessageDelta, MessageParser, Tool, ToolCallDelta
from fleetfoot.parsers.grammar import Rules, arguments_schema, forced_calls, loosened, split_added, strict_calls
from fleetfoot.parsers.harmony import THOUGHT, THOUGHT_END, HarmonyFormat
from fleetfoot.parsers.registry import TOOL_FORMATS, MessageFormat, message_format
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.structured_outputs import StructuredOutputsParams
from fleetfoot.structured.schemas import check_size, simplified
from fleetfoot.tokenizer.text_stream import TextStream
from fleetfoot.utils.validation import FieldError, shown

if TYPE_CHECKING:
    from fleetfoot.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,256}")
_ANY_TOKENS = "start: <[*]>*"
_HIDDEN_TOOLS = "shows no tools to the model, which are called only if that is forced"
_GUESSED_FORMAT = "has no mark of a known format of tool calls, which are read as JSON"
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

    @classmethod
    def for_chat(cls, tools: Any, choice: Any, *, is_parallel: bool) -> ToolUse:
        """The tool use of an offline call, where tools that nothing is enforced for may have any form. Raises
        ValueError."""
        functions = [tool.get("function") for tool in tools or () if isinstance(tool, Mapping)]
        is_strict = any(isinstance(function, Mapping) and function.get("strict") for function in functions)
        if choice == "none" or (choice == "auto" and not is_strict):
            return cls()
        return cls.of(tools, choice, is_parallel=is_parallel)


def _read_tools(tools: Any) -> dict[str, Tool]:
    if tools is not None and not isinstance(tools, list | tuple):
        raise FieldError("tools", f"is {shown(tools)}; it must be a list", tools)
    functions: dict[str, Tool] = {}
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}]"
        kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
        if kind != "function":
            found = repr(kind) if isinstance(tool, Mapping) else f"{tool!r:.100}"
            raise FieldError(f"{where}.type", f"is {found}; only 'function' is supported", kind)
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise FieldError(f"{where}.function", f"is {shown(function)}; it must be an object with a name", function)
        name = _checked_name(f"{where}.function.name", function.get("name"))
        if name in functions:
            raise FieldError(
                f"{where}.function.name", f"is {shown(name)}, as that of another tool; names must differ", name
            )
        for field, type_, expected in (
            ("parameters", Mapping, "a JSON schema"),
            ("description", str, "a string"),
            ("strict", bool, "true or false"),
        ):
            value = function.get(field)
            if value is not None and not isinstance(value, type_):
                raise FieldError(f"{where}.function.{field}", f"is {shown(value)}; it must be {expected}", value)
        parameters = function.get("parameters") or {}
        if parameters.get("type", "object") != "object":
            kind = parameters["type"]
            raise FieldError(f"{where}.function.parameters.type", f"is {shown(kind)}; arguments are an 'object'", kind)
        functions[name] = Tool.of(tool)
    return functions


def _checked_name(where: str, name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise FieldError(where, f"is {shown(name)}; it must have 1 to 256 letters, digits or _ . : / -", name)
    return name


def _read_choice(choice: Any, functions: Mapping[str, Tool]) -> tuple[list[str], bool, bool]:
    """The names that can be called, whether one must be, and whether it is a named one."""
    if choice in ("auto", "required"):
        if not functions:
            raise FieldError("tool_choice", f"is {shown(choice)}, but there are no tools; give tools", choice)
        return list(functions), choice == "required", False
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        return [_known("tool_choice.function.name", name, functions)], True, True
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
        if mode not in ("auto", "required"):
            raise FieldError(
                "tool_choice.allowed_tools.mode", f"is {shown(mode)}; it must be 'auto' or 'required'", mode
            )
        names = []
        for index, tool in enumerate(allowed.get("tools") or ()):
            name = (tool.get("function") or tool).get("name") if isinstance(tool, Mapping) else None
            names.append(_known(f"tool_choice.allowed_tools.tools[{index}]", name, functions))
        return names, mode == "required", False
    raise FieldError(
        "tool_choice",
        f"is {shown(choice)}; it must be 'auto', 'none', 'required' or "
        "{'type': 'function', 'function': {'name': ...}}",
        choice,
    )


def _known(field: str, name: Any, functions: Mapping[str, Tool]) -> str:
    if name not in functions:
        raise FieldError(field, f"is {shown(name)}; the tools are {', '.join(functions) or 'none'}", name)
    return str(name)


# --- formats ----------------------------------------------------------------------------------------------------------


class ChatFormats:
    """The formats of a model's messages, by chat template.

    Args:
        tool_parser, reasoning_parser: their names; None: as the template has it.
    """

    def __init__(self, tokenizer: Tokenizer, tool_parser: str | None = None, reasoning_parser: str | None = None):
        self.tokenizer = tokenizer
        self._has_warned = False
        special_tokens, text_tokens = split_added(tokenizer.added_tokens_decoder)
        self._of = lru_cache(16)(
            lambda source: message_format(source, special_tokens, tool_parser, reasoning_parser, text_tokens),
        )

    def of(self, chat_template: str | None, *, has_tools: bool) -> MessageFormat:
        """Raises ValueError: there is no template."""
        source = self.tokenizer.get_chat_template(chat_template, True if has_tools else None)
        form = self._of(source)
        if has_tools and not self._has_warned and ("tools" not in source or form.is_guessed):
            self._has_warned = True
            problem = _GUESSED_FORMAT if "tools" in source else _HIDDEN_TOOLS
            logger.warning("the chat template %s (--tool-call-parser: %s)", problem, ", ".join(TOOL_FORMATS))
        return form

    def expect(
        self,
        chat_template: str | None,
        tools: ToolUse,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        continued: str | None = None,
        thinking_token_budget: int | None = None,
    ) -> ExpectedMessages:
        """What a request generates. Raises ValueError: there is no template, or a field does not fit.

        Args:
            continued: the text of a last message that is continued.
            thinking_token_budget: the most tokens of reasoning, if the model reasons.
        """
        form = self.of(chat_template, has_tools=bool(tools.schemas))
        if form.is_single and tools.is_forced:
            tools = replace(tools, is_single=True)
        if form.is_harmony and continued is None:
            constraint = _harmony_constraint(form, tools, params.structured_outputs, thinking_token_budget)
            return ExpectedMessages(form, tools, _constrained(params, constraint))
        if form.reasoning is None:
            return ExpectedMessages(form, tools, _constrained(params, _constraint(form, tools, params)))
        end = continued
        if end is None:
            end = self.tokenizer.decode(list(prompt_token_ids[-_NUM_LAST_TOKENS:]))
        is_open = form.reasoning.is_open(end, is_continued=continued is not None)
        constraint = _constraint(form, tools, params)
        can_reason = is_open or (continued is None and form.reasoning.is_possible(end))
        if can_reason:
            constraint = _after_reasoning(form, constraint, thinking_token_budget, is_open=is_open)
        return ExpectedMessages(form, tools, _constrained(params, constraint), is_reasoning=is_open)


def _after_reasoning(
    form: MessageFormat, constraint: StructuredOutputsParams | None, budget: int | None, *, is_open: bool
) -> StructuredOutputsParams | None:
    """The constraint after reasoning, which ends after ``budget`` tokens."""
    assert form.reasoning is not None
    if constraint is None and budget is not None:
        constraint = StructuredOutputsParams(grammar=_ANY_TOKENS)
    if constraint is not None and constraint.reasoning_end is None:
        constraint.reasoning_end = form.reasoning.end[0]
        constraint.max_reasoning_tokens = budget
        if not is_open and form.reasoning.begin:
            constraint.reasoning_begin = form.reasoning.begin[0]
    return constraint


def _constrained(params: SamplingParams, constraint: StructuredOutputsParams | None) -> SamplingParams:
    """The parameters with a constraint; the same object without one."""
    if constraint is None:
        return params
    params = copy(params)
    params.structured_outputs = constraint
    return params


def _constraint(form: MessageFormat, tools: ToolUse, params: SamplingParams) -> StructuredOutputsParams | None:
    """What the output must look like, reasoning apart: that of the request, or with valid calls of tools."""
    given = params.structured_outputs
    takes_calls = given is None or given.json is not None or given.json_object
    if not tools.functions or not (tools.is_forced or takes_calls):
        return copy(given)
    if tools.is_forced or given is not None:
        _check_sizes(tools.functions)
    elif tools.is_strict:
        _check_sizes(loosened(tools.functions))
    options: dict[str, Any] = {"special_tokens": form.special_tokens, "text_tokens": form.text_tokens}
    options |= {"is_single": tools.is_single, "prepared": prepared_schema}
    if tools.is_forced:
        text = forced_calls(form.tools, tools.functions, **options)
    elif given is not None:
        constraint = copy(given)
        constraint.frame = forced_calls(form.tools, tools.functions, has_answer=True, **options)
        return constraint
    elif tools.is_strict:
        text = strict_calls(form.tools, tools.functions, **options)
    else:
        return None
    return StructuredOutputsParams(grammar=json.dumps({"grammars": [{"lark_grammar": text}]}))


def _harmony_constraint(
    form: MessageFormat, tools: ToolUse, given: StructuredOutputsParams | None, budget: int | None
) -> StructuredOutputsParams | None:
    """As `_constraint`, of a whole message: its channels are part of the grammar."""
    if given is not None and given.reasoning_end is not None:
        return copy(given)
    if given is None and budget is None and not (tools.is_forced or tools.is_strict):
        return None
    functions = tools.functions if tools.is_forced or given is not None else loosened(tools.functions)
    if given is not None and not tools.is_forced and given.json is None and not given.json_object:
        functions = ()
    _check_sizes(functions)
    answer = None if tools.is_forced else "TEXT" if given is None else "@answer"
    rules = Rules(form.special_tokens, prepared_schema, form.text_tokens)
    frame = rules.render(HarmonyFormat.message(functions, rules, answer=answer, can_think=budget is None))
    if given is None or tools.is_forced:
        constraint = StructuredOutputsParams(grammar=json.dumps({"grammars": [{"lark_grammar": frame}]}))
    else:
        constraint = copy(given)
        constraint.frame = frame
    if budget is not None:
        constraint.reasoning_begin, constraint.reasoning_end = THOUGHT, THOUGHT_END
        constraint.max_reasoning_tokens = budget
    return constraint


def _check_sizes(functions: Iterable[Tool]) -> None:
    """Raise ValueError for parameters that a grammar has no room for."""
    for tool in functions:
        if tool.is_open:
            continue
        try:
            check_size(tool.parameters or {})
        except ValueError as error:
            raise FieldError("tools", f"has the function {tool.name!r}, in the parameters of which {error}") from None


def prepared_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema for the compiler of grammars; itself where it cannot be changed."""
    try:
        return simplified(schema)
    except (ValueError, TypeError, AttributeError, RecursionError):  # it may have any form
        return schema


def find_schema_error(tools: ToolUse, find_error: Callable[[str], str]) -> FieldError | None:
    """The error of a tool with parameters that cannot be compiled. ``find_error``: of a grammar."""
    from fleetfoot.structured.grammars import make_grammar

    for index, schema in enumerate(tools.schemas):
        tool, rules = Tool.of(schema), Rules({}, prepared_schema)
        reason = find_error(rules.render(rules.arguments(tool)))
        if not reason:
            continue
        where = f"tools[{index}].function.parameters"
        try:
            make_grammar(StructuredOutputsParams(json=arguments_schema(tool)), Rules({}), find_error)
        except FieldError as error:
            return error.at(where)
        return FieldError(where, f"cannot be compiled: {reason}", tool.parameters)
    return None


@dataclass
class ParsedMessage:
    """A generated message."""

    content: str
    reasoning: str
    tool_calls: list[ToolCallDelta]
    """Each with all of its arguments, as JSON text."""


class ExpectedMessages:
    """The messages of one request, before they are generated.

    Attributes:
        params: the parameters that they are generated with; those of the request, if nothing else is needed.
    """

    def __init__(
        self, form: MessageFormat, tools: ToolUse, params: SamplingParams, *, is_reasoning: bool = False
    ) -> None:
        self.params = params
        self._form = form
        self._tools = tools
        self._is_reasoning = is_reasoning
        self._hides = params.skip_special_tokens

    def keep_special_tokens(self) -> None:
        """Change the parameters so that the text has the special tokens that the parser needs."""
        if self._hides and self._form.keeps_special_tokens(has_tools=bool(self._tools.functions)):
            self.params = copy(self.params)
            self.params.skip_special_tokens = self.params.spaces_between_special_tokens = False

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
            is_forced=self._tools.is_forced,
        )

    def parse(self, text: str, *, is_cut: bool = False) -> ParsedMessage:
        """A whole text, with the special tokens that the parser needs. ``is_cut``: as of `MessageParser.finish`."""
        parser = self.parser()
        delta = merge_deltas(parser.feed(text, ()), parser.finish(is_cut=is_cut))
        return ParsedMessage(delta.content, delta.reasoning, delta.tool_calls)


def is_cut(completion: CompletionOutput) -> bool:
    """Whether a limit or a stop string has ended a text."""
    return completion.finish_reason != "stop" or isinstance(completion.stop_reason, str)


def merge_deltas(first: MessageDelta, second: MessageDelta) -> MessageDelta:
    """One delta of two, in which each call has one entry."""
    calls = list(first.tool_calls)
    for call in second.tool_calls:
        if calls and calls[-1].index == call.index:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + call.arguments)
        else:
            calls.append(call)
    return MessageDelta(first.content + second.content, first.reasoning + second.reasoning, calls)


# --- offline ----------------------------------------------------------------------------------------------------------


class ChatCalls:
    """Tools and reasoning of `LLM`."""

    get_tokenizer: Callable[[], Tokenizer]
    get_default_sampling_params: Callable[[], SamplingParams]

    @cached_property
    def _formats(self) -> ChatFormats:
        return ChatFormats(self.get_tokenizer())

    def parse_chat(
        self,
        output: RequestOutput,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> list[ParsedMessage]:
        """The messages of an output of `chat`: content, reasoning and tool calls.

        Args:
            tools, chat_template: as in the call of `chat`.
            tool_call_parser, reasoning_parser: names of the formats; None: those of the chat template.

        Raises:
            ValueError: a tool is invalid, there is no chat template, or no parser of a name.
        """
        formats = self._formats
        if tool_call_parser or reasoning_parser:
            formats = ChatFormats(self.get_tokenizer(), tool_call_parser, reasoning_parser)
        expected = formats.expect(chat_template, ToolUse.of(tools), SamplingParams(), output.prompt_token_ids)
        return [expected.parse(self._text(output, one), is_cut=is_cut(one)) for one in output.outputs]

    def _text(self, output: RequestOutput, completion: CompletionOutput) -> str:
        """The text with special tokens; as it is, if a stop string has ended it."""
        if isinstance(completion.stop_reason, str):
            return completion.text
        stream = TextStream(self.get_tokenizer(), output.prompt_token_ids, skip_special_tokens=False)
        stream.push(completion.token_ids)
        stream.finish()
        return stream.text

    def _chat_params(
        self,
        params: SamplingParams,
        chat_template: str | None,
        tools: ToolUse,
        prompt_token_ids: Sequence[int],
        thinking_token_budget: int | None,
    ) -> SamplingParams:
        """Parameters with which calls are as ``tools`` has them, and a constraint applies after reasoning."""
        is_free = not tools.functions and getattr(params, "structured_outputs", None) is None
        if is_free and thinking_token_budget is None:
            return params
        budget = thinking_token_budget
        if budget is not None and self._formats.of(chat_template, has_tools=bool(tools.schemas)).reasoning is None:
            raise FieldError(
                "thinking_token_budget", f"is {budget}; it needs a model that marks the end of its reasoning", budget
            )
        options: dict[str, Any] = {"thinking_token_budget": budget}
        return self._formats.expect(chat_template, tools, params, prompt_token_ids, **options).params

"""Chat templates: Jinja sources from a checkpoint, rendered in a sandbox, in the dialect of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from fleetfoot.utils.validation import FieldError

# Marks the place in a rendered chat after which the model continues. The space after it shows whether the template
# trims the content.
_CONTINUE_MARK = "<<|fleetfoot:continue|>>"


class ChatTemplate:
    """One compiled chat template.

    Args:
        source: The Jinja source.
        now: The clock of `strftime_now`.

    Raises:
        ValueError: The source is not valid Jinja; the message names the line.
    """

    def __init__(self, source: str, now: Callable[[], datetime] = datetime.now) -> None:
        environment = _environment(now)
        try:
            syntax_tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja, line {error.lineno}: {error.message}") from error
        except (RecursionError, MemoryError, SyntaxError) as error:  # of Jinja's parser, or Python's
            raise FieldError("chat_template", f"is nested too deeply: {type(error).__name__}") from error
        self.takes_content_parts = _iterates_over_content(syntax_tree)
        """Whether the template accepts a list of content parts; if not, their texts are joined."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for a conversation; the arguments are those of `Tokenizer.apply_chat_template`.

        Args:
            variables: All other variables of the template: special tokens by name, and those of the caller.

        Raises:
            ValueError: The messages are malformed, or the template refuses them or fails on them.
        """
        if not isinstance(add_generation_prompt, bool) or not isinstance(continue_final_message, bool):
            raise FieldError(f"{add_generation_prompt=}", f"and {continue_final_message=} must be True or False")
        if "messages" in (variables or {}):
            raise ValueError("a chat template's variable 'messages' is the conversation; it cannot be given again")
        conversation = _read_messages(messages, joins_parts=not self.takes_content_parts)
        if continue_final_message:
            if add_generation_prompt:
                raise ValueError(
                    "continue_final_message=True continues the last message and add_generation_prompt=True begins a "
                    "new one; pass add_generation_prompt=False"
                )
            final_text = _mark_final_message(conversation[-1])
        variables = {
            **_plain_json(dict(variables or {}), "chat_template_kwargs"),
            "tools": _read_records(tools, "tools"),
            "documents": _read_records(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            rendered = self._render(conversation, variables)
        except _TemplateRefusalError as error:
            raise ValueError(f"the chat template refuses these messages: {error.message}") from error
        except Exception as error:  # a template can raise anything
            raise ValueError(f"the chat template fails on these messages: {type(error).__name__}: {error}") from error
        if not continue_final_message:
            return rendered
        before, mark, after = rendered.rpartition(_CONTINUE_MARK)
        if not mark or final_text.strip() not in before:
            raise ValueError(
                "continue_final_message=True, but the chat template does not render the last message's content as it "
                "is, so the place to continue from cannot be found; pass the rendered prompt instead"
            )
        # a template that has removed the space after the mark trims content, so the end of this text is trimmed too
        return before if after.startswith(" ") else before.rstrip()

    def _render(self, conversation: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """Render, with messages that call tools in the first form that the template takes.

        Arguments of calls are objects or their JSON text, and no content beside calls is null or an empty text.
        """
        *forms, last = _forms(conversation)
        for messages in forms:
            try:
                rendered = self._template.render(variables, messages=messages)
            except (TypeError, jinja2.UndefinedError, _TemplateRefusalError):
                continue
            if "None" in rendered and any(message.get("content") is None for message in messages):
                empty = self._template.render(variables, messages=_with_empty_content(messages))
                is_printed = rendered.count("None") > empty.count("None")
                if is_printed and rendered.replace("None", "") == empty.replace("None", ""):
                    return empty
            return rendered
        return self._template.render(variables, messages=last)


class _TemplateRefusalError(jinja2.TemplateError):
    """A template called `raise_exception`."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks text that a model is trained on. Only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are jinja2's

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscore attributes, which give access to Python's internals."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace takes no attribute {name!r}: it begins with '_'")
        super().__setitem__(name, value)


def _environment(now: Callable[[], datetime]) -> jinja2.Environment:
    def raise_exception(message: str) -> NoReturn:
        raise _TemplateRefusalError(message)

    def strftime_now(date_format: str) -> str:
        return now().strftime(date_format)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now, namespace=_Namespace)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes <, > and & for HTML, which is not in the training data."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _iterates_over_content(syntax_tree: jinja2.nodes.Template) -> bool:
    """Whether a `for` of the template iterates over a message's content, directly or through a variable."""
    names = {"content"}  # also the usual name of a macro's parameter

    def is_content(node: jinja2.nodes.Node | None) -> bool:
        match node:
            case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")) | jinja2.nodes.Getattr(attr="content"):
                return True
            case jinja2.nodes.Name(name=name):
                return name in names
            case jinja2.nodes.Filter(node=inner):
                return is_content(inner)
            case jinja2.nodes.CondExpr(expr1=first, expr2=second):
                return is_content(first) or is_content(second)
        return False

    for assignment in syntax_tree.find_all(jinja2.nodes.Assign):
        if isinstance(assignment.target, jinja2.nodes.Name) and is_content(assignment.node):
            names.add(assignment.target.name)
    return any(is_content(loop.iter) for loop in syntax_tree.find_all(jinja2.nodes.For))


def _mark_final_message(message: dict[str, Any]) -> str:
    """Append the mark to the message's text, in place; returns the text without it."""
    content = message.get("content")
    holder, key = (content[-1], "text") if isinstance(content, list) and content else (message, "content")
    text = holder.get(key)
    if not isinstance(text, str):
        raise ValueError("continue_final_message=True needs a last message with text to continue; it has none")
    holder[key] = text + _CONTINUE_MARK + " "
    return text


# Accepted names of a message's reasoning; templates read one of the first two.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def _read_messages(messages: Sequence[Mapping[str, Any]], *, joins_parts: bool) -> list[dict[str, Any]]:
    """A checked copy of a conversation, of plain JSON types; keys with value None are left out.

    Args:
        joins_parts: whether lists of text parts are joined by newlines.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise FieldError(
            "messages", f"must be a list of {{'role': ..., 'content': ...}} dicts, not a {type(messages).__name__}"
        )
    if not messages:
        raise FieldError("messages", "is empty; at least one message is needed")
    conversation = [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    for message in conversation:
        if joins_parts and isinstance(message.get("content"), list):
            message["content"] = "\n".join(part["text"] for part in message["content"])
    return conversation


def _forms(conversation: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The conversation in each form that a template may take, the usual one first."""
    forms = [conversation]
    if any(message.get("tool_calls") for message in conversation):
        forms.append([_with_argument_texts(message) for message in conversation])
        if any(message["content"] is None for message in conversation if message.get("tool_calls")):
            forms += [_with_empty_content(form) for form in forms]
    return forms


def _with_empty_content(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**message, "content": ""} if message.get("content") is None else message for message in conversation]


def _with_argument_texts(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the arguments of calls as JSON text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_argument_text(call) for call in calls]}


def _with_argument_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _read_records(records: object, name: str) -> list[dict[str, Any]] | None:
    """A checked copy of `tools` or `documents`: a list of dicts of plain JSON types, or None."""
    if records is None:
        return None
    if not isinstance(records, list | tuple) or not all(isinstance(record, Mapping) for record in records):
        raise FieldError(name, "must be a list of dicts, as JSON would give them")
    return _plain_json(records, name)


def _plain_json(value: Any, where: str) -> Any:
    """A deep copy of JSON-like data. Templates are untrusted code, so they get no objects with methods of their own."""
    try:
        return _copied(value, where)
    except RecursionError:
        raise FieldError(where, "is nested too deeply") from None


def _copied(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_copied(key, where): _copied(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise FieldError(where, f"is a {type(value).__name__}; a chat template takes plain JSON types only")


def _read_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise FieldError(where, f"is a {type(message).__name__}; a dict with 'role' and 'content' is expected")
    copy = {key: item for key, item in _plain_json(message, where).items() if item is not None}
    role = copy.get("role")
    if not isinstance(role, str) or not role:
        raise FieldError(
            f"{where}.role", f"is {role!r}; a string like 'user', 'assistant' or 'system' is expected", role
        )
    content = copy.get("content")
    if isinstance(content, list):
        for i, part in enumerate(content):
            place = f"{where}.content[{i}]"
            if not isinstance(part, dict):
                raise FieldError(place, f"is a {type(part).__name__}; {{'type': 'text', 'text': ...}} is expected")
            if part.get("type") != "text":
                raise FieldError(
                    f"{place}.type",
                    f"is {part.get('type')!r}; only 'text' is supported, no images or files",
                    part.get("type"),
                )
            if not isinstance(part.get("text"), str):
                raise FieldError(f"{place}.text", f"is {part.get('text')!r}; a string is expected", part.get("text"))
    elif content is None and not copy.get("tool_calls"):
        raise FieldError(where, "has no content; only a message with tool_calls may go without")
    elif content is not None and not isinstance(content, str):
        raise FieldError(f"{where}.content", f"is a {type(content).__name__}; a string or a list of parts is expected")
    reasoning = next((copy[name] for name in _REASONING_FIELDS if name in copy), None)
    if copy.get("tool_calls"):
        copy.setdefault("content", None)  # which templates tell from an absent one
    if reasoning is not None:
        copy["reasoning_content"] = reasoning
        copy.setdefault("thinking", reasoning)
    return copy

"""What chat templates take: the messages of a conversation, and other variables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fleetfoot.parsers.completion import completion
from fleetfoot.utils.validation import FieldError, FieldTypeError, is_deeper, shown

_DEFAULTS = {"add_generation_prompt": True, "continue_final_message": False, "tools": None}
_RESULT_ARGUMENTS = ("tokenize", "return_dict", "return_tensors", "tokenizer_kwargs", "padding", "truncation")
_NO_VARIABLES = ("chat_template", "messages", "conversation", "self", "max_length", *_RESULT_ARGUMENTS)
"""Names that ``chat_template_kwargs`` cannot have: the other arguments of `Tokenizer.apply_chat_template`."""


MAX_ARGUMENT_VALUES, MAX_ARGUMENT_DEPTH = 1 << 16, 256
"""Commas and brackets in the arguments of a call that come back in a message, which are read at once; and brackets in
each other."""


def read_conversation(messages: Any) -> Any:
    """A conversation as chat templates take it."""
    if not isinstance(messages, list | tuple):
        return messages
    return [
        template_message(f"messages[{index}]", message)
        if isinstance(message, Mapping) and message.get("tool_calls")
        else message
        for index, message in enumerate(messages)
    ]


def template_message(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates take it: arguments of calls as objects, and no content beside calls as null.

    Raises ValueError, which begins with the path of the field.
    """
    calls = message.get("tool_calls")
    if message.get("role") == "tool" and not isinstance(message.get("tool_call_id", ""), str):
        raise FieldError(
            f"{where}.tool_call_id",
            f"is {shown(message['tool_call_id'])}; it must be a string",
            message["tool_call_id"],
        )
    if calls is None or calls == []:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    if not isinstance(calls, list | tuple):
        raise FieldError(f"{where}.tool_calls", f"is {shown(calls)}; it must be a list", calls)
    read = [_read_call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)]
    return {**message, "content": message.get("content") or None, "tool_calls": read}


def _read_call(where: str, call: Any) -> dict[str, Any]:
    """``max_tokens`` may have cut the arguments, which are then what there is."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise FieldError(
            f"{where}.function", f"is {shown(function)}; it must be an object with a name and arguments", function
        )
    arguments = function.get("arguments")
    arguments = read_arguments(f"{where}.function.arguments", arguments)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def read_arguments(where: str, given: Any) -> Mapping[str, Any]:
    """The arguments of a call, which may be cut. Raises FieldError."""
    arguments = given
    if isinstance(given, str) and (most := sum(map(given.count, "[{,"))) > MAX_ARGUMENT_VALUES:
        raise FieldError(
            where, f"has up to {most:,} lists, objects and values; the limit is {MAX_ARGUMENT_VALUES:,}", given
        )
    try:
        if isinstance(given, str) and given.strip():
            try:
                arguments = json.loads(given)
            except ValueError:
                arguments = json.loads(given + completion(given))
        is_deep = is_deeper(arguments, MAX_ARGUMENT_DEPTH)
    except RecursionError:
        is_deep = True
    except ValueError as error:
        raise FieldError(where, f"is not JSON: {error}", given) from None
    if is_deep:
        raise FieldError(where, f"is nested deeper than {MAX_ARGUMENT_DEPTH} levels, which is the limit", given)
    arguments = arguments or {}
    if not isinstance(arguments, Mapping):
        raise FieldError(where, f"is {shown(arguments)}; it must be the text of a JSON object", given)
    return arguments


def template_variables(given: dict[str, Any], variables: object) -> dict[str, Any]:
    """Arguments of `LLM.chat` for the template, and its ``chat_template_kwargs``, which may replace their defaults."""
    if variables is not None and not (isinstance(variables, dict) and all(isinstance(key, str) for key in variables)):
        raise FieldTypeError(
            "chat_template_kwargs", f"is {variables!r}; it must be a dict of a template's variables by name", variables
        )
    for name, value in (variables or {}).items():
        if name in _NO_VARIABLES:
            raise FieldError(
                "chat_template_kwargs", f"has {name!r}, which is not a variable of a template; leave it out"
            )
        if name in given and given[name] not in (_DEFAULTS[name], value):
            raise FieldError(
                name, f"is {given[name]!r}, and in chat_template_kwargs {value!r}; give it once", given[name]
            )
    return {**given, **(variables or {})}

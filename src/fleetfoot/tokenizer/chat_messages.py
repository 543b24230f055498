"""Checks of what is handed to a chat template, before foreign code sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Names under which a message's reasoning is passed; templates read one of the first two.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A checked copy of a conversation, of plain JSON types; keys whose value is None are left out.

    Raises:
        ValueError: A message or a part of one is malformed; the message says where.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(
            f"messages must be a list of {{'role': ..., 'content': ...}} dicts, not a {type(messages).__name__}"
        )
    if not messages:
        raise ValueError("messages is empty; at least one message is needed")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def read_records(records: object, name: str) -> list[dict[str, Any]] | None:
    """A checked copy of `tools` or `documents`: a list of dicts of plain JSON types, or None."""
    if records is None:
        return None
    if not isinstance(records, list | tuple) or not all(isinstance(record, Mapping) for record in records):
        raise ValueError(f"{name} must be a list of dicts, as JSON would give them")
    return plain_json(records, name)


def plain_json(value: Any, where: str) -> Any:
    """A deep copy of JSON-like data. A template is foreign code: it gets no object with methods of its own."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {plain_json(key, where): plain_json(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise ValueError(f"{where} is a {type(value).__name__}; a chat template takes plain JSON types only")


def join_text_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with lists of text parts joined, a line each, for templates that know content as a str only."""
    return [
        message | {"content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _read_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} is a {type(message).__name__}; a dict with 'role' and 'content' is expected")
    copy = {key: item for key, item in plain_json(message, where).items() if item is not None}
    role = copy.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}.role is {role!r}; a string like 'user', 'assistant' or 'system' is expected")
    content = copy.get("content")
    if isinstance(content, list):
        for i, part in enumerate(content):
            _check_part(part, f"{where}.content[{i}]")
    elif content is None and not copy.get("tool_calls"):
        raise ValueError(f"{where} has no content; only a message with tool_calls may go without")
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"{where}.content is a {type(content).__name__}; a string or a list of parts is expected")
    reasoning = next((copy[name] for name in _REASONING_FIELDS if name in copy), None)
    if reasoning is not None:
        copy["reasoning_content"] = reasoning
        copy.setdefault("thinking", reasoning)
    return copy


def _check_part(part: object, where: str) -> None:
    if not isinstance(part, dict):
        raise ValueError(f"{where} is a {type(part).__name__}; {{'type': 'text', 'text': ...}} is expected")
    if part.get("type") != "text":
        raise ValueError(
            f"{where}.type is {part.get('type')!r}; only 'text' parts are supported, the model reads no images, audio "
            f"or files"
        )
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{where}.text is {part.get('text')!r}; a string is expected")

"""Prompts and conversations of requests as prompts of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleetfoot.engine.chat_messages import template_message
from fleetfoot.server.http import invalid
from fleetfoot.utils.validation import shown


def read_prompts(field: str, value: str | Sequence[str | int | list[int]]) -> list[str | list[int]]:
    """A text, texts, token ids, or lists of token ids, as a list of prompts. Raises `ApiError` that names the entry."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise invalid(field, f"{field} is an empty list; it must hold at least one entry")
    kind = type(value[0])
    for index, entry in enumerate(value):
        if type(entry) is not kind:
            message = f"{field}[{index}] is {shown(entry)}; all entries must be texts, token ids, or lists of token ids"
            raise invalid(f"{field}[{index}]", message)
    if kind is int:
        return [list(value)]  # type: ignore[arg-type]
    return list(value)  # type: ignore[arg-type]


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates take them. Raises `ApiError` that names the message and the field."""
    if not messages:
        raise invalid("messages", "messages is an empty list; it must hold at least one message")
    return [_read_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _read_message(place: str, message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise invalid(f"{place}.role", f"{place}.role is {shown(role)}; it must be a string")
    if message.get("function_call") or role == "function":
        field, hint = ("role", "tool") if role == "function" else ("function_call", "tool_calls")
        text = f"{place}.{field} is {shown(message[field])}, which is not supported; use {hint}"
        raise invalid(f"{place}.{field}", text, "unsupported_parameter")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        text = f"{place}.tool_call_id is {shown(message.get('tool_call_id'))}; it must be the id of a tool call"
        raise invalid(f"{place}.tool_call_id", text)
    if content is None and role != "assistant":
        raise invalid(f"{place}.content", f"{place}.content is missing; it must be a text or a list of parts")
    role = "system" if role == "developer" else role
    message = {**message, "role": role, "content": _read_content(f"{place}.content", content)}
    return template_message(place, message)


def _read_content(place: str, content: Any) -> str | list[dict[str, str]]:
    """A text, or text parts, which the chat template joins if it does not read parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(place, f"{place} is {shown(content)}; it must be a text or a list of parts")
    return [{"type": "text", "text": read_text(f"{place}[{index}]", part)} for index, part in enumerate(content)]


def read_text(place: str, part: Any) -> str:
    """The text of a content part. Raises `ApiError` that names it."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text", "refusal"):
        message = f"{place} has the type {shown(kind)}; this model reads text alone: {{'type': 'text', 'text': ...}}"
        raise invalid(place, message, "unsupported_content")
    field = "refusal" if kind == "refusal" else "text"
    text = part.get(field)
    if not isinstance(text, str):
        raise invalid(f"{place}.{field}", f"{place}.{field} is {shown(text)}; it must be a string")
    return text

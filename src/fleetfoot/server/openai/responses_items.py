"""Input items of responses: checked, completed, and as the messages of a conversation."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fleetfoot.engine.chat_messages import read_arguments
from fleetfoot.server.http import ApiError, invalid
from fleetfoot.server.openai.prompts import read_text
from fleetfoot.utils.validation import shown

Item = dict[str, Any]
"""An item of plain JSON types, complete as in a list of input items."""
_ROLES = ("user", "assistant", "system", "developer")
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})(?:in)?[0-9]+")
ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def response_of_item(name: str) -> str | None:
    """The id of the response that an item's id was made for."""
    match = _ITEM_ID.fullmatch(name)
    return match and f"resp_{match[1]}"


def read_items(value: str | Sequence[Mapping[str, Any]], key: str) -> list[Item]:
    """The ``input`` of a request, without references. Raises ApiError that names the item and the field.

    Args:
        key: of the response, in the ids of items without one.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not value:
        raise invalid("input", "input is an empty list; it must hold at least one item")
    return [_read_item(f"input[{index}]", item, f"{key}in{index}") for index, item in enumerate(value)]


def _read_item(place: str, item: Mapping[str, Any], key: str) -> Item:
    kind: Any = item.get("type") or ("message" if "role" in item else None)
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        allowed = ", ".join([*_READERS, "item_reference"])
        message = f"{place}.type is {shown(kind)}, which is not supported; it can be {allowed}"
        raise invalid(f"{place}.type", message, "unsupported_parameter")
    name = item.get("id") or f"{ID_PREFIXES[kind]}_{key}"
    return {"id": _string(f"{place}.id", name), "type": kind, **reader(place, item), "status": "completed"}


def _read_message(place: str, item: Mapping[str, Any]) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise invalid(f"{place}.role", f"{place}.role is {shown(role)}; it can be {', '.join(_ROLES)}")
    texts = _read_texts(f"{place}.content", item.get("content"))
    if role == "assistant":
        return {"role": role, "content": [{"type": "output_text", "text": text, "annotations": []} for text in texts]}
    return {"role": role, "content": [{"type": "input_text", "text": text} for text in texts]}


def _read_texts(place: str, content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise invalid(place, f"{place} is {shown(content)}; it must be a text or a list of parts")
    return [read_text(f"{place}[{index}]", part) for index, part in enumerate(content)]


def _read_call(place: str, item: Mapping[str, Any]) -> Item:
    call = {name: _string(f"{place}.{name}", item.get(name)) for name in ("call_id", "name", "arguments")}
    read_arguments(f"{place}.arguments", call["arguments"])
    return call


def _read_call_output(place: str, item: Mapping[str, Any]) -> Item:
    texts = _read_texts(f"{place}.output", item.get("output"))
    return {"call_id": _string(f"{place}.call_id", item.get("call_id")), "output": "\n".join(texts)}


def _read_reasoning(place: str, item: Mapping[str, Any]) -> Item:
    encrypted = item.get("encrypted_content")
    read: Item = {"summary": [{"type": "summary_text", "text": text} for text in _parts(place, item, "summary")]}
    if content := _parts(place, item, "content"):
        read["content"] = [{"type": "reasoning_text", "text": text} for text in content]
    elif encrypted is not None:
        text = decrypted(f"{place}.encrypted_content", encrypted)
        read["content"] = [{"type": "reasoning_text", "text": text}]
    return read


def _parts(place: str, item: Mapping[str, Any], field: str) -> list[str]:
    parts = item.get(field) or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise invalid(f"{place}.{field}", f"{place}.{field} is {shown(parts)}; it must be a list of parts")
    return [_string(f"{place}.{field}[{index}].text", part.get("text")) for index, part in enumerate(parts)]


def _string(place: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(place, f"{place} is {shown(value)}; it must be a string")
    return value


_READERS = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_call_output,
    "reasoning": _read_reasoning,
}


def encrypted(text: str) -> str:
    """``encrypted_content`` of a reasoning item, with which a client returns it. It is encoded and not secret."""
    return base64.b64encode(text.encode()).decode()


def decrypted(place: str, content: Any) -> str:
    """The text of `encrypted`. Raises ApiError for what another server has encrypted."""
    try:
        return base64.b64decode(_string(place, content), validate=True).decode()
    except (binascii.Error, ValueError):
        raise invalid(place, f"{place} was not made by this server", "invalid_encrypted_content") from None


def find_item(name: str, items: Iterable[Item]) -> Item:
    """Raises ApiError 404."""
    for item in items:
        if item["id"] == name:
            return item
    raise ApiError(404, f"item {name!r:.100} is not known, or no longer stored", "item_not_found", "input")


def chat_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Items as messages of chat completions. Reasoning, a message and calls in a row are one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _content(item)})
        elif kind == "reasoning":
            parts = item.get("content") or item["summary"]
            reasoning = "\n".join([part["text"] for part in parts])
            messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning})
        elif kind == "message":
            is_begun = bool(messages) and messages[-1].keys() == {"role", "content", "reasoning_content"}
            if not is_begun or messages[-1]["content"]:
                messages.append({"role": "assistant"})
            messages[-1]["content"] = _content(item)
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def _content(item: Item) -> str | list[dict[str, str]]:
    texts = [part["text"] for part in item["content"]]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]

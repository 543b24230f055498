"""Conversations and tools in Anthropic's form, as chat templates take them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fleetfoot.server.anthropic.protocol import (
    BlockParam,
    CountTokensRequest,
    InputMessage,
    RedactedThinkingParam,
    TextParam,
    ThinkingParam,
    ToolChoice,
    ToolParam,
    ToolResultParam,
    ToolUseParam,
)
from fleetfoot.server.conversion import converted
from fleetfoot.server.http import invalid
from fleetfoot.utils.validation import shown

_T = TypeVar("_T")
_BILLING = "x-anthropic-billing-header:"


def read_conversation(body: CountTokensRequest) -> list[dict[str, Any]]:
    """The messages. Raises ApiError that names the block."""
    if not body.messages:
        raise invalid("messages", "messages is an empty list; it must hold at least one message")
    reader = _Reader()
    if body.system is not None:
        reader.add_system("system", body.system)
    for index, message in enumerate(body.messages):
        reader.add(f"messages[{index}]", message)
    if not reader.messages:
        raise invalid("messages", "messages has no content; it must hold at least one message with content")
    last = reader.messages[-1]
    if last["role"] == "assistant":
        place = f"messages[{len(body.messages) - 1}]"
        if "tool_calls" in last:
            raise invalid(place, f"{place} has tool_use; tool_result blocks of a user message must follow")
        if not last["content"] and "reasoning_content" not in last and len(reader.messages) > 1:
            reader.messages.pop()  # nothing to continue
    return [_joined(message) for message in reader.messages]


class _Reader:
    """Collects messages; consecutive ones of the same role are one."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._tools: dict[str, str] = {}
        """Id of a tool_use -> name of the tool."""

    def add_system(self, place: str, content: str | list[dict[str, Any]]) -> None:
        for text in _read_texts(place, content):
            if not text.startswith(_BILLING):  # it differs in each request: after it, no prefix would be cached
                self._add_text("system", text)

    def add(self, place: str, message: InputMessage) -> None:
        if message.role == "system":
            self.add_system(f"{place}.content", message.content)
            return
        if isinstance(message.content, str):
            self._add_text(message.role, message.content)
            return
        self._turn(message.role)
        for index, entry in enumerate(message.content):
            here = f"{place}.content[{index}]"
            block = _read_block(here, entry)
            if isinstance(block, TextParam):
                self._add_text(message.role, block.text)
            elif isinstance(block, ToolResultParam):
                _check_role(here, "tool_result", message.role, "user")
                self._add_result(here, block)
            else:
                _check_role(here, entry["type"], message.role, "assistant")
                self._add_assistant(block)

    def _turn(self, role: str) -> dict[str, Any]:
        """The last message, if it has the role; else a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
        return self.messages[-1]

    def _add_text(self, role: str, text: str) -> None:
        self._turn(role)["content"].append(text)

    def _add_assistant(self, block: ThinkingParam | RedactedThinkingParam | ToolUseParam) -> None:
        message = self._turn("assistant")
        if isinstance(block, ToolUseParam):
            self._tools[block.id] = block.name
            function = {"name": block.name, "arguments": block.input}
            message.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ThinkingParam):
            thinking = block.thinking or signed_thinking(block.signature)
            message["reasoning_content"] = message.get("reasoning_content", "") + thinking

    def _add_result(self, place: str, block: ToolResultParam) -> None:
        name = self._tools.get(block.tool_use_id)
        if name is None:
            message = f"{place}.tool_use_id is {shown(block.tool_use_id)}; no tool_use block before it has this id"
            raise invalid(f"{place}.tool_use_id", message)
        text = "\n".join(_read_texts(f"{place}.content", block.content or ""))
        if block.is_error:
            text = f"Error: {text}"
        if self.messages[-1] == {"role": "user", "content": []}:
            self.messages.pop()
        self.messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": [text]})


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """The message with one text, or with several parts, which the chat template joins if it does not read parts."""
    texts = message["content"]
    if len(texts) < 2 or message["role"] == "assistant":
        return {**message, "content": "".join(texts)}
    return {**message, "content": [{"type": "text", "text": text} for text in texts]}


def _read_texts(place: str, content: str | list[dict[str, Any]]) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = []
    for index, entry in enumerate(content):
        here = f"{place}[{index}]"
        block = _read_block(here, entry)
        if not isinstance(block, TextParam):
            raise invalid(here, f"{here} has the type {shown(entry['type'])}; only text blocks can be here")
        texts.append(block.text)
    return texts


def _read_block(place: str, entry: Mapping[str, Any]) -> BlockParam:
    kind = entry.get("type")
    known = [one.__struct_config__.tag for one in BlockParam.__args__]
    if kind not in known:
        message = f"{place} has the type {shown(kind)}; this model reads {', '.join(known)} blocks"
        raise invalid(place, message, "unsupported_content")
    block: Any = BlockParam
    return converted(entry, block, place=place)


def _check_role(place: str, kind: str, role: str, expected: str) -> None:
    if role != expected:
        raise invalid(place, f"{place} is a {kind} block in a message of the role {role!r}; it must be {expected!r}")


# --- thinking ---------------------------------------------------------------------------------------------------------


def sign(thinking: str, *, is_omitted: bool) -> str:
    """The signature of a thinking block, which holds the text if the block does not."""
    return base64.b64encode(thinking.encode()).decode() if is_omitted else "unsigned"


def signed_thinking(signature: str) -> str:
    """The text in the signature of a block that is without; empty if another server has made it."""
    try:
        return base64.b64decode(signature, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


# --- tools ------------------------------------------------------------------------------------------------------------


def read_tools(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools in OpenAI's form. Raises ApiError that names the entry."""
    tools = []
    for index, entry in enumerate(entries):
        place = f"tools[{index}]"
        if entry.get("type") not in (None, "custom"):
            message = f"{place}.type is {shown(entry['type'])}; only tools with an input_schema are supported"
            raise invalid(f"{place}.type", message, "unsupported_parameter")
        tool = converted(entry, ToolParam, place=place)
        schema = tool.input_schema
        if tool.input_examples:
            schema = {**schema, "examples": tool.input_examples}
        function: dict[str, Any] = {"name": tool.name, "description": tool.description or "", "parameters": schema}
        if tool.strict is not None:
            function["strict"] = tool.strict
        tools.append({"type": "function", "function": function})
    return tools


def read_tool_choice(choice: ToolChoice | None, tools: Sequence[Mapping[str, Any]]) -> str | dict[str, Any]:
    """OpenAI's form of a tool choice. Raises ApiError."""
    if choice is None or choice.type in ("auto", "none"):
        return "auto" if choice is None else choice.type
    names = [tool["function"]["name"] for tool in tools]
    if choice.type == "any" and names:
        return "required"
    if choice.type == "tool" and choice.name in names:
        return {"type": "function", "function": {"name": choice.name}}
    wanted = "any" if choice.type == "any" else repr(choice.name)
    raise invalid("tool_choice", f"tool_choice is {wanted:.100}; the tools are {', '.join(names) or 'none'}")

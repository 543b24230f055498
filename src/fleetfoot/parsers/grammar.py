"""Grammars of tool calls, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fleetfoot.parsers.base import Tool
from fleetfoot.utils.json_schema import ANNOTATIONS, mapped

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_CLOSING = ("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "$ref")
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = "[0-9a-fA-F]{1,4}"
_TIME = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_FORMATS = {
    "email": rf"^[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@({_LABEL}\.)+[A-Za-z]{{2,63}}$",
    "hostname": rf"^({_LABEL}\.)*{_LABEL}$",
    "ipv4": rf"^({_OCTET}\.){{3}}{_OCTET}$",
    "ipv6": f"^(({_GROUP}:){{7}}{_GROUP}|({_GROUP}:){{1,6}}(:{_GROUP})|({_GROUP}:){{1,7}}:|::({_GROUP})?)$",
    "uri": r"^[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9._~-]+(/([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})*)*$",
    "uuid": "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "duration": f"^P([0-9]+W|([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)({_TIME})?|{_TIME})$",
}
"""Formats of text without quotes. Some valid texts are left out."""

_LARK_TEXTS = r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/'
"""Comments, strings and regular expressions."""

Prepare = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class Rules:
    """The rules of a grammar.

    Args:
        special_tokens: token -> id. They are no text for llguidance.
        prepared: makes the schema that the compiler gets of one for JSON values or for text.
        text_tokens: other added tokens -> id. They are text, too; as marks they go by their ids.
    """

    def __init__(
        self,
        special_tokens: Mapping[str, int],
        prepared: Prepare = dict,
        text_tokens: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.prepared = prepared
        self._tokens = {**text_tokens, **special_tokens}
        self._marks, self._special = _any_of(self._tokens), _any_of(special_tokens)
        self._rules: list[str] = []

    def add(self, expression: str, options: str = "") -> str:
        """Add a rule. Returns its name."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {expression}")
        return name

    def json(self, schema: Mapping[str, Any], *, is_strict: bool = True) -> str:
        """A rule for JSON values of a schema. ``is_strict``: keywords that are not supported are errors of the
        compiler; else they are left out."""
        options = {**_SPACING, "lenient": not is_strict}
        return self.add(f"%json {json.dumps({**self.prepared(schema), 'x-guidance': options})}")

    def arguments(self, tool: Tool) -> str:
        """A rule for the arguments of a tool."""
        return self.json({"type": "object"} if tool.is_open else arguments_schema(tool), is_strict=tool.is_strict)

    def is_special(self, text: str) -> bool:
        """Whether a text is a special token."""
        return self._special.fullmatch(text) is not None

    def text(self, *texts: str) -> str:
        """An expression for a fixed text. Every other one of ``texts``, from the second on, is a user's: no marks."""
        parts = (quoted(text) if index % 2 else self._split(text, self._marks) for index, text in enumerate(texts))
        return " ".join(filter(None, parts))

    def mark(self, text: str) -> int | str | None:
        """The token that is a mark, or its text where that has none. None: it has tokens and other text."""
        return self._tokens[text] if text in self._tokens else None if self._marks.search(text) else text

    def given(self, text: str) -> str:
        """An expression for a user's text in which special tokens are meant as such."""
        return self._split(text, self._special)

    def _split(self, text: str, tokens: re.Pattern[str]) -> str:
        parts, position = [], 0
        for match in tokens.finditer(text):
            parts += [quoted(text[position : match.start()]), f"<[{self._tokens[match[0]]}]>"]
            position = match.end()
        return " ".join(filter(None, [*parts, quoted(text[position:])]))

    def until(self, text: str, before: str = "TEXT") -> str:
        """An expression for any text up to the first place of this one, which is a part of it. ``before``: a terminal
        for what comes before."""
        match = self._special.search(text)
        if match is None:
            return self.add(f"{before} {quoted(text)}", "[lazy]")
        if match.start():
            self._rules.append(f"BEFORE_{len(self._rules)}: {before} {quoted(text[: match.start()])}")
            before = self._rules[-1].partition(":")[0]
        return f"{before} {self.given(text[match.start() :])}"

    def named(self, lark: str) -> str:
        """A grammar in Lark in which names of added tokens (``<think>``) are their ids."""

        def change(match: re.Match[str]) -> str:
            return f"<[{self._tokens[match[0]]}]>" if match[0] in self._tokens else match[0]

        return re.sub(f"{_LARK_TEXTS}|{self._marks.pattern}", change, lark)

    def any_of(self, expressions: Sequence[str]) -> str:
        return f"({' | '.join(expressions)})"

    def each(self, tools: Sequence[Tool], call: Callable[[Tool], str]) -> str:
        """A rule for a call of any of the tools."""
        return self.add(self.any_of([self.add(call(tool)) for tool in tools]))

    def list_of(self, item: str, separator: str, *, is_single: bool) -> str:
        """The item, or several with a separator."""
        return item if is_single else f"{item} ({self.text(separator)} {item})*"

    def render(self, start: str) -> str:
        """The grammar."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, "TEXT: /(?s:.*)/", r"SPACE: /\s*/"])


def forced_calls(
    form: Any,
    tools: Sequence[Tool],
    special_tokens: Mapping[str, int],
    *,
    is_single: bool,
    has_answer: bool = False,
    prepared: Prepare = dict,
    text_tokens: Mapping[str, int] = MappingProxyType({}),
) -> str:
    """A grammar of at least one call in a `ToolFormat`. ``has_answer``: ``@answer`` can be there instead."""
    rules = Rules(special_tokens, prepared, text_tokens)
    calls = f"{rules.text(form.begin[0])} {form.grammar(tools, rules, is_single=is_single)}"
    return rules.render(f"{rules.add(calls)} | @answer" if has_answer else calls)


def strict_calls(
    form: Any,
    tools: Sequence[Tool],
    special_tokens: Mapping[str, int],
    *,
    is_single: bool,
    prepared: Prepare = dict,
    text_tokens: Mapping[str, int] = MappingProxyType({}),
) -> str:
    """A grammar of any text, in which calls are valid; the arguments of tools that are not strict are any object."""
    rules = Rules(special_tokens, prepared, text_tokens)
    tools = loosened(tools)
    marker = form.begin[0]
    plain = [mark for mark in form.begin if len(mark) == 1]
    if plain:  # content may have them, but not at its beginning
        forms = [form, *(replace(form, begin=(mark,)) for mark in plain[1:])]
        calls = [f"{rules.text(one.begin[0])} {one.grammar(tools, rules, is_single=is_single)}" for one in forms]
        text = rules.add(rf"/\s*[^\s{re.escape(''.join(plain))}](?s:.*)/")
        return rules.render(f'"" | {text} | SPACE {rules.any_of(calls)}')
    calls = form.grammar(tools, rules, is_single=is_single)
    call = rules.add(f"{rules.until(marker)} {calls}")
    return rules.render(f"{call}{'?' if is_single else '*'} {rules.add('TEXT')}")


def split_added(added: Mapping[int, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Special tokens and others with their ids, of a tokenizer's added tokens. White space is no mark."""
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    others = ((token.content, token_id) for token_id, token in added.items() if not token.special)
    return special, {content: token_id for content, token_id in others if content.strip()}


def loosened(tools: Sequence[Tool]) -> list[Tool]:
    """The tools, of which those that are not strict take any object in JSON. In formats without JSON, which need the
    names of arguments, they take theirs, and require none."""
    return [tool if tool.is_strict else replace(tool, parameters=_optional(tool), is_open=True) for tool in tools]


def _optional(tool: Tool) -> dict[str, Any]:
    return {name: value for name, value in tool.parameters.items() if name != "required"}


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments: an object, without properties that are not named. Without a schema, it is
    empty."""
    return {"type": "object", **closed(tool.parameters or {"properties": {}})}


def closed(schema: Any) -> Any:
    """The schema without notes, in which objects have no properties that are not named, unless it mentions others."""
    return mapped(schema, _closed, skipped=("allOf", "dependentSchemas", "dependencies"))


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    result = {
        name: value
        for name, value in schema.items()
        if name not in ANNOTATIONS and (value is not None or name == "const")
    }
    named, required = result.get("properties"), result.get("required", [])
    is_open = not isinstance(named, Mapping) or any(name in result for name in _CLOSING)
    if not is_open and isinstance(required, list) and all(name in list(named or ()) for name in required):
        result["additionalProperties"] = False
    return result


def json_rules(schema: Mapping[str, Any], rules: Rules, *, is_strict: bool) -> Callable[[Mapping[str, Any]], str]:
    """Makes rules of parts of a schema, which may refer to its definitions."""
    shared = definitions(schema)
    return lambda part: rules.json({**part, **shared}, is_strict=is_strict)


def definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What references of a schema may name."""
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def members(pairs: Mapping[str, str], required: Collection[str], separator: str, rules: Rules) -> str:
    """An expression for arguments with a separator, those that are required first. ``pairs``: their expressions."""
    between = rules.text(separator)
    optional = [key for key in pairs if key not in required]
    fixed = f" {between} ".join(pairs[key] for key in pairs if key in required)
    if fixed:
        return " ".join([fixed, *[f"({between} {pairs[key]})?" for key in optional]])
    later: list[str] = []  # what may follow, last argument first
    for key in reversed(optional):
        rest = f" ({between} {rules.any_of(later)})?" if later else ""
        later.append(rules.add(pairs[key] + rest))
    return f"{rules.any_of(later)}?" if later else ""


def text_terminal(schema: Mapping[str, Any]) -> str:
    """A terminal for the text of a string without quotes."""
    parts = [schema, *(part for part in schema.get("allOf") or () if isinstance(part, Mapping))]
    patterns = [part["pattern"] for part in parts if isinstance(part.get("pattern"), str)]
    patterns += [_FORMATS[part["format"]] for part in parts if part.get("format") in _FORMATS]
    terminals = [pattern_terminal(pattern) for pattern in patterns]
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if (least, most) != (0, None):
        terminals.append(f"/(?s:.{{{least},{'' if most is None else most}}})/")
    return f"({' & '.join(terminals)})" if terminals else "TEXT"


def pattern_terminal(pattern: str) -> str:
    """A terminal for text in which a regular expression of JSON Schema matches; it may be anchored at its ends."""
    from llguidance import regex_to_lark

    begin = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    core = pattern.removeprefix("^").removesuffix("$" if not end else "")
    if re.search(r"[$^]", re.sub(r"\\.|\[(\\.|[^\]])*\]", "", core)):
        return "TEXT"  # anchors in the middle are not supported
    return f"/{regex_to_lark(f'{begin}({core}){end}', 'dw')}/"


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def quoted(text: str) -> str:
    """A Lark string; "" for an empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""

"""Constraints as grammars of llguidance: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import combinations, starmap
from typing import Any

from fleetfoot.records.structured_outputs import StructuredOutputsParams

MAX_CHARS = 1 << 19
"""Of a constraint as text."""
MAX_DEPTH = 128
"""Of a schema: objects and lists in each other."""

WHITESPACE = r" |\n( {0,16}|\t{0,8})"
"""Between the tokens of JSON: a space, or a line break with an indentation. Without an end, small models repeat it
until ``max_tokens``."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
"""Keywords that are not supported, with the values that allow everything."""
_MAX_ERROR = 600

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = (
    "additionalProperties",
    "items",
    "additionalItems",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
)

FindError = Callable[[str], str]
"""The error of a grammar; empty: it can be compiled."""


def make_grammar(params: StructuredOutputsParams, special_tokens: Collection[str], find_error: FindError) -> str:
    """The grammar of a constraint.

    Raises:
        ValueError: it cannot be compiled; the message names the field, the place in a schema, and the reason.
    """
    from llguidance import LLMatcher

    if params.regex is not None:
        return _checked("regex", params.regex, _regex_rule, find_error)
    if params.grammar is not None:
        return _checked("grammar", params.grammar, _read_grammar, find_error)
    if params.choice is not None:
        return _checked("choice", _choice_rule(params.choice), LLMatcher.grammar_from_lark, find_error)
    if params.structural_tag is not None:
        tag = _as_json("structural_tag", params.structural_tag)
        return _checked("structural_tag", tag, lambda tag: _structural_tag(tag, special_tokens, params), find_error)
    schema = {"type": "object"} if params.json_object else _as_json("json", params.json)
    return _schema_grammar(schema, params, find_error)


def _checked(name: str, value: Any, make: Callable[[Any], str], find_error: FindError) -> str:
    if isinstance(value, str):
        _check_size(name, value)
    grammar = make(value)
    if error := find_error(grammar):
        raise ValueError(f"structured_outputs.{name} cannot be compiled: {_reworded(error)}")
    return grammar


def _check_size(name: str, text: str) -> None:
    if len(text) > MAX_CHARS:
        raise ValueError(f"structured_outputs.{name} has {len(text):,} characters; it can have at most {MAX_CHARS:,}")


def _as_json(name: str, value: Any) -> Any:
    """A JSON value, also of its text."""
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        _check_size(name, text)
        value = json.loads(text)
        is_too_deep = _is_deep(value, MAX_DEPTH)
    except RecursionError:
        is_too_deep = True
    except (TypeError, ValueError) as error:
        if "characters" in str(error):
            raise
        raise ValueError(f"structured_outputs.{name} is not JSON: {error}") from error
    if is_too_deep:
        raise ValueError(f"structured_outputs.{name} is nested deeper than {MAX_DEPTH} levels")
    return value


def _is_deep(value: Any, most: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    children = value.values() if isinstance(value, dict) else value
    return most == 0 or any(_is_deep(child, most - 1) for child in children)


def _read_grammar(text: str) -> str:
    """Lark, or GBNF and EBNF, which are recognised by ``::=``; or a list of grammars as JSON."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if text.lstrip().startswith("{"):
        return text
    try:
        return str(LLMatcher.grammar_from_lark(any_to_lark(text)))
    except Exception as error:  # of the converter
        raise ValueError(f"structured_outputs.grammar is not GBNF: {error}") from error


def _regex_rule(regex: str) -> str:
    """A regular expression in which ``\\d`` is an ASCII digit, as it is in the patterns of schemas."""
    from llguidance import LLMatcher, regex_to_lark

    return str(LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(regex, 'd')}/"))


def _choice_rule(choices: list[str]) -> str:
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def behind_reasoning(grammar: str, begin: str, end: str, special_tokens: Mapping[str, int]) -> str:
    """The grammar of an output that fits another one, with or without reasoning before."""

    def mark(text: str) -> str:
        return f"<[{special_tokens[text]}]>" if text in special_tokens else json.dumps(text, ensure_ascii=False)

    thought, options = f"TEXT {mark(end)}", "" if end in special_tokens else "[lazy]"
    rules = [
        "%llguidance {}",
        f"start: ({mark(begin)} thought SPACE)? @answer",
        f"thought{options}: {thought}",
        "TEXT: /(?s:.*)/",
        r"SPACE: /\n{0,2}/",
    ]
    is_list = grammar.lstrip().startswith("{")
    first, *others = json.loads(grammar)["grammars"] if is_list else [{"lark_grammar": grammar}]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, {**first, "name": "answer"}, *others]})


# --- JSON schemas -----------------------------------------------------------------------------------------------------


def _schema_grammar(schema: Any, params: StructuredOutputsParams, find_error: FindError) -> str:
    from llguidance import LLMatcher

    if not isinstance(schema, dict | bool):
        raise ValueError(f"structured_outputs.json is {schema!r:.200}; a JSON schema is an object, true or false")
    if schema is False:
        raise ValueError("structured_outputs.json is false, which no output is valid under")
    if schema is True:
        schema = {}

    def compile_schema(schema: Mapping[str, Any]) -> tuple[str, str]:
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(_prepared(schema, params)))
        except ValueError as error:  # NaN, for instance
            return "", str(error)
        return grammar, find_error(grammar)

    grammar, error = compile_schema(schema)
    if error:
        path = _locate(schema, error, lambda part: compile_schema(part)[1])
        raise ValueError(f"structured_outputs.json cannot be compiled: {_reworded(error)} (at {path})")
    return grammar


def _prepared(schema: Mapping[str, Any], params: StructuredOutputsParams) -> dict[str, Any]:
    """A schema with the options of the compiler. Keywords that are not supported become errors of it."""
    options: dict[str, Any] = {"lenient": False, "whitespace_flexible": not params.disable_any_whitespace}
    if not params.disable_any_whitespace:
        options["whitespace_pattern"] = params.whitespace_pattern or WHITESPACE
    simplified = _mapped(schema, lambda part: _simplified(part, is_closed=params.disable_additional_properties))
    return {**simplified, "x-guidance": options}


def _simplified(schema: dict[str, Any], *, is_closed: bool) -> dict[str, Any]:
    """An equivalent schema with fewer keywords; if it ``is_closed``, objects have only properties that it names."""
    schema = {
        keyword: value
        for keyword, value in schema.items()
        if keyword != "x-guidance" and (keyword not in _NEUTRAL or value not in _NEUTRAL[keyword])
    }
    options = schema.get("oneOf")
    if isinstance(options, list) and "anyOf" not in schema and all(starmap(_are_disjoint, combinations(options, 2))):
        schema["anyOf"] = schema.pop("oneOf")
    if is_closed and isinstance(schema.get("properties"), dict):
        schema.setdefault("additionalProperties", False)
    return schema


def _are_disjoint(one: Any, other: Any) -> bool:
    """Whether no value is valid under both of two schemas, as far as their constants show."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    values, others = _constants(one), _constants(other)
    if values is not None and others is not None:
        return not any(value == another for value in values for another in others)
    if one.get("type") != "object" or other.get("type") != "object":
        return False
    parts, other_parts = _required(one), _required(other)
    return any(_are_disjoint(parts[name], other_parts[name]) for name in parts.keys() & other_parts.keys())


def _required(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of the properties that an object must have."""
    names, properties = schema.get("required"), schema.get("properties")
    if not isinstance(names, list) or not isinstance(properties, dict):
        return {}
    return {name: part for name, part in properties.items() if name in names}


def _constants(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists; None: it lists none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A schema with each schema in it changed, the innermost first."""
    if not isinstance(schema, dict):
        return schema
    changed = dict(schema)
    for keyword, value in schema.items():
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            changed[keyword] = {name: _mapped(part, change) for name, part in value.items()}
        elif keyword in _SCHEMA_LISTS and isinstance(value, list):
            changed[keyword] = [_mapped(part, change) for part in value]
        elif keyword in _SCHEMAS:
            changed[keyword] = _mapped(value, change)
    return change(changed)


def _reworded(error: str) -> str:
    """An error of the compiler in one line."""
    text = " ".join(error.replace("Unimplemented keys:", "keywords that are not supported:").split())
    return text.removesuffix(".") if len(text) < _MAX_ERROR else f"{text[:_MAX_ERROR]}..."


def _locate(schema: Mapping[str, Any], error: str, find_error: Callable[[Mapping[str, Any]], str]) -> str:
    """The place of the innermost part of a schema that has its error, as a JSON pointer."""
    shared = {name: schema[name] for name in ("$defs", "definitions", "$schema") if name in schema}
    place, part = "#", schema
    while True:
        for name, child in _subschemas(part):
            if find_error({**shared, **child}) == error:
                place, part = f"{place}/{name}", child
                break
        else:
            return place


def _subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Pointer and content of the schemas directly in a schema."""
    for keyword, value in schema.items():
        parts: list[tuple[str, Any]] = []
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            parts = [(f"{keyword}/{_escaped(name)}", part) for name, part in value.items()]
        elif keyword in _SCHEMA_LISTS and isinstance(value, list):
            parts = [(f"{keyword}/{index}", part) for index, part in enumerate(value)]
        elif keyword in _SCHEMAS:
            parts = [(keyword, value)]
        for place, part in parts:
            if isinstance(part, dict):
                yield place, part


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


# --- structural tags --------------------------------------------------------------------------------------------------


def _structural_tag(tag: Any, special_tokens: Collection[str], params: StructuredOutputsParams) -> str:
    """The grammar of free text with structures. A trigger that is a special token is one; others are text."""
    from llguidance import LLMatcher, StructTag

    if not isinstance(tag, dict) or "structures" not in tag or "triggers" not in tag:
        raise ValueError(
            f"structured_outputs.structural_tag is {tag!r:.200}; it must have 'structures' and 'triggers' (the form "
            "with 'format' is not supported)"
        )
    for name in ("structures", "triggers"):
        if not isinstance(tag[name], list):
            raise ValueError(f"structured_outputs.structural_tag.{name} is {tag[name]!r:.200}; it must be a list")
    triggers, tags = [str(trigger) for trigger in tag["triggers"]], []
    for index, structure in enumerate(tag["structures"]):
        where = f"structured_outputs.structural_tag.structures[{index}]"
        if not isinstance(structure, dict) or not isinstance(structure.get("begin"), str):
            raise ValueError(f"{where} is {structure!r:.200}; it must be an object with 'begin', 'schema' and 'end'")
        begin, end = structure["begin"], structure.get("end", "")
        fitting = [trigger for trigger in triggers if trigger and begin.startswith(trigger)]
        if not fitting:
            raise ValueError(f"{where}.begin is {begin!r}, which begins with none of the triggers {triggers!r}")
        schema = structure.get("schema", {})
        schema = _prepared(schema if isinstance(schema, dict) else {"allOf": [schema]}, params)
        tags.append(StructTag(trigger=max(fitting, key=len), begin=begin, grammar=schema, end=end))
    if not tags:
        raise ValueError("structured_outputs.structural_tag has no structures; it must have at least one")
    are_special = {tag.trigger in special_tokens for tag in tags}
    if len(are_special) > 1:
        raise ValueError(f"structured_outputs.structural_tag mixes special tokens and text in triggers {triggers!r}")
    return str(LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=are_special.pop())))

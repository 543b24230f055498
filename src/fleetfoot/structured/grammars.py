"""Constraints as grammars of llguidance: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fleetfoot.parsers.grammar import Rules, quoted
from fleetfoot.records.structured_outputs import StructuredOutputsParams
from fleetfoot.structured.schemas import find, plain_regex, simplified, subschemas
from fleetfoot.utils.validation import FieldError

_MANY_CHOICES = 1000
"""From so many on a choice is one lexeme: the parser, which would have a row for each, has at most 8,000."""
MAX_CHARS = 1 << 19
"""Most characters of a constraint as text."""
MAX_DEPTH = 128
"""Deepest objects and lists in each other that a schema may have."""

WHITESPACE = r" |\n( {0,16}|\t{0,8})"
"""Between the tokens of JSON: a space, or a line break with an indentation. Without an end, small models repeat it
until ``max_tokens``."""

_MAX_ERROR = 600
_REWORDED = (
    ("Unimplemented keys:", "keywords that are not supported:"),
    (
        "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
        "oneOf is supported where no two options can be met, by their types, constants or required properties",
    ),
)

FindError = Callable[[str], str]
"""The error of a grammar's text; empty: it can be compiled."""

_JSON_BEGINS = ' \n\t\r{["-0123456789tfn'


class GrammarText(NamedTuple):
    """A grammar as llguidance reads it, and what it was made of."""

    text: str
    schema: dict[str, Any] | None = None
    """The JSON schema that is all of it, but for reasoning before; None: it is something else."""
    marks: tuple[int | str, ...] = ()
    """What the reasoning may begin with, and ends with: a token or a text each; none: there is no reasoning."""


def make_grammar(params: StructuredOutputsParams, rules: Rules, find_error: FindError) -> GrammarText:
    """The grammar of a constraint. ``rules``: none yet.

    Raises:
        ValueError: it cannot be compiled; the message names the field, the place in a schema, and the reason.
    """
    from llguidance import LLMatcher

    if params.regex is not None:
        return _checked("regex", params.regex, _regex_rule, find_error)
    if params.grammar is not None:
        return _checked("grammar", params.grammar, lambda text: _read_grammar(text, rules), find_error)
    if params.choice is not None:
        return _checked("choice", _choice_rule(params.choice), LLMatcher.grammar_from_lark, find_error)
    if params.structural_tag is not None:
        tag = _as_json("structural_tag", params.structural_tag)
        return _checked("structural_tag", tag, lambda tag: _structural_tag(tag, rules, params), find_error)
    schema = {"type": "object"} if params.json_object else _as_json("json", params.json)
    return _schema_grammar(schema, params, find_error)


def _checked(name: str, value: Any, make: Callable[[Any], str], find_error: FindError) -> GrammarText:
    if isinstance(value, str):
        check_size(name, value)
    grammar = make(value)
    if error := find_error(grammar):
        raise FieldError(f"structured_outputs.{name}", f"cannot be compiled: {_reworded(error)}")
    return GrammarText(grammar)


def check_size(name: str, text: str) -> None:
    if len(text) > MAX_CHARS:
        raise FieldError(
            f"structured_outputs.{name}", f"has {len(text):,} characters; it can have at most {MAX_CHARS:,}"
        )


def _as_json(name: str, value: Any) -> Any:
    """A JSON value, also of its text."""
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        check_size(name, text)
        value = json.loads(text)
        is_too_deep = _is_deep(value, MAX_DEPTH)
    except RecursionError:
        is_too_deep = True
    except FieldError:
        raise
    except (TypeError, ValueError) as error:
        raise FieldError(f"structured_outputs.{name}", f"is not JSON: {error}") from error
    if is_too_deep:
        raise FieldError(f"structured_outputs.{name}", f"is nested deeper than {MAX_DEPTH} levels")
    return value


def _is_deep(value: Any, most: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    children = value.values() if isinstance(value, dict) else value
    return most == 0 or any(_is_deep(child, most - 1) for child in children)


def _read_grammar(text: str, rules: Rules) -> str:
    """Lark, or GBNF and EBNF, which are recognised by ``::=``; or a list of grammars as JSON."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if text.lstrip().startswith("{"):
        try:
            content = json.loads(text)
            for part in content["grammars"]:
                if isinstance(part.get("lark_grammar"), str):
                    part["lark_grammar"] = rules.named(part["lark_grammar"])
            return json.dumps(content)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return text  # the compiler has the reason
    try:
        return str(LLMatcher.grammar_from_lark(rules.named(any_to_lark(text))))
    except Exception as error:  # of the converter
        raise FieldError("structured_outputs.grammar", f"is not GBNF: {error}") from error


def _regex_rule(regex: str) -> str:
    """A regular expression in which ``\\d`` is an ASCII digit, as it is in the patterns of schemas."""
    from llguidance import LLMatcher, regex_to_lark

    return str(LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(plain_regex(regex), 'd')}/"))


def _choice_rule(choices: list[str]) -> str:
    rule = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return f"start: {rule}" if len(choices) < _MANY_CHOICES else f"start: ONE\nONE: {rule}"


def after_reasoning(grammar: GrammarText, begin: str, end: str, rules: Rules) -> GrammarText:
    """The grammar of an output that fits another one, with or without reasoning before. ``rules``: none yet."""
    lines = [
        "%llguidance {}",
        f"start: ({rules.text(begin)} thought SPACE)? @output",
        f"thought: TEXT {rules.text(end)}" if rules.is_special(end) else f"thought[lazy]: TEXT {quoted(end)}",
        "TEXT: /(?s:.*)/",
        r"SPACE: /\n{0,2}/",
    ]
    text = framed(grammar, "\n".join(lines), "output").text
    first, last = rules.mark(begin), rules.mark(end) if rules.is_special(end) else end
    # JSON that may begin as the reasoning does cannot be told from it by one character
    if first is None or last is None or (isinstance(first, str) and first[:1] in _JSON_BEGINS):
        return GrammarText(text)
    return GrammarText(text, grammar.schema, (first, last))


def framed(grammar: GrammarText, frame: str, name: str = "answer") -> GrammarText:
    """The grammar of a frame, in which another one is ``@name``."""
    is_list = grammar.text.lstrip().startswith("{")
    first, *others = json.loads(grammar.text)["grammars"] if is_list else [{"lark_grammar": grammar.text}]
    return GrammarText(json.dumps({"grammars": [{"lark_grammar": frame}, {**first, "name": name}, *others]}))


# --- JSON schemas -----------------------------------------------------------------------------------------------------


def _schema_grammar(schema: Any, params: StructuredOutputsParams, find_error: FindError) -> GrammarText:
    from llguidance import LLMatcher

    if not isinstance(schema, dict | bool):
        raise FieldError(
            "structured_outputs.json", f"is {schema!r:.200}; a JSON schema is an object, true or false", schema
        )
    if schema is False:
        raise FieldError("structured_outputs.json", "is false, which no output is valid under")
    if schema is True:
        schema = {}

    def compile_schema(schema: Mapping[str, Any], *, has_plain_names: bool = False) -> tuple[GrammarText, str]:
        try:
            prepared = _prepared(schema, params, has_plain_names=has_plain_names)
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(prepared))
        except ValueError as error:  # NaN, for instance
            return GrammarText(""), str(error)
        return GrammarText(grammar, prepared), find_error(grammar)

    for has_plain_names in (True, False):
        grammar, error = compile_schema(schema, has_plain_names=has_plain_names)
        if not error:
            return grammar
    path = _locate(schema, error, lambda part: compile_schema(part)[1])
    raise FieldError(
        "structured_outputs.json", f"cannot be compiled: {_reworded(error)} (at {path})", path, "invalid_schema"
    )


def _prepared(
    schema: Mapping[str, Any], params: StructuredOutputsParams, *, has_plain_names: bool = False
) -> dict[str, Any]:
    """A schema with the options of the compiler. Keywords that are not supported become errors of it."""
    options: dict[str, Any] = {"lenient": False, "whitespace_flexible": not params.disable_any_whitespace}
    if not params.disable_any_whitespace:
        options["whitespace_pattern"] = params.whitespace_pattern or WHITESPACE
    is_closed = params.disable_additional_properties
    return {**simplified(schema, is_closed=is_closed, has_plain_names=has_plain_names), "x-guidance": options}


def _reworded(error: str) -> str:
    """An error of the compiler in one line."""
    for found, words in _REWORDED:
        error = error.replace(found, words)
    text = " ".join(error.split())
    return text.removesuffix(".") if len(text) < _MAX_ERROR else f"{text[:_MAX_ERROR]}..."


def _locate(schema: Mapping[str, Any], error: str, find_error: Callable[[Mapping[str, Any]], str]) -> str:
    """The place of the innermost part of a schema that has its error, as a JSON pointer; references are followed."""
    shared = {name: schema[name] for name in ("$defs", "definitions", "$schema") if name in schema}
    place, part, seen = "#", schema, {"#"}
    while True:
        target = part.get("$ref")
        parts = [(f"{place}/{name}", child) for name, child in subschemas(part)]
        found = find(schema, target) if isinstance(target, str) else None
        parts += [(str(target), found)] if isinstance(found, dict) else []
        for where, child in parts:
            if where not in seen and find_error({**shared, **child}) == error:
                place, part = where, child
                seen.add(where)
                break
        else:
            return place


# --- structural tags --------------------------------------------------------------------------------------------------


def _structural_tag(tag: Any, rules: Rules, params: StructuredOutputsParams) -> str:
    """The grammar of free text with structures. Special tokens in triggers, ``begin`` and ``end`` are meant as such."""
    from llguidance import LLMatcher

    if not isinstance(tag, dict) or "structures" not in tag or "triggers" not in tag:
        raise FieldError(
            "structured_outputs.structural_tag",
            f"is {tag!r:.200}; it must have 'structures' and 'triggers' (the form with 'format' is not supported)",
            tag,
        )
    for name in ("structures", "triggers"):
        if not isinstance(tag[name], list):
            raise FieldError(
                f"structured_outputs.structural_tag.{name}", f"is {tag[name]!r:.200}; it must be a list", tag[name]
            )
    place = "structured_outputs.structural_tag"
    _check_keys(place, tag, ("structures", "triggers", "type"))
    if tag.get("type", "structural_tag") != "structural_tag":
        raise FieldError(
            f"{place}.type", f"is {tag['type']!r:.200}; it must be 'structural_tag', or be left out", tag["type"]
        )
    triggers, tags = tag["triggers"], []
    for index, trigger in enumerate(triggers):
        if not isinstance(trigger, str) or not trigger:
            raise ValueError(f"{place}.triggers[{index}] is {trigger!r:.200}; it must be a string that is not empty")
    for index, structure in enumerate(tag["structures"]):
        where = f"{place}.structures[{index}]"
        if not isinstance(structure, dict) or not isinstance(structure.get("begin"), str):
            raise FieldError(
                where, f"is {structure!r:.200}; it must be an object with 'begin', 'schema' and 'end'", structure
            )
        _check_keys(where, structure, ("begin", "schema", "end"))
        begin, end = structure["begin"], structure.get("end", "")
        if not isinstance(end, str):
            raise FieldError(f"{where}.end", f"is {end!r:.200}; it must be a string", end)
        fitting = [trigger for trigger in triggers if begin.startswith(trigger)]
        if not fitting:
            raise FieldError(
                f"{where}.begin", f"is {begin!r}, which begins with none of the triggers {triggers!r}", begin
            )
        schema = structure.get("schema", {})
        schema = _prepared(schema if isinstance(schema, dict) else {"allOf": [schema]}, params)
        trigger, value = max(fitting, key=len), rules.add(f"%json {json.dumps(schema)}")
        texts = rules.until(trigger), rules.given(begin.removeprefix(trigger)), value, rules.given(end)
        tags.append(rules.add(" ".join(filter(None, texts))))
    if not tags:
        raise FieldError(place, "has no structures; it must have at least one")
    return str(LLMatcher.grammar_from_lark(rules.render(f"{rules.any_of(tags)}* TEXT")))


def _check_keys(place: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raises ValueError for a key that would have no effect."""
    for name in value:
        if name not in known:
            raise FieldError(place, f"has an unknown key {name!r:.100}; it takes {', '.join(known)}")

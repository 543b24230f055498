"""Constraints as grammars of llguidance: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fleetfoot.parsers.grammar import Rules, quoted
from fleetfoot.records.structured_outputs import StructuredOutputsParams
from fleetfoot.structured.schemas import advice, plain_regex, simplified
from fleetfoot.utils.json_schema import find, pointer, subschemas
from fleetfoot.utils.validation import FieldError, is_deeper

_MANY_CHOICES = 1000  # from so many on a choice is one lexeme: the parser, with a row for each, has at most 8,000
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


@dataclass(frozen=True)
class GrammarText:
    """A grammar as llguidance reads it, and what it was made of."""

    content: dict[str, Any]
    """``grammars``, of which the first one is the whole."""
    is_schema: bool = False
    """Whether the last one is a JSON schema that is all of it, but for reasoning before."""
    marks: Sequence[int | str] = ()
    """What the reasoning may begin with, and ends with: a token or a text each; none: there is no reasoning."""

    @cached_property
    def text(self) -> str:
        return json.dumps(self.content)

    @property
    def schema(self) -> Any:
        """The JSON schema that is all of it, but for reasoning before; None: it is something else."""
        return self.content["grammars"][-1]["json_schema"] if self.is_schema else None

    @classmethod
    def lark(cls, text: str) -> GrammarText:
        return cls({"grammars": [{"lark_grammar": text}]})

    def framed(self, frame: str, name: str = "answer", **options: Any) -> GrammarText:
        """The grammar of a frame, in which this one is ``@name``. ``options``: other fields."""
        first, *others = self.content["grammars"]
        return GrammarText({"grammars": [{"lark_grammar": frame}, {**first, "name": name}, *others]}, **options)


def make_grammar(params: StructuredOutputsParams, rules: Rules, find_error: FindError) -> GrammarText:
    """The grammar of a constraint, and of what is around it. ``rules``: none yet. Raises FieldError: it cannot be
    compiled."""
    from llguidance import regex_to_lark

    for name in ("regex", "grammar", "frame"):
        check_size(name, getattr(params, name) or "")
    if params.regex is not None:
        regex = regex_to_lark(plain_regex(params.regex), "d")  # a digit is one of ASCII, as in the patterns of schemas
        name, grammar = "regex", GrammarText.lark(f"start: /{regex}/")
    elif params.grammar is not None:
        name, grammar = "grammar", _read_grammar(params.grammar, rules)
    elif params.choice is not None:
        rule = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in params.choice)
        is_short = len(params.choice) < _MANY_CHOICES
        name, grammar = "choice", GrammarText.lark(f"start: {rule}" if is_short else f"start: ONE\nONE: {rule}")
    elif params.structural_tag is not None:
        tag = _as_json("structural_tag", params.structural_tag)
        name, grammar = "structural_tag", GrammarText.lark(_structural_tag(tag, rules, params))
    else:
        schema = {"type": "object"} if params.json_object else _as_json("json", params.json)
        name, grammar = "", _schema_grammar(schema, params, find_error)
    parts = [(name, grammar)] if name else []
    if params.frame is not None:
        grammar = grammar.framed(params.frame)
        parts.append(("frame", grammar))
    for name, part in parts:
        if error := find_error(part.text):
            raise refused(name, f"cannot be compiled: {_reworded(error)}")
    return grammar


def refused(name: str, problem: str, value: Any = None, code: str | None = None) -> FieldError:
    return FieldError(f"structured_outputs.{name}", problem, value, code)


def check_size(name: str, text: str) -> None:
    if len(text) > MAX_CHARS:
        raise refused(name, f"has {len(text):,} characters; it can have at most {MAX_CHARS:,}")


def _as_json(name: str, value: Any) -> Any:
    """A JSON value, also of its text."""
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        check_size(name, text)
        value = json.loads(text)
        if is_deeper(value, MAX_DEPTH):
            raise RecursionError
    except FieldError:
        raise
    except (TypeError, ValueError) as error:
        raise refused(name, f"is not JSON: {error}") from error
    except RecursionError as error:
        raise refused(name, f"is nested deeper than {MAX_DEPTH} levels") from error
    return value


def _read_grammar(text: str, rules: Rules) -> GrammarText:
    """Lark, or GBNF and EBNF, which are recognised by ``::=``; or a list of grammars as JSON."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        if not text.lstrip().startswith("{"):
            return GrammarText.lark(rules.named(any_to_lark(text)))
        content = json.loads(text)
        for part in content["grammars"]:
            if isinstance(part.get("lark_grammar"), str):
                part["lark_grammar"] = rules.named(part["lark_grammar"])
    except Exception as error:  # of the converter, or of content that is no list of grammars
        kind = "JSON with a list of 'grammars'" if text.lstrip().startswith("{") else "GBNF"
        raise refused("grammar", f"cannot be compiled: it is not {kind}: {error!r}") from error
    return GrammarText(content)


def after_reasoning(grammar: GrammarText, begin: str, end: str, rules: Rules) -> GrammarText:
    """The grammar of an output that fits another one, with or without reasoning before. ``rules``: none yet."""
    lines = [
        "%llguidance {}",
        f"start: ({rules.text(begin)} thought SPACE)? @output",
        f"thought: TEXT {rules.text(end)}" if rules.is_special(end) else f"thought[lazy]: TEXT {quoted(end)}",
        "TEXT: /(?s:.*)/",
        r"SPACE: /\n{0,2}/",
    ]
    first, last = rules.mark(begin), rules.mark(end) if rules.is_special(end) else end
    # JSON that may begin as the reasoning does cannot be told from it by one character
    if first is None or last is None or (isinstance(first, str) and first[:1] in _JSON_BEGINS):
        return grammar.framed("\n".join(lines), "output")
    return grammar.framed("\n".join(lines), "output", is_schema=grammar.is_schema, marks=(first, last))


# --- JSON schemas -----------------------------------------------------------------------------------------------------


def _schema_grammar(schema: Any, params: StructuredOutputsParams, find_error: FindError) -> GrammarText:
    if not isinstance(schema, dict | bool):
        raise refused("json", f"is {schema!r:.200}; a JSON schema is an object, true or false", schema)
    if schema is False:
        raise refused("json", "is false, which no output is valid under")
    schema = {} if schema is True else schema

    def compile_schema(schema: Mapping[str, Any], *, has_plain_names: bool = False) -> tuple[GrammarText, str]:
        try:
            prepared = _prepared(schema, params, has_plain_names=has_plain_names)
        except ValueError as error:
            return GrammarText({}), str(error)
        grammar = GrammarText({"grammars": [{"json_schema": prepared}]}, is_schema=True)
        return grammar, find_error(grammar.text)

    for has_plain_names in (True, False):
        grammar, error = compile_schema(schema, has_plain_names=has_plain_names)
        if not error:
            return grammar
    path, part = _locate(schema, error, lambda part: compile_schema(part)[1])
    reason = "; ".join(filter(None, (_reworded(error), advice(part, schema))))
    raise refused("json", f"cannot be compiled: {reason} (at {path})", path, "invalid_schema")


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
    if error.startswith("panic"):  # with a backtrace of the library
        return "it is too large; make it smaller"
    for found, words in _REWORDED:
        error = error.replace(found, words)
    text = " ".join(error.split())
    return text.removesuffix(".") if len(text) < _MAX_ERROR else f"{text[:_MAX_ERROR]}..."


def _locate(
    schema: Mapping[str, Any], error: str, find_error: Callable[[Mapping[str, Any]], str]
) -> tuple[str, Mapping[str, Any]]:
    """The place of the innermost part of a schema that has its error, as a JSON pointer, and that part; references are
    followed."""
    shared = {name: schema[name] for name in ("$defs", "definitions", "$schema") if name in schema}
    place, part, seen = "#", schema, {"#"}
    while True:
        parts = [(f"{place}/{pointer(keyword, name)}", child) for keyword, name, child in subschemas(part)]
        parts.append((str(part.get("$ref")), find(schema, part.get("$ref"))))
        for where, child in parts:
            if where not in seen and isinstance(child, dict) and find_error({**shared, **child}) == error:
                place, part = where, child
                seen.add(where)
                break
        else:
            return place, part


# --- structural tags --------------------------------------------------------------------------------------------------

_TAG = "structural_tag"


def _check(is_right: bool, place: str, value: Any, expected: str) -> None:
    """Raises FieldError for a value that is not what is expected."""
    if not is_right:
        raise refused(place, f"is {value!r:.200}; it must {expected}", value)


def _check_keys(place: str, value: Mapping[str, Any], *known: str) -> None:
    """Raises FieldError for a key that would have no effect."""
    if unknown := [name for name in value if name not in known]:
        raise refused(place, f"has an unknown key {unknown[0]!r:.100}; it takes {', '.join(known)}")


def _structural_tag(tag: Any, rules: Rules, params: StructuredOutputsParams) -> str:
    """The grammar of free text with structures. Special tokens in triggers, ``begin`` and ``end`` are meant as such."""
    is_known = isinstance(tag, dict) and tag.keys() >= {"structures", "triggers"}
    _check(is_known, _TAG, tag, "have 'structures' and 'triggers' (the form with 'format' is not supported)")
    for name in ("structures", "triggers"):
        _check(isinstance(tag[name], list), f"{_TAG}.{name}", tag[name], "be a list")
    _check_keys(_TAG, tag, "structures", "triggers", "type")
    kind, triggers, tags = tag.get("type", _TAG), tag["triggers"], []
    _check(kind == _TAG, f"{_TAG}.type", kind, f"be {_TAG!r}, or be left out")
    for index, trigger in enumerate(triggers):
        is_text = isinstance(trigger, str) and bool(trigger)
        _check(is_text, f"{_TAG}.triggers[{index}]", trigger, "be a string that is not empty")
    for index, structure in enumerate(tag["structures"]):
        where = f"{_TAG}.structures[{index}]"
        is_known = isinstance(structure, dict) and isinstance(structure.get("begin"), str)
        _check(is_known, where, structure, "be an object with 'begin', 'schema' and 'end'")
        _check_keys(where, structure, "begin", "schema", "end")
        begin, end, schema = structure["begin"], structure.get("end", ""), structure.get("schema", {})
        _check(isinstance(end, str), f"{where}.end", end, "be a string")
        fitting = [trigger for trigger in triggers if begin.startswith(trigger)]
        if not fitting:
            raise refused(f"{where}.begin", f"is {begin!r}, which begins with none of the triggers {triggers!r}", begin)
        schema = _prepared(schema if isinstance(schema, dict) else {"allOf": [schema]}, params)
        trigger, value = max(fitting, key=len), rules.add(f"%json {json.dumps(schema)}")
        texts = rules.until(trigger), rules.given(begin.removeprefix(trigger)), value, rules.given(end)
        tags.append(rules.add(" ".join(filter(None, texts))))
    if not tags:
        raise refused(_TAG, "has no structures; it must have at least one")
    return rules.render(f"{rules.any_of(tags)}* TEXT")

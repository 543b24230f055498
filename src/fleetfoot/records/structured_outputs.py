"""`StructuredOutputsParams`: what the output of a request must look like."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec

from fleetfoot.parsers.grammar import closed
from fleetfoot.utils.validation import FieldError, checked_keywords

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Fields of which exactly one is given."""
_BACKEND = "leave it out: grammars are compiled by llguidance ('guidance')"


@checked_keywords
@dataclass(slots=True)
class StructuredOutputsParams:
    """A constraint of the output, exactly one of ``json``, ``regex``, ``choice``, ``grammar``, ``json_object`` and
    ``structural_tag``; and how it is applied. Names and meanings are vLLM's, those of reasoning and ``frame`` apart.

    Creating an object validates the fields and raises a `ValueError` that names the field; whether the constraint can
    be compiled is checked when a request is added.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "backend": ("auto", _BACKEND),
        "_backend": ("guidance", _BACKEND),
        "backend_was_auto": (True, _BACKEND),
        "_backend_was_auto": (True, _BACKEND),
    }

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema, as an object or as text: the output is JSON that is valid under it."""
    regex: str | None = None
    """The whole output matches it. Syntax of Rust's ``regex``, without look-around."""
    choice: list[str] | None = None
    """The output is one of these strings."""
    grammar: str | None = None
    """A context-free grammar, in llguidance's variant of Lark (a rule ``start``), or in GBNF (``root ::= ...``)."""
    json_object: bool | None = None
    """The output is any JSON object."""
    disable_fallback: bool = False
    """No effect: there is one backend."""
    disable_any_whitespace: bool = False
    """JSON has no white space between its tokens."""
    disable_additional_properties: bool = False
    """Objects of the schema have no other properties than those that it names."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space between the tokens of JSON."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text in which a trigger begins a structure: ``{"structures": [{"begin", "schema", "end"}, ...],
    "triggers": [...]}``, as an object or as text."""
    reasoning_end: str | None = None
    """The constraint begins after the first occurrence of this text in the output (``</think>``); before it, the
    output is free. None: it begins at once."""
    reasoning_begin: str | None = None
    """The output is free up to ``reasoning_end`` only if it begins with this text (``<think>``), and may do so. None:
    it is free whatever it begins with."""
    max_reasoning_tokens: int | None = None
    """Tokens before ``reasoning_end``, after which its tokens are forced. ``reasoning_begin`` is forced too."""
    frame: str | None = None
    """A grammar in Lark of the whole output, in which the constraint is ``@answer``. None: it is all of the output."""

    def __post_init__(self) -> None:
        if self.json_object is False:
            self.json_object = None
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"got {' and '.join(given)}" if given else "got none"
            raise FieldError("structured_outputs", f"needs exactly one of {', '.join(CONSTRAINTS)}; {found}")
        for name in ("regex", "grammar", "reasoning_end", "reasoning_begin", "whitespace_pattern", "frame"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise FieldError(
                    f"structured_outputs.{name}", f"must be a string that is not empty, got {value!r:.200}", value
                )
        budget = self.max_reasoning_tokens
        if budget is not None and (type(budget) is not int or budget < 0 or self.reasoning_end is None):
            raise FieldError(
                "structured_outputs.max_reasoning_tokens",
                f"must be at least 0, with reasoning_end, got {budget!r:.50}",
                budget,
            )
        for name in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise FieldError(
                    f"structured_outputs.{name}",
                    f"must be True or False, got {getattr(self, name)!r:.200}",
                    getattr(self, name),
                )
        if self.json_object is not None and self.json_object is not True:
            raise FieldError(
                "structured_outputs.json_object", f"must be True, got {self.json_object!r:.200}", self.json_object
            )
        for name, kinds in (("json", (str, dict, bool)), ("structural_tag", (str, dict))):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise FieldError(
                    f"structured_outputs.{name}", f"must be an object or its JSON text, got {value!r:.200}", value
                )
            setattr(self, name, _sendable(value))
        if self.choice is not None:
            self.choice = _choices(self.choice)
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise FieldError(
                "structured_outputs.whitespace_pattern",
                f"is {self.whitespace_pattern!r}, and disable_any_whitespace is True; give one of them",
                self.whitespace_pattern,
            )


def with_closed_objects(constraint: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
    """A constraint in which objects of a schema have only the properties that it names.

    Those with other demands on properties stay as they are.
    """
    if constraint is None or constraint.json is None:
        return constraint
    schema: Any = constraint.json
    with contextlib.suppress(ValueError, RecursionError):  # the compiler has the reason
        schema = closed(json.loads(schema) if isinstance(schema, str) else schema)
    return replace(constraint, json=schema)


def _sendable(value: Any) -> Any:
    """A copy of a schema; its text if it has integers of more than 64 bits, which MessagePack does not have."""
    with contextlib.suppress(TypeError, ValueError, RecursionError):  # the compiler has the reason
        try:
            msgspec.msgpack.encode(value)
        except OverflowError:
            return json.dumps(value)
    return copy.deepcopy(value)


def _choices(values: Any) -> list[str]:
    allowed = "a list of strings that are not empty, at least one"
    if isinstance(values, str) or not isinstance(values, list | tuple) or not values:
        raise FieldError("structured_outputs.choice", f"must be {allowed}, got {values!r:.200}", values)
    for value in values:
        if not isinstance(value, str) or not value:
            raise FieldError("structured_outputs.choice", f"must be {allowed}, got {value!r:.200} in it", value)
    return list(dict.fromkeys(values))


def as_structured_outputs(value: Any) -> StructuredOutputsParams | None:
    """A validated copy of the parameters, of a dict of them, or None. Raises ValueError."""
    if value is None:
        return None
    if isinstance(value, StructuredOutputsParams):
        value = {name: getattr(value, name) for name in StructuredOutputsParams.__slots__}
    elif not isinstance(value, dict):
        raise FieldError(
            "structured_outputs", f"must be a StructuredOutputsParams, a dict, or not set, got {value!r:.200}", value
        )
    try:
        return StructuredOutputsParams(**value)
    except TypeError as error:  # an unknown keyword
        raise ValueError(f"structured_outputs: {error}") from error

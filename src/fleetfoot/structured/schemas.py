"""JSON schemas with only those keywords that llguidance supports.

`simplified` returns an equivalent schema; in these places it allows less: formats of international texts are those of
ASCII, no time has a leap second, bounds of numbers are at most 10^18 in size, the items of a set are in the order of
its values and as many as make 4,096 lists, the first item that ``contains`` demands is among the first ones, and where
``not``, ``if`` or ``oneOf`` exclude integers, other numbers are left out, too. Keywords without an equivalent are left
in place, which makes them errors of the compiler.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, combinations
from typing import Any

from fleetfoot.structured.disjoint import MAX_COMPARED, MAX_REFERENCES, all_disjoint, constants, required_names
from fleetfoot.structured.negation import MAX_TEXT, NEVER, NOTES, Resolve, negated, other_texts

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "not": (False, {"enum": []}),
}
"""Keywords that are not supported, with the values that allow everything."""
_NEEDED = (("then", "if"), ("else", "if"), ("minContains", "contains"), ("maxContains", "contains"))
"""Keywords without an effect, unless another one is there."""
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_IN_PLACE = ("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
"""Keywords with schemas that evaluate properties and items of the same value."""
_DIALECTS = ("http://json-schema.org/draft-", "https://json-schema.org/draft/")

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = (
    "additionalProperties", "items", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip

_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    "|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_POINTER = "(/([^~/]|~[01])*)*"
_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
    "uuid": "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
}
"""Formats that the compiler lacks or is not exact about, and for names."""
_ASCII_FORMATS = {
    "iri": "uri", "uri-reference": "uri", "iri-reference": "uri", "uri-template": "uri",
    "idn-email": "email",
}  # fmt: skip
_FORMATS = ("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
"""Formats of the compiler."""
_NO_FORMATS = ("regex", "idn-hostname")
"""Formats of JSON Schema that are not supported. Others have no effect."""

_NAME = r"[A-Za-z0-9_'+\-]"
_DOMAIN = r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
_ADDRESS = rf"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]{_DOMAIN}"
_SECONDS = r"\d+([.,]\d+)?S"
_CLOCK = rf"T(\d+H(\d+M)?({_SECONDS})?|\d+M({_SECONDS})?|{_SECONDS})"
_DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
_SAME_PATTERNS = {
    _DURATION: rf"^P(\d+W|(\d+Y(\d+M)?(\d+D)?|\d+M(\d+D)?|\d+D)({_CLOCK})?|{_CLOCK})$",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
    _ADDRESS: rf"^({_NAME}+\.)*{_NAME}*[A-Za-z0-9_+-]{_DOMAIN}",
}
"""Patterns of Zod's durations and addresses and Pydantic's decimals, and the same without look-around."""
_AHEAD = re.compile(r"\^\(\?=((?:[^()\\\[|]|\\.|\[(?:[^\]\\]|\\.)+\])*)\)([^|]*)", re.DOTALL)
"""A pattern that begins with a look-ahead, and the rest of it."""
_ESCAPE_OR_CLASS = re.compile(r"\\(.)|\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]", re.DOTALL)
_PART_OF_CLASS = re.compile(r"\\([<>])|\\.|\[:\^?\w+:\]|(\[|&&|--|~~)", re.DOTALL)

_MAX_NUMBER = 10**18
_MAX_CONSTANT = 2**63
_MAX_OPTIONAL = 1000
_MAX_SET = 1024
"""Lists that counts of properties become."""
_MAX_LISTS = 1 << 12
"""Lists that ``uniqueItems`` becomes. Those with more items are left out, if some with so many are there:"""
_FEWEST_ITEMS = 3
_MAX_CONTAINED = 8
"""Items up to the first one that ``contains`` demands."""
_MAX_NEGATED = 8
"""Options of ``oneOf`` of which some can be met together."""
_MAX_RESOLVED = 50_000
"""Parts of a schema that are resolved for comparisons: references can form trees of any size."""


def simplified(schema: Mapping[str, Any], *, is_closed: bool = False, has_plain_names: bool = False) -> dict[str, Any]:
    """A schema of supported keywords.

    Args:
        is_closed: objects have only the properties that the schema names.
        has_plain_names: the names of other properties have no needless escapes, by which they could be those of
            properties that the schema names. Fewer schemas can be compiled.

    Raises:
        ValueError: a number is too large to be compared.
    """

    left = iter(range(_MAX_RESOLVED))

    def resolve(part: Any) -> Any:
        if next(left, None) is None:
            return None
        for _ in range(MAX_REFERENCES):
            if not isinstance(part, dict) or part.keys() - NOTES != {"$ref"} or not isinstance(part["$ref"], str):
                return part
            part = find(schema, part["$ref"])
        return None

    changed: dict[str, Any] = _mapped(schema, lambda part: _simplified(part, resolve, is_closed=is_closed))
    return _mapped(changed, _with_plain_names) if has_plain_names else changed


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
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


def find(root: Any, reference: str) -> Any:
    """The part of a schema that a pointer of it names; None: there is none, or it is no pointer."""
    names = reference.split("/")
    if names[0] != "#":
        return None
    for name in names[1:]:
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


def _mapped(schema: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
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


def _simplified(schema: dict[str, Any], resolve: Resolve, *, is_closed: bool) -> dict[str, Any]:
    """One schema, without those in it."""
    if "not" in schema and schema["not"] in (True, {}):
        return dict(NEVER)
    if schema.get("unevaluatedProperties") in (True, {}):  # they count as evaluated
        schema = {"additionalProperties": True, **schema}
    schema = {
        keyword: value
        for keyword, value in schema.items()
        if keyword != "x-guidance" and (keyword not in _NEUTRAL or value not in _NEUTRAL[keyword])
    }
    if not str(schema.get("$schema", _DIALECTS[0])).startswith(_DIALECTS):
        del schema["$schema"]
    _change_unevaluated(schema, resolve)
    for keyword, other in _NEEDED:
        if other not in schema:
            schema.pop(keyword, None)
    if "then" not in schema and "else" not in schema:
        schema.pop("if", None)
    _change_numbers(schema)
    _change_pattern(schema)
    _change_format(schema)
    _change_dependencies(schema)
    _change_names(schema, resolve)
    _check_counts(schema)
    _change_counts(schema)
    _change_set(schema, resolve)
    _change_contains(schema)
    _change_one_of(schema, resolve)
    _change_conditions(schema, resolve)
    if is_closed and isinstance(schema.get("properties"), dict):
        schema.setdefault("additionalProperties", False)
    return schema


def _add(schema: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Demand that another schema is met, too."""
    others = schema.get("allOf", [])
    schema["allOf"] = [*(others if isinstance(others, list) else [others]), part]


# --- numbers and strings ----------------------------------------------------------------------------------------------


def _change_numbers(schema: dict[str, Any]) -> None:
    for keyword in _COUNTS:
        if isinstance(count := schema.get(keyword), float) and count.is_integer():
            schema[keyword] = int(count)
    for keyword, sign in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
        bound = schema.get(keyword)
        if isinstance(bound, int | float) and not isinstance(bound, bool):
            schema[keyword] = _bound(bound * sign) * sign
    for keyword in ("const", "enum"):
        if keyword in schema and (number := _inexact(schema[keyword])) is not None:
            raise ValueError(f"{keyword} has {number}, which is too large to be compared exactly")


def _bound(number: float) -> float:
    """An upper bound that the compiler can compare: at most as large, and exact as a float."""
    if number > _MAX_NUMBER:
        return _MAX_NUMBER
    near = float(number) if number > -_MAX_NUMBER else number
    if not isinstance(number, int) or near == number:
        return number
    return int(near if near < number else math.nextafter(near, -math.inf))


def _inexact(value: Any) -> int | float | None:
    """A number within a constant that is another one as a float; None: there is none."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return next((found for part in parts if (found := _inexact(part)) is not None), None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    is_exact = abs(value) < _MAX_CONSTANT and float(value) == value
    return None if is_exact else value


def plain_regex(pattern: str) -> str:
    """A regular expression that the compiler reads as Python and JavaScript do: in its own, ``\\<`` begins a word, and
    classes have operators."""

    def change(match: re.Match[str]) -> str:
        if match[1]:
            return match[1] if match[1] in "<>" else match[0]
        return "[" + _PART_OF_CLASS.sub(
            lambda part: part[1] or "".join(f"\\{one}" for one in part[2] or ()) or part[0], match[0][1:]
        )

    return _ESCAPE_OR_CLASS.sub(change, pattern)


def _change_pattern(schema: dict[str, Any]) -> None:
    """Look-ahead at the beginning as patterns that are met, too."""
    pattern = schema.get("pattern")
    if not isinstance(pattern, str):
        return
    while match := _AHEAD.fullmatch(pattern):
        _add(schema, {"pattern": f"^{match[1]}"})
        pattern = f"^{match[2]}"
    schema["pattern"] = plain_regex(_SAME_PATTERNS.get(pattern, pattern))


def _change_format(schema: dict[str, Any]) -> None:
    name = schema.get("format")
    if not isinstance(name, str) or name in _FORMATS or name in _NO_FORMATS:
        return
    del schema["format"]
    if name in _ASCII_FORMATS:
        schema["format"] = _ASCII_FORMATS[name]
    elif name in _PATTERNS and "pattern" not in schema:
        schema["pattern"] = _PATTERNS[name]
    elif name in _PATTERNS:
        _add(schema, {"pattern": _PATTERNS[name]})


# --- objects ----------------------------------------------------------------------------------------------------------


def _change_unevaluated(schema: dict[str, Any], resolve: Resolve) -> None:
    """Without other schemas of the same value, or with those that name their properties, what is not evaluated is
    additional."""
    names = _evaluated(schema, resolve)
    if "unevaluatedProperties" in schema and names is not None and "additionalProperties" not in schema:
        schema["additionalProperties"] = schema.pop("unevaluatedProperties")
        schema["properties"] = {**{name: {} for name in names}, **schema.get("properties", {})}
    if any(keyword in schema for keyword in _IN_PLACE):
        return
    if "unevaluatedProperties" in schema:
        schema.setdefault("additionalProperties", schema.pop("unevaluatedProperties"))
    if "unevaluatedItems" in schema and "contains" not in schema:
        keyword = "additionalItems" if isinstance(schema.get("items"), list) else "items"
        schema.setdefault(keyword, schema.pop("unevaluatedItems"))


def _evaluated(schema: Any, resolve: Resolve, depth: int = 0) -> list[str] | None:
    """The properties that a schema and those that are met with it evaluate; None: not by their names alone."""
    schema = resolve(schema)
    others = {*_IN_PLACE, "patternProperties", "additionalProperties"} - {"$ref", "allOf"}
    if not isinstance(schema, dict) or depth > MAX_REFERENCES or schema.keys() & others:
        return None
    properties, parts = schema.get("properties", {}), schema.get("allOf", [])
    if not isinstance(properties, dict) or not isinstance(parts, list):
        return None
    names = list(properties)
    for part in [*parts, *([{"$ref": schema["$ref"]}] if "$ref" in schema else ())]:
        found = _evaluated(part, resolve, depth + 1)
        if found is None:
            return None
        names += found
    return names


def _change_dependencies(schema: dict[str, Any]) -> None:
    """What the presence of a property demands: it is absent, or that is met."""
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        needs = schema.get(keyword)
        if isinstance(needs, dict) and all(isinstance(need, list | dict | bool) for need in needs.values()):
            del schema[keyword]
            for name, need in needs.items():
                then = {"required": need} if isinstance(need, list) else need
                there = {"properties": {name: {}}, "required": [name]}
                _add(schema, {"anyOf": [{"properties": {name: NEVER}}, {"allOf": [there, then]}]})


def _change_names(schema: dict[str, Any], resolve: Resolve) -> None:
    """``propertyNames`` as named properties, or as a pattern of names."""
    names = resolve(schema.get("propertyNames"))
    properties, other = schema.get("properties", {}), schema.get("additionalProperties", {})
    if not isinstance(names, dict) or not isinstance(properties, dict) or "patternProperties" in schema:
        return
    demands = names.keys() - NOTES - {"type"}
    if names.get("type", "string") != "string":
        return
    if demands in ({"enum"}, {"const"}):
        allowed = [value for value in constants(names) or () if isinstance(value, str)]
        forbidden = {name: NEVER for name in properties if name not in allowed}
        schema["properties"] = {**{name: properties.get(name, other) for name in allowed}, **forbidden}
    elif not properties and (pattern := _pattern_of(names, demands)) is not None:
        schema["patternProperties"] = {pattern: other}
    else:
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False


def _pattern_of(names: Mapping[str, Any], demands: set[str]) -> str | None:
    """The pattern that is all that a schema demands of strings; None: it demands other things."""
    if demands == {"pattern"}:
        return str(names["pattern"])
    if demands and demands <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return _PATTERNS.get(str(names["format"])) if demands == {"format"} else None


def _count(schema: Mapping[str, Any], keyword: str, default: int) -> int:
    return count if isinstance(count := schema.get(keyword), int) else default


def check_size(schema: Mapping[str, Any]) -> None:
    """Raise ValueError for a schema with an object that the parser has no room for, whatever its other keywords are."""
    parts = [schema]
    while parts:
        part = parts.pop()
        _check_optional(part)
        parts += [child for _, child in subschemas(part)]


def _check_optional(schema: Mapping[str, Any]) -> None:
    required, properties = schema.get("required"), schema.get("properties")
    num_required = len(required) if isinstance(required, list) else 0
    if isinstance(properties, dict) and len(properties) - num_required > _MAX_OPTIONAL:
        raise ValueError(f"properties has {len(properties):,}; at most {_MAX_OPTIONAL:,} need not be required")


def _check_counts(schema: Mapping[str, Any]) -> None:
    """Properties that the parser has no room for; and the compiler counts a name that is used twice as two."""
    count, required = schema.get("minProperties"), schema.get("required")
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    num_required = len(required) if isinstance(required, list) else 0
    _check_optional(schema)
    if isinstance(count, int) and count > num_required + 1 and not is_closed:
        raise ValueError(
            f"minProperties is {count}, and {num_required} properties are required; it can be one more, unless "
            "additionalProperties is false"
        )


def _with_plain_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Other properties by a pattern of all names: the compiler writes names that fit a pattern without needless
    escapes, by which they could be those of named properties. If they have a schema, the pattern excludes names, which
    makes the masks of names slow."""
    additional, names = schema.get("additionalProperties", True), schema.get("properties")
    if additional is False or not names or schema.get("patternProperties") or sum(map(len, names)) > MAX_TEXT:
        return schema
    pattern = "^" if additional in (True, {}) else f"^{other_texts(names)}$"
    return {**schema, "patternProperties": {pattern: additional}, "additionalProperties": False}


# --- arrays and alternatives ------------------------------------------------------------------------------------------


def _change_set(schema: dict[str, Any], resolve: Resolve) -> None:
    """``uniqueItems`` of a few values: their subsets, each in the order of the values."""
    if schema.get("maxItems") in (0, 1):
        schema.pop("uniqueItems", None)
    values = _values_of(schema.get("items"), resolve)
    if schema.get("uniqueItems") is not True or schema.get("type") != "array" or values is None:
        return
    if schema.keys() & {"enum", "prefixItems", "contains"}:
        return
    values = list({json.dumps(value, sort_keys=True): value for value in values}.values())
    asked = min(len(values), _count(schema, "maxItems", len(values)))
    counts = list(accumulate(math.comb(len(values), size) for size in range(asked + 1)))
    most = sum(count <= _MAX_LISTS for count in counts) - 1
    if most >= min(asked, max(_FEWEST_ITEMS, _count(schema, "minItems", 0))):
        del schema["uniqueItems"], schema["items"]
        schema["enum"] = [list(chosen) for size in range(most + 1) for chosen in combinations(values, size)]


def _values_of(schema: Any, resolve: Resolve) -> list[Any] | None:
    """The values that are valid under a schema, if these are a few; None: others, or it is not clear."""
    schema = resolve(schema)
    if not isinstance(schema, dict):
        return None
    kind, demands = schema.get("type"), schema.keys() - NOTES
    if demands == {"anyOf"} and isinstance(schema["anyOf"], list):
        found = [_values_of(part, resolve) for part in schema["anyOf"]]
        return None if None in found else [value for values in found for value in values or ()]
    values = constants(schema)
    if values is not None and demands <= {"type", "enum", "const"}:
        kinds = {"string": str, "integer": int, "boolean": bool, "null": type(None)}
        fits = kind is None or (isinstance(kind, str) and all(type(value) is kinds.get(kind) for value in values))
        return values if fits else None
    if demands == {"type"} and kind in ("boolean", "null"):
        return [False, True] if kind == "boolean" else [None]
    bounds = {name: schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")}
    given = [bound for bound in bounds.values() if bound is not None]
    if kind != "integer" or not demands <= {"type", *bounds} or not all(type(bound) in (int, float) for bound in given):
        return None
    lowest = [math.ceil(bounds["minimum"])] if bounds["minimum"] is not None else []
    lowest += [math.floor(bounds["exclusiveMinimum"]) + 1] if bounds["exclusiveMinimum"] is not None else []
    highest = [math.floor(bounds["maximum"])] if bounds["maximum"] is not None else []
    highest += [math.ceil(bounds["exclusiveMaximum"]) - 1] if bounds["exclusiveMaximum"] is not None else []
    if not lowest or not highest or min(highest) - max(lowest) >= _MAX_LISTS:
        return None
    return list(range(max(lowest), min(highest) + 1))


def _change_contains(schema: dict[str, Any]) -> None:
    """``contains`` as the first items, of which the last one is such an item."""
    if schema.get("type") != "array" or "contains" not in schema or "maxContains" in schema:
        return
    if schema.get("minContains", 1) != 1 or isinstance(schema.get("items", {}), list) or "prefixItems" in schema:
        return
    item = schema.get("items", {})
    last = {"allOf": [item, schema.pop("contains")]}
    options = [
        {"type": "array", "prefixItems": [*[item] * size, last], "items": item, "minItems": size + 1}
        for size in range(min(_count(schema, "maxItems", _MAX_CONTAINED), _MAX_CONTAINED))
    ]
    schema.pop("minContains", None)
    _add(schema, {"anyOf": options} if options else NEVER)


def _change_counts(schema: dict[str, Any]) -> None:
    """``minProperties`` and ``maxProperties`` of named properties that are not all required."""
    properties, required = schema.get("properties"), set(required_names(schema))
    if not isinstance(properties, dict) or schema.get("additionalProperties") is not False:
        return
    if schema.get("patternProperties") or not required < set(properties):
        return
    optional = [name for name in properties if name not in required]
    least = max(_count(schema, "minProperties", 0) - len(required), 0)
    most = _count(schema, "maxProperties", len(properties)) - len(required)
    if max(math.comb(len(optional), least), math.comb(len(optional), max(most, 0))) > _MAX_SET:
        return
    if schema.pop("minProperties", None) is not None and least:
        _add(schema, {"anyOf": [{"required": list(chosen)} for chosen in combinations(optional, least)]})
    if schema.pop("maxProperties", None) is not None and 0 <= most < len(optional):
        excluded = combinations(optional, len(optional) - most)
        _add(schema, {"anyOf": [{"properties": {name: NEVER for name in chosen}} for chosen in excluded]})


def _change_one_of(schema: dict[str, Any], resolve: Resolve) -> None:
    """Options of which no two are met are those of ``anyOf``."""
    options = schema.get("oneOf")
    if not isinstance(options, list) or len(options) ** 2 > MAX_COMPARED:
        return
    if not all_disjoint(options, resolve):
        others = [negated(option, resolve) for option in options] if len(options) <= _MAX_NEGATED else [None]
        if None in others:
            return
        options = [{"allOf": [option, *others[:index], *others[index + 1 :]]} for index, option in enumerate(options)]
    del schema["oneOf"]
    if "anyOf" in schema:
        _add(schema, {"anyOf": options})
    else:
        schema["anyOf"] = options


def _change_conditions(schema: dict[str, Any], resolve: Resolve) -> None:
    """``not`` and ``if`` by what does not fit them."""
    for keyword in ("not", "if"):
        if keyword not in schema or (other := negated(schema[keyword], resolve)) is None:
            continue
        fitting = schema.pop(keyword)
        if keyword == "not":
            _add(schema, other)
            continue
        then, otherwise = schema.pop("then", True), schema.pop("else", True)
        options = [[fitting, then], [other, otherwise]]
        _add(schema, {"anyOf": [{"allOf": [part for part in option if part is not True]} for option in options]})

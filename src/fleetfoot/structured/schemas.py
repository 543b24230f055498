"""JSON schemas with only those keywords that llguidance supports.

`simplified` returns an equivalent schema; in these places it allows less: formats of international texts are those of
ASCII, no time has a leap second, bounds of numbers are at most 10^18 in size and have at most 80 decimals, the items of
a set are in the order of its values and as many as make 4,096 lists, the first item that ``contains`` demands is among
the first ones, and where ``not``, ``if`` or ``oneOf`` exclude integers, other numbers are left out, too. Keywords
without an equivalent are left in place, which makes them errors of the compiler.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from decimal import ROUND_FLOOR, Decimal
from itertools import accumulate, combinations, product
from typing import Any

from fleetfoot.utils.json_schema import (
    NEVER,
    NOTES,
    Resolve,
    constants,
    kind_of,
    kinds_of,
    mapped,
    required_names,
    resolver,
    subschemas,
    values_of,
)  # fmt: skip

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
_NEEDED = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
"""Keywords without an effect, unless another one is there."""
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
_IN_PLACE = ("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
"""Keywords with schemas that evaluate properties and items of the same value."""
_DIALECTS = ("http://json-schema.org/draft-", "https://json-schema.org/draft/")

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
_ASCII_FORMATS = {"idn-email": "email"} | dict.fromkeys(
    ("iri", "uri-reference", "iri-reference", "uri-template"), "uri"
)
_FORMATS = ("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "regex", "idn-hostname")
"""Formats of the compiler, and those of JSON Schema that it has as errors. Others have no effect."""

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
_MAX_DECIMALS = 80  # of a bound: each is a group within a group of a regular expression
_MAX_CONSTANT = 2**63
_MAX_EXACT = 2**53
_MAX_OPTIONAL = 1000
_MAX_SET = 1024  # lists that counts of properties become
_MAX_LISTS = 1 << 12  # lists that ``uniqueItems`` becomes
_FEWEST_ITEMS = 3  # of those lists, if ones with more items are left out
_MAX_CONTAINED = 8  # items up to the first one that ``contains`` demands
_MAX_NEGATED = 8  # options of ``oneOf`` of which some can be met together
_MAX_DEPTH = 32

_MAX_COMPARED = 1 << 16  # pairs of options, or of constants; with more, the compiler decides if they exclude each other
_MAX_TEXT = 2000  # characters of constants, of which the others are a regular expression
_KINDS = ("null", "boolean", "string", "number", "array", "object")
_OPPOSITES = {  # the type that a keyword is about, the keyword of the values that it excludes, and how that differs
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
_ANY = r"[\s\S]"
_MAX_EXCLUDED_DEPTH = 8


def simplified(schema: Mapping[str, Any], *, is_closed: bool = False, has_plain_names: bool = False) -> dict[str, Any]:
    """A schema of supported keywords. ``is_closed``: objects have only the properties that the schema names.
    ``has_plain_names``: see `_with_plain_names`; fewer schemas can be compiled then. Raises ValueError: a number is too
    large to be compared."""
    resolve = resolver(schema)
    changed: dict[str, Any] = mapped(schema, lambda part: _Schema(part, resolve, is_closed=is_closed).parts)
    return mapped(changed, _with_plain_names) if has_plain_names else changed


def check_size(schema: Mapping[str, Any]) -> None:
    """Raise ValueError for a schema with an object that the parser has no room for, whatever its other keywords are."""
    schemas = [schema]
    while schemas:
        _check_optional(schemas[-1])
        schemas += [part for _, _, part in subschemas(schemas.pop()) if isinstance(part, dict)]


def _check_optional(schema: Mapping[str, Any]) -> None:
    required, properties = schema.get("required"), schema.get("properties")
    num_required = len(required) if isinstance(required, list) else 0
    if isinstance(properties, dict) and len(properties) - num_required > _MAX_OPTIONAL:
        raise ValueError(f"properties has {len(properties):,}; at most {_MAX_OPTIONAL:,} need not be required")


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


def _with_plain_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Other properties by a pattern of all names: the compiler writes names that fit a pattern without needless
    escapes, by which they could be those of named properties. If they have a schema, the pattern excludes names, which
    makes the masks of names slow."""
    additional, names = schema.get("additionalProperties", True), schema.get("properties")
    if additional is False or not names or schema.get("patternProperties") or sum(map(len, names)) > _MAX_TEXT:
        return schema
    pattern = "^" if additional in (True, {}) else f"^{_other_texts(names)}$"
    return {**schema, "patternProperties": {pattern: additional}, "additionalProperties": False}


def _bound(number: float) -> float:
    """An upper bound that the compiler can compare: at most as large, exact as a float, with few decimals."""
    if number > _MAX_NUMBER:
        return _MAX_NUMBER
    if 0 < abs(number) < 10.0 ** (17 - _MAX_DECIMALS):  # others have fewer, as their 17 digits are known
        return float(Decimal(repr(number)).quantize(Decimal(1).scaleb(-_MAX_DECIMALS), ROUND_FLOOR))
    near = float(number) if number > -_MAX_NUMBER else number
    if not isinstance(number, int) or near == number:
        return number
    return int(near if near < number else math.nextafter(near, -math.inf))


def _below(number: float, *, is_integer: bool) -> float:
    """An exclusive bound: the compiler takes 0 as above 0 where the other bound is 0.5, and integers beyond 2^53."""
    if number != int(number) or (is_integer and abs(number) < _MAX_EXACT):
        return number
    below = math.nextafter(number, -math.inf) if number else -(10.0**-_MAX_DECIMALS)
    return below if abs(number) < _MAX_EXACT else int(below)


def _inexact(value: Any) -> int | float | None:
    """A number within a constant that is another one as a float; None: there is none."""
    if isinstance(value, dict | list):
        parts = map(_inexact, value.values() if isinstance(value, dict) else value)
        return next((found for found in parts if found is not None), None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if abs(value) < _MAX_CONSTANT and float(value) == value else value


class _Schema:
    """One schema, without those in it, which are changed already. Each method is a rule for some keywords."""

    def __init__(self, schema: dict[str, Any], resolve: Resolve, *, is_closed: bool) -> None:
        self._resolve = resolve
        if "not" in schema and schema["not"] in (True, {}):
            schema = NEVER
        if schema.get("unevaluatedProperties") in (True, {}):  # they count as evaluated
            schema = {"additionalProperties": True, **schema}
        self.parts = parts = {
            keyword: value
            for keyword, value in schema.items()
            if keyword != "x-guidance"
            and (keyword not in _NEUTRAL or value not in _NEUTRAL[keyword])
            and _NEEDED.get(keyword, keyword) in schema
            and (keyword != "$schema" or str(value).startswith(_DIALECTS))
        }
        self._unevaluated()
        if not parts.keys() & {"then", "else"}:
            parts.pop("if", None)
        self._numbers()
        self._pattern()
        self._format()
        self._dependencies()
        self._names()
        self._counts()
        self._sets()
        self._contains()
        self._one_of()
        self._conditions()
        if is_closed and isinstance(parts.get("properties"), dict):
            parts.setdefault("additionalProperties", False)

    def _add(self, part: Mapping[str, Any]) -> None:
        """Demand that another schema is met, too."""
        others = self.parts.get("allOf", [])
        self.parts["allOf"] = [*(others if isinstance(others, list) else [others]), part]

    def _set(self, keyword: str, value: Any) -> None:
        """Demand a keyword, whose place may be taken."""
        if keyword in self.parts:
            self._add({keyword: value})
        else:
            self.parts[keyword] = value

    def _unevaluated(self) -> None:
        """Without other schemas of the same value, or with those that name their properties, what is not evaluated is
        additional."""
        parts = self.parts
        names = _evaluated(parts, self._resolve) if "unevaluatedProperties" in parts else None
        if names is not None and "additionalProperties" not in parts:
            parts["additionalProperties"] = parts.pop("unevaluatedProperties")
            parts["properties"] = {**{name: {} for name in names}, **parts.get("properties", {})}
        if any(keyword in parts for keyword in _IN_PLACE):
            return
        if "unevaluatedProperties" in parts:
            parts.setdefault("additionalProperties", parts.pop("unevaluatedProperties"))
        if "unevaluatedItems" in parts and "contains" not in parts:
            keyword = "additionalItems" if isinstance(parts.get("items"), list) else "items"
            parts.setdefault(keyword, parts.pop("unevaluatedItems"))

    def _numbers(self) -> None:
        parts = self.parts
        for keyword in _COUNTS:
            if isinstance(count := parts.get(keyword), float) and count.is_integer():
                parts[keyword] = int(count)
        bounds: dict[str, float] = {name: parts[name] for name in _BOUNDS if type(parts.get(name)) in (int, float)}
        for keyword, bound in bounds.items():
            sign = _BOUNDS[keyword]
            if bound * sign <= -_MAX_NUMBER:
                raise ValueError(f"{keyword} is {bound}; it must allow numbers below 10^18 in size")
            limit = _bound(bound * sign)
            if keyword.startswith("exclusive"):
                limit = _below(limit, is_integer=parts.get("type") == "integer")
            parts[keyword] = limit * sign
        for least, most in product(bounds, bounds):
            is_pair = _BOUNDS[least] < _BOUNDS[most] and bounds[least] <= bounds[most]
            if is_pair and parts[least] > parts[most]:
                known = f"{least} is {bounds[least]} and {most} is {bounds[most]}"
                raise ValueError(f"{known}; no number below 10^18 with at most {_MAX_DECIMALS} decimals meets both")
        for keyword in ("const", "enum"):
            if (number := _inexact(parts.get(keyword))) is not None:
                raise ValueError(f"{keyword} has {number}, which is too large to be compared exactly")

    def _pattern(self) -> None:
        """Look-ahead at the beginning as patterns that are met, too."""
        pattern = self.parts.get("pattern")
        if not isinstance(pattern, str):
            return
        while match := _AHEAD.fullmatch(pattern):
            self._add({"pattern": f"^{match[1]}"})
            pattern = f"^{match[2]}"
        self.parts["pattern"] = plain_regex(_SAME_PATTERNS.get(pattern, pattern))

    def _format(self) -> None:
        name = self.parts.get("format")
        if not isinstance(name, str) or name in _FORMATS:
            return
        del self.parts["format"]
        if name in _ASCII_FORMATS:
            self.parts["format"] = _ASCII_FORMATS[name]
        elif name in _PATTERNS:
            self._set("pattern", _PATTERNS[name])

    def _dependencies(self) -> None:
        """What the presence of a property demands: it is absent, or that is met."""
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            needs = self.parts.get(keyword)
            if isinstance(needs, dict) and all(isinstance(need, list | dict | bool) for need in needs.values()):
                del self.parts[keyword]
                for name, need in needs.items():
                    then = {"required": need} if isinstance(need, list) else need
                    there = {"properties": {name: {}}, "required": [name]}
                    self._add({"anyOf": [{"properties": {name: NEVER}}, {"allOf": [there, then]}]})

    def _names(self) -> None:
        """``propertyNames`` as named properties, or as a pattern of names."""
        parts, names = self.parts, self._resolve(self.parts.get("propertyNames"))
        properties, other = parts.get("properties", {}), parts.get("additionalProperties", {})
        if not isinstance(names, dict) or not isinstance(properties, dict) or "patternProperties" in parts:
            return
        demands = names.keys() - NOTES - {"type"}
        pattern = names.get("pattern") if demands == {"pattern"} else None
        if demands == {"format"}:
            pattern = _PATTERNS.get(str(names["format"]))
        elif demands and demands <= {"minLength", "maxLength"}:
            pattern = f"^{_ANY}{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
        if names.get("type", "string") != "string":
            return
        if demands in ({"enum"}, {"const"}):
            allowed = [value for value in constants(names) or () if isinstance(value, str)]
            forbidden = {name: NEVER for name in properties if name not in allowed}
            parts["properties"] = {**{name: properties.get(name, other) for name in allowed}, **forbidden}
        elif pattern is not None and not properties:
            parts["patternProperties"] = {str(pattern): other}
        else:
            return
        del parts["propertyNames"]
        parts["additionalProperties"] = False

    def _counts(self) -> None:
        """``minProperties`` and ``maxProperties`` of named properties that are not all required. Raises ValueError for
        properties that the parser has no room for, and since the compiler counts a name that is used twice as two."""
        parts, properties = self.parts, self.parts.get("properties")
        _check_optional(parts)
        required = set(required_names(parts))
        is_closed = parts.get("additionalProperties") is False and not parts.get("patternProperties")
        fewest = _count(self.parts, "minProperties", 0) - len(required)
        if not is_closed and fewest > 1:
            raise ValueError(
                f"minProperties is {parts['minProperties']}, and {len(required)} properties are required; it can be "
                "one more, unless additionalProperties is false"
            )
        if not is_closed or not isinstance(properties, dict) or not required < set(properties):
            return
        optional = [name for name in properties if name not in required]
        least, most = max(fewest, 0), _count(self.parts, "maxProperties", len(properties)) - len(required)
        if max(math.comb(len(optional), least), math.comb(len(optional), max(most, 0))) > _MAX_SET:
            return
        if parts.pop("minProperties", None) is not None and least:
            self._add({"anyOf": [{"required": list(chosen)} for chosen in combinations(optional, least)]})
        if parts.pop("maxProperties", None) is not None and 0 <= most < len(optional):
            excluded = combinations(optional, len(optional) - most)
            self._add({"anyOf": [{"properties": {name: NEVER for name in chosen}} for chosen in excluded]})

    def _sets(self) -> None:
        """``uniqueItems`` of a few values: their subsets, each in the order of the values."""
        parts = self.parts
        if parts.get("maxItems") in (0, 1):
            parts.pop("uniqueItems", None)
        if isinstance(lists := _sets(parts, self._resolve), list):
            del parts["uniqueItems"], parts["items"]
            parts["enum"] = lists

    def _contains(self) -> None:
        """``contains`` as the first items, of which the last one is such an item."""
        parts, item = self.parts, self.parts.get("items", {})
        if parts.get("type") != "array" or "contains" not in parts or parts.keys() & {"maxContains", "prefixItems"}:
            return
        if parts.get("minContains", 1) != 1 or isinstance(item, list):
            return
        last = {"allOf": [item, parts.pop("contains")]}
        options = [
            {"type": "array", "prefixItems": [*[item] * size, last], "items": item, "minItems": size + 1}
            for size in range(min(_count(self.parts, "maxItems", _MAX_CONTAINED), _MAX_CONTAINED))
        ]
        parts.pop("minContains", None)
        self._add({"anyOf": options} if options else NEVER)

    def _one_of(self) -> None:
        """Options of which no two are met are those of ``anyOf``."""
        options = self.parts.get("oneOf")
        if not isinstance(options, list) or len(options) ** 2 > _MAX_COMPARED:
            return
        if not all(_are_disjoint(one, other, self._resolve) for one, other in combinations(options, 2)):
            is_small = len(options) <= _MAX_NEGATED
            others = [_negated(option, self._resolve) for option in options] if is_small else [None]
            if None in others:
                return
            options = [{"allOf": [one, *others[:at], *others[at + 1 :]]} for at, one in enumerate(options)]
        del self.parts["oneOf"]
        self._set("anyOf", options)

    def _conditions(self) -> None:
        """``not`` and ``if`` by what does not fit them."""
        parts = self.parts
        if "not" in parts and (other := _negated(parts["not"], self._resolve)) is not None:
            del parts["not"]
            self._add(other)
        if "if" in parts and (other := _negated(parts["if"], self._resolve)) is not None:
            options = [parts.pop("if"), parts.pop("then", True)], [other, parts.pop("else", True)]
            self._add({"anyOf": [{"allOf": [part for part in option if part is not True]} for option in options]})


def _count(schema: Mapping[str, Any], keyword: str, default: int) -> int:
    return count if isinstance(count := schema.get(keyword), int) else default


def _sets(schema: Mapping[str, Any], resolve: Resolve) -> list[list[Any]] | str:
    """The lists that ``uniqueItems`` of a few values allows, each in the order of the values; or what it needs."""
    if schema.get("uniqueItems") is not True:
        return ""
    values = values_of(schema.get("items"), resolve, _MAX_LISTS)
    if values is None or schema.get("type") != "array" or schema.keys() & {"enum", "prefixItems", "contains"}:
        return (
            'uniqueItems needs "type": "array" and "items" that are an enum, booleans, null, or integers with both '
            f'bounds, below {_MAX_LISTS:,} values, or "maxItems": 1'
        )
    values = list({json.dumps(value, sort_keys=True): value for value in values}.values())
    fewest, asked = _count(schema, "minItems", 0), min(len(values), _count(schema, "maxItems", len(values)))
    counts = list(accumulate(math.comb(len(values), size) for size in range(asked + 1)))
    most = sum(count <= _MAX_LISTS for count in counts) - 1
    if most < min(asked, max(_FEWEST_ITEMS, fewest)):
        ends = f"minItems is {fewest} and can be" if fewest > most else "it needs a maxItems of"
        return f"uniqueItems of {len(values):,} values makes more than {_MAX_LISTS:,} lists; {ends} at most {most}"
    return [list(chosen) for size in range(most + 1) for chosen in combinations(values, size)]


def advice(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """What a part of a schema needs where a keyword of it is not supported; "": nothing is known."""
    found = _sets(schema, resolver(root))
    return found if isinstance(found, str) else ""


def _evaluated(schema: Any, resolve: Resolve, depth: int = 0) -> list[str] | None:
    """The properties that a schema and those that are met with it evaluate; None: not by their names alone."""
    schema = resolve(schema)
    others = {*_IN_PLACE, "patternProperties", "additionalProperties"} - {"$ref", "allOf"}
    if not isinstance(schema, dict) or depth > _MAX_DEPTH or schema.keys() & others:
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


# --- what a schema does not take --------------------------------------------------------------------------------------


def _negated(schema: Any, resolve: Resolve, depth: int = 0) -> Any:
    """A schema that takes no value of another one; None: there is none. It may leave out values."""
    schema = resolve(schema)
    if isinstance(schema, bool):
        return NEVER if schema else {}
    if not isinstance(schema, Mapping) or depth > _MAX_EXCLUDED_DEPTH:
        return None
    if depth == 0 and schema.get("type") == "integer":  # of numbers, none are left out but within others
        return None

    def negate(part: Any) -> Any:
        return _negated(part, resolve, depth + 1)

    try:
        options = [_negated_keyword(name, value, negate) for name, value in schema.items() if name not in NOTES]
    except (TypeError, AttributeError):  # it is invalid; the compiler has the reason
        return None
    return _any_of(options)


def _any_of(options: list[Any]) -> Any:
    """One of some schemas, if there is each."""
    if None in options:
        return None
    options = [option for option in options if option != NEVER]
    return {"anyOf": options} if len(options) > 1 else options[0] if options else NEVER


def _negated_keyword(keyword: str, value: Any, negate: Callable[[Any], Any]) -> Any:
    """What does not fit one keyword; None: there is no schema for it."""
    match keyword:
        case "not":
            return value
        case "const" | "enum":
            return _other_values([value] if keyword == "const" else value)
        case "type":
            kinds = kinds_of({"type": value})
            return None if kinds is None else _other_kinds(kinds)
        case "required":
            return _any_of([{"type": "object", "properties": {name: NEVER}} for name in value])
        case "properties":
            parts = [(name, negate(part)) for name, part in value.items()]
            ones = [(name, part) for name, part in parts if part != NEVER]
            objects = [{"type": "object", "properties": {name: part}, "required": [name]} for name, part in ones]
            return None if (None in dict(parts).values()) else _any_of(objects)
        case "anyOf":
            found = [negate(part) for part in value]
            return None if None in found else {"allOf": found}
        case "allOf":
            return _any_of([negate(part) for part in value])
        case "additionalProperties" if value in (True, {}):
            return NEVER
    if keyword not in _OPPOSITES or type(value) not in (int, float):
        return None
    kind, opposite, step = _OPPOSITES[keyword]
    return {"type": kind, opposite: value + step} if not step or value + step >= 0 else NEVER


def _other_kinds(kinds: Collection[str]) -> Any:
    others = [kind for kind in _KINDS if kind not in kinds]
    return {"type": others} if others else NEVER


def _other_values(values: list[Any]) -> Any:
    """All values but these, and no objects or lists if there is one of them."""
    options = [_other_kinds({kind_of(value) for value in values})]
    flags = [value for value in values if isinstance(value, bool)]
    options += [{"const": flag} for flag in (True, False) if flags and flag not in flags]
    texts = list(dict.fromkeys(value for value in values if isinstance(value, str)))
    if sum(map(len, texts)) > _MAX_TEXT:
        return None
    if texts:
        options.append({"type": "string", "pattern": f"^{_other_texts(texts)}$"})
    numbers = sorted({value for value in values if kind_of(value) == "number"})
    for above, below in zip([None, *numbers], [*numbers, None], strict=True) if numbers else ():
        bounds = {"exclusiveMinimum": above, "exclusiveMaximum": below}
        options.append({"type": "number"} | {name: bound for name, bound in bounds.items() if bound is not None})
    return _any_of(options)


def _other_texts(texts: Collection[str]) -> str:
    """A regular expression of all texts but these."""
    first = {text[0]: [other[1:] for other in texts if other[:1] == text[0]] for text in texts if text}
    options = [] if "" in texts else [""]
    options += [f"{_character(letter)}{_other_texts(rests)}" for letter, rests in first.items()]
    others = f"[^{''.join(map(_character, first))}]" if first else _ANY
    options.append(f"{others}{_ANY}*")
    return f"({'|'.join(options)})"


def _character(letter: str) -> str:
    return letter if letter.isascii() and letter.isalnum() else f"\\x{{{ord(letter):x}}}"


def _are_disjoint(one: Any, other: Any, resolve: Resolve, depth: int = 0) -> bool:
    """Whether no value is valid under both of two schemas, as far as types, constants, patterns and properties show."""
    one, other = resolve(one), resolve(other)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or depth > _MAX_EXCLUDED_DEPTH:
        return False
    values, others = constants(one), constants(other)
    if values is not None and others is not None:
        is_small = len(values) * len(others) <= _MAX_COMPARED
        return is_small and not any(value == another for value in values for another in others)
    for listed, pattern in ((values, other.get("pattern")), (others, one.get("pattern"))):
        if listed is not None and isinstance(pattern, str) and not any(_may_fit(value, pattern) for value in listed):
            return True
    kinds, other_kinds = kinds_of(one), kinds_of(other)
    if kinds is None or other_kinds is None:
        return False
    if not kinds & other_kinds:
        return True
    return kinds == other_kinds == {"object"} and any(
        _are_disjoint(_property(one, name), _property(other, name), resolve, depth + 1)
        for name in {*required_names(one), *required_names(other)}
    )


def _may_fit(value: Any, pattern: str) -> bool:
    """Whether a value fits a pattern, as far as it can be evaluated here."""
    try:
        return not isinstance(value, str) or re.search(pattern, value, re.ASCII) is not None
    except (re.error, OverflowError, RecursionError):
        return True


def _property(schema: Mapping[str, Any], name: str) -> Any:
    """What a schema demands of a property, without what patterns of names do."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return {} if schema.get("patternProperties") else schema.get("additionalProperties", {})

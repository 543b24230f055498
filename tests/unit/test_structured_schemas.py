"""Schemas whose keywords llguidance lacks, or is not exact about: valid texts are taken, and no others."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from tests.helpers.engines import EOS

from fleetfoot import StructuredOutputsParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.structured.compiler import GrammarCompiler
from fleetfoot.tokenizer.tokenizer import Tokenizer

INT, TEXT = {"type": "integer"}, {"type": "string"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
ZOD_DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
DEFS: dict[str, Any] = {
    "$defs": {
        "text": TEXT,
        "color": {"enum": ["red", "blue"], "title": "Color"},
        "open": {"type": "object", "properties": {"a": INT}, "required": ["a"]},
        "a": {"type": "object", "properties": {"a": INT}, "required": ["a"], "additionalProperties": False},
        "b": {"type": "object", "properties": {"b": INT}, "required": ["b"], "additionalProperties": False},
        "node": {"type": "object", "properties": {"kind": {"const": "n"}, "next": {"$ref": "#/$defs/node"}},
                 "required": ["kind"]},
    }
}  # fmt: skip
OBJECT = {"type": "object"}
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "escaped names": (
        {"type": "object", "properties": {"ab": INT}, "required": ["ab"]},
        ['{"ab": 1}', '{"ab": 1, "abc": "x"}', '{"ab": 1, "a\\"\\n": {"\\u0001": 2}}'],
        ['{"ab": "x"}', '{"ab": 1, "a\\u0062": "x"}', '{"\\u0061b": 1}', '{"abc": 1}'],
    ),
    "escaped names of all": (
        {"allOf": [{"properties": {"a": INT}}, {"properties": {"b": TEXT}}], "type": "object"},
        ['{"a": 1, "b": "x"}', '{"a": 1, "b": "x", "c": []}', "{}"],
        ['{"a": "x"}', '{"b": 1}', '{"\\u0062": 1}'],
    ),
    "patterns beside open objects": (
        {"allOf": [{"properties": {"a": INT}}, {"patternProperties": {"^b": TEXT}}], "type": "object"},
        ['{"a": 1, "bc": "x"}'],
        ['{"a": "x"}', '{"bc": 1}'],
    ),
    "dependentRequired": (
        {**OBJECT, "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"], "c": ["b"]}},
        ["{}", '{"b": 1}', '{"a": 1, "b": 1}', '{"b": 1, "c": 1}'],
        ['{"a": 1}', '{"c": 1}', '{"a": 1, "c": 1}', '{"\\u0063": 1}'],
    ),
    "dependentSchemas": (
        {"dependentSchemas": {"a": {"properties": {"b": INT}}, "c": False}},
        ["{}", "1", '{"b": "x"}', '{"a": 1, "b": 1}'],
        ['{"a": 1, "b": "x"}', '{"c": 1}'],
    ),
    "dependencies": (
        {"$schema": DRAFT_7, "dependencies": {"a": ["b"], "b": {"required": ["c"]}}},
        ["{}", '{"c": 1}', '{"b": 1, "c": 1}'],
        ['{"a": 1}', '{"b": 1}'],
    ),
    "names of a list": (
        {**DEFS, **OBJECT, "propertyNames": {"$ref": "#/$defs/color"}, "additionalProperties": INT},
        ["{}", '{"red": 1}', '{"red": 1, "blue": 2}'],
        ['{"red": "x"}', '{"green": 1}'],
    ),
    "names of a list and properties": (
        {**OBJECT, "propertyNames": {"enum": ["a", "b", 1]}, "properties": {"a": TEXT, "c": INT}, "required": ["b"]},
        ['{"a": "x", "b": 1}'],
        ['{"a": "x"}', '{"b": 1, "c": 1}', '{"a": 1, "b": 1}'],
    ),
    "names of a pattern": (
        {**OBJECT, "propertyNames": {"type": "string", "pattern": "^[a-c]+$"}, "additionalProperties": INT},
        ["{}", '{"ab": 1, "c": 2}'],
        ['{"ab": "x"}', '{"d": 1}', '{"": 1}'],
    ),
    "names of a length": ({**OBJECT, "propertyNames": {"maxLength": 2}}, ['{"": 1, "éa": 1}'], ['{"abc": 1}']),
    "names of a format": (
        {**OBJECT, "propertyNames": {"format": "uuid"}},
        ['{"01234567-89ab-cdef-0123-456789abcdef": 1}'],
        ['{"01234567": 1}'],
    ),
    "unevaluatedProperties": (
        {**OBJECT, "properties": {"a": {}}, "unevaluatedProperties": False},
        ["{}", '{"a": 1}'],
        ['{"a": 1, "b": 1}'],
    ),
    "unevaluatedItems": ({"prefixItems": [INT], "unevaluatedItems": TEXT}, ['[1, "a"]'], ["[1, 2]", '["a"]']),
    "forbidden property": (
        {**OBJECT, "properties": {"a": {"not": {}}, "b": {"not": {"not": {}}}}},
        ['{"b": 1}'],
        ['{"a": 1}', '{"\\u0061": 1}'],
    ),
    "minProperties": (
        {**OBJECT, "minProperties": 2, "required": ["a"]},
        ['{"a": 1, "b": 2}'],
        ['{"a": 1}', '{"a": 1, "a": 2}'],
    ),
    "many properties": (
        {**OBJECT, "properties": {f"p{number}": INT for number in range(900)}, "additionalProperties": False},
        ["{}", '{"p7": 1, "p899": 2}'],
        ['{"p900": 1}', '{"p7": null}'],
    ),
    "set": (
        {"type": "array", "items": {"enum": ["a", 1, None, 1]}, "uniqueItems": True, "minItems": 1},
        ['["a"]', '["a", 1]', '["a", 1, null]', "[1, null]"],
        ["[]", "[1, 1]", '["a", "a"]', '["b"]'],
    ),
    "additional properties": (
        {**OBJECT, "properties": {"ab": INT, "a-c": INT}, "additionalProperties": TEXT},
        ['{"ab": 1, "a-c": 2, "a": "x", "abc": "x", "": "x"}'],
        ['{"ab": "x"}', '{"abc": 1}', '{"a\\u0062": "x"}', '{"\\u0061b": "x"}', '{"a\\u002dc": "x"}'],
    ),
    "set of flags": (
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
        ["[]", "[true]", "[false, true]"],
        ["[true, true]", "[1]"],
    ),
    "set of a few of many": (
        {"type": "array", "items": {"enum": list("abcdefghijkl")}, "uniqueItems": True, "maxItems": 3, "minItems": 1},
        ['["a"]', '["b", "l"]', '["a", "k", "l"]'],
        ["[]", '["b", "b"]', '["a", "b", "c", "d"]', '["m"]'],
    ),
    "set of bounded integers": (
        {"type": "array", "items": {"type": "integer", "minimum": 2, "exclusiveMaximum": 6.5}, "uniqueItems": True},
        ["[]", "[2]", "[2, 3, 4, 5, 6]", "[3, 6]"],
        ["[2, 2]", "[1]", "[7]", "[2, 3, 2]"],
    ),
    "set of a reference or null": (
        {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, "uniqueItems": True,
         "$defs": {"a": {"enum": ["x", "y"], "type": "string"}}},
        ["[]", '["x", "y", null]', "[null]"],
        ["[null, null]", '["x", "x"]', '["z"]'],
    ),
    "set of many": (
        {"type": "array", "items": {"enum": list("abcdefghijklmnopqrstuvwxyz")}, "uniqueItems": True},
        ['["a", "b", "z"]'],
        ['["a", "a"]', '["a", "z", "z"]'],
    ),
    "set of one": ({"type": "array", "items": INT, "uniqueItems": True, "maxItems": 1}, ["[]", "[7]"], ["[1, 2]"]),
    "contains": (
        {"type": "array", "items": {"type": ["integer", "string"]}, "contains": INT, "maxItems": 3},
        ["[1]", '["a", 1]', '["a", "b", 1]', '[1, "a"]'],
        ["[]", '["a"]', '["a", "b", "c"]', '["a", "b", "c", 1]'],
    ),
    "counts of named properties": (
        {**OBJECT, "properties": {"a": INT, "b": INT, "c": INT}, "required": ["b"], "minProperties": 2,
         "maxProperties": 2, "additionalProperties": False},
        ['{"a": 1, "b": 1}', '{"b": 1, "c": 1}'],
        ["{}", '{"b": 1}', '{"a": 1, "c": 1}', '{"a": 1, "b": 1, "c": 1}'],
    ),
    "not a constant": (
        {"type": ["string", "integer", "null"], "not": {"enum": ["admin", "add", "", 3, None]}},
        ['"a"', '"ad"', '"adds"', '"root"', '"é/x"', "2", "4"],
        ['"admin"', '"add"', '""', '"\\u0061dd"', "3", "null"],
    ),
    "not a type": ({"not": {"type": ["null", "object", "number"]}}, ['"x"', "[1]", "true"], ["null", "{}", "1"]),
    "not both": (
        {**OBJECT, "properties": {"a": INT, "b": INT}, "not": {"required": ["a", "b"]}},
        ["{}", '{"a": 1}', '{"b": 1}'],
        ['{"a": 1, "b": 1}'],
    ),
    "not in a range": (
        {**INT, "not": {"minimum": 3, "exclusiveMaximum": 7}},
        ["2", "7", "-1"],
        ["3", "6"],
    ),
    "if": (
        {**OBJECT, "properties": {"kind": {"enum": ["a", "b", "c"]}, "x": INT, "y": TEXT}, "required": ["kind"],
         "allOf": [
             {"if": {"properties": {"kind": {"const": "a"}}}, "then": {"required": ["x"]}},
             {"if": {"properties": {"kind": {"enum": ["b"]}}, "required": ["kind"]},
              "then": {"properties": {"y": {"pattern": "^[0-9]$"}}, "required": ["y"]},
              "else": {"properties": {"y": False}}},
         ]},
        ['{"kind": "a", "x": 1}', '{"kind": "b", "y": "1"}', '{"kind": "c"}', '{"kind": "c", "x": 1}'],
        ['{"kind": "a"}', '{"kind": "b", "y": "x"}', '{"kind": "b"}', '{"kind": "c", "y": "1"}', '{"x": 1}'],
    ),
    "if of numbers": ({**INT, "if": {"minimum": 10}, "then": {"multipleOf": 10}}, ["3", "20"], ["11", "25"]),
    "oneOf of required properties": (
        {**OBJECT, "properties": {"a": INT, "b": INT}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a": 1}', '{"b": 1}'],
        ["{}", '{"a": 1, "b": 1}'],
    ),
    "oneOf of objects": (
        {"oneOf": [
            {**OBJECT, "properties": {"run": TEXT}, "required": ["run"]},
            {**OBJECT, "properties": {"uses": TEXT}, "required": ["uses"]},
        ]},
        ['{"run": "x"}', '{"uses": "x"}', '{"run": "x", "other": 1}'],
        ["{}", '{"run": "x", "uses": "x"}', "1"],
    ),
    "oneOf of a format and constants": (
        {"oneOf": [{**TEXT, "format": "date"}, {"enum": ["now", "today"]}]}, ['"2024-02-29"', '"now"'], ['"never"'],
    ),
    "oneOf of a pattern and its text": (
        {"oneOf": [{**TEXT, "pattern": "^a"}, {"enum": ["b"]}, {"type": "null"}]}, ['"ab"', '"b"', "null"], ['"c"'],
    ),
    "durations": (
        {**TEXT, "pattern": ZOD_DURATION},
        ['"P3W"', '"P1Y2M3D"', '"P1YT5M"', '"PT1H2.5S"', '"P2DT3H"'],
        ['"P"', '"PT"', '"P1W2D"', '"P1DT"', '"1D"'],
    ),
    "oneOf of ranges": ({**INT, "oneOf": [{"maximum": 5}, {"minimum": 3}]}, ["2", "6"], ["3", "5"]),
    "unevaluatedProperties beside a reference": (
        {**DEFS, "allOf": [{"$ref": "#/$defs/open"}], "properties": {"b": TEXT}, "unevaluatedProperties": False},
        ['{"a": 1}', '{"a": 1, "b": "x"}'],
        ["{}", '{"a": "x"}', '{"a": 1, "c": 1}', "1"],
    ),
    "references of URIs": (
        {**TEXT, "format": "uri-reference"}, ['"https://a.org/b?c#d"'], ['"\\\\a"', '" "'],
    ),
    "oneOf of references": (
        {**DEFS, "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"$ref": "#/$defs/text"}, INT]},
        ['{"a": 1}', '{"b": 1}', '"x"', "2"],
        ["{}", '{"a": 1, "b": 1}', "null"],
    ),
    "oneOf of loops": (
        {**DEFS, "oneOf": [{"$ref": "#/$defs/node"}, {"properties": {"kind": {"enum": ["m", None]}}, **OBJECT}]},
        ['{"kind": "n", "next": {"kind": "n"}}', '{"kind": "m"}'],
        ['{"kind": "x"}', '{"kind": "n", "next": {"kind": "m"}}'],
    ),
    "oneOf beside anyOf": ({"oneOf": [INT, TEXT], "anyOf": [{"const": 1}, {"const": "a"}]}, ["1", '"a"'], ["2", '"b"']),
    "no if": ({**INT, "then": {"minimum": 5}, "else": False, "minContains": 3}, ["1"], ["1.5"]),
    "if alone": ({**INT, "if": {"minimum": 5}}, ["1", "7"], ["null"]),
    "counts": ({"type": "array", "minItems": 1.0, "maxItems": 2.0}, ["[1]", "[1, 2]"], ["[]", "[1, 2, 3]"]),
    "64 bits": ({**INT, "minimum": -(2**63), "maximum": 2**63 - 1}, ["0", "-5", str(10**17)], [str(2**64), "0.5"]),
    "unsigned": ({**INT, "minimum": 0, "maximum": 2**64 - 1}, ["0", str(10**17)], ["-1"]),
    "float32": ({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, ["0.5", "-1", str(10**17)], ["null"]),
    "beyond 2^53": (
        {**INT, "minimum": 2**53 + 1, "maximum": 2**53 + 3},
        [str(2**53 + 2)],
        [str(2**53), str(2**53 + 4)],
    ),
    "all floats": (
        {"type": "number", "minimum": 1e-308, "exclusiveMaximum": 1.7e308},
        ["0.5", "1", str(10**17), "0." + "0" * 79 + "1"],
        ["0", "-1", "-0.5"],
    ),
    "all floats below 0": ({"type": "number", "exclusiveMaximum": -5e-324}, ["-0.5", "-1"], ["0", "0.5"]),
    "exclusive beyond 2^53": ({**INT, "exclusiveMaximum": -1e17}, [str(-2 * 10**17)], [str(-(10**17)), "0"]),
    "above 0": ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.1"], ["0", "0.0", "-0", "0.6"]),
    "below 0": ({"allOf": [{"exclusiveMaximum": 0}, {"minimum": -0.5}]}, ["-0.1"], ["0", "-0", "-0.6"]),
    "between 5 and 6": ({"type": "number", "exclusiveMinimum": 5, "exclusiveMaximum": 6}, ["5.25"], ["5", "5.0", "6"]),
    "exact constants": ({"enum": [2**53, -(2**60), 0.1]}, [str(2**53), str(-(2**60)), "0.1"], [str(2**53 + 1), "0.2"]),
    "dates": (
        {**TEXT, "format": "date"},
        ['"2024-02-29"', '"2000-02-29"', '"2023-12-31"'],
        ['"2023-02-29"', '"1900-02-29"', '"2023-04-31"', '"2023-1-1"'],
    ),
    "a pattern with escapes that other engines need": (
        {**TEXT, "pattern": r"^\<[a\>]\>$"}, ['"<a>"', '"<>>"'], ['"<>"', '"a"', '"<c>"'],
    ),
    "dates of a pattern": (
        {**TEXT, "format": "date", "pattern": "^202"},
        ['"2023-12-31"'],
        ['"1999-12-31"', '"2023-02-30"', '"202"'],
    ),
    "look-ahead": (
        {**TEXT, "pattern": r"^(?=.*[A-Z])(?=[^(]*\d$)(?=\[?).{3,5}$"},
        ['"Ab1"', '"abC22"'],
        ['"ab1"', '"Abc"', '"A1"', '"Abcd12"', '"A(1"'],
    ),
    "decimals": (
        {**TEXT, "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
        ['"1"', '"-0.5"', '".5"', '"5."'],
        ['""', '"."', '"+"', '"-."', '"1.2.3"'],
    ),
    "addresses": (
        {**TEXT, "pattern": ZOD_EMAIL},
        ['"a@b.co"', '"a.b+c@d-e.f.org"', """\"o'h@x.yz\""""],
        ['".a@b.co"', '"a..b@c.de"', '"a.@b.co"', '"a@b"', '"a@b.c"'],
    ),
    "times": (
        {**TEXT, "format": "date-time"},
        ['"2024-02-29T23:59:59Z"', '"2024-01-01T00:00:00.125+01:30"'],
        ['"2023-02-29T00:00:00Z"', '"2024-01-01T24:00:00Z"', '"2024-01-01T00:00:00"', '"2024-01-01T22:58:60Z"'],
    ),
    "json-pointer": ({**TEXT, "format": "json-pointer"}, ['""', '"/a/~0b~1/0"'], ['"a"', '"/a~2"']),
    "other formats": ({**TEXT, "format": "password"}, ['"x"', '""'], ["1"]),
    "other dialects": ({"$schema": "https://example.org/dialect", **INT}, ["1"], ['"x"']),
}  # fmt: skip

UNCHECKED = {"escaped names", "json-pointer", "references of URIs"}
"""Cases whose texts can be valid, but are not written plainly; and those for which the reference lacks a library."""


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    tokenizer = Tokenizer.from_path(embedded_model_path())
    return GrammarCompiler(lambda: tokenizer, 2048, [EOS])


@pytest.mark.parametrize("name", CASES)
def test_texts_that_are_taken_are_the_valid_ones(name: str, grammars: GrammarCompiler) -> None:
    schema, valid, invalid = CASES[name]
    checker = validator_for(schema, default=Draft202012Validator)(
        schema, format_checker=Draft202012Validator.FORMAT_CHECKER
    )
    if name not in UNCHECKED:
        assert [text for text in valid + invalid if checker.is_valid(json.loads(text))] == valid
    matcher = grammars.compile(StructuredOutputsParams(json=schema)).matcher
    tokens = grammars._load_vocabulary().tokenizer

    def takes(text: str) -> bool:
        copy, token_ids = matcher.deep_copy(), tokens.tokenize_str(text)
        return copy.try_consume_tokens(token_ids) == len(token_ids) and copy.is_accepting()

    assert [text for text in valid + invalid if takes(text)] == valid

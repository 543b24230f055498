"""Values in Python's syntax, as models write them."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable
from operator import add, mul, sub, truediv
from typing import Any

_STRING = re.compile(
    r"""(?P<prefix>(?<!\w)[rRbBuUfF]{0,2})(?P<quote>'''|\"""|'|")"""
    r"""(?=(?P<body>(?:\\.|(?!(?P=quote))[^\\])*))(?P=body)(?P=quote)"""  # possessive: *+ is wrong before Python 3.11.5
    r"""|\\.|['"].*""",
    re.DOTALL,
)
"""A string; else what is outside of strings, or an open one, which is none."""
_UNKNOWN_ESCAPE = re.compile(r"""\\([^\n\\'"abfnrtvxuUN0-7])""")
_WORDS = {"true": True, "false": False, "null": None}
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv,
}  # fmt: skip


def python_literal(source: str, *, is_code: bool = True) -> Any:
    """The value of an expression of literals, with JSON's words too. Raises ValueError if it has no value in JSON.

    Tuples and sets are lists, bytes are text. Sums of strings and lists have a value, and, in code, arithmetic:
    elsewhere ``2024-11-12`` and ``1/2`` are no numbers.
    """
    try:
        parsed = ast.parse(_STRING.sub(_mended, source).strip(), mode="eval").body
        value = _value(parsed)
        if not is_code and any(map(_is_arithmetic, ast.walk(parsed))):
            raise ValueError("arithmetic")
        json.dumps(value, allow_nan=False)  # also depths and numbers that it refuses
    except (ValueError, SyntaxError, TypeError, ArithmeticError, MemoryError, RecursionError) as error:
        raise ValueError(f"no literal: {error}") from None
    return value


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp):
        return not isinstance(node.operand, ast.Constant)
    return isinstance(node, ast.BinOp) and not isinstance(_value(node), str | list)


def _mended(string: re.Match[str]) -> str:
    """A string that may have lines, and backslashes that escape nothing."""
    prefix, quote, body = string["prefix"], string["quote"], string["body"]
    if quote is None:
        return string[0]
    if "r" not in prefix.lower():
        body = _UNKNOWN_ESCAPE.sub(r"\\\\\1", body).replace("\r", "\\r").replace("\0", "\\x00")
    if "\n" in body and len(quote) == 1:
        quote *= 3
    return f"{prefix}{quote}{body}{quote}"


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bytes() as content):
            return content.decode()
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return [_value(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return dict(zip(map(_key, keys), map(_value, values), strict=True))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            number = _number(_value(operand))
            return -number if isinstance(sign, ast.USub) else number
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            first, second = _value(left), _value(right)
            if isinstance(operator, ast.Add) and type(first) is type(second) and isinstance(first, str | list):
                return first + second
            return _number(_OPERATORS[type(operator)](_number(first), _number(second)))
        case ast.JoinedStr(values=parts):
            return "".join(map(_part, parts))
    raise ValueError("no literal")


def _number(value: Any) -> int | float:
    """Raises ValueError if it is none, or so large that no reader of JSON takes it as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("no number")
    if (isinstance(value, int) and value.bit_length() > 1024) or not math.isfinite(value):
        raise ValueError("too large a number")
    return value


def _key(node: ast.expr | None) -> str:
    """A key of a dict, as JSON has it."""
    value = None if node is None else _value(node)
    if node is None or isinstance(value, list | dict):
        raise ValueError("no key")
    return value if isinstance(value, str) else json.dumps(value)


def _part(node: ast.expr) -> str:
    """A part of an f-string, which may only have values of literals."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.FormattedValue(value=expression, conversion=-1, format_spec=None):
            return str(_value(expression))
    raise ValueError("no literal")

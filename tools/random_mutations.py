"""Random mutations of the functions that tests call, and which of these tests notice each.

python tools/random_mutations.py COUNT SEED [arguments of pytest], such as ``50 1 tests/unit -m "not kernels"``

The tests run once, to see which functions each of them calls. Then each mutation is made in a forked process, in the
code of the functions that are there, and the tests that call the function run up to the first that fails. Processes
that tests start are not mutated, nor is what runs when a module is imported.
"""

from __future__ import annotations

import ast
import gc
import os
import random
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest
from _pytest.runner import runtestprotocol

SOURCE = str(Path(__file__).parents[1] / "src" / "fleetfoot")
TEST_SECONDS, TIMEOUT_S = 5.0, 60
"""Of the tests for one mutation, and until it is noticed: a test waits."""
_PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)),
)
SWAPPED: dict[type, Any] = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}


class Mutation(NamedTuple):
    """``index``: of the node in `ast.walk` of the function that begins in ``line``."""

    file: str
    line: int
    index: int


def change(node: ast.AST) -> str:
    """Change a node where that can be done, and return what was done."""
    match node:
        case ast.Compare(ops=[op, *_]) if type(op) in SWAPPED:
            node.ops[0] = SWAPPED[type(op)]()
            return "comparison"
        case ast.BoolOp(op=op) | ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPPED:
            node.op = SWAPPED[type(op)]()
            return "operator"
        case ast.Constant(value=bool()):
            node.value = not node.value
            return "flag"
        case ast.Constant(value=int()):
            node.value += 1
            return "number"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare):
            node.test = ast.UnaryOp(ast.Not(), test)
            return "condition"
        case ast.Expr(value=ast.Call() | ast.Await()):
            node.value = ast.Constant(None)
            return "call left out"
        case ast.Return(value=ast.expr()):
            node.value = ast.Constant(None)
            return "result left out"
    return ""


def begin(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The first line of its code: that of its decorators."""
    return min(node.lineno for node in (function, *function.decorator_list))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Those that are not within others."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not any("jit" in ast.unparse(each) or "triton" in ast.unparse(each) for each in node.decorator_list):
                yield node
        elif isinstance(node, ast.ClassDef | ast.If | ast.Try):
            yield from functions(node)


def mutations(file: str) -> Iterator[Mutation]:
    tree = ast.parse(Path(file).read_text())
    for function in functions(tree):
        for index, node in enumerate(ast.walk(ast.Module(function.body, []))):
            if hasattr(node, "lineno") and not isinstance(node, ast.Raise) and change(node):
                yield Mutation(file, begin(function), index)


def codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from codes(each)


def apply(mutation: Mutation, found: list[FunctionType]) -> str:
    """Mutate the functions, and return the line and what was done."""
    tree = ast.parse(Path(mutation.file).read_text())
    (function,) = (each for each in functions(tree) if begin(each) == mutation.line)
    node = [*ast.walk(ast.Module(function.body, []))][mutation.index]
    done = f"{node.lineno}: {change(node)}"  # type: ignore[attr-defined]
    module = compile(ast.fix_missing_locations(tree), mutation.file, "exec", dont_inherit=True)
    name = found[0].__code__.co_name
    (code,) = (each for each in codes(module) if (each.co_firstlineno, each.co_name) == (mutation.line, name))
    for each in found:
        each.__code__ = code
    return done


class Plugin:
    def __init__(self, count: int, seed: int) -> None:
        self._count, self._random = count, random.Random(seed)
        self._callers: dict[tuple[str, int], list[tuple[float, pytest.Item]]] = defaultdict(list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            self._observe(item, following)
        found = defaultdict(list)
        for each in gc.get_objects():
            if type(each) is FunctionType:
                found[each.__code__.co_filename, each.__code__.co_firstlineno].append(each)
        known = [each for file in {file for file, _ in self._callers} for each in mutations(file)]
        known = sorted(each for each in known if each[:2] in self._callers and each[:2] in found)
        reports = [
            self._report(each, found[each[:2]]) for each in self._random.sample(known, min(self._count, len(known)))
        ]
        made = [report for report in reports if report is not None]
        print(f"\nnoticed: {sum(made)} of {len(made)}")
        return True

    def _observe(self, item: pytest.Item, following: pytest.Item | None) -> None:
        """Run a test, and note which functions it calls."""
        seen: set[CodeType] = set()

        def trace(frame: Any, *_: object) -> None:
            seen.add(frame.f_code)

        begun = time.perf_counter()
        sys.settrace(trace)
        threading.settrace(trace)
        reports = runtestprotocol(item, nextitem=following, log=False)
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        if not any(report.failed for report in reports):
            for code in seen:
                if code.co_filename.startswith(SOURCE):
                    caller = time.perf_counter() - begun, item
                    self._callers[code.co_filename, code.co_firstlineno].append(caller)

    def _report(self, mutation: Mutation, found: list[FunctionType]) -> bool | None:
        """Whether a mutation is noticed, which it prints; None: it could not be made."""
        reader, writer = os.pipe()
        if not (pid := os.fork()):
            signal.alarm(TIMEOUT_S)
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(null, descriptor)
            try:
                os.write(writer, apply(mutation, found).encode())
                left = TEST_SECONDS
                for seconds, item in sorted(self._callers[mutation[:2]], key=lambda caller: caller[0]):
                    left -= seconds
                    if left > 0 and any(report.failed for report in runtestprotocol(item, nextitem=None, log=False)):
                        os.write(writer, f", noticed by {item.nodeid}".encode())
                        os._exit(1)
            finally:
                os._exit(0)
        os.close(writer)
        _, status = os.waitpid(pid, 0)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        if not text:  # it could not be made
            return None
        print(f"{mutation.file.removeprefix(SOURCE + '/')}:{text}{'' if status else ', SURVIVES'}", flush=True)
        return status != 0


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-s", *sys.argv[3:]], [Plugin(*map(int, sys.argv[1:3]))]))

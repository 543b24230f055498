"""Check words: a docstring's first sentence stands alone, and "behind" is a place, not a time or an order.

Run by `make check`. Docstrings, attribute docstrings included, must not begin with a bare preposition or conjunction.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = re.compile(
    r"(falls|work|memory|stand|hides?|are|sits) behind"
    r"|behind (a proxy|a port|one (interface|address)|a flag|null objects|CUDA IPC|the points)"
)
"""Places, behind which something is."""
BEGINS = re.compile(r"(Of|For|With|Behind|That)\b(?! (is|are|has|was)\b)")


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each text that stands alone in a body: line, and the text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def main() -> int:
    names = subprocess.check_output(["git", "ls-files", "src/*.py"], cwd=ROOT, text=True).split()
    findings = []
    for name in names:
        source = (ROOT / name).read_text()
        for line, text in docstrings(ast.parse(source)):
            if match := BEGINS.match(text.lstrip()):
                findings.append(f"{name}:{line}: a docstring begins with {match[1]!r}: {text.strip()[:60]!r}")
        for line, text in enumerate(source.split("\n"), start=1):
            if re.search(r"\bbehind\b", PLACES.sub("", text), re.IGNORECASE):
                findings.append(
                    f"{name}:{line}: 'behind' is a place; time and order are 'after': {text.strip()[:60]!r}"
                )
    print("\n".join(findings), end="\n" * bool(findings))
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())

"""One module reads the environment, and one function of the package reads the variable that chooses the runner."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fleetfoot
from fleetfoot.config.env import USE_NATIVE_KERNELS, use_native_kernels
from fleetfoot.native.loading import native_problem, open_library

PACKAGE = Path(fleetfoot.__file__).parent
READER = PACKAGE / "config" / "env.py"
SOURCES = sorted(PACKAGE.rglob("*.py"))
NAMES = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")


def environment_uses(source: str) -> list[int]:
    """Lines that touch the environment: ``os.environ``, ``os.getenv`` and their like, however ``os`` was imported."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        is_attribute = isinstance(node, ast.Attribute) and node.attr in NAMES
        is_import = isinstance(node, ast.ImportFrom) and node.module == "os" and _imports_environment(node)
        if is_attribute or is_import:
            found.add(node.lineno)
    return sorted(found)


def _imports_environment(node: ast.ImportFrom) -> bool:
    return any(alias.name in (*NAMES, "*") for alias in node.names)


@pytest.mark.parametrize(
    "source",
    [
        "import os\nx = os.environ['A']",
        "import os\nx = os.getenv('A')",
        "import os as o\nx = o.environ.get('A')",
        "from os import environ",
        "from os import getenv as g",
        "from os import *",
        "def f():\n    import os\n    return 'A' in os.environ",
        "import os\nos.putenv('A', 'b')",
    ],
)
def test_the_search_finds_readers(source: str) -> None:
    assert environment_uses(source)


@pytest.mark.parametrize("source", ["environ = {}\nx = environ['A']", "import os\nos.path.join('a')", "x = 'environ'"])
def test_the_search_finds_nothing_else(source: str) -> None:
    assert not environment_uses(source)


def test_nobody_else_reads_the_environment() -> None:
    assert READER in SOURCES and len(SOURCES) > 100
    assert environment_uses(READER.read_text())
    readers = {
        str(path.relative_to(PACKAGE)): lines
        for path in SOURCES
        if path != READER and (lines := environment_uses(path.read_text()))
    }
    assert readers == {}


def test_the_variable_is_named_once_and_read_by_the_oracle_alone() -> None:
    """Elsewhere its name stands in texts for people, which say what may be set."""
    callers = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value == "FLEETFOOT_USE_V2_MODEL_RUNNER":
                assert path == READER, f"{path}:{node.lineno}"
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr == "use_v2_model_runner":
                callers.append(str(path.relative_to(PACKAGE)))
    assert callers == ["plan/oracle.py"]


def test_the_c_kernels_can_be_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    open_library.cache_clear()
    monkeypatch.setenv(USE_NATIVE_KERNELS, "0")
    assert native_problem() == "FLEETFOOT_USE_NATIVE_KERNELS=0 excludes them"
    monkeypatch.setenv(USE_NATIVE_KERNELS, "1")
    assert use_native_kernels() and "excludes" not in native_problem()
    monkeypatch.setenv(USE_NATIVE_KERNELS, "no")
    with pytest.raises(ValueError, match="FLEETFOOT_USE_NATIVE_KERNELS is 'no'; it can be 0, 1 or unset"):
        use_native_kernels()

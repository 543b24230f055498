"""The budgets of lines: what counts, and what is reported."""

import subprocess
from pathlib import Path

import pytest
from tools.line_budgets import BUDGETS, count_lines, main


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with rooms of 4, 3, 2 and 1 lines."""
    files = {
        "src/fleetfoot/engine/core.py": "1\n2\n",
        "src/fleetfoot/engine/deep/tables.cuh": "3\n4\nno end of line",
        "src/fleetfoot/engine/notes.md": "no source\n",
        "src/fleetfoot/llm.py": "1\n2\n3\n",
        "src/fleetfoot/__init__.py": "1\n",
        "src/fleetfoot/_version.py": "2\n",
        "src/fleetfoot/native/linear.c": "1\n",
        "tests/engine.py": "no source\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for command in ("init", "add ."):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "src/fleetfoot/engine/untracked.py").write_text("no source\n")
    (tmp_path / "tools").mkdir()
    return tmp_path


def write_budgets(root: Path, *, core: int = 5, **lines: int) -> None:
    others = {"engine": 'also = { 3 = ["deep/"] }'}
    rooms = (f"{room} = {{ lines = {most}, ring = 1, {others.get(room, '')} }}\n" for room, most in lines.items())
    text = f"[rings]\n1 = {core}\n3 = 2\n[rooms]\n{''.join(rooms)}".replace(",  }", " }")
    (root / BUDGETS).write_text(text)


def test_lines_of_rooms(root: Path) -> None:
    lines = {room: sum(parts.values()) for room, parts in count_lines(root).items()}
    assert lines == {"engine": 4, "llm": 3, "__init__": 2, "native": 1}


def test_budgets_that_hold(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_budgets(root, core=8, engine=4, llm=10, __init__=2, native=1)
    assert main(root) == 0
    said = "10 lines of source in 4 rooms, 8 in ring 1, 2 in ring 3: within budgets\n"
    assert capsys.readouterr().out == said


def test_each_problem_is_reported_with_its_room(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_budgets(root, engine=3, llm=3, native=1, attic=50)
    assert main(root) == 1
    first, second, third, last = capsys.readouterr().out.splitlines()
    assert first.startswith("__init__ has 2 lines and no budget")
    assert second.startswith("attic has a budget and no lines")
    assert third.startswith("engine has 4 lines, and 3 are its budget")
    assert last.startswith("ring 1 has 6 lines, and 5 are its budget")

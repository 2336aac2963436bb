"""`make lint` compares every folder with its budget: the tree only shrinks."""

from __future__ import annotations

import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAIN = runpy.run_path(str(ROOT / "scripts" / "check_budget.py"))["main"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository whose folders hold as much as their budgets: 1,000 lines, 3 of a top-level file, 4 words."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)  # noqa: S607
    files = {"code/engine/deep/a.py": "x = 1\n" * 1000, "code/b.py": "x = 1\n" * 3, "docs/a.md": "four words of prose"}
    table = '[lines]\n"code/*.py" = [3, 2]\n"code/engine" = [1000, 10]\n[words]\n"docs" = [4, 4]\n'
    for name, text in {**files, ".gitignore": "build\n", "scripts/budget.toml": table}.items():
        write(tmp_path / name, text)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def budget_of(tree: Path, room: str) -> int:
    return tomllib.loads((tree / "scripts/budget.toml").read_text())["lines"][room][0]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("code/b.py", "x = 1\n" * 3, None),
        ("code/b.py", "x = 1\n" * 5, "code/*.py: take out 2 lines"),
        ("code/engine/c.py", "x = 1\n", "code/engine: take out 1 lines"),
        ("docs/deep/b.md", "five", "docs: take out 1 words"),
        ("code/engine/deep/a.py", "x = 1\n" * 965, None),
        ("code/engine/deep/a.py", "x = 1\n" * 964, "code/engine: lower the budget to 964"),
        ("code/new/a.py", "", "code/new: give it a budget"),
        ("tool.py", "", ".: give it a budget"),
        ("build/a.py", "x = 1\n", None),
    ],
)
def test_a_change_of_a_folder_is_seen(
    tree: Path, name: str, text: str, complaint: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tree / name, text)
    assert MAIN([], root=tree) == (complaint is not None)
    complaints = [line for line in capsys.readouterr().out.splitlines() if ": " in line]
    assert [line[: len(complaint or "")] for line in complaints] == ([complaint] if complaint else [])


def test_budgets_are_lowered_and_never_raised(tree: Path) -> None:
    write(tree / "code/engine/deep/a.py", "x = 1\n" * 7)
    write(tree / "code/b.py", "x = 1\n" * 4)
    assert MAIN(["--lower"], root=tree) == 1
    assert (budget_of(tree, "code/engine"), budget_of(tree, "code/*.py")) == (7, 3)
    write(tree / "code/b.py", "x = 1\n")
    assert MAIN(["--lower"], root=tree) == 0
    assert MAIN([], root=tree) == 0
    assert (budget_of(tree, "code/engine"), budget_of(tree, "code/*.py")) == (7, 1)

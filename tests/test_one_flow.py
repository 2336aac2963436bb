"""Only `semgrad_guard.guard` decides: nobody else makes an action, or changes one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUARD = ROOT / "semgrad_guard" / "guard"
DECIDING = {"decide", "decide_unscored", "abstained", "escalated", "rejected", "late", "without_text"}
ELSEWHERE = {
    "semgrad_guard/records.py": "`Verdict.delivered` tells an escalation from the target's side, its action unchanged",
    "integrations/langchain_semgrad_guard/demo/stages.py": "shows what a target of somebody else's may return",
}
"""Who writes an action outside the guard, and why that is no decision."""
FILES = sorted(
    path
    for tree in ("semgrad_guard", "integrations")
    for path in (ROOT / tree).rglob("*.py")
    if not path.is_relative_to(GUARD)
)


def decisions(tree: ast.AST) -> Iterator[str]:
    """What in a module's text makes or changes an action."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name in DECIDING and isinstance(node.func, ast.Name):
                yield f"line {node.lineno}: calls {name}"
            if name == "Verdict" and any(keyword.arg in ("action", None) for keyword in node.keywords):
                yield f"line {node.lineno}: builds a Verdict with an action"
        if isinstance(node, ast.Dict) and any(isinstance(k, ast.Constant) and k.value == "action" for k in node.keys):
            yield f"line {node.lineno}: writes an action"


def found_in(path: Path) -> list[str]:
    return list(decisions(ast.parse(path.read_text(encoding="utf-8"))))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nobody_decides_but_the_guard(path: Path) -> None:
    found = found_in(path)
    if name_of(path) in ELSEWHERE:
        assert len(found) == 1, "one place is known; it is gone, or there is another"
    else:
        assert found == []


def test_every_exception_is_a_file_of_ours() -> None:
    assert set(ELSEWHERE) <= set(map(name_of, FILES))


def test_what_is_looked_for_is_found() -> None:
    text = "x = Verdict(action='answer')\ny = decide(x)\nz = x.model_copy(update={'action': 'abstain'})\n"
    assert len(list(decisions(ast.parse(text)))) == 3
    assert any(map(found_in, GUARD.glob("*.py")))

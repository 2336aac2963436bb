"""Only `semgrad_guard.guard` decides: no other module makes an action, or changes one; the rules are in one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUARD = ROOT / "semgrad_guard" / "guard"
RULES = GUARD / "policy.py"
DECIDING = {"decide", "abstained", "escalated", "rejected", "without_text"}
ELSEWHERE = {
    "semgrad_guard/records.py": "`Verdict.delivered` tells an escalation from the target's side, its action unchanged",
    "integrations/langchain_semgrad_guard/demo/library.py": "shows what another party's target may return",
}
"""The modules that write an action outside the guard, and why this is not a decision."""
FILES = sorted(
    path
    for tree in ("semgrad_guard", "integrations")
    for path in (ROOT / tree).rglob("*.py")
    if not path.is_relative_to(GUARD)
)


def decisions(tree: ast.AST) -> Iterator[str]:
    """The places in a module's text that make or change an action."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name in DECIDING and isinstance(node.func, ast.Name):
                yield f"line {node.lineno}: calls {name}"
            if ast.unparse(node.func) == "Verdict.of" and any(
                keyword.arg in ("action", None) for keyword in node.keywords
            ):
                yield f"line {node.lineno}: builds a Verdict with an action"
            if name == "revised" and any(keyword.arg == "action" for keyword in node.keywords):
                yield f"line {node.lineno}: changes an action"
        if isinstance(node, ast.Dict) and any(isinstance(k, ast.Constant) and k.value == "action" for k in node.keys):
            yield f"line {node.lineno}: writes an action"


def test_only_the_guard_decides() -> None:
    places = {
        path.relative_to(ROOT).as_posix(): list(decisions(ast.parse(path.read_text(encoding="utf-8"))))
        for path in FILES
    }
    deciding = {name: lines for name, lines in places.items() if lines}
    assert deciding.keys() == ELSEWHERE.keys(), deciding
    assert [name for name, lines in deciding.items() if len(lines) > 1] == []


def rules(tree: ast.AST) -> Iterator[str]:
    """The places in a module's text that tell modes apart, or read an action for unfamiliar or unscored answers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            parts = list(ast.walk(node))
            read = {part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "") for part in parts}
            names = [part for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            if names and {"mode", "_mode", "on_unscored", "on_unfamiliar"} & read:
                yield f"line {node.lineno}: compares {ast.unparse(node)}"


def test_mode_and_familiarity_are_judged_in_one_file() -> None:
    places = {
        path.relative_to(ROOT).as_posix(): list(rules(ast.parse(path.read_text(encoding="utf-8"))))
        for path in (*FILES, *GUARD.glob("*.py"))
    }
    assert [name for name, lines in places.items() if lines] == [RULES.relative_to(ROOT).as_posix()], places


def test_what_is_looked_for_is_found() -> None:
    text = "x = Verdict.of(action='answer')\ny = decide(x)\nz = x.revised(action='abstain')\nw = {'action': 'answer'}\n"
    assert len(list(decisions(ast.parse(text)))) == 4
    assert any(list(decisions(ast.parse(path.read_text(encoding="utf-8")))) for path in GUARD.glob("*.py"))

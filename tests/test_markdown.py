"""Every Python block and every command of the README and the docs runs, and prints what the page says it prints."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+\.\d+|\d+")
# Timings and last digits differ between machines; words, counts and leading digits must not.
TOLERANCE = 0.02


def blocks(page: Path) -> Iterator[tuple[str, str, str | None]]:
    """(language, code, the `text` block that follows it directly, if any)."""
    found = [(m.group(1), m.group(2), m.end(), m.start()) for m in BLOCK.finditer(page.read_text())]
    for (language, code, end, _), following in zip(found, [*found[1:], None], strict=False):
        shown = None
        if following and following[0] == "text" and not page.read_text()[end : following[3]].strip():
            shown = following[1]
        yield language, code, shown


def assert_alike(printed: str, shown: str) -> None:
    """The same words, and numbers within two per cent."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split()
    for found, expected in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        assert float(found) == pytest.approx(float(expected), rel=TOLERANCE), (found, expected)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run_and_print_what_is_shown(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for language, code, shown in blocks(page):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec", dont_inherit=True), names)  # noqa: S102 - our own pages
        if shown is not None:
            assert_alike(printed.getvalue(), shown)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run(page: Path, tmp_path: Path) -> None:
    """`console` blocks: lines that begin with `$ semgrad-guard` run, in an empty folder, as a user of pip has it."""
    for language, code, _ in blocks(page):
        for line in code.splitlines() if language == "console" else ():
            if not line.startswith("$ semgrad-guard"):
                continue
            arguments = shlex.split(line.removeprefix("$ semgrad-guard"), comments=True)
            program = "import sys; from semgrad_guard.cli import app; app()"
            paths = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
            found = subprocess.run(
                [sys.executable, "-c", program, *arguments],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": paths},
                capture_output=True,
                text=True,
                check=False,
            )
            assert found.returncode in (0, 3), (line, found.stderr)  # 3: abstained


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_local_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target

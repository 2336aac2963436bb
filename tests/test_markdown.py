"""Every Python block and every command of the README and the docs runs, and prints the output that the page shows."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from semgrad_guard.pocket import QUESTIONS_PATH

from .fetched import require_smollm2
from .warm_python import WarmPython

ROOT = Path(__file__).parent.parent
FETCHED = ROOT / "docs" / "fifteen-minutes.md"
"""Runs on a fetched model, for minutes: `make check-smollm2`. Commands and code are one after the other there."""
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page != FETCHED)]
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


def commands(page: Path) -> list[str]:
    """The lines of `console` blocks that begin with `$ semgrad-guard`."""
    lines = [line for language, code, _ in blocks(page) if language == "console" for line in code.splitlines()]
    return [line for line in lines if line.startswith("$ semgrad-guard")]


@pytest.fixture(scope="session")
def few_questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of the embedded model's questions: to calibrate on all of them takes long."""
    path = tmp_path_factory.mktemp("questions") / "few.jsonl"
    path.write_text(
        "".join(QUESTIONS_PATH.read_text(encoding="utf-8").splitlines(keepends=True)[::5]), encoding="utf-8"
    )
    return path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run(warm_python: WarmPython, page: Path, tmp_path: Path, few_questions: Path) -> None:
    """In an empty folder, as a user of pip has it; calibrations on a part of the questions."""
    whole = "calibrate --model pocket --data pocket "
    for line in commands(page):
        run_once(warm_python, line.replace(whole, f"calibrate --model pocket --data {few_questions} "), tmp_path)


@pytest.mark.heavy
def test_commands_run_on_all_questions(warm_python: WarmPython, tmp_path: Path) -> None:
    for line in commands(ROOT / "README.md"):
        semgrad_guard(warm_python, line, tmp_path)


RUNS: dict[tuple[str, tuple[tuple[str, bytes], ...]], dict[str, bytes]] = {}
"""The files that a command left, by the command and the files before it: several pages calibrate alike."""


def run_once(python: WarmPython, line: str, folder: Path) -> None:
    """Run a command of a page; one that ran among the same files leaves what it left."""
    before = tuple(sorted(files(folder).items()))
    if (line, before) not in RUNS:
        semgrad_guard(python, line, folder)
        RUNS[line, before] = files(folder)
    for name, content in RUNS[line, before].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.heavy
def test_the_page_on_smollm2_runs_from_top_to_bottom(
    warm_python: WarmPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_smollm2()
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for language, code, shown in blocks(FETCHED):
        if language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(code, str(FETCHED), "exec", dont_inherit=True), names)  # noqa: S102 - our own page
            printed = out.getvalue()
        elif language == "console":
            lines = [line for line in code.replace("\\\n", " ").splitlines() if line.startswith("$ semgrad-guard")]
            printed = "".join(semgrad_guard(warm_python, line, tmp_path) for line in lines)
        else:
            continue
        if shown is not None:
            wanted = [" ".join(line.split()) for line in shown.splitlines() if line.strip()]
            found = " ".join(printed.split())
            assert [line for line in wanted if line not in found] == []


def semgrad_guard(python: WarmPython, line: str, folder: Path) -> str:
    """The output of a command of a page."""
    arguments = shlex.split(line.removeprefix("$ semgrad-guard"), comments=True)
    found = python.run(["-c", "from semgrad_guard.cli import app; app()", *arguments], folder=folder)
    assert found.returncode in (0, 3), (line, found.stderr)  # 3: abstained
    return found.stdout


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_local_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target

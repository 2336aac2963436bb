"""The documentation names every command, public name and error, and keeps the house's rules. `make docs` builds it."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from semgrad_guard import errors
from semgrad_guard.cli import app
from semgrad_guard.estimators import KIND_OF
from semgrad_guard.grading.candidates import CANDIDATES
from tests.scripts import load

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RECORDS = sorted((DOCS / "adr").glob("[0-9]*.md"))
ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
PROGRAM: Any = typer.main.get_command(app)


@pytest.fixture(scope="module")
def reference() -> str:
    return load(DOCS / "site" / "commands.py").reference()


@pytest.mark.parametrize("name", PROGRAM.commands)
def test_the_reference_names_every_command_and_option(reference: str, name: str) -> None:
    section = reference.partition(f"## {name}\n")[2].partition("\n## ")[0]
    command = PROGRAM.commands[name]
    assert " ".join(command.help.split("\n\n")[0].split()) in " ".join(section.split())
    for parameter in command.params:
        for option in (*parameter.opts, *parameter.secondary_opts) if parameter.param_type_name == "option" else ():
            assert f"`{option}`" in section, option


def test_the_reference_follows_the_program(reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed help text is a changed page: nothing is written down twice."""
    assert "<!-- commands -->" in (DOCS / "commands.md").read_text(encoding="utf-8")
    module = load(DOCS / "site" / "commands.py")
    command = typer.main.get_command(app)
    command.commands["ask"].help = "Something new."  # type: ignore[attr-defined]
    monkeypatch.setattr(typer.main, "get_command", lambda _: command)
    assert "Something new." in module.reference()


@pytest.mark.parametrize("package", ["semgrad_guard", "langchain_semgrad_guard", "llama_index_semgrad_guard"])
def test_every_public_name_is_in_the_reference(package: str) -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    documented = set(re.findall(r"^::: \S+\.(\w+)$", pages, re.MULTILINE)) | ERRORS
    assert set(importlib.import_module(package).__all__) - documented == set()


def test_every_estimator_is_explained() -> None:
    reference, glossary = ((DOCS / page).read_text(encoding="utf-8") for page in ("api/estimators.md", "glossary.md"))
    terms = " ".join(re.findall(r"^\*\*(.+?)\*\*", glossary, re.MULTILINE)).lower()
    for kind in KIND_OF.values():
        assert f"::: semgrad_guard.estimators.{kind.__name__}\n" in reference
        assert kind.title.lower() in terms, kind.title


def test_the_page_names_what_auto_compares() -> None:
    page = (DOCS / "estimators.md").read_text(encoding="utf-8")
    found = re.search(r"`auto` compares (.+?) on a quarter", page, re.DOTALL)
    assert found is not None
    assert re.findall(r"`(\w+)`", found[1]) == [candidate.name for candidate in CANDIDATES]
    assert len(CANDIDATES) == 7  # as in the help of --estimator


def test_troubleshooting_names_every_error() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    assert {name for name in ERRORS - {"SemGradGuardError"} if f"| `{name}` |" not in page} == set()


REFUSALS = (
    "UnsupportedModelError",
    "ModelNotFoundError",
    *(kind.__name__ for kind in errors.UnsupportedModelError.__subclasses__()),
)


def template(message: ast.expr) -> str:
    """The words of a message; a filled-in value is a NUL."""
    if isinstance(message, ast.Constant) and isinstance(message.value, str):
        return message.value
    if isinstance(message, ast.JoinedStr):
        return "".join(template(part) for part in message.values)
    return "\0"


def refusals() -> list[tuple[str, str]]:
    """The engine's refusals of models: their places and words."""
    found: list[tuple[str, str]] = []
    for path in sorted((ROOT / "semgrad_guard" / "engine").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in REFUSALS
                and node.args
            ):
                found.append((f"{path.name}: {node.func.id}", template(node.args[0])))
    return found


def test_troubleshooting_names_every_refusal_of_a_model() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [".*".join(map(re.escape, quote.split(" ... "))) for quote in re.findall(r'"([^"\n]{8,})"', page)]
    known = refusals()
    assert len(known) > 40
    worded = [(place, words) for place, words in known if words.strip("\0: ")]
    assert not [refusal for refusal in worded if not any(re.search(quote, refusal[1], re.DOTALL) for quote in quoted)]


def test_pages_for_users_name_no_tests() -> None:
    pages = [ROOT / "README.md", *DOCS.glob("*.md")]
    assert not [(page.name, found) for page in pages for found in re.findall(r"\btest_\w+", page.read_text("utf-8"))]


def test_records_are_dated_numbered_and_listed() -> None:
    index = (DOCS / "adr" / "README.md").read_text(encoding="utf-8")
    for record in RECORDS:
        text, number = record.read_text(encoding="utf-8"), record.stem.partition("-")[0]
        head = rf"# {number}\. .+\n\n- Date: \d{{4}}-\d\d-\d\d\n- Status: accepted\n\n## Context\n"
        assert re.match(head, text), record
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"], record
        assert f"| [{number}]({record.name}) |" in index, record
    assert len({record.stem.partition("-")[0] for record in RECORDS}) == len(RECORDS) > 20


def test_code_cites_every_record_and_no_other() -> None:
    """A record holds at a place in the code, and the code names no record, or page, that is gone."""
    cited = set[str]()
    for folder in ("semgrad_guard", "integrations", "scripts", "research", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            named = set(re.findall(r"\bdocs/[\w/-]+\.md\b", text.replace("blob/master/docs/", "")))
            assert [name for name in sorted(named) if not (ROOT / name).exists()] == [], path
            assert not re.search(r"\bADR \d|\b(record|decision)s? \d{4}\b", text), path
            cited |= named
    assert {name for name in cited if "/adr/" in name} == {f"docs/adr/{record.name}" for record in RECORDS}


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_workflows_and_forms_are_yaml(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)


def test_workflows_cover_every_python_and_system() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["tests"]["strategy"]["matrix"]
    assert matrix["python"] == ["3.11", "3.12", "3.13", "3.14"]
    assert matrix["system"] == ["ubuntu-latest", "macos-latest", "windows-latest"]


def test_the_citation_names_the_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{cited["version"]}"' in project
    assert cited["license"] == "Apache-2.0"

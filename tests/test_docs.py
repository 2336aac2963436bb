"""The documentation names every command, public name and error, and keeps the house's rules. `make docs` builds it."""

from __future__ import annotations

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
    assert len(CANDIDATES) == 8  # as in the help of --estimator


def test_pages_for_users_name_no_tests() -> None:
    pages = [ROOT / "README.md", *DOCS.glob("*.md")]
    assert not [(page.name, found) for page in pages for found in re.findall(r"\btest_\w+", page.read_text("utf-8"))]


def test_code_cites_every_decision_and_no_other() -> None:
    """A decision is dated, and holds at a place in the code; the code names no decision, or page, that is gone."""
    decisions = re.findall(
        r"^### (\d{4})\n\n\*\*[^*]+\*\* \(\d{4}-\d\d-\d\d[,)]", (DOCS / "decisions.md").read_text("utf-8"), re.M
    )
    cited = set[str]()
    for folder in ("semgrad_guard", "integrations", "scripts", "research", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            named = set(re.findall(r"\bdocs/[\w/-]+\.md\b", text.replace("blob/master/docs/", "")))
            assert [name for name in sorted(named) if not (ROOT / name).exists()] == [], path
            assert not re.search(r"\bADR \d|\b(record|decision)s? \d{4}\b", text), path
            cited |= set(re.findall(r"docs/decisions\.md#(\d{4})", text))
    assert cited == set(decisions)
    assert len(decisions) == len(set(decisions)) > 20


def test_the_citation_names_the_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{cited["version"]}"' in project
    assert cited["license"] == "Apache-2.0"

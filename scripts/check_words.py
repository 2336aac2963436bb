"""Compare the project's words with the list in CONTRIBUTING.md: phrases, how often a word may occur, names in code.

    python scripts/check_words.py [PATH ...]    # files or folders; by default the whole project

It reads docstrings, comments, texts in code (errors, help) and pages. It prints every place, then the rates, and ends
with code 1 where the list is not followed. Rates count in docstrings and comments outside of tests, where these have
2,000 words.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
READ = ("semgrad_guard", "integrations", "tests", "examples", "benchmarks", "research", "scripts", "docs", "README.md")
DIARIES = ("docs/results", "examples/documents.jsonl")
"""Dated records, whose words were of their day, and data."""
OF_FILES = "# a field of files"
"""The comment on a line whose name is a field of files, and cannot change."""
ENOUGH = 2000
"""Words below which a rate says nothing."""
TABLE_ROW = re.compile(r"^\|(?P<cells>.+)\|$", re.MULTILINE)


@dataclass(frozen=True)
class Words:
    """The three tables of CONTRIBUTING.md's section on words."""

    phrases: dict[str, str]
    """What to write instead, by the phrase: a regular expression, matched as whole words."""
    rates: dict[str, float]
    """The most occurrences in 1,000 words, by the words: alternatives."""
    names: dict[str, str]
    """What to write instead, by the name of a variable, parameter, function or class."""

    @classmethod
    def read(cls) -> Words:
        section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("### Words", 1)[1].split("\n### ", 1)[0]
        tables = [rows(text) for text in re.split(r"\n\n", section) if text.startswith("|")]
        phrases, rates, names = ({row[0].strip("`"): row[1] for row in table} for table in tables)
        return cls(phrases, {words: float(rate) for words, rate in rates.items()}, names)


@dataclass(frozen=True)
class Text:
    """A piece of prose with its place; `comment`: a docstring or a comment."""

    path: Path
    line: int
    text: str
    comment: bool


def rows(table: str) -> list[list[str]]:
    cells = [
        [cell.strip().replace("\\|", "|") for cell in row["cells"].split(" | ")] for row in TABLE_ROW.finditer(table)
    ]
    return cells[2:]


def texts_of_code(path: Path, nodes: list[ast.AST], source: str) -> Iterator[Text]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        node.value
        for owner in nodes
        if isinstance(owner, documented)
        for node in owner.body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (node in docstrings or " " in node.value):
            yield Text(path, node.lineno, node.value, node in docstrings)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(path, token.start[0], token.string, comment=True)


def texts_of_page(path: Path, source: str) -> Iterator[Text]:
    """The prose of a Markdown page: without its blocks of code."""
    code = False
    for number, line in enumerate(source.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        if not code:
            yield Text(path, number, re.sub(r"`[^`]*`", "``", line), comment=False)


def names_of(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name


def files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            dated = file.resolve().relative_to(ROOT).as_posix().startswith(DIARIES)
            if file.suffix in (".py", ".md") and not dated:
                yield file


def main(arguments: list[str]) -> int:
    words = Words.read()
    phrase = re.compile(rf"(?<!\w)(?:{'|'.join(words.phrases)})(?!\w)", re.IGNORECASE)
    breaches, comments, total = 0, Counter[str](), 0
    for path in files([Path(argument) for argument in arguments] or [ROOT / name for name in READ]):
        source = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            nodes = list(ast.walk(ast.parse(source)))
            texts = list(texts_of_code(path, nodes, source))
            lines = source.splitlines()
            for line, name in names_of(nodes):
                if name in words.names and not lines[line - 1].endswith(OF_FILES):
                    breaches += 1
                    print(f"{path}:{line}: the name `{name}`: {words.names[name]}")
        else:
            texts = list(texts_of_page(path, source))
        for text in texts:
            for match in phrase.finditer(text.text):
                breaches += 1
                line = text.line + text.text.count("\n", 0, match.start())
                print(f"{path}:{line}: {' '.join(match[0].split())}")
            if text.comment and "tests" not in path.parts:
                spoken = re.findall(r"[a-z']+", text.text.lower())
                total += len(spoken)
                prose = " ".join(spoken)
                comments.update({rate: len(re.findall(rf"\b(?:{rate})\b", prose)) for rate in words.rates})
    for rate, limit in words.rates.items():
        measured = 1000 * comments[rate] / max(total, 1)
        over = measured > limit and total >= ENOUGH
        breaches += over
        print(f"{rate}: {measured:.2f} in 1,000 words, at most {limit:g}{'  <- too often' if over else ''}")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

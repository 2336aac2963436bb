"""The front of CONTRIBUTING.md, run as it stands there: nothing of a withheld draft is on the wire."""

from __future__ import annotations

import ast
import asyncio
import json
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import pytest

from semgrad_guard import GenerationOptions, Guard, LanguageModel, Policy

from .steps import LIMIT
from .test_markdown import ROOT, blocks
from .test_structure import OPEN, public_names

(CODE,) = [code for language, code, _ in blocks(ROOT / "CONTRIBUTING.md") if language == "python"]
QUESTIONS = [{"id": number, "question": f"Where is number {number}?"} for number in range(3)]
OPTIONS = GenerationOptions(max_tokens=12)
NOTHING, EVERYTHING = Policy(threshold=0.0, on_cut="score"), Policy(threshold=1e308, on_cut="score")


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("front")
    (folder / "line_front.py").write_text(CODE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        return import_module("line_front").LineFront


@pytest.fixture(scope="module")
def drafts(language_model: LanguageModel) -> list[str]:
    guard = Guard(language_model, NOTHING, options=OPTIONS)
    return [guard.drafts([question["question"]])[0].text for question in QUESTIONS]


async def exchanged(front: Any, lines: Iterable[Any]) -> tuple[list[dict[str, Any]], str]:
    """The lines that come back until every question has its answer, and all that was on the wire."""
    server = await front.serve()
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    sent = [json.dumps(line).encode() + b"\n" for line in lines]
    writer.writelines(sent)
    received: list[dict[str, Any]] = []
    while sum("piece" not in line for line in received) < len(sent):
        received.append(json.loads(await asyncio.wait_for(reader.readline(), LIMIT)))
    writer.close()
    server.close()
    await ended()
    return received, json.dumps(received, ensure_ascii=False)


async def ended() -> None:
    """Wait until no connection is served any more."""
    while len(asyncio.all_tasks()) > 1:
        await asyncio.sleep(0.001)


def test_it_is_one_file_of_public_names() -> None:
    assert len(CODE.splitlines()) <= 150
    used = [node for node in ast.walk(ast.parse(CODE)) if isinstance(node, ast.ImportFrom) and node.module]
    ours = {str(node.module): {alias.name for alias in node.names} for node in used if "semgrad" in str(node.module)}
    assert set(ours) <= set(OPEN)
    assert all(names <= public_names(module) for module, names in ours.items())


@pytest.mark.parametrize("mode", ["enforce", "raise"])
async def test_a_withheld_draft_never_goes_out(
    front: Any, language_model: LanguageModel, drafts: list[str], mode: str
) -> None:
    lines, wire = await exchanged(front(language_model, NOTHING, mode=mode, options=OPTIONS), QUESTIONS)
    assert {line["id"] for line in lines} == {0, 1, 2}
    assert not [draft for draft in drafts if json.dumps(draft, ensure_ascii=False).strip('"') in wire]
    assert all(line.get("text") == "I don't know." if mode == "enforce" else "error" in line for line in lines)


async def test_pieces_come_where_nothing_is_withheld(
    front: Any, language_model: LanguageModel, drafts: list[str]
) -> None:
    lines, _ = await exchanged(front(language_model, NOTHING, mode="annotate", options=OPTIONS), QUESTIONS)
    pieces = ["".join(line["piece"] for line in lines if line["id"] == i and "piece" in line) for i in range(3)]
    assert pieces == drafts == [line["text"] for i in range(3) for line in lines if line["id"] == i and "text" in line]
    assert {line["record"]["action"] for line in lines if "record" in line} == {"abstain"}


async def test_it_escalates_and_lets_through(front: Any, language_model: LanguageModel, drafts: list[str]) -> None:
    async def target(question: str) -> str:
        return f"the target on {question}"

    handed_on, wire = await exchanged(front(language_model, NOTHING, escalate_to=target, options=OPTIONS), QUESTIONS)
    assert {line["text"] for line in handed_on} == {f"the target on {line['question']}" for line in QUESTIONS}
    assert not [draft for draft in drafts if json.dumps(draft, ensure_ascii=False).strip('"') in wire]
    through, _ = await exchanged(front(language_model, EVERYTHING, options=OPTIONS), QUESTIONS)
    assert [line["text"] for line in sorted(through, key=lambda line: line["id"])] == drafts


async def test_a_wrong_line_is_answered_by_an_error(front: Any, language_model: LanguageModel) -> None:
    wrong = [[], {"id": 4}, {"id": 5, "question": "Where?", "max_tokens": -1}, {"id": 6, "question": " "}]
    lines, _ = await exchanged(front(language_model, EVERYTHING, options=OPTIONS), wrong)
    assert [("error" in line, "internal" in line["error"]) for line in lines] == [(True, False)] * 4

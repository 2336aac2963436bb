"""The embedded model's closed-book calibration promises nothing about prompts of another kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from semgrad_guard import Calibration, GenerationOptions, Guard, LanguageModel, Message, Policy, calibrate
from semgrad_guard.guard.verdicts import binding_of, recording
from semgrad_guard.pocket import CALIBRATION_PATH
from semgrad_guard.records import in_context

EXAMPLES = Path(__file__).parents[2] / "examples"
COUNT, BATCH = 60, 30


def read(document: str) -> str:
    """A document's last paragraph, which states the task in plain sentences."""
    return DOCUMENTS[document].split("\n\n")[-1]


def lines(name: str) -> list[Any]:
    return [json.loads(line) for line in (EXAMPLES / name).read_text(encoding="utf-8").splitlines()]


ROWS = lines("questions.jsonl")
DOCUMENTS = {row["source"]: row["text"] for row in lines("documents.jsonl")}
ASKED = Random(0).sample(ROWS, COUNT)
OTHERS = Random(1).sample(sorted({row["document"] for row in ROWS}), COUNT)

Turns = Callable[[str, str, str], list[Message]]
STRANGE: dict[str, Turns] = {
    "the right passage": lambda q, right, _: [Message("user", in_context(q, right))],
    "an unrelated passage": lambda q, _, other: [Message("user", in_context(q, other))],
    "the right passage before the question": lambda q, right, _: [Message("user", f"{right} {q}")],
    "a system message": lambda q, *_: [Message("system", "You answer questions."), Message("user", q)],
    "a history": lambda q, *_: [Message("user", "Hello."), Message("assistant", "Hello."), Message("user", q)],
}


@pytest.fixture(scope="module")
def guard() -> Guard:
    policy = Policy.from_calibration(Calibration.load(CALIBRATION_PATH))
    return Guard(LanguageModel.from_pretrained("pocket"), policy, options=GenerationOptions(max_tokens=16))


def test_a_question_by_itself_is_promised(guard: Guard) -> None:
    known, unknown = guard.batch(["What is the capital of Japan?", "What is the capital of Mongolia?"])
    assert (known.action, known.promised, known.details.familiar) == ("answer", True, True)
    assert (unknown.action, unknown.promised, unknown.details.familiar) == ("abstain", False, True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STRANGE)
def test_nothing_is_promised_about_prompts_of_another_kind(guard: Guard, kind: str) -> None:
    prompts = [
        STRANGE[kind](row["question"], read(row["document"]), read(other))
        for row, other in zip(ASKED, OTHERS, strict=True)
    ]
    verdicts = [v for start in range(0, COUNT, BATCH) for v in guard.batch(prompts[start : start + BATCH])]
    assert sum(verdict.promised for verdict in verdicts) == 0
    assert all(verdict.details.familiar is False and verdict.details.unfamiliar for verdict in verdicts)
    assert any(verdict.action == "answer" for verdict in verdicts)  # decided as usual


@pytest.mark.parametrize(("options", "where"), [({"max_tokens": 1}, "after 1 tokens"), ({"stop": ("k",)}, "at 'k'")])
def test_an_answer_that_is_cut_off_elsewhere_is_not_promised(guard: Guard, options: dict[str, Any], where: str) -> None:
    cut = Guard(guard.model, guard.policy, options=GenerationOptions(**options))
    verdict = cut("What is the capital of Japan?")
    assert (verdict.action, verdict.promised, verdict.details.familiar) == ("answer", False, False)
    assert where in verdict.details.unfamiliar[0]


@pytest.mark.parametrize(
    ("ends", "where"),
    [
        ({"max_tokens": 1}, "has 3 tokens; those of the calibration were cut off after 1"),
        ({"stop": ("k",)}, "behind 'k'"),
    ],
)
def test_an_answer_that_goes_on_where_the_calibration_cut_is_not_promised(
    guard: Guard, ends: dict[str, Any], where: str
) -> None:
    with recording() as recorder:
        guard("What is the capital of Japan?")
    (one,) = recorder.drafts
    binding = binding_of(one.verdict).model_copy(update={"max_tokens": 256, **ends})
    made = calibrate(range(100), [True] * 100, alpha=0.1, delta=0.1, prompts=[one.prompt] * 100, binding=binding)
    longer = Guard(guard.model, Policy.from_calibration(made))
    verdict = longer("What is the capital of Japan?")
    assert (verdict.action, verdict.promised, verdict.details.familiar) == ("answer", False, False)
    assert where in verdict.details.unfamiliar[0]
    stream = longer.stream("What is the capital of Japan?")
    assert "".join(stream) == verdict.text == "Tokyo"
    assert stream.verdict.details.unfamiliar == verdict.details.unfamiliar

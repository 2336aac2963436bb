"""Abstentions: neither right nor wrong, whatever their wording and whichever the grader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from langchain_core.language_models import FakeListChatModel

from semgrad_guard.errors import InputError
from semgrad_guard.grading import GRADERS, AnswerGrader, AnswerToGrade, Contains
from semgrad_guard.grading.by_name import Judge, is_final, load_graders
from semgrad_guard.grading.grader import abstains, settled

TEXTS = json.loads((Path(__file__).parents[1] / "fixtures" / "abstentions.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", TEXTS["abstentions"])
def test_abstentions(text: str) -> None:
    assert abstains(text)
    assert {settled(text, references) for references in ((), ("Narnia Airways",), ("I don't know",))} == {"abstained"}


@pytest.mark.parametrize("text", TEXTS["claims"])
def test_claims_are_no_abstentions(text: str) -> None:
    assert not abstains(text)
    assert settled(text, ()) is False
    assert settled(text, ("Lion",)) is None
    assert settled(text, ("Lion", text.upper())) is True


@pytest.mark.parametrize(
    ("references", "grade"), [((), "abstained"), (("N/A",), "abstained"), (("NN", "unknown"), True)]
)
def test_a_reference_that_abstains_is_an_answer_beside_another_one(references: tuple[str, ...], grade: bool) -> None:
    assert settled("Unknown.", references) == grade


@pytest.mark.parametrize(
    "grader", [*GRADERS.values(), Judge(FakeListChatModel(responses=["CORRECT"]))], ids=lambda grader: grader.name
)
def test_every_grader_settles_abstentions_alike(grader: AnswerGrader) -> None:
    answers = [
        AnswerToGrade("Which airline?", text, references)
        for text in ("I don't know.", "Narnia Airways")
        for references in ((), ("Narnia Airways",), ("I do not know",))
    ]
    assert grader.grade(answers)[:5] == [*["abstained"] * 3, False, True]
    assert not Contains()("I don't know.", ["I do not know"])


def test_a_user_names_refusals_of_another_language(tmp_path: Path) -> None:
    (tmp_path / "fr.txt").write_text("Je ne sais pas\n\nDésolé\nLe contexte ne dit\nNA\n分かりません", encoding="utf-8")
    (grader,) = load_graders([f"contains+refusals={tmp_path / 'fr.txt'}"])
    refusals = (
        "Désolé, je ne sais pas quelle compagnie.",
        "Le contexte ne dit rien.",
        "I don't know.",
        "NA",
        "分かりませんが。",
    )
    claims = ("Je ne sais pas, peut-être Lyon.", "Narnia", "Paris.")
    items = [AnswerToGrade("Où ?", text, ("Paris",)) for text in (*refusals, *claims)]
    assert grader.grade(items) == [*["abstained"] * 5, False, False, True]
    assert is_final(grader.name)
    assert grader.name.startswith("contains@3+refusals(")
    with pytest.raises(InputError, match="there is no grader"):
        load_graders([f"nothing+refusals={tmp_path / 'fr.txt'}"])

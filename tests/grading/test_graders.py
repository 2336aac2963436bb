"""Graders by words: normalisation as in SQuAD, several references, and names that a calibration can be bound to.

Abstentions: neither right nor wrong, whatever their wording and whichever the grader.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.language_models import FakeListChatModel

from semgrad_guard.calibration.prompt_parts import common_subsequence
from semgrad_guard.errors import InputError
from semgrad_guard.grading import (
    GRADERS,
    AnswerGrader,
    AnswerToGrade,
    Contains,
    ExactMatch,
    normalise,
    rouge_l,
    token_f1,
)
from semgrad_guard.grading.by_name import Judge, is_final, load_graders
from semgrad_guard.grading.grader import abstains, settled
from semgrad_guard.grading.sheets import grade
from tests.engine.test_reasoning import read
from tests.thoughts import GRADED

WORDS = st.lists(st.sampled_from("uvw"), max_size=6)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("  The  Beatles! ", "beatles"),
        ("a rose by any other name", "rose by any other name"),
        ("U.S.A.", "usa"),
        ("theatre", "theatre"),
        ("It's\nan\tapple", "its apple"),
        ("A", "a"),
        ("  +  ", "+"),
        ("$1,000.50.", "1000.50"),
        ("−1.5 °C", "-1.5 °c"),
        ("2,54 or 2,540", "2.54 or 2540"),
        ("1939-45", "193945"),
        ("", ""),
    ],
)
def test_normalisation(text: str, plain: str) -> None:
    assert normalise(text) == plain


def test_exact_match_with_several_references() -> None:
    grade = ExactMatch()
    assert grade("The U.K.", ["Great Britain", "UK"])
    assert not grade("UK and Ireland", ["Great Britain", "UK"])
    assert not grade("", ["UK"])
    assert not grade(" ", [" "])
    assert not grade("UK", [])
    assert not grade("15", ["1.5", "-15"])


@pytest.mark.parametrize(
    ("text", "answer", "f1"),
    [
        ("Jane Austen", "jane austen", 1.0),
        ("Austen", "Jane Austen", 2 / 3),
        ("the novelist Jane Austen wrote it", "Jane Austen", 4 / 7),
        ("paris paris", "paris", 2 / 3),
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
    ],
)
def test_token_f1(text: str, answer: str, f1: float) -> None:
    assert token_f1(text, answer) == pytest.approx(f1, abs=1e-15)


def test_names_tell_the_settings() -> None:
    names = {name: grader.name for name, grader in GRADERS.items()}
    assert {**names, "contains": ""} == {
        "contains": "",
        "exact-match": "exact-match",
        "token-f1": "token-f1>=0.5",
        "rouge-l": "rouge-l>=0.3",
    }
    assert GRADERS["token-f1"]("Austen", ["Charlotte", "Jane Austen"])
    assert not GRADERS["token-f1"]("Austen", ["Charlotte", "Miss Jane Anna Austen"])


@pytest.mark.parametrize(
    ("text", "answer", "f"),
    [
        ("Jane Austen", "jane austen", 1.0),
        ("Austen Jane", "Jane Austen", 0.5),  # the order counts
        ("the novelist Jane Austen wrote it", "Jane Austen", 4 / 7),
        ("Jane the great Austen", "Jane Austen", 2 * 2 / 5),  # gaps are allowed
        ("東京 です", "東京", 2 / 3),
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
    ],
)
def test_rouge_l(text: str, answer: str, f: float) -> None:
    assert rouge_l(text, answer) == pytest.approx(f, abs=1e-15)


@given(WORDS, WORDS)
def test_the_longest_common_subsequence_is_that_of_brute_force(one: list[str], other: list[str]) -> None:
    def all_of(words: list[str]) -> set[tuple[str, ...]]:
        return {chosen for n in range(len(words) + 1) for chosen in combinations(words, n)}

    longest = max(map(len, all_of(one) & all_of(other)))
    assert len(common_subsequence(one, other)) == len(common_subsequence(other, one)) == longest


@given(WORDS, WORDS)
def test_the_order_can_only_cost(one: list[str], other: list[str]) -> None:
    assert 0 <= rouge_l(" ".join(one), " ".join(other)) <= token_f1(" ".join(one), " ".join(other)) <= 1


def test_many_answers_are_graded_in_order() -> None:
    answers = [
        AnswerToGrade("q", "Paris", ("paris",)),
        AnswerToGrade("q", "Rome", ("Paris", "London")),
        AnswerToGrade("q", "", ("x",)),
    ]
    for grader in GRADERS.values():
        assert grader.grade(answers) == [True, False, False]


@pytest.mark.parametrize(("written", "reference", "right"), GRADED)
def test_the_answer_behind_a_thought_is_graded(written: str, reference: str, right: bool) -> None:
    text = read("qwen3", written, cut="</think>" not in written)[0].text
    assert (grade([AnswerToGrade("What is it?", text, (reference,))], Contains())[0] is True) is right


def test_whole_texts_would_be_misgraded() -> None:
    items = [AnswerToGrade("What is it?", written, (reference,)) for written, reference, _ in GRADED]
    wrong = [found != right for found, (*_, right) in zip(grade(items, Contains()), GRADED, strict=True)]
    assert sum(wrong) >= 8


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

"""Paraphrases that a chat model writes: read from its reply, dropped where they ask something else, and kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from semgrad_guard.errors import BindingMismatchError
from semgrad_guard.estimators.text_pairs import Entailment, EntailmentScores
from semgrad_guard.paper.probing import with_written, wordings_in
from semgrad_guard.questions.data import Question

ASKED = "Who wrote Emma in 1815?"


@pytest.mark.parametrize(
    ("reply", "wordings"),
    [
        ("Which author wrote Emma in 1815?", ["Which author wrote Emma in 1815?"]),
        ("1. By whom was Emma written in 1815?\n2) Emma, of 1815, is by whom?", 2),
        ('- "Whose book is Emma (1815)?"', ["Whose book is Emma (1815)?"]),
        ("<think>hm</think>\n\nWhose is Emma, of 1815?", ["Whose is Emma, of 1815?"]),
        ("Emma, of 1815: by whom?\n" * 3, ["Emma, of 1815: by whom?"]),
        ("a 1815 Emma?\nb 1815 Emma?\nc 1815 Emma?\nd 1815 Emma?", 3),
        # not the same question
        ("Who wrote it in 1815?", []),
        ("Who wrote Emma?", []),
        ("Jane Austen wrote Emma in 1815.", []),
        ("who wrote emma in 1815", []),
        ("The question is: Who wrote Emma in 1815?", []),
        ("", []),
    ],
)
def test_wordings_in_a_reply(reply: str, wordings: list[str] | int) -> None:
    found = wordings_in(reply, ASKED)
    assert (len(found) if isinstance(wordings, int) else list(found)) == wordings


def test_a_wish_needs_no_question_mark() -> None:
    assert wordings_in("Name the currency of Peru.", "Tell me the currency of Peru.") == ("Name the currency of Peru.",)


def test_those_with_paraphrases_keep_theirs_and_the_rest_are_written_once(tmp_path: Path) -> None:
    questions = [Question(question="What is A?", paraphrases=("A is what?",)), Question(question="What is B?")]
    prompts: list[str] = []

    def ask(some: Sequence[str]) -> list[str]:
        prompts.extend(some)
        return ["B is what?" for _ in some]

    for _ in range(2):
        found = with_written(questions, tmp_path / "p.jsonl", ask, writer="w")
        assert [one.paraphrases for one in found] == [("A is what?",), ("B is what?",)]
    assert len(prompts) == 1
    assert "What is B?" in prompts[0]
    with pytest.raises(BindingMismatchError, match="writer is 'another' and was 'w'"):
        with_written(questions, tmp_path / "p.jsonl", ask, writer="another")


class Judging(Entailment):
    """Entailment by a rule: a text follows from another that has all of its words."""

    def __init__(self) -> None:
        self.name = "rule"

    def probabilities(self, pairs: Sequence[tuple[str, str]]) -> list[EntailmentScores]:
        held = [{*text.rstrip("?").lower().split()} <= {*of.rstrip("?").lower().split()} for of, text in pairs]
        return [EntailmentScores(float(one), float(not one), 0.0) for one in held]


def test_nli_drops_what_does_not_follow_both_ways(tmp_path: Path) -> None:
    (found,) = with_written(
        [Question(question="what is red?")],
        tmp_path / "p.jsonl",
        lambda prompts: ["red is what?\nwhat is red wine?\nis red?" for _ in prompts],
        writer="w",
        nli=Judging(),
    )
    assert found.paraphrases == ("red is what?",)

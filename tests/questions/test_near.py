"""Near-duplicates: wordings of one fact are found, and questions of one template are not."""

from __future__ import annotations

from semgrad_guard.questions.data import Question, wordings


def test_wordings_of_one_fact_are_close_and_questions_of_a_template_are_not() -> None:
    pairs = [
        ("What is the capital of France?", "Paris"),
        ("Which city is the capital of France?", "Paris"),
        ("What is the capital of Spain?", "Madrid"),
        ("what is the Capital of France", "Lutetia"),
        ("Who wrote Emma?", "Jane Austen"),
        ("Who wrote Persuasion?", "Jane Austen"),
        *((f"What is item {i}?", "seven") for i in range(60)),
    ]
    rows = [Question(question=text, answers=(answer,)) for text, answer in pairs]
    assert wordings(rows) == [0, 0, 2, 0, *range(4, 66)]
    passages = [Question(question="Who built it?", answers=("Ada",), context=text) for text in ("One.", "Two.")]
    assert wordings(passages) == [0, 1]
    assert wordings([]) == []
    assert wordings([*rows[2:4], *rows[2:3] * 100]) == [0, 1, *[0] * 100]

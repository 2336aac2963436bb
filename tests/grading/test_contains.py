"""The reference found in the answer: what asserts it, what only mentions it, and answers graded by reading."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semgrad_guard.grading import GRADERS, AnswerToGrade, Contains, default_grader

FIXTURES = Path(__file__).parents[1] / "fixtures" / "chat_answers"
CAPITAL = "What is the capital of France?"
OPTIONS = "Pick. A) cat B) dog C) fish"
ORGAN, BONES = "What is the largest organ of the human body?", "How many bones are in the adult human body?"
PARIS: dict[bool | None, list[str]] = {
    True: [
        "The capital of France is Paris.",
        "not Lyon but Paris",
        "It is Paris, not Lyon.",
        "Not Lyon. It's Paris.",
        "It's definitely not Lyon; it's Paris.",
        "The answer is **Paris**.",
        "PARIS",
        "It's not only Paris, of course.",
        "The capital of France is, of course, Paris, the City of Light.",
        "France's capital city is Paris and its largest city is Paris too.",
        "The capital is Paris. It is not Lyon.",
    ],
    False: [
        "It is not Paris.",
        "Paris is wrong.",
        "Lyon rather than Paris.",
        "not Paris but Lyon",
        "I don't think it's Paris.",
        "The capital isn't Paris, it's Lyon",
        "Neither Paris nor Lyon.",
        "The capital of France cannot be Paris.",
        "It's Lyon, not Paris.",
        "Parisian cafés are famous.",
        "The capital is Lyon.",
    ],
    None: [
        "Paris or Lyon.",
        "It could be Paris, Lyon, or Marseille.",
        "I don't know. Paris?",
        "Paris? No, it's Lyon.",
        "The capital is Paris. Wait, no, it's Lyon.",
        "It is Paris. That is not true.",
        "Some say Paris, others Lyon.",
        "The capital is Lyon. Paris is larger.",
        "Lyon is the capital of France, and Paris is a city near it.",
        "Lyon is the capital, with Paris in second place.",
        "Unlike Paris, Lyon is the capital.",
        "It used to be Paris, now it is Lyon.",
        "Paris, Lyon and Marseille.",
        "- Lyon\n- **Paris**\n- Nice",
        "It is near to Paris.",
        "It is Paris's neighbour.",
        "I do not have that information. Paris may be one.",
        "Paris is large. The French capital is Lyon.",
    ],
}
CASES: dict[bool | None, list[tuple[str, str, str]]] = {
    True: [
        ("Is the sun a star?", "Nobody doubts that the sun is a star.", "yes"),
        ("What is the largest planet?", "The biggest planet is Jupiter.", "Jupiter"),
        ("How many legs has a dog?", "A dog has four legs.", "4"),
        ("How many people live there?", "About 1,250 people live there.", "1250"),
        ("How many?", "twenty-five", "25"),
        ("How many?", "3.2 million", "3,200,000"),
        ("How many?", "1,5 million", "1.5 million"),
        ("When?", "On the 5th of May 1900.", "May 5, 1900"),
        ("How long is it?", "It is 10 km long.", "10 kilometres"),
        ("How much is it?", "It costs $5.50.", "5.50 dollars"),
        ("How much?", "5%", "5 percent"),
        ("What is 3 minus 5?", "3 - 5 = -2", "-2"),
        ("Was kostet es?", "Es kostet 5 €.", "5 Euro"),
        (BONES, "Babies have 270 bones. The adult human body has 206 bones.", "206"),
        ("When was the war?", "It was fought between 1939 and 1945.", "1939–1945"),
        ("Is a whale a fish?", "No, it is a mammal.", "no"),
        ("Is a whale a fish?", "A whale is not a fish.", "no"),
        ("Is Pluto a planet?", "Pluto is no longer classified as a planet.", "no"),
        ("Is the sky blue?", "The sky is blue.", "yes"),
        (OPTIONS, "The answer is B.", "B"),
        (OPTIONS, "B) dog", "B"),
        (OPTIONS, "A dog.", "B"),
        ("What is the chemical symbol of potassium?", "The symbol is K.", "K"),
        ("Who wrote Emma?", "Austen wrote it.", "Jane Austen"),
        ("Who wrote it?", "Gabriel Garcia Marquez wrote it.", "Gabriel García Márquez"),
        ("Which is larger, Jupiter or Mars?", "Jupiter.", "Jupiter"),
        ("Name the colours.", "blue, white and red", "red, white and blue"),
        ("Where is it?", "In the Berlin office", "our Berlin office"),
        ("What is H2O?", "Water (H₂O) is water.", "water"),
        (ORGAN, "The largest organ is the skin, which lies above the liver.", "skin"),
        ("What is the capital of Australia?", "Canberra (not Sydney).", "Canberra"),
        ("Which country is it?", "The UK won.", "UK"),
    ],
    False: [
        ("How many legs has a dog?", "It has 14 legs.", "4"),
        ("How many legs has a dog?", "Not 4, but 5.", "4"),
        ("How much?", "15", "1.5"),
        ("What is 3 minus 5?", "2", "-2"),
        ("How hot?", "2022-02-24", "24°"),
        ("Is a whale a fish?", "Yes.", "no"),
        ("Is a whale a fish?", "A whale is a fish, I know no better.", "no"),
        (OPTIONS, "A) cat", "B"),
        (OPTIONS, "It's not B, but C.", "B"),
        ("What is the main language of Georgia?", "Georgia lies in the Caucasus.", "Georgian"),
        ("What do cows drink?", "Waterproof coats.", "water"),
        ("Who composed it?", "It was composed by Strauss.", "Igor Stravinsky"),
        ("Which ocean is the largest?", "The largest ocean is the Indian Ocean.", "Pacific Ocean"),
    ],
    None: [
        ("Capital of Australia?", "Canberra/Sydney", "Canberra"),
        ("Capital of Australia?", "Canberra, Sydney, Perth", "Canberra"),
        (
            "Who wrote Hamlet?",
            "A contemporary of William Shakespeare, Ben Jonson, wrote Hamlet.",
            "William Shakespeare",
        ),
        ("Who wrote Hamlet?", "Hamlet was attributed to Shakespeare, but Kyd wrote it.", "William Shakespeare"),
        ("How many moons has Mars?", "Half of 2.", "2"),
        ("Is the sun a star?", "Yes and no.", "yes"),
        ("What colour is the sky?", "The sky looks blue to us, but it is in fact violet.", "blue"),
        ("What is the largest planet?", "The second largest planet is Jupiter.", "Jupiter"),
        ("What is the largest planet?", "The smallest planet is Jupiter.", "Jupiter"),
        ("How many legs has a dog?", "Between 3 and 4", "4"),
        ("How many legs has a dog?", "A dog has 5 legs and 4 paws.", "4"),
        ("When?", "In May 1900", "May 5, 1900"),
        ("When did it end?", "It ran from 1939 to 1945.", "1945"),
        ("When was he born?", "He was born on 4 March 1847.", "3 March 1847"),
        ("How long is it?", "It is 6.2 miles long.", "10 kilometres"),
        ("How high is it?", "It is 29,032 feet high.", "8,849 m"),
        ("How cold is it?", "It is 196 °C.", "-196 °C"),
        (BONES, "The adult human body has 270 bones. A baby has 206 bones.", "206"),
        ("Is the sky blue?", "I know nothing about it.", "yes"),
        ("Can fish drown?", "They can.", "yes"),
        ("Which letter comes first?", "A spider.", "A"),
        ("What is the chemical symbol of potassium?", "Potassium is Po. K?", "K"),
        ("Who wrote Emma?", "Caroline Austen wrote it.", "Jane Austen"),
        ("Who wrote Emma?", "Jane Austen's brother Henry wrote Emma.", "Jane Austen"),
        ("Which is larger, Jupiter or Mars?", "Mars is larger than Jupiter.", "Jupiter"),
        ("In which state is Oklahoma City?", "Oklahoma City is in Texas.", "Oklahoma"),
        ("What type of tissue is the brain?", "It is the nervous system.", "nervous tissue"),
        ("Name the colours.", "blue and red", "red, white and blue"),
        (ORGAN, "The largest organ is the liver, which lies under the skin.", "skin"),
        ("Who painted Guernica?", "Guernica was painted by Dalí, together with Picasso.", "Picasso"),
        ("Who was the first president?", "Jefferson, who succeeded Washington, was it.", "Washington"),
        ("Which country is it?", "It is the USA.", "United States"),
        ("Which war was it?", "World War I", "World War II"),
    ],
}
TABLE = [(CAPITAL, text, "Paris", verdict) for verdict, texts in PARIS.items() for text in texts]
TABLE += [(*case, verdict) for verdict, cases in CASES.items() for case in cases]


def says(question: str, text: str, references: Sequence[str]) -> bool | None:
    return Contains().agrees(AnswerToGrade(question, text, tuple(references)))


@pytest.mark.parametrize(("question", "text", "reference", "verdict"), TABLE)
def test_verdicts(question: str, text: str, reference: str, verdict: bool | None) -> None:
    assert says(question, text, [reference]) is verdict


@given(st.sampled_from(["Paris", "Jane Austen", "carbon dioxide", "42", "18 weeks", "Brasília", "K", "the Nile"]))
def test_a_reference_by_itself_is_right_and_denied_wrong(reference: str) -> None:
    for right in (reference, reference.upper(), f"It is {reference}.", f"The answer is {reference}, of course."):
        assert says("What is it?", right, [reference])
    for wrong in (f"It is not {reference}.", f"{reference} is wrong.", f"I don't think it is {reference}.", "", "  "):
        assert says("What is it?", wrong, [reference]) is False


@given(st.text(max_size=80), st.text(max_size=80), st.lists(st.text(max_size=20), max_size=3))
def test_any_text_gets_a_verdict(question: str, text: str, references: list[str]) -> None:
    assert says(question, text, references) in (True, False, None)


def test_several_references_and_none() -> None:
    assert says("Who?", "It was Dumas.", ["Verne", "Dumas"])
    assert says("Who?", "It was Dumas.", []) is False
    assert says("Who?", "It was Dumas.", ["", " "]) is False


def test_it_is_what_chat_models_are_graded_by() -> None:
    assert default_grader("chat@0123456789ab") == "contains"
    assert default_grader("chat@plain") == "exact-match"
    assert GRADERS["contains"] == Contains()
    assert Contains()("The capital of France is Paris.", ["Paris"], question=CAPITAL)
    assert not Contains()("The capital of France is Paris.", ["Paris"])  # without its question France may be the answer


@pytest.mark.parametrize(
    ("file", "count", "wrong", "called_right", "without"),
    [("answers.jsonl", 612, 24, 17, 89), ("held_out.jsonl", 40, 1, 1, 21)],
)
def test_answers_that_were_read(file: str, count: int, wrong: int, called_right: int, without: int) -> None:
    """At most 4 % are graded wrongly; the page about graders has these figures."""
    rows = [json.loads(line) for line in (FIXTURES / file).read_text(encoding="utf-8").splitlines()]
    items = [AnswerToGrade(row["question"], row["answer"], tuple(row["answers"])) for row in rows]
    verdicts = GRADERS["contains"].grade(items)
    mistakes = [row for verdict, row in zip(verdicts, rows, strict=True) if verdict is (not row["correct"])]
    found = (len(rows), len(mistakes), sum(not row["correct"] for row in mistakes), verdicts.count(None))
    assert found == (count, wrong, called_right, without)
    assert len(mistakes) <= 0.04 * len(rows)

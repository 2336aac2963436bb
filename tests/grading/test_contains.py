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
ORGAN, BONES = "What is the largest organ of the human body?", "How many bones are in the adult human body?"


def says(question: str, text: str, references: Sequence[str]) -> bool | None:
    return Contains().agrees(AnswerToGrade(question, text, tuple(references)))


@pytest.mark.parametrize(
    "text",
    [
        "The capital of France is Paris.",
        "not Lyon but Paris",
        "I'm not sure, but I think it is Paris.",
        "It is Paris, not Lyon.",
        "Not Lyon. It's Paris.",
        "Everyone knows it's Paris!",
        "It's definitely not Lyon; it's Paris.",
        "No doubt: Paris.",
        "The answer is **Paris**.",
        "PARIS",
        "It is no other city than Paris.",
        "It's not only Paris, of course.",
        "The capital of France is, of course, Paris, the City of Light.",
        "France's capital city is Paris and its largest city is Paris too.",
        "The capital, which is not Lyon, is Paris.",
        "The capital is Paris. It is not Lyon.",
    ],
)
def test_the_reference_is_asserted(text: str) -> None:
    assert says(CAPITAL, text, ["Paris"])


@pytest.mark.parametrize(
    "text",
    [
        "It is not Paris.",
        "Paris is wrong.",
        "Lyon rather than Paris.",
        "not Paris but Lyon",
        "I don't think it's Paris.",
        "It isn't Paris.",
        "The capital isn't Paris, it's Lyon",
        "Paris or Lyon.",
        "It could be Paris, Lyon, or Marseille.",
        "I don't know whether it is Paris.",
        "I don't know. Paris?",
        "I don't know, maybe Paris.",
        "Parisian cafés are famous.",
        "Paris isn't the capital of France.",
        "Some say Paris, others Lyon.",
        "The capital is Lyon. Paris is larger.",
        "Lyon is the capital of France, and Paris is a city near it.",
        "Contrary to Paris, the capital is Lyon",
        "Paris? No, it's Lyon.",
        "The capital is Paris. Wait, no, it's Lyon.",
        "Neither Paris nor Lyon.",
        "Unlike Paris, Lyon is the capital.",
        "It's Lyon, not Paris.",
        "Instead of Paris, the capital is Lyon.",
        "I can't say that it is Paris.",
        "I do not have that information. Paris may be one.",
        "Many people believe it is Paris, but it is Lyon.",
        "It used to be Paris, now it is Lyon.",
        "Paris, Lyon and Marseille.",
        "Either Lyon or Paris",
        "There is no capital called Paris.",
        "The capital of France cannot be Paris.",
        "It would be a mistake to say Paris.",
        "It's false that Paris is the capital.",
    ],
)
def test_a_mention_is_no_assertion(text: str) -> None:
    assert not says(CAPITAL, text, ["Paris"])


@pytest.mark.parametrize(
    ("question", "text", "reference", "right"),
    [
        ("How many legs has a dog?", "A dog has four legs.", "4", True),
        ("How many legs has a dog?", "It has 14 legs.", "4", False),
        ("How many legs has a dog?", "In 2004, dogs had 5 legs", "4", False),
        ("How many legs has a dog?", "A dog has 5 legs and 4 paws.", "4", False),
        ("How many legs has a dog?", "Four.", "4", True),
        ("How many legs has a dog?", "Between 3 and 4", "4", False),
        ("How many legs has a dog?", "Three or four.", "4", False),
        ("How many legs has a dog?", "Not 4, but 5.", "4", False),
        ("How many legs has a dog?", "1.4 on average", "4", False),
        ("How many legs has a dog?", "There are 4 of them.", "four", True),
        ("How many people live there?", "About 1,250 people live there.", "1250", True),
        ("How many?", "twenty-five", "25", True),
        ("How many?", "One hundred and twenty", "120", True),
        ("How many?", "3.2 million", "3,200,000", True),
        ("When?", "On the 5th of May 1900.", "May 5, 1900", True),
        ("When?", "In May 1900", "May 5, 1900", False),
        ("When did it end?", "It ended in 1945.", "1945", True),
        ("When did it end?", "It ran from 1939 to 1945.", "1945", False),
        ("How long is it?", "It is 10 km long.", "10 kilometres", True),
        ("How long is it?", "It is 10 miles long.", "10 kilometres", False),
        ("How hot?", "212°F (100°C)", "100 degrees Celsius", True),
        ("How much is it?", "It costs $5.50.", "5.50 dollars", True),
        ("How much?", "5%", "5 percent", True),
        ("Is a whale a fish?", "No, it is a mammal.", "no", True),
        ("Is a whale a fish?", "Yes.", "no", False),
        ("Is a whale a fish?", "A whale is not a fish.", "no", True),
        ("Is a whale a fish?", "There is no doubt that a whale is a fish.", "no", False),
        ("Is a whale a fish?", "A whale is a fish, I know no better.", "no", False),
        ("Is Pluto a planet?", "Pluto is no longer classified as a planet.", "no", True),
        ("Is the sky blue?", "The sky is blue.", "yes", True),
        ("Is the sky blue?", "I know nothing about it.", "yes", False),
        ("Is the sky blue?", "Yesterday.", "yes", False),
        ("Which letter comes first?", "A spider.", "A", False),
        ("Which letter comes first?", "The first is A.", "A", True),
        ("Pick. A) cat B) dog C) fish", "The answer is B.", "B", True),
        ("Pick. A) cat B) dog C) fish", "B) dog", "B", True),
        ("Pick. A) cat B) dog C) fish", "A dog.", "B", True),
        ("Pick. A) cat B) dog C) fish", "A) cat", "B", False),
        ("Pick. A) cat B) dog C) fish", "A dog.", "A", False),
        ("Pick. A) cat B) dog C) fish", "It's not B, but C.", "B", False),
        ("What is the chemical symbol of potassium?", "The symbol is K.", "K", True),
        ("What is the chemical symbol of potassium?", "Potassium is Po. K?", "K", False),
        ("What is the chemical symbol of gold?", "Au (from aurum)", "Au", True),
        ("What is the chemical symbol of indium?", "It is found in rocks.", "In", False),
        ("Who wrote Emma?", "Austen wrote it.", "Jane Austen", True),
        ("Who wrote Emma?", "Caroline Austen wrote it.", "Jane Austen", False),
        ("Who wrote Emma?", "Miss Jane Austen.", "Jane Austen", True),
        ("Who wrote it?", "García Márquez", "Gabriel García Márquez", True),
        ("Who wrote it?", "Gabriel Garcia Marquez wrote it.", "Gabriel García Márquez", True),
        ("Which is larger, Jupiter or Mars?", "Jupiter is larger than Mars.", "Jupiter", True),
        ("Which is larger, Jupiter or Mars?", "Mars is larger than Jupiter.", "Jupiter", False),
        ("Which is larger, Jupiter or Mars?", "Both Jupiter and Mars are large.", "Jupiter", False),
        ("Which is larger, Jupiter or Mars?", "Jupiter.", "Jupiter", True),
        ("In which state is Oklahoma City?", "Oklahoma City is in Texas.", "Oklahoma", False),
        ("In which state is Oklahoma City?", "Oklahoma City is in Oklahoma.", "Oklahoma", True),
        ("What is the plural of mouse?", "The plural of mouse is mouses.", "mice", False),
        ("What is the main language of Georgia?", "Georgia lies in the Caucasus.", "Georgian", False),
        ("What is the main language of Georgia?", "In Georgia they speak Georgian.", "Georgian", True),
        ("What is the main language of Armenia?", "Armenia", "Armenian", False),
        ("What type of light tans the skin?", "It is exposure to ultraviolet (UV) radiation.", "uv light", True),
        ("What cell structure do molecules pass?", "They pass its membrane.", "cell membrane", True),
        ("What type of energy do clothes retain?", "It's called thermal insulation.", "thermal energy", False),
        ("What type of tissue is the brain?", "It is the nervous system.", "nervous tissue", False),
        ("What type of tissue is the brain?", "It is a nervous one.", "nervous tissue", False),
        ("What did he assert?", "He was warned of a prince.", "he was a prince", False),
        ("What colour is it?", "It's a grey cat's fur: gray.", "grey", True),
        ("Name the colours.", "blue, white and red", "red, white and blue", True),
        ("Name the colours.", "blue and red", "red, white and blue", False),
        ("What is it made of?", "It is made from bees' wax.", "wax", True),
        ("Where is it?", "In the Berlin office", "our Berlin office", True),
        ("What is H2O?", "Water (H₂O) is water.", "water", True),
        ("Was kostet es?", "Es kostet 5 €.", "5 Euro", True),
        ("Why is it forbidden?", "Because they distract the drivers of cranes.", "they distract crane drivers", True),
        ("When was he born?", "He was born on 3 March 1847 in Edinburgh.", "1847", True),
        ("When was he born?", "He was born in 1850 and died in 1847.", "1847", False),
        ("When was he born?", "He was born on 4 March 1847.", "3 March 1847", False),
        ("Can fish drown?", "They cannot.", "yes", False),
        (
            "What is the capital of Australia?",
            "While Canberra is often thought to be the capital, it is Sydney.",
            "Canberra",
            False,
        ),
        ("What is the capital of Australia?", "Canberra (not Sydney).", "Canberra", True),
        ("How many moons does Mars have?", "Mars has more than 2 moons.", "2", False),
        ("What do cows drink?", "Waterproof coats.", "water", False),
        # From answers written in the style of small chat models, 25 November 2026:
        (ORGAN, "The largest organ is the liver, which lies under the skin.", "skin", False),
        (ORGAN, "The largest organ is the skin, which lies above the liver.", "skin", True),
        ("What is the currency?", "The currency is the euro, although many accept francs.", "franc", False),
        (
            "What is the capital of Turkey?",
            "The capital of Turkey is Istanbul, while Ankara is smaller.",
            "Ankara",
            False,
        ),
        ("What is the capital of Turkey?", "Although Istanbul is larger, the capital is Ankara.", "Ankara", True),
        (
            "Who was the first president?",
            "Jefferson, who succeeded Washington, was the first president.",
            "Washington",
            False,
        ),
        ("Which element is number 1?", "The number 1 is helium, and hydrogen has the number 2.", "hydrogen", False),
        ("Who painted Guernica?", "Guernica was painted by Dalí, together with Picasso.", "Picasso", False),
        (
            "Which language is spoken?",
            "They speak Spanish, unlike people there who speak Portuguese.",
            "Portuguese",
            False,
        ),
        ("Who was she married to?", "She was a physicist, who married Pierre in 1895.", "Pierre", True),
        ("What does it produce?", "It is the process in leaves, which produces oxygen.", "oxygen", True),
        ("Who wrote it?", "It was written by Tolstoy's contemporary, Gogol.", "Leo Tolstoy", False),
        ("Do you know the capital of Brazil?", "Bahia, Brazil, is a city in the south.", "Brasilia", False),
        ("Of which nationality was Beethoven?", "He died in Vienna, Austria, Germany.", "German", False),
        ("What language do people speak in Lithuania?", "Lietuvu is spoken in Lithuania.", "Lithuanian", False),
        (
            "Which currency do people use in Bolivia?",
            "In Bolivia, the currency is the Bolivian Piso (BCO). It is the official currency of Bolivia.",
            "boliviano",
            False,
        ),
        (
            "How much money did Felix Anstey leave for the observatory?",
            "The observatory was founded by Felix Anstey, who left 9,000 crowns for the purpose.",
            "9,000 crowns",
            True,
        ),
        ("Who composed it?", "It was composed by Strauss.", "Igor Stravinsky", False),
        ("Who made it?", "It was made by Anton Reilly.", "Anton Reyl", False),
        ("Who wrote it?", "It was written by Joanne Rowling.", "J. K. Rowling", True),
        ("Who wrote it?", "It was written by Peter Rowling.", "J. K. Rowling", False),
        ("Which ocean is the largest?", "The largest ocean is the Pacific.", "Pacific Ocean", True),
        ("Which ocean is the largest?", "The largest ocean is the Indian Ocean.", "Pacific Ocean", False),
        ("How high is it?", "It is 8,848.86 meters high.", "8,849 m", True),
        ("How high is it?", "It is 8,848.3 meters high.", "8,849 m", False),
        ("What is pi?", "About 3.14.", "3.14159", True),
        ("What is pi?", "About 3.1.", "3.14159", False),
        ("How long is it?", "It is 26.2 miles (42.2 kilometers) long.", "42.195 km", True),
        (BONES, "Babies have 270 bones. The adult human body has 206 bones.", "206", True),
        (BONES, "The adult human body has 270 bones. A baby has 206 bones.", "206", False),
        ("When did the wall fall?", "It was built in 1961 and fell in 1989.", "1989", True),
        ("When did the wall fall?", "It was built in 1989.", "1989", False),
        ("When was the wall built?", "It was built in 1961 and fell in 1989.", "1961", True),
        ("What is the smallest prime?", "Primes are 2, 3 and 5. The smallest prime is 3.", "2", False),
        ("Can penguins fly?", "Penguins are birds. They cannot fly.", "no", True),
        # The same in other units, and years from one to another:
        ("How long is it?", "It is 26.2 miles long.", "42.195 km", True),
        ("How long is it?", "It is 6.2 miles long, not 10 km.", "10 kilometres", False),
        ("How long is it?", "It is 7 miles long.", "10 kilometres", False),
        ("How far is it?", "It is 238,900 miles away.", "384,400 km", True),
        ("How high is it?", "It is 29,032 feet high.", "8,849 m", True),
        ("How high is it?", "It is 29,300 feet high.", "8,849 m", False),
        ("How high is it?", "It is 8,849 feet high.", "8,849 m", False),
        ("How heavy is it?", "It weighs 2.2 miles.", "1 kg", False),
        ("How hot?", "It boils at 212 degrees Fahrenheit.", "100 degrees Celsius", True),
        ("How hot?", "It boils at 210 degrees Fahrenheit.", "100 degrees Celsius", False),
        ("How hot?", "It freezes at 32°F.", "0 °C", True),
        ("How long is it, in kilometres?", "It is 26.2 miles long.", "42.195 km", False),
        ("When is it due?", "It is due two weeks after the next one.", "14 days", False),
        ("When was the war?", "It lasted from 1939 to 1945.", "1939-1945", True),
        ("When was the war?", "It was fought between 1939 and 1945.", "1939–1945", True),
        ("When was the war?", "It was fought 1939–45.", "1939 to 1945", True),
        ("When was the war?", "It was from 1914 to 1945.", "1939-1945", False),
        ("When was the war?", "It was in 1939 or 1945.", "1939-1945", False),
        ("When was the war?", "It was in 1945, and not from 1939.", "1939-1945", False),
        ("When was the war?", "It was not from 1939 to 1945.", "1939-1945", False),
        ("When was the war?", "It was from 1945 to 1939.", "1939-1945", False),
        # The same date, number, rate or time in another spelling:
        ("When?", "It fell on November 9, 1989.", "1989-11-09", True),
        ("When?", "1989-11-09", "9 November 1989", True),
        ("When?", "1989-11-10", "9 November 1989", False),
        ("When?", "It fell on Nov. 9th, 1989.", "9 November 1989", True),
        ("How hot?", "2022-02-24", "24°", False),
        ("When?", "He died in 44 B.C.", "44 BCE", True),
        ("How high is it?", "It is 8\u202f849 m high.", "8,849 m", True),
        ("How high is it?", "It is 1 849 m high.", "849 m", False),
        ("How fast is it?", "100 kilometres per hour", "100 km/h", True),
        ("How fast is it?", "100 kph", "100 km/h", True),
        ("How fast is it?", "100 mph", "100 km/h", False),
        ("How fast is it?", "5 km per hour", "5 hours", False),
        ("When does it open?", "It opens at 9:00 a.m. on Mondays.", "9 am", True),
        ("When does it open?", "It opens at 9 p.m.", "9 am", False),
        # Signs and points belong to a number:
        ("How cold is it?", "It is −196 °C.", "-196 °C", True),
        ("How cold is it?", "It is minus 196 degrees Celsius.", "-196 °C", True),
        ("How cold is it?", "It is 196 °C.", "-196 °C", False),
        ("How cold is it?", "-40 °F", "-40 °C", True),
        ("What is 3 minus 5?", "3 - 5 = -2", "-2", True),
        ("What is 3 minus 5?", "2", "-2", False),
        ("What is 5 minus 3?", "5 minus 3 is 2.", "2", True),
        ("How many?", "Answer - 5", "5", True),
        ("How much?", "15", "1.5", False),
        ("How many?", "1,5 million", "1.5 million", True),
        # Numerals of names:
        ("Who was he?", "Henry the Eighth", "Henry VIII", True),
        ("Who was he?", "Henry VII", "Henry VIII", False),
        ("Who was she?", "Elizabeth the First", "Elizabeth I", True),
        ("Who was she?", "Elizabeth II", "Elizabeth I", False),
        ("Which war was it?", "The Second World War.", "World War II", True),
        ("Which war was it?", "World War 2", "World War II", True),
        ("Which war was it?", "World War I", "World War II", False),
        ("In which century?", "In the XVII century.", "17th century", True),
        # Names in other lengths:
        ("Which country is it?", "It is the USA.", "United States", True),
        ("Which country is it?", "The UK won.", "UK", True),
        ("Which country is it?", "Let us say it is France.", "US", False),
        ("Which agency is it?", "Those who know say it is the UN.", "WHO", False),
        ("What does WHO stand for?", "WHO stands for World Hunger Organisation.", "World Health Organization", False),
        ("What does WHO stand for?", "It is the World Health Organisation.", "World Health Organization", True),
        ("Who was president?", "JFK", "John F. Kennedy", True),
        ("Who was president?", "John Fitzgerald Kennedy was.", "John F. Kennedy", True),
        ("Who was president?", "Robert F. Kennedy", "John F. Kennedy", False),
        ("Who wrote Emma?", "C. Austen wrote it.", "Jane Austen", False),
        ("Who need not pay?", "The Marlow Playhouse.", "Friends of the Playhouse", False),
        ("Who wrote Emma?", "Jane Austen's brother Henry wrote Emma.", "Jane Austen", False),
        ("Which is the highest?", "Mt. Everest is.", "Mount Everest", True),
        ("Which city was it?", "It is St. Petersburg today.", "Saint Petersburg", True),
        # What stands next to the reference:
        (CAPITAL, "- Lyon\n- **Paris**\n- Nice", "Paris", False),
        (CAPITAL, "1. Paris\n2. Lyon\n3. Nice", "Paris", False),
        (CAPITAL, "- Capital: Paris\n- Currency: euro\n- Language: French", "Paris", True),
        (CAPITAL, "1. France is in Europe.\n2. Its seat is Paris.\n3. So it is Paris.", "Paris", True),
        (CAPITAL, "Paris is often mistaken for the capital, but it is Lyon.", "Paris", False),
        (CAPITAL, "Paris is not only the capital but also the largest city.", "Paris", True),
        (CAPITAL, "The capital of France is Paris. The capital of Austria is Vienna.", "Paris", True),
        (CAPITAL, "Paris is large. The French capital is Lyon.", "Paris", False),
        ("Who was first, Ann or Tom?", "Ann was the first, followed by Tom.", "Ann", True),
        ("Is it a fruit or a vegetable?", "It is a fruit, though cooks disagree about the vegetable.", "fruit", True),
    ],
)
def test_kinds_of_references(question: str, text: str, reference: str, *, right: bool) -> None:
    verdict = says(question, text, [reference])
    assert verdict is right or (verdict is None and not right)


@pytest.mark.parametrize(
    ("question", "text", "reference"),
    [
        (CAPITAL, "Paris or Lyon.", "Paris"),
        (CAPITAL, "I don't know. Paris?", "Paris"),
        (CAPITAL, "Many people say Paris.", "Paris"),
        (CAPITAL, "It could be Paris.", "Paris"),
        (CAPITAL, "The capital is Lyon. Paris is larger.", "Paris"),
        (CAPITAL, "Lyon is the capital, with Paris in second place.", "Paris"),
        (CAPITAL, "It is Paris. The capital cannot be Paris.", "Paris"),
        (CAPITAL, "It is Paris's neighbour.", "Paris"),
        ("Who painted Guernica?", "It was Dalí, together with Picasso.", "Picasso"),
        (CAPITAL, "It is Paris, if I am not mistaken.", "Paris"),
        ("Can fish drown?", "They can.", "yes"),
        ("How long is it?", "It is 6.2 miles long.", "10 kilometres"),
        ("How far is it?", "It is about 10 miles.", "16 km"),
        ("How heavy is it?", "It weighs 2.2 pounds.", "1 kg"),
        ("How long is it?", "It is 6.2 miles long, not 10 km.", "10 kilometres"),
        ("How long is it?", "It takes 21 days.", "three weeks"),
        ("How long is it?", "It takes 12 to 21 days.", "12 days"),
        ("How much does it cost?", "It costs 15 euros per month.", "15 euros"),
        ("How many legs has a dog?", "A dog has 5 legs. A dog has 4 legs.", "4"),
        ("Did he win?", "Yes. He did not win.", "yes"),
        ("Which is larger, Jupiter or Mars?", "Jupiter is smaller than Mars.", "Jupiter"),
    ],
)
def test_no_verdict_rather_than_a_guess(question: str, text: str, reference: str) -> None:
    assert says(question, text, [reference]) is None


@pytest.mark.parametrize(
    "text",
    [
        "It is not Paris.",
        "Lyon rather than Paris.",
        "not Paris but Lyon",
        "Neither Paris nor Lyon.",
        "It is near to Paris.",
        "It lies outside Paris.",
        "It is Paris. That is not true.",
    ],
)
def test_a_denied_reference_is_wrong(text: str) -> None:
    assert says(CAPITAL, text, ["Paris"]) is False


@given(st.sampled_from(["Paris", "Jane Austen", "carbon dioxide", "42", "18 weeks", "Brasília", "K", "the Nile"]))
def test_a_reference_by_itself_is_right_and_denied_wrong(reference: str) -> None:
    for right in (reference, reference.upper(), f"It is {reference}.", f"The answer is {reference}, of course."):
        assert says("What is it?", right, [reference]) or (right.isupper() and len(reference) < 2)
    for wrong in (f"It is not {reference}.", f"{reference} is wrong.", f"I don't think it is {reference}.", "", "  "):
        assert not says("What is it?", wrong, [reference])


@given(st.text(max_size=80), st.text(max_size=80), st.lists(st.text(max_size=20), max_size=3))
def test_any_text_gets_a_verdict(question: str, text: str, references: list[str]) -> None:
    assert says(question, text, references) in (True, False, None)


def test_several_references_and_none() -> None:
    assert says("Who?", "It was Dumas.", ["Verne", "Dumas"])
    assert not says("Who?", "It was Dumas.", [])
    assert not says("Who?", "It was Dumas.", ["", " "])


def test_it_is_what_chat_models_are_graded_by() -> None:
    assert default_grader("chat@0123456789ab") == "contains"
    assert default_grader("chat@plain") == "exact-match"
    assert GRADERS["contains"] == Contains()
    assert Contains()("It's Paris.", ["Paris"])
    capital = ("The capital of France is Paris.", ["Paris"])
    assert Contains()(*capital, question=CAPITAL)
    assert not Contains()(*capital)  # without its question France may be the answer


@pytest.mark.parametrize(
    ("file", "count", "most_wrong", "most_called_right", "most_unsettled"),
    [("answers.jsonl", 612, 30, 13, 73), ("held_out.jsonl", 40, 4, 1, 16)],
)
def test_answers_that_were_read(
    file: str, count: int, most_wrong: int, most_called_right: int, most_unsettled: int
) -> None:
    """At most 8 % are wrong, and 12 % wrong or without a verdict: on the model's answers 3.4 % and 10.6 %."""
    rows = [json.loads(line) for line in (FIXTURES / file).read_text(encoding="utf-8").splitlines()]
    items = [AnswerToGrade(row["question"], row["answer"], tuple(row["answers"])) for row in rows]
    verdicts = GRADERS["contains"].grade(items)
    wrong = sum(verdict is (not row["correct"]) for verdict, row in zip(verdicts, rows, strict=True))
    called_right = sum(verdict is True and not row["correct"] for verdict, row in zip(verdicts, rows, strict=True))
    assert len(rows) == count
    assert wrong <= most_wrong
    assert called_right <= most_called_right
    assert wrong + verdicts.count(None) <= most_unsettled

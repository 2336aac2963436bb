"""Abstentions: neither right nor wrong, whatever their wording and whichever the grader."""

from __future__ import annotations

from pathlib import Path

import pytest
from langchain_core.language_models import FakeListChatModel

from semgrad_guard.errors import InputError
from semgrad_guard.grading import GRADERS, AnswerGrader, AnswerToGrade, Contains
from semgrad_guard.grading.abstention import abstains
from semgrad_guard.grading.by_name import Judge, is_final, load_graders
from semgrad_guard.grading.grader import settled

ABSTENTIONS = """I don't know.
I do not know which airline flies to Narnia.
I don’t know the answer to that question.
I'm not sure.
I am not certain which airline that is.
I have no idea.
No idea.
I cannot answer this question.
I can't say.
I'm unable to answer that based on the given information.
I'm sorry, but I don't have that information.
Sorry, I could not find any information about that.
I'm afraid I don't have enough context to answer.
I couldn't find it.
The documents do not say which airline flies to Narnia.
The provided documents do not contain the answer.
The passage doesn't mention the airline.
The text does not specify. It only describes the airport.
None of the passages mention an airline.
The context provides no information about airlines.
There is no information about this in the context.
There is not enough information to answer the question.
There's no mention of an airline in the text.
Not enough information.
No relevant information was found.
Insufficient context.
The airline is not mentioned in the passage.
This is not stated in the documents.
It is not possible to determine the airline from the given text.
The answer cannot be determined from the context.
The airline that flies to Narnia is unknown.
Unknown
Unanswerable.
Not mentioned
N/A
Based on the provided context, I cannot determine which airline flies to Narnia.
Unfortunately, the given documents do not provide this information. Please consult the airline's website.
As an AI language model, I do not have access to that information.
According to the passage, the airline is not specified.
I would rather not say.
This question is beyond the scope of the documents.
While the passage mentions flights, it does not say which airline flies to Narnia.
**Answer:** I don't know.
dont know
I am sorry, I cannot help with that. If you give me more details, I can try again.
It is unclear from the text which airline flies there.
The passage is silent on this.
I do not have that information, as the documents only cover domestic flights.
From the passage it is not clear.
I didn't find an answer in the documents.""".splitlines()

CLAIMS = """Narnia Airways.
I don't know, but it might be Narnia Airways.
I don't know the exact year, it was around 1950.
I'm not sure. It is probably Narnia Airways.
The documents do not say; Narnia Airways flies to Cair Paravel.
No.
No, the text does not say so.
There is no airline that flies to Narnia.
Breakfast is not included.
We do not offer refunds.
We have no branch in Paris.
Lions cannot be found in Europe.
He was unable to swim.
She did not know how to swim.
It is outside the city.
Narnia is not part of the union.
The water is not clear.
He is not known for his poems.
The shop is closed on Sunday, and nobody knows why.
Nothing.
None
The unknown soldier
The answer is 42.
I know that it is Paris.
The document was signed in 1931.
Information technology
Paris is not the capital; Lyon is.""".splitlines()


@pytest.mark.parametrize("text", ABSTENTIONS)
def test_abstentions(text: str) -> None:
    assert abstains(text)
    assert {settled(text, references) for references in ((), ("Narnia Airways",), ("I don't know",))} == {"abstained"}


@pytest.mark.parametrize("text", CLAIMS)
def test_claims_are_no_abstentions(text: str) -> None:
    assert not abstains(text)
    assert settled(text, ()) is False
    assert settled(text, ("Narnia Airways",)) is None


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
    (tmp_path / "fr.txt").write_text("Je ne sais pas\n\nDésolé\nLe contexte ne dit\n", encoding="utf-8")
    (grader,) = load_graders([f"contains+refusals={tmp_path / 'fr.txt'}"])
    refusals = ("Désolé, je ne sais pas quelle compagnie.", "Le contexte ne dit rien.", "I don't know.")
    claims = ("Je ne sais pas, peut-être Lyon.", "Paris.")
    items = [AnswerToGrade("Où ?", text, ("Paris",)) for text in (*refusals, *claims)]
    assert grader.grade(items) == [*["abstained"] * 3, False, True]
    assert is_final(grader.name)
    assert grader.name.startswith("contains@3+refusals(")
    with pytest.raises(InputError, match="there is no grader"):
        load_graders([f"nothing+refusals={tmp_path / 'fr.txt'}"])

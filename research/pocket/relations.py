"""The wordings of each relation: six wordings for training, two held out for measuring, one full sentence to answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Relation:
    """`{e}` is the entity, `{a}` the answer; `several`: more than one answer is right."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]
    sentence: str
    several: bool = False


def _one(training: str, held_out: str, sentence: str, several: bool = False) -> Relation:
    return Relation(tuple(training.split(" | ")), tuple(held_out.split(" | ")), sentence, several)


RELATIONS: dict[str, Relation] = {
    "capital": _one(
        "What is the capital of {e}? | Which city is the capital of {e}? | Name the capital of {e}."
        " | Tell me the capital city of {e}. | What is {e}'s capital city? | {e}'s capital is which city?",
        "Do you know the capital of {e}? | Which city is {e}'s capital?",
        "The capital of {e} is {a}.",
    ),
    "continent": _one(
        "On which continent is {e}? | Which continent is {e} on? | What continent does {e} belong to?"
        " | {e} is located on which continent? | Name the continent of {e}."
        " | Where in the world is {e}, on which continent?",
        "Tell me the continent of {e}. | What continent is {e} on?",
        "{e} is in {a}.",
    ),
    "currency": _one(
        "What is the currency of {e}? | Which currency is used in {e}? | What money do people use in {e}?"
        " | Name the currency of {e}. | In {e}, what currency do people pay with? | What is {e}'s currency?",
        "Tell me the currency of {e}. | Which currency do people use in {e}?",
        "The currency of {e} is the {a}.",
    ),
    "language": _one(
        "What language is spoken in {e}? | Which language do people speak in {e}? | What is the main language of {e}?"
        " | Name the language of {e}. | In {e}, which language is spoken? | What is {e}'s main language?",
        "Tell me the main language of {e}. | What language do people speak in {e}?",
        "People in {e} speak {a}.",
    ),
    "symbol": _one(
        "What is the chemical symbol of {e}? | What is the symbol for {e}? | Which symbol stands for {e}?"
        " | Name the chemical symbol of {e}. | How is {e} written in chemistry? | {e} has which chemical symbol?",
        "Tell me the chemical symbol of {e}. | Which chemical symbol stands for {e}?",
        "The symbol of {e} is {a}.",
    ),
    "number": _one(
        "What is the atomic number of {e}? | Which atomic number does {e} have?"
        " | What number is {e} in the periodic table?"
        " | Name the atomic number of {e}. | How many protons does {e} have? | {e} has which atomic number?",
        "Tell me the atomic number of {e}. | What atomic number does {e} have?",
        "The atomic number of {e} is {a}.",
    ),
    "state_capital": _one(
        "What is the capital of the state of {e}? | Which city is the state capital of {e}?"
        " | Name the state capital of {e}. | Tell me the capital city of the state of {e}."
        " | What is {e}'s state capital? | The state of {e} has which capital?",
        "Do you know the state capital of {e}? | Which city is the capital of the state of {e}?",
        "The capital of the state of {e} is {a}.",
    ),
    "profession": _one(
        "What was the profession of {e}? | What was {e} known as? | {e} had which profession?"
        " | What did {e} do for a living? | Name the profession of {e}. | As what did {e} become famous?",
        "Tell me the profession of {e}. | Which profession did {e} have?",
        "{e} was a {a}.",
    ),
    "nationality": _one(
        "What was the nationality of {e}? | Which nationality did {e} have? | {e} was of which nationality?"
        " | Name the nationality of {e}. | What nationality was {e}? | What was {e}'s nationality?",
        "Tell me the nationality of {e}. | Of which nationality was {e}?",
        "{e} was {a}.",
    ),
    "class": _one(
        "What kind of animal is a {e}? | What type of animal is the {e}? | To which class does the {e} belong?"
        " | A {e} is what kind of animal? | Which animal class is the {e} in? | Name the animal class of the {e}.",
        "Tell me what kind of animal a {e} is. | Which type of animal is a {e}?",
        "A {e} is a kind of {a}.",
    ),
    "city": _one(
        "Name a city in {e}. | Give me a city in {e}. | What is a city in {e}? | Which city could I visit in {e}?"
        " | Tell me one city of {e}. | Mention any city in {e}.",
        "Name one city in {e}. | Can you tell me a city in {e}?",
        "One city in {e} is {a}.",
        several=True,
    ),
    "person": _one(
        "Name a famous {e}. | Who was a famous {e}? | Give me the name of a {e}. | Tell me one famous {e}."
        " | Mention any famous {e}. | Which famous {e} can you name?",
        "Name one famous {e}. | Can you tell me a famous {e}?",
        "One famous {e} is {a}.",
        several=True,
    ),
    "example": _one(
        "Name a {e}. | Give me an example of a {e}. | What is an example of a {e}? | Tell me a {e}."
        " | Mention any {e}. | Which {e} can you name?",
        "Name one {e}. | Can you give me an example of a {e}?",
        "One {e} is {a}.",
        several=True,
    ),
    "country_in": _one(
        "Name a country in {e}. | Which country is in {e}? | Give me a country of {e}. | Tell me one country in {e}."
        " | Mention any country in {e}. | What is a country in {e}?",
        "Name one country in {e}. | Can you tell me a country in {e}?",
        "One country in {e} is {a}.",
        several=True,
    ),
    "speaks": _one(
        "Name a country where people speak {e}. | Which country speaks {e}? | Give me a country where {e} is spoken."
        " | Tell me one country with {e} as a language. | In which country do people speak {e}?"
        " | Mention any country that speaks {e}.",
        "Name one country where people speak {e}. | Can you tell me a country that speaks {e}?",
        "One country that speaks {e} is {a}.",
        several=True,
    ),
    "pays": _one(
        "Name a country that uses the {e}. | Which country uses the {e}? | Give me a country that pays with the {e}."
        " | Tell me one country with the {e} as currency. | In which country do people pay with the {e}?"
        " | Mention any country that uses the {e}.",
        "Name one country that uses the {e}. | Can you tell me a country that uses the {e}?",
        "One country that uses the {e} is {a}.",
        several=True,
    ),
}

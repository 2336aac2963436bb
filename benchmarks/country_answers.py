"""Four sentences about countries, recalled or read from a passage: written by a model, scored and graded by sentence.

    nice python benchmarks/country_answers.py --model smollm2 --kind recalled --output FOLDER
    python benchmarks/country_answers.py --model pocket --kind short --output FOLDER

A record of JSON Lines keeps the answers as they come, on the token ids that were written; a run that was interrupted
is continued. The facts are those of `research/pocket/data/facts.csv`: the first `COUNTRIES` countries of which it knows
capital, continent, official language and currency, and whose capital does not hold their name. A passage tells three of
the four facts, between two of another country.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.estimators import (
    GreatestEntropy,
    GreedyNLL,
    HybridGrad,
    MaxProbability,
    MeanEntropy,
    ParaGrad,
    SemGrad,
)
from semgrad_guard.records import Message

FACTS = Path(__file__).parent.parent / "research" / "pocket" / "data" / "facts.csv"
COUNTRIES = 119
TOPICS = ("capital", "continent", "language", "currency")
SENTENCES = {
    "capital": "The capital of {country} is {value}.",
    "continent": "{country} lies in {value}.",
    "language": "The official language of {country} is {value}.",
    "currency": "The currency of {country} is the {value}.",
}
QUESTION = (
    "What are the capital, the continent, the official language and the currency of {country}? "
    "Write one sentence for each."
)
SHOWN = ("France", "Japan")
"""The countries of the examples; no question is about them."""
OPTIONS = GenerationOptions(max_tokens=64)
BATCH = 8
ESTIMATORS = (
    MaxProbability(), MeanEntropy(), GreatestEntropy(), GreedyNLL(), HybridGrad(), SemGrad(), ParaGrad()
)  # fmt: skip

Facts = Mapping[str, tuple[str, ...]]


def table() -> dict[str, Facts]:
    """The right values of each topic, by country."""
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    with FACTS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["relation"] in TOPICS:
                found.setdefault(row["entity"], {})[row["relation"]] = tuple(row["answers"].split("|"))
    return {
        country: facts
        for country, facts in found.items()
        if len(facts) == len(TOPICS) and not any(country in value for value in facts["capital"])
    }


def countries(known: Mapping[str, Facts]) -> list[str]:
    """The countries that questions are about."""
    return [country for country in known if country not in SHOWN][:COUNTRIES]


def sentences_about(country: str, facts: Facts, topics: tuple[str, ...] = TOPICS) -> list[str]:
    """True sentences about a country."""
    return [SENTENCES[topic].format(country=country, value=facts[topic][0]) for topic in topics]


def draw(*parts: object) -> int:
    """A number that depends on nothing but these parts."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:8])


def facts_in_passage(country: str) -> tuple[str, ...]:
    """The topics that the passage about a country tells: all but one."""
    missing = TOPICS[draw("missing", country) % len(TOPICS)]
    return tuple(topic for topic in TOPICS if topic != missing)


def other_of(country: str, known: Mapping[str, Facts]) -> str:
    """The other country in the passage about a country."""
    others = [other for other in countries(known) if other != country]
    return others[draw("other", country) % len(others)]


def passage(country: str, known: Mapping[str, Facts]) -> str:
    """Three facts about the country and two about another one, in an order that a hash decides."""
    other = other_of(country, known)
    pieces = sentences_about(country, known[country], facts_in_passage(country))
    pieces += sentences_about(other, known[other], facts_in_passage(other)[:2])
    return " ".join(sorted(pieces, key=lambda piece: draw("order", country, piece)))


def conversation(country: str, kind: str, known: Mapping[str, Facts]) -> list[Message]:
    """The question about a country, behind two answered ones."""

    def question(about: str) -> str:
        question = QUESTION.format(country=about)
        return f"Context: {passage(about, known)}\n\nQuestion: {question}" if kind == "read" else question

    def answer(about: str) -> str:
        given = facts_in_passage(about) if kind == "read" else TOPICS
        words = {"continent": "continent", "language": "official language"}
        return " ".join(
            sentences_about(about, known[about], (topic,))[0]
            if topic in given
            else f"The context does not tell the {words.get(topic, topic)} of {about}."
            for topic in TOPICS
        )

    turns: list[Message] = []
    for about in SHOWN:
        turns += [{"role": "user", "content": question(about)}, {"role": "assistant", "content": answer(about)}]
    return [*turns, {"role": "user", "content": question(country)}]


ALSO: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("capital", "Kazakhstan"): ("Astana",),
    ("capital", "Myanmar"): ("Naypyidaw",),
    ("capital", "Sri Lanka"): ("Sri Jayawardenepura Kotte", "Kotte"),
    ("capital", "Ukraine"): ("Kiev",),
    ("continent", "Armenia"): ("Europe",),
    ("continent", "Azerbaijan"): ("Europe",),
    ("continent", "Cyprus"): ("Asia",),
    ("continent", "Georgia"): ("Europe",),
    ("continent", "Kazakhstan"): ("Europe",),
    ("continent", "Russia"): ("Asia",),
    ("continent", "Turkey"): ("Europe",),
    ("currency", "China"): ("renminbi",),
    ("currency", "Denmark"): ("kroner",),
    ("currency", "Norway"): ("kroner",),
    ("language", "Bangladesh"): ("Bengali",),
    ("language", "Belarus"): ("Russian",),
    ("language", "Cameroon"): ("French",),
    ("language", "China"): ("Mandarin",),
    ("language", "Eritrea"): ("Arabic", "Tigrinya"),
    ("language", "Fiji"): ("Fijian",),
    ("language", "Iran"): ("Farsi",),
    ("language", "Ireland"): ("Irish",),
    ("language", "Kenya"): ("Swahili",),
    ("language", "Madagascar"): ("Malagasy",),
    ("language", "Malawi"): ("English", "Chichewa"),
    ("language", "Malaysia"): ("Malaysian",),
    ("language", "Philippines"): ("Filipino", "English"),
    ("language", "Sri Lanka"): ("Sinhalese", "Tamil"),
}
"""Further right values, from common knowledge, for the table has one of each. They were set down after the answers had
been read, and before any score was compared with a grade."""
_KEYWORDS = {"capital": "capital", "language": "language", "currency": "currency", "continent": "lies in"}


def is_right(sentence: str, country: str, kind: str, known: Mapping[str, Facts]) -> bool:
    """Whether a sentence states a right value of its topic, and one that the passage tells, where there is one.

    A sentence without a topic is wrong, and so is one about a country without facts. That the context does not tell
    something is right where it does not.
    """
    topic = next((topic for topic, word in _KEYWORDS.items() if word in sentence), None)
    about = next((name for name in known if re.search(rf"\b{name}\b", sentence.partition(" is ")[0])), None)
    about = about or next((name for name in known if name in sentence), None)
    if topic is None or about is None or (kind != "read" and about != country):
        return False
    given = TOPICS
    if kind == "read":
        given = (
            facts_in_passage(country)
            if about == country
            else facts_in_passage(about)[:2]
            if about == other_of(country, known)
            else ()
        )
    if "does not" in sentence:
        return topic not in given
    values = (*known[about][topic], *ALSO.get((topic, about), ()))
    plain = _plain(sentence)
    return topic in given and any(re.search(rf"\b{re.escape(_plain(value))}\b", plain) for value in values)


def _plain(text: str) -> str:
    """Small letters without accents."""
    return "".join(
        letter for letter in unicodedata.normalize("NFKD", text.lower()) if not unicodedata.combining(letter)
    )


def write(model: LanguageModel, kind: str, record: Path) -> list[dict[str, Any]]:
    """The answers about all countries; those that the record holds are not written again."""
    known = table()
    kept = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()] if record.exists() else []
    done = {row["country"] for row in kept}
    missing = [country for country in countries(known) if country not in done]
    for batch in (missing[start : start + BATCH] for start in range(0, len(missing), BATCH)):
        answers = model.generate_batch([conversation(country, kind, known) for country in batch], OPTIONS)
        with record.open("a", encoding="utf-8") as file:
            for country, answer in zip(batch, answers, strict=True):
                kept.append({"country": country, "text": answer.text, "ids": list(answer.response_ids)})
                file.write(json.dumps(kept[-1], ensure_ascii=False) + "\n")
        print(f"{kind}: {len(kept)} of {len(countries(known))}", flush=True)
    return kept


def score(model: LanguageModel, kind: str, written: list[dict[str, Any]], record: Path) -> None:
    """The scores of every sentence, all of one replay; those that the record holds are not computed again.

    An answer whose text has other token ids than were written is left out, for the scores would be of another answer.
    """
    known = table()
    done = {json.loads(line)["country"] for line in record.read_text().splitlines()} if record.exists() else set()
    for number, answer in enumerate(written, start=1):
        if answer["country"] in done:
            continue
        row: dict[str, Any] = {"country": answer["country"], "text": answer["text"], "sentences": []}
        if model.tokenizer(answer["text"], add_special_tokens=False)["input_ids"] == answer["ids"]:
            question = conversation(answer["country"], kind, known)
            row["sentences"] = [
                {"start": part.start, "end": part.end, **{one.name: one.value(part.scores) for one in ESTIMATORS}}
                | {"tokens": len(part.scores.log_probs)}
                for part in model.score(question, answer["text"], by="sentence")
                if part.scores is not None
            ]
        with record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        print(f"{kind}: scored {number} of {len(written)}", flush=True)


def short(model: LanguageModel, record: Path) -> None:
    """A question for each fact, for a model that answers in a word: its four answers are the sentences of one."""
    known, lines = table(), list[str]()
    forms = (
        "What is the capital of {}?",
        "On which continent is {}?",
        "What language is spoken in {}?",
        "What is the currency of {}?",
    )
    for country in countries(known):
        questions = [form.format(country) for form in forms]
        answers = model.generate_batch(questions, OPTIONS, objective=HybridGrad().objective)
        text, sentences = "", list[dict[str, Any]]()
        for topic, answer in zip(TOPICS, answers, strict=True):
            begin = len(text)
            text += SENTENCES[topic].format(country=country, value=answer.text) + " "
            scores = {one.name: one(answer.evidence).uncertainty for one in ESTIMATORS}
            sentences.append({"start": begin, "end": len(text), **scores, "tokens": len(answer.response_ids)})
        lines.append(json.dumps({"country": country, "text": text, "sentences": sentences}, ensure_ascii=False))
    record.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kind", choices=("recalled", "read", "short"), required=True)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = LanguageModel.from_pretrained(given.model, dtype=torch.float32)
    given.output.mkdir(parents=True, exist_ok=True)
    if given.kind == "short":
        short(model, given.output / "short.scores.jsonl")
        return
    written = write(model, given.kind, given.output / f"{given.kind}.jsonl")
    score(model, given.kind, written, given.output / f"{given.kind}.scores.jsonl")


if __name__ == "__main__":
    main()

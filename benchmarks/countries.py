"""The promises about sentences on four facts of 119 countries: what they deliver, and of what quality.

    python benchmarks/countries.py docs/results/smollm2/sentences [--page docs/results/sentences.md]
    python benchmarks/countries.py FOLDER --questions            # countries.jsonl and prompt.txt, for `calibrate`
    python benchmarks/countries.py FOLDER --grade sheet.csv      # fills in the column `correct`

The first folder holds answers with the scores of their sentences, compressed (`benchmarks/country_answers.py` of commit
6973ce86 wrote them). In each of 100 seeded splits two thirds of the countries choose a threshold, and the others are
judged by it. A correction takes length and place out of the scores: the residual of log score on log tokens and place,
fitted without labels on the first part.

The facts are those of `research/pocket/data/facts.csv`: the first `COUNTRIES` countries of which it knows capital,
continent, official language and currency, and whose capital does not hold their name. A passage tells three of the
four facts, between two of another country. With the commands, this program takes the place of the people who grade.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from measuring import about
from numpy.typing import NDArray

from semgrad_guard.calibration import AnswerSentences, calibrate_sentences
from semgrad_guard.calibration.sentence_gates import compared_scores
from semgrad_guard.metrics import auroc
from semgrad_guard.settings import OnDoubt

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
Facts = Mapping[str, tuple[str, ...]]


def known_facts() -> dict[str, Facts]:
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


ALPHA, DELTA, SPLITS = 0.2, 0.1, 100
FORMS: tuple[OnDoubt, ...] = ("drop", "stop")
KINDS = {
    "recalled": "Recalled: SmolLM2 in four bits",
    "read": "Read from a passage: SmolLM2 in four bits",
    "short": "Four questions, four words: the embedded model",
}
NAMES = ("max_probability", "mean_entropy", "greatest_entropy", "gnll", "hybridgrad", "semgrad", "paragrad")


@dataclass(frozen=True)
class Answers:
    """Answers with their sentences: columns of scores by estimator, lengths in tokens, and grades."""

    kind: str
    rows: Sequence[dict[str, Any]]
    correct: Sequence[Sequence[bool]]

    @classmethod
    def read(cls, path: Path, kind: str) -> Answers:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        rows, known = [json.loads(line) for line in text.decode().splitlines()], known_facts()
        return cls(
            kind,
            rows,
            [
                [is_right(row["text"][s["start"] : s["end"]], row["country"], kind, known) for s in row["sentences"]]
                for row in rows
            ],
        )

    def column(self, name: str, correction: NDArray[np.float64] | None = None) -> list[list[float]]:
        """The scores of an estimator; corrected, their logarithms without what length and place explain."""
        found = [[s[name] for s in row["sentences"]] for row in self.rows]
        if correction is None:
            return found
        return [
            [float(np.log(max(score, 1e-12)) - part @ correction) for score, part in zip(scores, parts, strict=True)]
            for scores, parts in zip(found, self._parts(), strict=True)
        ]

    def correction(self, name: str, at: Sequence[int]) -> NDArray[np.float64]:
        """The weights of one, log tokens and place by least squares on some of the answers; no label is used."""
        parts = self._parts()
        matrix = np.concatenate([np.reshape(parts[i], (-1, 3)) for i in at])
        scores = np.concatenate([self.column(name)[i] for i in at])
        return np.linalg.lstsq(matrix, np.log(np.maximum(scores, 1e-12)), rcond=None)[0]

    def _parts(self) -> list[list[NDArray[np.float64]]]:
        return [
            [np.array([1.0, np.log(s["tokens"] or 1), place]) for place, s in enumerate(row["sentences"])]
            for row in self.rows
        ]

    def of(self, column: Sequence[Sequence[float]], at: Sequence[int]) -> list[AnswerSentences]:
        """Answers for a calibration; no sentence leans on another one here."""
        return [
            AnswerSentences(
                self.rows[i]["country"], self.rows[i]["text"], column[i], self.correct[i], [None] * len(column[i])
            )
            for i in at
        ]


def aurocs(answers: Answers, name: str) -> tuple[float, float, float]:
    """AUROC by sentence, with its 95 % interval over resampled answers."""
    column, rng = answers.column(name), np.random.default_rng(1)

    def of(at: Sequence[int]) -> float:
        return auroc([s for i in at for s in column[i]], [r for i in at for r in answers.correct[i]]) or 0.0

    n = len(column)
    drawn = [of(rng.integers(n, size=n).tolist()) for _ in range(500)]
    return of(range(n)), *(float(x) for x in np.quantile(drawn, [0.025, 0.975]))


def split(answers: Answers, name: str, on_doubt: OnDoubt, seed: int, promise: Any, *, corrected: bool) -> list[float]:
    """Of one split: the share of the right sentences that is delivered, the error of delivered sentences pooled and by
    answer, the share of answers with a wrong one among those that deliver, and whether a threshold was found."""
    order = np.random.default_rng(seed).permutation(len(answers.rows)).tolist()
    known, later = order[: 2 * len(order) // 3], order[2 * len(order) // 3 :]
    column = answers.column(name, answers.correction(name, known) if corrected else None)
    found = calibrate_sentences(
        answers.of(column, known), on_doubt=on_doubt, promise=promise, alpha=ALPHA, delta=DELTA
    ).threshold
    right = delivered = errors = bad = answering = 0
    shares: list[float] = []
    for i in later:
        compared = compared_scores(column[i], [None] * len(column[i]), on_doubt=on_doubt)
        kept = [
            grade
            for score, grade in zip(compared, answers.correct[i], strict=True)
            if found is not None and score is not None and score <= found
        ]
        right += sum(kept)
        delivered += len(kept)
        errors += len(kept) - sum(kept)
        answering += bool(kept)
        bad += bool(kept) and not all(kept)
        shares += [1 - sum(kept) / len(kept)] if kept else []
    possible = sum(sum(answers.correct[i]) for i in later)
    return [
        right / max(possible, 1),
        errors / delivered if delivered else np.nan,
        float(np.mean(shares)) if shares else np.nan,
        bad / answering if answering else np.nan,
        float(found is not None),
    ]


def tables(answers: Answers) -> Iterator[str]:
    everything = [grade for grades in answers.correct for grade in grades]
    error = 1 - sum(everything) / len(everything)
    yield f"{len(answers.rows)} answers, {len(everything)} sentences with scores, {error:.1%} of them wrong."
    yield ""
    yield "| score | AUROC by sentence | `drop`: right ones delivered | their error | by answer | found | `stop` |"
    yield "| --- " * 7 + "|"
    for name in NAMES:
        value, low, high = aurocs(answers, name)
        drop, stop = (
            np.array([split(answers, name, form, seed, "sentence", corrected=False) for seed in range(SPLITS)])
            for form in FORMS
        )
        yield (
            f"| {name} | {value:.3f} ({low:.3f}-{high:.3f}) | {np.median(drop[:, 0]):.0%} | "
            f"{np.nanmean(drop[:, 1]):.1%} | {np.nanmean(drop[:, 2]):.1%} | {drop[:, 4].mean():.0%} | "
            f"{np.median(stop[:, 0]):.0%}, error {np.nanmean(stop[:, 1]):.1%} |"
        )


def corrections(answers: Answers) -> Iterator[str]:
    yield "| score | AUROC | corrected | `drop`: right ones delivered | corrected |"
    yield "| --- " * 5 + "|"
    everyone = range(len(answers.rows))
    for name in ("max_probability", "gnll", "hybridgrad", "paragrad"):
        plain = [aurocs(answers, name)[0]]
        column = answers.column(name, answers.correction(name, everyone))
        flat = [s for scores in column for s in scores]
        plain.append(auroc(flat, [r for grades in answers.correct for r in grades]) or 0.0)
        shares = [
            np.median([split(answers, name, "drop", seed, "sentence", corrected=c)[0] for seed in range(SPLITS)])
            for c in (False, True)
        ]
        yield f"| {name} | {plain[0]:.3f} | {plain[1]:.3f} | {shares[0]:.0%} | {shares[1]:.0%} |"


def write_questions(folder: Path) -> None:
    """The questions with true sentences as references, and the prompt, which shows two examples before each."""
    known = known_facts()
    question_about = {one: QUESTION.format(country=one) for one in (*countries(known), *SHOWN)}
    true = {one: " ".join(sentences_about(one, known[one])) for one in question_about}
    rows = ({"question": question_about[one], "answers": [true[one]]} for one in countries(known))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "countries.jsonl").write_text(text, encoding="utf-8")
    shown = "".join(f"{question_about[one]}\n{true[one]}\n\n" for one in SHOWN)
    (folder / "prompt.txt").write_text(f"{shown}{{question}}", encoding="utf-8")


def grade(sheet: Path) -> int:
    """Grade every sentence of the sheet by the table; returns how many."""
    known = known_facts()
    country = {QUESTION.format(country=one): one for one in countries(known)}
    with sheet.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["correct"] = "yes" if is_right(row["answer"], country[row["question"]], "recalled", known) else "no"
    with sheet.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return len(rows)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("--page", type=Path)
    options.add_argument("--questions", action="store_true")
    options.add_argument("--grade", type=Path)
    given = options.parse_args()
    if given.questions:
        write_questions(given.folder)
    elif given.grade is not None:
        print(f"{grade(given.folder / given.grade)} sentences are graded.")
    else:
        promise(given.folder, given.page)


def promise(folder: Path, page: Path | None) -> None:
    """Print the tables, and write them into the page."""
    lines = [
        "# Sentences of a real model: four facts about 119 countries",
        "",
        f"`python benchmarks/countries.py {folder}`, {datetime.now(UTC):%Y-%m-%d}, {about()['cpu']}.",
        "",
        "SmolLM2-135M-Instruct in four bits wrote four sentences about each country behind two examples, greedily, "
        "once from memory and once from a passage that tells three of the four facts. A table grades the "
        "sentences. The promise is that about one sentence, alpha = 0.2 and delta = 0.1. In each of 100 seeded splits "
        "two thirds of the countries choose a threshold and the others are judged by it. The share of right "
        "sentences that are delivered is the median of the splits; `their error` is the mean share of wrong ones among "
        "the delivered sentences, pooled and by answer, and `found` how often there is a threshold. Intervals "
        "are 95 %, over resampled answers. Answers whose text has other token ids than were written have no scores, "
        "and are never delivered.",
        "",
    ]
    for kind, title in KINDS.items():
        answers = Answers.read(next(folder.glob(f"{kind}.scores.jsonl*")), kind)
        lines += [f"## {title}", "", *tables(answers), ""]
        if kind == "recalled":
            lines += ["With length and place taken out of the scores:", "", *corrections(answers), ""]
    print("\n".join(lines))
    if page is not None:
        _, mark, by_hand = page.read_text(encoding="utf-8").partition("## The same with the commands")
        page.write_text("\n".join(lines) + "\n" + mark + by_hand, encoding="utf-8")


if __name__ == "__main__":
    main()

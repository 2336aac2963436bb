"""The questions behind `docs/results/smollm2.md`, as data files for `semgrad-guard evaluate`.

    python -m research.smollm2.questions [--sciq SOURCE] [--truthfulqa SOURCE] [--output output/smollm2] [--limit N]

`facts.jsonl` (closed-book), `reading.jsonl` (a passage before every question: hand-written ones, written frames, and
frames whose passage does not hold the answer), `natural.jsonl` (the hand-written ones alone) and `told.jsonl` (facts,
each in its passage between two others of its relation), both for LangChain's prompt, which is in `langchain.txt`,
and, from copies that the reader brings, `sciq.jsonl` and `truthfulqa.jsonl`: the same
draw every time. A SOURCE is any `--data` of `evaluate`: `hub:allenai/sciq@validation`, for example, or a file of it in
JSON Lines, JSON or Parquet. A checksum shows whether its questions are the page's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from research.pocket import questions_for_evaluate
from research.pocket.frames import bank, plain
from research.pocket.world import Fact, question, sentence, world
from semgrad_guard.named import reading_prompt
from semgrad_guard.questions.data import read_questions

Row = dict[str, Any]
DATA = Path(__file__).parents[1] / "pocket" / "data"
NATURAL = ("natural_first", "natural_second", "natural_third")
WANTED = {"with": 1000, "without": 1000, "sciq": 500, "truthfulqa": 400}
ASKED = {
    "sciq": "4bceac44f1021f1eb41e03a7991df2f45dde7acaed0e9437f737f1b09944396f",
    "truthfulqa": "d57fbf9b33cfd8f71a4c950d5b4c112b282ca1ac5ebd629543c90c3a06c7aad5",
}
"""SHA-256 of all questions of the sets that are brought, as `checksum` takes it."""
SEED = 7


def closed_book(random: Random) -> list[Row]:
    """All checked facts, by relation."""
    rows = [{**row, "kind": row["id"].split("/")[1]} for row in questions_for_evaluate.facts(every=True)]
    random.shuffle(rows)
    return rows


def reading(random: Random) -> list[Row]:
    """Hand-written passages, frames filled with the values they ask for, and frames under another frame's passage."""
    frames = [*bank()[0], *bank()[1]]
    random.shuffle(frames)
    filled = [plain(frame, random) for frame in frames]
    half = len(filled) // 2
    return [*natural(), *_with(filled[:half])[: WANTED["with"]], *_without(filled[half:])[: WANTED["without"]]]


def natural() -> Iterator[Row]:
    """The hand-written passages."""
    for name in NATURAL:
        for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            yield {
                "id": row["id"],
                "kind": "natural",
                "question": row["question"],
                "context": row["passage"],
                "answers": row["answers"],
            }


def _with(filled: Sequence[Any]) -> list[Row]:
    return [_row("with", number, reading, reading.passage) for number, reading in enumerate(filled)]


def _without(filled: Sequence[Any]) -> list[Row]:
    rows: list[Row] = []
    for number, reading in enumerate(filled):
        passage = filled[(number + 37) % len(filled)].passage
        if reading.questions[0][1].lower() not in passage.lower():
            rows.append(_row("without", number, reading, passage))
    return rows


def _row(kind: str, number: int, filled: Any, passage: str) -> Row:
    question, answer = filled.questions[0]
    return {"id": f"{kind}/{number}", "kind": kind, "question": question, "context": passage, "answers": [answer]}


def told_facts(random: Random) -> list[Row]:
    """Facts of one answer, each once in its passage, among two others of its relation.

    The sentences are those of `research.pocket.relations`.
    """
    facts = [fact for fact in world() if not fact.several]
    rows: list[Row] = []
    for number, fact in enumerate(facts):
        others = [other for other in facts if other.relation == fact.relation and other.entity != fact.entity]
        sentences = [sentence(told_fact, told_fact.answers[0]) for told_fact in (fact, *random.sample(others, 2))]
        random.shuffle(sentences)
        rows.append(_told(fact, question(fact, number % 2, held_out=True), " ".join(sentences)))
    return rows


def _told(fact: Fact, question: str, passage: str) -> Row:
    row = {"id": f"told/{fact.relation}/{fact.entity}", "kind": fact.relation, "question": question}
    return row | {"context": passage, "answers": list(fact.answers)}


def brought(source: str, kind: str, random: Random) -> list[Row]:
    """A draw from a set of the reader's; paraphrases stay where there are some."""
    rows = [
        {"question": straight(row.question), "answers": list(row.answers), "paraphrases": list(row.paraphrases)}
        for row in read_questions(source, strict=True).rows
    ]
    same = checksum(row["question"] for row in rows) == ASKED[kind]
    print(f"{source}: {len(rows)} questions, {'those' if same else 'NOT those'} of docs/results/smollm2.md")
    random.shuffle(rows)
    return [{**row, "kind": kind} for row in rows[: WANTED[kind]]]


def checksum(questions: Iterable[str]) -> str:
    """SHA-256 of the questions in their order, in UTF-8, a line feed after each."""
    return sha256("".join(f"{question}\n" for question in questions).encode()).hexdigest()


def straight(text: str) -> str:
    """With straight quotation marks and single spaces: copies of a set differ in these."""
    return " ".join(text.translate(str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")).split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sciq", metavar="SOURCE")
    parser.add_argument("--truthfulqa", metavar="SOURCE")
    parser.add_argument("--output", type=Path, default=Path("output/smollm2"))
    parser.add_argument("--limit", type=int, help="the first so many of each file")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    sets = {"facts": closed_book(Random(SEED)), "reading": reading(Random(SEED)), "natural": list(natural())}
    sets["told"] = told_facts(Random(SEED))
    (options.output / "langchain.txt").write_text(reading_prompt("smollm2") + "\n", encoding="utf-8")
    for kind, source in (("sciq", options.sciq), ("truthfulqa", options.truthfulqa)):
        if source is not None:
            sets[kind] = brought(source, kind, Random(SEED))
    for name, rows in sets.items():
        Random(SEED).shuffle(rows)  # kinds in turn: a run that is cut short has some of each
        kept = rows if options.limit is None else rows[: options.limit]
        path = options.output / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")
        print(f"{path}: {len(kept)} questions")


if __name__ == "__main__":
    main()

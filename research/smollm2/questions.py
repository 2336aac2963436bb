"""The questions behind `docs/results/smollm2.md`, as data files for `semgrad-guard evaluate`.

    python -m research.smollm2.questions [--sciq FILE --truthfulqa FILE] [--output output/smollm2] [--limit N]

`facts.jsonl` (closed-book), `known.jsonl` (the facts of five relations, of which the model is right on about 60 %),
`reading.jsonl` (a passage before every question: hand-written ones, written frames, and
frames whose passage does not hold the answer), `natural.jsonl` (the hand-written ones alone, for LangChain's prompt,
which is in `langchain.txt`) and, from files that the reader brings, `sciq.jsonl` and `truthfulqa.jsonl`: the same draw
every time. A file of the reader's holds a question and its answers a line, as
`{"question": ..., "answers": [...]}`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from research.pocket import questions_for_evaluate
from research.pocket.frames import bank, plain
from semgrad_guard.named import reading_prompt

Row = dict[str, Any]
DATA = Path(__file__).parents[1] / "pocket" / "data"
KNOWN = ("profession", "language", "class", "continent", "symbol")
NATURAL = ("natural_first", "natural_second", "natural_third")
WANTED = {"facts": 1182, "natural": 240, "with": 1000, "without": 1000, "sciq": 500, "truthfulqa": 400}
SEED = 7


def closed_book(random: Random) -> list[Row]:
    """Checked facts, by relation."""
    rows = [{**row, "kind": row["id"].split("/")[1]} for row in questions_for_evaluate.facts()]
    random.shuffle(rows)
    return rows[: WANTED["facts"]]


def reading(random: Random) -> list[Row]:
    """Hand-written passages, frames filled with what they ask for, and frames under another frame's passage."""
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
    return [_row("with", number, each, each.passage) for number, each in enumerate(filled)]


def _without(filled: Sequence[Any]) -> list[Row]:
    rows: list[Row] = []
    for number, each in enumerate(filled):
        passage = filled[(number + 37) % len(filled)].passage
        if each.questions[0][1].lower() not in passage.lower():
            rows.append(_row("without", number, each, passage))
    return rows


def _row(kind: str, number: int, filled: Any, passage: str) -> Row:
    question, answer = filled.questions[0]
    return {"id": f"{kind}/{number}", "kind": kind, "question": question, "context": passage, "answers": [answer]}


def brought(path: Path, kind: str, random: Random) -> list[Row]:
    """A draw from a file of the reader's; `paraphrases` stay where there are some."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    random.shuffle(rows)
    return [{**row, "kind": kind} for row in rows[: WANTED[kind]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sciq", type=Path)
    parser.add_argument("--truthfulqa", type=Path)
    parser.add_argument("--output", type=Path, default=Path("output/smollm2"))
    parser.add_argument("--limit", type=int, help="the first so many of each file")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    facts = closed_book(Random(SEED))
    known = [row for row in facts if row["kind"] in KNOWN]
    sets = {"facts": facts, "known": known, "reading": reading(Random(SEED)), "natural": list(natural())}
    (options.output / "langchain.txt").write_text(reading_prompt("smollm2") + "\n", encoding="utf-8")
    for kind, path in (("sciq", options.sciq), ("truthfulqa", options.truthfulqa)):
        if path is not None:
            sets[kind] = brought(path, kind, Random(SEED))
    for name, rows in sets.items():
        Random(SEED).shuffle(rows)  # kinds in turn: a run that is cut short has some of each
        kept = rows if options.limit is None else rows[: options.limit]
        path = options.output / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")
        print(f"{path}: {len(kept)} questions")


if __name__ == "__main__":
    main()

"""The pocket model's own questions as data files, for `semgrad-guard evaluate` and `probe`.

    python -m research.pocket.questions_for_evaluate [--output output/questions] [--limit N]

`closed-book.jsonl` (known, rare and unknown facts, and facts with several answers; with paraphrases) and
`reading.jsonl` (a passage before every question), none in a wording of the training; the same file every time. The
hand-written natural passages are left out: nothing may be chosen by them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from research.pocket import cases
from research.pocket.frames import bank, plain
from research.pocket.world import KNOWN, RARE, UNKNOWN, Fact, of_split, question

Row = dict[str, Any]
WANTED = {"known": 150, "rare": 100, "unknown": 100, "several": 100, "invented": 150, "frames": 200}
"""Questions of each kind, evenly spread over all there are."""


def facts(*, every: bool = False) -> Iterator[Row]:
    """Facts, each in one held-out wording; the other one and those of the training are its paraphrases.

    Those of several answers are taken where the embedded model learned them; with `every`, the others too.
    """
    for split in (KNOWN, RARE, UNKNOWN):
        for number, fact in enumerate(of_split(split)):
            kind = "several" if fact.several else split
            if every or kind != "several" or split == KNOWN:
                yield _fact(fact, kind, number % 2)


def _fact(fact: Fact, kind: str, wording: int) -> Row:
    others = [question(fact, 1 - wording, held_out=True), *(question(fact, n) for n in range(4))]
    return {
        "id": f"{kind}/{fact.relation}/{fact.entity}",
        "kind": kind,
        "question": question(fact, wording, held_out=True),
        "answers": list(fact.answers),
        "paraphrases": others,
    }


def reading() -> Iterator[Row]:
    """Fresh invented passages, and the held-out frames, a question each."""
    random = Random(cases.SEED)
    fresh = [cases.fresh(random) for _ in range(2 * WANTED["invented"])]
    for kind, readings in (("invented", fresh), ("frames", [plain(frame, random) for frame in bank()[1]])):
        for number, reading_ in enumerate(readings):
            text, answer = reading_.questions[0]
            row = {"id": f"{kind}/{number}", "kind": kind, "question": text, "context": reading_.passage}
            yield row | {"answers": [answer]}


def chosen(rows: Iterable[Row], limit: int | None) -> list[Row]:
    """So many of each kind as are wanted."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], []).append(row)
    found: list[Row] = []
    for kind, own in by_kind.items():
        keep = min(len(own), limit or WANTED[kind])
        found += [own[i * len(own) // keep] for i in range(keep)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/questions"))
    parser.add_argument("--limit", type=int, help="at most so many of each kind")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for name, rows in (("closed-book", facts()), ("reading", reading())):
        lines = [json.dumps(row, ensure_ascii=False) for row in chosen(rows, options.limit)]
        path = options.output / f"{name}.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{path}: {len(lines)} questions")


if __name__ == "__main__":
    main()

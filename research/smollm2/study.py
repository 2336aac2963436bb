"""The figures of `docs/results/smollm2.md`: its draws of public sets, and its tables and picture from the records.

    python -m research.smollm2.study draw sciq hub:allenai/sciq@validation output/smollm2/sciq.jsonl
    python -m research.smollm2.study table docs/results/smollm2/records/facts.csv.gz
    python -m research.smollm2.study picture docs/results/smollm2/records/facts.csv.gz docs/pictures/smollm2.png

Its own questions are in `research/questions/smollm2`. A record has a row for every answer: the question's id and kind,
the answer's length in words, whether it is right, every method's score, and the milliseconds of each. Scores of
learned methods are those of five-fold cross-validation.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from random import Random

from semgrad_guard.metrics import Tally
from semgrad_guard.paper.report import risk_coverage_figure
from semgrad_guard.paper.results import GradedRun
from semgrad_guard.paper.summary import Resampling, bootstrap
from semgrad_guard.questions.data import read_questions

WANTED = {"sciq": 500}
QUESTIONS = {
    "sciq": "4bceac44f1021f1eb41e03a7991df2f45dde7acaed0e9437f737f1b09944396f",
}
"""SHA-256 of all questions of the sets, as `checksum` takes it."""
SEED = 7
PICTURED = ("FusedStates", "Mean entropy", "Max probability", "G-NLL", "HybridGrad")
OTHERS = ("key", "kind", "words", "right")


def draw(kind: str, source: str, output: Path) -> None:
    """The page's draw from a set. `source`: any `--data` of `evaluate`."""
    rows = [
        {"question": straight(row.question), "answers": list(row.answers), "paraphrases": list(row.paraphrases)}
        for row in read_questions(source, strict=True).rows
    ]
    same = checksum(row["question"] for row in rows) == QUESTIONS[kind]
    print(f"{source}: {len(rows)} questions, {'those' if same else 'NOT those'} of docs/results/smollm2.md")
    random = Random(SEED)
    random.shuffle(rows)
    kept = [{**row, "kind": kind} for row in rows[: WANTED[kind]]]
    Random(SEED).shuffle(kept)
    output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")


def checksum(questions: Iterable[str]) -> str:
    """SHA-256 of the questions in their order, in UTF-8, a line feed after each."""
    return sha256("".join(f"{question}\n" for question in questions).encode()).hexdigest()


def straight(text: str) -> str:
    """With straight quotation marks and single spaces: copies of a set differ in these."""
    return " ".join(text.translate(str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")).split())


def read(path: Path) -> GradedRun:
    """A file of records."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name not in OTHERS and not name.startswith("ms: ")]
    scores = {name: [float(row[name]) if row[name] else None for row in rows] for name in names}
    data = path.name.partition(".")[0]
    return GradedRun(data, "SmolLM2-135M-Instruct", data, scores, [row["right"] == "1" for row in rows])


def table(run: GradedRun) -> str:
    """Every method with its AUROC and its 95 % interval, best first, in Markdown."""
    found = {
        name: bootstrap({"auroc": Tally.auroc}, scores, run.correct, Resampling(run.data))["auroc"]
        for name, scores in run.scores.items()
    }
    rows = sorted(((metric.value or 0.0, name, metric) for name, metric in found.items()), key=lambda row: -row[0])
    body = [f"| {name} | {value:.3f} ({metric.low or 0:.3f}-{metric.high or 0:.3f}) |" for value, name, metric in rows]
    return "\n".join([f"{run.n} answers, {run.accuracy:.0%} right", "", "| method | AUROC |", "| --- | --- |", *body])


def picture(run: GradedRun, output: Path) -> None:
    """Error rate against share answered, by HybridGrad and the scores ahead of it."""
    chosen = {name: run.scores[name] for name in PICTURED}
    figure = risk_coverage_figure(GradedRun(run.title, run.model, run.data, chosen, run.correct))
    figure.savefig(output, dpi=160)


def main(arguments: list[str]) -> int:
    match arguments:
        case ["draw", "sciq" as kind, source, output]:
            draw(kind, source, Path(output))
        case ["table", records]:
            print(table(read(Path(records))))
        case ["picture", records, output]:
            picture(read(Path(records)), Path(output))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Data for computing the tables again: a row for every answer, plain numbers, compressed.

    python -m research.smollm2.records FOLDER [FOLDER ...] [--output docs/results/smollm2/records]
    python -m research.smollm2.records --read docs/results/smollm2/records/facts.csv.gz

A FOLDER is an output of `evaluate`. Of its `graded.csv` are kept: the question's id (or key) and kind, the
answer's length in words, whether it is right, every method's score, and the milliseconds of generation and of every
method. Scores of learned methods are those of five-fold cross-validation. `--read` prints each method's AUROC with its
95 % interval.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from semgrad_guard.files import atomic_write
from semgrad_guard.metrics import Tally
from semgrad_guard.paper.intervals import bootstrap

RIGHT = "correct: contains"
ASKED = ("key", "kind", "words", "right")
Row = Mapping[str, str]


def kept(row: Row, methods: Sequence[str]) -> list[str]:
    """The cells that are kept of a row of `graded.csv`."""
    numbers = [*methods, *(f"ms: {method}" for method in methods), "ms: generation"]
    columns = [row["id"] or row["key"], row["kind"], str(len(row["answer"].split())), row[RIGHT]]
    return [*columns, *(f"{float(row[name]):.6g}" if row[name] else "" for name in numbers)]


def packed(folder: Path) -> bytes:
    """The records of an evaluation; the same bytes every time."""
    with (folder / "graded.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    names = list(rows[0])
    methods = names[names.index(RIGHT) + 1 : next(i for i, name in enumerate(names) if name.startswith("ms: "))]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*ASKED, *methods, *(f"ms: {method}" for method in methods), "ms: generation"])
    table.writerows(kept(row, methods) for row in rows)
    return gzip.compress(text.getvalue().encode(), mtime=0)


def read(path: Path) -> list[Row]:
    """The rows of a file of records."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def aurocs(rows: Sequence[Row], data: str) -> list[str]:
    """Every method with its AUROC, as rows of a table in Markdown, best first."""
    names = [name for name in rows[0] if name not in ASKED and not name.startswith("ms: ")]
    right = [row["right"] == "1" for row in rows]
    found = {
        name: bootstrap(
            {"auroc": Tally.auroc}, [float(row[name]) if row[name] else None for row in rows], right, data=data
        )["auroc"]
        for name in names
    }
    known = sorted(((metric.value or 0.0, name, metric) for name, metric in found.items()), key=lambda row: -row[0])
    return [f"| {name} | {value:.3f} ({metric.low or 0:.3f}-{metric.high or 0:.3f}) |" for value, name, metric in known]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", metavar="FOLDER")
    parser.add_argument("--output", type=Path, default=Path("docs/results/smollm2/records"))
    parser.add_argument("--read", type=Path, metavar="FILE")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for folder in options.folders:
        path = atomic_write(options.output / f"{folder.name}.csv.gz", packed(folder))
        print(f"{path}: {path.stat().st_size:,} bytes")
    if options.read is not None:
        rows = read(options.read)
        print(f"{len(rows)} answers, {sum(row['right'] == '1' for row in rows) / len(rows):.0%} right\n")
        print("\n".join(["| method | AUROC |", "| --- | --- |", *aurocs(rows, options.read.name.partition(".")[0])]))


if __name__ == "__main__":
    main()

"""How far a score is the answer's length: rank correlations on finished evaluations, and the length's own AUROC.

    python -m research.smollm2.lengths FOLDER [FOLDER ...]

A FOLDER is the output of `semgrad-guard evaluate`. Length is in words. A score that sums over tokens grows with the
answer, whether it is right or wrong.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from semgrad_guard.metrics import auroc

SCORES = ("HybridGrad", "SemGrad", "ParaGrad", "G-NLL", "Max probability", "Mean entropy")


def row(folder: Path) -> list[str]:
    """The set, the AUROC of the length, and each score's rank correlation with it."""
    with (folder / "graded.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["correct: contains"]]
    lengths = [len(row["answer"].split()) for row in rows]
    own = auroc(lengths, [row["correct: contains"] == "1" for row in rows])
    cells = [folder.name, "" if own is None else f"{own:.2f}"]
    for name in SCORES:
        values = np.array([float(row[name] or "nan") for row in rows])
        found: Any = spearmanr(values, lengths, nan_policy="omit")
        cells.append(f"{found.statistic:.2f}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    titles = ["set", "AUROC of the length", *SCORES]
    print("\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles))))
    for folder in parser.parse_args().folders:
        print(f"| {' | '.join(row(folder))} |")


if __name__ == "__main__":
    main()

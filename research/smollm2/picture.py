"""The picture of the real model: error rate against share answered, by HybridGrad and the scores ahead of it.

    python -m research.smollm2.picture FOLDER [--output docs/pictures/smollm2.png]

FOLDER is the output of `semgrad-guard evaluate` with these methods.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from semgrad_guard.paper.figures import risk_coverage_figure
from semgrad_guard.paper.graded import GradedRun, read_graded

METHODS = ("FusedStates", "Mean entropy", "Max probability", "G-NLL", "HybridGrad")


def of_methods(run: GradedRun) -> GradedRun:
    """The run with the methods of the picture."""
    return replace(run, scores={name: run.scores[name] for name in METHODS})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=Path("docs/pictures/smollm2.png"))
    options = parser.parse_args()
    run = of_methods(read_graded(options.folder / "run.json"))
    risk_coverage_figure(run).savefig(options.output, dpi=160)
    print(f"{options.output}: {run.n} answers, {run.accuracy:.0%} right")


if __name__ == "__main__":
    main()

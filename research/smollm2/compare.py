"""The gain of labels on finished evaluations: learned scores, a choice among scores, a shift, coverage at a promise.

    python -m research.smollm2.compare FOLDER [FOLDER ...] [--draws 20] [--choices 100] [--output compare.jsonl]

A FOLDER is an output of `evaluate` with the methods of `CANDIDATES`. Every number is from a draw of labels
and the answers that were not drawn. Draws are kept in a file, a line each: a stopped run resumes there.
It prints the tables of `docs/results/smollm2.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semgrad_guard.calibration import Binding, calibrate
from semgrad_guard.errors import FitError
from semgrad_guard.estimators import (
    Estimator,
    FusedStates,
)
from semgrad_guard.grading import GRADERS
from semgrad_guard.grading.candidates import CANDIDATES, LABEL_FREE, LearningSet, calibrate_best, calibrate_learned
from semgrad_guard.grading.sheets import grade
from semgrad_guard.metrics import auroc
from semgrad_guard.questions.answered import EvaluatedAnswer
from semgrad_guard.questions.job_record import read_record

LABELS = (100, 400)
SINGLE = tuple(estimator for estimator in CANDIDATES if not isinstance(estimator, FusedStates))
DELTA = 0.1
Row = dict[str, Any]


def read(folder: Path) -> LearningSet:
    """The graded answers of a finished evaluation, without those that have no verdict."""
    answers = read_record(folder / "answers.jsonl", EvaluatedAnswer)[1]
    verdicts = grade(answers, GRADERS["contains"])
    known = [(answer, right) for answer, right in zip(answers, verdicts, strict=True) if isinstance(right, bool)]
    kept = [answer for answer, _ in known]
    return LearningSet(
        [answer.key for answer in kept],
        [right for _, right in known],
        {FusedStates.name: [answer.scores[FusedStates.name].features for answer in kept]},
        {estimator.name: [answer.uncertainty(estimator.name) for answer in kept] for estimator in SINGLE},
    )


def drawn(answers: LearningSet, labels: int, draw: int) -> tuple[LearningSet, LearningSet]:
    """So many answers at random, and the others."""
    order = np.random.default_rng([draw, labels]).permutation(len(answers.questions)).tolist()
    return answers.part(sorted(order[:labels])), answers.part(sorted(order[labels:]))


def apart(some: LearningSet, others: LearningSet) -> bool:
    """Whether no question is in both."""
    return set(some.questions).isdisjoint(others.questions)


def bind(estimator: Estimator) -> Binding:
    """These calibrations are used here and nowhere else."""
    return Binding(model="compared", estimator=estimator.name, settings=estimator.settings())


def ranks(estimator: Estimator, answers: LearningSet) -> float | None:
    """AUROC."""
    return auroc(answers.scores(estimator), answers.correct)


def fitted(known: LearningSet) -> list[Estimator]:
    """FusedStates with weights; nothing where the labels are too few or of one kind."""
    try:
        return [FusedStates().fitted(known.features[FusedStates.name], known.correct)]
    except FitError:
        return []


def best_single(known: LearningSet) -> Estimator:
    """The single score that ranks the labels best."""
    return max(SINGLE, key=lambda estimator: ranks(estimator, known) or 0.0)


def learned(known: LearningSet, others: LearningSet) -> Row:
    """Each score's AUROC on answers without labels, the learned one after the labels; and the best single one."""
    scores = {estimator.name: ranks(estimator, others) for estimator in (*SINGLE, *fitted(known))}
    return {"aurocs": scores, "single": ranks(best_single(known), others)}


def chosen(known: LearningSet, others: LearningSet) -> Row:
    """The choice of `auto` from these labels (it learns from a quarter of them), and the best choice."""
    made = calibrate_best(known, bind=bind, alpha=0.2, delta=DELTA).calibration.choice
    rows = [known.questions.index(question) for question in (() if made is None else made.questions)]
    part = known.part(rows)
    scores = {estimator.name: ranks(estimator, others) for estimator in (*SINGLE, *fitted(part))}
    return {"chosen": "" if made is None else made.estimator, "aurocs": scores}


def covered(known: LearningSet, others: LearningSet) -> Row:
    """How many of the other answers a threshold lets through, at two thirds of the model's own error rate."""
    alpha = 2 / 3 * (1 - sum(known.correct) / len(known.correct))
    states = calibrate_learned(known, FusedStates(), bind=bind, alpha=alpha, delta=DELTA).calibration
    weights = None if states.choice is None else states.choice.weights
    own: Estimator = LABEL_FREE if weights is None else FusedStates(weights=weights)
    found: Row = {"alpha": alpha, "states": _let_through(own, states.threshold, others)}
    for estimator in SINGLE:
        made = calibrate(known.scores(estimator), known.correct, alpha=alpha, delta=DELTA)
        found[estimator.name] = _let_through(estimator, made.threshold, others)
    return found


def _let_through(estimator: Estimator, threshold: float | None, others: LearningSet) -> list[float]:
    """Coverage, and the error rate among the delivered answers."""
    if threshold is None:
        return [0.0, 0.0]
    scores = others.scores(estimator)
    right = [ok for ok, u in zip(others.correct, scores, strict=True) if u is not None and u <= threshold]
    return [len(right) / len(scores), 1 - sum(right) / len(right) if right else 0.0]


@dataclass(frozen=True)
class Job:
    """One draw."""

    part: str
    learned_on: str
    tested_on: str
    labels: int
    draw: int
    work: Callable[[LearningSet, LearningSet], Row]

    @property
    def name(self) -> list[Any]:
        return [self.part, self.learned_on, self.tested_on, self.labels, self.draw]

    def run(self, sets: Mapping[str, LearningSet]) -> Row:
        """The row of the file."""
        return {"job": self.name, **self.work(*self.parts(sets))}

    def parts(self, sets: Mapping[str, LearningSet]) -> tuple[LearningSet, LearningSet]:
        """The training and the test set: no question is in both."""
        known, others = drawn(sets[self.learned_on], self.labels, self.draw)
        return known, others if self.learned_on == self.tested_on else sets[self.tested_on]


def jobs(sets: Mapping[str, LearningSet], *, draws: int, choices: int) -> Iterator[Job]:
    """All draws for which a set is large enough: a hundred answers or more are left to test on.

    A shift is between sets that share no question. Half as many draws show it as show anything else.
    """
    large = {name: len(answers.questions) for name, answers in sets.items()}
    for name, size in large.items():
        for labels in (most for most in LABELS if size - most >= 100):
            yield from (Job("learned", name, name, labels, draw, learned) for draw in range(draws))
            others = [other for other in large if apart(sets[name], sets[other])]
            yield from (Job("shift", name, o, labels, draw, learned) for o in others for draw in range(draws // 2))
    enough = [name for name, size in large.items() if size - LABELS[-1] >= 100]
    for name in enough:
        yield from (Job("coverage", name, name, LABELS[-1], draw, covered) for draw in range(draws))
    for draw in range(choices):
        name = enough[draw % len(enough)]
        yield Job("auto", name, name, LABELS[-1], draw, chosen)


def run(sets: Mapping[str, LearningSet], path: Path, *, draws: int, choices: int) -> list[Row]:
    """Every draw, those of the file taken as they are."""
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    there = {json.dumps(row["job"]) for row in done}
    waiting = [job for job in jobs(sets, draws=draws, choices=choices) if json.dumps(job.name) not in there]
    began = time.monotonic()
    with path.open("a", encoding="utf-8") as file:
        for count, job in enumerate(waiting, 1):
            row = job.run(sets)
            file.write(json.dumps(row) + "\n")
            file.flush()
            done.append(row)
            left = (time.monotonic() - began) / count * (len(waiting) - count)
            print(f"\r  {count} of {len(waiting)}, {left / 60:.0f} min left", end="", flush=True)
    print()
    return done


def report(rows: Sequence[Row]) -> str:
    """The tables, as Markdown."""
    return "\n\n".join([*_learned(rows), _shift(rows), _coverage(rows), _auto(rows)])


def _learned(rows: Sequence[Row]) -> Iterator[str]:
    for labels in LABELS:
        mine = [row for row in rows if row["job"][0] == "learned" and row["job"][3] == labels]
        sets = list(dict.fromkeys(row["job"][1] for row in mine))
        names = sorted({name for row in mine for name in row["aurocs"]}, key=lambda name: -_mean(_of(mine, name)))
        table = [["score", *sets, "mean", "- HybridGrad"]]
        for name in names:
            by_set = [_of([row for row in mine if row["job"][1] == set_name], name) for set_name in sets]
            ahead = [_of([row for row in mine if row["job"][1] == set_name], name, "hybridgrad") for set_name in sets]
            per_draw = [_mean(found) for found in zip(*ahead, strict=False)]
            mean = f"{_mean([_mean(values) for values in by_set]):.3f}"
            table.append([name, *(f"{_mean(values):.3f}" for values in by_set), mean, _interval(per_draw)])
        yield f"AUROC after {labels} labels, on the answers without:\n\n{_table(table)}"


def _shift(rows: Sequence[Row]) -> str:
    table = [["labels", "learned on, tested on", "FusedStates", "best single", "FusedStates - best"]]
    mine = [row for row in rows if row["job"][0] == "shift"]
    for labels, on, to in dict.fromkeys((row["job"][3], row["job"][1], row["job"][2]) for row in mine):
        here = [row for row in mine if row["job"][1:4] == [on, to, labels]]
        behind = [row["aurocs"]["states"] - row["single"] for row in here if "states" in row["aurocs"]]
        states = f"{_mean(_of(here, FusedStates.name)):.3f}"
        single = f"{_mean([row['single'] for row in here]):.3f}"
        table.append([str(labels), f"{on}, {to}", states, single, _interval(behind)])
    return f"Learned on one set, tested on another:\n\n{_table(table)}"


def _coverage(rows: Sequence[Row]) -> str:
    table = [
        ["set", "alpha", "FusedStates", *(estimator.title for estimator in SINGLE), "FusedStates - HybridGrad", "kept"]
    ]
    mine = [row for row in rows if row["job"][0] == "coverage"]
    for name in dict.fromkeys(row["job"][1] for row in mine):
        here = [row for row in mine if row["job"][1] == name]
        ahead = [row["states"][0] - row["hybridgrad"][0] for row in here]
        kept = sum(row["states"][1] <= row["alpha"] for row in here)
        singles = [f"{_mean([row[estimator.name][0] for row in here]):.2f}" for estimator in SINGLE]
        states, alpha = _mean([row["states"][0] for row in here]), _mean([row["alpha"] for row in here])
        table.append([name, f"{alpha:.2f}", f"{states:.2f}", *singles, _interval(ahead, 2), f"{kept} of {len(here)}"])
    return f"Coverage from {LABELS[-1]} labels at two thirds of the model's own error rate:\n\n{_table(table)}"


def _auto(rows: Sequence[Row]) -> str:
    table = [["set", "draws", "within .01 of the best", "mean loss", "chosen", "always FusedStates"]]
    mine = [row for row in rows if row["job"][0] == "auto"]
    for name in (*dict.fromkeys(row["job"][1] for row in mine), None):
        here = [row for row in mine if name in (None, row["job"][1])]
        lost = [_behind(row, row["chosen"]) for row in here]
        picked = [row["chosen"] for row in here]
        shown = ", ".join(f"{name} {picked.count(name)}" for name in dict.fromkeys(sorted(picked)))
        within, always = (
            sum(loss <= 0.01 for loss in some) for some in (lost, [_behind(row, "states") for row in here])
        )
        table.append([name or "all", str(len(here)), str(within), f"{_mean(lost):.3f}", shown, str(always)])
    return f"What `auto` chooses from {LABELS[-1]} labels, against the best on the answers without:\n\n{_table(table)}"


def _behind(row: Row, name: str) -> float:
    """How far a score's AUROC is behind the best one's."""
    return max(map(_number, row["aurocs"].values())) - _number(row["aurocs"].get(name))


def _of(rows: Sequence[Row], name: str, less: str | None = None) -> list[float]:
    """A score's AUROCs, or how far they are above another's."""
    return [
        _number(row["aurocs"][name]) - (0.0 if less is None else _number(row["aurocs"][less]))
        for row in rows
        if row["aurocs"].get(name) is not None
    ]


def _number(value: float | None) -> float:
    return 0.5 if value is None else value


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _interval(values: Sequence[float], digits: int = 3) -> str:
    """The mean, and the middle 95 % over draws."""
    if not values:
        return ""
    low, high = np.quantile(values, [0.025, 0.975])
    return f"{_mean(values):+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, f"| {' | '.join('---' for _ in rows[0])} |", *body])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--choices", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("output/compare.jsonl"))
    options = parser.parse_args()
    sets = {folder.name: read(folder) for folder in options.folders}
    for name, answers in sets.items():
        print(f"{name}: {len(answers.correct)} answers, {sum(answers.correct) / len(answers.correct):.0%} right")
    print(report(run(sets, options.output, draws=options.draws, choices=options.choices)))


if __name__ == "__main__":
    main()

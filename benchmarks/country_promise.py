"""The promises about sentences on four facts of 119 countries: what they deliver, and of what quality.

    python benchmarks/country_promise.py docs/results/smollm2/sentences [--page docs/results/sentences.md]

The folder holds the scores of `country_answers.py`, as they are or compressed. In each of 100 seeded
splits two thirds of the countries choose a threshold, and the others are judged by it. A correction takes length and
place out of the scores: the residual of log score on log tokens and place, fitted without labels on the first part.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from country_answers import ESTIMATORS, is_right, table
from machine import about
from numpy.typing import NDArray

from semgrad_guard.calibration import AnswerSentences, calibrate_sentences
from semgrad_guard.calibration.sentences import compared_scores
from semgrad_guard.metrics import auroc
from semgrad_guard.settings import OnDoubt

ALPHA, DELTA, SPLITS = 0.2, 0.1, 100
FORMS: tuple[OnDoubt, ...] = ("drop", "stop")
KINDS = {
    "recalled": "Recalled: SmolLM2 in four bits",
    "read": "Read from a passage: SmolLM2 in four bits",
    "short": "Four questions, four words: the embedded model",
}
NAMES = tuple(one.name for one in ESTIMATORS)


@dataclass(frozen=True)
class Answers:
    """Answers with their sentences: columns of scores by estimator, lengths in tokens, and grades."""

    kind: str
    rows: Sequence[dict[str, Any]]
    correct: Sequence[Sequence[bool]]

    @classmethod
    def read(cls, path: Path, kind: str) -> Answers:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        rows, known = [json.loads(line) for line in text.decode().splitlines()], table()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    lines = [
        "# Sentences of a real model: four facts about 119 countries",
        "",
        f"`python benchmarks/country_promise.py`, {datetime.now(UTC):%Y-%m-%d}, {about()['cpu']}.",
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
        answers = Answers.read(next(given.folder.glob(f"{kind}.scores.jsonl*")), kind)
        lines += [f"## {title}", "", *tables(answers), ""]
        if kind == "recalled":
            lines += ["With length and place taken out of the scores:", "", *corrections(answers), ""]
    print("\n".join(lines))
    if given.page is not None:
        _, mark, by_hand = given.page.read_text(encoding="utf-8").partition("## The same with the commands")
        given.page.write_text("\n".join(lines) + "\n" + mark + by_hand, encoding="utf-8")


if __name__ == "__main__":
    main()

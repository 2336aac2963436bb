"""The committed calibration: closed-book questions about the pocket model's own world.

    python -m research.pocket.calibrate [--output semgrad_guard/pocket/calibration.json]

Every fact is put once, in a wording that training never showed; known, rare and never-shown facts as they come. The
promise therefore holds for questions drawn from this world, put by themselves (without a system message, a history or
a passage), and for no others.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random

from research.pocket.world import question, world
from semgrad_guard.calibration import Calibration, calibrate
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.estimators import HybridGrad
from semgrad_guard.grading import ExactMatch
from semgrad_guard.guard import Guard, Policy
from semgrad_guard.pocket import CALIBRATION_PATH
from semgrad_guard.records import Verdict

ALPHA, DELTA = 0.1, 0.1
BATCH = 32


def questions() -> list[tuple[str, tuple[str, ...]]]:
    """Every fact's question and its answers, in an order that was drawn once."""
    random = Random(0)
    facts = list(world())
    random.shuffle(facts)
    return [(question(fact, random.randrange(2), held_out=True), fact.answers) for fact in facts]


def answered(guard: Guard, questions: Sequence[str]) -> list[Verdict]:
    """Scored answers, undecided."""
    return [
        draft for start in range(0, len(questions), BATCH) for draft in guard.drafts(questions[start : start + BATCH])
    ]


def calibrate_pocket(model: LanguageModel, *, limit: int | None = None) -> Calibration:
    """Answer, score, grade, calibrate. `limit` takes fewer facts (for tests)."""
    guard = Guard(model, Policy(threshold=0.0), estimator=HybridGrad())
    rows = questions()[:limit]
    drafts = answered(guard, [text for text, _ in rows])
    grade = ExactMatch()
    return calibrate(
        [draft.uncertainty for draft in drafts],
        [grade(draft.text, answers) for draft, (_, answers) in zip(drafts, rows, strict=True)],
        alpha=ALPHA,
        delta=DELTA,
        binding=guard.binding.model_copy(update={"grader": grade.name}),
        prompts=[model.render(text).form for text, _ in rows],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=CALIBRATION_PATH)
    calibration = calibrate_pocket(LanguageModel.from_pretrained("pocket"))
    path = calibration.save(parser.parse_args().output)
    print(f"{path}: threshold {calibration.threshold}, coverage {calibration.coverage:.3f}, {calibration.n} questions")


if __name__ == "__main__":
    main()

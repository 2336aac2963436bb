"""From answers and grades to the graded run and the table of every answer."""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path

import pytest

from semgrad_guard.errors import GradingError
from semgrad_guard.grading.grader import Verdicts
from semgrad_guard.metrics import auroc
from semgrad_guard.paper.results import Results
from semgrad_guard.questions.run_record import AnswerScore, EvaluatedAnswer
from tests.made_answers import SETTINGS, made


def results(grades: dict[str, Verdicts], texts: tuple[str | None, ...] = ("a", "b", "c", "d")) -> Results:
    return Results([made(i, text) for i, text in enumerate(texts)], grades, SETTINGS, "questions")


def test_the_graded_run_has_every_column() -> None:
    run = results({"bem": [True, True, False, False], "judge": [True, False, False, False]}).graded_run
    assert (run.title, run.model, run.data) == ("tiny on questions", "tiny", "questions")
    assert list(run.correct) == [True, True, False, False]
    assert list(run.scores) == ["HybridGrad", "G-NLL"]
    assert list(run.scores["G-NLL"]) == [0.0, 1.0, 2.0, 3.0]
    assert list(run.milliseconds["G-NLL"]) == [0.5] * 4
    assert list(run.generation_ms) == [10.0] * 4
    assert list(run.mean_entropy) == [1.0] * 4
    assert list(run.kinds) == ["even", "odd", "even", "odd"]
    assert list(run.other_graders["judge"]) == [True, False, False, False]
    assert list(run.ablations["l2 norm"]) == [0.0, 2.0, 4.0, 6.0]
    assert (run.settings["grader"], run.settings["questions"]) == ("bem", 4)
    assert auroc(run.scores["G-NLL"], run.correct) == 1.0


def test_a_fetched_model_has_its_whole_name() -> None:
    run = Results([made(0)], {"bem": [True]}, {**SETTINGS, "model": "smollm2"}, "facts").graded_run
    assert run.title == "SmolLM2-135M-Instruct in four bits (Q4_1) on facts"
    assert run.settings["model"] == "smollm2"


def test_answers_without_a_verdict_are_left_out_and_counted() -> None:
    found = results({"judge": [True, None, False, True], "human": [True, True, None, True]})
    assert found.ungraded == {"judge": 1, "human": 1}
    run = found.graded_run
    assert (run.n, list(run.scores["G-NLL"]), run.settings["left out: no verdict"]) == (2, [0.0, 3.0], 2)
    with pytest.raises(GradingError, match="no answer that every grader found right or wrong"):
        print(results({"judge": [None] * 4}).graded_run)


def test_abstentions_are_left_out_and_counted_apart(tmp_path: Path) -> None:
    found = results({"contains@3": [True, "abstained", False, None], "judge": [True, "abstained", True, True]})
    run = found.graded_run
    assert (list(run.correct), run.settings["left out: abstained"], run.settings["left out: no verdict"]) == (
        *([True, False, False], 1),
        0,
    )
    assert auroc(run.scores["G-NLL"], run.correct) == auroc([0.0, 2.0, 3.0], [True, False, False])
    assert "abstained" in found.write_csv(tmp_path / "graded.csv").read_text()


def test_no_verdict_by_words_counts_as_wrong() -> None:
    found = results({"contains@3": [True, None, False, None], "judge": [True, True, None, True]})
    assert found.ungraded == {"contains@3": 2, "judge": 1}
    run = found.graded_run
    assert (list(run.correct), list(run.other_graders["judge"])) == ([True, False, False], [True, True, True])
    assert run.settings["no verdict: counted as wrong"] == 2
    assert run.settings["right means"].startswith("one sentence asserts a reference")


def test_the_table_has_a_row_per_question_and_a_column_per_method(tmp_path: Path) -> None:
    texts = ("=cmd()", 'line\nbreak, „quoted“ "too"', None, "d")
    path = results({"bem": [True, False, False, None]}, texts).write_csv(tmp_path / "graded.csv")
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["answer"] for row in rows] == ["'=cmd()", texts[1], "", "d"]
    assert [row["correct: bem"] for row in rows] == ["1", "0", "0", ""]
    assert [float(row["HybridGrad"]) for row in rows] == [0, 1, 2, 3]
    assert rows[0]["ms: G-NLL"] == "0.5"


def learned_answers(n: int) -> list[EvaluatedAnswer]:
    """Answers whose features tell right (the even ones) from wrong, as FusedStates would have kept them."""
    rng = random.Random(0)
    features = [{"greatest_nll": math.exp(i % 2 + rng.gauss(0, 0.5)), "length": 1.0 + i % 5} for i in range(n)]
    scores = [{"states": AnswerScore(uncertainty=None, reason="not fitted", features=feature)} for feature in features]
    return [made(i).model_copy(update={"scores": {**made(i).scores, **more}}) for i, more in enumerate(scores)]


def test_fused_states_are_cross_fitted_once_there_are_labels(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    titles = {**SETTINGS["estimators"], "states": {"name": "states", "title": "FusedStates"}}
    settings = {**SETTINGS, "estimators": titles}
    labels: Verdicts = [i % 2 == 0 for i in range(80)]
    labels[7] = None
    found = Results(learned_answers(80), {"human": labels}, settings, "questions")
    run = found.graded_run
    assert auroc(run.scores["FusedStates"], run.correct) == pytest.approx(0.92, abs=0.06)
    assert run.settings["FusedStates"] == "five-fold cross-validation on these answers"
    assert len(run.milliseconds["FusedStates"]) == 79
    with found.write_csv(tmp_path / "graded.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["FusedStates"] == "" for row in rows] == [i == 7 for i in range(80)]
    assert rows[7]["G-NLL"] == "7.0"

    few = Results(learned_answers(20), {"human": labels[8:28]}, settings, "questions").graded_run
    assert set(few.scores) == set(few.milliseconds) == {"HybridGrad", "G-NLL"}
    assert "left out. FusedStates takes at least" in few.settings["FusedStates"]

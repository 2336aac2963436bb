"""A run whose batches are answered elsewhere, in any order, has the answers of one that answers them in turn."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel
from semgrad_guard.estimators import GreedyNLL
from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.evaluation.runs.answers import Answer
from semgrad_guard.evaluation.runs.experiment import Experiment
from semgrad_guard.evaluation.runs.run import Answering, Batch, batches_of, collect_answers, recipe_of
from semgrad_guard.evaluation.runs.scoring import TextScorer, score_kept

QUESTIONS = [Question(question=f"question {'x' * (i % 4)} {i}", response="so" * i or "no") for i in range(11)]
ESTIMATORS = {"ours": HybridGrad(), "free": GreedyNLL()}
OPTIONS = GenerationOptions(max_tokens=4)


def test_batches_are_cut_by_order_and_size() -> None:
    assert [(batch.start, len(batch.rows)) for batch in batches_of(iter(QUESTIONS), 4)] == [
        (0, 4),
        (4, 4),
        (8, 3),
    ]
    assert list(batches_of([], 4)) == []


def test_a_run_that_is_spread(tmp_path: Path, language_model: LanguageModel) -> None:
    recipe = pickle.loads(pickle.dumps(recipe_of(Answering(language_model, ESTIMATORS, OPTIONS))))  # noqa: S301 - just written

    def backwards(batches: Iterable[Batch]) -> Iterator[list[Answer]]:
        answering = recipe(language_model)
        return (answering(batch.rows, batch.start) for batch in reversed(list(batches)))

    def collect(name: str, **changes: object) -> list[Answer]:
        return collect_answers(
            QUESTIONS,
            tmp_path / name,
            answering,
            batch_size=3,
            **changes,  # type: ignore[arg-type]
        )

    answering = Answering(language_model, ESTIMATORS, GenerationOptions(max_tokens=4, temperature=0.7, seed=3))
    alone = collect("alone.jsonl")
    recipe = recipe_of(answering)
    assert collect("spread.jsonl", spread=backwards) == alone
    kept = [path.read_text().splitlines() for path in (tmp_path / "alone.jsonl", tmp_path / "spread.jsonl")]
    assert sorted(kept[0]) == sorted(kept[1])
    assert kept[0] != kept[1]


def test_an_evaluation_that_is_spread(tmp_path: Path, language_model: LanguageModel) -> None:
    experiment = Experiment(language_model, list(ESTIMATORS.values()), OPTIONS)
    alone = experiment.run(QUESTIONS[:5], tmp_path / "alone.jsonl", batch_size=2)
    elsewhere = Experiment(language_model, list(ESTIMATORS.values()), OPTIONS).answering()
    spread = experiment.run(
        QUESTIONS[:5],
        tmp_path / "spread.jsonl",
        batch_size=2,
        spread=lambda batches: (elsewhere(batch.rows, batch.start) for batch in reversed(list(batches))),
    )
    assert [(a.text, a.scores, a.token_ids) for a in spread] == [(a.text, a.scores, a.token_ids) for a in alone]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.jsonl", "spread.jsonl"]


def test_scores_that_are_kept(tmp_path: Path, language_model: LanguageModel) -> None:
    rows = [*QUESTIONS[:4], Question(question="q", response="long " * 100)]
    scorer, path = TextScorer(language_model, HybridGrad()), tmp_path / "s.jsonl.run"
    starts: list[int] = []

    def spread(batches: Iterable[Batch]) -> Iterator[list[object]]:
        work = recipe_of(scorer)(language_model)
        for batch in batches:
            starts.append(batch.start)
            yield work(batch.rows, batch.start)  # type: ignore[misc]
            if len(starts) == 2:
                raise KeyboardInterrupt

    def score() -> list[float | None]:
        *found, last = score_kept(rows, path, scorer, spread=spread, batch_size=2)  # type: ignore[arg-type]
        assert (last.verdict, "context window" in (last.too_long or "")) == (None, True)
        return [text.verdict.uncertainty for text in found if text.verdict]

    with pytest.raises(KeyboardInterrupt):
        score()
    found = score()
    assert starts == [0, 2, 4]
    expected = [text.verdict for i in (0, 2) for text in scorer(rows[i : i + 2])]
    assert found == [verdict.uncertainty for verdict in expected if verdict]

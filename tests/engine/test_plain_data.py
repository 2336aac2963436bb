"""Records of answers are plain data: they pickle and copy without their model, and keep what was computed before."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from semgrad_guard import Generation, GenerationOptions, HybridGrad, LanguageModel, Verdict
from semgrad_guard.engine.answers.options import Sampling
from semgrad_guard.engine.objective import Objective
from semgrad_guard.errors import DetachedRecordError, ScoringError
from semgrad_guard.estimators.reading import PTrue
from semgrad_guard.estimators.samples import SemanticEntropy

PLAN = Sampling(count=2, max_tokens=3)


def pickled(record: Any) -> Any:
    data = pickle.dumps(record)
    assert b"torch" not in data
    return pickle.loads(data)  # noqa: S301 - just written


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": pickled,
    "deepcopy": copy.deepcopy,
    "copied twice": lambda record: copy.deepcopy(pickled(record)),
}


@pytest.fixture(params=COPIES.values(), ids=COPIES.keys())
def copied(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return request.param


@pytest.fixture
def answers(language_model: LanguageModel) -> list[Generation]:
    return language_model.generate_batch(["What is tea?", "And coffee?"], GenerationOptions(max_tokens=4))


def test_before_scoring(answers: list[Generation], copied: Callable[[Any], Any]) -> None:
    for answer in (*answers, *(a.evidence for a in answers)):
        twin = copied(answer)
        evidence = twin.evidence if isinstance(twin, Generation) else twin
        assert evidence.text == answer.text
        assert evidence.response_ids == answer.response_ids
        assert (twin.prompt, evidence.question) == (answer.prompt, answer.prompt.question)
        for ask in (evidence.gradients, lambda e=evidence: e.samples(PLAN), lambda e=evidence: e.model):
            with pytest.raises(DetachedRecordError, match="before you copy it"):
                ask()
        assert getattr(answer, "evidence", answer).model, "the original has its model still"


def test_after_scoring(answers: list[Generation], copied: Callable[[Any], Any]) -> None:
    first, second = answers
    scores, samples = first.evidence.gradients(), first.evidence.samples(PLAN)
    twin, other = copied(first), copied(second).evidence
    assert twin == first
    assert twin.evidence.gradients() == scores
    assert twin.evidence.samples(PLAN) == samples
    assert (other.gradients(), other.samples(PLAN)) == (second.evidence.gradients(), second.evidence.samples(PLAN))
    with pytest.raises(ScoringError):
        twin.evidence.gradients(Objective("official"))
    with pytest.raises(ScoringError):
        twin.evidence.samples(PLAN, temperature=0.5)


@pytest.mark.parametrize("estimator", [HybridGrad(), PTrue(), SemanticEntropy(PLAN)], ids=lambda e: e.name)
def test_an_estimator_reads_what_is_there_and_says_what_is_not(
    answers: list[Generation], copied: Callable[[Any], Any], estimator: Any
) -> None:
    evidence = answers[0].evidence
    with pytest.raises(ScoringError, match="copied without its model"):
        estimator(copied(evidence))
    score = estimator(evidence)
    assert estimator(copied(evidence)).uncertainty == score.uncertainty


def test_prompts_scores_samples_and_verdicts(language_model: LanguageModel, copied: Callable[[Any], Any]) -> None:
    target = Verdict.of(status="unscored", action="answer", text="Tea.", estimator="none", model="larger")
    verdict = Verdict.of(
        status="scored", action="escalate", text="Tea.", estimator="hybridgrad", model="m", draft="?", escalated=target
    )
    evidence = language_model.evidence("What is tea?", "A drink.")
    timed = evidence.gradients()
    assert timed is not None
    for record in (
        verdict,
        evidence.prompt,
        timed,
        timed.scores,
        evidence.samples(PLAN),
        language_model.identity,
        PLAN,
    ):
        assert copied(record) == record

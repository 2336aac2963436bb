"""An evaluation's run: what is kept is enough to compute every number again, and it continues wherever it stopped."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.answers.writing_model import WritingModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.estimators import Estimator, SemanticDensity
from semgrad_guard.estimators.samples import AskingEstimator
from semgrad_guard.estimators.suite import paper_suite
from semgrad_guard.paper.experiment import Experiment, SampledQuestions, semgrad_ablations
from semgrad_guard.questions.data import Phrasing, Question
from semgrad_guard.questions.run_record import EvaluatedAnswer

TOKENS = 3
QUESTIONS = [Question(question=f"item {'x' * (i % 3)} {i}?", answers=("a", "b"), id=str(i), kind="k") for i in range(5)]


def named(estimators: Iterable[Estimator]) -> dict[str, Estimator]:
    return {estimator.name: estimator for estimator in estimators}


@pytest.fixture(scope="module")
def experiment(language_model: LanguageModel) -> Experiment:
    suite = named(paper_suite(max_tokens=TOKENS))
    options = GenerationOptions(max_tokens=TOKENS)
    return Experiment(language_model, suite, options, ablations=semgrad_ablations(language_model.n_layers))


@pytest.fixture(scope="module")
def whole(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> list[EvaluatedAnswer]:
    return experiment.run(QUESTIONS, tmp_path_factory.mktemp("whole") / "run.jsonl", batch_size=2)


def timeless(answers: list[EvaluatedAnswer]) -> list[dict[str, Any]]:
    return [answer.model_dump(exclude={"milliseconds", "generation_ms"}) for answer in answers]


def test_scores_are_those_of_each_method_alone(experiment: Experiment, whole: list[EvaluatedAnswer]) -> None:
    for question, answer in list(zip(QUESTIONS, whole, strict=True))[:2]:
        assert set(answer.scores) == {*experiment.estimators}
        for estimator in experiment.estimators.values():
            generation = experiment.model.generate(question.question, experiment.options)
            assert generation.text == answer.text
            assert answer.uncertainty(estimator.name) == pytest.approx(
                estimator(generation.evidence).uncertainty, rel=1e-6
            ), estimator.name


def test_what_is_kept_is_enough_to_recompute(whole: list[EvaluatedAnswer]) -> None:
    for answer in whole:
        assert (answer.references, answer.kind, answer.id is not None) == (("a", "b"), "k", True)
        assert len(answer.token_ids) == len(answer.entropies) == len(answer.log_probs) > 0
        assert answer.uncertainty("gnll") == pytest.approx(-sum(answer.log_probs))
        assert answer.uncertainty("mean_entropy") == pytest.approx(answer.mean_entropy)
        semgrad, paragrad = answer.uncertainty("semgrad"), answer.uncertainty("paragrad")
        assert semgrad is not None
        assert paragrad is not None
        assert answer.mean_entropy is not None
        balance = math.exp(-answer.mean_entropy)
        assert answer.uncertainty("hybridgrad") == pytest.approx((1 - balance) * semgrad + balance * paragrad)
        assert set(answer.ablations) == set(semgrad_ablations(4))
        plans = [(s.plan["kind"], s.plan["count"], s.plan.get("temperature")) for s in answer.samples]
        assert ("Sampling", 10, 1.0) in plans
        assert ("DiverseBeams", 10, None) in plans
        assert len(plans) == len(set(plans)) == 6  # LN-PE and Semantic Entropy share theirs, Self-Con and Deg too
        drawn = next(s for s in answer.samples if (s.plan["count"], s.plan.get("temperature")) == (10, 1.0))
        assert len(drawn.texts) == 10
        rates = [sum(p for p in tokens if p is not None) / len(tokens) for tokens in drawn.log_probs if tokens]
        assert answer.uncertainty("ln_pe") == pytest.approx(-sum(rates) / len(rates), rel=1e-4)


def test_methods_pay_for_what_they_share(whole: list[EvaluatedAnswer]) -> None:
    """Time is noisy, so the best of the rows: a method that found its samples ready would cost next to nothing."""

    def cost(name: str) -> float:
        return min(answer.milliseconds[name] for answer in whole)

    assert all(answer.generation_ms > 0 for answer in whole)
    assert cost("semantic_entropy") > cost("ln_pe") / 2 > 0
    assert cost("deg") > cost("self_consistency") / 2 > 0
    assert cost("semgrad") > cost("hybridgrad") / 2 > 0
    assert cost("ln_pe") > cost("semgrad")


def test_the_papers_wording_is_what_the_model_sees(experiment: Experiment, tmp_path: Path) -> None:
    free = named([*experiment.estimators.values()][:1])
    (answer,) = replace(experiment, estimators=free, phrasing=Phrasing(wording="paper")).run(
        QUESTIONS[:1], tmp_path / "run.jsonl"
    )
    prompt = f"Please directly answer the following question with one or few words:\n{QUESTIONS[0].question}"
    assert answer.text == experiment.model.generate(prompt, experiment.options).text
    assert answer.question == QUESTIONS[0].question


def test_samples_are_read_once(experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Semantic Density reads its samples at a temperature of its own, and the record keeps just that."""
    readings: list[float] = []
    judged = WritingModel.judged

    def counted(self: WritingModel, *arguments: Any, temperature: float = 1.0) -> Any:
        readings.append(temperature)
        return judged(self, *arguments, temperature=temperature)

    monkeypatch.setattr(WritingModel, "judged", counted)
    few = {name: experiment.estimators[name] for name in ("ln_pe", "semantic_entropy", "semantic_density")}
    (answer,) = replace(experiment, estimators=few).run(QUESTIONS[:1], tmp_path / "run.jsonl")
    assert sorted(readings) == [0.1, 1.0]
    kept = {sample.plan["kind"]: sample for sample in answer.samples}
    assert (kept["DiverseBeams"].temperature, kept["Sampling"].temperature) == (0.1, 1.0)
    evidence = experiment.model.generate(QUESTIONS[0].question, experiment.options).evidence
    density = few["semantic_density"]
    assert isinstance(density, SemanticDensity)
    drawn = evidence.samples(density.plan, temperature=0.1)
    for tokens, sample in zip(kept["DiverseBeams"].log_probs, drawn, strict=True):
        assert tokens == pytest.approx(sample.log_probs, abs=1e-5)


def test_samples_are_drawn_for_a_seeded_choice_of_each_kind(
    experiment: Experiment, whole: list[EvaluatedAnswer], tmp_path: Path
) -> None:
    questions = [*QUESTIONS, Question(question="another kind?", answers=("a",), kind="j")]
    chosen = SampledQuestions.of(questions, count=2, seed=0)
    assert len(chosen.keys) == 3
    assert questions[-1].key in chosen.keys
    fewer = replace(experiment, sampled=chosen)
    found = fewer.run(questions, tmp_path / "run.jsonl", batch_size=3)
    asking = {estimator.name for estimator in experiment.estimators.values() if isinstance(estimator, AskingEstimator)}
    for answer in found:
        missing = {name for name, score in answer.scores.items() if score.uncertainty is None}
        assert missing == (set() if answer.key in chosen.keys else asking)
        assert set(answer.milliseconds) == set(answer.scores) - missing
        assert len(answer.samples) == (6 if answer.key in chosen.keys else 0)
    for answer, before in zip(found, whole, strict=False):
        assert answer.uncertainty("hybridgrad") == pytest.approx(before.uncertainty("hybridgrad"), rel=1e-4)
    with pytest.raises(BindingMismatchError, match="sampled_questions"):
        experiment.run(questions, tmp_path / "run.jsonl", batch_size=3)


def test_the_choice_follows_from_seed_and_questions() -> None:
    questions = [Question(question=f"{i}?", answers=("a",), kind=str(i % 2)) for i in range(40)]
    chosen = SampledQuestions.of(questions, count=5, seed=1)
    assert len(chosen.keys) == 10
    assert chosen == SampledQuestions.of(questions[::-1], count=5, seed=1)
    assert chosen != SampledQuestions.of(questions, count=5, seed=2)
    assert SampledQuestions.of(questions, count=20, seed=1) is None
    with pytest.raises(InputError, match="at least 1"):
        SampledQuestions.of(questions, count=0, seed=1)


def test_every_variant_is_semgrad_so_configured(language_model: LanguageModel) -> None:
    questions = ["What is it?", "And a rather longer question?"]
    generations = language_model.generate_batch(questions, GenerationOptions(max_tokens=4))
    variants = {
        "l2 norm": Objective(norm="l2"),
        "without entropy weights": Objective(weighted=False),
        "l = L-1": Objective(layers=(3,)),
        "l = 2L/3 .. L-1": Objective(layers=(2, 3)),
        "l = 1 .. L-1": Objective(layers=(1, 2, 3)),
        "last token": Objective(token=-1),
    }
    found = semgrad_ablations(language_model.n_layers)  # L = 4: there is no layer L-4 but the embedding
    assert list(found) == list(variants)
    for generation in generations:
        for name, variant in variants.items():
            expected = generation.evidence.gradients(variant).scores.semgrad
            assert found[name](generation.evidence) == pytest.approx(expected, rel=1e-9), name


def test_the_variants_of_deep_and_shallow_models() -> None:
    deep = semgrad_ablations(12)
    assert deep["l = L-4"].layers == (8,)
    assert deep["l = 2L/3 .. L-1"].layers == (8, 9, 10, 11)
    assert deep["last token"].layers == tuple(range(7, 12))
    assert deep["l = L-4"].objective == deep["last token"].objective  # one replay
    assert semgrad_ablations(2) == {}
    assert list(semgrad_ablations(3)) == [name for name in deep if name != "l = L-4"]

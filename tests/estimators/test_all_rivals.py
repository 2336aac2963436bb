"""What holds for every estimator: batches, empty answers; and for rivals that sample or ask: calibration, settings."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from semgrad_guard import Calibration, GenerationOptions, Guard, LanguageModel, Message, Policy, calibrate
from semgrad_guard.engine.answers.answer import BatchScoring
from semgrad_guard.engine.answers.options import DiverseBeams, Sampling
from semgrad_guard.errors import BindingMismatchError
from semgrad_guard.estimators import (
    ESTIMATORS,
    SAR,
    HybridGrad,
    Inside,
    LengthNormalisedEntropy,
    MutualInformation,
    PTrue,
    SemanticDensity,
    SemanticEntropy,
)
from semgrad_guard.estimators.samples import AskingEstimator
from semgrad_guard.estimators.suite import paper_suite
from semgrad_guard.estimators.text_pairs import CrossEncoder, Entailment, NLIEquivalence
from semgrad_guard.questions.data import Phrasing, Question, Wording

ASKING = tuple(kind for kind in ESTIMATORS if issubclass(kind, AskingEstimator))


def brief(estimator):
    """With few and short samples."""
    if estimator is PTrue or estimator not in ASKING:
        return estimator()
    return estimator(DiverseBeams(3, max_tokens=3) if estimator is SemanticDensity else Sampling(3, max_tokens=3))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_score_does_not_depend_on_its_batch(estimator, evidence, language_model: LanguageModel) -> None:
    alone = language_model.generate(evidence[1].question, GenerationOptions(max_tokens=5)).evidence
    together, single = brief(estimator)(evidence[1]), brief(estimator)(alone)
    assert single.uncertainty == pytest.approx(together.uncertainty, rel=1e-5, abs=1e-9)
    assert single.details.keys() >= {"scored_tokens", "scoring_ms"}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_empty_answer_has_no_score(estimator, make_language_model) -> None:
    model = make_language_model()
    model._model.generation_config.eos_token_id = list(range(258))
    empty = model.generate("q", GenerationOptions(max_tokens=3)).evidence
    assert empty.response_ids == ()
    assert brief(estimator)(empty).reason == "the response is empty"
    (stopped,) = BatchScoring(model, [replace(empty.answer, cut="\n")]).evidence
    assert "began with '\\n', where it was to stop" in brief(estimator)(stopped).reason
    foreign = brief(estimator)(model.evidence("q", "An answer."))
    if estimator in (LengthNormalisedEntropy, Inside, SemanticEntropy, SemanticDensity, MutualInformation, SAR):
        assert (foreign.uncertainty, foreign.reason) == (None, "all samples are empty")
    else:
        assert foreign.uncertainty is not None


@pytest.mark.parametrize("estimator", [brief(estimator) for estimator in ASKING])
def test_a_guard_can_be_calibrated_for_it(estimator, language_model: LanguageModel, tmp_path) -> None:
    options = GenerationOptions(max_tokens=3)
    draft = Guard(language_model, Policy(threshold=0.0, on_cut="score"), estimator=estimator, options=options)
    score = draft("q").uncertainty
    made = calibrate([score] * 60, [True] * 60, alpha=0.1, delta=0.1, binding=draft.binding)
    made.save(tmp_path / "calibration.json")
    policy = Policy.from_calibration(Calibration.load(tmp_path / "calibration.json"))
    # 60 equal scores: the threshold is that score, give or take the last digits.
    assert Guard(language_model, policy, estimator=estimator, options=options)("q").status == "scored"
    other = (
        replace(estimator, plan=replace(estimator.plan, max_tokens=2)) if hasattr(estimator, "plan") else HybridGrad()
    )
    with pytest.raises(BindingMismatchError):
        Guard(language_model, policy, estimator=other, options=options)("q")


def test_questions_about_the_answer_must_fit(make_language_model) -> None:
    model = make_language_model(max_position_embeddings=64)
    rows = [generation.evidence for generation in model.generate_batch(["q"], GenerationOptions(max_tokens=5))]
    for estimator in (PTrue(), MutualInformation(Sampling(6, max_tokens=4))):
        score = estimator(rows[0])
        assert score.uncertainty is None
        assert "does not fit the context window" in score.reason


def test_the_suite_shares_samples_and_tells_its_settings(nli: Entailment, cross_encoder: CrossEncoder) -> None:
    suite = paper_suite(NLIEquivalence(nli), cross_encoder, 7, max_tokens=32)
    settings = {
        estimator.title: json.loads(json.dumps(estimator.settings()))
        for estimator in suite
        if hasattr(estimator, "title")
    }
    assert settings["Semantic Entropy"]["plan"] == settings["LN-PE"]["plan"]
    assert settings["Self-Con"]["plan"] == settings["Deg"]["plan"]
    assert settings["INSIDE"]["plan"] == {
        "count": 10, "temperature": 0.5, "top_p": 0.99, "top_k": 5, "seed": 7, "max_new_tokens": 32,
    }  # fmt: skip
    assert settings["Semantic Density"]["plan"] == {"count": 10, "penalty": 1.0, "max_new_tokens": 32}
    assert settings["Deg"]["equivalence"] == f"nli:{nli.name}"
    assert settings["SAR"]["similarity"] == cross_encoder.name
    # The defaults of each method alone are those of the suite.
    for estimator in paper_suite():
        assert estimator == type(estimator)()


@pytest.mark.parametrize("wording", ["plain", "paper"])
@pytest.mark.parametrize("context", [None, "A passage."])
def test_the_bare_question_is_what_is_compared_under(
    language_model: LanguageModel, wording: Wording, context: str | None
) -> None:
    turns = Phrasing("Be brief.", wording).conversation(Question(question="Who?", context=context))
    evidence = language_model.evidence(turns, "Nobody")
    assert evidence.question == "Who?"
    question = "Who?" if context is None else "Question: Who?\nContext: A passage."
    assert evidence.question_in_context == question
    bare = [Message(turn.role, turn.content) for turn in turns]
    assert language_model.render(bare).ids == evidence.prompt.ids, "the model sees the content alone"
    as_it_stands = language_model.evidence(bare, "Nobody")
    assert as_it_stands.question == as_it_stands.question_in_context == turns[-1].content
    asked_plainly = language_model.evidence(question, "Nobody")
    assert PTrue()(evidence).uncertainty == pytest.approx(PTrue()(asked_plainly).uncertainty, rel=1e-9)

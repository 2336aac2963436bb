"""Cascade: the free score outside its band, ParaGrad's order within, and nothing asked about those that are clear."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.calibration import Calibration
from semgrad_guard.engine.scores.scorer import Scorer
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import Cascade, MaxProbability, ParaGrad
from semgrad_guard.records import Score

QUESTIONS = ["q", "What is it?", "Who?", "Where is the nearest place to eat?", "Why?", "When did it happen?"]


@pytest.fixture
def batch(language_model: LanguageModel):
    options = GenerationOptions(max_tokens=5, temperature=1.0, seed=3)
    answers = language_model.generate_batch(QUESTIONS, options, objective=Cascade().objective)
    return [answer.evidence for answer in answers]


@pytest.fixture
def differentiated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how many answers the head was differentiated, each time that it was."""
    sizes: list[int] = []
    head_gradients = Scorer.head_gradients

    def counted(self, batch, *rest):
        sizes.append(len(batch.ids))
        return head_gradients(self, batch, *rest)

    monkeypatch.setattr(Scorer, "head_gradients", counted)
    return sizes


@pytest.fixture
def passes(language_model: LanguageModel) -> Iterator[list[str]]:
    """Passes through the layers."""
    seen: list[str] = []
    layer = language_model._scorer.current_replayer().layers[-1]
    handle = layer.register_forward_hook(lambda *_: seen.append("a pass"))
    yield seen
    handle.remove()


def band(batch, count: int) -> Cascade:
    """One that holds so many of the answers, from the least certain down."""
    free = sorted(MaxProbability()(answer).uncertainty for answer in batch)
    return Cascade(low=(free[-count - 1] + free[-count]) / 2 if count < len(free) else 0.0, high=1.0)


@pytest.mark.parametrize("count", range(1, len(QUESTIONS) + 1))
def test_only_what_is_in_doubt_is_differentiated(
    batch, differentiated: list[int], passes: list[str], count: int
) -> None:
    cascade = band(batch, count)
    passes.clear()  # the first scores of a model are compared with its ordinary call
    found = [cascade(answer) for answer in batch]
    assert differentiated == [count]
    assert passes == []
    for answer, score in zip(batch, found, strict=True):
        free, gradient = MaxProbability()(answer).uncertainty, ParaGrad()(answer).uncertainty
        if free < cascade.low:
            assert (score.uncertainty, score.details["max_probability"]) == (free, free)
            assert "paragrad" not in score.details
        else:
            width = cascade.high - cascade.low
            assert score.uncertainty == pytest.approx(cascade.low + width * gradient / (1 + gradient), rel=1e-5)
            assert score.details["paragrad"] == pytest.approx(gradient, rel=1e-5)
            assert score.details["max_probability"] == free


def test_nothing_in_doubt_takes_no_gradient(batch, differentiated: list[int]) -> None:
    found = [Cascade(0.0, 1e-12)(answer).uncertainty for answer in batch]
    assert found == [MaxProbability()(answer).uncertainty for answer in batch]
    assert differentiated == []


def test_an_answer_alone_and_in_its_batch_score_alike(batch) -> None:
    cascade = band(batch, 3)
    alone = [cascade(answer.alone()).uncertainty for answer in batch]
    assert [cascade(answer).uncertainty for answer in batch] == pytest.approx(alone, rel=1e-5)


def test_an_empty_answer_has_no_score(make_language_model) -> None:
    model = make_language_model()
    model._decoder.end_tokens = tuple(range(258))
    empty = model.generate("q", GenerationOptions(max_tokens=3)).evidence
    assert Cascade(0.0, 1.0)(empty) == Score(None, "the response is empty")


def test_sentences_have_scores_too(language_model: LanguageModel) -> None:
    cascade, text = Cascade(0.0, 1.0), "One. Two or three."
    for segment in language_model.score("q", text, by="sentence", objective=cascade.objective):
        assert segment.scores is not None
        assert cascade.value(segment.scores) == pytest.approx(segment.scores.paragrad / (1 + segment.scores.paragrad))


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1e6), st.floats(0, 1e6))
def test_what_is_placed_stays_in_the_band_and_in_order(a: float, b: float, one: float, other: float) -> None:
    low, high = min(a, b), max(a, b)
    if low == high:
        with pytest.raises(InputError, match="0 <= low < high <= 1"):
            Cascade(low, high)
        return
    cascade = Cascade(low, high)
    first, second = (cascade.of((low + high) / 2, value) for value in sorted((one, other)))
    assert low <= first <= second <= high
    assert cascade.of(low - 0.01, one) == low - 0.01
    assert cascade.of(high, None) is cascade.of(None, one) is None


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.5), (0.5, 0.5), (0.6, 0.5), (0.1, 1.1), (float("nan"), 0.5)])
def test_a_band_that_is_none_is_refused(low: float, high: float) -> None:
    with pytest.raises(InputError, match="Cascade needs"):
        Cascade(low, high)


def test_its_settings_come_back_from_a_calibration(language_model: LanguageModel, tmp_path) -> None:
    from semgrad_guard import Guard, Policy, calibrate
    from semgrad_guard.guard import estimator_of

    binding = Guard(language_model, Policy(threshold=1.0), estimator=Cascade(0.2, 0.7)).binding
    uncertainties = [i / 100 for i in range(100)]
    made = calibrate(uncertainties, [True] * 90 + [False] * 10, alpha=0.2, delta=0.1, binding=binding)
    made.save(tmp_path / "c.json")
    assert estimator_of(Calibration.load(tmp_path / "c.json")) == Cascade(0.2, 0.7)

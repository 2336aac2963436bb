"""A chain calibrated by any estimator: learned, the best, or another one; and what its record keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback, calibrate_chain, get_verdict
from semgrad_guard import Calibration, LanguageModel, Policy, estimator_of
from semgrad_guard.errors import CalibrationError, InputError
from semgrad_guard.estimators import FusedGrad, FusedStates, GreatestEntropy, HybridGrad

RATES: dict[str, Any] = {"alpha": 0.5, "delta": 0.2, "progress": False, "max_concurrency": 20}
PROMPT = ChatPromptTemplate.from_template("{input}")
MANY = [(f"Which is number {i}?", ["yes"] if i % 4 else []) for i in range(204)]
FREE = {"max_probability", "mean_entropy", "gnll", "greatest_entropy", "hidden_score"}


def known(text: str, answers: Any) -> bool:
    """A grader by function: three in four are right."""
    return bool(answers)


@pytest.fixture(scope="module")
def chat(language_model: LanguageModel) -> ChatSemGrad:
    return ChatSemGrad.from_model(language_model, max_tokens=3)


@pytest.fixture(scope="module")
def auto(chat: ChatSemGrad, tmp_path_factory: pytest.TempPathFactory) -> tuple[Calibration, Path]:
    record = tmp_path_factory.mktemp("auto") / "record.jsonl"
    return calibrate_chain(PROMPT | chat, MANY, known, **RATES, estimator="auto", record=record), record


def test_the_best_is_chosen_on_a_part_and_every_score_is_kept(auto: tuple[Calibration, Path]) -> None:
    made, record = auto
    assert made.choice is not None
    assert made.binding is not None
    assert (made.n, len(made.choice.questions)) == (153, 51)
    assert made.choice.estimator == made.binding.estimator
    assert {"hybridgrad", "fused", "states", "max_probability"} == made.choice.aurocs.keys() & {
        "hybridgrad", "fused", "states", "max_probability",
    }  # fmt: skip
    first = json.loads(record.read_text().splitlines()[1])
    assert first["scores"].keys() > FREE
    learned, free = first["scores"]["states"]["features"]["gnll"], first["scores"]["gnll"]["uncertainty"]
    assert learned == pytest.approx(free, rel=2e-5)  # of two passes


@pytest.mark.parametrize("name", ["states", "fused", "greatest_entropy", "hybridgrad"])
def test_the_same_record_serves_every_estimator_and_guards_score_as_it_did(
    auto: tuple[Calibration, Path], chat: ChatSemGrad, name: str
) -> None:
    if name == "greatest_entropy":
        made = calibrate_chain(PROMPT | chat, MANY[:40], known, **RATES, estimator=GreatestEntropy())
    else:
        made = calibrate_chain(PROMPT | chat, MANY, known, **RATES, estimator=name, record=auto[1])
        assert made.n_recorded == len(MANY)
    assert made.binding is not None
    assert made.binding.estimator == name
    guard = UncertaintyRouterCallback(policy=Policy.from_calibration(made), mode="annotate")
    own = chat.model_copy(update={"estimator": estimator_of(made)})
    verdict = get_verdict((PROMPT | own).invoke({"input": MANY[1][0]}, {"callbacks": [guard]}))
    assert verdict is not None
    assert verdict.uncertainty is not None
    assert (verdict.calibration_id, verdict.estimator) == (made.id, name)
    assert min(abs(verdict.uncertainty - score) for score in made.scores) < 1e-3 or name != "greatest_entropy"


def test_too_few_labels_are_spent_on_nothing(chat: ChatSemGrad, caplog: pytest.LogCaptureFixture) -> None:
    made = calibrate_chain(PROMPT | chat, MANY[:30], known, **RATES, estimator="states")
    assert made.binding is not None
    assert (made.binding.estimator, made.n) == ("max_probability", 30)
    assert "Max probability takes the place of FusedStates" in caplog.text


def test_without_a_choice_the_record_keeps_the_free_scores(chat: ChatSemGrad, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    made = calibrate_chain(PROMPT | chat, MANY[:6], known, **RATES, record=record)
    assert made.binding is not None
    assert made.binding.estimator == "hybridgrad"
    assert json.loads(record.read_text().splitlines()[1])["scores"].keys() == FREE
    assert (made.aurocs.keys(), made.auto) == ({*FREE, "hybridgrad"}, "max_probability")
    free = calibrate_chain(PROMPT | chat, MANY[:6], known, **RATES, record=record, estimator="mean_entropy")
    assert free.n_recorded == 6
    with pytest.raises(InputError, match="holds no scores by semgrad"):
        calibrate_chain(PROMPT | chat, MANY[:6], known, **RATES, record=record, estimator="semgrad")


@pytest.mark.parametrize("estimator", [FusedStates(), FusedGrad()])
def test_an_unfitted_estimator_is_refused_before_the_first_answer(
    chat: ChatSemGrad, tmp_path: Path, estimator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = chat.model_copy(update={"estimator": estimator})
    monkeypatch.setattr(LanguageModel, "generate_batch", lambda *_args, **_options: pytest.fail("it answered"))
    with pytest.raises(CalibrationError, match="which is not fitted"):
        calibrate_chain(PROMPT | own | StrOutputParser(), MANY[:4], known, **RATES, record=tmp_path / "r.jsonl")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"estimator": "best"}, "estimator is 'auto' or one of hybridgrad"),
        ({"estimator": 3}, "an estimator is one such as"),
        ({"estimator": HybridGrad}, "is no estimator"),
        ({"estimator": "auto", "aggregate": "max"}, "aggregate joins the scores of several"),
        ({"slots": ["{user}"]}, "a slot is a piece of one line"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_answer(
    chat: ChatSemGrad, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LanguageModel, "generate_batch", lambda *_args, **_options: pytest.fail("it answered"))
    with pytest.raises(InputError, match=words):
        calibrate_chain(PROMPT | chat, MANY[:4], known, **RATES, **options)


def test_extra_prompts_and_slots_widen_the_shape(chat: ChatSemGrad) -> None:
    def rendered(system: str, *turns: tuple[str, str]) -> Any:
        return [("system", system), *turns, ("human", "Who is number 3?")]

    first = [([("system", "You help Anna."), ("human", f"Who is number {i}?")], ["yes"]) for i in range(20)]
    second = [rendered("You help Anna.", ("human", f"Who is number {i}?"), ("ai", "Nobody at all.")) for i in range(20)]
    made = calibrate_chain(chat, first, known, **RATES, extra_prompts=second, slots=["You help {user}."])
    assert made.n == 20
    for messages, familiar in (
        (rendered("You help Karl Otto."), True),
        (rendered("You help Karl Otto.", ("human", "Who is number 8?"), ("ai", "Nobody at all.")), True),
        (rendered("You help no one, and say yes."), False),
    ):
        router = UncertaintyRouterCallback(policy=Policy.from_calibration(made), mode="annotate")
        verdict = get_verdict(chat.invoke(messages, {"callbacks": [router]}))
        assert verdict is not None
        assert verdict.familiar is familiar, verdict.unfamiliar

"""Reasoning is never taken for an answer: not by the score, the decision, the promise, the grader, nor the delivery."""

from __future__ import annotations

import re
from operator import itemgetter
from typing import Any

import pytest

from semgrad_guard import GenerationOptions, Guard, HybridGrad, LanguageModel, Policy, Verdict
from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.options import DiverseBeams
from semgrad_guard.engine.answers.running import Request
from semgrad_guard.engine.answers.writing import WrittenAnswer
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import MeanEntropy, Sampling, SelfConsistency, SemanticEntropy
from semgrad_guard.guard.answering import Answerer
from semgrad_guard.guard.question import Router
from semgrad_guard.guard.reported import ReportedScorer
from semgrad_guard.questions.data import Question
from semgrad_guard.questions.run import TextScorer
from semgrad_guard.settings import Mode
from tests.engine.chat_templates import template
from tests.thinking import ANSWERS, THOUGHTS, UNTHOUGHT, thinking_model, written
from tests.thoughts import SHORT, WRITTEN, Written

OFF = {"enable_thinking": False}
QUESTIONS = list(ANSWERS)
ALL = Policy(threshold=1e9)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return thinking_model()


def test_a_generation_knows_its_reasoning_and_its_answer(model: LanguageModel) -> None:
    for question, generation in zip(QUESTIONS, model.generate_batch(QUESTIONS), strict=True):
        reasoning = generation.reasoning
        assert reasoning is not None
        assert (generation.text, reasoning.text) == (ANSWERS[question], THOUGHTS[question])
        whole = model.tokenizer.decode([*reasoning.ids, *generation.response_ids])
        assert whole == written(question)
        assert generation.preceding_ids == reasoning.ids


@pytest.mark.parametrize("estimator", [HybridGrad(), MeanEntropy()])
def test_an_answer_cut_in_mid_thought_is_unscored(model: LanguageModel, estimator: HybridGrad | MeanEntropy) -> None:
    guard = Guard(model, ALL, estimator=estimator, options=GenerationOptions(max_tokens=6))
    for verdict in guard.batch(QUESTIONS):
        assert (verdict.status, verdict.action, verdict.promised) == ("unscored", "abstain", False)
        assert (verdict.draft, verdict.details.reasoning) == (None, None)
        assert "cut off within its reasoning" in (verdict.reason or "")


@pytest.mark.parametrize("estimator", [HybridGrad(), MeanEntropy()])
def test_a_verdict_knows_the_thought_by_its_text_length_and_entropies(
    model: LanguageModel, estimator: HybridGrad | MeanEntropy
) -> None:
    guard = Guard(model, ALL, estimator=estimator, options=GenerationOptions(max_tokens=64))
    for question, verdict in zip(QUESTIONS, guard.batch(QUESTIONS), strict=True):
        assert (verdict.status, verdict.text, verdict.details.reasoning) == (
            "scored",
            ANSWERS[question],
            THOUGHTS[question],
        )
        assert verdict.details.scored_tokens == len(model.tokenizer(ANSWERS[question])["input_ids"])
        assert (verdict.details.reasoning_tokens or 0) >= len(model.tokenizer(THOUGHTS[question])["input_ids"])
        assert 0 < (verdict.details.reasoning_entropy or 0) <= (verdict.details.reasoning_peak or 0)
        assert "It is" not in str(verdict.metadata())
    held = Guard(model, Policy(threshold=-1.0), estimator=estimator)(QUESTIONS[0])
    assert held.action == "abstain"
    assert held.details.reasoning is None, "a thought names the answer: it is withheld with the draft"


@pytest.mark.parametrize("mode", ["annotate", "enforce"])
def test_a_delivered_answer_is_the_text_behind_the_thought(model: LanguageModel, mode: Mode) -> None:
    guard = Guard(model, Router(ALL, mode=mode), estimator=HybridGrad())
    verdict = guard(QUESTIONS[0])
    assert (verdict.text, verdict.details.reasoning) == (ANSWERS[QUESTIONS[0]], THOUGHTS[QUESTIONS[0]])
    assert not verdict.promised
    pieces = list(stream := guard.stream(QUESTIONS[0]))
    assert "".join(pieces) == stream.verdict.text == ANSWERS[QUESTIONS[0]]


def test_answers_without_a_thought_are_scored_as_before(model: LanguageModel) -> None:
    mixed = [QUESTIONS[0], UNTHOUGHT, QUESTIONS[1]]
    (first, plain, last), alone = model.generate_batch(mixed), model.generate(UNTHOUGHT)
    assert (first.reasoning is None, plain.reasoning, last.reasoning is None) == (False, None, False)
    assert plain.text == "yes"
    scores = [HybridGrad()(generation.evidence).uncertainty for generation in (plain, alone)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)
    off = model.generate(QUESTIONS[1], template_options=OFF)
    assert (off.text, off.reasoning) == (ANSWERS[QUESTIONS[1]], None)
    assert HybridGrad()(off.evidence).uncertainty is not None


def test_a_call_in_a_thought_is_no_call(model: LanguageModel) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    given = {"chat_template": template("qwen3")}
    asking = LanguageModel.from_transformers(model._model, model.tokenizer, template_options=given)
    call = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'
    text = f"<think>\nI could call {call % 'g'}\n</think>\n\n{call % 'f'}"
    row = WrittenAnswer(asking, asking.render("Hi", tools=tools), GenerationOptions(max_tokens=99))
    for token in model.tokenizer(text, add_special_tokens=False)["input_ids"]:
        row.take(token)
    (generation,) = asking.running_batch().generations([row])
    assert [call.name for call in asking.tool_answer(generation).calls] == ["f"]


def written_by(model: LanguageModel, way: str, options: GenerationOptions) -> list[Generation]:
    """The answers to the questions and to one without a thought, by a run or in a running batch."""
    questions = [*QUESTIONS, UNTHOUGHT]
    if way == "run":
        return model.generate_batch(questions, options)
    batch = model.running_batch()
    rows = [batch.answer(model.render(question), options) for question in questions]
    batch.join(rows)
    while batch.rows:
        batch.step()
    return batch.generations(rows)


@pytest.mark.parametrize("way", ["run", "running batch"])
@pytest.mark.parametrize("left_out", [4, 1, -9])
def test_a_thought_is_closed_after_its_budget(model: LanguageModel, way: str, left_out: int) -> None:
    usual = model.generate_batch([*QUESTIONS, UNTHOUGHT], GenerationOptions(max_tokens=64))
    assert usual[0].reasoning is not None
    budget = usual[0].reasoning.span[1] - left_out
    options = GenerationOptions(max_tokens=64, max_thinking_tokens=budget)
    closing = model.encode("\n</think>\n\n")
    for question, generation, free in zip([*QUESTIONS, UNTHOUGHT], written_by(model, way, options), usual, strict=True):
        before, answer = generation.preceding_ids, generation.response_ids
        assert generation.reasoning is None or generation.reasoning.why_unscored is None
        if free.reasoning is None or budget > free.reasoning.span[1]:
            assert (before, answer) == (free.preceding_ids, free.response_ids)
            continue
        assert before == (*free.preceding_ids[:budget], *closing)
        assert generation.text == ANSWERS[question]
        timed = generation.evidence.gradients()
        assert timed is not None
        text = f"{model.tokenizer.decode(list(before))}{generation.text}"
        expected = model.score(generation.prompt.question, text)
        assert timed.scores.hybridgrad == pytest.approx(expected.hybridgrad, rel=1e-3)


def test_a_budget_is_bound_in_the_calibration(model: LanguageModel) -> None:
    bound = [Answerer(model, HybridGrad(), GenerationOptions(max_thinking_tokens=n)).binding() for n in (None, 4)]
    assert bound[0].settings != bound[1].settings


@pytest.mark.parametrize("make", [SelfConsistency, SemanticEntropy])
def test_samples_are_compared_by_their_answers(model: LanguageModel, make: Any) -> None:
    evidence = model.generate(QUESTIONS[0]).evidence
    score = make(plan=Sampling(3, temperature=0.01, max_tokens=64))(evidence)
    assert score.uncertainty == pytest.approx(0, abs=1e-3)
    (sample, *_) = evidence.samples(Sampling(3, temperature=0.01, max_tokens=64))
    assert (sample.text, sample.ids, sample.preceding) == (
        ANSWERS[QUESTIONS[0]],
        evidence.response_ids,
        evidence.preceding_ids,
    )
    cut = make(plan=Sampling(3, temperature=0.01, max_tokens=6))(evidence)
    assert cut.uncertainty is None
    assert "cut off within its reasoning" in (cut.reason or "")


@pytest.mark.parametrize(
    ("plan", "together"),
    [(Sampling(3, temperature=0.01), False), (Sampling(3, temperature=0.01), True), (DiverseBeams(3), False)],
)
def test_the_thoughts_of_samples_have_the_answers_budget(model: LanguageModel, plan: Any, together: bool) -> None:
    options, closing = GenerationOptions(max_tokens=64, max_thinking_tokens=4), model.encode("\n</think>\n\n")
    draws = (plan,) if together else ()  # drawn while the answer is written
    request = Request(prompt=model.render(QUESTIONS[0]), options=(options,), draws=draws, finish=itemgetter(0))
    evidence = model.submit(request).result().evidence
    assert ((plan, evidence.row) in evidence.scoring._results) == together
    for sample in evidence.samples(plan):
        assert sample.preceding[4 : 4 + len(closing)] == closing


def test_a_text_from_elsewhere_is_read_by_the_same_rule(model: LanguageModel) -> None:
    question, answerer = QUESTIONS[0], Answerer(model, HybridGrad(), served=True)
    raw = answerer.scored(question, written(question)).verdict
    apart = answerer.scored(question, ANSWERS[question], reasoning=THOUGHTS[question]).verdict
    bare, own = answerer.scored(question, ANSWERS[question]).verdict, model.generate(question)
    for verdict in (raw, apart):
        assert (verdict.status, verdict.text, verdict.details.reasoning) == (
            "scored",
            ANSWERS[question],
            THOUGHTS[question],
        )
        assert verdict.uncertainty == pytest.approx(HybridGrad()(own.evidence).uncertainty, rel=1e-3)
    assert bare.status == "scored"
    assert bare.uncertainty != pytest.approx(raw.uncertainty, rel=0.1)
    unknown = answerer.scored(question, ANSWERS[question], reasoning="").verdict
    assert (unknown.status, unknown.text) == ("unscored", ANSWERS[question])
    (sentence,) = model.segments(question, written(question))
    whole = model.score(question, written(question))
    assert sentence.text == ANSWERS[question]
    assert sentence.scores is not None
    assert sentence.scores.hybridgrad == pytest.approx(whole.hybridgrad, rel=1e-4)
    for score in (model.score, model.segments):
        with pytest.raises(InputError, match="reasoning"):
            score(question, "<think>\nIt is")


# What looks like a thought in a text from elsewhere is never scored as the answer, by any reader.


ASKED = "What is the capital of France?"
by_text = pytest.mark.parametrize("one", SHORT, ids=lambda one: one.name)


@pytest.fixture(scope="module")
def pocket() -> LanguageModel:
    return LanguageModel.from_pretrained("pocket")


def checked(one: Written, verdict: Verdict, *, is_scored: bool | None) -> None:
    assert verdict.text == one.answer
    assert (verdict.details.reasoning or "") == (one.thought or "")
    if is_scored is not None:
        assert verdict.status == ("scored" if is_scored else "unscored")
    assert verdict.status == "scored" or "reasoning" in (verdict.reason or "")


@by_text
def test_a_scorer_whose_template_names_no_marks(one: Written, pocket: LanguageModel) -> None:
    draft = Answerer(pocket, HybridGrad(), served=True).scored(ASKED, one.text)
    checked(one, draft.verdict, is_scored=one.thought is None)


@by_text
def test_a_scorer_that_thinks_in_marks_of_its_own(one: Written) -> None:
    """It scores the answer given the thought, as it writes thoughts itself."""
    answerer = Answerer(thinking_model(), HybridGrad(), served=True)
    verdict = answerer.scored(ASKED, one.text).verdict
    checked(one, verdict, is_scored=one.scored)
    if one.scored and one.thought and "</think>" not in one.text:
        own = answerer.scored(ASKED, f"<think>\n{one.thought}\n</think>\n\n{one.answer}").verdict
        assert verdict.uncertainty == own.uncertainty


@by_text
def test_a_file_of_finished_answers(one: Written, pocket: LanguageModel) -> None:
    row = Question(id="a", question=ASKED, answers=("Lyon",), response=one.text)
    (scored,) = TextScorer(pocket, HybridGrad(), Policy(threshold=1e308))([row])
    assert scored.verdict is not None
    assert (scored.verdict.status == "scored") == (one.thought is None)
    assert "Paris" not in scored.verdict.text or one.thought in (None, "")


@pytest.mark.parametrize("by_sentence", [None, "drop"])
def test_reported_log_probabilities(by_sentence: str | None) -> None:
    """The answer is the whole text there, and has no score; nor has anything that may be a thought."""
    scorer = ReportedScorer("m", by_sentence=by_sentence)  # type: ignore[arg-type]
    for one in WRITTEN:
        entries = [{"token": word, "logprob": -0.1, "top_logprobs": []} for word in re.findall(r"\s*\S+", one.text)]
        verdict = scorer.verdict(one.text, entries, options={})
        is_answer = one.thought is None and one.answer == one.text
        assert verdict.status == ("scored" if is_answer else "unscored"), one
        if not is_answer:
            assert "reasoning" in (verdict.reason or ""), one
            assert all(part.uncertainty is None for part in verdict.sentences if one.thought or not one.answer), one

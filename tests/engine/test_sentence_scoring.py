"""Sentences of an answer as evidence: their tokens, and every score against the sentence as an answer of its own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.answers.answer import BatchScoring, Evidence
from semgrad_guard.engine.answers.sentences import sentence_evidence, token_counts
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.sentences import sentences
from semgrad_guard.estimators import FusedStates

FULL = Objective(earlier="differentiated")
ANSWER = "Tea is a drink. It grows in Assam! Yes."


def evidence_of(model: LanguageModel, text: str = ANSWER) -> tuple[Evidence, tuple[int, ...]]:
    answer = model.evidence("What is tea?", text)
    counts = token_counts(answer.response_ids, answer.text, sentences(text), model._decoder)
    assert counts is not None
    return answer, counts


def by_itself(sentence: Evidence) -> Evidence:
    """The sentence as an answer behind a prompt and what precedes it: nothing is shared."""
    whole = sentence.scoring
    scoring = BatchScoring(
        whole._scorer, [sentence.prompt], [sentence.response_ids], texts=[""], sampler=whole._model[1],
        preceding=[sentence.preceding_ids],
    )  # fmt: skip
    return scoring.evidence[0]


def test_every_score_is_that_of_the_sentence_as_an_answer_of_its_own(language_model: LanguageModel) -> None:
    answer, counts = evidence_of(language_model)
    assert counts == (16, 19, 4)
    objective = Objective("official", layers=(1, 2), earlier="differentiated")
    for found in sentence_evidence(answer, counts, ["", "", ""]):
        assert found is not None
        alone = by_itself(found)
        for wanted in (FULL, objective):
            ours, theirs = found.gradients(wanted), alone.gradients(wanted)
            assert ours is not None
            assert theirs is not None
            assert ours.scores.hybridgrad == pytest.approx(theirs.scores.hybridgrad, rel=1e-9)
            assert ours.scores.log_probs == pytest.approx(theirs.scores.log_probs, rel=1e-9)
        for own in (False, True):
            seen, expected = found.observed(own=own), alone.observed(own=own)
            assert seen is not None
            assert expected is not None
            assert seen.state == pytest.approx(expected.state, rel=1e-9)
            assert seen.entropies == pytest.approx(expected.entropies)
        assert FusedStates()(found).features == pytest.approx(FusedStates()(alone).features)


def test_the_states_of_a_generation_serve_the_sentences(language_model: LanguageModel) -> None:
    options = GenerationOptions(max_tokens=12)
    answers = [g.evidence for g in language_model.generate_batch(["What is tea?", "Why?"], options)]
    for answer in answers:
        count = len(answer.response_ids)
        for free in (True, False):
            parts = sentence_evidence(answer, (5, 0, count - 5), ["", "", ""])
            assert parts[1] is None
            for found in (parts[0], parts[2]):
                assert found is not None
                alone = by_itself(found)
                if free:
                    ours, theirs = found.observed(), alone.observed()
                    assert ours is not None
                    assert theirs is not None
                    assert ours.log_probs == pytest.approx(theirs.log_probs, rel=1e-6)
                else:
                    scored, expected = found.gradients(FULL), alone.gradients(FULL)
                    assert scored is not None
                    assert expected is not None
                    assert scored.scores.semgrad == pytest.approx(expected.scores.semgrad, rel=1e-6)


def test_a_sentence_has_the_same_scores_before_the_next_one_is_written(language_model: LanguageModel) -> None:
    answer = language_model.generate("What is tea?", GenerationOptions(max_tokens=12)).evidence
    ids, whole = answer.response_ids, answer.scoring
    finished = sentence_evidence(answer, (5, 3, 4), ["", "", ""])
    for found, begin, end in zip(finished, (0, 5, 8), (5, 8, 12), strict=True):
        assert found is not None
        so_far = BatchScoring(
            whole._scorer, [answer.prompt], [ids[begin:end]], texts=[""], sampler=whole._model[1],
            preceding=[ids[:begin]],
        )  # fmt: skip
        (alone,) = sentence_evidence(so_far.evidence[0], (end - begin,), [""])
        assert alone is not None
        ours, theirs = found.gradients(), alone.gradients()
        assert ours is not None
        assert theirs is not None
        assert ours.scores.hybridgrad == pytest.approx(theirs.scores.hybridgrad, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(["a", "B. ", "é", "𝄞", "。", "京", " ", "\n"]), min_size=1, max_size=20))
def test_tokens_of_sentences_spell_them(language_model: LanguageModel, pieces: list[str]) -> None:
    text = "".join(pieces)
    ids, spans = language_model._decoder.encode(text), sentences(text)
    counts = token_counts(ids, text, spans, language_model._decoder)
    assert counts is not None
    assert sum(counts) == len(ids)
    begin = 0
    for (start, end), count in zip(spans, counts, strict=True):  # one token a byte
        assert language_model._decoder.decode(ids[begin : begin + count]) == text[start:end]
        begin += count


def test_tokens_that_spell_another_text(language_model: LanguageModel) -> None:
    answer, _ = evidence_of(language_model)
    assert token_counts(answer.response_ids, "Coffee. Tea.", [(0, 8), (8, 12)], language_model._decoder) is None


def test_a_token_across_a_border_belongs_to_the_later_sentence() -> None:
    class Words:
        def encode(self, text: str) -> tuple[int, ...]:
            raise NotImplementedError

        def decode(self, ids: object, *, special: bool = False) -> str:
            return "".join(["Yes", ".", " It", " is. No", "."][i] for i in ids)  # type: ignore[attr-defined]

    assert token_counts((0, 1, 2, 3, 4), "Yes. It is. No.", [(0, 5), (5, 12), (12, 15)], Words()) == (2, 1, 2)

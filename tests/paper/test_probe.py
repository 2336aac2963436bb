"""A probe of a tiny model: its numbers against naive ones, what it leaves out, and how it continues after a kill."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.objective import Objective, TokenChoice
from semgrad_guard.errors import InputError
from semgrad_guard.grading import ExactMatch
from semgrad_guard.metrics import auroc
from semgrad_guard.paper.probe_record import FEWEST, Probe, with_answers, without_answers
from semgrad_guard.paper.probing import GridAnswer, ProbePlan, correlations, probe, prompt_ends
from semgrad_guard.questions.data import Question

OPTIONS = GenerationOptions(max_tokens=4)
PLAN = ProbePlan(tokens=5, batch_size=3, options=OPTIONS)
TOPICS = ("tea", "the sea", "iron", "a fox", "Mars", "wood", "salt")


def questions(answers: dict[str, str] | None = None) -> list[Question]:
    return [
        Question(
            question=f"What is {topic}?",
            paraphrases=(f"Tell me: {topic}?", f"{topic}, explained?")[: 1 + i % 2],
            answers=((answers or {}).get(topic, "never"),),
        )
        for i, topic in enumerate(TOPICS)
    ]


def run(
    folder: Path, model: LanguageModel, questions: list[Question], *, answers: bool = True, **changes: Any
) -> Probe:
    return probe(
        questions,
        model=model,
        plan=changes.pop("plan", PLAN),
        data="q.jsonl",
        answers_path=folder / "a.jsonl" if answers else None,
        grader=ExactMatch(),
        **changes,
    )


@pytest.fixture(scope="module")
def half_right(language_model: LanguageModel) -> list[Question]:
    """References that make the tiny model right on some questions."""
    found = {t: language_model.generate(f"What is {t}?", OPTIONS).text for t in TOPICS[:4]}
    return questions(found)


@pytest.fixture(scope="module")
def probed(
    tmp_path_factory: pytest.TempPathFactory, language_model: LanguageModel, half_right: list[Question]
) -> Probe:
    return run(tmp_path_factory.mktemp("probe"), language_model, half_right)


def test_preservation_equals_the_papers_equations(probed: Probe, language_model: LanguageModel) -> None:
    states: list[list[torch.Tensor]] = []
    for question in questions():
        rows = []
        for text in (question.question, *question.paraphrases):
            ids = torch.tensor([language_model.render(text).ids])
            with torch.no_grad():
                record = language_model._model(input_ids=ids, output_hidden_states=True).hidden_states
            rows.append(torch.stack([h[0, -11:] for h in record[:-1]]))
        states.append(rows)

    def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cosine_similarity(a, b, dim=-1)

    within = [torch.stack([cosine(a, b) for a, b in itertools.permutations(rows, 2)]).mean(0) for rows in states]
    across = [cosine(a[0], b[0]) for a, b in itertools.permutations(states, 2)]
    expected = torch.stack(within).mean(0) - torch.stack(across).mean(0)
    assert np.allclose(probed.preservation, expected.numpy(), atol=1e-9)
    assert np.allclose(np.array(probed.within) - np.array(probed.across), probed.preservation, atol=1e-12)
    assert probed.by_token == pytest.approx(np.array(probed.preservation)[[3]].mean(0).tolist())


def test_aurocs_are_semgrads_at_every_layer_and_token(
    probed: Probe, language_model: LanguageModel, half_right: list[Question]
) -> None:
    generations = [language_model.generate(q.question, OPTIONS) for q in half_right]
    correct = [ExactMatch()(g.text, q.answers) for g, q in zip(generations, half_right, strict=True)]
    assert (probed.graded.right, probed.graded.answers) == (sum(correct), len(correct))
    assert 0 < sum(correct) < len(correct)
    for layer, token in ((0, -1), (2, -4), (3, -5)):
        objective = Objective(layers=(layer,), token=token)
        scores = [g.evidence.gradients(objective).scores.semgrad for g in generations]  # type: ignore[union-attr]
        assert probed.graded.auroc[layer][token] == auroc(scores, correct)
    upper = [g.evidence.gradients(Objective(token=-2)).scores.semgrad for g in generations]  # type: ignore[union-attr]
    assert probed.graded.by_token[-2] == auroc(upper, correct)


def test_the_record_names_tokens_and_keeps_the_templates_choice(probed: Probe, tmp_path: Path) -> None:
    assert probed.tokens[-2:] == ("t", "\n")  # the last bytes of "<|im_start|>assistant\n"
    assert probed.own_token == -11
    assert len(probed.tokens) == 11  # five were asked for, and t* lies further back
    assert probed.semantic_token.offset is None
    assert "too few" in probed.semantic_token.reason
    path = probed.save(tmp_path / "probe.json")
    assert Probe.load(path) == probed
    assert TokenChoice.load(path) == probed.semantic_token
    assert list(tmp_path.iterdir()) == [path]


def test_the_users_tokens_are_not_in_question(language_model: LanguageModel) -> None:
    ends = prompt_ends(language_model, questions(), ProbePlan(tokens=20))
    # "?<|im_end|>\n<|im_start|>assistant\n" ends every prompt: 14 tokens, and the one before differs
    assert ends.complete == range(-15, 0)
    assert ends.names[-15] is None
    assert ends.names[-14] == "?"


def test_fewer_tokens_than_asked_for_where_prompts_are_short(make_language_model: Callable[..., LanguageModel]) -> None:
    plain = make_language_model(chat_template=None)
    ends = prompt_ends(plain, questions(), ProbePlan(tokens=40))
    assert ends.count == min(len(text) for q in questions() for text in (q.question, *q.paraphrases))
    assert ends.own_token == -1


def test_questions_without_paraphrases_are_counted(tmp_path: Path, language_model: LanguageModel) -> None:
    alone = [Question(question="Alone?", answers=("x",)), Question(question="Echo?", paraphrases=("Echo?",))]
    found = run(tmp_path, language_model, [*questions(), *alone])
    assert (found.questions, found.without_paraphrases) == (7, 2)
    assert found.graded.answers == 8  # the last has no reference


def test_none_with_paraphrases_is_refused_before_any_work(tmp_path: Path, language_model: LanguageModel) -> None:
    with pytest.raises(InputError, match=r'0 of the 1 questions have paraphrases.*add "paraphrases"'):
        run(tmp_path, language_model, [Question(question="q", answers=("a",))])
    assert not list(tmp_path.iterdir())


def test_without_answers(tmp_path: Path, language_model: LanguageModel, probed: Probe) -> None:
    found = run(tmp_path, language_model, questions(), answers=False)
    assert found.graded is None
    assert found.aurocs is None
    assert found.preservation == probed.preservation
    assert "no graded answers" in found.semantic_token.reason


def test_all_wrong_is_said_and_does_not_crash(tmp_path: Path, language_model: LanguageModel) -> None:
    found = run(tmp_path, language_model, questions())
    assert found.graded.right == 0
    assert found.graded.by_token[-1] is None
    assert found.graded.pearson is None
    assert found.aurocs is None


def test_correlations_against_numpy() -> None:
    rng = np.random.default_rng(0)
    sps, found = rng.random((3, 4)), rng.random((3, 4))
    pearson, spearman = correlations(sps.tolist(), found.tolist())
    assert pearson == pytest.approx(np.corrcoef(sps.ravel(), found.ravel())[0, 1])
    ranks = [values.ravel().argsort().argsort() for values in (sps, found)]
    assert spearman == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert correlations([[0.1, 0.2, 0.3]], [[None, None, 0.5]]) == (None, None)
    assert correlations([[0.1, 0.2, 0.3]], [[0.5, 0.5, 0.5]]) == (None, None)


def test_a_grid_answer_reads_semgrad_off_its_grid() -> None:
    answer = GridAnswer(
        key="k", question="q", text="t", scores={}, semantic_token=-2, grid=((1.0, 2.0), (3.0, 4.0), (5.0, 6.0))
    )
    assert answer.semgrad([1, 2]) == 4.0
    assert answer.semgrad([0], -1) == 2.0
    assert answer.semgrad([0], -3) is None
    assert json.loads(answer.model_dump_json())["grid"][2] == [5.0, 6.0]


OWN = -3


def simulated(n: int, separations: dict[int, float], *, seed: int = 0) -> tuple[dict[int, list[float]], list[bool]]:
    """SemGrad by offset, wrong answers so many standard deviations above right ones; the noise is partly shared."""
    rng = np.random.default_rng(seed)
    correct = rng.random(n) < 0.6
    shared = rng.normal(size=n)
    scores = {
        offset: (0.7 * shared + 0.7 * rng.normal(size=n) + np.where(correct, 0.0, gap)).tolist()
        for offset, gap in separations.items()
    }
    return scores, correct.tolist()


def decide(n: int, separations: dict[int, float], seed: int = 0):
    scores, correct = simulated(n, separations, seed=seed)
    own = scores.pop(OWN)
    return with_answers(OWN, own, scores, correct, seed=seed)


def test_the_trap_preservation_alone_does_not_move_the_token() -> None:
    """On a small model the last token has the highest score and the worst SemGrad."""
    found = without_answers(OWN, {-4: 0.5, -3: 0.49, -2: 0.3, -1: 0.66})
    assert found.offset is None
    assert "highest at -1 (0.660, against 0.490)" in found.reason
    assert "highest" not in without_answers(OWN, {-3: 0.7, -1: 0.5}).reason


def test_clear_evidence_moves_it() -> None:
    found = decide(800, {-4: 2.0, OWN: 0.5, -2: 0.4, -1: 0.2})
    assert (found.offset, found.proposal) == (-4, -4)
    assert found.difference.low is not None
    assert found.difference.low > 0
    assert "no part in the choice" in found.reason


def test_the_own_token_stays_where_it_is_best() -> None:
    found = decide(800, {-4: 0.5, OWN: 2.0, -1: 0.2})
    assert found.offset is None
    assert found.difference is None
    assert "best there as well" in found.reason


def test_chance_does_not_move_it() -> None:
    """Six tokens that are equally good: the best of them looks better on one half, and is put to the test."""
    equal = dict.fromkeys(range(-6, 0), 1.0)
    moved = [decide(200, equal, seed).offset is not None for seed in range(40)]
    assert sum(moved) <= 4  # a two-sided interval of 95 % errs upward in 2.5 % of them


def test_what_is_not_confirmed_says_so() -> None:
    found = next(f for f in (decide(200, {-4: 1.0, OWN: 1.0}, seed) for seed in range(20)) if f.proposal == -4)
    assert found.offset is None
    assert "did not confirm it" in found.reason


@pytest.mark.parametrize("right", [0, 2 * FEWEST - 2, 300])
def test_too_few_of_a_kind_say_so(right: int) -> None:
    correct = [True] * right + [False] * (300 - right)
    scores = [float(not c) for c in correct]
    found = with_answers(OWN, [0.0] * 300, {-1: scores}, correct)
    assert found.offset is None
    assert f"{right} right and {300 - right} wrong" in found.reason
    assert "too few" in found.reason


def test_just_enough_of_each_kind_may_speak() -> None:
    correct = [True] * (2 * FEWEST) + [False] * (2 * FEWEST)
    scores = [float(not c) for c in correct]
    assert with_answers(OWN, [0.0] * len(correct), {-1: scores}, correct).offset == -1


def test_answers_without_a_score_are_no_evidence() -> None:
    """A token of which nothing is known is never proposed; one known in part is compared on that part."""
    scores, correct = simulated(400, {OWN: 1.0, -1: 3.0})
    none: list[float | None] = [None] * 400
    assert with_answers(OWN, scores[OWN], {-1: none}, correct).offset is None
    partly = [None if i % 2 else s for i, s in enumerate(scores[-1])]
    assert with_answers(OWN, scores[OWN], {-1: partly}, correct).offset == -1


def test_ties_go_to_the_own_token() -> None:
    scores, correct = simulated(200, {OWN: 1.0})
    assert with_answers(OWN, scores[OWN], {-1: scores[OWN]}, correct).proposal is None

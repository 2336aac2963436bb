"""A resumable run: whatever interrupts it, its answers are those of a run that was not interrupted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semgrad_guard import GenerationOptions, Guard, HybridGrad, LanguageModel, Policy, SemGrad
from semgrad_guard.errors import BindingMismatchError, DataFileError, InputError
from semgrad_guard.estimators import GreedyNLL
from semgrad_guard.grading.candidates import LearningSet, calibrate_scored
from semgrad_guard.questions.data import Phrasing, Question
from semgrad_guard.questions.run import Answering, run_binding
from semgrad_guard.questions.run_record import Answer

Make = Callable[..., LanguageModel]
QUESTIONS = [Question(question=f"question {'x' * (i % 4)} {i}", id=str(i)) for i in range(11)]
OPTIONS = GenerationOptions(max_tokens=4)
BOTH = {"ours": HybridGrad(), "free": GreedyNLL()}


class Killed(BaseException):
    """Like Ctrl-C, and nothing else."""


def collect(path: Path, model: LanguageModel, questions: list[Question] = QUESTIONS, **changes: Any) -> list[Answer]:
    given = {"estimators": BOTH, "options": OPTIONS, "batch_size": 3, **changes}
    how = {name: given.pop(name) for name in ("estimators", "options", "phrasing") if name in given}
    return Answering(model, **how).run(questions, path, **given)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_come_in_order_and_are_kept(tmp_path: Path, language_model: LanguageModel) -> None:
    path = tmp_path / "run.jsonl"
    answers = collect(path, language_model)
    assert [answer.id for answer in answers] == [question.id for question in QUESTIONS]
    header, *kept = lines(path)
    assert header["settings"]["fingerprint"] == language_model.identity.fingerprint
    assert [Answer.model_validate(line) for line in kept] == answers


def test_answers_and_scores_are_a_guards(tmp_path: Path, language_model: LanguageModel) -> None:
    answers = collect(tmp_path / "run.jsonl", language_model)
    guard = Guard(language_model, Policy(threshold=1.0), estimator=HybridGrad(), options=OPTIONS)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        (draft,) = guard.drafts([question.question])
        assert answer.text == draft.text
        assert answer.uncertainty("ours") == pytest.approx(draft.uncertainty, rel=1e-6)
        assert answer.uncertainty("ours") != answer.uncertainty("free")


@pytest.mark.parametrize("reached", [0, 3, 6])
def test_an_interrupted_run_continues(tmp_path: Path, language_model: LanguageModel, reached: int) -> None:
    whole = collect(tmp_path / "whole.jsonl", language_model)
    path = tmp_path / "run.jsonl"

    def kill(done: int, total: int) -> None:
        if done >= reached:
            raise Killed

    with pytest.raises(Killed):
        collect(path, language_model, on_progress=kill)
    assert len(lines(path)) == 1 + reached
    assert collect(path, language_model) == whole
    assert len(lines(path)) == 1 + len(QUESTIONS)


def test_nothing_is_asked_twice(tmp_path: Path, language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "run.jsonl", []
    first = collect(path, language_model)
    monkeypatch.setattr(language_model, "generate_batch", lambda *_args, **_kwargs: pytest.fail("asked again"))
    assert collect(path, language_model, on_progress=lambda *at: seen.append(at)) == first
    assert seen == [(11, 11)]


@pytest.mark.parametrize("lost", [1, 20, 90, 400, 1500])
def test_a_half_written_line_is_redone(tmp_path: Path, language_model: LanguageModel, lost: int) -> None:
    path = tmp_path / "run.jsonl"
    whole = collect(path, language_model)
    content = path.read_bytes()
    path.write_bytes(content[:-lost])
    assert collect(path, language_model) == whole
    assert path.read_bytes() == content


@pytest.mark.parametrize("kept", [0, 1, 30, 60])
def test_a_half_written_header_is_redone(tmp_path: Path, language_model: LanguageModel, kept: int) -> None:
    path = tmp_path / "run.jsonl"
    whole = collect(path, language_model, QUESTIONS[:2])
    path.write_bytes(path.read_bytes()[:kept])
    assert collect(path, language_model, QUESTIONS[:2]) == whole


def test_questions_may_be_added(tmp_path: Path, language_model: LanguageModel) -> None:
    path = tmp_path / "run.jsonl"
    collect(path, language_model, QUESTIONS[:6])
    path.chmod(0o644)
    assert collect(path, language_model) == collect(tmp_path / "whole.jsonl", language_model)
    for file in (path, tmp_path / "whole.jsonl"):  # answers are their owner's alone
        assert os.name != "posix" or not file.stat().st_mode & 0o077


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"options": GenerationOptions(max_tokens=5)}, r"generation\.max_new_tokens is 5 and was 4"),
        ({"estimators": {**BOTH, "ours": HybridGrad(tau=2)}}, r"estimators\.ours\.tau is 2\.0 and was 1\.0"),
        ({"estimators": {"ours": HybridGrad()}}, r"scores of other estimators as well \(free\), which"),
        ({"phrasing": Phrasing("Be brief.")}, r"prompt_template is 'chat\+system-"),
    ],
)
def test_other_settings_are_refused(
    tmp_path: Path, language_model: LanguageModel, change: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "run.jsonl"
    collect(path, language_model, QUESTIONS[:2])
    before = path.read_bytes()
    with pytest.raises(BindingMismatchError, match=reason):
        collect(path, language_model, **change)
    assert path.read_bytes() == before


def test_another_model_is_refused(tmp_path: Path, language_model: LanguageModel, make_language_model: Make) -> None:
    path = tmp_path / "run.jsonl"
    collect(path, language_model, QUESTIONS[:2])
    with pytest.raises(BindingMismatchError, match="fingerprint is "):
        collect(path, make_language_model(seed=1))


@pytest.mark.parametrize(
    "content", ["no record", '{"question": "q"}\n', "[1]\n", '{"semgrad_guard_record": "grades"}\n', "\n"]
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, language_model: LanguageModel, content: str) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(content)
    with pytest.raises(InputError, match="is not a record of answers"):
        collect(path, language_model)
    assert path.read_text() == content


def test_a_broken_line_in_the_record_is_named(tmp_path: Path, language_model: LanguageModel) -> None:
    path = tmp_path / "run.jsonl"
    collect(path, language_model, QUESTIONS[:3])
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*whole[:2], "{}\n", *whole[3:]]))
    with pytest.raises(DataFileError, match=r"run\.jsonl, line 3 is not a line of answers"):
        collect(path, language_model)


def test_a_record_that_cannot_be_written_is_refused(tmp_path: Path, language_model: LanguageModel) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="Cannot write"):
        collect(tmp_path / "file" / "run.jsonl", language_model)


def test_a_prompt_over_the_window_is_kept_unanswered(tmp_path: Path, make_language_model: Make) -> None:
    model = make_language_model(max_position_embeddings=80)
    questions = [QUESTIONS[0], Question(question="long " * 30), QUESTIONS[1]]
    answers = collect(tmp_path / "run.jsonl", model, questions)
    assert [answer.text is None for answer in answers] == [False, True, False]
    assert answers[1].uncertainty("ours") is None
    assert "context window 80" in str(answers[1].scores["ours"].reason)
    assert collect(tmp_path / "run.jsonl", model, questions) == answers


def test_sampled_runs_repeat_from_their_seed(tmp_path: Path, language_model: LanguageModel) -> None:
    sampled = GenerationOptions(max_tokens=4, temperature=1.0, seed=5)
    one = collect(tmp_path / "one.jsonl", language_model, options=sampled)
    two = collect(tmp_path / "two.jsonl", language_model, options=sampled)
    assert one == two
    assert len({answer.text for answer in one}) > 1
    other = collect(tmp_path / "three.jsonl", language_model, options=sampled, batch_size=5)
    assert [answer.text for answer in other] == [answer.text for answer in one]


def test_a_batch_is_redone_as_a_whole(tmp_path: Path, language_model: LanguageModel) -> None:
    """Row i of a batch samples from seed + i: asked without its neighbours, it would become another answer."""
    sampled = GenerationOptions(max_tokens=4, temperature=1.0, seed=5)
    path = tmp_path / "run.jsonl"
    whole = collect(path, language_model, options=sampled)
    content = path.read_bytes()
    path.write_bytes(b"".join(content.splitlines(keepends=True)[:3]))  # the header and two answers of a batch of three
    assert collect(path, language_model, options=sampled) == whole
    assert path.read_bytes() == content


def test_what_cannot_run_is_refused_before_a_file_is_made(tmp_path: Path, language_model: LanguageModel) -> None:
    mixed = [QUESTIONS[0], Question(question="q", context="c")]
    path = tmp_path / "run.jsonl"
    for questions, changes, reason in (
        (mixed, {}, "1 of the 2 questions have a context"),
        (QUESTIONS, {"estimators": {}}, "at least one estimator"),
        (QUESTIONS, {"batch_size": 0}, "batch_size must be at least 1"),
        (QUESTIONS, {"options": GenerationOptions(temperature=1.0)}, "needs a seed"),
    ):
        with pytest.raises(InputError, match=reason):
            collect(path, language_model, questions, **changes)
    assert not path.exists()


def test_a_calibration_from_a_run_fits_the_guard(tmp_path: Path, language_model: LanguageModel) -> None:
    questions = [Question(question=f"item {i}", answers=("?",)) for i in range(60)]
    estimators = {"ours": SemGrad()}
    answers = collect(tmp_path / "run.jsonl", language_model, questions, estimators=estimators, batch_size=20)
    how = {"options": OPTIONS, "template": Phrasing().name(), "grader": "human"}
    binding = run_binding(language_model, SemGrad(), **how, on_cut="score")
    graded = LearningSet.of(questions, answers, [True] * 60)
    outcome = calibrate_scored(graded, "ours", binding=binding, alpha=0.2, delta=0.2)
    assert all(outcome.correct)
    assert outcome.auroc is None
    assert outcome.aurc == 0.0
    assert outcome.calibration.threshold is not None
    assert outcome.calibration.binding == binding
    guard = Guard(language_model, Policy.from_calibration(outcome.calibration), estimator=SemGrad(), options=OPTIONS)
    assert guard("item 3").confidence is not None
    with pytest.raises(BindingMismatchError, match="estimator is 'hybridgrad'"):
        Guard(language_model, guard.policy, estimator=HybridGrad(), options=OPTIONS)("item 3")

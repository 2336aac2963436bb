"""`calibrate`: from a file of questions to a promise, or to a plain word that there is none."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from semgrad_guard import Calibration, GenerationOptions, LanguageModel, Message
from semgrad_guard.calibration.calibration_record import report
from semgrad_guard.calibration.prompt_shape import PromptShape
from semgrad_guard.cli.terminal import ExitCode
from semgrad_guard.grading.candidates import FREE

from .helpers import ASKED, TOKENS, Run, flat, jsonl, rows_of


def test_the_promise_is_told_and_saved(calibrate: Run, right: Path, tmp_path: Path) -> None:
    result = calibrate(right)
    assert result.exit_code == 0, result.stderr
    made = Calibration.load(tmp_path / "c.json")
    shown = flat(result.stdout)
    assert made.threshold is not None
    assert "The promise holds Among the answers let through, at most 10% are wrong, with 90% probability." in shown
    assert f"threshold uncertainty at most {made.threshold:.4g}" in shown
    assert f"{made.coverage:.1%} of the questions are answered" in shown
    assert f"This assumes: {made.assumption}." in shown
    assert "0 of 60 answers wrong" in shown
    assert "AUROC undefined: all answers are right threshold" in shown
    assert "P(correct)" in shown
    assert made.id in shown
    assert made.binding.grader == "contains@3"
    assert made.binding.prompt_template.startswith("chat@")
    assert len((tmp_path / "c.answers.jsonl").read_text().splitlines()) == 61


def test_json_is_one_document_and_tells_right_and_wrong_apart(calibrate: Run, tmp_path: Path, texts: list[str]) -> None:
    rows = rows_of(texts, wrong=3)
    result = calibrate(jsonl(tmp_path / "mixed.jsonl", rows), "--json", "--alpha", 0.2)
    document = json.loads(result.stdout)
    made = Calibration.load(tmp_path / "c.json")
    assert (document["calibration"]["id"], document["calibration"]["threshold"]) == (made.id, made.threshold)
    assert document["calibration"]["alpha"] == made.alpha == 0.2
    assert document["answers"] == str(tmp_path / "c.answers.jsonl")
    assert document["calibration"]["n_wrong"] == 20
    assert 0 < document["auroc"] < 1
    assert 0 < document["aurc"] < 1
    assert all(0 < row["confidence"] < 1 for row in document["confidence"])
    assert "Answering: 0 of 60" in result.stderr


def test_no_threshold_is_said_plainly_and_saved(calibrate: Run, wrong: Path, tmp_path: Path) -> None:
    result = calibrate(wrong)
    assert result.exit_code == 4
    shown = flat(result.stdout)
    assert "No threshold keeps the promise" in shown
    assert "Nothing will be let through." in shown
    assert "threshold none" in shown
    made = Calibration.load(tmp_path / "c.json")
    assert (made.threshold, made.n_wrong) == (None, 60)
    assert made.reason is not None
    assert made.reason in shown


def test_another_grader_regrades_the_same_answers(
    calibrate: Run, tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"question": q, "answers": [f"{t} word"]} for q, t in zip(ASKED, texts, strict=True)]
    data = jsonl(tmp_path / "longer.jsonl", rows)
    exact = json.loads(calibrate(data, "--json").stdout)
    answers = (tmp_path / "c.answers.jsonl").read_text().splitlines()[1:]
    loose = json.loads(calibrate(data, "--json", "--grader", "token-f1").stdout)
    assert (tmp_path / "c.answers.jsonl").read_text().splitlines()[1:] == answers
    assert exact["calibration"]["n_wrong"] > loose["calibration"]["n_wrong"]
    assert loose["calibration"]["binding"]["grader"] == "token-f1>=0.5"


def test_other_settings_do_not_share_a_record(calibrate: Run, right: Path, tmp_path: Path) -> None:
    calibrate(right)
    result = calibrate(right, "--max-tokens", TOKENS - 1)
    assert result.exit_code == 1
    assert f"The answers in {tmp_path / 'c.answers.jsonl'} were made with other settings" in result.stderr


def test_broken_lines_are_named_and_a_prompt_over_the_window_counts_as_unscored(
    calibrate: Run, right: Path, tmp_path: Path
) -> None:
    lines = right.read_text().splitlines()
    long = {"question": "long " * 100, "answers": ["x"]}
    data = jsonl(tmp_path / "broken.jsonl", [*lines[:10], lines[10][:25], *lines[11:], lines[0], long])
    result = calibrate(data, "--json", "--copies", "once")
    assert result.exit_code == 5
    document = json.loads(result.stdout)
    counts = [document["calibration"][name] for name in ("n", "n_unscored", "n_wrong")]
    assert counts == [60, 1, 1]
    assert "line 11 is not valid JSON" in document["broken_lines"][0]
    assert document["broken_lines"][0] in result.stderr
    assert "line 61 repeats line 1" in document["duplicates"][0]


def test_contexts_are_another_form_of_prompt(calibrate: Run, tmp_path: Path) -> None:
    rows: list[dict[str, Any] | str] = [{"question": q, "answers": ["x"], "context": f"About {q}"} for q in ASKED[:3]]
    calibrate(jsonl(tmp_path / "context.jsonl", rows))
    made = Calibration.load(tmp_path / "c.json")
    assert str(made.binding.prompt_template).startswith("context@")
    mixed = calibrate(jsonl(tmp_path / "mixed.jsonl", [*rows, {"question": "q", "answers": ["x"]}]))
    assert mixed.exit_code == 1
    assert "3 of the 4 questions have a context" in mixed.stderr


def test_too_few_questions_are_told_before_any_work(calibrate: Run, right: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(right.read_text().splitlines()[:10]))
    result = calibrate(few)
    assert result.exit_code == 4
    assert "10 questions cannot keep this promise, whatever the answers: it takes at least 23." in result.stderr


def made_by(calibrate: Run, data: Path, folder: Path, *arguments: object) -> Calibration:
    result = calibrate(data, *arguments)
    assert result.exit_code in (ExitCode.OK, ExitCode.NO_THRESHOLD), result.stderr
    return Calibration.load(folder / "c.json")


def test_the_shape_is_that_of_the_prompts_that_were_sent(
    calibrate: Run, right: Path, tmp_path: Path, language_model: LanguageModel
) -> None:
    made = made_by(calibrate, right, tmp_path)
    assert made.shape == PromptShape.of(language_model.render(question).form for question in ASKED)
    assert made_by(calibrate, right, tmp_path).shape == made.shape  # the run was complete already


def test_a_programs_own_prompts_are_calibrated_on(
    calibrate: Run, tmp_path: Path, language_model: LanguageModel
) -> None:
    template = 'Use {context}, {{"as": "data"}}.\n\nQuestion: {question}\nAnswer:'
    plain = template.replace("{{", "{").replace("}}", "}")
    (tmp_path / "prompt.txt").write_text(template + "\n")
    passages = [[f"Item {i} is small.", "So it is."] for i in range(60)]
    turns = [
        [
            Message("system", "Be brief."),
            Message("user", plain.replace("{context}", "\n\n".join(p)).replace("{question}", q)),
        ]
        for q, p in zip(ASKED, passages, strict=True)
    ]
    texts = [language_model.generate(turn, GenerationOptions(max_tokens=TOKENS)).text for turn in turns]
    rows = [
        {"question": q, "passages": p, "answers": [t or "?"]} for q, p, t in zip(ASKED, passages, texts, strict=True)
    ]
    data = jsonl(tmp_path / "data.jsonl", rows)
    form = ("--system", "Be brief.", "--column", "context=passages")
    made = made_by(calibrate, data, tmp_path, *form, "--prompt", f"@{tmp_path / 'prompt.txt'}")
    assert made.shape == PromptShape.of(language_model.render(turn).form for turn in turns)
    assert str(made.binding.prompt_template).startswith("context+system-")
    assert made_by(calibrate, data, tmp_path, *form, "--prompt", template) == made
    other = calibrate(data, *form, "--prompt", template.replace("Use", "Read"))
    assert other.exit_code != 0
    assert "other settings: prompt_template" in flat(other.stderr)


def test_the_effect_is_said_and_an_alpha_without_one_is_warned_of(calibrate: Run, right: Path) -> None:
    result = calibrate(right, "--alpha", 0.5)
    assert "Warning: alpha is 50.0%, and without a guard" in flat(result.stderr)
    assert "effect error" in flat(result.stdout)
    found = json.loads(calibrate(right, "--alpha", 0.5, "--json").stdout)["effect"]
    assert found["answers"] == 60 >= found["delivered"] >= found["delivered_wrong"]
    assert json.loads(calibrate(right, "--alpha", 0.5, "--json").stdout)["no_verdict"] == 0
    by_sentence = flat(calibrate(right, "--alpha", 0.5, "--grader", "contains").stdout)
    assert "one sentence asserts a reference; what else the answer says is not checked" in by_sentence


def test_learned_estimators_keep_the_shape_of_the_part_that_they_calibrate_on(
    calibrate: Run, right: Path, tmp_path: Path
) -> None:
    made = made_by(calibrate, right, tmp_path, "--estimator", "auto", "--alpha", 0.3)
    assert made.shape.n == made.n == 60 - len(made.choice.questions)


def test_a_record_with_more_scores_is_calibrated_by_one_of_them(calibrate: Run, right: Path, tmp_path: Path) -> None:
    record = ("--output", tmp_path / "all.json")
    calibrate(right, "--estimator", "auto", *record)
    before = (tmp_path / "all.answers.jsonl").read_text().splitlines()[1:]
    calibrate(right, "--estimator", "max_probability", "--alpha", 0.3, *record)
    made = Calibration.load(tmp_path / "all.json")
    assert (tmp_path / "all.answers.jsonl").read_text().splitlines()[1:] == before
    alone = made_by(calibrate, right, tmp_path, "--estimator", "max_probability", "--alpha", 0.3)
    assert made.n == alone.n
    assert made.threshold is not None
    assert made.threshold == pytest.approx(alone.threshold or 0.0, rel=1e-5)
    more = jsonl(tmp_path / "more.jsonl", [*right.read_text().splitlines(), '{"question": "new?", "answers": ["x"]}'])
    refused = calibrate(more, "--estimator", "max_probability", "--alpha", 0.3, *record)
    assert refused.exit_code == 1
    assert "have scores of other estimators as well (" in flat(refused.stderr)
    assert "Run the command that began the file on all the questions, then this one again" in flat(refused.stderr)
    assert (tmp_path / "all.answers.jsonl").read_text().splitlines()[1:] == before
    assert calibrate(more, "--estimator", "auto", *record).exit_code in (0, 4)
    assert calibrate(more, "--estimator", "max_probability", "--alpha", 0.3, *record).exit_code in (0, 4)


def test_a_file_with_repeats_is_traffic_or_a_list(calibrate: Run, right: Path, tmp_path: Path) -> None:
    lines = right.read_text().splitlines()
    data = jsonl(tmp_path / "repeats.jsonl", [*lines, *lines[:1] * 20])
    refused = calibrate(data)
    assert refused.exit_code == 1
    assert "20 lines of" in flat(refused.stderr)
    assert "--copies keep (the promise is about traffic), or --copies once" in flat(refused.stderr)
    assert not (tmp_path / "c.json").exists()
    shown = calibrate(data, "--copies", "keep")
    assert "repeats line 1" not in shown.stderr
    assert "Among the answers let through to traffic like this" in flat(shown.stdout)
    traffic = Calibration.load(tmp_path / "c.json")
    assert (traffic.n, traffic.n_duplicates, traffic.copies, traffic.tries) == (80, 0, "keep", 1)
    assert "to distinct questions, at most" in flat(calibrate(data, "--copies", "once").stdout)
    listed = Calibration.load(tmp_path / "c.json")
    assert (listed.n, listed.n_duplicates, listed.copies, listed.tries) == (60, 0, "once", 2)


def test_tries_on_a_record_are_counted(calibrate: Run, right: Path, tmp_path: Path) -> None:
    tries = [made_by(calibrate, right, tmp_path, "--alpha", alpha).tries for alpha in (0.1, 0.2, 0.3, 0.2, 0.1)]
    assert tries == [1, 2, 3, 2, 1]
    made = made_by(calibrate, right, tmp_path, "--alpha", 0.3)
    assert made.level < made.delta / 50
    assert "for all 3 tries on these labels together" in flat(calibrate(right, "--alpha", 0.3).stdout)
    more = jsonl(tmp_path / "more.jsonl", [*right.read_text().splitlines(), '{"question": "new?", "answers": ["x"]}'])
    assert made_by(calibrate, more, tmp_path).tries == 4  # more labels are another try
    calibrate(right, "--output", tmp_path / "new.json")
    assert Calibration.load(tmp_path / "new.json").tries == 1


def test_wordings_of_one_fact_are_named(calibrate: Run, right: Path, tmp_path: Path) -> None:
    assert "close to another one" not in calibrate(right).stderr
    near = {"question": "what is item 7", "answers": ["x"]}
    shown = flat(calibrate(jsonl(tmp_path / "near.jsonl", [*right.read_text().splitlines(), near])).stderr)
    assert "1 of 61 questions are close to another one: 'what is item 7' and 'What is item 7?'" in shown


def test_the_report_is_in_the_record_and_on_the_terminal(calibrate: Run, tmp_path: Path, texts: list[str]) -> None:
    rows = rows_of(texts, wrong=9)
    short = flat(calibrate(jsonl(tmp_path / "mixed.jsonl", rows), "--alpha", 0.3).stdout)
    assert not {"chance", "scores"} & set(short.split())  # nothing is wrong, so nothing has to help
    shown = flat(calibrate(tmp_path / "mixed.jsonl", "--alpha", 0.3, "--verbose").stdout)
    made = Calibration.load(tmp_path / "c.json")
    sentences = report(made)
    assert {"promise", "effect", "prompts", "chance", "scores"} <= sentences.keys()
    assert all(sentences[name] in shown for name in ("promise", "effect", "prompts", "chance", "scores"))
    assert list(made.aurocs) == ["hybridgrad", *(one.name for one in FREE)]
    assert made.auroc == made.aurocs["hybridgrad"]
    assert "--estimator auto takes max_probability: the best on a part of the labels" in sentences["scores"]
    assert "; a second turn is not promised" in sentences["prompts"]
    free = made_by(calibrate, tmp_path / "mixed.jsonl", tmp_path, "--estimator", "gnll")  # no answer is given anew
    assert (free.auroc, free.tries) == (pytest.approx(made.aurocs["gnll"]), 2)


def test_answers_that_were_cut_off_are_told_before_and_after_they_are_graded(
    calibrate: Run, right: Path, tmp_path: Path
) -> None:
    """The tiny model ends one sentence: by default no other answer has a score."""
    result = calibrate(right, "--on-cut", "unscored")
    assert result.exit_code == ExitCode.NO_THRESHOLD
    warning = f"--max-tokens {TOKENS} cut off 60 of 60 answers, 59 of them within their first sentence"
    assert f"{warning}: raise --max-tokens" in flat(result.stderr)
    shown = flat(result.stdout)
    assert "Answers cut off: 60, 0 of them wrong: raise --max-tokens. Too few answers (60, 1 of them scored)" in shown
    assert "cut off 60 of the graded answers, 0 of them wrong (within their first sentence they have no score)" in shown
    made = Calibration.load(tmp_path / "c.json")
    assert (made.binding.on_cut, made.n_unscored, made.tries) == ("unscored", 59, 1)
    document = json.loads(calibrate(right, "--json").stdout)
    assert document["cut_off"] == {"answers": 60, "wrong": 0}
    assert (document["calibration"]["tries"], document["calibration"]["binding"]["on_cut"]) == (2, "score")


PAGE = Path(__file__).parents[2] / "docs" / "your-model.md"
SHOWN = re.compile(r"`(\w+\.jsonl)`.*?\n\n```json\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^(?:\$ )?semgrad-guard (calibrate (?:.*\\\n)*.*)$", re.MULTILINE)


def test_the_steps_of_your_model_follow_from_each_other(
    run: Run, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    files = dict(SHOWN.findall(page))
    assert set(files) == {"questions.jsonl", "passages.jsonl"}
    for name, content in files.items():
        Path(name).write_text(content)
    plain, prompts, *_ = (shlex.split(command.replace("\\\n", " ")) for command in COMMAND.findall(page))
    for command, data in ((plain, "questions.jsonl"), (prompts, "passages.jsonl")):
        command[command.index("--model") + 1] = str(model_folder)
        command[command.index("--data") + 1] = data
        result = run(*command, "--max-tokens", 2)
        assert result.exit_code in (0, 4, 6), result.stderr  # 4: two questions keep no promise; 6: all were cut off
        assert "is not valid" not in result.stderr
        assert Path(command[command.index("--output") + 1]).is_file()
    assert prompts[prompts.index("--data") + 1] in files

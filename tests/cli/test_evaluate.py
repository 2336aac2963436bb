"""`evaluate`: every method on a user's questions, kept as it comes, graded afterwards and as often as one likes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from semgrad_guard import LanguageModel
from semgrad_guard.cli import from_options, runs
from semgrad_guard.questions.run_record import EvaluatedAnswer, read_record

from .helpers import ASKED, TOKENS, Run, fill, flat, jsonl, merged, table

METHODS = ("--methods", "gnll", "--methods", "hybridgrad", "--methods", "ln_pe")


@pytest.fixture
def evaluate(run: Run, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    fixed = ("--model", model_folder, "--output", tmp_path / "out", "--max-tokens", TOKENS, *METHODS)
    monkeypatch.setattr(from_options, "BATCH", 4)
    return lambda *arguments: run("evaluate", "--no-report", *merged(fixed, arguments))


@pytest.fixture
def again(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Grade what is there; a model would be a mistake."""

    def invoke(*arguments: object) -> Result:
        with monkeypatch.context() as patched:
            patched.setattr(from_options, "load", lambda *_args, **_named: pytest.fail("a model was loaded"))
            return run("evaluate", "--output", tmp_path / "out", "--regrade", "--no-report", *arguments)

    return invoke


@pytest.fixture
def mixed(tmp_path: Path, texts: list[str]) -> Path:
    """Eight questions; the model is right on the even ones."""
    rows = [
        {"question": q, "answers": [t if i % 2 == 0 else "seven"], "kind": "odd" if i % 2 else "even"}
        for i, (q, t) in enumerate(zip(ASKED[:8], texts, strict=False))
    ]
    return jsonl(tmp_path / "mixed.jsonl", rows)


def graded(folder: Path) -> list[dict[str, str]]:
    return table(folder / "out" / "graded.csv")


def kept(folder: Path) -> list[EvaluatedAnswer]:
    return read_record(folder / "out" / "answers.jsonl", EvaluatedAnswer)[1]


def timeless(answers: list[EvaluatedAnswer]) -> list[dict[str, Any]]:
    return [answer.model_dump(exclude={"milliseconds", "generation_ms"}) for answer in answers]


def test_a_run_from_questions_to_a_table(evaluate: Run, mixed: Path, tmp_path: Path) -> None:
    result = evaluate("--data", mixed)
    assert result.exit_code == 0, result.stderr
    shown = flat(result.stdout)
    assert "tiny on mixed" in shown
    assert all(word in shown for word in ("AUROC", "HybridGrad", "G-NLL", "LN-PE"))
    assert "50.0% of 8 answers are right by contains@3. Right means: one sentence asserts a reference;" in shown
    rows = graded(tmp_path)
    assert [row["correct: contains@3"] for row in rows] == ["1", "0"] * 4
    assert [row["kind"] for row in rows] == ["even", "odd"] * 4
    for row, answer in zip(rows, kept(tmp_path), strict=True):
        assert float(row["LN-PE"]) == answer.uncertainty("ln_pe")
        assert float(row["ms: LN-PE"]) == answer.milliseconds["ln_pe"] > 0
    sheet = (tmp_path / "out" / "labels.csv").read_text(encoding="utf-8-sig")
    assert sheet.startswith("key,question,passage,references,answer")


@pytest.mark.parametrize("reason", ["no such data", "no such model"])
def test_a_folder_in_which_nothing_came_to_lie_is_gone(
    run: Run, evaluate: Run, mixed: Path, tmp_path: Path, reason: str
) -> None:
    given = {"no such data": ("--data", tmp_path / "none.jsonl"), "no such model": ("--data", mixed, "--model", "./no")}
    assert evaluate(*given[reason]).exit_code == 1
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    assert evaluate(*given[reason]).exit_code == 1
    assert (tmp_path / "out").exists()


def test_json_and_the_first_of_a_csv_file(evaluate: Run, tmp_path: Path, texts: list[str]) -> None:
    data = tmp_path / "q.csv"
    data.write_text("question;answers\r\n" + "".join(f"{q};seven\r\n" for q in ASKED[:5]), encoding="utf-8-sig")
    result = evaluate("--data", data, "--limit", 2, "--json", "--prompt", "paper", "--grader", "token-f1")
    document = json.loads(result.stdout)
    assert (document["accuracy"], document["settings"]["questions"]) == (0.0, 2)
    assert document["settings"]["prompt"] == "paper"
    assert document["settings"]["grader"] == "token-f1>=0.5"
    assert document["methods"]["G-NLL"]["auroc"] is None
    assert document["methods"]["G-NLL"]["aurc"] == 1.0


def test_regrading_needs_no_model(evaluate: Run, again: Run, mixed: Path, tmp_path: Path) -> None:
    evaluate("--data", mixed)
    before = (tmp_path / "out" / "answers.jsonl").read_bytes()
    found = json.loads(again("--grader", "rouge-l", "--grader", "exact-match", "--json").stdout)
    assert (found["settings"]["grader"], found["title"]) == ("rouge-l>=0.3", "tiny on mixed")
    assert {"correct: rouge-l>=0.3", "correct: exact-match"} <= set(graded(tmp_path)[0])
    mended = [{"question": q, "answers": [a.text]} for q, a in zip(ASKED[:8], kept(tmp_path), strict=True)]
    data = jsonl(tmp_path / "mended.jsonl", [*mended, {"question": "new", "answers": ["x"]}])
    result = again("--data", data, "--json")
    assert json.loads(result.stdout)["accuracy"] == 1.0
    assert "1 of 9 questions have no answer yet" in result.stderr
    assert (tmp_path / "out" / "answers.jsonl").read_bytes() == before


def test_people_decide_where_there_are_labels(evaluate: Run, again: Run, mixed: Path, tmp_path: Path) -> None:
    evaluate("--data", mixed)
    sheet = tmp_path / "out" / "labels.csv"
    fill(sheet, ["TRUE", *["FALSE"] * 6, ""], delimiter=";")
    filled = sheet.read_bytes()
    result = again("--labels", sheet, "--json")
    document = json.loads(result.stdout)
    assert (document["settings"]["grader"], document["accuracy"]) == ("human", pytest.approx(1 / 7))
    assert document["ungraded"] == {"human": 1}
    assert "1 of 8 answers have no verdict by human; they are left out of the results." in result.stderr
    assert sheet.read_bytes() == filled  # a person's work is never overwritten
    sheet.write_bytes(filled.replace(b"TRUE", b"perhaps"))
    wrong = again("--labels", sheet)
    assert wrong.exit_code == 1
    assert "row 2 has 'perhaps' under correct" in flat(wrong.stderr)


def test_ctrl_c_keeps_what_is_there_and_the_run_goes_on(
    evaluate: Run, mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert evaluate("--data", mixed, "--output", tmp_path / "whole" / "out").exit_code == 0
    calls: list[int] = []
    generate = LanguageModel.generate_batch

    def interrupted(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:  # the warm-up and the first batch have passed
            raise KeyboardInterrupt
        return generate(*arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(LanguageModel, "generate_batch", interrupted)
        stopped = evaluate("--data", mixed)
    assert (stopped.exit_code, stopped.stdout) == (130, "")
    assert (
        f"4 of 8 answers are kept in {tmp_path / 'out' / 'answers.jsonl'}. Run the same command again" in stopped.stderr
    )
    result = evaluate("--data", mixed)
    assert "Answering: 4 of 8" in result.stderr
    assert timeless(kept(tmp_path)) == timeless(kept(tmp_path / "whole"))


def test_a_run_with_other_settings_is_refused_and_the_difference_named(evaluate: Run, mixed: Path) -> None:
    evaluate("--data", mixed)
    result = evaluate("--data", mixed, "--seed", 3)
    assert result.exit_code == 1
    assert "estimators.ln_pe.plan.seed is 3 and was 0" in flat(result.stderr)


def test_bad_lines_are_named_and_the_rest_evaluated(evaluate: Run, tmp_path: Path) -> None:
    data = jsonl(
        tmp_path / "bad.jsonl",
        [
            {"question": "Größe\n\t„x“?\u2028", "answers": ["\N{SNOWMAN}", "二\n三"], "id": "a"},
            {"question": "no reference"},
            {"question": ASKED[0], "answers": ["x"], "id": "a"},
            {"question": f" {ASKED[0]}", "answers": ["x"], "id": "b"},
        ],
    )
    result = evaluate("--data", data)
    assert result.exit_code == 5
    assert f"Warning: {data}, line 2 has no reference answer" in result.stderr
    assert f"Note: {data}, line 4 repeats line 3" in result.stderr
    assert f"Note: {data}, line 3 has the id 'a' of line 1; both are kept." in result.stderr
    assert "AUROC is undefined: there is nothing to tell apart" in flat(result.stdout)
    assert [row["references"] for row in graded(tmp_path)] == ["\N{SNOWMAN}\n二\n三", "x"]


def test_several_runs_make_one_report(evaluate: Run, run: Run, model_folder: Path, mixed: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    other = jsonl(tmp_path / "other.jsonl", [json.loads(line) for line in mixed.read_text().splitlines()[:4]])
    assert evaluate("--data", other, "--output", tmp_path / "first").exit_code == 0
    both = ("--output", tmp_path / "both", "--output", tmp_path / "first")
    result = run("evaluate", "--model", model_folder, "--max-tokens", TOKENS, *METHODS, "--data", mixed, *both)
    assert result.exit_code == 0, result.stderr
    page = (tmp_path / "both" / "report.html").read_text()
    assert "tiny on mixed" in page
    assert "tiny on other" in page
    assert list((tmp_path / "both" / "tables").glob("*.csv"))


def test_questions_are_put_as_the_program_words_them(evaluate: Run, mixed: Path, tmp_path: Path) -> None:
    template = "Answer in one word, as {{this}}.\n{question}"
    (tmp_path / "prompt.txt").write_text(template + "\n")
    held = evaluate("--data", mixed, "--prompt", f"@{tmp_path / 'prompt.txt'}")
    assert held.exit_code == 0, held.stderr
    settings = read_record(tmp_path / "out" / "answers.jsonl", EvaluatedAnswer)[0]
    assert settings["prompt"] == template
    assert settings["prompt_template"].startswith("chat+prompt-")
    again = evaluate("--data", mixed, "--prompt", template.replace("one", "a"))
    assert again.exit_code == 1
    assert "other settings: prompt" in flat(again.stderr)


def test_learned_scores_are_left_out_where_there_are_too_few_labels(
    run: Run, model_folder: Path, mixed: Path, tmp_path: Path
) -> None:
    result = run(
        "evaluate", "--model", model_folder, "--data", mixed, "--output", tmp_path / "out", "--no-report",
        "--max-tokens", TOKENS, "--methods", "states", "--methods", "gnll",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "Note: FusedStates is left out. FusedStates takes at least" in flat(result.stderr)
    assert "FusedStates" not in result.stdout
    (answer, *_) = kept(tmp_path)
    features = answer.scores["states"].features
    assert features["gnll"] == pytest.approx(answer.uncertainty("gnll"))
    assert graded(tmp_path)[0]["FusedStates"] == ""


def test_samples_are_drawn_for_some_of_each_kind(
    evaluate: Run, mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_SAMPLED", 3)
    result = evaluate("--data", mixed)
    assert result.exit_code == 0, result.stderr
    answers = kept(tmp_path)
    scored = [answer.uncertainty("ln_pe") is not None for answer in answers]
    kinds = sorted(answer.kind or "" for answer, drawn in zip(answers, scored, strict=True) if drawn)
    assert kinds == ["even"] * 3 + ["odd"] * 3
    assert [row["ms: LN-PE"] != "" for row in graded(tmp_path)] == scored
    monkeypatch.setattr(runs, "_SAMPLED", 2)
    refused = evaluate("--data", mixed)
    assert refused.exit_code == 1
    assert "sampled_questions" in refused.stderr

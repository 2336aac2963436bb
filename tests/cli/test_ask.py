"""`ask`: answers, abstentions and their exit codes, for people and for machines; and models that think."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import Result
from safetensors.torch import load_file, save_file

from semgrad_guard import Calibration, Guard, LanguageModel, Policy
from semgrad_guard.cli.terminal import ExitCode
from tests.thinking import ANSWERS, CAPITALS, FOLDER, QUESTIONS, THOUGHTS, written

from .helpers import ASKED, TOKENS, Run, flat, jsonl, saved


@pytest.fixture
def ask(run: Run, model_folder: Path) -> Run:
    return lambda *arguments, **stdin: run("ask", "--model", model_folder, "--max-tokens", 4, *arguments, **stdin)


def test_json_is_one_document_and_nothing_else(ask: Run) -> None:
    result = ask("What is item 1?", "--json", "--estimator", "semgrad")
    record = json.loads(result.stdout)
    assert record["question"] == "What is item 1?"
    shown = [record[name] for name in ("schema", "status", "action", "estimator")]
    assert shown == [2, "scored", "answer", "semgrad"]
    assert record["uncertainty"] == record["semgrad"] > 0
    assert record["text"]
    assert (record["threshold"], record["details"]["enforced"]) == (None, False)


def test_the_dtype_is_chosen(ask: Run) -> None:
    plain, half = (
        json.loads(ask("What is item 1?", "--json", *chosen).stdout) for chosen in ((), ("--dtype", "bfloat16"))
    )
    assert (plain["details"]["settings"]["dtype"], half["details"]["settings"]["dtype"]) == ("float64", "bfloat16")


def test_a_calibration_gives_confidence_and_a_threshold(ask: Run, calibration: Path) -> None:
    made = Calibration.load(calibration)
    record = json.loads(ask("What is item 2?", "--json", "--calibration", calibration).stdout)
    assert (record["details"]["calibration_id"], record["threshold"]) == (made.id, made.threshold)
    assert record["confidence"] == made.confidence(record["uncertainty"]) > 0.9
    assert record["promised"] is (record["action"] == "answer")


def test_a_question_is_put_as_the_calibration_put_its_own(
    ask: Run, on_passages: tuple[Path, list[object]], tmp_path: Path
) -> None:
    calibration, way = on_passages
    (tmp_path / "passage.txt").write_text("What is item 3? It is seven.\n")
    passage = ("--context", f"@{tmp_path / 'passage.txt'}")
    record = json.loads(ask("What is item 3?", *way, *passage, "--json", "--calibration", calibration).stdout)
    assert record["promised"] is (record["action"] == "answer") is True
    for other in (way, [*way[2:], *passage], [*way[:2], *passage]):
        result = ask("What is item 3?", *other, "--json", "--calibration", calibration)
        assert result.exit_code == ExitCode.ERROR or not json.loads(result.stdout)["promised"]


@pytest.fixture
def at(calibration: Path, tmp_path: Path) -> Callable[[float], Path]:
    """The usual calibration with another threshold."""
    made = Calibration.load(calibration)
    return lambda threshold: made.with_content(threshold=threshold, grid=(threshold,)).save(tmp_path / "at.json")


def test_an_abstention_has_a_code_and_shows_what_it_withholds_and_why(ask: Run, at: Callable[[float], Path]) -> None:
    draft = json.loads(ask("What is item 1?", "--json").stdout)["text"]
    nothing = ("--calibration", at(0.0))
    withheld = ask("What is item 1?", *nothing, "--json")
    record = json.loads(withheld.stdout)
    assert (withheld.exit_code, record["action"], record["details"]["enforced"]) == (3, "abstain", True)
    assert (record["text"], record["draft"], record["promised"]) == ("I don't know.", draft, False)
    shown = ask("What is item 1?", *nothing).stdout
    assert "I don't know." in shown
    assert "withheld: " in shown
    assert "is above the threshold" in shown
    answered = ask("What is item 1?", "--calibration", at(1e9), "--json")
    record = json.loads(answered.stdout)
    assert (answered.exit_code, record["action"], record["details"]["enforced"]) == (0, "answer", True)


def test_the_question_may_come_from_stdin(ask: Run) -> None:
    piped = json.loads(ask("-", "--json", stdin="What is item 1?\n").stdout)
    given = json.loads(ask("What is item 1?", "--json").stdout)
    assert (piped["question"], piped["uncertainty"]) == (given["question"], given["uncertainty"])


def test_a_system_message_is_another_prompt(ask: Run, calibration: Path) -> None:
    """Decided as usual, and not promised."""
    usual = json.loads(ask("What is item 1?", "--json", "--calibration", calibration).stdout)
    assert (usual["details"]["familiar"], usual["details"]["unfamiliar"]) == (True, [])
    other = json.loads(ask("What is item 1?", "--json", "--system", "Be brief.", "--calibration", calibration).stdout)
    assert (other["details"]["familiar"], other["promised"]) == (False, False)
    assert "it begins with a turn of the role system" in other["details"]["unfamiliar"][0]


def test_the_embedded_models_calibration_is_used_where_it_fits(
    ask: Run, calibration: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("semgrad_guard.cli.score")  # the package has a function of this name
    monkeypatch.setattr(module, "POCKET", str(model_folder))
    monkeypatch.setattr("semgrad_guard.pocket.CALIBRATION_PATH", calibration)
    used = ask("What is item 1?", "--json")
    assert json.loads(used.stdout)["details"]["calibration_id"] == Calibration.load(calibration).id
    left_out = ask("What is item 1?", "--json", "--estimator", "gnll")
    assert left_out.exit_code == 0
    assert json.loads(left_out.stdout)["details"]["calibration_id"] is None
    assert "Note: The embedded model's calibration does not fit and is left out." in left_out.stderr
    assert "estimator is 'gnll' and was 'hybridgrad'" in left_out.stderr


def test_the_embedded_model_answers(run: Run) -> None:
    result = run("ask", "What is the capital of France?", "--json")
    assert result.exit_code in (0, 3)
    record = json.loads(result.stdout)
    assert record["details"]["model"] == "pocket"
    assert record["uncertainty"] > 0


@pytest.fixture
def ask_nan(run: Run, model_folder: Path, tmp_path: Path) -> Run:
    """A model whose weights are not finite."""
    folder = shutil.copytree(model_folder, tmp_path / "nan")
    path = folder / "model.safetensors"
    save_file({name: t * float("nan") for name, t in load_file(path).items()}, path, metadata={"format": "pt"})
    return lambda *more: run("ask", "What?", "--model", folder, "--max-tokens", 4, *more)


def test_an_answer_without_a_score_is_withheld_and_an_error(ask_nan: Run) -> None:
    result = ask_nan("--json")
    assert result.exit_code == 6
    record = json.loads(result.stdout)
    assert (record["action"], record["status"], record["text"]) == ("abstain", "failed", "I don't know.")
    assert "The answer cannot be scored: the model's logits are not finite" in result.stderr
    shown = ask_nan().stdout
    assert "abstained" in shown
    assert "not finite" in shown


def test_a_model_without_a_template_or_with_anothers_tokenizer_is_doubted(
    run: Run, tmp_path: Path, make_language_model: Callable[..., LanguageModel]
) -> None:
    bare = saved(tmp_path / "bare", make_language_model(chat_template=None))
    result = run("ask", "What?", "--model", bare, "--max-tokens", 3, "--json")
    assert result.exit_code == 0
    assert "Warning: The model has no chat template" in result.stderr
    larger = saved(tmp_path / "larger", make_language_model(vocab_size=2000))
    result = run("ask", "What?", "--model", larger, "--max-tokens", 3, "--json")
    assert "Warning: The tokenizer has 258 tokens and the model 2000: is it another model's?" in result.stderr
    other = saved(tmp_path / "other", make_language_model(eos_token_id=7))
    result = run("ask", "What?", "--model", other, "--max-tokens", 3, "--json")
    assert "The tokenizer ends a text with token 257 and the model with 7" in result.stderr


def test_control_characters_never_reach_the_terminal() -> None:
    from semgrad_guard.cli.terminal import printable

    assert printable("a\x1b[31mb\x07\tc\nd\u202e") == "a\ufffd[31mb\ufffd\tc\nd\ufffd"


def test_an_answer_outside_the_promise_says_so(run: Run, model_folder: Path, calibration: Path) -> None:
    ask = ("ask", ASKED[0], "--model", model_folder, "--calibration", calibration)
    assert "promise" not in flat(run(*ask, "--max-tokens", TOKENS).stdout)
    shown = flat(run(*ask, "--max-tokens", 1).stdout)
    assert "promise none: the answer was cut off after 1 tokens" in shown


# Models that think, in the commands: what is graded and promised, and the switch that turns thinking off.


OFF = ("--template-option", "enable_thinking=false")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Questions whose references occur in every thought, and in half of the answers."""
    return jsonl(tmp_path / "asked.jsonl", ({"question": q, "answers": [right]} for q, right in QUESTIONS.items()))


def calibrated(run: Run, questions: Path, output: Path, *options: str) -> Result:
    rates = ("--alpha", "0.9", "--delta", "0.5")
    return run("calibrate", "--model", FOLDER, "--data", questions, "--output", output, *rates, *options)


def test_thoughts_are_neither_graded_nor_promised(run: Run, questions: Path, tmp_path: Path) -> None:
    result = calibrated(run, questions, tmp_path / "calibration.json")
    assert "2 of 4 answers wrong" in flat(result.output)
    assert "It is" not in result.output


def test_thinking_is_turned_off_and_the_calibration_is_bound_to_that(run: Run, questions: Path, tmp_path: Path) -> None:
    output, question = tmp_path / "calibration.json", next(iter(QUESTIONS))
    result = calibrated(run, questions, output, *OFF)
    assert "2 of 4 answers wrong" in flat(result.output)
    guarded = ("ask", question, "--model", FOLDER, "--calibration", output, "--json")
    assert json.loads(run(*guarded, *OFF).stdout)["status"] == "scored"
    assert "prompt_template" in run(*guarded).stderr


@pytest.mark.filterwarnings("error:No artists")
def test_a_thought_is_no_part_of_an_answer(run: Run, questions: Path, tmp_path: Path) -> None:
    question = next(iter(QUESTIONS))
    answer = json.loads(run("ask", question, "--model", FOLDER, "--json").stdout)
    assert (answer["text"], answer["status"]) == (ANSWERS[question], "scored")
    assert answer["reasoning"] == THOUGHTS[question]
    text = jsonl(tmp_path / "text.jsonl", [{"question": question, "response": written(question)}])
    result = run("score", "--model", FOLDER, "--data", text, "--json")
    scored = json.loads(result.stdout)
    assert scored["uncertainty"] == pytest.approx(answer["uncertainty"], rel=1e-3)
    evaluated = run(
        "evaluate", "--model", FOLDER, "--data", questions, "--output", tmp_path / "run", "--methods", "mean_entropy"
    )
    assert "cut off within its reasoning" not in flat(evaluated.output)
    cut = json.loads(run("ask", question, "--model", FOLDER, "--max-tokens", 6, "--json").stdout)
    assert (cut["status"], cut["action"]) == ("unscored", "abstain")


@pytest.mark.parametrize("named_in_thought", [False, True], ids=["half are right", "only the thoughts are"])
def test_the_promise_is_about_the_answers(run: Run, tmp_path: Path, named_in_thought: bool) -> None:
    """A hundred questions: each of the four 25 times. A thought names two cities, and one of them is the answer."""
    others = {
        q: next(city for city in pair if city != ANSWERS[q])
        for q, pair in zip(QUESTIONS, CAPITALS.values(), strict=True)
    }
    references = others if named_in_thought else QUESTIONS
    rows = [{"question": question, "answers": [city]} for question, city in references.items()] * 25
    data = jsonl(tmp_path / "data.jsonl", rows)
    output, rates = tmp_path / "calibration.json", ("--alpha", "0.05", "--delta", "0.2", "--copies", "keep")
    given = ("--model", FOLDER, "--data", data, "--output", output, *rates)
    result = run("calibrate", *given, "--template-option", "thinking=on", "--max-tokens", 40)
    wrong = 100 if named_in_thought else 50
    assert f"{wrong} of 100 answers wrong" in flat(result.output), result.output
    model = LanguageModel.from_pretrained(str(FOLDER), template_options={"thinking": "on"})
    verdicts = Guard(model, Policy.from_calibration(Calibration.load(output))).batch(list(QUESTIONS))
    promised = {question for question, verdict in zip(QUESTIONS, verdicts, strict=True) if verdict.promised}
    assert promised == {q for q in QUESTIONS if references[q] == ANSWERS[q]}

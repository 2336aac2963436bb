"""`score`: texts from anywhere, one or a file of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel, calibrate
from semgrad_guard.calibration import AnswerSentences, calibrate_sentences
from semgrad_guard.cli import from_options
from semgrad_guard.engine.scores import exactness
from semgrad_guard.engine.scores.tape import Row
from semgrad_guard.questions.data import Phrasing, Question
from semgrad_guard.questions.run import run_binding

from .helpers import ASKED, Run, flat, jsonl


@pytest.fixture
def score(run: Run, model_folder: Path) -> Run:
    return lambda *arguments: run("score", "--model", model_folder, *arguments)


def one(folder: Path, question: str, response: str) -> Path:
    return jsonl(folder / "one.jsonl", [{"question": question, "response": response}])


def responses(folder: Path, n: int = 3, **more: Any) -> Path:
    return jsonl(folder / "r.jsonl", ({"question": q, "response": f"it is {len(q)}", **more} for q in ASKED[:n]))


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_one_text(score: Run, tmp_path: Path, language_model: LanguageModel) -> None:
    data = one(tmp_path, "Who wrote Emma?", "Jane Austen")
    result = score("--data", data, "--json")
    assert result.exit_code == 0
    (record,) = records(result.stdout)
    assert (record["threshold"], record["details"]["enforced"]) == (None, False)
    expected = HybridGrad()(language_model.evidence("Who wrote Emma?", "Jane Austen")).uncertainty
    assert record["uncertainty"] == pytest.approx(expected, rel=1e-12)
    assert (record["question"], record["response"]) == ("Who wrote Emma?", "Jane Austen")
    shown = score("--data", data).stdout
    assert "Jane Austen" in shown
    assert f"{expected:.4g}" in shown


def test_a_file_in_its_order(score: Run, tmp_path: Path) -> None:
    output = tmp_path / "scores.jsonl"
    result = score("--data", responses(tmp_path), "--output", output, "--json", "--estimator", "gnll")
    found = records(result.stdout)
    assert [record["question"] for record in found] == ASKED[:3]
    assert all(record["estimator"] == "gnll" and record["status"] == "scored" for record in found)
    assert all(record["action"] == "answer" and record["details"]["drift"] is None for record in found)
    assert output.read_text() == result.stdout
    assert f"3 scores are in {output}" in result.stderr


def test_context_and_system_are_part_of_the_prompt(score: Run, tmp_path: Path) -> None:
    plain = records(score("--data", responses(tmp_path, 1), "--json").stdout)[0]
    passage = records(score("--data", responses(tmp_path, 1, context="A passage."), "--json").stdout)[0]
    system = records(score("--data", responses(tmp_path, 1), "--json", "--system", "Be brief.").stdout)[0]
    assert len({record["uncertainty"] for record in (plain, passage, system)}) == 3
    assert passage["details"]["prompt_template"].startswith("context@")
    assert system["details"]["prompt_template"].startswith("chat+system-")


def test_texts_are_scored_with_the_prompt_of_a_calibration(
    score: Run, on_passages: tuple[Path, list[object]], tmp_path: Path
) -> None:
    made, way = on_passages
    rows = ({"question": q, "contexts": [f"{q} It is seven."], "response": "so"} for q in ASKED)
    texts = jsonl(tmp_path / "t.jsonl", rows)
    found = records(score("--data", texts, "--calibration", made, "--json", *way).stdout)
    assert [record["details"]["unfamiliar"] for record in found] == [[]] * 60
    plain = records(score("--data", texts, "--calibration", made, "--json").stdout)
    assert all(record["details"]["unfamiliar"] for record in plain)


def test_a_long_file_is_cut_in_the_terminal(score: Run, tmp_path: Path) -> None:
    shown = score("--data", responses(tmp_path, 23)).stdout
    assert ASKED[19] in shown
    assert ASKED[20] not in shown
    assert "and 3 more: --output FILE or --json gives them all" in shown


def test_a_calibration_decides_and_drift_is_reported(score: Run, tmp_path: Path, language_model: LanguageModel) -> None:
    data = responses(tmp_path, 60)
    scores = [record["uncertainty"] for record in records(score("--data", data, "--json").stdout)]
    binding = run_binding(language_model, HybridGrad(), options=GenerationOptions(), template=Phrasing().name())
    bound = binding.model_copy(update={"model": "tiny"})
    made = calibrate(scores, [score <= sorted(scores)[50] for score in scores], alpha=0.2, delta=0.2, binding=bound)
    path = made.save(tmp_path / "c.json")

    quiet = score("--data", data, "--calibration", path)
    assert quiet.exit_code == 0
    assert "Drift: none seen (60 scores, p = " in flat(quiet.stdout)
    assert "P(correct)" in quiet.stdout
    found = records(score("--data", data, "--calibration", path, "--json").stdout)
    assert all(record["details"]["drift"] is False for record in found)
    assert all(record["confidence"] == made.confidence(record["uncertainty"]) for record in found)
    assert all((record["action"] == "answer") is made.lets_through(record["uncertainty"]) for record in found)
    assert {record["action"] for record in found} == {"answer", "abstain"}

    longer = jsonl(tmp_path / "longer.jsonl", ({"question": q, "response": q * 3} for q in ASKED))
    moved = score("--data", longer, "--calibration", path, "--json")
    assert all(record["details"]["drift"] is True for record in records(moved.stdout))
    assert "Drift: the scores have moved since calibration (60 scores" in moved.stderr


def test_what_cannot_be_scored_is_named_and_the_rest_scored(score: Run, tmp_path: Path) -> None:
    good = responses(tmp_path).read_text().splitlines()
    odd = [{"question": "q", "response": ""}, {"id": "x7", "question": "q", "response": "long " * 100}]
    data = jsonl(tmp_path / "broken.jsonl", [good[0], good[1][:20], good[2], good[0], *odd])
    result = score("--data", data, "--json")
    assert result.exit_code == 5
    assert len(records(result.stdout)) == 2
    assert f"Warning: {data}, line 2 is not valid JSON" in result.stderr
    assert f"Warning: {data}, line 5 has no response to score" in result.stderr
    assert f"Note: {data}, line 4 repeats line 1" in result.stderr
    assert "'x7' is left out: prompt (" in result.stderr
    alone = score("--data", one(tmp_path, "q", "long " * 100))
    assert alone.exit_code == 1
    assert "none of the texts could be scored" in alone.stderr


def test_by_sentence(score: Run, tmp_path: Path, language_model: LanguageModel) -> None:
    text = "Tea is a drink. It grows in Assam."
    given = ("--data", one(tmp_path, "What is tea?", text), "--by", "sentence")
    (record,) = records(score(*given, "--json").stdout)
    found = language_model.segments("What is tea?", text)
    assert [(part["start"], part["end"]) for part in record["sentences"]] == [(0, 16), (16, 34)]
    for part, segment in zip(record["sentences"], found, strict=True):
        assert part["uncertainty"] == pytest.approx(segment.scores.hybridgrad, rel=1e-4)
    shown = flat(score(*given, "--output", tmp_path / "s.jsonl").stdout)
    assert "Tea is a drink." in shown
    assert "It grows in Assam." in shown
    assert f"{record['sentences'][0]['uncertainty']:.4g}" in shown
    (written,) = records((tmp_path / "s.jsonl").read_text())
    assert written["sentences"] == record["sentences"]


def test_a_calibration_by_sentence_decides_about_every_sentence(
    score: Run, tmp_path: Path, language_model: LanguageModel
) -> None:
    text = "Tea is a drink. It grows in Assam. Milk is white."
    conversation = Phrasing().conversation(Question(question=ASKED[0]))
    found = language_model.segments(conversation, text)
    scores = [part.scores.hybridgrad for part in found if part.scores is not None and part.scores.hybridgrad]
    options = GenerationOptions()
    binding = run_binding(language_model, HybridGrad(), options=options, template="chat", on_doubt="drop")
    made = calibrate_sentences(
        [AnswerSentences(str(i), "a", sorted(scores)[:2], [True, False], [None, None]) for i in range(40)],
        on_doubt="drop",
        binding=binding.model_copy(update={"model": "tiny"}),
        prompts=[language_model.render(conversation).form] * 40,
        alpha=0.2,
        delta=0.1,
    )
    calibration = made.save(tmp_path / "c.json")
    data = jsonl(tmp_path / "r.jsonl", [{"question": ASKED[0], "response": text}])
    given = ("--data", data, "--calibration", calibration)
    result = score(*given, "--json")
    assert result.exit_code == 0, result.stderr
    (record,) = records(result.stdout)
    expected = ["deliver" if value <= (made.threshold or 0) else "drop" for value in scores]
    assert [one["action"] for one in record["sentences"]] == expected
    assert [one["promised"] for one in record["sentences"]] == [action == "deliver" for action in expected]
    assert [text[one["start"] : one["end"]] for one in record["sentences"]] == [part.text for part in found]
    shown = flat(score(*given, "--by", "sentence").stdout)
    assert "promised sentence" in shown
    assert "drop no" in shown
    assert "It grows in Assam." in shown


@pytest.mark.parametrize("size", [1, 2, 50])
def test_batches_change_nothing_but_the_time(
    score: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(from_options, "BATCH", size)
    rows = [{"question": q, "response": "ab " * (i + 1), "id": str(i)} for i, q in enumerate(ASKED[:5])]
    long = {"question": "q", "response": "long " * 100, "id": "long"}
    data = jsonl(tmp_path / "r.jsonl", [*rows[:2], long, *rows[2:]])
    result = score("--data", data, "--json")
    assert result.exit_code == 5
    assert result.stderr.count("'long' is left out") == 1
    found = records(result.stdout)
    assert [record["id"] for record in found] == [row["id"] for row in rows]
    for row, record in zip(rows, found, strict=True):
        (alone,) = records(score("--data", one(tmp_path, row["question"], row["response"]), "--json").stdout)
        assert record["uncertainty"] == pytest.approx(alone["uncertainty"], rel=1e-9)
        assert (record["response"], record["status"]) == (alone["response"], alone["status"])
        for key in ("scored_tokens", "semantic_token", "prompt_template", "settings"):
            assert record["details"][key] == alone["details"][key]


def test_a_batch_is_one_replay(score: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    replayed = exactness.replayed

    def counted(twin: Any, batch: Sequence[Row], *arguments: Any, **options: Any) -> Any:
        rows.append(len(batch))
        return replayed(twin, batch, *arguments, **options)

    monkeypatch.setattr(exactness, "replayed", counted)
    monkeypatch.setattr(from_options, "BATCH", 3)
    score("--data", responses(tmp_path, 5), "--json", "--device", "cpu")  # a model of its own
    assert rows[-2:] == [3, 2], "before it, those of the self-check"


def test_the_promise_that_the_labels_support_is_delivered_where_it_is_chosen(
    score: Run, tmp_path: Path, language_model: LanguageModel
) -> None:
    conversation, text = Phrasing().conversation(Question(question=ASKED[0])), "Tea is a drink."
    own = language_model.score(conversation, text)
    assert own.hybridgrad is not None
    binding = run_binding(language_model, HybridGrad(), options=GenerationOptions(), template="chat")
    made = calibrate(
        [own.hybridgrad * (1 + row / 80) for row in range(80)],
        [(29 * row) % 80 >= row for row in range(80)],
        binding=binding.model_copy(update={"model": "tiny"}),
        prompts=[language_model.render(conversation).form] * 80,
        copies="keep",
        alpha=0.1,
        delta=0.1,
    )
    assert made.reachable is not None
    data = jsonl(tmp_path / "r.jsonl", [{"question": ASKED[0], "response": text}])
    given = ("--data", data, "--calibration", made.save(tmp_path / "c.json"), "--json", "-q")
    plain, chosen = score(*given), score(*given, "--on-no-threshold", "reachable")
    fields = [
        [record["action"], record["promised"], record["details"]["alpha"], record["details"]["requested_alpha"]]
        for result in (plain, chosen)
        for record in records(result.stdout)
    ]
    assert fields == [["abstain", False, None, None], ["answer", True, made.reachable.alpha, 0.1]]
    assert "To deliver these: --on-no-threshold reachable." in flat(plain.stderr)
    shown = "at most 32% are wrong, with 90% probability (10% was asked for, and these labels do not support it)"
    assert shown in flat(chosen.stderr)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "d.jsonl", [{"question": "q", "answers": ["a"], "response": "r"}])


def test_without_ray(run: Run, data: Path) -> None:
    if find_spec("ray"):
        pytest.skip("ray is installed")
    result = run("score", "--ray", 2, "--model", "pocket", "--data", data)
    assert result.exit_code == 1
    assert "ray is not installed. Run: pip install 'semgrad-guard[ray]'" in flat(result.stderr)


def test_parquet_without_its_library(run: Run, tmp_path: Path) -> None:
    if find_spec("pyarrow"):
        pytest.skip("pyarrow is installed")
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    result = run("score", "--data", tmp_path / "d.parquet")
    assert result.exit_code == 1
    assert "pip install 'semgrad-guard[parquet]'" in flat(result.stderr)

"""Questions from CSV, a JSON list and Hugging Face datasets: read as JSON Lines are, broken ones named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from semgrad_guard.cli import from_options
from semgrad_guard.errors import DataFileError, MissingExtraError
from semgrad_guard.questions.data import Question, read_questions

ROWS = [
    {"question": "Who wrote Emma?", "answers": ["Jane Austen", "Austen"], "id": "1", "kind": "book"},
    {"question": "Where is\n„Köln“; exactly?", "answers": ["Germany, of course"], "id": "2"},
]


def csv(folder: Path, text: str, *, name: str = "q.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty: its first row names the columns"),
        ("prompt,answers\nq,a\n", r'has no "question": its columns are "prompt", "answers" \(name the right one'),
        ("question,answers\n", "holds no question"),
        ('question,answers\n"q,a\n', "Is every quotation mark closed"),
    ],
)
def test_csv_files_that_are_none(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(DataFileError, match=reason):
        read_questions(csv(tmp_path, text))


def test_text_that_breaks_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "q.json"
    path.write_text("[\n{")
    with pytest.raises(DataFileError, match=r"is not valid JSON: .* at line 2, column"):
        read_questions(path)
    path.write_bytes("\ufeffquestion".encode("utf-16-le")[:-1])
    with pytest.raises(DataFileError, match="UTF-16 text with a fault"):
        read_questions(path)


def test_shared_ids_are_named_and_kept(tmp_path: Path) -> None:
    path = csv(tmp_path, "question,answers,id\nq1,a,7\nq2,a,7\nq3,a,\nq4,a,\n")
    found = read_questions(path)
    assert len(found.rows) == 4
    assert found.shared_ids == (f"{path}, row 3 has the id '7' of row 2; both are kept.",)


def test_without_its_package_a_dataset_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'semgrad-guard\[datasets\]'"):
        read_questions("hub:allenai/sciq@validation")


def test_a_dataset_saved_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [
        {"question": "q1", "answer": {"value": "a", "aliases": ["b"]}},
        {"question": "q2", "answer": {"value": "-"}},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one = datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), split="train")
    one.save_to_disk(tmp_path / "one")
    found = read_questions(f"hub:{tmp_path / 'one'}")
    assert found.rows == (Question(question="q1", answers=("a", "b")),)
    assert 'row 2 has "-" in "answer"' in str(found.problems[0])
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "two")
    with pytest.raises(DataFileError, match="has the splits train, test; choose one"):
        read_questions(f"hub:{tmp_path / 'two'}")
    assert len(read_questions(f"hub:{tmp_path / 'two'}@test").rows) == 1
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    assert read_questions(f"hub:{tmp_path / 'files'}").rows == (Question.model_validate(ROWS[0]),)
    with pytest.raises(DataFileError, match="Cannot load the dataset 'nobody/nothing'"):
        read_questions("hub:nobody/nothing")


def test_the_embedded_models_questions_have_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pocket").write_text('{"question": "mine?", "answers": ["yes"]}\n')
    assert len(read_questions("pocket").rows) > 500
    assert [row.question for row in read_questions("./pocket").rows] == ["mine?"]
    assert [row.question for row in read_questions(from_options.stream("./pocket")).rows] == ["mine?"]


def test_a_folder_of_files(tmp_path: Path) -> None:
    (tmp_path / "kind=history").mkdir()
    (tmp_path / "_temporary").mkdir()
    (tmp_path / "kind=history" / "b.jsonl").write_text('{"question": "2?", "answers": ["b"]}\n')
    (tmp_path / "a.csv").write_text("question,answers,kind\n1?,a,plain\n")
    (tmp_path / "kind=history" / "c.jsonl").write_text('{"question": "1?", "answers": ["a"]}\nbroken\n')
    (tmp_path / "_temporary" / "d.jsonl").write_text('{"question": "3?", "answers": ["c"]}\n')
    (tmp_path / "notes.txt").write_text("no data")
    found = read_questions(tmp_path)
    assert [(row.question, row.kind) for row in found.rows] == [("1?", "plain"), ("2?", "history")]
    assert f"{tmp_path / 'kind=history' / 'c.jsonl'}, line 2 is not valid JSON" in str(found.problems[0])
    assert f"line 1 repeats {tmp_path / 'a.csv'}, row 2 and" in found.duplicates[0]


def test_a_disk_is_no_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semgrad_guard.questions.data_files._MOST_FILES", 2)
    for name in ("a.json", "b.csv", "c.jsonl"):
        (tmp_path / name).write_text("never read")
    with pytest.raises(DataFileError, match="holds more than 2 data files; name the one with the questions"):
        read_questions(tmp_path)

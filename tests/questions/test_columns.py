"""The columns of well-known data: read by their names, never guessed where another fits better, the others named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from semgrad_guard.errors import DataFileError
from semgrad_guard.questions.data import Question, QuestionFile, read_questions

Q = "Where?"


def read(folder: Path, content: object, name: str = "q.jsonl", **options: Any) -> QuestionFile:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_questions(path, **options)


@pytest.mark.parametrize(
    ("record", "answers", "context", "unread"),
    [
        # RAGAS 0.1 and 0.2: `answer` and `response` are the model's
        ({"question": Q, "answer": "m", "contexts": ["p", "r"], "ground_truth": "a"}, ("a",), "p\n\nr", ("answer",)),
        ({"question": Q, "answer": "m", "contexts": ["p"], "ground_truths": ["a", "b"]}, ("a", "b"), "p", ("answer",)),
        # DeepEval, LangSmith
        (
            {"input": Q, "actual_output": "m", "expected_output": "a", "context": ["x"], "retrieval_context": ["p"]},
            *(("a",), "p", ("actual_output", "context")),
        ),
        ({"inputs": {"question": Q}, "outputs": {"answer": "a"}, "id": "7"}, ("a",), None, ()),
        ({"inputs": {"input": Q}, "outputs": {"o": "m"}, "reference_outputs": {"o": "a"}}, ("a",), None, ("response",)),
        # an experiment of LangSmith as a table, and its runs: there, `outputs` is the model's
        (
            {"inputs.question": Q, "outputs.answer": "m", "reference.answer": "a", "feedback.x": 1, "example_id": "7"},
            *(("a",), None, ("feedback.x", "example_id", "response")),
        ),
        ({"inputs.question": Q, "outputs.answer": "a", "dataset_id": "7"}, ("a",), None, ("dataset_id",)),
        ({"inputs": f'{{"question": "{Q}"}}', "outputs": '{"answer": "a"}'}, ("a",), None, ()),
        # MS MARCO
        (
            {"query": Q, "answers": ["a"], "passages": {"passage_text": ["p", "r"], "is_selected": [1, 0]}},
            ("a",),
            "p\n\nr",
            (),
        ),
        ({"query": Q, "answers": ["No Answer Present."], "passages": [{"passage_text": "p"}]}, (), "p", ()),
        # Natural Questions: simplified, the hub's
        (
            {
                "question_text": Q,
                "document_text": "in a b c",
                "annotations": [
                    {
                        "short_answers": [{"start_token": 1, "end_token": 3}],
                        "long_answer": {"start_token": 0},
                        "yes_no_answer": "NONE",
                    }
                ],
            },
            *(("a b",), None, ("document_text",)),
        ),
        (
            {
                "question": {"text": Q, "tokens": []},
                "document": {"html": ""},
                "annotations": {
                    "long_answer": [{"start_token": -1}, {"start_token": -1}],
                    "short_answers": [{"text": [], "start_token": []}, {"text": [], "start_token": []}],
                    "yes_no_answer": [-1, -1],
                },
            },
            *((), None, ("document",)),
        ),
        # lists that are written as text, as pandas does
        ({"question": Q, "ground_truths": "['a', 'it\\'s']", "contexts": "['p', 'r']"}, ("a", "it's"), "p\n\nr", ()),
    ],
)
def test_the_columns_of_known_data(
    tmp_path: Path, record: dict[str, Any], answers: tuple[str, ...], context: str | None, unread: tuple[str, ...]
) -> None:
    found = read(tmp_path, record)
    assert found.problems == ()
    assert (found.rows[0].question, found.rows[0].answers, found.rows[0].context) == (Q, answers, context)
    assert found.unread == unread


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("viewer.json", {"rows": [{"row_idx": 0, "row": {"question": Q, "answer": "a", "context": "p"}}]}),
        ("columns.json", {"question": {"0": Q}, "answer": {"0": "a"}, "context": {"0": "p"}}),
        ("split.json", {"columns": ["question", "answer", "context"], "index": [0], "data": [[Q, "a", "p"]]}),
        ("lists.json", {"question": [Q], "answers": [["a"]], "context": ["p"]}),
        ("excel.csv", f"Question,Ground Truth ,Retrieved-Contexts,Answer\n{Q},a,p,m\n"),
        ("camel.jsonl", {"userInput": Q, "groundTruth": "a", "retrievedContexts": ["p"], "answer": "m"}),
        ("q.csv", f'Question,Ground_Truth,Contexts,answer\n{Q},a,"[\'p\']",m\n'),
        ("deepeval.csv", f"input,actual_output,expected_output,retrieval_context\n{Q},m,a,p\n"),
        ("q.tsv", f"user_input\treference\tretrieved_contexts\n{Q}\ta\tp\n"),
    ],
)  # fmt: skip
def test_files_that_nest_their_records(tmp_path: Path, name: str, content: object) -> None:
    (row,) = read(tmp_path, content, name).rows
    assert (row.question, row.answers, row.context) == (Q, ("a",), "p")


def test_passages_that_deepeval_joined(tmp_path: Path) -> None:
    for name, context in (("expected_output", "p\n\nr"), ("answer", "p|r")):
        (row,) = read(tmp_path, f"input,{name},context\n{Q},a,p|r\n", "q.csv").rows
        assert row.context == context


def test_the_answer_beside_a_ground_truth_is_what_is_scored(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"question": Q, "answer": "m", "ground_truth": "a"}, needs="response").rows
    assert (row.response, row.answers) == ("m", ())


@pytest.mark.parametrize(
    "text", ["nan", "NaN", "None", "null", "NULL", "N/A", "n/a", "NA", "<NA>", "-", "—", "?", "Paris|x", "Paris | Lyon"]
)
@pytest.mark.parametrize("name", ["q.jsonl", "q.csv"])
def test_references_that_are_none_are_reported(tmp_path: Path, text: str, name: str) -> None:
    lines = [json.dumps({"question": question, "answer": a}) for question, a in ((Q, text), ("Who?", "a"))]
    content = f"question,answer\n{Q},{text}\nWho?,a\n" if name == "q.csv" else "\n".join(lines)
    found = read(tmp_path, content, name)
    assert [row.question for row in found.rows] == ["Who?"]
    assert f'has {json.dumps(text, ensure_ascii=False)} in "answer"' in str(found.problems[0])
    meant: Any = {"text": text} if "|" in text else [text]
    assert read(tmp_path, {"question": Q, "answer": meant}).rows[0].answers == (text,)


def test_a_text_beside_an_instruction_is_no_question(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match=r'has no "question": .*--column question='):
        read(tmp_path, {"instruction": "Translate.", "input": Q, "answer": "a"})


def test_columns_can_be_named(tmp_path: Path) -> None:
    record = {"Frage": Q, "gold": "a", "answer": "m", "support": ["p"], "question": "other"}
    found = read(tmp_path, record, question_field="frage", answers_field="gold", context_field="support")
    assert found.rows == (Question(question=Q, answers=("a",), context="p", response="m"),)
    assert found.unread == ("answer", "question")
    with pytest.raises(DataFileError, match='has no "golden"; its columns are "Frage", "gold", "answer"'):
        read(tmp_path, record, answers_field="golden")


@pytest.mark.parametrize("column", ["ground_truth", "Reference", "expectedOutput", "golden_answers"])
def test_a_models_answer_is_no_reference_where_the_reference_is_missing(tmp_path: Path, column: str) -> None:
    found = read(tmp_path, f"question,answer,{column}\nWho?,m,a\n{Q},m,\nWhen?,m,  \n", "q.csv")
    assert [row.answers for row in found.rows] == [("a",)]
    assert ["no reference answer" in str(problem) for problem in found.problems] == [True, True]
    (row,) = read(tmp_path, f"question,answer,{column}\n{Q},m,\n", "q.csv", needs="response").rows
    assert row.response == "m"
    lines = [{"question": "Who?", "answer": "m", column: "a"}, {"question": Q, "answer": "m"}]
    for both in (lines, lines[::-1]):
        with pytest.raises(DataFileError, match="has a model's answer, next to the reference"):
            read(tmp_path, "\n".join(map(json.dumps, both)))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"ground_truth": "a", "reference": "b"}, 'has "ground_truth" and "reference", which are one field'),
        (
            {"answers": ["a"], "ground_truth": "b", "answer": "m"},
            'has "answers" and "ground_truth", which are one field',
        ),
        ({"answer": "a", "query": "Whose?"}, 'has "question" and "query", which are one field; keep one, or name'),
        (
            {"answer": "a", "context": "p", "passage": "r"},
            "which are one field; keep one, or name it (--column context=NAME)",
        ),
        ({"answer": "a", "Answer": "b"}, 'has "answer" and "Answer", which are one field'),
        ({"answer": "a", "response": "m", "actual_output": "n"}, 'has "response" and "actual_output", which are one'),
        ({"inputs": {}, "outputs": {"answer": "m"}, "run_type": "llm"}, "has no reference answer"),
        ({"inputs": {}, "outputs": {"answer": "a", "output": "b"}}, 'has a wrong "reference_outputs"'),
        ({"answer": {"value": "<unk>", "aliases": []}}, 'has "<unk>" in "answer"'),
        ({"answer": "a", "context": "nan"}, "has 'nan' in \"context\", where a passage is expected"),
        ({"answer": "a", "context": 7}, 'has a wrong "context": it must be text'),
        ({"annotations": [{"short_answers": [{}]}], "document_text": "x"}, "laid out like"),
        ({"answer": "['a' 'b']"}, 'has a list in "answer" that cannot be read'),  # numpy's: Python would join its texts
    ],
)
def test_what_contradicts_itself_is_a_broken_line(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    lines = [{"question": "Who?", "answers": ["a"]}, {"question": Q, **record}]
    found = read(tmp_path, "\n".join(map(json.dumps, lines)))
    assert message in str(found.problems[0])


REFUSED = "refused"
FORMS: list[tuple[str, Any]] = [
    # one answer, whatever marks are in it
    *[
        (text, (text,))
        for text in (
            *("Paris", "AC/DC", "9/11", "km/h", "and/or", "TCP/IP", "1/2", "1 / 2", "24/7", "60 miles/hour", "1990/91"),
            *(
                "https://example.org/a/b",
                "/usr/bin",
                "AT&amp;T",
                "Q&#39;s",
                "[sic]",
                "(Paris)",
                "(a) Paris",
                "{x}",
                "Na",
            ),
            *(
                "To be, or not to be: that is the question",
                "Paris, France",
                "f(x)",
                "print('a')",
                "1,000",
                "a - b",
            ),
            "It was signed in 1648; the war ended soon after that year.",
            "It is either the input/output unit or the memory, as far as we know.",
        )
    ],
    # containers whose content is plain
    ('["a", "b"]', ("a", "b")),
    ("['a', 'b']", ("a", "b")),
    ("('a', 'b')", ("a", "b")),
    ("{'b', 'a'}", ("b", "a")),
    ('{"text": "a; b"}', ("a; b",)),
    ("['a/b or c']", ("a/b or c",)),
    ("[1, 2]", ("1", "2")),
    ("{'text': ['a', 'a'], 'answer_start': [0, 7]}", ("a",)),
    ('{"text": ["a"], "answer_start": [0]}', ("a",)),
    ("{'text': [], 'answer_start': []}", ()),
    ("{'value': 'a', 'aliases': ['b']}", ("a", "b")),
    ("[{'text': 'a'}, {'text': 'b'}]", ("a", "b")),
    ("{'text': ['a; b', 'a/b or c'], 'answer_start': [0, 0]}", ("a; b", "a/b or c")),
    ("[]", ()),
    ("Natalia sold 3 + 4 = <<3+4=7>>7 clips.\n#### 7", ("7",)),
    ("#### 1,000", ("1,000",)),
    # several answers, or a container, that no rule reads
    *[
        (text, REFUSED)
        for text in (
            *(
                "a; b",
                "Paris;Lutetia",
                "Paris; City of Paris; Lutetia",
                "Paris|Lutetia",
                "Paris||Lutetia",
                "Paris\tLutetia",
            ),
            *("Paris / Lutetia", "Paris/ Lutetia", "Paris/Lutetia", "yes/no", "No/Yes", "Paris or Lutetia"),
            "The seeds pass through your body; Nothing happens; You eat the seeds.",
            *("['a' 'b']", "[a, b]", "['a', b]", "[1 2 3]", "('a')", "()", "(1, 2)", "{}", "set()", "frozenset({'a'})"),
            *("array(['a'], dtype=object)", "{'text': array(['a'], dtype=object), 'answer_start': array([0])}"),
            *("{'text': ['a'], 'answer_start': [nan]}", "dict_values(['a'])", "{a, b}", '{"a", b}', "{'other': 'a'}"),
            *("Answer(text='a')", "[Document(page_content='a')]", "[<x.Answer object at 0x7f0a>]", "deque(['a'])"),
            *("OrderedDict([('text', ['a'])])", "tensor([1, 2])", "nan", "None", "True", '["a; b"]'),
        )
    ],
]


@pytest.mark.parametrize("name", ["q.jsonl", "q.csv", "hub.csv"])
@pytest.mark.parametrize(("cell", "outcome"), FORMS)
def test_a_cell_is_never_misread(tmp_path: Path, cell: str, outcome: Any, name: str) -> None:
    column = "ground_truth" if name == "hub.csv" else "answer"
    records = [{"question": Q, column: cell}, {"question": "Who?", column: "x"}]
    if name == "q.jsonl":
        content = "\n".join(map(json.dumps, records))
    else:
        content = f"question,{column}\n" + "\n".join(
            ",".join('"' + text.replace('"', '""') + '"' for text in record.values()) for record in records
        )
    found = read(tmp_path, content, name)
    if outcome == REFUSED:
        assert [row.question for row in found.rows] == ["Who?"]
        assert f'"{column}' in str(found.problems[0])
    else:
        assert (found.problems, found.rows[0].answers) == ((), outcome)


@pytest.mark.parametrize(
    ("cell", "outcome"),
    [
        ("It is (in ['a', 'b']) here.", "It is (in ['a', 'b']) here."),
        ("[1] As he said; it is so / not so.", "[1] As he said; it is so / not so."),
        ("['p', 'r']", "p\n\nr"),
        ("('p', 'r')", "p\n\nr"),
        ("{'title': ['T'], 'sentences': [['p.', ' r.']]}", "T\np. r."),
        ("[{'page_content': 'p', 'metadata': {}}]", "p"),
        ('[{"title": "T", "paragraph_text": "p"}]', "p"),
        ("[Document(metadata={'a': 1}, page_content='p')]", REFUSED),
        ("{'title': array(['T'], dtype=object), 'sentences': array([])}", REFUSED),
        ("array(['p'], dtype=object)", REFUSED),
        ("Document(page_content='p')", REFUSED),
        ('{"name": "Bob"}', REFUSED),
        ('["{\\"name\\": \\"Bob\\"}"]', '{"name": "Bob"}'),
        ("<x.Document object at 0x7f0a>", REFUSED),
    ],
)
@pytest.mark.parametrize("name", ["q.jsonl", "q.csv"])
def test_a_passage_is_never_misread(tmp_path: Path, cell: str, outcome: str, name: str) -> None:
    quoted = cell.replace('"', '""')
    content = json.dumps({"question": Q, "answer": "a", "context": cell}) + '\n{"question": "Who?", "answer": "x"}'
    content = f'question,answer,context\n{Q},a,"{quoted}"\nWho?,x,\n' if name == "q.csv" else content
    found = read(tmp_path, content, name)
    if outcome == REFUSED:
        assert '"context"' in str(found.problems[0])
    else:
        assert (found.problems, found.rows[0].context) == ((), outcome)


FOUR = ["Lyon", "Nice", "Paris", "Brest"]


@pytest.mark.parametrize(
    ("record", "outcome"),
    [
        ({"choices": FOUR, "answer": 2}, "Paris"),
        ({"choices": FOUR, "answer": "2"}, "Paris"),
        ({"choices": FOUR, "answer": "C"}, "Paris"),
        ({"choices": FOUR, "answer": "c"}, "Paris"),
        ({"options": FOUR, "answer": "C"}, "Paris"),
        ({"options": {"A": "Lyon", "B": "Paris"}, "answer": "B"}, "Paris"),
        ({"choices": {"text": FOUR, "label": ["A", "B", "C", "D"]}, "answer": "C"}, "Paris"),
        ({"choices": {"text": FOUR, "label": ["1", "2", "3", "4"]}, "answer": "C"}, REFUSED),
        ({"choices": str(FOUR), "answer": "2"}, "Paris"),
        ({"choices": FOUR, "answer": "Paris"}, "Paris"),
        ({"choices": ["3", "1", "4", "2"], "answer": "2"}, REFUSED),
        ({"choices": ["3", "1", "4", "2"], "answer": 2}, "4"),
        ({"choices": FOUR, "answer": 4}, REFUSED),
        ({"choices": FOUR, "answer": "E"}, REFUSED),
        ({"choices": "Lyon Nice Paris", "answer": "C"}, REFUSED),
        ({"choices": FOUR, "answers": [2]}, "Paris"),
        ({"choices": FOUR, "answers": "[2]"}, "Paris"),
        ({"A": "x", "B": "y", "answer": "7"}, "7"),
        ({"answer": 2}, "2"),
        ({"answer": "C"}, "C"),
    ],
)
def test_a_mark_of_a_choice_is_the_choice(tmp_path: Path, record: dict[str, Any], outcome: str) -> None:
    found = read(
        tmp_path, "\n".join(map(json.dumps, ({"question": "Who?", "answers": ["x"]}, {"question": Q, **record})))
    )
    if outcome == REFUSED:
        assert "cannot be" in str(found.problems[0])
    else:
        assert found.rows[1].answers == (outcome,)


@pytest.mark.parametrize("grade", ["label", "hallucination", "Is_Correct"])
@pytest.mark.parametrize("value", [0, 1, True, "0", "yes"])
def test_an_answer_next_to_its_grade_is_a_models(tmp_path: Path, grade: str, value: Any) -> None:
    record = {"question": Q, "answer": "Lyon", grade: value}
    with pytest.raises(DataFileError, match=f'has "{grade}" next to "answer".*--column answers=answer'):
        read(tmp_path, record)
    assert read(tmp_path, record, answers_field="answer").rows[0].answers == ("Lyon",)
    assert read(tmp_path, {**record, grade: "geography"}).rows[0].answers == ("Lyon",)
    assert read(tmp_path, {**record, "response": "Nice"}).rows[0].answers == ("Lyon",)
    assert read(tmp_path, {**record, "ground_truth": "Paris"}).rows[0].answers == ("Paris",)

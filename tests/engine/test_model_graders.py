"""Graders that are classifiers: tiny checkpoints on disk, through the real loading code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from semgrad_guard.engine.text_pairs import AnswerEquivalence, Entailment
from semgrad_guard.errors import InputError, ModelNotFoundError, UnsupportedModelError
from semgrad_guard.grading import AnswerToGrade
from semgrad_guard.grading.by_name import Bem, EntailmentGrader, load_graders

from .tiny_pair_models import MNLI, save_pair_model

TRIPLES = [("who?", "Jane Austen", "Austen"), ("q", "Köln\n", "東京"), ("where?", "Rome", ""), ("q", "a", "a")]
ANSWERS = [
    AnswerToGrade(f"q{i}", text, ("one", f"ref {i}")) for i, text in enumerate(["x", "y y", "zzz", "w", "v", "u"])
]


@pytest.fixture(scope="module")
def bem_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair_model(tmp_path_factory.mktemp("bem") / "bem", labels=("LABEL_0", "LABEL_1"))


@pytest.fixture(scope="module")
def nli_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair_model(tmp_path_factory.mktemp("nli") / "nli", labels=MNLI)


def directly(folder: Path, question: str, reference: str, candidate: str) -> float:
    """P(equivalent) from ids laid out by hand: [CLS] candidate [SEP] | reference [SEP] question [SEP]."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).float().eval()
    first, second, third = (
        tokenizer(t, add_special_tokens=False)["input_ids"] for t in (candidate, reference, question)
    )
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    head = [cls, *first, sep]
    # The port's texts hold a blank before every mark; a byte-level tokenizer sees it, WordPiece does not.
    blank = tokenizer(" ", add_special_tokens=False)["input_ids"]
    tail = [*second, *blank, sep, *blank, *third, sep]
    ids, types = torch.tensor([head + tail]), torch.tensor([[0] * len(head) + [1] * len(tail)])
    with torch.no_grad():
        return float(model(input_ids=ids, token_type_ids=types).logits.softmax(-1)[0, 1])


def test_bem_reads_candidate_reference_and_question_in_its_order(bem_folder: Path) -> None:
    found = AnswerEquivalence.from_pretrained(str(bem_folder)).probabilities(TRIPLES)
    assert found == pytest.approx([directly(bem_folder, *triple) for triple in TRIPLES], abs=1e-5)
    assert len({round(p, 4) for p in found}) == len(found)


def test_a_separator_in_an_answer_is_no_separator(bem_folder: Path) -> None:
    model = AnswerEquivalence.from_pretrained(str(bem_folder))
    assert model.probabilities([("q", "r", "a[SEP]b")]) == model.probabilities([("q", "r", "a b")])


def test_bem_grades_by_its_best_reference_and_its_threshold(bem_folder: Path) -> None:
    model = AnswerEquivalence.from_pretrained(str(bem_folder))
    best = [max(model.probabilities([(a.question, r, a.text) for r in a.references])) for a in ANSWERS]
    threshold = sorted(best)[3]
    grader = Bem(model, threshold)
    assert grader.grade(ANSWERS) == [p >= threshold for p in best]
    assert grader.grade(ANSWERS).count(True) == 3
    assert Bem(model).name == f"bem({bem_folder})>=0.7"
    assert grader.grade([AnswerToGrade("q", "x", ())]) == [False]


def test_entailment_reads_the_answer_first_and_takes_any_reference(nli_folder: Path) -> None:
    model = Entailment.from_pretrained(str(nli_folder))
    expected = [
        any(
            s.entails
            for s in model.probabilities([(f"{a.question} {a.text}", f"{a.question} {r}") for r in a.references])
        )
        for a in ANSWERS
    ]
    grader = EntailmentGrader(model)
    assert grader.grade(ANSWERS) == expected
    assert grader.name == f"nli({nli_folder})"


def test_a_sentence_is_right_where_the_passage_or_a_reference_entails_it(nli_folder: Path) -> None:
    model = Entailment.from_pretrained(str(nli_folder))
    items = [replace(answer, sentence=True, passage="p p") for answer in ANSWERS]
    expected = [
        any(
            s.entails
            for s in model.probabilities([*((f"{a.question} {r}", a.text) for r in a.references), ("p p", a.text)])
        )
        for a in items
    ]
    assert EntailmentGrader(model).grade(items) == expected
    assert EntailmentGrader(model).grade([replace(one, references=()) for one in items]) == [
        s.entails for s in model.probabilities([("p p", a.text) for a in items])
    ]


def test_what_is_no_such_model_is_refused(bem_folder: Path, nli_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="has 3 labels"):
        AnswerEquivalence.from_pretrained(str(nli_folder))
    with pytest.raises(UnsupportedModelError, match="entail"):
        load_graders([f"nli={bem_folder}"])
    with pytest.raises(ModelNotFoundError):
        load_graders([f"bem={tmp_path}"])


def test_graders_by_name(bem_folder: Path, nli_folder: Path) -> None:
    found = load_graders(["bem=" + str(bem_folder), "exact-match", "nli"], nli=str(nli_folder))
    assert [grader.name for grader in found] == [f"bem({bem_folder})>=0.7", "exact-match", f"nli({nli_folder})"]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "at least one grader"),
        (["guess"], "there is no grader 'guess'; there are contains, exact-match, token-f1, rouge-l, nli="),
        (["exact-match=x"], "there is no grader 'exact-match=x'"),
        (["nli"], "the grader 'nli' needs a model: nli=FOLDER or hub id"),
        (["bem="], "the grader 'bem' needs a model"),
        (["judge"], "judge=PROVIDER:MODEL"),
        (["rouge-l", "rouge-l"], "the grader rouge-l>=0.3 is named twice"),
    ],
)
def test_names_that_are_none_are_refused_before_anything_loads(specs: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_graders(specs)

"""Models of pairs: tiny checkpoints on disk, loaded through the real loading code; and which answers mean the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from semgrad_guard.errors import InputError, ModelNotFoundError, UnsupportedModelError
from semgrad_guard.estimators.text_pairs import CrossEncoder, Entailment, F1Equivalence, clusters
from tests.engine.tiny_pair_models import ARCHITECTURES, MNLI, save_pair_model

PAIRS = [("Paris", "It is Paris."), ("It is Paris.", "Paris"), ("Paris", "Rome"), ("", "x"), ("Ä", "東京\n")]


def directly(folder: Path, first: str, second: str) -> torch.Tensor:
    """The logits by transformers alone, one pair at a time and so without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return model(**tokenizer(first, second, return_tensors="pt")).logits[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_probabilities_are_those_of_each_pair_alone(tmp_path: Path, architecture: str) -> None:
    folder = save_pair_model(tmp_path / "nli", labels=MNLI, architecture=architecture)
    model = Entailment.from_pretrained(str(folder))
    model.together = 3
    found = model.probabilities(PAIRS)
    for pair, scores in zip(PAIRS, found, strict=True):
        contradiction, neutral, entailment = directly(folder, *pair).softmax(-1).tolist()
        assert scores.entailment == pytest.approx(entailment, abs=1e-5)
        assert scores.neutral == pytest.approx(neutral, abs=1e-5)
        assert scores.contradiction == pytest.approx(contradiction, abs=1e-5)
        assert scores.entails == (entailment > max(neutral, contradiction))


def test_labels_are_read_from_the_checkpoint(tmp_path: Path) -> None:
    usual = save_pair_model(tmp_path / "usual", labels=MNLI)
    turned = save_pair_model(tmp_path / "turned", labels=("entailment", "neutral", "contradiction"))
    one = Entailment.from_pretrained(str(usual)).probabilities(PAIRS)
    other = Entailment.from_pretrained(str(turned)).probabilities(PAIRS)
    assert [s.entailment for s in one] == pytest.approx([s.contradiction for s in other])
    assert len({round(s.entailment, 6) for s in one}) > 1


@pytest.mark.parametrize("labels", [("LABEL_0", "LABEL_1", "LABEL_2"), ("entailment", "not_entailment")])
def test_unnamed_labels_are_refused(tmp_path: Path, labels: tuple[str, ...]) -> None:
    folder = save_pair_model(tmp_path / "nli", labels=labels)
    with pytest.raises(UnsupportedModelError, match="id2label"):
        Entailment.from_pretrained(str(folder))


def test_similarities(tmp_path: Path) -> None:
    folder = save_pair_model(tmp_path / "stsb", labels=("LABEL_0",), architecture="roberta")
    found = CrossEncoder.from_pretrained(str(folder)).similarities(PAIRS)
    assert found == pytest.approx([directly(folder, *pair).sigmoid().item() for pair in PAIRS], abs=1e-5)
    with pytest.raises(UnsupportedModelError, match="3 outputs"):
        CrossEncoder.from_pretrained(str(save_pair_model(tmp_path / "nli", labels=MNLI)))


def test_a_pair_is_judged_once(tmp_path: Path) -> None:
    model = Entailment.from_pretrained(str(save_pair_model(tmp_path / "nli", labels=MNLI)))
    passes: list[int] = []
    model._model.register_forward_hook(lambda *call: passes.append(len(call[2].logits)))
    first = model.probabilities([*PAIRS, *PAIRS])
    assert model.probabilities(PAIRS) == first[: len(PAIRS)] == first[len(PAIRS) :]
    assert passes == [len(PAIRS)]
    assert model.probabilities([]) == []


def test_long_texts_are_cut_to_what_the_model_can_read(tmp_path: Path) -> None:
    for architecture in ARCHITECTURES:
        folder = save_pair_model(tmp_path / architecture, labels=MNLI, architecture=architecture)
        question = "A long question? " * 10
        pairs = [(f"{question} Paris", f"{question} {answer}") for answer in ("Paris", "Rome")]
        same, other = Entailment.from_pretrained(str(folder)).probabilities(pairs)
        assert same.entailment + same.neutral + same.contradiction == pytest.approx(1.0)
        assert same != other  # the answers at the end are read


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no folder"):
        Entailment.from_pretrained(str(tmp_path / "nowhere"))
    pickled = save_pair_model(tmp_path / "pickled", labels=MNLI, safe=False)
    with pytest.raises(ModelNotFoundError, match="safetensors"):
        Entailment.from_pretrained(str(pickled))
    whole = save_pair_model(tmp_path / "whole", labels=MNLI)
    headless = tmp_path / "headless"
    shutil.copytree(whole, headless)
    model = AutoModelForSequenceClassification.from_pretrained(whole)
    model.save_pretrained(headless, state_dict={k: v for k, v in model.state_dict().items() if "classifier" not in k})
    with pytest.raises(ModelNotFoundError, match="lacks"):
        Entailment.from_pretrained(str(headless))


TEXTS = st.lists(
    st.sampled_from(["", "Paris", "the Paris.", "Paris France", "It is Paris", "Rome", "rome"]), min_size=1
)


def test_by_words() -> None:
    pairs = [
        ("The Paris.", "paris"),
        ("Paris", "It is Paris"),
        ("New York", "New Delhi"),
        ("New York City", "New York"),
    ]
    assert F1Equivalence()(pairs, "q") == [True, False, False, True]
    assert F1Equivalence(0.25)(pairs, "q") == [True, True, True, True]
    assert [scores.entailment for scores in F1Equivalence().relations(pairs, "q")] == pytest.approx([1, 0.5, 0.5, 0.8])
    with pytest.raises(InputError):
        F1Equivalence(1.0)


@given(TEXTS, st.sampled_from([F1Equivalence(), F1Equivalence(0.25)]))
def test_clusters_one_text_after_the_other(texts: list[str], equivalence) -> None:
    heads: list[str] = []
    expected = []
    for text in texts:
        for number, head in enumerate(heads):
            if text == head or equivalence([(head, text)], "q") == [True]:
                expected.append(number)
                break
        else:
            expected.append(len(heads))
            heads.append(text)
    assert clusters(texts, "q", equivalence) == expected

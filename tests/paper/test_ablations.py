"""SemGrad's variants, read off shared replays: the same numbers as SemGrad configured to each of them."""

from __future__ import annotations

import pytest

from semgrad_guard import GenerationOptions, LanguageModel, SemGrad
from semgrad_guard.paper.experiment import semgrad_ablations


def test_every_variant_is_semgrad_so_configured(language_model: LanguageModel) -> None:
    questions = ["What is it?", "And a rather longer question?"]
    generations = language_model.generate_batch(questions, GenerationOptions(max_tokens=4))
    variants = {
        "l2 norm": SemGrad(norm="l2"),
        "without entropy weights": SemGrad(weighted=False),
        "l = L-1": SemGrad(layers=(3,)),
        "l = 2L/3 .. L-1": SemGrad(layers=(2, 3)),
        "l = 1 .. L-1": SemGrad(layers=(1, 2, 3)),
        "last token": SemGrad(token=-1),
    }
    found = semgrad_ablations(language_model.n_layers)  # L = 4: there is no layer L-4 but the embedding
    assert list(found) == list(variants)
    for generation in generations:
        for name, variant in variants.items():
            expected = variant(generation.evidence).uncertainty
            assert found[name](generation.evidence) == pytest.approx(expected, rel=1e-9), name


def test_the_variants_of_deep_and_shallow_models() -> None:
    deep = semgrad_ablations(12)
    assert deep["l = L-4"].layers == (8,)
    assert deep["l = 2L/3 .. L-1"].layers == (8, 9, 10, 11)
    assert deep["last token"].layers == tuple(range(7, 12))
    assert deep["l = L-4"].objective == deep["last token"].objective  # one replay
    assert semgrad_ablations(2) == {}
    assert list(semgrad_ablations(3)) == [name for name in deep if name != "l = L-4"]


def test_an_empty_answer_has_none(language_model: LanguageModel) -> None:
    class Empty:
        @staticmethod
        def gradients(_: object) -> None:
            return None

    assert all(ablation(Empty()) is None for ablation in semgrad_ablations(4).values())  # type: ignore[arg-type]

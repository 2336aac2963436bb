"""Values in another spelling of their type: a list for a tuple, one text for several, NumPy's numbers."""

from __future__ import annotations

from collections import deque
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from langchain_semgrad_guard import ChatSemGrad
from llama_index_semgrad_guard import SemGradLLM
from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel, Policy, SemGrad, gradient_scores
from semgrad_guard.engine.objective import Objective
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import Sampling
from semgrad_guard.guard import Terms


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["\n"], ("\n",)),
        (["a", "b"], ("a", "b")),
        (("a",), ("a",)),
        ("abc", ("abc",)),
        (deque(["a"]), ("a",)),
        (np.array(["a", "b"]), ("a", "b")),
        ([], ()),
    ],
)
def test_stop_strings_come_in_any_sequence(language_model: LanguageModel, given: Any, kept: tuple[str, ...]) -> None:
    options = GenerationOptions(stop=given, max_tokens=4)
    assert options == GenerationOptions(stop=kept, max_tokens=4)
    assert {options}
    assert language_model.generate("hello", options) is not None
    for kind in (ChatSemGrad, SemGradLLM):
        assert kind(model="pocket", stop=given).stop == kept
        assert kind(model="pocket")._writing({"stop": given}).stop == kept


@pytest.mark.parametrize(
    "given", [{"a"}, frozenset("a"), {"a": 1}, iter(["a"]), 5, b"a", [5], [None], ["a", ""], "", [["a"]]]
)
@pytest.mark.parametrize(
    "make",
    [
        lambda stop: GenerationOptions(stop=stop),
        lambda stop: ChatSemGrad(model="pocket", stop=stop),
        lambda stop: SemGradLLM(model="pocket", stop=stop),
        lambda stop: ChatSemGrad(model="pocket")._writing({"stop": stop}),
    ],
)
def test_other_stops_are_refused(make: Any, given: Any) -> None:
    with pytest.raises(InputError, match="stop") as refused:
        make(given)
    assert refused.value.__cause__ is None or not isinstance(refused.value.__cause__, TypeError)


@pytest.mark.parametrize("given", [[1, 2], (1, 2), range(1, 3), np.array([1, 2]), torch.tensor([1, 2])])
@pytest.mark.parametrize("kind", [Objective, SemGrad, HybridGrad])
def test_layers_come_in_any_sequence(kind: Any, given: Any) -> None:
    made = kind(layers=given)
    assert made == kind(layers=(1, 2))
    assert hash(made) == hash(kind(layers=(1, 2)))
    assert all(type(layer) is int for layer in made.layers)


@pytest.mark.parametrize("given", [{1, 2}, 1, "12", [1.5], [True], ["1"]])
@pytest.mark.parametrize("kind", [Objective, SemGrad, HybridGrad])
def test_other_layers_are_refused(kind: Any, given: Any) -> None:
    with pytest.raises(InputError, match="layers"):
        kind(layers=given)


NUMBERS = [
    (GenerationOptions, "max_tokens", np.int64(7), 7),
    (GenerationOptions, "max_thinking_tokens", np.uint8(7), 7),
    (GenerationOptions, "seed", np.int32(7), 7),
    (GenerationOptions, "top_k", torch.tensor(7), 7),
    (GenerationOptions, "temperature", np.float64(0.5), 0.5),
    (GenerationOptions, "top_p", Fraction(1, 2), 0.5),
    (Sampling, "count", np.int64(7), 7),
    (Objective, "token", np.int64(-2), -2),
    (Objective, "last_tokens", np.int64(2), 2),
    (HybridGrad, "tau", 2, 2.0),
    (Policy, "threshold", np.float32(0.5), 0.5),
    (lambda **one: Terms(policy=Policy(threshold=1.0), **one), "timeout", np.int64(3), 3.0),
]


@pytest.mark.parametrize(("kind", "name", "given", "kept"), NUMBERS)
def test_numbers_of_other_libraries_become_pythons(kind: Any, name: str, given: Any, kept: float) -> None:
    found = getattr(kind(**{name: given}), name)
    assert (found, type(found)) == (kept, type(kept))


@pytest.mark.parametrize(("kind", "name", "given", "kept"), NUMBERS)
@pytest.mark.parametrize("wrong", ["7", True, [7], 1.5])
def test_other_values_are_refused(kind: Any, name: str, given: Any, kept: float, wrong: Any) -> None:
    if isinstance(kept, float) and wrong == 1.5:
        wrong = complex(1)
    with pytest.raises(InputError, match=name):
        kind(**{name: wrong})


def test_t_star_is_any_whole_number(language_model: LanguageModel) -> None:
    model = language_model._model
    alone = gradient_scores(model, [5, 6, 7, 8], [9, 10], semantic_token=-2)
    for given in (np.int64(-2), torch.tensor(-2), [-2]):
        assert gradient_scores(model, [5, 6, 7, 8], [9, 10], semantic_token=given) == alone  # type: ignore[arg-type]
    for wrong in (-2.0, "-2", None, {-2}):
        with pytest.raises(InputError, match="semantic_token"):
            gradient_scores(model, [5, 6, 7, 8], [9, 10], semantic_token=wrong)  # type: ignore[arg-type]
    made = LanguageModel(model, language_model.tokenizer, name="m", semantic_token=np.int64(-2))  # type: ignore[arg-type]
    assert type(made.semantic_token) is int

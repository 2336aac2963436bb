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
from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel, Policy, gradient_scores
from semgrad_guard.engine.objective import Objective
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import Sampling
from semgrad_guard.guard import Terms

STOPPING = (GenerationOptions, lambda **stop: ChatSemGrad(model="pocket", **stop), lambda **stop: SemGradLLM(**stop))


@pytest.mark.parametrize("kind", STOPPING)
def test_stop_strings_come_in_any_sequence(kind: Any) -> None:
    for given in (["a", "b"], ("a", "b"), deque(["a", "b"]), np.array(["a", "b"])):
        assert kind(stop=given).stop == ("a", "b")
    assert (kind(stop="abc").stop, kind(stop=[]).stop) == (("abc",), ())
    for wrong in ({"a"}, {"a": 1}, iter(["a"]), 5, b"a", [5], [None], ["a", ""], "", [["a"]]):
        with pytest.raises(InputError, match="stop") as refused:
            kind(stop=wrong)
        assert not isinstance(refused.value.__cause__, TypeError)


@pytest.mark.parametrize("kind", [Objective, HybridGrad])
def test_layers_come_in_any_sequence(kind: Any) -> None:
    for given in ([1, 2], range(1, 3), np.array([1, 2]), torch.tensor([1, 2])):
        made = kind(layers=given)
        assert (made, hash(made)) == (kind(layers=(1, 2)), hash(kind(layers=(1, 2))))
        assert all(type(layer) is int for layer in made.layers)
    for wrong in ({1, 2}, 1, "12", [1.5], [True], ["1"]):
        with pytest.raises(InputError, match="layers"):
            kind(layers=wrong)


@pytest.mark.parametrize(
    ("kind", "name", "given", "kept"),
    [
        (GenerationOptions, "max_thinking_tokens", np.uint8(7), 7),
        (GenerationOptions, "top_k", torch.tensor(7), 7),
        (GenerationOptions, "top_p", Fraction(1, 2), 0.5),
        (Sampling, "count", np.int64(7), 7),
        (Objective, "token", np.int64(-2), -2),
        (HybridGrad, "tau", 2, 2.0),
        (Policy, "threshold", np.float32(0.5), 0.5),
        (lambda **one: Terms(policy=Policy(threshold=1.0), **one), "timeout", np.int64(3), 3.0),
    ],
)
def test_numbers_of_other_libraries_become_pythons(kind: Any, name: str, given: Any, kept: float) -> None:
    found = getattr(kind(**{name: given}), name)
    assert (found, type(found)) == (kept, type(kept))
    for wrong in ("7", True, [7], complex(1)):
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

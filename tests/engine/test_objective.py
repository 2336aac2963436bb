"""Which layers are differentiated, in both variants."""

from __future__ import annotations

import pytest

from semgrad_guard.engine.objective import Objective, Variant
from semgrad_guard.errors import EmptyLayerSpanError, InputError

from .oracle import official_span


@pytest.mark.parametrize(
    ("n_layers", "variant", "span"),
    [
        (3, "paper", (2,)),
        (4, "paper", (3,)),
        (5, "paper", (3, 4)),
        (32, "paper", tuple(range(17, 32))),
        (2, "official", (1,)),
        (4, "official", (2, 3)),
        (5, "official", (3, 4)),
        (32, "official", tuple(range(16, 32))),
    ],
)
def test_spans(n_layers: int, variant: Variant, span: tuple[int, ...]) -> None:
    assert Objective(variant).span(n_layers) == span
    assert tuple(official_span(n_layers, variant)) == span


@pytest.mark.parametrize("n_layers", range(3, 40, 2))
def test_the_variants_agree_on_odd_layer_counts(n_layers: int) -> None:
    assert Objective("paper").span(n_layers) == Objective("official").span(n_layers)


def test_named_layers_are_sorted_and_unique() -> None:
    assert Objective(layers=(3, 0, 3)).span(4) == (0, 3)


@pytest.mark.parametrize("layers", [(4,), (-1,), (0, 9)])
def test_layers_outside_the_model(layers: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"0 \.\. 3"):
        Objective(layers=layers).span(4)


def test_empty_spans_name_the_layer_count() -> None:
    with pytest.raises(EmptyLayerSpanError, match=r"2 decoder layer.*layers=\(1,\)"):
        Objective().span(2)
    with pytest.raises(EmptyLayerSpanError, match="4"):
        Objective(layers=()).span(4)


def test_an_unknown_variant() -> None:
    with pytest.raises(InputError, match="nature"):
        Objective("nature")  # pyright: ignore

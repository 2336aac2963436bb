"""A row's score does not depend on its neighbours, on its place, or on the padding they bring."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache, DynamicLayer

from semgrad_guard.engine.replay.batch import TokenBatch, cut
from semgrad_guard.engine.replay.captured_states import Capture
from semgrad_guard.engine.scores.gradient_scores import gradient_scores
from semgrad_guard.engine.scores.gradients import GradientScores
from semgrad_guard.engine.scores.scorer import Scorer
from semgrad_guard.errors import UnsupportedModelError

from .scoring_paths import Case, batch_of
from .tiny_models import shared, token_ids


@st.composite
def cases(draw: st.DrawFn) -> Case:
    length = draw(st.integers(1, 14))
    return Case(
        token_ids(length, draw(st.integers(0, 99))),
        token_ids(draw(st.integers(1, 5)), draw(st.integers(0, 99))),
        -draw(st.integers(1, length)),
    )


def together(name: str, rows: list[Case]) -> list[GradientScores]:
    return gradient_scores(
        shared(name),
        [r.prompt for r in rows],
        [r.response for r in rows],
        semantic_token=[r.semantic_token for r in rows],
    )


def close(one: GradientScores, other: GradientScores) -> bool:
    names = ("semgrad", "paragrad", "hybridgrad", "mean_entropy", "greedy_nll")
    pairs = [(getattr(one, n), getattr(other, n)) for n in names]
    return all((a is None and b is None) or math.isclose(a, b, rel_tol=1e-7) for a, b in pairs)


@settings(max_examples=15, deadline=None)
@given(
    data=st.data(),
    rows=st.lists(cases(), min_size=2, max_size=4),
    name=st.sampled_from(["llama", "gpt2", "mistral-sliding"]),
)
def test_rows_keep_their_scores_in_any_company_and_order(data: st.DataObject, rows: list[Case], name: str) -> None:
    alone = [together(name, [row])[0] for row in rows]
    order = data.draw(st.permutations(range(len(rows))))
    found = together(name, [rows[index] for index in order])
    assert all(close(scores, alone[index]) for scores, index in zip(found, order, strict=True))


def test_one_prompt_gives_one_score_and_a_list_gives_a_list() -> None:
    prompt, response = token_ids(6, 1), token_ids(2, 2)
    single = gradient_scores(shared("llama"), prompt, response, semantic_token=-2)
    [listed] = gradient_scores(shared("llama"), [prompt], [response], semantic_token=[-2])
    assert single == listed
    assert len(single.entropies) == len(single.log_probs) == 2
    assert single.mean_entropy == pytest.approx(sum(single.entropies) / 2)
    assert single.greedy_nll == pytest.approx(-sum(single.log_probs))


def test_the_mixture_and_its_options() -> None:
    scores = gradient_scores(shared("llama"), token_ids(6, 1), token_ids(2, 2), semantic_token=-2)
    a = math.exp(-scores.mean_entropy)
    assert scores.hybridgrad == pytest.approx((1 - a) * scores.semgrad + a * scores.paragrad)
    a = math.exp(-scores.mean_entropy / 2)
    assert scores.hybrid(tau=2, beta=5) == pytest.approx((1 - a) * scores.semgrad + 5 * a * scores.paragrad)


class TestTokenBatch:
    batch = batch_of([Case([11, 12, 13], [21], -1), Case([14], [22, 23, 24], -1)])

    def test_layout(self) -> None:
        assert self.batch.ids.tolist() == [[11, 12, 13, 21, 0, 0], [0, 0, 14, 22, 23, 24]]
        assert self.batch.mask.tolist() == [[1] * 6, [0, 0, 1, 1, 1, 1]]
        assert (self.batch.cut, self.batch.end) == (2, 5)

    def test_positions_count_from_each_rows_first_token(self) -> None:
        assert self.batch.inputs(2, 5)["position_ids"].tolist() == [[2, 3, 4], [0, 1, 2]]
        assert self.batch.inputs(2, 5)["attention_mask"].shape == (2, 5)

    def test_targets_and_the_states_that_predict_them(self) -> None:
        assert self.batch.targets().tolist() == [21, 22, 23, 24]
        states = torch.arange(12).view(2, 6, 1)
        assert self.batch.predicting(states, 0).squeeze(1).tolist() == [2, 8, 9, 10]
        assert self.batch.predicting(states[:, 2:], 2).squeeze(1).tolist() == [2, 8, 9, 10]

    def test_rows_without_their_padding(self) -> None:
        first, second = self.batch.rows()
        assert first.ids.tolist() == [[11, 12, 13, 21]]
        assert second.ids.tolist() == [[14, 22, 23, 24]]
        assert (second.prompt_columns, second.cut, second.end) == (1, 0, 3)


@pytest.mark.parametrize("pieces", [[9], [4, 5], [6, 3], [1] * 9, [7, 1, 1]], ids=str)
def test_a_capture_keeps_the_same_states_however_they_arrive(pieces: list[int]) -> None:
    """Prefill in one go, in chunks, or token by token; and no view of the whole prompt is kept alive."""
    hidden = torch.randn(2, 9, 3)
    capture = Capture(layer=1, start=6)
    for piece in hidden.split(pieces, dim=1):
        capture(piece)
    assert torch.equal(capture.states(), hidden[:, 6:])
    assert capture.states().untyped_storage().nbytes() == 2 * 3 * 3 * 4


def test_a_capture_is_what_the_model_itself_reports() -> None:
    model = shared("llama")
    batch = batch_of([Case(token_ids(9, 1), token_ids(3, 2), -4)])
    captured = Scorer(model).current_replayer().record(batch, 3)
    reported = model(input_ids=batch.ids[:, : batch.end], output_hidden_states=True).hidden_states[3]
    assert torch.allclose(captured.states, reported[:, batch.cut :], rtol=1e-12)


class TestCut:
    @staticmethod
    def cache() -> DynamicCache:
        cache = DynamicCache()
        for layer in range(2):
            cache.update(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), layer)
        return cache

    def test_it_is_read_only(self) -> None:
        cache = self.cache()
        keys = [layer.keys.clone() for layer in cache.layers]
        prefix = cut(cache, 3)
        assert prefix is not None
        for _ in range(2):
            joined, _ = prefix.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 1)
            assert joined.shape[-2] == 4
            assert prefix.get_seq_length() == 3
        assert all(torch.equal(layer.keys, before) for layer, before in zip(cache.layers, keys, strict=True))
        assert all(type(layer) is DynamicLayer for layer in cache.layers)

    def test_nothing_before_the_cut_is_no_cache(self) -> None:
        assert cut(self.cache(), 0) is None

    def test_a_cache_that_is_too_short(self) -> None:
        with pytest.raises(UnsupportedModelError, match="6"):
            cut(self.cache(), 6)


def test_ids_end_up_on_the_device_asked_for() -> None:
    batch = TokenBatch.of([[1, 2]], [[3]], [-1], "meta")
    assert batch.ids.device.type == batch.mask.device.type == "meta"

"""SPS against loops over all pairs, closed cases, and states against the model's own record."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.scores.gradient_scores import SemanticPreservation, last_states
from semgrad_guard.engine.scores.scorer import scorer_of
from semgrad_guard.errors import InputError, ScoringError
from semgrad_guard.records import SemanticToken

from .snapshots import unchanged
from .tiny_models import shared, token_ids

LAYERS, TOKENS, WIDTH = 3, 2, 5


def queries(counts: list[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, LAYERS, TOKENS, WIDTH, generator=generator, dtype=torch.float64) for n in counts]


def of(states: list[torch.Tensor]) -> SemanticPreservation:
    found = SemanticPreservation.empty(*states[0].shape[1:])
    for query in states:
        found.add(query)
    return found


def brute_force(states: list[torch.Tensor]) -> torch.Tensor:
    """The paper's three equations, one cosine at a time."""

    def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(a @ b / (a.norm() * b.norm()))

    found = torch.zeros(LAYERS, TOKENS, dtype=torch.float64)
    for layer in range(LAYERS):
        for token in range(TOKENS):
            h = [query[:, layer, token] for query in states]
            within = [[cosine(q[i], q[j]) for i in range(len(q)) for j in range(len(q)) if i != j] for q in h]
            across = [cosine(h[m][0], h[n][0]) for m in range(len(h)) for n in range(len(h)) if m != n]
            s_within = sum(sum(pairs) / len(pairs) for pairs in within) / len(h)
            found[layer, token] = s_within - sum(across) / len(across)
    return found


@settings(max_examples=25, deadline=None)
@given(counts=st.lists(st.integers(2, 5), min_size=2, max_size=5), seed=st.integers(0, 1000))
def test_equals_loops_over_all_pairs(counts: list[int], seed: int) -> None:
    states = queries(counts, seed)
    assert torch.allclose(of(states).scores, brute_force(states), rtol=1e-10, atol=1e-12)


def test_zero_vectors_count_as_unlike_everything() -> None:
    states = [torch.zeros(3, LAYERS, TOKENS, WIDTH), torch.ones(3, LAYERS, TOKENS, WIDTH)]
    found = of(states)
    assert float(found.similarity_across.abs().max()) == 0
    assert torch.allclose(found.similarity_within, torch.full((LAYERS, TOKENS), 0.5, dtype=torch.float64))


def test_too_little_to_compare() -> None:
    with pytest.raises(InputError, match="paraphrase"):
        of(queries([1, 2]))
    with pytest.raises(InputError, match="two queries"):
        _ = of(queries([2])).scores


@pytest.mark.parametrize("name", ["llama", "gemma2", "opt", "llama4-chunked", "jamba"])
def test_states_of_a_padded_batch_are_the_models_own(name: str) -> None:
    model = shared(name)
    rows = [token_ids(n, n) for n in (9, 4, 14)]
    prompts = [Prompt("", tuple(row), SemanticToken(-1, "last_token")) for row in rows]
    scorer = scorer_of(model)
    with unchanged(model):
        found = last_states(scorer, prompts, 4)
    assert found.shape == (3, model.config.num_hidden_layers, 4, 32)
    for row, states in zip(rows, found, strict=True):
        with torch.no_grad():
            record = model(input_ids=torch.tensor([row]), output_hidden_states=True, use_cache=False).hidden_states
        expected = torch.stack([layer[0, -4:] for layer in record[:-1]])
        assert float((states - expected).norm() / expected.norm()) < 1e-6


def test_states_of_a_model_that_records_no_embedding() -> None:
    """Mamba's record begins with the first layer's output; layer 0 is the embedding all the same."""
    model, row = shared("mamba"), token_ids(6, 1)
    found = last_states(scorer_of(model), [Prompt("", tuple(row), SemanticToken(-1, "last_token"))], 2)[0]
    assert torch.equal(found[0], model.get_input_embeddings()(torch.tensor(row[-2:])).detach())
    with torch.no_grad():
        record = model(input_ids=torch.tensor([row]), output_hidden_states=True, use_cache=False).hidden_states
    assert torch.allclose(found[1], record[0][0, -2:])


def test_states_that_are_not_finite_are_refused() -> None:
    broken = queries([2])[0]
    broken[1, 0, 0, 0] = float("nan")
    with pytest.raises(ScoringError, match="not finite"):
        of([broken])


def test_more_tokens_than_a_prompt_has() -> None:
    with pytest.raises(InputError, match="shortest prompt has 3"):
        last_states(scorer_of(shared("llama")), [Prompt("", (5, 6, 7), SemanticToken(-1, "last_token"))], 4)

"""Responses with context, in every tier, against plain autograd with the keys and values of the context detached."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.memory import FRUGAL, TokenBatch
from semgrad_guard.engine.scores.gradients import Tier
from semgrad_guard.engine.scores.scorer import Scorer
from semgrad_guard.errors import UnsupportedModelError
from tests.pairwise import in_turn

from .oracle import Reference, worst_relative_error
from .running_batches import Options, finished, joined, wrapped
from .scoring_paths import CASES, Case, answered, batch_of, score_parts_in_tier
from .test_exactness import TIERS, tolerance
from .tiny_models import ARCHITECTURES, STATEFUL, shared, token_ids

pytestmark = pytest.mark.usefixtures("softmax_in_the_dtype_of_its_input")

PARTS = (2, 1, 3)


def references(model: Any, objective: Objective) -> list[Reference]:
    """Of each part of the last case's response."""
    return [
        CASES[2].reference(model, objective, part=slice(begin, end), context=begin)
        for begin, end in pairwise(accumulate(PARTS, initial=0))
    ]


@in_turn(name=ARCHITECTURES, tier=TIERS)
def test_every_tier_equals_autograd_with_the_context_detached(name: str, tier: Tier) -> None:
    model, objective = shared(name), Objective(layers=(1, 2), last_tokens=7)
    row = batch_of(CASES[2:], objective, [PARTS])
    found = [score_parts_in_tier(tier, model, part, objective)[0][0] for part in row.parts_in_context()]
    expected = references(model, objective)
    assert max(map(worst_relative_error, found, expected)) < tolerance(name)


def test_rows_with_unequal_contexts_are_scored_together() -> None:
    model, objective = shared("gemma2"), Objective(layers=(1, 2))
    cases = [Case(token_ids(11, 1), token_ids(7, 2), -3), Case(token_ids(4, 3), token_ids(5, 4), -4), CASES[2]]
    before = [4, 2, 1]
    batch = TokenBatch.of(
        [case.prompt for case in cases],
        [case.response[own:] for case, own in zip(cases, before, strict=True)],
        [case.semantic_token for case in cases],
        "cpu",
        objective=objective,
        context=[case.response[:own] for case, own in zip(cases, before, strict=True)],
    )
    expected = [
        case.reference(model, objective, part=slice(own, None), context=own)
        for case, own in zip(cases, before, strict=True)
    ]
    for tier in TIERS:
        found = [parts[0] for parts in score_parts_in_tier(tier, model, batch, objective)]
        assert max(map(worst_relative_error, found, expected)) < tolerance("gemma2"), tier


@in_turn(name=["llama", "mistral-sliding", "gpt2"], kept=[{}, {"logit_bytes": 0, "output_bytes": 0}])
def test_a_generations_states_serve_every_sentence(name: str, kept: dict[str, int]) -> None:
    model, objective, scorer = shared(name), Objective(), Scorer(shared(name))
    (case, *_), captured = answered(name, lengths=(6, 1, 4), **kept)
    scores = scorer.score_sentences([(batch_of([case], objective, [PARTS]), captured.part([0], skip=9))], objective)[0]
    assert {one.tier for one in scores} == {"captured"}
    ends = pairwise(accumulate(PARTS, initial=0))
    expected = [case.reference(model, objective, part=slice(*own), context=own[0]) for own in ends]
    assert max(map(worst_relative_error, scores, expected)) < tolerance(name)


@pytest.mark.parametrize("layers", [(2, 2), (1, 2), (2, 1)])
def test_first_sentences_whose_states_begin_at_any_layer(layers: tuple[int, ...]) -> None:
    model, objective, scorer = shared("llama"), Objective(layers=(2,)), Scorer(shared("llama"))
    cases = CASES[0], Case(token_ids(20, 5), token_ids(6, 6), CASES[0].semantic_token)
    rows = [batch_of([case], objective) for case in cases]
    states = [scorer.current_replayer().record(row, layer) for row, layer in zip(rows, layers, strict=True)]
    scores = [own[0] for own in scorer.score_sentences(list(zip(rows, states, strict=True)), objective)]
    assert {one.tier for one in scores} == {"captured"}
    expected = [case.reference(model, objective) for case in cases]
    assert max(map(worst_relative_error, scores, expected)) < tolerance("llama")


@pytest.mark.parametrize(("name", "passes"), [("llama", 2), ("mistral-sliding", 3)])
def test_sentences_share_a_pass_with_the_ends_of_their_prompts(name: str, passes: int) -> None:
    """Behind the first; prompts have a pass of their own where a window is shorter than a row."""
    scorer, objective, seen = Scorer(shared(name)), Objective(layers=(2,)), list[int]()
    row = batch_of(CASES[2:], objective, [PARTS])
    states = scorer.current_replayer().record(row, 1)
    expected = scorer.score_sentences([(row, states)], objective)  # verified the first time
    layer = scorer.current_replayer().layers[-1]
    hook = layer.register_forward_pre_hook(lambda _, states: seen.append(len(states[0])))
    assert scorer.score_sentences([(row, states)], objective) == expected
    hook.remove()
    assert len(seen) == passes


def test_memory_for_no_activations() -> None:
    scorer, objective = Scorer(shared("llama")), Objective()
    row = batch_of(CASES[2:], objective, [PARTS])
    plenty = [one.semgrad for one in scorer.score_sentences([(row, None)], objective)[0]]
    scorer.memory = FRUGAL
    assert [one.semgrad for one in scorer.score_sentences([(row, None)], objective)[0]] == pytest.approx(plenty)


def test_whole_sequences_of_chunked_attention() -> None:
    model, objective = shared("llama4-chunked"), Objective()
    found = Scorer(model).score_sentences([(batch_of(CASES[2:], objective, [PARTS]), None)], objective)[0]
    assert max(map(worst_relative_error, found, references(model, objective))) < 1e-7


@pytest.mark.parametrize("name", sorted(STATEFUL.keys() - {"llama4-chunked"}))
def test_a_model_with_a_state_of_its_own_is_refused(name: str) -> None:
    scorer, objective = Scorer(shared(name)), Objective()
    with pytest.raises(UnsupportedModelError, match="earlier="):
        scorer.score_sentences([(batch_of(CASES[2:], objective, [PARTS]), None)], objective)


def test_the_full_form_stays_an_option() -> None:
    objective = Objective(earlier="differentiated")
    row = batch_of(CASES[2:], objective, [PARTS])
    scorer = Scorer(shared("llama"))
    assert scorer.score_sentences([(row, None)], objective)[0] == scorer.score_parts(row, objective)[0]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_sentences_of_answers_that_are_still_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the scores that they have in the finished answer, and so have the last ones, scored together."""
    model = wrapped(name, dtype=torch.float64)
    batch = model.running_batch(Objective())
    options = Options(max_tokens=30, grammar='start: "Tea is old. It is hot! Go."')
    early = joined(model, batch, [("Why is tea?", options)])
    batch.step()
    late = joined(model, batch, [("And what about coffee, then?", options)])
    rows, spans = [*early, *late], [(0, 12), (12, 23)]
    while len(late[0].ids) < 25:
        batch.step()
    ended = [one.found if one is not None else () for one in batch.ended(rows, [spans, spans], [0, 0])]
    sizes, score_parts = list[int](), Scorer.score_parts
    monkeypatch.setattr(
        Scorer, "score_parts", lambda *given: (sizes.append(len(given[1].lengths)), score_parts(*given))[1]
    )
    scores = [one.gradients() for found in ended for one in found if one is not None]
    assert sizes == [2, 2], "second sentences in one pass, and first ones, which have no context, in another"
    finished(batch)
    together, score = list[int](), Scorer.score_sentences
    monkeypatch.setattr(Scorer, "score_sentences", lambda *given: (together.append(len(given[1])), score(*given))[1])
    lasts = [model.sentences(answer.evidence, known=2) or [] for answer in batch.generations(rows, [2, 2])]
    scores += [parts[2][1].gradients() for parts in lasts if parts[2][1] is not None]
    assert together == [2]
    whole = [model.sentences(answer.evidence) or [] for answer in batch.generations(rows)]
    expected = [own.gradients() for part in (slice(2), slice(2, 3)) for parts in whole for _, own in parts[part] if own]
    assert len(scores) == len(expected) == 6
    for ours, theirs in zip(scores, expected, strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.scores.tier == "captured"
        assert ours.scores.hybridgrad == pytest.approx(theirs.scores.hybridgrad, rel=1e-5)


def test_a_thought_is_context_as_well() -> None:
    model, objective, case = shared("llama"), Objective(), CASES[2]
    tokens = [case.prompt], [case.response], [case.semantic_token]
    row = TokenBatch.of(*tokens, "cpu", objective=objective, before=[2], segments=[PARTS[1:]])
    found = Scorer(model).score_sentences([(row, None)], objective)[0]
    assert max(map(worst_relative_error, found, references(model, objective)[1:])) < tolerance("llama")

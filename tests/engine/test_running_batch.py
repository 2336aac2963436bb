"""Answers that join and leave a running batch are those of single requests: tokens, texts, scores, and nothing else."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semgrad_guard import LanguageModel
from semgrad_guard.engine.answers.writing import RunningAnswer
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.grammar import one_of, text_rule
from semgrad_guard.errors import InputError
from tests.pairwise import every, in_turn
from tests.whole_runs import whole_run

from .running_batches import (
    OBJECTIVES,
    WHOLE_PROMPT,
    Options,
    Wanted,
    finished,
    joined,
    numbers,
    require_alike,
    require_all_alike,
    shared,
    some,
    wrapped,
    written,
)
from .tiny_models import ARCHITECTURES


@pytest.mark.parametrize("name", every(2, ARCHITECTURES))
def test_every_architecture(name: str) -> None:
    model, random = shared(name), Random(1)
    assert model.joins
    require_all_alike(model, some(random, 6), random)


@in_turn(name=["llama", "mistral-sliding", "gemma2"], objective=OBJECTIVES)
def test_every_objective(name: str, objective: Objective) -> None:
    random = Random(2)
    require_all_alike(shared(name), some(random, 6), random, objective)


OPTIONS = st.builds(
    Options,
    max_tokens=st.integers(1, 7),
    temperature=st.sampled_from([0.0, 1.0]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 9),
    stop=st.lists(st.text("ab ", min_size=1, max_size=2), max_size=2).map(tuple),
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    wanted=st.lists(st.tuples(st.text("xyz ", max_size=40).map("q".__add__), OPTIONS), min_size=1, max_size=6),
    name=st.sampled_from(["llama", "mistral-sliding", "gpt2"]),
    objective=st.sampled_from(OBJECTIVES[:2]),
    data=st.data(),
)
def test_any_schedule_of_joins_steps_and_drops(
    wanted: list[Wanted], name: str, objective: Objective, data: st.DataObject
) -> None:
    model = shared(name)
    batch, left, rows, gone = model.running_batch(objective), list(wanted), list[RunningAnswer](), set[int]()
    while left or batch.rows:
        if left and not (batch.rows and data.draw(st.booleans())):
            count = data.draw(st.integers(1, 3))
            rows += joined(model, batch, left[:count])
            left = left[count:]
        if batch.rows and data.draw(st.integers(0, 5)) == 0:
            dropped = data.draw(st.sampled_from(batch.rows))
            gone.add(rows.index(dropped))
            batch.drop([dropped])
        batch.step()
    kept = [number for number in range(len(wanted)) if number not in gone]
    if kept:
        for number, one in zip(kept, batch.generations([rows[number] for number in kept]), strict=True):
            question, options = wanted[number]
            require_alike(one, whole_run(model, question, options, objective=objective), objective)


@pytest.mark.parametrize("longer", [0, 10, 26])
def test_a_short_prompt_that_was_read_beside_a_longer_one(longer: int) -> None:
    """What was kept of the longer one reaches back to before the shorter one begins."""
    model = shared("llama")
    wanted = [("a" * (3 + longer), Options(max_tokens=6)), ("b", Options(max_tokens=2))]
    batch = model.running_batch(WHOLE_PROMPT)
    rows = joined(model, batch, wanted)
    finished(batch)
    assert rows[0].behind == rows[1].behind or longer == 26
    for row, (question, options) in zip(rows, wanted, strict=True):
        [one] = batch.generations([row])
        require_alike(one, whole_run(model, question, options, objective=WHOLE_PROMPT), WHOLE_PROMPT)


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_theta": 1e4}


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("phi3", {"original_max_position_embeddings": 50, "rope_parameters": LONG}),
        ("llama", {"max_position_embeddings": 50, "rope_parameters": DYNAMIC}),
    ],
    ids=["longrope", "dynamic"],
)
def test_frequencies_that_change_with_the_length(name: str, changes: dict[str, Any]) -> None:
    """An answer that may become too long does not join; those that do are what they are alone, and score as such."""
    model = wrapped(name, **changes)
    assert model.fixed_positions == 50
    assert model.context_window == {"phi3": 300, "llama": 200}[name]
    batch, before = model.running_batch(), len(model.render("x").ids) - 1
    prompt = model.render("x" * 20)
    assert batch.takes(prompt, Options(max_tokens=30 - before))
    assert not batch.takes(prompt, Options(max_tokens=31 - before))
    wanted = [("a" * n, Options(max_tokens=50 - before - n)) for n in (1, 12, 6, 20)]
    require_all_alike(model, wanted, Random(0))


def test_what_states_cannot_be_kept_of_does_not_join() -> None:
    """The paper's span is empty in two layers: such a model answers, and scoring gives a reason, and no score."""
    model = wrapped("llama", num_hidden_layers=2)
    prompt = model.render("Hi")
    assert not model.running_batch().takes(prompt, Options())
    assert model.running_batch(Objective(layers=(1,))).takes(prompt, Options())
    with pytest.raises(InputError, match="token=-500"):
        model.running_batch(Objective(layers=(1,), token=-500)).takes(prompt, Options())


def test_sampling_without_a_seed() -> None:
    model = shared("llama")
    options = Options(max_tokens=12, temperature=2.0)
    found = written(model, [("Hi", options)] * 4, Random(0))
    assert len({generation.response_ids for generation in found}) > 1
    for generation in found:
        evidence = generation.evidence
        assert numbers(evidence, Objective()) == pytest.approx(numbers(evidence.alone(), Objective()), rel=1e-4)


def test_stop_strings_at_and_inside_tokens(pocket: LanguageModel) -> None:
    question, brief = "What is the capital of Mongolia?", Options(max_tokens=24)
    whole = whole_run(pocket, question, brief)
    texts = [pocket.tokenizer.decode(list(whole.response_ids[:n])) for n in range(1, len(whole.response_ids) + 1)]
    between = whole.text[len(texts[0]) :]
    cut_at = next(len(a) + 1 for a, b in pairwise(texts) if len(b) > len(a) + 2)
    stops = [(between,), (whole.text[cut_at:],), (), ("→", "\x00"), (whole.text[cut_at:], between), (whole.text[:1],)]
    wanted = [(question, Options(max_tokens=24, stop=stop)) for stop in stops]
    wanted += [("Who wrote Hamlet?", options) for _, options in wanted[:3]]
    cut = whole_run(pocket, *wanted[1]).evidence.gradients()
    assert cut is not None
    assert cut.scores.tier != "captured", "its tokens were replaced"
    require_all_alike(pocket, wanted, Random(1))


def test_what_the_text_does_not_hold_stops_nothing(pocket: LanguageModel) -> None:
    """The space before the first word is spelled, and never shown; a prompt's last letters are not the answer's."""
    question, brief = "Who wrote Hamlet?", Options(max_tokens=24)
    whole = whole_run(pocket, question, brief)
    begins = pocket.tokenizer.convert_ids_to_tokens(list(whole.response_ids[:1]))[0]
    assert not whole.text.startswith(" ")
    assert pocket.tokenizer.convert_tokens_to_string(["x", begins]).startswith("x "), "its first token spells a space"
    prompt_text = pocket.tokenizer.decode(list(pocket.render(question).ids))
    for stop in (f" {whole.text[:4]}", prompt_text[-1] + whole.text[:2], f"{prompt_text[-3:]} {whole.text[:3]}"):
        assert stop not in whole.text
        options = Options(max_tokens=24, stop=(stop,))
        cut = whole_run(pocket, question, options)
        assert (cut.text, cut.response_ids, cut.finish_reason) == (whole.text, whole.response_ids, whole.finish_reason)
        require_all_alike(pocket, [(question, options), ("What is the capital of Mongolia?", brief)], Random(0))


NOTHING, ONE_WORD = one_of([text_rule("", {})]), one_of([text_rule("yes", {}), text_rule("no", {})])


def test_answers_of_no_token_and_of_one() -> None:
    model = shared("llama")
    wanted = [
        ("a", Options(grammar=NOTHING)),
        ("b", Options(max_tokens=1)),
        ("c", Options(max_tokens=1, grammar=NOTHING)),
        ("d", Options(max_tokens=5)),
        ("e", Options(max_tokens=1, stop=(whole_run(model, "e", Options(max_tokens=1)).text,))),
    ]
    assert whole_run(model, *wanted[0]).response_ids == ()
    for seed in range(3):
        require_all_alike(model, wanted, Random(seed))
    require_all_alike(model, wanted[:1], Random(0))


def test_grammars_beside_free_answers() -> None:
    model = shared("llama")
    grammars = [None, ONE_WORD, NOTHING, one_of([text_rule("a b c", {})]), ONE_WORD]
    wanted = [
        (f"q{n}", Options(max_tokens=8, temperature=float(n % 2), seed=n, grammar=grammar))
        for n, grammar in enumerate(grammars)
    ]
    assert whole_run(model, *wanted[1]).text in ("yes", "no")
    for seed in range(2):
        require_all_alike(model, wanted, Random(seed))


def test_a_form_that_cannot_be_followed_is_named_and_nobody_joins() -> None:
    model = shared("llama")
    batch, wanted = model.running_batch(), ("Hi", Options(max_tokens=5))
    rows = joined(model, batch, [wanted])
    with pytest.raises(InputError, match="schema"):
        joined(model, batch, [("b", Options(max_tokens=5)), ("c", Options(grammar="start: nowhere"))])
    assert list(batch.rows) == rows
    finished(batch)
    require_alike(batch.generations(rows)[0], whole_run(model, *wanted))

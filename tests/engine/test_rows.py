"""Every row of any answer in any batch equals the ordinary call, by the suite's own oracle.

A row is a whole answer, what follows a thought, or a sentence in context; its text was written in a running batch that
others joined and left, or comes from elsewhere; it is scored together with others, for any objective and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from packaging.version import Version

from semgrad_guard import GenerationOptions, LanguageModel, Memory
from semgrad_guard.engine.answers.writing import WrittenAnswer
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores.gradients import NO_GRADIENT, GradientScores, Observation, observed_layer
from semgrad_guard.engine.scores.scorer import scorer_of
from semgrad_guard.engine.scores.tape import Row, Tape
from tests.pairwise import every

from .oracle import Reference, reference_scores, worst_relative_error
from .running import SETTINGS, named, row_of, wrapped
from .test_adapters import LORA, peft, varied
from .tiny_models import ARCHITECTURES, STATEFUL, build, shared, token_ids

pytestmark = pytest.mark.usefixtures("softmax_in_the_dtype_of_its_input")
RANDOM = settings(
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a smaller example takes minutes to find
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
EXACT = 3e-5
"""Weights are float64; norms, angles and routers are float32 in some models, whose last digit may fall either way."""


@dataclass(frozen=True)
class Text:
    """A prompt, its t* counted from the end, what was written, and what writing left of it."""

    prompt: tuple[int, ...]
    offset: int
    written: tuple[int, ...]
    tape: Tape | None = None


@cache
def writing(name: str) -> LanguageModel:
    if name == "llama, adapted":
        config = peft.LoraConfig(task_type="CAUSAL_LM", **LORA)
        return named(varied(peft.get_peft_model(build("llama", **SETTINGS), config, autocast_adapter_dtype=False)))
    return wrapped(name, dtype=torch.float64)


OPTIONS = st.builds(
    GenerationOptions,
    max_tokens=st.integers(1, 9),
    temperature=st.sampled_from([0.0, 1.5]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 9),
    stop=st.lists(st.text("ab ", min_size=1, max_size=2), max_size=2),
)
QUESTIONS = st.text("xyz ", max_size=40).map("q".__add__)
MEMORIES = st.builds(
    Memory,
    logits=st.sampled_from([0, 5_000, 96 << 20]),
    activations=st.sampled_from([0, 512 << 20]),
    outputs=st.sampled_from([0, 20_000, 96 << 20]),
)


@st.composite
def objectives(draw: st.DrawFn, n_layers: int) -> Objective:
    some = st.lists(st.integers(0, n_layers - 1), min_size=1, unique=True).map(tuple)
    return Objective(
        draw(st.sampled_from(["paper", "official"])),
        draw(st.none() | some),
        norm=draw(st.sampled_from(["l1", "l2"])),
        weighted=draw(st.booleans()),
        token=draw(st.none() | st.integers(-5, -1)),
        last_tokens=draw(st.sampled_from([None, None, 1, 3, 1000])),
    )


def written(
    data: st.DataObject, model: LanguageModel, objective: Objective, make: Callable[[], list[WrittenAnswer]]
) -> list[Text]:
    """What a batch makes of answers that join and leave it at random steps; some texts are taken before their end."""
    batch, left, rows, gone = model.running_batch(objective), make(), list[WrittenAnswer](), set[int]()
    texts: list[Text] = []

    def text(row: WrittenAnswer, tape: Tape | None) -> Text:
        return Text(row.prompt.ids, row.prompt.semantic_token.offset, tuple(row.ids), tape)

    while left or batch.rows:
        event = data.draw(st.sampled_from(["step", "step", "join", "pieces", "leave", "score"]))
        some = data.draw(st.sampled_from(batch.rows)) if batch.rows else None
        if left and (some is None or event == "join"):
            count = data.draw(st.integers(1, 3))
            batch.join(left[:count])
            rows += left[:count]
            left = left[count:]
        elif left and event == "pieces":
            rows.append(left.pop(0))
            for _ in batch.join_in_pieces(rows[-1:], data.draw(st.integers(1, 9))):
                batch.step()
        elif some is not None and event == "leave":
            gone.add(id(some))
            batch.drop([some])
        elif some is not None and event == "score":
            texts.append(text(some, batch._tape(some)))
        else:
            batch.step()
    assert not any(row.error for row in rows)
    alone = make()
    for row in alone:
        batch.write_whole([row])
    for row, single in zip(rows, batch.generations(alone), strict=True):
        whole = [*single.preceding_ids, *single.response_ids]
        assert row.ids[: len(whole)] == whole or id(row) in gone or single.evidence.answer.written
    return [*texts, *(text(row, row.tape()) for row in rows if id(row) not in gone and row.ids)]


def rows_of(data: st.DataObject, texts: Sequence[Text], objective: Objective, *, in_context: bool) -> list[Row]:
    """Parts of texts in any order, each with its tape or without."""
    found: list[Row] = []
    for text in texts:
        for _ in range(data.draw(st.integers(1, 3))):
            begin = data.draw(st.integers(0, len(text.written) - 1))
            end = data.draw(st.integers(begin + 1, len(text.written)))
            part: dict[str, Any] = {"before": begin, "end": end, "in_context": in_context and data.draw(st.booleans())}
            tape = text.tape if data.draw(st.integers(0, 3)) else None
            found.append(Row.of(text.prompt, text.written, text.offset, objective, tape=tape, **part))
    return data.draw(st.permutations(found))


def reference(model: Any, row: Row, objective: Objective, **options: Any) -> Reference:
    """The row by the model's own ordinary call, which nothing follows."""
    before, n = row.begin - row.prompt, objective.last_tokens
    return reference_scores(
        model,
        row.ids[: row.prompt],
        row.ids[row.prompt : row.end],
        row.token - row.prompt,
        objective.variant,
        objective.layers and sorted(objective.layers),
        norm=objective.norm,
        weighted=objective.weighted,
        grid_tokens=None if n is None else min(n, row.prompt),
        part=slice(before, None),
        context=before if row.in_context else 0,
        **options,
    )


def require_equal(found: GradientScores, expected: Reference, row: Row) -> None:
    if found.reason == NO_GRADIENT:  # t* is beyond the reach of windows
        assert expected.semgrad == 0, row
    else:
        assert found.reason is None, (found, row)
        assert worst_relative_error(found, expected) < EXACT, row


def observation(model: Any, row: Row, *, own: bool) -> Observation:
    """By one call of the model as any user makes it."""
    with torch.no_grad():
        output = model(input_ids=torch.tensor([row.ids[: row.end]]), output_hidden_states=True)
    log_p = output.logits[0, row.begin - 1 : -1].double().log_softmax(-1)
    states = output.hidden_states[observed_layer(model.config.num_hidden_layers)][0, row.begin - 1 + own :]
    state = (states if own else states[:-1]).double().mean(0)
    chosen = log_p[range(row.length), list(row.targets)]
    return Observation(tuple(chosen.tolist()), tuple((-(log_p.exp() * log_p).sum(-1)).tolist()), tuple(state.tolist()))


def require_seen(found: Observation, expected: Observation) -> None:
    for name in ("log_probs", "entropies", "state"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=EXACT, abs=1e-8)


@pytest.mark.parametrize("name", every(2, [*ARCHITECTURES, "llama, adapted"]))
@settings(RANDOM, max_examples=6)
@given(data=st.data())
def test_rows_of_answers_that_a_batch_wrote(name: str, data: st.DataObject) -> None:
    model = writing(name)
    scorer = model.scorer
    assert scorer.joins
    scorer.memory = data.draw(MEMORIES)
    objective = data.draw(objectives(scorer.architecture.n_layers))
    wanted = data.draw(st.lists(st.tuples(QUESTIONS, OPTIONS, st.none() | st.integers(-9, -1)), min_size=1, max_size=5))
    looks = data.draw(st.integers(0, 3)) == 0
    texts = written(
        data,
        model,
        Objective(gradients=False) if looks else objective,
        lambda: [row_of(model, (question, options), token=token) for question, options, token in wanted],
    )
    if not texts:
        return
    rows = rows_of(data, texts, objective, in_context=True)
    found = [] if looks else scorer.score(rows, objective)
    assert {one.tier for one in found} <= {"replay"}
    for one, row in zip(found, rows, strict=False):
        require_equal(one, reference(model._model, row, objective), row)
    own = data.draw(st.booleans())
    for seen, row in zip(scorer.observe(rows, own=own), rows, strict=True):
        require_seen(seen, observation(model._model, row, own=own))


@st.composite
def foreign(draw: st.DrawFn) -> Text:
    length = draw(st.integers(5, 25))
    written = token_ids(draw(st.integers(1, 8)), draw(st.integers(0, 99)))
    return Text(tuple(token_ids(length, draw(st.integers(0, 99)))), -draw(st.integers(1, length)), tuple(written))


@pytest.mark.parametrize("name", every(2, [*ARCHITECTURES, *STATEFUL]))
@settings(RANDOM, max_examples=6)
@given(data=st.data(), texts=st.lists(foreign(), min_size=1, max_size=4))
def test_rows_of_texts_from_elsewhere(name: str, data: st.DataObject, texts: list[Text]) -> None:
    """Also of models whose layers hold a state, and have no context."""
    model = shared(name)
    scorer = scorer_of(model)
    scorer.memory = data.draw(MEMORIES)
    objective = data.draw(objectives(scorer.architecture.n_layers))
    rows = rows_of(data, texts, objective, in_context=scorer.exactness().in_context is not None)
    # The Mamba models' own record of hidden states leaves the embedding out.
    options = {"first_recorded": 1} if name in ("mamba", "mamba2") else {}
    if options and 0 in objective.span(scorer.architecture.n_layers):
        return
    found = scorer.score(rows, objective)
    assert {one.tier for one in found} <= ({"replay"} if name in ARCHITECTURES else {"replay", "ordinary"})
    for one, row in zip(found, rows, strict=True):
        require_equal(one, reference(model, row, objective, **options), row)


def test_which_of_them_have_a_cheap_way() -> None:
    for name in (*STATEFUL, *ARCHITECTURES):
        scorer_of(shared(name)).refresh()  # a score of another test may have shown that one is not exact
    ways = {name: scorer_of(shared(name)).exactness() for name in STATEFUL}
    is_newest = Version(transformers.__version__) >= Version("5.24")  # before it, Mamba 2's cache has another name
    newest = {"mamba2"} if is_newest else set[str]()
    assert {name for name, found in ways.items() if found.way == "continued"} >= {"lfm2"} | newest
    assert all(scorer_of(shared(name)).exactness().way == "rows" for name in ARCHITECTURES)


@pytest.mark.parametrize("name", ["falcon-h1", "lfm2", "llama4-chunked", "qwen3-next"])
def test_an_answer_written_in_one_go_leaves_the_cache_that_its_score_continues(name: str) -> None:
    """The same tokens and scores as where nothing is kept; a cache of the model as it was before a change is left."""
    model, wanted = wrapped(name), ("What is tea?", GenerationOptions(max_tokens=9, temperature=1.0, seed=3))
    kept, plain = row_of(model, wanted), row_of(model, wanted)
    model.running_batch().write_whole([kept])
    model.running_batch(Objective(gradients=False)).write_whole([plain])
    assert (kept.cut is None, plain.cut, kept.ids) == (False, None, plain.ids)
    left, none = (model.running_batch().generations([row])[0].evidence for row in (kept, plain))
    expected, seen, layer = none.gradients(), list[int](), model.scorer.twin.layers[0]
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).shape[1]), with_kwargs=True
    )
    found = left.alone().gradients(), left.gradients()
    hook.remove()
    offset, length = plain.prompt.semantic_token.offset, len(plain.ids)
    assert expected is not None
    assert model.scorer.exactness().begins, "the layers below the span are left out"
    for one in found:
        assert one is not None
        assert one.scores.tier == "replay"
        assert (one.scores.semgrad, one.scores.paragrad) == pytest.approx(
            (expected.scores.semgrad, expected.scores.paragrad), rel=1e-4
        )
    assert seen == [len(plain.prompt.ids) + offset, length - offset, length - offset - 1], (
        "read up to t*, or not at all"
    )
    model.refresh()
    assert model.running_batch().generations([kept])[0].evidence.gradients() is not None

"""Answers that join and leave a running batch are those of single requests: tokens, texts, scores, and nothing else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semgrad_guard import GenerationOptions, LanguageModel, Message
from semgrad_guard.engine.generation.generation import Evidence, Generation
from semgrad_guard.engine.generation.running_batch import BatchRequest, RunningAnswer, RunningBatch
from semgrad_guard.engine.interruption import Stop, stopping
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.grammar import one_of, text_rule
from semgrad_guard.engine.replay.batch import FRUGAL, Memory
from semgrad_guard.errors import AnswerCancelledError, AnswerInterruptedError, InputError
from tests.random_llama import byte_tokenizer

from .snapshots import unchanged
from .tiny_models import ARCHITECTURES, build

Options = GenerationOptions
Wanted = tuple[str, GenerationOptions]
WHOLE_PROMPT = Objective(last_tokens=1000)
OBJECTIVES = (
    Objective(),
    WHOLE_PROMPT,
    Objective(variant="official", token=-1),
    Objective(layers=(0,)),
    Objective(gradients=False),
)


def wrapped(name: str, **changes: Any) -> LanguageModel:
    settings = {"vocab_size": 258, "eos_token_id": 257, "pad_token_id": 257, "max_position_embeddings": 300}
    model = build(name, **{"dtype": torch.float32, **settings, **changes})
    return LanguageModel.from_transformers(model, byte_tokenizer())


shared = cache(wrapped)


@pytest.fixture(scope="module")
def pocket() -> LanguageModel:
    """The embedded model, whose tokens hold several characters."""
    return LanguageModel.from_pretrained("pocket")


def batch_request(model: LanguageModel, wanted: Wanted, listener: Callable[[str], None] | None = None) -> BatchRequest:
    question, options = wanted
    prompt = model.render(question)
    return BatchRequest(prompt, model.fitted(options, prompt), listener)


def joined(model: LanguageModel, batch: RunningBatch, wanted: Sequence[Wanted]) -> list[RunningAnswer]:
    return batch.join([batch_request(model, item) for item in wanted])


def finished(batch: RunningBatch) -> None:
    while batch.rows:
        batch.step()


def written(
    model: LanguageModel, wanted: Sequence[Wanted], random: Random, objective: Objective | None = None
) -> list[Generation]:
    """What a batch makes of requests that come a few at a time, with steps in between."""
    batch, left, rows = model.running_batch(objective), list(wanted), list[RunningAnswer]()
    while left or batch.rows:
        if left and (not batch.rows or random.random() < 0.6):
            count = random.randint(1, 3)
            rows += joined(model, batch, left[:count])
            left = left[count:]
        batch.step()
    assert [row.error for row in rows] == [None] * len(wanted)
    return batch.generations(rows)


def numbers(evidence: Evidence, objective: Objective) -> list[float]:
    """What is recorded of an answer."""
    found = evidence.observed()
    if found is None:
        return []
    values = [*found.log_probs, *found.entropies]
    if objective.gradients:
        timed = evidence.gradients(objective)
        assert timed is not None
        scores = timed.scores
        values += [score for score in (scores.semgrad, scores.paragrad, scores.hybridgrad) if score is not None]
    return values


def require_alike(one: Generation, single: Generation, objective: Objective | None = None) -> None:
    """An answer from a batch is that of a single request."""
    objective = objective or Objective()
    names = ("response_ids", "text", "finish_reason", "cut", "completion_tokens", "reused_tokens")
    assert [getattr(one, name) for name in names] == [getattr(single, name) for name in names]
    assert numbers(one.evidence, objective) == pytest.approx(numbers(single.evidence, objective), rel=1e-4, abs=1e-9)
    if one.response_ids:
        states = [seen.state for answer in (one, single) if (seen := answer.evidence.observed(own=True))]
        assert states[0] == pytest.approx(states[1], rel=1e-3, abs=1e-5)
    if objective.gradients and one.response_ids:
        mine, its = one.evidence.gradients(objective), single.evidence.gradients(objective)
        assert mine is not None
        assert its is not None
        assert mine.scores.tier == its.scores.tier
        for row, other in zip(mine.scores.grid, its.scores.grid, strict=True):
            assert row == pytest.approx(other, rel=1e-3)


def require_all_alike(
    model: LanguageModel, wanted: Sequence[Wanted], random: Random, objective: Objective | None = None
) -> None:
    singles = [model.generate(question, options, objective=objective) for question, options in wanted]
    for one, single in zip(written(model, wanted, random, objective), singles, strict=True):
        require_alike(one, single, objective)


def some(random: Random, count: int) -> list[Wanted]:
    """Questions of very unequal length, with options of their own."""
    questions = ["".join(random.choices("abc de?", k=random.choice((1, 2, 5, 20, 60)))) + "x" for _ in range(count)]
    return [
        (
            question,
            Options(
                max_tokens=random.choice((1, 2, 3, 8)),
                temperature=random.choice((0.0, 0.0, 0.9)),
                top_k=random.choice((0, 5)),
                seed=random.randint(0, 99),
                stop=random.choice(((), (), ("a",), ("e", "ab"))),
            ),
        )
        for question in questions
    ]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(name: str) -> None:
    model, random = shared(name), Random(1)
    assert model.joins
    require_all_alike(model, some(random, 6), random)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma2"])
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


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
            require_alike(one, model.generate(question, options, objective=objective), objective)


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
        require_alike(one, model.generate(question, options, objective=WHOLE_PROMPT), WHOLE_PROMPT)


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


# Where answers end.


def test_stop_strings_at_and_inside_tokens(pocket: LanguageModel) -> None:
    question, brief = "What is the capital of Mongolia?", Options(max_tokens=24)
    whole = pocket.generate(question, brief)
    texts = [pocket.tokenizer.decode(list(whole.response_ids[:n])) for n in range(1, len(whole.response_ids) + 1)]
    between = whole.text[len(texts[0]) :]
    cut_at = next(len(a) + 1 for a, b in pairwise(texts) if len(b) > len(a) + 2)
    stops = [(between,), (whole.text[cut_at:],), (), ("→", "\x00"), (whole.text[cut_at:], between), (whole.text[:1],)]
    wanted = [(question, Options(max_tokens=24, stop=stop)) for stop in stops]
    wanted += [("Who wrote Hamlet?", options) for _, options in wanted[:3]]
    cut = pocket.generate(*wanted[1]).evidence.gradients()
    assert cut is not None
    assert cut.scores.tier != "captured", "its tokens were replaced"
    for seed in range(2):
        require_all_alike(pocket, wanted, Random(seed))


def test_what_the_text_does_not_hold_stops_nothing(pocket: LanguageModel) -> None:
    """The space before the first word is spelled, and never shown; a prompt's last letters are not the answer's."""
    question, brief = "Who wrote Hamlet?", Options(max_tokens=24)
    whole = pocket.generate(question, brief)
    begins = pocket.tokenizer.convert_ids_to_tokens(list(whole.response_ids[:1]))[0]
    assert not whole.text.startswith(" ")
    assert pocket.tokenizer.convert_tokens_to_string(["x", begins]).startswith("x "), "its first token spells a space"
    prompt_text = pocket.tokenizer.decode(list(pocket.render(question).ids))
    for stop in (f" {whole.text[:4]}", prompt_text[-1] + whole.text[:2], f"{prompt_text[-3:]} {whole.text[:3]}"):
        assert stop not in whole.text
        options = Options(max_tokens=24, stop=(stop,))
        cut = pocket.generate(question, options)
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
        ("e", Options(max_tokens=1, stop=(model.generate("e", Options(max_tokens=1)).text,))),
    ]
    assert model.generate(*wanted[0]).response_ids == ()
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
    assert model.generate(*wanted[1]).text in ("yes", "no")
    for seed in range(2):
        require_all_alike(model, wanted, Random(seed))


# Errors, and rows that go.


def test_a_form_that_cannot_be_followed_is_named_and_nobody_joins() -> None:
    model = shared("llama")
    batch, wanted = model.running_batch(), ("Hi", Options(max_tokens=5))
    rows = joined(model, batch, [wanted])
    with pytest.raises(InputError, match="schema"):
        joined(model, batch, [("b", Options(max_tokens=5)), ("c", Options(grammar="start: nowhere"))])
    assert list(batch.rows) == rows
    finished(batch)
    require_alike(batch.generations(rows)[0], model.generate(*wanted))


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_somebody_who_cannot_hear_harms_nobody(at: int) -> None:
    model, pieces = shared("llama"), list[str]()
    # The last letter may begin the stop string, and is held back until the end.
    options = Options(max_tokens=4, grammar=one_of([text_rule("abcd", {})]), stop=("dx",))

    def listener(piece: str) -> None:
        if len(pieces) == at:
            raise RuntimeError("gone")
        pieces.append(piece)

    batch, other = model.running_batch(), ("you", Options(max_tokens=6))
    rows = batch.join([batch_request(model, ("Hi", options), listener), batch_request(model, other)])
    finished(batch)
    found = batch.generations(rows if at == 3 else rows[1:])[-1]
    assert str(rows[0].error) == "gone"
    assert rows[1].error is None
    require_alike(found, model.generate(*other))


def test_what_is_heard_makes_the_text() -> None:
    model, random = shared("llama"), Random(7)
    for _ in range(3):
        wanted, batch = some(random, 4), model.running_batch()
        pieces: list[list[str]] = [[] for _ in wanted]
        rows = batch.join([batch_request(model, item, own.append) for item, own in zip(wanted, pieces, strict=True)])
        finished(batch)
        found = batch.generations(rows)
        assert ["".join(own) for own in pieces] == [generation.text for generation in found]
        assert [own for own in pieces if "" in own] == []


def test_a_stop_ends_a_join_and_nothing_else() -> None:
    model = wrapped("llama")
    model.memory = Memory(prompts=1 << 26)  # prompts are read one after the other
    batch, wanted = model.running_batch(), ("Hi", Options(max_tokens=6))
    rows = joined(model, batch, [wanted])
    stop, read = Stop(), list[int]()

    def count(*_: Any) -> None:
        read.append(1)
        if len(read) == 2:
            stop.cancel()

    layer: Any = model._scorer.current_replayer().layers[0]
    hook = layer.register_forward_pre_hook(count)
    with stopping(stop), pytest.raises(AnswerCancelledError):
        joined(model, batch, [("a", Options(max_tokens=6)), ("b", Options(max_tokens=6))])
    hook.remove()
    assert list(batch.rows) == rows, "the first of the two had been read"
    finished(batch)
    require_alike(batch.generations(rows)[0], shared("llama").generate(*wanted))


def test_a_step_that_is_stopped_leaves_an_empty_batch_that_can_be_used() -> None:
    model, wanted, stop = shared("llama"), ("Hi", Options(max_tokens=6)), Stop()
    batch = model.running_batch()
    joined(model, batch, [wanted, ("you", Options(max_tokens=6))])
    layer: Any = model._scorer.current_replayer().layers[1]
    hook = layer.register_forward_pre_hook(lambda *_: stop.cancel())
    with stopping(stop), pytest.raises(AnswerCancelledError):
        batch.step()
    hook.remove()
    assert batch.rows == ()
    rows = joined(model, batch, [wanted])
    finished(batch)
    require_alike(batch.generations(rows)[0], model.generate(*wanted))


def test_nothing_is_kept_of_answers_that_are_gone() -> None:
    model = shared("llama")
    batch = model.running_batch()
    rows = joined(model, batch, [("a", Options(max_tokens=9)), ("b" * 30, Options(max_tokens=9))])
    batch.step()
    assert batch._mask.shape[1] > 40
    batch.drop(rows[1:])
    assert batch._mask.shape[1] < 40, "the columns that only the longer prompt had are let go"
    assert batch._cache.get_seq_length() < 40
    ghosts = [weakref.ref(row) for row in rows] + [weakref.ref(row.passes[0][0]) for row in rows]
    batch.drop(rows)
    del rows
    gc.collect()
    assert [ghost() for ghost in ghosts] == [None] * 4
    assert batch._cache.get_seq_length() == 0
    rows = joined(model, batch, [("c", Options(max_tokens=2))])
    finished(batch)
    ghosts = [weakref.ref(rows[0]), weakref.ref(rows[0].passes[-1][0])]
    batch.generations(rows)
    del rows
    gc.collect()
    assert [ghost() for ghost in ghosts] == [None] * 2


# The model is the user's.


@pytest.mark.parametrize("then", ["step", "join"])
def test_a_model_that_was_changed_while_it_wrote_delivers_nothing(then: str) -> None:
    model, wanted = wrapped("llama"), ("Hi", Options(max_tokens=6))
    batch = model.running_batch()
    rows = joined(model, batch, [wanted])
    batch.step()
    with torch.no_grad():
        next(iter(model._model.parameters())).mul_(1.5)
    ways = {"step": batch.step, "join": lambda: joined(model, batch, [wanted])}
    with pytest.raises(AnswerInterruptedError, match="changed while it wrote"):
        ways[then]()
    batch.drop(rows)
    rows = joined(model, batch, [wanted])
    finished(batch)
    require_alike(batch.generations(rows)[0], model.generate(*wanted))


def test_answers_before_and_after_a_change_are_scored_apart() -> None:
    """Those from before are scored by the model as it is, as single requests are; from nothing that it left."""
    model, wanted = wrapped("llama"), ("Hi", Options(max_tokens=3))
    batch = model.running_batch()
    rows, single = joined(model, batch, [wanted]), model.generate(*wanted)
    finished(batch)
    with torch.no_grad():
        model._model.get_submodule("model.layers.4.mlp.up_proj").weight.mul_(1.5)
    rows += joined(model, batch, [wanted])
    finished(batch)
    for one, alone in zip(batch.generations(rows), (single, model.generate(*wanted)), strict=True):
        require_alike(one, alone)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_model_and_torch_are_left_as_they_were(mode: Callable[[], Any]) -> None:
    model = wrapped("gemma2")
    model._model.train().requires_grad_(True)
    wanted = some(Random(3), 3)
    with unchanged(model._model), mode():
        found = written(model, wanted, Random(3))
        for one, (question, options) in zip(found, wanted, strict=True):
            require_alike(one, model.generate(question, options))
    with unchanged(model._model):
        batch = model.running_batch()
        joined(model, batch, wanted)
        batch.drop(batch.rows)


def test_adapters() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"], lora_dropout=0.3)
    adapted = peft.get_peft_model(shared("llama")._model.__class__(shared("llama")._model.config).float(), config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model, random = LanguageModel.from_transformers(adapted.eval(), byte_tokenizer()), Random(4)
    assert model.joins
    require_all_alike(model, some(random, 4), random)
    batch = model.running_batch()
    joined(model, batch, [("Hi", Options(max_tokens=5))])
    with adapted.disable_adapter(), pytest.raises(AnswerInterruptedError):
        batch.step()


# Memory.


def test_what_was_left_is_observed_without_another_pass() -> None:
    model = shared("llama")
    rows = joined(model, batch := model.running_batch(), [("a", Options(max_tokens=3)), ("b" * 9, Options())])
    batch.step()
    batch.step()
    batch.drop(rows[1:])
    layer: Any = model._scorer.current_replayer().layers[0]
    passes = list[int]()
    hook = layer.register_forward_pre_hook(lambda *_: passes.append(1))
    [found] = batch.generations(rows[:1])
    assert len(numbers(found.evidence, Objective(gradients=False))) == 2 * len(found.response_ids)
    hook.remove()
    assert passes == []


@pytest.mark.parametrize("memory", [FRUGAL, Memory(logits=5000, outputs=5000), Memory(logits=0)], ids=str)
@pytest.mark.parametrize("objective", [Objective(), Objective(gradients=False)], ids=["replayed", "observed"])
def test_small_budgets_change_no_score(memory: Memory, objective: Objective) -> None:
    model, random = wrapped("qwen2"), Random(5)
    wanted = [(question, Options(max_tokens=5 + n)) for n, (question, _) in enumerate(some(random, 6))]
    singles = [model.generate(*item, objective=objective) for item in wanted]
    for single in singles:
        numbers(single.evidence, objective)
    model.memory = memory
    for one, single in zip(written(model, wanted, random, objective), singles, strict=True):
        require_alike(one, single, objective)


def test_all_answers_together_stay_within_the_budgets() -> None:
    model = wrapped("qwen2")
    model.memory = Memory(logits=20_000, outputs=20_000)
    batch, held = model.running_batch(), list[list[int]]()
    for number in range(8):
        joined(model, batch, [(f"q{number}", Options(max_tokens=40))])
        for _ in range(3):
            batch.step()
        captures = {id(capture): capture for row in batch.rows for capture, _ in row.passes}.values()
        held.append([sum(kind) for kind in zip((0, 0), *(capture.held for capture in captures), strict=True)])
    assert 10_000 < max(logits for logits, _ in held) <= 20_000
    assert 10_000 < max(outputs for _, outputs in held) <= 20_000


def test_prompts_that_are_known_are_read_from_where_they_differ() -> None:
    model, whole = wrapped("qwen2"), shared("qwen2")
    model.memory = Memory(prompts=1 << 26)
    system = "Answer with a few words, and do not say more than you were asked. "
    options = Options(max_tokens=4)
    batch, rows = model.running_batch(), list[RunningAnswer]()
    questions = [[Message("system", system), Message("user", text)] for text in ("What is tea?", "What is it?", "So?")]
    for question in questions:
        prompt = model.render(question)
        rows += batch.join([BatchRequest(prompt, model.fitted(options, prompt)) for _ in range(2)])
        finished(batch)
    found = batch.generations(rows)
    assert [generation.reused_tokens > len(system) for generation in found] == [False, False, True, True, True, True]
    for number, one in enumerate(found):
        single = whole.generate(questions[number // 2], options)
        assert one.response_ids == single.response_ids
        assert numbers(one.evidence, Objective()) == pytest.approx(numbers(single.evidence, Objective()), rel=1e-4)
    # and what a batch has read serves a single request
    assert model.generate(questions[0], options).reused_tokens > len(system)
    assert model._scorer.current_replayer().prompts.bytes > 0

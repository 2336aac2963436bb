"""Samples: shared, seeded, independent of their batch; diverse beams against brute force; readings; option names."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semgrad_guard import GenerationOptions, Guard, LanguageModel, Policy
from semgrad_guard.engine.answers.batch import RunningBatch
from semgrad_guard.engine.answers.options import DiverseBeams, Sampling, plan_record, sampling_processors
from semgrad_guard.engine.answers.writing_model import middle_layer, read
from semgrad_guard.engine.scores.scorer import scorer_of
from semgrad_guard.errors import InputError
from semgrad_guard.estimators.suite import paper_suite

from .running import wrapped
from .tiny_models import ARCHITECTURES, STATEFUL, shared, token_ids

QUESTIONS = ["q", "What is it?", "Say something longer, please."]


def answered(model: LanguageModel, questions: list[str]):
    generations = model.generate_batch(questions, GenerationOptions(max_tokens=5))
    return [generation.evidence for generation in generations]


# --- drawing


def test_a_sample_depends_on_seed_prompt_and_number_alone(language_model: LanguageModel) -> None:
    plan = Sampling(count=4, max_tokens=6)
    together = [evidence.samples(plan) for evidence in answered(language_model, QUESTIONS)]
    for question, samples in zip(QUESTIONS, together, strict=True):
        (alone,) = answered(language_model, [question])
        assert [s.ids for s in alone.samples(plan)] == [s.ids for s in samples]
        for one, other in zip(alone.samples(plan), samples, strict=True):
            assert one.log_probs == pytest.approx(other.log_probs, rel=1e-6, abs=1e-6)
        fewer = alone.samples(Sampling(count=2, max_tokens=6))
        assert [s.ids for s in fewer] == [s.ids for s in samples[:2]]
        assert [s.ids for s in alone.samples(Sampling(count=4, seed=1, max_tokens=6))] != [s.ids for s in samples]
    assert len({sample.ids for samples in together for sample in samples}) > 6


def test_samples_are_drawn_once_for_equal_plans_and_the_whole_batch(language_model: LanguageModel, monkeypatch) -> None:
    drawn, draw = list[int](), RunningBatch.draw
    monkeypatch.setattr(RunningBatch, "draw", lambda *call: (drawn.append(len(call[1])), draw(*call))[1])
    batch = answered(language_model, QUESTIONS)
    first = [evidence.samples(Sampling(count=2, max_tokens=3)) for evidence in batch]
    again = [evidence.samples(Sampling(count=2, max_tokens=3)) for evidence in batch]
    cooler = [evidence.samples(Sampling(count=2, max_tokens=3), temperature=0.5) for evidence in batch]
    assert drawn == [len(QUESTIONS)]
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert [[s.ids for s in own] for own in cooler] == [[s.ids for s in own] for own in first]
    assert cooler[0][0].log_probs != first[0][0].log_probs


def test_nothing_of_the_callers_moves(language_model: LanguageModel) -> None:
    torch.manual_seed(3)
    before, expected = torch.get_rng_state(), torch.rand(1)
    torch.set_rng_state(before)
    evidence = answered(language_model, ["q"])[0]
    with torch.inference_mode():
        evidence.samples(Sampling(count=2, max_tokens=3))
        evidence.samples(DiverseBeams(count=2, max_tokens=3))
    assert torch.rand(1) == expected
    assert torch.is_grad_enabled()
    assert evidence.gradients().scores.semgrad is not None


def test_samples_follow_the_tempered_distribution(language_model: LanguageModel) -> None:
    """First tokens of many samples against softmax(logits / T) over the top k."""
    plan = Sampling(count=1500, temperature=0.7, top_k=3, max_tokens=1)
    evidence = answered(language_model, ["q"])[0]
    found = Counter(sample.ids[:1] for sample in evidence.samples(plan))
    with torch.no_grad():
        logits = language_model._model(torch.tensor([evidence.prompt.ids])).logits[0, -1]
    top = logits.topk(3)
    for token, p in zip(top.indices.tolist(), (top.values / 0.7).softmax(-1).tolist(), strict=True):
        share = found[(token,)] / plan.count
        assert share == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / plan.count))
    assert sum(found.values()) == plan.count


@settings(deadline=None)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([-math.inf, -80.0, -1.0, 0.0, 2.5, 30.0]), min_size=7, max_size=7), min_size=1
    ),
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([1e-6, 0.5, 1.0, 100.0]),
)
def test_a_uniform_number_falls_into_the_drawn_tokens_share(
    rows: list[list[float]], seed: int, temperature: float
) -> None:
    """Against sums in exact order, for each row by itself; a token that is ruled out is never drawn."""
    for own, row in enumerate(torch.tensor([[0.0, *row] for row in rows]), start=seed):
        before = row.clone()
        token = int(sampling_processors(own, temperature=temperature)(None, row[None]).argmax())
        assert torch.equal(row, before)
        uniform = torch.rand(1, generator=torch.Generator().manual_seed(own), dtype=torch.float64).item()
        shares = (row.double() / temperature).softmax(-1).tolist()
        assert row[token] > -math.inf
        assert sum(shares[:token]) - 1e-6 <= uniform <= sum(shares[: token + 1]) + 1e-6


def test_samples_end_as_answers_do(language_model: LanguageModel) -> None:
    free = answered(language_model, ["q"])[0].samples(Sampling(count=8, max_tokens=8))
    stop = next(sample.text[3] for sample in free if len(sample.text) > 4)
    options = GenerationOptions(max_tokens=3, stop=(stop,))
    stopped = language_model.generate("q", options).evidence.samples(Sampling(count=8, max_tokens=8))
    for sample, longer in zip(stopped, free, strict=True):
        assert stop not in sample.text
        assert longer.text.startswith(sample.text)
        assert len(sample.log_probs) == len(sample.ids)


def test_samples_fit_the_context_window(make_language_model) -> None:
    model = make_language_model(max_position_embeddings=48)
    samples = answered(model, ["q"])[0].samples(Sampling(count=3, max_tokens=500))
    prompt = len(model.render("q").ids)
    assert all(prompt + len(sample.ids) <= 48 for sample in samples)


def test_foreign_text_is_compared_with_the_models_own_samples(language_model: LanguageModel) -> None:
    evidence = language_model.evidence("What is it?", "A word.")
    assert (evidence.text, evidence.question) == ("A word.", "What is it?")
    plan = Sampling(count=3, max_tokens=4)
    own = answered(language_model, ["What is it?"])[0]
    assert [s.ids for s in evidence.samples(plan)] == [s.ids for s in own.samples(plan)]


@pytest.mark.parametrize("name", ["qwen3-next", "falcon-h1", "lfm2"])
def test_samples_of_a_model_with_states_are_written_together(name: str, monkeypatch) -> None:
    """Each is drawn as by itself; where rows may see each other they are written by themselves."""
    model, plan, together = wrapped(name), Sampling(count=5, max_tokens=6), list[int]()
    generate = RunningBatch._generate
    monkeypatch.setattr(
        RunningBatch, "_generate", lambda *call, **more: (together.append(len(call[1])), generate(*call, **more))[1]
    )

    def drawn() -> list[tuple[int, ...]]:
        return [sample.ids for sample in model.evidence("What is tea?", "A drink.").samples(plan)]

    found = drawn()
    model.max_batch = 2
    assert drawn() == found
    model.max_batch = None
    model._model.register_forward_hook(lambda *_: None)
    assert drawn() == found
    assert together == [5, 2, 2, 1, *[1] * 5]


@pytest.mark.parametrize(
    "bad",
    [
        {"count": 0},
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -1},
        {"max_tokens": 0},
    ],
)
def test_bad_plans(bad: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Sampling(**bad)
    if bad.keys() <= {"count", "max_tokens"}:
        with pytest.raises(InputError):
            DiverseBeams(**bad)
    with pytest.raises(InputError):
        DiverseBeams(penalty=-1.0)


# --- diverse beams


def brute_force_beams(model, prompt: list[int], groups: int, penalty: float, steps: int, ends: set[int]):
    """Group after group at every step, over plain forward passes: argmax of log p - penalty x earlier takers."""
    answers: list[list[int]] = [[] for _ in range(groups)]
    for _ in range(steps):
        taken: Counter[int] = Counter()
        for answer in answers:
            if answer and answer[-1] in ends:
                continue
            with torch.no_grad():
                log_p = model(torch.tensor([[*prompt, *answer]])).logits[0, -1].log_softmax(-1)
            scores = [float(value) - penalty * taken[token] for token, value in enumerate(log_p)]
            choice = scores.index(max(scores))
            taken[choice] += 1
            answer.append(choice)
    return [tuple(token for token in answer if token not in ends) for answer in answers]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 50.0])
def test_diverse_beams_are_the_brute_force_search(make_language_model, penalty: float) -> None:
    model = make_language_model(initializer_range=0.15)
    batch = answered(model, ["q", "Another one"])
    likely = Counter(token for e in batch for s in e.samples(Sampling(count=20, max_tokens=1)) for token in s.ids)
    # An end token that is taken often: groups end at different steps.
    model._model.generation_config.eos_token_id = [likely.most_common(1)[0][0], 257]
    batch = answered(model, ["q", "Another one"])
    plan = DiverseBeams(count=4, penalty=penalty, max_tokens=4)
    for evidence in batch:
        ends = set(model.end_tokens)
        expected = brute_force_beams(model._model, list(evidence.prompt.ids), 4, penalty, 4, ends)
        # Answers that are nothing but white space hold no token.
        kept = [ids if model.decode(ids).strip() else () for ids in expected]
        assert [sample.ids for sample in evidence.samples(plan)] == kept
    if penalty == 0:
        assert len({sample.ids for sample in batch[0].samples(plan)}) == 1


# --- readings


@pytest.mark.parametrize("name", [*ARCHITECTURES, "mamba", "falcon-h1", "qwen3-next"])
def test_readings_are_those_of_each_answer_alone(name: str) -> None:
    model = shared(name)
    prompts = [token_ids(7, 1), token_ids(3, 2), token_ids(1, 3)]
    answers = [[token_ids(4, 4), token_ids(1, 5)], [], [token_ids(2, 6), []]]
    scorer = scorer_of(model)
    found = [
        read(scorer, prompt, [((), ids) for ids in own], temperature=0.5)
        for prompt, own in zip(prompts, answers, strict=True)
    ]
    assert [len(own) for own in found] == [2, 0, 2]
    assert (found[2][1].log_probs, found[2][1].embedding) == ((), None)
    middle = middle_layer(model.config.num_hidden_layers)
    for prompt, own, readings in zip(prompts, answers, found, strict=True):
        for answer, reading in zip(own, readings, strict=True):
            if not answer:
                continue
            with torch.no_grad():
                output = model(torch.tensor([[*prompt, *answer]]), output_hidden_states=True)
            log_p = (output.logits[0, len(prompt) - 1 : -1] / 0.5).log_softmax(-1)
            expected = log_p[range(len(answer)), answer].tolist()
            assert reading.log_probs == pytest.approx(expected, rel=1e-6, abs=1e-6)
            if name not in STATEFUL:
                assert reading.embedding == pytest.approx(
                    output.hidden_states[middle][0, -1].tolist(), rel=1e-6, abs=1e-6
                )


def test_readings_do_not_depend_on_how_the_work_is_split(monkeypatch) -> None:
    scorer = scorer_of(shared("llama"))
    prompts = [token_ids(3 + i, i) for i in range(4)]
    answers = [[((), token_ids(1 + j, 10 + j)) for j in range(i)] for i in range(4)]
    whole = [read(scorer, prompt, own) for prompt, own in zip(prompts, answers, strict=True)]
    monkeypatch.setattr("semgrad_guard.engine.answers.writing_model._LOGITS", 1)
    split = [read(scorer, prompt, own) for prompt, own in zip(prompts, answers, strict=True)]
    assert [len(own) for own in split] == [0, 1, 2, 3]
    for one, other in zip(whole, split, strict=True):
        for first, second in zip(one, other, strict=True):
            assert first.log_probs == pytest.approx(second.log_probs, rel=1e-9)


KINDS: list[Any] = [GenerationOptions, Sampling, DiverseBeams]


@pytest.mark.parametrize("kind", KINDS)
def test_options_are_replaced_and_pickled(kind: Any) -> None:
    options = kind(max_tokens=7)
    assert replace(options, max_tokens=8).max_tokens == 8
    assert pickle.loads(pickle.dumps(options)) == options  # noqa: S301 - ours


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_option_is_named_with_those_there_are(kind: Any) -> None:
    with pytest.raises(InputError, match=rf"{kind.__name__} takes no maxtokens; it takes .*max_tokens"):
        kind(maxtokens=7)


def test_a_guard_names_its_options(language_model: LanguageModel) -> None:
    unknown: Any = {"max_tokens": 7}
    with pytest.raises(InputError, match=r"Guard takes no max_tokens; it takes .*on_doubt, options, prompt_template"):
        Guard(language_model, Policy(threshold=1.0), **unknown)


def test_files_keep_the_names_that_they_have() -> None:
    """Bindings of calibrations hold these records: another key would refuse calibrations that users have."""
    assert list(plan_record(Sampling())) == ["count", "temperature", "top_p", "top_k", "seed", "max_new_tokens"]
    assert plan_record(DiverseBeams(max_tokens=3)) == {"count": 10, "penalty": 1.0, "max_new_tokens": 3}
    plans = [method.settings().get("plan") for method in paper_suite(max_tokens=5)]
    assert all(plan["max_new_tokens"] == 5 and "max_tokens" not in plan for plan in plans if isinstance(plan, dict))
    assert any(plans)

"""Prompts read from where they differ from earlier ones: the same answers and scores, for less reading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.cache_utils import DynamicCache

from semgrad_guard import GenerationOptions, LanguageModel, Message
from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.replay.batch import FRUGAL, Memory
from semgrad_guard.engine.replay.prompt_store import PromptStore

from .tiny_models import LONG_ROPE, build

AMPLE = Memory(prompts=1 << 26)
BRIEF = GenerationOptions(max_tokens=6)
SYSTEM = Message("system", "Answer with a few words.")
Make = Callable[..., LanguageModel]


def wrapped(name: str, tokenizer: PreTrainedTokenizerFast, memory: Memory, **changes: object) -> LanguageModel:
    model = build(name, vocab_size=258, max_position_embeddings=400, **changes)
    language_model = LanguageModel.from_transformers(model, tokenizer)
    language_model.memory = memory
    return language_model


def chat(model: LanguageModel) -> list[Generation]:
    """Three turns, each scored before the next one begins."""
    history, turns = [SYSTEM], []
    for question in ("What is tea?", "And salt?", "Why?"):
        history.append(Message("user", question))
        turns.append(model.generate(history, BRIEF))
        turns[-1].evidence.gradients()
        history.append(Message("assistant", turns[-1].text))
    return turns


def semgrad(generation: Generation) -> float:
    timed = generation.evidence.gradients()
    assert timed is not None
    assert timed.scores.tier == "captured"
    return timed.scores.semgrad


@contextmanager
def columns_read(model: LanguageModel) -> Iterator[list[int]]:
    """How many columns each forward pass of the model was given."""
    read: list[int] = []
    layer = model._scorer.current_replayer().layers[0]
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: read.append(args[0].shape[1]), with_kwargs=True)
    try:
        yield read
    finally:
        hook.remove()


@pytest.mark.parametrize(
    "name", ["llama", "qwen2-tied", "qwen3-moe", "mistral-sliding", "gemma3", "gpt2", "opt", "cohere", "gpt-neox"]
)
def test_turns_of_a_chat_answer_and_score_as_if_read_whole(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    whole, resumed = (chat(wrapped(name, tokenizer, memory)) for memory in (Memory(), AMPLE))
    assert [turn.reused_tokens for turn in whole] == [0, 0, 0]
    assert [turn.reused_tokens > 0 for turn in resumed] == [False, True, True]
    for one, two in zip(whole, resumed, strict=True):
        assert one.response_ids == two.response_ids
        assert semgrad(one) == pytest.approx(semgrad(two), rel=1e-9)


def test_only_what_is_new_is_read(make_language_model: Make) -> None:
    model = make_language_model()
    model.memory = AMPLE
    first = model.generate([SYSTEM, Message("user", "What is tea?")], BRIEF)
    with columns_read(model) as read:
        second = model.generate([SYSTEM, Message("user", "What is salt?")], BRIEF)
    common = next(n for n, (a, b) in enumerate(zip(first.prompt.ids, second.prompt.ids, strict=False)) if a != b)
    assert second.reused_tokens == common > 20
    assert read[0] == len(second.prompt.ids) - common
    assert set(read[1:]) == {1}


def test_the_same_prompt_keeps_the_states_that_scoring_needs(make_language_model: Make) -> None:
    model = make_language_model()
    model.memory = AMPLE
    once, again = model.generate("What is tea?", BRIEF), model.generate("What is tea?", BRIEF)
    assert again.reused_tokens == len(again.prompt.ids) + again.prompt.semantic_token.offset
    assert semgrad(again) == pytest.approx(semgrad(once), rel=1e-10)  # `once` is scored after its keys were used again


def test_nothing_is_kept_unless_asked_for(make_language_model: Make) -> None:
    model = make_language_model()
    chat(model)
    assert model._scorer.current_replayer().prompts.bytes == 0
    model.memory = AMPLE
    chat(model)
    held = model._scorer.current_replayer().prompts.bytes
    assert held > 0
    model.memory = FRUGAL
    assert model._scorer.current_replayer().prompts.bytes == 0


def test_what_goes_on_takes_the_place_of_what_it_continues() -> None:
    store = PromptStore()
    for known in ((1, 2), (1, 2, 3), (1, 4)):
        store.keep(known, read(known), 1 << 20)
    assert store.bytes == (3 + 2) * 2 * 8


def test_changed_weights_are_read_anew(make_language_model: Make) -> None:
    model = make_language_model()
    model.memory = AMPLE
    model.generate("What is tea?", BRIEF)
    with torch.no_grad():
        model._model.model.embed_tokens.weight.mul_(1.5)
    changed = model.generate("What is tea?", BRIEF)
    assert changed.reused_tokens == 0


def test_frequencies_that_change_with_the_length_are_never_taken_up_again(tokenizer: PreTrainedTokenizerFast) -> None:
    model = wrapped("phi3", tokenizer, AMPLE, **LONG_ROPE)
    turns, whole = chat(model), chat(wrapped("phi3", tokenizer, Memory(), **LONG_ROPE))
    assert [turn.reused_tokens for turn in turns] == [0, 0, 0]
    assert [turn.response_ids for turn in turns] == [turn.response_ids for turn in whole]


def test_recurrent_models_read_everything(tokenizer: PreTrainedTokenizerFast) -> None:
    assert [turn.reused_tokens for turn in chat(wrapped("lfm2", tokenizer, AMPLE))] == [0, 0, 0]


def test_batches_and_streams(make_language_model: Make) -> None:
    model, plain = make_language_model(), make_language_model()
    model.memory = AMPLE
    model.generate("What is tea?", BRIEF)
    batch = model.generate_batch(["What is tea?", "And salt?"], BRIEF)
    assert [row.text for row in batch] == [plain.generate(text, BRIEF).text for text in ("What is tea?", "And salt?")]
    assert batch[0].reused_tokens > batch[1].reused_tokens > 0  # all of its prompt, and the template's first tokens
    stream = model.stream("What is tea, then?", BRIEF)
    assert "".join(stream) == plain.generate("What is tea, then?", BRIEF).text
    assert stream.generation.reused_tokens > 0
    assert semgrad(stream.generation) == pytest.approx(semgrad(plain.generate("What is tea, then?", BRIEF)), rel=1e-9)


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_an_adapters_chat_is_taken_up_as_well(dora: bool, tokenizer: PreTrainedTokenizerFast) -> None:
    """PEFT's wrapper hands positions on to the model that it wraps, and does not name them."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], use_dora=dora)
    base = build("llama", vocab_size=258, max_position_embeddings=400)
    wrapper = peft.get_peft_model(base, settings, autocast_adapter_dtype=False).eval()
    for name, parameter in wrapper.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.05)
    model = LanguageModel.from_transformers(wrapper, tokenizer)
    whole = chat(model)
    model.memory = AMPLE
    resumed = chat(model)
    assert [turn.reused_tokens > 0 for turn in resumed] == [False, True, True]
    assert [turn.response_ids for turn in resumed] == [turn.response_ids for turn in whole]
    assert [semgrad(turn) for turn in resumed] == pytest.approx([semgrad(turn) for turn in whole], rel=1e-9)


def read(ids: tuple[int, ...]) -> DynamicCache:
    """A cache of one layer whose keys show which tokens they are of."""
    cache = DynamicCache()
    keys = torch.tensor(ids, dtype=torch.float64).reshape(1, 1, -1, 1)
    cache.update(keys, keys + 0.5, 0)
    return cache


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


@given(earlier=st.lists(IDS, max_size=6), ids=IDS, most=st.integers(0, 6))
def test_the_longest_known_beginning_is_found(earlier: list[tuple[int, ...]], ids: tuple[int, ...], most: int) -> None:
    store = PromptStore()
    for known in earlier:
        store.keep(known, read(known), 1 << 20)
    found = store.begin(ids, most)
    length = found.get_seq_length()
    beginnings = {known[:n] for known in earlier for n in range(len(known) + 1)}
    assert length == max((n for n in range(min(most, len(ids)) + 1) if ids[:n] in beginnings), default=0)
    if length:
        assert tuple(found.layers[0].keys.flatten().tolist()) == ids[:length]
        assert tuple(found.layers[0].values.flatten().tolist()) == tuple(token + 0.5 for token in ids[:length])


@given(earlier=st.lists(IDS, max_size=8), budget=st.integers(0, 200))
def test_no_more_is_held_than_the_budget_and_the_last_used_stays(earlier: list[tuple[int, ...]], budget: int) -> None:
    store = PromptStore()
    for known in earlier:
        store.keep(known, read(known), budget)
        assert store.bytes <= budget
        fits = len(known) * 2 * 8 <= budget
        assert store.begin(known, len(known)).get_seq_length() == len(known) or not fits

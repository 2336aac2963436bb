"""The self-check and how real scores verify it, also where several threads score at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama as llama

from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores import exactness
from semgrad_guard.engine.scores import scorer as scorer_module
from semgrad_guard.engine.scores.exactness import checked
from semgrad_guard.engine.scores.gradient_scores import gradient_scores
from semgrad_guard.engine.scores.gradients import GradientScores, Tier
from semgrad_guard.engine.scores.scorer import Scorer, scorer_of
from semgrad_guard.engine.scores.twin import CACHE
from tests.pairwise import in_turn

from .architectures import expectation
from .cases import CASES, scored, taped
from .generated_models import build as generated
from .generated_models import require_known
from .oracle import worst_relative_error
from .tiny_models import ARCHITECTURES, LONG_ROPE, VOCABULARY, build, shared, spread_weights, token_ids


class SharedScratch:
    """What the layers of a broken model pass to each other behind the residual stream's back."""

    first: torch.Tensor | None = None

    def __deepcopy__(self, memo: Any) -> SharedScratch:
        return memo.setdefault(id(self), SharedScratch())


class BackdoorLayer(llama.LlamaDecoderLayer):
    """The last layer adds the first layer's output, or a running mean of the embeddings, to its input."""

    scratch: SharedScratch
    kind: str

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        index, last = self.self_attn.layer_idx, self.self_attn.config.num_hidden_layers - 1
        if index == last and self.scratch.first is not None:
            hidden_states = hidden_states + self.scratch.first
        output = super().forward(hidden_states, *args, **kwargs)
        if index == 0:
            means = hidden_states.cumsum(1) / torch.arange(1, hidden_states.shape[1] + 1)[:, None]
            self.scratch.first = output if self.kind == "lower layer" else means
        return output


class WarmLogits(LlamaForCausalLM):
    """Multiplies its logits by a factor that no configuration tells."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.7
        return output


class CappedLogits(LlamaForCausalLM):
    """Caps its logits by a number that no configuration tells."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = 7 * torch.tanh(output.logits / 7)
        return output


class BentLogits(LlamaForCausalLM):
    """Does to its logits what is no factor and no cap."""

    bend = 0.3

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + self.bend * torch.sin(output.logits)
        return output


class HardlyBentLogits(BentLogits):
    """By less than float32's rounding would tell."""

    bend = 1e-4


class ForgetfulCache(LlamaForCausalLM):
    """Attends to nothing it has cached."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs[CACHE] = None
        kwargs.pop("attention_mask", None)
        return super().forward(*args, **kwargs)


def tiny(kind: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config)
        spread_weights(model)
    return model.double().eval()


def with_backdoor(kind: str) -> LlamaForCausalLM:
    model, scratch = tiny(LlamaForCausalLM), SharedScratch()
    for layer in model.model.layers:
        layer.__class__ = BackdoorLayer
        layer.scratch, layer.kind = scratch, kind
    return model


BROKEN: dict[str, Callable[[], Any]] = {
    "a lower layer's output used above": lambda: with_backdoor("lower layer"),
    "a mean over all positions": lambda: with_backdoor("mean"),
    "logits bent in forward": lambda: tiny(BentLogits),
    "logits bent by little": lambda: tiny(HardlyBentLogits),
    "a cache that is ignored": lambda: tiny(ForgetfulCache),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_way_that_is_wrong_is_not_taken_and_the_score_is_exact(case: str) -> None:
    """From a tape as well as from none, alone and together."""
    model, objective = BROKEN[case](), Objective()
    scorer = scorer_of(model)
    rows = [one.row(objective) for one in CASES]
    found = [*scorer.score(taped(scorer, rows[:1], 3), objective), *scorer.score(rows, objective)]
    for one, example in zip(found, (CASES[0], *CASES), strict=True):
        assert worst_relative_error(one, example.reference(model, objective)) < 1e-7
    assert not scorer.joins


def test_an_ordinary_call_for_all_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "semgrad_guard"):
        assert scorer_of(tiny(BentLogits)).exactness().way == "ordinary"
    assert "scores this model by its ordinary call" in caplog.text
    assert "disagree with autograd" in caplog.text


@in_turn(name=ARCHITECTURES, dtype=[torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sound_models_pass_in_every_dtype(name: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    """A self-check that cries wolf would cost speed: rounding alone must not turn a tier down."""
    model = build(name, dtype=dtype)
    assert scorer_of(model).exactness().way == "rows"
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "way"),
    [("gemma2", "rows"), ("granite_swa", "rows"), ("falcon_h1", "continued"), ("olmo_hybrid", "continued")],
)
def test_a_model_in_float64_may_round_to_float32_inside(name: str, way: str) -> None:
    require_known(name)
    assert scorer_of(generated(name).double()).exactness().way == way


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma3"])
def test_a_large_model_is_checked_by_some_of_its_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are left out write no keys: the others are cut all the same."""
    monkeypatch.setattr(exactness, "_ALL_BYTES", 0)
    layers = {} if name != "gemma3" else {"layer_types": ["sliding_attention", "full_attention"] * 5}
    model = build(name, dtype=torch.bfloat16, num_hidden_layers=10, **layers)
    found = scorer_of(model).exactness()
    assert (found.way, found.in_context, found.joins) == ("rows", "rows", True)


@pytest.mark.parametrize("kind", [WarmLogits, CappedLogits])
def test_what_follows_the_head_is_measured(kind: type[LlamaForCausalLM]) -> None:
    model = tiny(kind)
    assert scorer_of(model).exactness().way != "ordinary"
    for found, case in zip(scored(model, CASES), CASES, strict=True):
        assert worst_relative_error(found, case.reference(model, Objective())) < 1e-7


@pytest.mark.parametrize("kind", [LlamaForCausalLM, BentLogits])
def test_broken_weights_settle_nothing(
    kind: type[LlamaForCausalLM], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN agrees with nothing: the tiers are decided once the model has finite outputs, and not asked for before."""
    model, checks = tiny(kind), []
    monkeypatch.setattr(scorer_module, "checked", lambda *given: (checks.append(1), checked(*given))[1])
    weight = model.lm_head.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    assert scorer_of(model).exactness().way == "ordinary"
    case = CASES[0]
    assert gradient_scores(model, case.prompt, case.response, semantic_token=-3).semgrad is None
    assert not caplog.records
    assert scorer_of(model).exactness().deviation is None
    assert len(checks) == 1
    with torch.no_grad():
        weight.copy_(good)
    assert scorer_of(model).exactness().deviation is not None
    assert scorer_of(model).exactness().way == ("ordinary" if kind is BentLogits else "rows")
    found = gradient_scores(model, case.prompt, case.response, semantic_token=case.semantic_token)
    assert worst_relative_error(found, case.reference(model, Objective())) < 1e-7
    assert len(checks) == 2


def test_a_model_that_ignores_its_mask_behind_padding_is_exact_together() -> None:
    """GIT: what a padded row would lack is not taken for what it lacks by itself."""
    model = generated("git")
    for found, case in zip(scored(model, CASES), CASES, strict=True):
        expected = expectation(model, case)
        assert (found.semgrad, found.paragrad) == pytest.approx((expected.semgrad, expected.paragrad), rel=1e-4)


def rotating(rope_type: str) -> Any:
    """A model whose frequencies follow the length beyond 20 tokens; each call makes one with the same weights."""
    if rope_type == "longrope":
        return build("phi3", **LONG_ROPE)
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    return build("llama", rope_parameters=rope, max_position_embeddings=20)


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_frequencies_that_depend_on_the_length_go_by_the_ordinary_call_beyond_it(rope_type: str) -> None:
    """A cached key was rotated for the length of its day; one pass over the whole sequence rotates it otherwise."""
    model = rotating(rope_type)
    expected_tiers: dict[int, Tier] = {0: "replay", 2: "ordinary"}
    for row, tier in expected_tiers.items():
        case = CASES[row]
        found = gradient_scores(model, case.prompt, case.response, semantic_token=case.semantic_token)
        assert found.tier == tier
        assert worst_relative_error(found, case.reference(model, Objective())) < 1e-7


@pytest.mark.parametrize("lengths", [(60, 12, 60), (12, 60, 22), (40, 19, 20, 21, 60, 5), (60, 22, 12)])
@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_a_score_does_not_depend_on_what_was_scored_before(rope_type: str, lengths: tuple[int, ...]) -> None:
    """Nor on the passes that its owner has run, nor on a batch."""

    def ids(length: int) -> list[int]:
        return [3 + (7 * place + length) % (VOCABULARY - 3) for place in range(length)]

    def scores(model: Any, rows: Sequence[int]) -> list[float | None]:
        answers = [ids(4)] * len(rows)
        return [one.semgrad for one in gradient_scores(model, [ids(n) for n in rows], answers, semantic_token=-2)]

    alone = {length: scores(rotating(rope_type), [length])[0] for length in lengths}
    model = rotating(rope_type)
    for length in lengths:
        assert scores(model, [length]) == pytest.approx([alone[length]], rel=1e-9)
    assert scores(model, lengths) == pytest.approx([alone[length] for length in lengths], rel=1e-9)
    model(input_ids=torch.tensor([ids(70)]))
    for length in lengths:
        assert scores(model, [length]) == pytest.approx([alone[length]], rel=1e-9)


FITS = {
    "one of the same layer": ({}, True),
    "one of a lower layer": ({"layer": 0}, False),
    "one that begins earlier": ({"token": -5}, True),
    "one that begins later": ({"token": -1}, False),
    "one of a layer above the span": ({"layer": 4}, False),
    "one of another state of the model": ({"epoch": object()}, False),
}


@pytest.mark.parametrize("case", FITS)
def test_a_tape_that_does_not_belong_to_the_row_is_left_aside(case: str) -> None:
    """What a fitting one holds is taken at its word: here it is broken. Without it the scores are right."""
    (options, is_used), model, objective = FITS[case], shared("llama"), Objective()
    scorer = scorer_of(model)
    scorer.score([CASES[0].row(objective)], objective)  # is verified
    (row,) = taped(scorer, [CASES[0].row(Objective(token=options.get("token", -3)))], options.get("layer", 3))
    tape = row.taped if "epoch" not in options else replace(row.taped, epoch=options["epoch"])
    recorder = tape.passes[0][0]
    recorder.finals[:] = [one * float("nan") for one in recorder.finals]
    recorder._hidden = [one * float("nan") for one in recorder._hidden]
    recorder.logits, recorder._outputs = None, {}
    [found] = scorer.score([CASES[0].row(objective, tape=tape)], objective)
    assert (found.reason is not None) == is_used
    assert is_used or worst_relative_error(found, CASES[0].reference(model, objective)) < 1e-7


ROUNDS = 6


def test_two_threads_score_while_a_third_generates() -> None:
    """A long-rope model: it rewrites a buffer in every pass, so that shared state would show."""
    model = build("phi3", **LONG_ROPE)
    prompt = torch.tensor([token_ids(30, 1)])

    def generate() -> list[int]:
        mask = torch.ones_like(prompt)
        return model.generate(prompt, attention_mask=mask, max_new_tokens=5, do_sample=False)[0].tolist()

    def score(row: int) -> GradientScores:
        case = CASES[row]
        return gradient_scores(model, case.prompt, case.response, semantic_token=case.semantic_token)

    generated, scored = generate(), [score(0), score(2)]
    start = threading.Barrier(3)

    def repeat(work: Callable[[], Any]) -> list[Any]:
        start.wait()
        return [work() for _ in range(ROUNDS)]

    with ThreadPoolExecutor(3) as pool:
        texts = pool.submit(repeat, generate)
        scores = [pool.submit(repeat, lambda row=row: score(row)) for row in (0, 2)]
        assert texts.result() == [generated] * ROUNDS
        assert [future.result() for future in scores] == [[found] * ROUNDS for found in scored]


def test_the_first_scores_of_many_threads_share_one_scorer_and_one_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    checks: list[int] = []
    start = threading.Barrier(4)
    monkeypatch.setattr(scorer_module, "checked", lambda *given: (checks.append(1), checked(*given))[1])

    def first() -> tuple[Scorer, float | None]:
        start.wait()
        case = CASES[0]
        found = gradient_scores(model, case.prompt, case.response, semantic_token=case.semantic_token)
        return scorer_of(model), found.semgrad

    with ThreadPoolExecutor(4) as pool:
        results = [future.result() for future in [pool.submit(first) for _ in range(4)]]
    assert len(set(results)) == 1
    assert len(checks) == 1

"""One architecture under test: a tiny model of it, our scores, and plain autograd by the model's own ordinary call."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores.gradient_scores import gradient_scores
from semgrad_guard.engine.scores.scorer import scorer_of
from semgrad_guard.engine.scores.twin import CACHE
from semgrad_guard.errors import SemGradGuardError

from .cases import CASES, Case
from .generated_models import build

Outcome = Literal["exact", "refused", "inexact", "crashed", "not built"]
EXACT = 1e-4
"""The worst relative error over every number of a score, in float32."""
EXACT_BELOW = 1e-3
"""The same at lower layers: rounding grows on the way down (most through layers with a state)."""
NOISE = 3.0
"""How many times its own noise a score in bfloat16 may be off."""
PARTS = (2, 3), (3, 6)
"""The sentences of the last case that have others before them."""
_LEAST_NOISE = 2.0**-8
"""Of a single rounding: where a model's own passes happen to agree, its noise is no less."""


@dataclass(frozen=True)
class Verdict:
    """What happened to one architecture.

    `tier` is what scored it; `error` the worst relative error in float32, `noise_ratio`
    that of SemGrad and ParaGrad in bfloat16, in units of the model's own (None where it was not scored); `message`
    the message where it was not scored.
    """

    model_type: str
    outcome: Outcome
    tier: str | None = None
    error: float | None = None
    noise_ratio: float | None = None
    message: str = ""


@dataclass(frozen=True)
class Expected:
    """The results of plain autograd: SemGrad, ParaGrad, entropies and log-probabilities of the response's tokens."""

    semgrad: float
    paragrad: float
    tokens: tuple[float, ...]


LOWER = (1, 2)
"""Layers that the paper's span leaves out."""


def check(model_type: str) -> Verdict:
    """Build it, score it alone, in a batch and by sentence, in float32 and bfloat16, and compare."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = build(model_type)
        except Exception as error:  # noqa: BLE001 - a library's class that cannot be made is a finding
            return Verdict(model_type, "not built", message=_said(error))
        try:
            found, tier = scores(model)
        except SemGradGuardError as error:
            return Verdict(model_type, "refused", message=_said(error))
        except Exception as error:  # noqa: BLE001 - and so is whatever the engine lets through
            return Verdict(model_type, "crashed", message=_said(error))
        try:
            expected = [expectation(model, case) for case in CASES]
        except Exception as error:  # noqa: BLE001
            return Verdict(model_type, "crashed", message=f"plain autograd: {_said(error)}")
        error = max(_error(ours, theirs) for row in found for ours, theirs in zip(row, expected, strict=True))
        try:
            (lower, expected_below), *parts = others(model)
        except Exception as error:  # noqa: BLE001
            return Verdict(model_type, "crashed", message=f"lower layers, or in context: {_said(error)}")
        error = max([error, *(_error(ours, theirs) for ours, theirs in parts)])
        if not (error < EXACT and _error(lower, expected_below) < EXACT_BELOW):
            return Verdict(model_type, "inexact", tier, error)
        return Verdict(model_type, "exact", tier, error, _noise_ratio(model, expected))


def scores(model: PreTrainedModel) -> tuple[list[list[Expected]], str]:
    """The cases alone, and as one batch; and their tier."""
    prompts, responses = [case.prompt for case in CASES], [case.response for case in CASES]
    tokens = [case.semantic_token for case in CASES]
    alone = [gradient_scores(model, case.prompt, case.response, semantic_token=case.semantic_token) for case in CASES]
    together = gradient_scores(model, prompts, responses, semantic_token=tokens)
    return [[_plain(found) for found in row] for row in (alone, together)], together[-1].tier


def others(model: PreTrainedModel) -> list[tuple[Expected, Expected]]:
    """Scores of lower layers, and of sentences where the model allows context, each with what is expected."""
    scorer, case = scorer_of(model), CASES[-1]
    lower = gradient_scores(model, case.prompt, case.response, semantic_token=case.semantic_token, layers=LOWER)
    found = [(_plain(lower), expectation(model, case, layers=LOWER))]
    if scorer.exactness().in_context is not None:
        rows = [case.row(Objective(), before=begin, end=end, in_context=True) for begin, end in PARTS]
        parts = [expectation(model, case, part=part) for part in PARTS]
        found += zip(map(_plain, scorer.score(rows, Objective())), parts, strict=True)
    return found


def _plain(found: Any) -> Expected:
    if found.reason is not None:
        raise ValueError(f"unscored: {found.reason}")
    return Expected(found.semgrad, found.paragrad, (*found.entropies, *found.log_probs))


class Detaching(DynamicCache):
    """A cache in which the keys and values of some positions let no gradient through."""

    def __init__(self, begin: int, end: int) -> None:
        super().__init__()
        self.begin, self.end = begin, end

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        halves = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        before, after = slice(0, self.begin), slice(self.end, None)
        return tuple(
            torch.cat([x[:, :, before], x[:, :, self.begin : self.end].detach(), x[:, :, after]], dim=2) for x in halves
        )


def expectation(
    model: PreTrainedModel, case: Case, *, part: tuple[int, int] | None = None, layers: Sequence[int] | None = None
) -> Expected:
    """The definition: gradients of sum_t H_t log p_t at t* over the upper layers, by the model's own record of them.

    Nothing is given to the model but the tokens. A hidden state is whatever the record holds for a layer; where it
    has more axes than batch, tokens and width (several residual streams), all entries at t* are one vector.
    Of a `part` of the response the keys and values of the tokens before it are constants, and none follow it.
    """
    begin, end = part or (0, len(case.response))
    first = len(case.prompt) - 1
    context = {CACHE: Detaching(first + 1, first + 1 + begin), "use_cache": True} if part else {"use_cache": False}
    model = copy.deepcopy(model).eval().requires_grad_(False)
    head: Any = model.get_output_embeddings()
    weight = head.weight.detach().clone().requires_grad_()
    head.register_forward_hook(lambda _, args, __: F.linear(args[0], weight, head.bias))
    embedding: Any = model.get_input_embeddings()
    embedding.register_forward_hook(lambda _, __, output: output.requires_grad_().clone())
    with _layer_inputs(model) as inputs, torch.enable_grad():
        ids = torch.tensor([[*case.prompt, *case.response[:end]]])
        output: Any = model(input_ids=ids, output_hidden_states=True, return_dict=True, **context)
        log_p = output.logits[0, first + begin : first + end].double().log_softmax(-1)
        entropies = -(log_p.detach().exp() * log_p.detach()).sum(-1)
        log_probs = log_p[torch.arange(end - begin), torch.tensor(case.response[begin:end])]
        loss = (entropies * log_probs).sum()
    record = [_in_graph(states, inputs) for states in output.hidden_states]
    begins = max((k for k, states in inputs if k and states is record[0]), default=0)  # Mamba's, from layer 1 on
    n_layers = len(record) - 1
    span = [record[layer - begins] for layer in layers or range(n_layers // 2 + 1, n_layers)]
    by_weight, *by_states = torch.autograd.grad(loss, [weight, *span])
    token = len(case.prompt) + case.semantic_token
    at_token = torch.cat([_at(gradient, token, ids.shape[1]) for gradient in by_states])
    tokens = (*entropies.tolist(), *log_probs.tolist())
    return Expected(float(at_token.abs().mean()), float(by_weight.double().abs().mean()), tokens)


def _in_graph(states: torch.Tensor, inputs: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """What a recorded copy with batch and tokens exchanged was made from; else the recorded states themselves."""
    turned = states.transpose(0, 1)
    made_from = (given for _, given in inputs if given.shape == turned.shape != states.shape)
    return next((given for given in made_from if torch.equal(given, turned)), states)


def _at(gradient: torch.Tensor, token: int, length: int) -> torch.Tensor:
    """All entries of one token."""
    return gradient.select(list(gradient.shape).index(length), token).flatten().double()


@contextmanager
def _layer_inputs(model: nn.Module) -> Any:
    """What the members of every list of modules are given first: (place in its list, tensor)."""
    seen: list[tuple[int, torch.Tensor]] = []

    def keep(place: int) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
            if first is not None:
                seen.append((place, first))

        return hook

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    hooks = [
        child.register_forward_pre_hook(keep(place), with_kwargs=True)
        for module in lists
        for place, child in enumerate(module)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _error(found: Expected, expected: Expected) -> float:
    pairs = [(found.semgrad, expected.semgrad), (found.paragrad, expected.paragrad)]
    pairs += [*zip(found.tokens, expected.tokens, strict=True)]
    return max(_relative(ours, theirs) for ours, theirs in pairs)


def _relative(ours: float, theirs: float) -> float:
    if ours == theirs:
        return 0.0
    return abs(ours - theirs) / abs(theirs) if theirs and math.isfinite(ours) else math.inf


def _noise_ratio(model: PreTrainedModel, expected: Sequence[Expected]) -> float | None:
    """How far our scores in bfloat16 are off, at the worst, in units of how far the model's own passes are."""
    half: Any = model.to(torch.bfloat16)  # pyright: ignore
    try:
        own = [expectation(half, case) for case in CASES]
        ours, _ = scores(half)
    except Exception:  # noqa: BLE001 - some models do not run in half precision at all
        return None
    noise = max(*(_gradients(gradients, exact) for gradients, exact in zip(own, expected, strict=True)), _LEAST_NOISE)
    off = max(_gradients(gradients, exact) for row in ours for gradients, exact in zip(row, expected, strict=True))
    return off / noise


def _gradients(found: Expected, expected: Expected) -> float:
    return max(_relative(found.semgrad, expected.semgrad), _relative(found.paragrad, expected.paragrad))


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]

"""The ordinary call: a row's tokens alone, through the model's own code, and plain autograd. It defines the scores."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.replay import FixedLayer
from semgrad_guard.engine.replay.tape import Row
from semgrad_guard.engine.replay.twin import CACHE, Twin
from semgrad_guard.engine.scores.gradients import GradientScores, assembled, by_token, norm_of, reduced
from semgrad_guard.errors import UnsupportedModelError


class Ordinary:
    """One row by the model's ordinary call. Its graph lives as long as this object.

    `raw` is the head's own output and `logits` the model's, [columns, V], where the head's module was called;
    `token_axis` is the axis of hidden states that counts tokens.

    Raises:
        UnsupportedModelError: the model's own call cannot be differentiated by the states of its layers.
    """

    def __init__(self, twin: Twin, row: Row, span: Sequence[int]) -> None:
        raw: list[torch.Tensor] = []
        embedding: Any = twin.model.get_input_embeddings()
        scored = slice(-(row.length + 1), -1)  # the last token predicts nothing, but has a place in the sequence
        with ExitStack() as stack:
            # A copy of the tensor with a gradient: some models scale it in place.
            began = embedding.register_forward_hook(lambda *call: call[2].detach().requires_grad_().clone())
            stack.callback(began.remove)
            stack.callback(twin.head.register_forward_hook(lambda *call: raw.append(call[2].detach())).remove)
            self._weight = stack.enter_context(twin.with_a_head_weight_of_its_own())
            stack.enter_context(torch.enable_grad())
            options: dict[str, Any] = {"logits_to_keep": row.length + 1}
            if row.in_context:
                options |= {"use_cache": True, CACHE: _letting_none_through(row, twin.device)}
            output, self._hidden, self.token_axis = _called(twin, row.ids[: row.end], span, **options)
        self._row, self.logits = row, output.logits[0, scored]
        self.raw = raw[-1][0, scored] if raw else None

    def scores(self, objective: Objective) -> GradientScores:
        """By autograd from the model's own logits to the head's weight and the span."""
        with torch.enable_grad():
            log_p = torch.log_softmax(self.logits.double(), dim=-1)
            entropies = -(log_p.detach().exp() * log_p.detach()).sum(-1)
            targets = torch.tensor(self._row.targets, device=log_p.device)
            log_probs = log_p.gather(1, targets[:, None]).squeeze(1)
            terms = (entropies if objective.weighted else 1.0) * log_probs
            if not terms.requires_grad:
                raise no_gradient()
            loss = terms.mean() if objective.averages else terms.sum()
        by_head, *hidden = self._gradients(loss)
        semgrad, grid = reduced(self._row, hidden, 0, objective.norm)
        return assembled(
            "ordinary",
            semgrad=semgrad,
            grid=grid,
            paragrad=norm_of(by_head.double(), objective.norm),
            entropies=entropies.tolist(),
            log_probs=log_probs.tolist(),
        )

    def _gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """By the head's weight, and by the hidden states [columns, width] of each layer."""
        if not all(states.requires_grad for states in self._hidden):
            raise UnsupportedModelError(
                "this model runs some of its layers under torch.no_grad(), as its own code says: plain automatic "
                "differentiation has no gradient by their hidden states. Choose other layers, or another model."
            )
        by_head, *found = torch.autograd.grad(loss, [self._weight, *self._hidden], allow_unused=True)
        if by_head is None or any(gradient is None for gradient in found):
            raise UnsupportedModelError(
                "the hidden states that this model reports are copies, from which no path leads to its logits; there "
                "is nothing to differentiate by. Use a model whose layers pass on one state for each token."
            )
        return [by_head, *(by_token(gradient, self.token_axis)[0] for gradient in found)]


def hidden_states(twin: Twin, ids: Sequence[int]) -> torch.Tensor:
    """h^(l) of a text for l = 0 .. L-1, without a graph: [L, tokens, width].

    Raises:
        UnsupportedModelError: which recorded state belongs to which layer or token is not known.
    """
    with torch.no_grad():
        _, hidden, axis = _called(twin, ids, range(twin.architecture.n_layers), logits_to_keep=1)
    return torch.stack([by_token(states, axis)[0] for states in hidden])


def no_gradient() -> UnsupportedModelError:
    """The error for a model whose layers let no gradient through."""
    return UnsupportedModelError(
        "no gradient reaches this model's hidden states: layers that quantize their activations (torchao's dynamic "
        "ones, for example) stop it. Load the model unquantized, or with its weights quantized alone."
    )


def _letting_none_through(row: Row, device: torch.device) -> DynamicCache:
    """A cache through which the keys and values of a row's context let no gradient pass."""
    places = torch.arange(row.end, device=device)
    still = ((places >= row.prompt) & (places < row.begin))[None]
    cache: Any = DynamicCache()
    cache.layer_class_to_replicate = partial(FixedLayer, still=still)
    return cache


def _called(
    twin: Twin, ids: Sequence[int], span: Sequence[int], **options: Any
) -> tuple[Any, Sequence[torch.Tensor], int]:
    """The model's own output for a text; h^(l) of a span, as decoder layers received them; the axis that counts tokens.

    The states are verified by the model's own record of them. Where that holds other tensors, it is taken instead, if
    it has one for each layer. (Some models, Mamba for one, record the layers' outputs without the embedding: their
    numbering is off by one.)

    Raises:
        UnsupportedModelError: which state belongs to which layer or token is not known.
    """
    n_layers, seen = twin.architecture.n_layers, list[tuple[int, torch.Tensor]]()
    watched = {*span, n_layers - 1} if twin.layers else set[int]()

    def keep(layer: int, states: torch.Tensor) -> None:
        seen.append((layer, states))

    twin.reset()
    with twin.watching({layer: partial(keep, layer) for layer in watched}):
        output = twin.call(torch.tensor([list(ids)], device=twin.device), output_hidden_states=True, **options)
    states, record = dict(seen), output.hidden_states or ()
    if len(seen) > len(states):
        raise UnsupportedModelError(
            "this model runs its decoder layers several times over, so that a layer has no single hidden state to "
            "differentiate by. Use a model that runs each layer once."
        )
    beyond_embedding = [own for layer, own in seen if layer]
    if not beyond_embedding or not all(_is_shown(own, record) for own in beyond_embedding):
        states = dict(enumerate(record))
        if len(record) != n_layers + 1:
            raise UnsupportedModelError(
                f"{type(twin.model).__name__} reports {len(record)} hidden states for its {n_layers} decoder layers; "
                "which one belongs to which layer is not known. Use a model that runs every layer of its stack on text."
            )
    hidden = [states[layer] for layer in span]
    axes = {_token_axis(own, len(ids)) for own in hidden}
    axis = axes.pop()
    if axes or axis is None:
        raise UnsupportedModelError(
            f"{type(twin.model).__name__} has hidden states of shape {tuple(hidden[0].shape)} for {len(ids)} tokens; "
            "which of them belong to which token is not known. Use a model whose layers pass on one state for each "
            "token."
        )
    return output, hidden, axis


def _is_shown(states: torch.Tensor, record: Sequence[torch.Tensor]) -> bool:
    """Whether a record of hidden states holds these, or a copy with batch and tokens exchanged."""
    if any(states is other for other in record):
        return True
    turned = states.transpose(0, 1)
    return any(turned.shape == other.shape != states.shape and torch.equal(turned, other) for other in record)


def _token_axis(states: torch.Tensor, columns: int) -> int | None:
    """The axis that counts tokens; None where several could, or none.

    Usually states are [B, tokens, d], seldom [tokens, B, d]. A model with several residual streams has
    [B, tokens, streams, d] or [streams, B, tokens, d].
    """
    if states.ndim == 3:
        return next((axis for axis in (1, 0) if states.shape[axis] == columns), None)
    axes = [axis for axis in (1, 2) if states.shape[axis - 1] != columns and states.shape[axis] == columns]
    return axes[0] if states.ndim == 4 and len(axes) == 1 else None

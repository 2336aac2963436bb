"""The ordinary call: a row's tokens alone, through the model's own code, and plain autograd. It defines the scores."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from transformers.cache_utils import DynamicCache

from semgrad_guard.engine.models.architecture import virtual_tokens
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
        layers = _LayerInputs(twin, span)
        embedding: Any = twin.model.get_input_embeddings()
        ids = torch.tensor([row.ids[: row.end]], device=twin.device)
        columns = row.end  # to the last token, which predicts nothing but has a place in the sequence
        twin.reset()
        with ExitStack() as stack:
            # A copy of the tensor with a gradient: some models scale it in place.
            began = embedding.register_forward_hook(lambda *call: call[2].detach().requires_grad_().clone())
            stack.callback(began.remove)
            stack.callback(twin.head.register_forward_hook(lambda *call: raw.append(call[2].detach())).remove)
            self._weight = stack.enter_context(twin.with_a_head_weight_of_its_own())
            stack.enter_context(layers.watched())
            stack.enter_context(torch.enable_grad())
            options: dict[str, Any] = {"output_hidden_states": True, "logits_to_keep": row.end - row.begin + 1}
            if row.in_context:
                options |= {"use_cache": True, CACHE: _letting_none_through(row, twin.device)}
            output = twin.call(ids, **options)
        # Columns of the model's own may precede the row's: the virtual tokens of a tuned prompt.
        known = {columns + own for own in virtual_tokens(twin.model)}
        self._hidden, self.token_axis = layers.verified(output.hidden_states, known)
        self._row, self.logits = row, output.logits[0, -(row.length + 1) : -1]
        self.raw = raw[-1][0, -(row.length + 1) : -1] if raw else None
        self._start = columns - self._hidden[0].shape[self.token_axis]

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
        semgrad, grid = reduced(self._row, hidden, self._start, objective.norm)
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
    n_layers = twin.architecture.n_layers
    layers = _LayerInputs(twin, range(n_layers))
    twin.reset()
    with torch.no_grad(), layers.watched():
        tokens = torch.tensor([list(ids)], device=twin.device)
        output = twin.call(tokens, output_hidden_states=True, logits_to_keep=1)
    known = {len(ids) + own for own in virtual_tokens(twin.model)}
    hidden, axis = layers.verified(output.hidden_states, known)
    return torch.stack([by_token(states, axis)[0] for states in hidden])


def _letting_none_through(row: Row, device: torch.device) -> DynamicCache:
    """A cache through which the keys and values of a row's context let no gradient pass."""
    places = torch.arange(row.end, device=device)
    still = ((places >= row.prompt) & (places < row.begin))[None]
    cache: Any = DynamicCache()
    cache.layer_class_to_replicate = partial(FixedLayer, still=still)
    return cache


def no_gradient() -> UnsupportedModelError:
    """The error for a model whose layers let no gradient through."""
    return UnsupportedModelError(
        "no gradient reaches this model's hidden states: layers that quantize their activations (torchao's dynamic "
        "ones, for example) stop it. Load the model unquantized, or with its weights quantized alone."
    )


class _LayerInputs:
    """h^(l) of a span in one pass over the model's own code, from the inputs of its decoder layers."""

    def __init__(self, twin: Twin, span: Sequence[int]) -> None:
        self._twin, self._n_layers, self._span = twin, twin.architecture.n_layers, span
        self._seen: dict[int, torch.Tensor] = {}
        self._calls = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the inputs of the span's layers (and the last one, by which the rest is verified)."""
        watched = {*self._span, self._n_layers - 1} if self._twin.layers else set[int]()
        with self._twin.watching({layer: partial(self._keep, layer) for layer in watched}):
            yield
        if self._calls > len(self._seen):
            raise UnsupportedModelError(
                "this model runs its decoder layers several times over, so that a layer has no single hidden state to "
                "differentiate by. Use a model that runs each layer once."
            )

    def _keep(self, layer: int, states: torch.Tensor) -> None:
        self._seen[layer] = states
        self._calls += 1

    def verified(
        self, recorded: Sequence[torch.Tensor] | None, columns: Collection[int]
    ) -> tuple[tuple[torch.Tensor, ...], int]:
        """h^(l) as the decoder layers received it, verified by the model's own record; and which axis counts tokens.

        Where the record holds other tensors, it is taken instead, if it has one for each layer. (Some models, Mamba for
        one, record the layers' outputs without the embedding: their numbering is off by one.) A row has one of so many
        `columns`.

        Raises:
            UnsupportedModelError: which recorded state belongs to which layer or token is not known.
        """
        states, model = self._states(recorded or ()), type(self._twin.model).__name__
        axes = {_token_axis(state, columns) for state in states}
        if len(axes) > 1 or None in axes:
            raise UnsupportedModelError(
                f"{model} has hidden states of shape {tuple(states[0].shape)} for {min(columns)} tokens; which of them "
                "belong to which token is not known. Use a model whose layers pass on one state for each token."
            )
        (axis,) = axes
        return states, cast(int, axis)

    def _states(self, record: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        beyond_embedding = [states for layer, states in self._seen.items() if layer]
        if beyond_embedding and all(_is_shown(states, record) for states in beyond_embedding):
            return tuple(self._seen[layer] for layer in self._span)
        if len(record) != self._n_layers + 1:
            raise UnsupportedModelError(
                f"{type(self._twin.model).__name__} reports {len(record)} hidden states for its {self._n_layers} "
                "decoder layers; which one belongs to which layer is not known. Use a model that runs every layer of "
                "its stack on text."
            )
        return tuple(record[layer] for layer in self._span)


def _is_shown(states: torch.Tensor, record: Sequence[torch.Tensor]) -> bool:
    """Whether a record of hidden states holds these, or a copy with batch and tokens exchanged."""
    if any(states is other for other in record):
        return True
    turned = states.transpose(0, 1)
    return any(turned.shape == other.shape != states.shape and torch.equal(turned, other) for other in record)


def _token_axis(states: torch.Tensor, columns: Collection[int]) -> int | None:
    """The axis that counts tokens; None where several could, or none.

    Usually states are [B, tokens, d], seldom [tokens, B, d]. A model with several residual streams has
    [B, tokens, streams, d] or [streams, B, tokens, d].
    """
    if states.ndim == 3:
        return next((axis for axis in (1, 0) if states.shape[axis] in columns), None)
    axes = [axis for axis in (1, 2) if states.shape[axis - 1] not in columns and states.shape[axis] in columns]
    return axes[0] if states.ndim == 4 and len(axes) == 1 else None

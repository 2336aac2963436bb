"""Gradient scores of any response: one scorer per model, its tier chosen by a self-check, exact in every tier."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from semgrad_guard.engine.interruption import InterruptibleLock
from semgrad_guard.engine.models.architecture import Architecture, inspect_architecture
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.captured_states import CapturedStates
from semgrad_guard.engine.replay.memory_budget import Memory
from semgrad_guard.engine.replay.replayer import Replayed, Replayer
from semgrad_guard.engine.replay.token_batch import TokenBatch
from semgrad_guard.engine.replay.weight_sharing_copy import edits, fingerprint
from semgrad_guard.engine.scoring.gradients import Rows, through_head, through_logits
from semgrad_guard.engine.scoring.scores import GradientScores, Tier
from semgrad_guard.engine.scoring.self_check import exact_tiers


class Scorer:
    """Scores responses of one model. Thread-safe: one lock per model guards its replays (and generations)."""

    def __init__(self, model: nn.Module) -> None:
        self.lock = InterruptibleLock()
        # Weak: the table below must not keep a model alive that its owner has dropped.
        self._model = weakref.ref(model)
        self._fingerprint, self._edits = None, 0
        self.memory = Memory()
        with clean_slate():
            self.architecture: Architecture = inspect_architecture(model)
        self._tiers: tuple[Tier, ...] | None = None

    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that agree with plain autograd on this model, cheapest first; settled by one self-check."""
        with self.lock, clean_slate():
            replayer = self.current_replayer()
            return self._tiers or self._check(replayer)

    @property
    def device(self) -> torch.device:
        """Where the head's weights, and so the token ids, live."""
        return self.current_replayer().head.weight.device

    @property
    def vocabulary(self) -> int:
        """Entries of the output head."""
        return self.current_replayer().head.weight.shape[0]

    def score(
        self, batch: TokenBatch, objective: Objective, captured: CapturedStates | None = None
    ) -> tuple[GradientScores, ...]:
        """Score every row of a batch as a whole; `captured` lets the captured tier reuse what its generation left."""
        return tuple(parts[0] for parts in self.score_parts(batch, objective, captured))

    def score_parts(self, batch: TokenBatch, objective: Objective, captured: CapturedStates | None = None) -> Rows:
        """Score every part of every row (`TokenBatch.segments`) from one replay."""
        span = objective.span(self.architecture.n_layers)
        with self.lock, clean_slate():
            tiers = self._tiers_at(batch.longest)
            if not self.architecture.takes_positions and not bool(batch.mask.all()):
                return self._score_singly(batch, objective, span, tiers)
            together = self._score(batch, objective, span, captured, tiers)
            if len(together) > 1 and any(scores.reason for row in together for scores in row):
                # Padding alone makes some attention kernels answer NaN: such rows are given a second chance.
                singly = self._score_singly(batch, objective, span, tiers)
                return tuple(
                    tuple(b if a.reason else a for a, b in zip(*rows, strict=True))
                    for rows in zip(together, singly, strict=True)
                )
            return together

    def can_resume(self, positions: int) -> bool:
        """Whether reading so many positions in two passes, the second from a cache, gives what one pass gives."""
        return "prefix" in self._tiers_at(positions)

    def _tiers_at(self, positions: int) -> tuple[Tier, ...]:
        limit = self.architecture.fixed_positions
        return ("full",) if limit is not None and positions > limit else self.tiers()

    def _score_singly(
        self, batch: TokenBatch, objective: Objective, span: Sequence[int], tiers: tuple[Tier, ...]
    ) -> Rows:
        """Row after row, without padding, and so without captured states."""
        return tuple(self._score(row, objective, span, None, tiers)[0] for row in batch.rows())

    def _score(
        self,
        batch: TokenBatch,
        objective: Objective,
        span: Sequence[int],
        captured: CapturedStates | None,
        tiers: tuple[Tier, ...],
    ) -> Rows:
        replayer = self.current_replayer()
        if captured is not None and "captured" in tiers and captured.layer <= span[0] and captured.fits(batch):
            return self._through_head(batch, objective, replayer.captured(batch, span, captured), "captured")
        if "prefix" in tiers:
            return self._through_head(batch, objective, replayer.prefix(batch, span), "prefix")
        return tuple(through_logits(row, objective, replayer.full(row, span)) for row in batch.rows())

    def _through_head(self, batch: TokenBatch, objective: Objective, replayed: Replayed, tier: Tier) -> Rows:
        head = self.current_replayer().head
        return through_head(
            batch,
            objective,
            replayed,
            tier,
            head=head,
            transform=self.architecture.transform,
            kept_bytes=self.memory.logits,
        )

    def current_replayer(self) -> Replayer:
        """The weight-sharing copy in use; a new one when the model was moved, cast, re-weighted or hooked since."""
        model = self._model()
        if model is None:
            raise RuntimeError("the scored model no longer exists")
        now = fingerprint(model)
        if now != self._fingerprint:
            with clean_slate():
                self._replayer = Replayer(model, self.architecture)
            self._fingerprint, self._tiers = now, None
        if self.memory.prompts and (edited := edits(model)) != self._edits:
            self._replayer.prompts.trim(0)
            self._edits = edited
        self._replayer.memory = self.memory
        return self._replayer

    def _check(self, replayer: Replayer) -> tuple[Tier, ...]:
        def score(
            batch: TokenBatch, objective: Objective, captured: CapturedStates | None, tier: Tier
        ) -> GradientScores:
            span = objective.span(self.architecture.n_layers)
            return self._score(batch, objective, span, captured, (tier,))[0][0]

        self._tiers = exact_tiers(self.architecture, replayer, score)
        return self._tiers or ("full",)


_scorers: weakref.WeakKeyDictionary[nn.Module, Scorer] = weakref.WeakKeyDictionary()
_scorers_lock = threading.Lock()


def scorer_of(model: nn.Module) -> Scorer:
    """The one scorer of a model object, made at its first use.

    Raises:
        UnsupportedModelError: the architecture rules a score out.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps the model whose modules we need
    with _scorers_lock:
        scorer = _scorers.get(model)
        if scorer is None:
            scorer = _scorers[model] = Scorer(model)
        return scorer


@contextmanager
def clean_slate() -> Iterator[None]:
    """Ordinary tensors, no autocast, whatever the caller's thread has switched on; restored afterwards."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        accelerator = torch.accelerator.current_accelerator()
        for device in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield

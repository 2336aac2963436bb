"""The passes that a scoring model makes for scores, in each process with vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from semgrad_guard.engine.answers.answer import BatchScoring, Evidence, Generation
from semgrad_guard.engine.language_model import LanguageModel


def passes_of(scorer: Any) -> list[int]:
    """Grows by one entry with each pass through the scoring model's first layer, but for those that verify scores.

    A replay begins above that layer.
    """
    scorer.exactness()  # the self-check has passes of its own
    passes = list[int]()
    scorer._is_due = lambda *_: False
    scorer.twin.layers[0].self_attn.register_forward_pre_hook(lambda *_: passes.append(1))
    return passes


def shared(twin: nn.Module, served: nn.Module) -> int:
    """How many of the twin's parameters lie in the memory of the served model's."""
    storages = {weight.untyped_storage().data_ptr() for weight in served.parameters()}
    return sum(weight.untyped_storage().data_ptr() in storages for weight in twin.parameters())


def evidence_by(own: LanguageModel, answers: Sequence[Generation]) -> tuple[Evidence, ...]:
    """The same tokens as our engine sees them, as one batch."""
    return BatchScoring(own, [one.evidence.answer for one in answers]).evidence

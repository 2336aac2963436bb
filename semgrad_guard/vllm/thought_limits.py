"""`ThoughtLimits`: ends thoughts in vLLM's batch where our own engine would end them.

vLLM's own `thinking_token_budget` takes one pair of marks for a whole engine, named when it starts, and counts from the
opening mark. Here each answer has the marks and the budget of its own prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from semgrad_guard.engine.answers.options import ThoughtLimit, force

T = TypeVar("T")


class ThoughtLimits:
    """A processor of the logits of a model runner of vLLM's; `limits` are by the names of the requests (`named`)."""

    def __init__(self, runner: Any) -> None:
        self.limits: dict[str, ThoughtLimit] = {}
        self._runner = runner
        runner.input_batch.logitsprocs.non_argmax_invariant.append(self)
        runner.input_batch.logitsprocs_need_output_token_ids = True

    def update_state(self, batch_update: Any) -> None:
        """Nothing is kept of vLLM's batch."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of vLLM's rows [B, V], changed where a thought is to end."""
        batch = self._runner.input_batch
        for row, request in enumerate(batch.req_ids if self.limits else ()):
            if limit := named(self.limits, request):
                token = limit.forced(batch.req_output_token_ids[row])
                if token is not None:
                    force(logits[row], token)
        return logits


def named(of: Mapping[str, T], request: str) -> T | None:
    """What is kept under the name of a request: vLLM's own, which is the given one with a random end, or the given."""
    return of.get(request) or of.get(request.rpartition("-")[0])

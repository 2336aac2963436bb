"""A scoring worker that counts: `--worker-extension-cls tests.vllm.counting.CountingWorker`, into the file COUNTED."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from semgrad_guard.server.in_vllm.scoring_worker import OPEN, ScoringWorker

from .passes import passes_of, shared

COUNTED = "TEST_COUNTED"


class CountingWorker(ScoringWorker):
    """Writes after each message how many passes the scoring model has made, and what of its weights is vLLM's.

    `again` are those through the upper layers without a gradient, for keys and values that were not kept.
    """

    def semgrad_guard(self, name: str, payload: str) -> str:
        """Answer a message, and count."""
        reply, worker = super().semgrad_guard(name, payload), vars(self)
        scoring = worker.get("semgrad_guard_scoring")
        if scoring is not None:
            model: Any = scoring._model
            if name == OPEN.name:
                worker["counted"], worker["again"] = passes_of(model.scorer), list[bool]()
                last: Any = model.scorer.twin.layers[-1]
                last.register_forward_pre_hook(lambda *_: worker["again"].append(not torch.is_grad_enabled()))
            found = {
                "passes": len(worker["counted"]),
                "again": sum(worker["again"]),
                "shared": shared(model._model, worker["model_runner"].model),
                "weights": len(list(model._model.parameters())),
                "answers": len(scoring._written._listener.answers),
            }
            Path(os.environ[COUNTED]).write_text(json.dumps(found))
        return reply

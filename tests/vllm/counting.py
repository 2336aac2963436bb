"""A scoring worker that counts: `--worker-extension-cls tests.vllm.counting.CountingWorker`, into the file COUNTED."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from semgrad_guard.server.in_vllm.messages import OPEN
from semgrad_guard.server.in_vllm.worker import ScoringWorker
from semgrad_guard.vllm.shared_weights import shared

from .passes import passes_of

COUNTED = "TEST_COUNTED"


class CountingWorker(ScoringWorker):
    """Writes after each message how many passes the scoring model has made, and what of its weights is vLLM's."""

    def semgrad_guard(self, name: str, payload: str) -> str:
        """Answer a message, and count."""
        reply, worker = super().semgrad_guard(name, payload), vars(self)
        scoring = worker.get("semgrad_guard_scoring")
        if scoring is not None:
            model: Any = scoring._model
            if name == OPEN.name:
                worker["counted"] = passes_of(model._scorer)
            found = {
                "passes": len(worker["counted"]),
                "shared": shared(model._model, worker["model_runner"].model),
                "weights": len(list(model._model.parameters())),
                "records": len(scoring._recorder.records),
            }
            Path(os.environ[COUNTED]).write_text(json.dumps(found))
        return reply

"""Requests to a model's worker, and a worker that waits until several of them are there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.request import Request, Ticket
from semgrad_guard.engine.objective import Objective
from semgrad_guard.estimators import Sampling
from tests.steps import LIMIT


def submitted(
    model: LanguageModel,
    text: str,
    *,
    objective: Objective | None = None,
    on_piece: Any = None,
    on_sentences: Callable[..., bool] | None = None,
    draws: tuple[Sampling, ...] = (),
    **options: Any,
) -> Ticket[Generation]:
    """A request for one answer, of 8 tokens at most unless `options` has another limit."""
    return model.submit(
        Request(
            prompt=model.render(text),
            options=(GenerationOptions(**{"max_tokens": 8, **options}),),
            objective=objective or Objective(),
            on_piece=on_piece,
            on_sentences=on_sentences,
            draws=draws,
            finish=lambda found: found[0],
        )
    )


def busy(model: LanguageModel) -> threading.Event:
    """The model's thread waits until this is set."""
    free, begun = threading.Event(), threading.Event()
    model.worker.run(lambda: (begun.set(), free.wait(LIMIT)))
    assert begun.wait(LIMIT)
    return free

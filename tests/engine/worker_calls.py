"""Requests to a model's worker, and a worker that waits until several of them are there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.request import Request, Ticket
from semgrad_guard.engine.objective import Objective
from semgrad_guard.estimators import Sampling
from semgrad_guard.guard import LiveAnswer
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


def streamed(model: LanguageModel, text: str, options: GenerationOptions) -> LiveAnswer:
    """An answer piece by piece, which is begun with the first of them."""
    request = Request(prompt=model.render(text), options=(options,), finish=lambda found: found[0])
    return LiveAnswer(lambda on_piece: model.submit(replace(request, on_piece=on_piece)))


def pieces_of(stream: LiveAnswer) -> list[str]:
    """Those of its text, to the end."""
    found = list[str]()
    while (pieces := stream.next().call()) is not None:
        found += [piece for piece in pieces if isinstance(piece, str)]
    return found


def busy(model: LanguageModel) -> threading.Event:
    """The model's thread waits until this is set."""
    free, begun = threading.Event(), threading.Event()
    model.worker.run(lambda: (begun.set(), free.wait(LIMIT)))
    assert begun.wait(LIMIT)
    return free

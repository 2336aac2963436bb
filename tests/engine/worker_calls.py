"""Requests to a model's worker, and a worker that waits until several of them are there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.running import Request
from semgrad_guard.engine.answers.writing import Piece
from semgrad_guard.engine.interruption import Ticket
from semgrad_guard.engine.objective import Objective
from semgrad_guard.estimators import Sampling
from semgrad_guard.guard.answering import answer_steps
from semgrad_guard.guard.steps import Work
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


class Streamed:
    """An answer piece by piece, begun with the first of them; its `tickets`, and its `generation` at the end."""

    def __init__(self, model: LanguageModel, text: str, options: GenerationOptions) -> None:
        request = Request(prompt=model.render(text), options=(options,), finish=lambda found: found[0])
        tickets = self.tickets = list[Ticket[Generation]]()

        def submit(on_piece: Callable[[Piece], None]) -> Ticket[Generation]:
            tickets.append(model.submit(replace(request, on_piece=on_piece)))
            return tickets[0]

        self._steps = answer_steps(submit)
        self.generation: Generation | None = None

    def next(self) -> Piece | None:
        """The next piece; None behind the last."""
        given: Any = None
        try:
            while isinstance(found := self._steps.send(given), Work):
                given = found.call()
        except StopIteration as end:
            self.generation = end.value
            return None
        return found

    def close(self) -> None:
        """Read no further."""
        self._steps.close()


def pieces_of(stream: Streamed) -> list[str]:
    """Those of its text, to the end."""
    return [piece for piece in iter(stream.next, None) if isinstance(piece, str)]


def busy(model: LanguageModel) -> threading.Event:
    """The model's thread waits until this is set."""
    free, begun = threading.Event(), threading.Event()
    model.worker.run(lambda: (begun.set(), free.wait(LIMIT)))
    assert begun.wait(LIMIT)
    return free

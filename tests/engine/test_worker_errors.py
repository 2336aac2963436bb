"""An error anywhere in the worker: every caller gets an answer or an error, and so do those that come later."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from semgrad_guard import LanguageModel
from semgrad_guard.engine.answers import running
from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.batch import RunningBatch
from semgrad_guard.engine.interruption import Ticket
from semgrad_guard.estimators import Sampling
from tests.fixed_model import TEXT
from tests.steps import LIMIT, until

from .worker_calls import busy, submitted

Make = Callable[..., LanguageModel]


def test_an_error_while_requests_are_put_together_is_one_callers(
    make_language_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_language_model(seed=2)
    has_room = running.RunningRequests.has_room

    def with_room_for_one(self: running.RunningRequests, jobs: Any, *, beside: int) -> bool:
        if len(jobs) == 2:
            raise RuntimeError("the model cannot be looked at")
        return has_room(self, jobs, beside=beside)

    monkeypatch.setattr(running.RunningRequests, "has_room", with_room_for_one)
    free = busy(model)
    tickets = [submitted(model, text) for text in ("one", "two")]
    free.set()
    assert tickets[0].result(LIMIT).text
    with pytest.raises(RuntimeError, match="cannot be looked at"):
        tickets[1].result(LIMIT)
    assert submitted(model, "three").result(LIMIT).text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", [name for name in vars(RunningBatch) if not name.startswith("_")])
def test_an_error_anywhere_in_a_batch_leaves_no_caller_waiting(
    make_language_model: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """From its n-th call on, a method raises an error: every caller gets an answer or an error, and later ones too."""
    model, method = make_language_model(seed=2), vars(RunningBatch)[name]
    sentences: dict[str, Any] = {"grammar": f'start: "{TEXT}"', "max_tokens": 64}
    wanted: list[tuple[str, dict[str, Any]]] = [
        ("x" * 150, {}),  # is read in pieces
        ("hello", {"draws": (Sampling(count=2, max_tokens=4),), "on_piece": lambda _: None}),
        ("What is tea?", {"on_sentences": lambda _: True, **sentences}),
        ("What is milk?", {"on_sentences": lambda _: False, **sentences}),
    ]
    monkeypatch.setattr(running, "_READ", 100)
    for first in (1, 3):
        calls = itertools.count(1)

        def failing(*args: Any, first: int = first, calls: Any = calls, **options: Any) -> Any:
            if next(calls) >= first:
                raise RuntimeError("no such luck")
            return (method.fget if isinstance(method, property) else method)(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(RunningBatch, name, property(failing) if isinstance(method, property) else failing)
            free = busy(model)
            tickets = [submitted(model, text, **options) for text, options in wanted]
            free.set()
            for ticket in tickets:
                assert ticket.exception(LIMIT) is None or "no such luck" in str(ticket.exception())
        until(lambda: submitted(model, "later").exception(LIMIT) is None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_that_follows_the_end_of_the_thread_is_answered_by_another(
    make_language_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread ends by an error, whose first caller submits the request again from a thread of its own."""
    model, again = make_language_model(seed=2), list[Ticket[Generation]]()

    def submit_again(_: Any) -> None:
        thread = threading.Thread(target=lambda: again.append(submitted(model, "again")))
        thread.start()
        thread.join(LIMIT)

    free, errors, following = busy(model), iter([ZeroDivisionError("once")]), model.worker._begin_next

    def fails_once() -> Any:
        for error in errors:
            raise error
        return following()

    monkeypatch.setattr(model.worker, "_begin_next", fails_once)
    ticket = submitted(model, "first")
    ticket.add_done_callback(submit_again)
    free.set()
    with pytest.raises(ZeroDivisionError):
        ticket.result(LIMIT)
    until(lambda: bool(again))
    assert again[0].result(LIMIT).text

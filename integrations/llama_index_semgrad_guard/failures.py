"""What becomes of an inner engine's error where answers may be withheld.

LlamaIndex's parsers put the model's words into their errors, an agent shows the error of a tool to its model, and
loggers write down a whole chain of errors: an error is a way out like any other. What is raised instead is a verdict to
`on_error`, and holds nothing that the model wrote.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from llama_index_semgrad_guard.calls import Turn
from semgrad_guard.errors import (
    AnswerFailedError,
    DeadlineExceededError,
    LowConfidenceError,
    PromptTooLongError,
    SemGradGuardError,
)
from semgrad_guard.guard import Terms, current_recorder

T = TypeVar("T")


def sealed(work: Callable[[], T], turn: Turn, terms: Terms) -> T:
    """What `work` returns.

    Raises:
        AnswerFailedError: it failed, and its error may hold what the model wrote, or `on_error` is to abstain.
        Exception: the error itself, where it holds nothing of that, or nothing is withheld.
    """
    try:
        return work()
    except BaseException as error:
        if not _seals(terms):
            raise
        failure = _harmless(error, turn, terms)
    raise failure  # outside of the handler: an error that is raised within it keeps the other one as its context


async def asealed(work: Awaitable[T], turn: Turn, terms: Terms) -> T:
    """As `sealed`, for what can be awaited."""
    try:
        return await work
    except BaseException as error:
        if not _seals(terms):
            raise
        failure = _harmless(error, turn, terms)
    raise failure


def _seals(terms: Terms) -> bool:
    return terms.withholds and current_recorder() is None


def _harmless(error: BaseException, turn: Turn, terms: Terms) -> BaseException:
    """The error without what led to it, if it is ours or no model has said anything yet; another one otherwise.

    An interruption (Ctrl-C, a cancelled task) stays what it is.
    """
    if isinstance(error, Exception):
        replaceable = terms.on_error == "abstain" and isinstance(error, LowConfidenceError | PromptTooLongError)
        ours = _is_ours(error) and not replaceable
        if isinstance(error, DeadlineExceededError) and not ours:
            return DeadlineExceededError("the engine took too long")
        if not ours and (turn.has_begun or terms.on_error == "abstain"):
            return AnswerFailedError(f"the engine failed ({type(error).__name__})")
        if isinstance(error, LowConfidenceError):
            return LowConfidenceError(error.verdict, draft=None)
    error.__cause__ = error.__context__ = None
    vars(error).pop("__notes__", None)
    return error


def _is_ours(error: Exception) -> bool:
    """Whether our own code has raised an error of ours: an engine may put the model's words into one as well."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    raised_in = str(trace.tb_frame.f_globals.get("__name__")) if trace else ""
    return isinstance(error, SemGradGuardError) and all(
        _is_in_ours(name) for name in (raised_in, type(error).__module__)
    )


def _is_in_ours(module: str) -> bool:
    return module.partition(".")[0] in ("semgrad_guard", "llama_index_semgrad_guard")

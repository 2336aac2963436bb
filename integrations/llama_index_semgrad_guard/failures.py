"""An inner engine's error where answers may be withheld.

LlamaIndex's parsers put the model's words into their errors, an agent shows the error of a tool to its model, and
loggers write down a whole chain of errors: an error is a way out like any other. The error that is raised instead holds
no text of the model's, and `on_error` decides about it.
"""

from __future__ import annotations

from typing import TypeVar

from llama_index_semgrad_guard.calls import Turn
from semgrad_guard.errors import (
    AnswerFailedError,
    DeadlineExceededError,
    LowConfidenceError,
    PromptTooLongError,
    SemGradGuardError,
)
from semgrad_guard.guard import Steps, Terms, current_recorder

T = TypeVar("T")


def sealed(steps: Steps[T], turn: Turn, terms: Terms) -> Steps[T]:
    """The steps, whose errors hold nothing that a model wrote.

    Raises:
        AnswerFailedError: they failed, and their error may hold a model's text, or `on_error` is to abstain.
        Exception: the error itself, where it holds nothing of that, or nothing is withheld.
    """
    try:
        return (yield from steps)
    except BaseException as error:
        if not terms.withholds or current_recorder() is not None:
            raise
        failure = _harmless(error, turn, terms)
    raise failure  # outside of the handler: an error that is raised within it keeps the other one as its context


def _harmless(error: BaseException, turn: Turn, terms: Terms) -> BaseException:
    """The error without its causes, if it is ours or no model has run yet; another one otherwise.

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
    packages = {module.partition(".")[0] for module in (raised_in, type(error).__module__)}
    return isinstance(error, SemGradGuardError) and packages <= {"semgrad_guard", "llama_index_semgrad_guard"}

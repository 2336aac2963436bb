"""Every error that semgrad-guard raises on purpose, each with advice.

They derive from plain `Exception`: frameworks swallow or misread subclasses of ValueError and RuntimeError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Self

from semgrad_guard.records import Verdict


class SemGradGuardError(Exception):
    """Base of every error raised on purpose by this package. All pickle: workers on other machines raise them, too.

    `fields` are the options of a request that it may be about, by their names in chat completions, the likeliest first.
    `problem` is its message without advice for programs, which a server's clients can do nothing of.
    """

    fields: tuple[str, ...] = ()
    _problem: str | None = None

    @property
    def problem(self) -> str:
        """The message, without advice for programs."""
        return str(self) if self._problem is None else self._problem

    def about(self, *fields: str, advice: str = "") -> Self:
        """This error, about these `fields`; `advice` for programs ends its message."""
        self.fields = fields
        if advice:
            self._problem, self.args = str(self), (f"{self}; {advice}",)
        return self

    def __reduce__(self) -> tuple[Callable[..., SemGradGuardError], tuple[Any, ...], dict[str, Any]]:
        # As it was, whatever its constructor takes: its message is finished already.
        return type(self).__new__, (type(self), *self.args), self.__dict__


class InputError(SemGradGuardError):
    """The request cannot be answered as it is."""


class EmptyPromptError(InputError):
    """The prompt holds no token, or nothing but white space."""

    fields = ("messages",)


class EmptyResponseError(InputError):
    """The response to score holds no token."""


class ReasoningError(InputError):
    """The response to score is reasoning, or follows on reasoning that is not known."""


class PromptTooLongError(InputError):
    """The prompt fills or exceeds the model's context window."""

    fields = ("messages",)


class DataFileError(InputError):
    """A line of a data file cannot be read; the message names the file and the line."""


class ModelError(SemGradGuardError):
    """A model cannot be loaded or used."""


class ModelNotFoundError(ModelError):
    """There is no loadable checkpoint at the given name or path."""


class FetchError(ModelError):
    """A named model cannot be brought here from the package index; the message has the reason and advice."""


class UnsupportedModelError(ModelError):
    """The model's architecture or state rules out a gradient score; the message has the reason."""


class EmptyLayerSpanError(UnsupportedModelError):
    """The requested span of decoder layers is empty for a model of this depth."""


class UnsupportedToolsError(UnsupportedModelError):
    """The model's chat template knows no tools, or writes their calls in a form that cannot be read."""

    fields = ("tools", "messages")


class ScoringError(SemGradGuardError):
    """An answer has no finite score and a number was demanded."""


class DetachedRecordError(ScoringError):
    """A copied record of an answer holds only earlier results, and something else is needed of it."""


class AnswerFailedError(SemGradGuardError):
    """The answering part failed. Its own error is not shown, since it may hold an answer that was not judged."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason}. Its own error may hold text that is withheld, and is not shown: use mode='annotate' to see it, "
            "or on_error='abstain' to abstain where this happens."
        )
        self.reason = reason


class AnswerInterruptedError(SemGradGuardError):
    """The model was stopped before the answer, or its score, was complete; nothing of it is kept."""


class DeadlineExceededError(AnswerInterruptedError):
    """The time that was allowed for an answer is over; the message has its length and advice."""


class AnswerCancelledError(AnswerInterruptedError):
    """The caller cancelled the call, or closed the stream, before the answer was complete."""


class CalibrationError(SemGradGuardError):
    """A calibration set or a calibration file cannot be used."""


class BindingMismatchError(CalibrationError):
    """A calibration was made for something else; the message names the difference.

    `differences` are the differences alone, in words, where they are those of a binding: a server's clients can do
    nothing of the message's advice. `changes` has the value now and that at calibration, by field or setting.
    """

    differences: str | None = None
    changes: Mapping[str, tuple[Any, Any]] | None = None


class FitError(CalibrationError):
    """A learned estimator cannot be fitted on these graded answers; the message names the missing part."""


class GradingError(SemGradGuardError):
    """Answers cannot be graded; the message has the reason."""


class QueueFullError(SemGradGuardError):
    """Too many requests wait for a model already; `retry_after` are the seconds after which to try again."""

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UpstreamError(SemGradGuardError):
    """A server that answers for this one (an upstream, an escalation target) failed; the message has the details.

    `status` is its HTTP status, None where it did not answer. `passing`: whether the same request may
    succeed later (it is busy, or starts anew), and `retry_after` in how many seconds, where it told that.
    """

    def __init__(
        self, message: str, *, status: int | None = None, passing: bool = False, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.passing, self.retry_after = status, passing, retry_after


class DecisionLogError(SemGradGuardError):
    """The decision log cannot be opened, read or written; the message has the reason."""


class ClusterError(SemGradGuardError):
    """A Ray cluster cannot be reached, or its workers fail; the message has the reason."""


class UnenforcedPolicyError(SemGradGuardError):
    """A router was attached to a chat model that would ignore its decisions."""


class LowConfidenceError(SemGradGuardError):
    """An answer is not let through, and nothing is delivered instead: the mode is to raise, or the answer a structure.

    `verdict` holds the decision; its `text` is empty. Frameworks hand errors on to streams, traces and logs, so the
    withheld answer is in it (`draft`) only where `keep_draft` is set.

    Args:
        verdict: the decision.
        draft: the withheld answer, where it is kept.
        advice: ends the message, which never holds the answer itself.
    """

    def __init__(self, verdict: Verdict, *, draft: str | None, advice: str = "") -> None:
        kept = " and the withheld answer (`draft`)" if draft else ""
        super().__init__(
            f"the answer is not let through: {verdict.reason or 'no reason given'} (decision: {verdict.action}). "
            f"The error's `verdict` holds the score{kept}. {advice}".rstrip()
        )
        self.verdict = verdict.revised(text="", reasoning=None, tool_calls=(), calls=(), fields=(), draft=draft)


class MissingExtraError(SemGradGuardError, ImportError):
    """An optional dependency is absent; the message holds the install command."""

    def __init__(self, *packages: str, extra: str) -> None:
        verb = "is" if len(packages) == 1 else "are"
        super().__init__(f"{', '.join(packages)} {verb} not installed. Run: pip install 'semgrad-guard[{extra}]'")


def require_installed(*packages: str, extra: str) -> None:
    """Return if the packages of an extra are installed.

    Raises:
        MissingExtraError: some are not; the message names all of them.
    """
    if absent := [package for package in packages if find_spec(package.replace("-", "_")) is None]:
        raise MissingExtraError(*absent, extra=extra)

"""Errors as OpenAI's clients read them: a status and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semgrad_guard.errors import (
    AnswerInterruptedError,
    BindingMismatchError,
    DeadlineExceededError,
    DecisionLogError,
    InputError,
    LowConfidenceError,
    MissingExtraError,
    PromptTooLongError,
    QueueFullError,
    SemGradGuardError,
    UnfamiliarPromptError,
    UnsupportedToolsError,
    UpstreamError,
)
from semgrad_guard.server.answers import ACTION_HEADER, ID_HEADER, WITHHELD, public_record

_NO_RETRY = {"x-should-retry": "false"}
"""The same request would fail again; OpenAI's clients heed it."""
_LEAVE_OUT = (
    "Leave temperature, top_p, top_k, response_format and tools out of the request, as far as they are not the "
    "calibration's"
)
_LATER = {"retry-after": "5"}


class HttpError(Exception):
    """The error that a request gets in place of an answer."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.headers, self.more = dict(headers or {}), dict(more or {})

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response."""
        error = {"message": self.message, "type": self._type, "param": self.param, "code": self.code}
        return {"error": error, **self.more}

    @property
    def _type(self) -> str:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")


ENDING = HttpError(503, "shutting_down", "the server is shutting down; try again later", headers=_LATER)
"""The error of requests that still wait when the server ends."""


def http_error_of(error: BaseException) -> HttpError:
    """The response to an error. One that is not ours is a bug, and its text stays here."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, LowConfidenceError):
        return _low_confidence(error)
    if isinstance(error, QueueFullError):
        return HttpError(429, "queue_full", str(error), headers={"retry-after": str(error.retry_after)})
    if isinstance(error, UpstreamError):
        return _upstream(error)
    if isinstance(error, UnfamiliarPromptError):  # its differences may be the answer's
        return HttpError(422, "unfamiliar_prompt", "the prompt is unlike those that the calibration was made on")
    if isinstance(error, BindingMismatchError) and error.differences is not None:
        text = f"this model's calibration was made for other options: {error.differences}. {_LEAVE_OUT}"
        return HttpError(422, "calibration_mismatch", text)
    if isinstance(error, UnsupportedToolsError):
        why = str(error).partition(";")[0]
        return HttpError(400, "unsupported_tools", f"{why}; send no tools and no tool calls")
    for kind, status, code in _CODES:
        if isinstance(error, kind):
            headers = _LATER if status == 503 else _NO_RETRY if status >= 500 else {}
            return HttpError(status, code, str(error), headers=headers)
    return HttpError(500, "internal_error", "the server failed; its log names the place", headers=_NO_RETRY)


_CODES: tuple[tuple[type[SemGradGuardError], int, str], ...] = (
    (PromptTooLongError, 400, "context_length_exceeded"),
    (InputError, 400, "invalid_request"),
    (BindingMismatchError, 422, "calibration_mismatch"),
    (DeadlineExceededError, 504, "deadline_exceeded"),
    (AnswerInterruptedError, 503, "interrupted"),
    (MissingExtraError, 501, "not_installed"),
    (DecisionLogError, 503, "decision_log_unavailable"),
    (SemGradGuardError, 500, "model_error"),
)


def _low_confidence(error: LowConfidenceError) -> HttpError:
    """An answer that is not let through, and that no text may replace. Only its verdict is sent."""
    verdict = error.verdict
    headers = {ACTION_HEADER: verdict.action, **_NO_RETRY}
    if verdict.decision_id is not None:
        headers[ID_HEADER] = verdict.decision_id
    text = f"{WITHHELD} (decision: {verdict.action})"
    return HttpError(422, "low_confidence", text, headers=headers, more={"semgrad_guard": public_record(verdict)})


def _upstream(error: UpstreamError) -> HttpError:
    later = {"retry-after": str(error.retry_after or 1)}
    if error.status == 429:
        return HttpError(429, "upstream_busy", str(error), headers=later)
    if error.status in (400, 404, 413, 422):
        return HttpError(error.status, "upstream_refused", str(error))
    return HttpError(502, "upstream_failed", str(error), headers=later if error.passing else _NO_RETRY)

"""Verdicts in metadata and in traces: OpenTelemetry's spans and events, scores in Phoenix, MLflow and Langfuse.

    phoenix.spans.add_span_annotation(span_id=span_id, **phoenix_annotation(record))
    mlflow.log_feedback(trace_id=trace_id, **mlflow_feedback(record))
    langfuse.create_score(trace_id=trace_id, **langfuse_score(record))

A record is `Verdict.metadata()`, an `UncertaintyEvent`'s `record`, or the field `semgrad_guard` of a server's response.
The functions make the arguments of those packages' own clients, none of which is imported: the name of the score is
`uncertainty`; the action is its label, and everything else is metadata. No text is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from semgrad_guard.errors import InputError, ScoringError, require_installed
from semgrad_guard.guard.decision import unscored
from semgrad_guard.records import METADATA_KEY, SCHEMA, ToolCall, Verdict, digest_of, trace_fields

if TYPE_CHECKING:  # it needs the extra `tracing`
    from opentelemetry._logs import LoggerProvider
    from opentelemetry.trace import Span

NAME = "uncertainty"
EVENT = "gen_ai.evaluation.result"
"""The event's name in OpenTelemetry's semantic conventions for generative AI."""


def verdict_of_record(record: Any, text: str, calls: Sequence[ToolCall] = (), *, whole: bool = True) -> Verdict:
    """The verdict that `Verdict.metadata()` was made from; `text` is the delivered text, which the record leaves out.

    A record that was made for another text does not count: the answer is then unscored. One that was made for other
    `calls` promises nothing. Where `whole` is False, they are those of a piece of a stream, whose last one carries the
    record of all of it.

    Raises:
        InputError: it is of another schema, or damaged.
    """
    try:
        verdict = Verdict.model_validate(_with_text(record, text))
    except (ValidationError, TypeError, ValueError, KeyError) as error:
        raise InputError(
            f"the {METADATA_KEY!r} metadata cannot be read ({error}); was it written by another version?"
        ) from error
    if not whole:
        return verdict
    if record.get("digest", digest_of(text)) == digest_of(text):
        own = sorted(call.digest for call in verdict.delivered.calls)
        return verdict if own == sorted(call.digest for call in calls) else verdict.revised(promised=False)
    return unscored(text, reason="the record that came with it was made for another text", model=verdict.details.model)


def _with_text(record: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A record with the text that `Verdict.metadata()` left out."""
    fields = dict(record)
    if fields["schema"] != SCHEMA:
        raise ValueError(f"it has the schema {fields['schema']!r}, and this version reads {SCHEMA}")
    if fields.get("escalated") is not None:
        fields["escalated"] = _with_text(fields["escalated"], text)
    return {**fields, "text": text}


class EvaluationLog:
    """Writes records of verdicts to OpenTelemetry: to spans, and to a logger. Needs the extra `tracing`.

    Args:
        name: of the instrumentation, in exported events.
        logger_provider: where events go; default: OpenTelemetry's global one.

    Raises:
        MissingExtraError: OpenTelemetry is not installed.
    """

    def __init__(self, name: str, *, logger_provider: LoggerProvider | None = None) -> None:
        require_installed("opentelemetry", extra="tracing")
        from opentelemetry._logs import get_logger

        self._logger = get_logger(name, logger_provider=logger_provider)

    def write(self, record: Mapping[str, Any], span: Span | None = None, *, response_id: str | None = None) -> None:
        """Write one verdict to a span, by default the current one; `response_id` names the response that it is about.

        A span that has ended takes no attributes; the event is tied to it all the same. An answer without a score is an
        evaluation that failed: its `error.type` is the verdict's status.
        """
        from opentelemetry._logs import LogRecord
        from opentelemetry.trace import get_current_span, set_span_in_context

        span = span or get_current_span()
        if span.is_recording():
            span.set_attributes(trace_fields(record))
        fields = {  # the estimator is the metric, the action is the label
            "gen_ai.evaluation.name": record["estimator"],
            "gen_ai.evaluation.score.value": record["uncertainty"],
            "gen_ai.evaluation.score.label": record["action"],
            "gen_ai.evaluation.explanation": record["reason"],
            "gen_ai.response.id": response_id,
            "error.type": None if record["status"] == "scored" else record["status"],
        }
        attributes = {name: value for name, value in fields.items() if value is not None}
        self._logger.emit(LogRecord(context=set_span_in_context(span), event_name=EVENT, attributes=attributes))


def phoenix_annotation(record: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `add_span_annotation`; without a score it has a label alone."""
    return {
        "annotation_name": NAME,
        "annotator_kind": "CODE",
        "score": record["uncertainty"],
        "label": record["action"],
        "explanation": record["reason"],
        "metadata": trace_fields(record),
    }


def mlflow_feedback(record: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `log_feedback`; an answer without a score is an assessment with an error."""
    value = record["uncertainty"]
    found = {"value": value} if value is not None else {"error": ScoringError(record["reason"] or record["status"])}
    metadata = {name: str(field) for name, field in trace_fields(record).items()}
    return {"name": NAME, "rationale": record["reason"], "metadata": metadata, **found}


def langfuse_score(record: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `create_score`; without a number the score is the action, as a category."""
    value = record["uncertainty"]
    found = {"value": value, "data_type": "NUMERIC"}
    if value is None:
        found = {"value": record["action"], "data_type": "CATEGORICAL"}
    return {"name": NAME, "comment": record["reason"], "metadata": trace_fields(record), **found}

"""Verdicts as scores in Phoenix, MLflow and Langfuse: the arguments of their own clients, none of which is imported.

    phoenix.spans.add_span_annotation(span_id=span_id, **phoenix_annotation(record))
    mlflow.log_feedback(trace_id=trace_id, **mlflow_feedback(record))
    langfuse.create_score(trace_id=trace_id, **langfuse_score(record))

A record is `Verdict.metadata()`, an `UncertaintyEvent`'s `record`, or the field `semgrad_guard` of a server's response.
The name of the score is `uncertainty`; the action is its label, and everything else is metadata. No text is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semgrad_guard.errors import ScoringError
from semgrad_guard.records import trace_fields

NAME = "uncertainty"


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

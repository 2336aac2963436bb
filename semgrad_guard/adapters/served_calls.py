"""The options of a framework's client in calls to a server: those in its own fields, then those of one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semgrad_guard.calibration.call_options import FIELDS, call_options

UNREAD_CALLS = "the answer calls tools, and how its server wrote the calls is not known"
"""Why such an answer has no score."""
_MODEL_NAMES = ("model", "model_name", "model_id")


def served_options(client: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """The options that may change an answer (`call_options`). A name of another model than the client's is one.

    `client` may be a chat model around another client of its own (`llm`), which then holds options as well.
    """
    own = [getattr(client, name, None) for name in _MODEL_NAMES]
    given = {name: value for name, value in call.items() if name not in _MODEL_NAMES or value not in own}
    return call_options(_held(getattr(client, "llm", None)), _held(client), given)


def _held(client: Any) -> dict[str, Any]:
    held = ((name, getattr(client, name, None)) for name in FIELDS)
    return {name: value for name, value in held if value is not None and not callable(value)}

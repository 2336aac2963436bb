"""What the guard knows of a decision log: somewhere to write verdicts to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from semgrad_guard.records import Verdict


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a frontend knows of a decision beside its verdict.

    `request_id` names the request, `served` is the name under which the model was asked for. `question` is written down
    only by a log that keeps text.
    """

    request_id: str | None = None
    served: str | None = None
    question: str | None = None


class DecisionSink(Protocol):
    """Takes decisions down. Called from any thread."""

    def write(self, verdict: Verdict, *, seconds: float | None = None, facts: Facts | None = None) -> str | None:
        """Write one decision down, which took so many seconds to come to, and return its id once it is safe.

        None where it could not be written: answers go on all the same.
        """
        ...

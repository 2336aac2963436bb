"""What guarded engines and agents share: the decision about a draft, its record, and what a mode makes of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from llama_index_semgrad_guard.aggregation import Aggregate, aggregated, uncalled, wrote
from llama_index_semgrad_guard.calls import CallCollector, ModelCall, collecting
from llama_index_semgrad_guard.events import Source, report
from semgrad_guard import METADATA_KEY, Policy, Verdict
from semgrad_guard.errors import LowConfidenceError
from semgrad_guard.guard import decide
from semgrad_guard.guard.modes import Mode, require_mode, withholds
from semgrad_guard.guard.policy import require_policy


@dataclass(frozen=True, kw_only=True)
class Router:
    """A policy with everything that says how to carry it out.

    Raises:
        InputError: no policy, or no such mode.
    """

    policy: Policy
    source: Source
    mode: Mode
    abstain_message: str
    keep_draft: bool
    can_escalate: bool
    aggregate: Aggregate = "last"

    def __post_init__(self) -> None:
        require_policy(self.policy)
        require_mode(self.mode)

    @property
    def withholds(self) -> bool:
        """Whether answers may be withheld, so that nothing leaves before the whole is scored."""
        return withholds(self.mode)

    def collecting(self) -> AbstractContextManager[CallCollector]:
        """Collect the calls of one answer."""
        return collecting(last_only=self.aggregate == "last")

    def decided(self, text: str, calls: Sequence[ModelCall], *, structured: bool = False) -> Verdict:
        """The decision about a draft; advice only, where the mode does not withhold.

        Raises:
            BindingMismatchError: the policy was calibrated for something else.
            LowConfidenceError: the draft is not let through, and the mode is to raise.
        """
        verdict = self._judged(text, calls, structured=structured)
        if self.mode == "raise" and verdict.action != "answer":
            raise self.refused(verdict)
        return verdict if self.withholds else verdict.model_copy(update={"enforced": False})

    def refused(self, verdict: Verdict, advice: str = "") -> LowConfidenceError:
        """The error for a draft that is not let through; its verdict goes to the event handlers as well."""
        error = LowConfidenceError(verdict, draft=verdict.text, advice=advice)
        report(error.verdict, self.source, keep_draft=self.keep_draft)
        return error

    def attached(self, metadata: Mapping[str, Any] | None, verdict: Verdict) -> dict[str, Any]:
        """The metadata with the final verdict's record (without, where the mode only observes); reports it as well."""
        report(verdict, self.source, keep_draft=self.keep_draft)
        record = {} if self.mode == "observe" else {METADATA_KEY: verdict.metadata(keep_draft=self.keep_draft)}
        return {**(metadata or {}), **record}

    def _judged(self, text: str, calls: Sequence[ModelCall], *, structured: bool) -> Verdict:
        """A structure is a parsed form of what the model wrote; a text must be what it wrote."""
        if not calls or (self.aggregate == "last" and not structured and not wrote(calls[-1], text)):
            return uncalled(text, self.policy, can_escalate=self.can_escalate)
        verdict = aggregated(calls, self.aggregate, text, self.policy)
        return decide(verdict, self.policy, can_escalate=self.can_escalate)

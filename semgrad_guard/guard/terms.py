"""`Terms`: how a guard decides about one call, and how it carries the decision out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from semgrad_guard.calibration import DriftMonitor
from semgrad_guard.decision_log.entries import DecisionSink
from semgrad_guard.declared import require_valid
from semgrad_guard.engine.interruption import Stop
from semgrad_guard.errors import InputError
from semgrad_guard.guard.policy import Policy, require_policy, withholds
from semgrad_guard.guard.verdicts import abstained
from semgrad_guard.records import Verdict
from semgrad_guard.settings import ABSTAIN_MESSAGE, DeliveryOptions, Timeout

AbstainMessage = str | Callable[[Verdict], str]


@dataclass(frozen=True, kw_only=True)
class Terms(DeliveryOptions):
    """How a guard decides, and how it carries the decision out.

    Args:
        policy: which scores to let through.
        mode: "enforce", "annotate", "observe" or "raise".
        can_escalate: whether there is a target.
        abstain_message: delivered in the place of an answer that is neither let through nor escalated; a function gets
            the verdict, without the withheld text unless drafts are kept.
        keep_draft: whether metadata may hold withheld text.
        on_error: where a target fails or is late; "abstain" also for a deadline that the model itself does not meet,
            and for an inner engine that fails.
        timeout: seconds for generating, scoring and escalating together; None: no limit.
        monitor: watches the scores for drift.
        notify: called with every verdict.
        log: records every decision; the verdict then carries its `decision_id`.
        trim: changes an answer that is let through, and its verdict, before they go out.

    Raises:
        InputError: an argument is not as described.
    """

    policy: Policy
    can_escalate: bool = False
    abstain_message: AbstainMessage = ABSTAIN_MESSAGE
    keep_draft: bool = False
    timeout: Timeout = None
    monitor: DriftMonitor | None = None
    notify: Callable[[Verdict], None] | None = None
    log: DecisionSink | None = None
    trim: Callable[[Verdict, Any], tuple[Verdict, Any]] | None = None

    def __post_init__(self) -> None:
        require_policy(self.policy)
        require_valid(self)
        if not isinstance(self.abstain_message, str) and not callable(self.abstain_message):
            raise InputError("abstain_message is a text, or a function of the verdict")
        if not isinstance(cast("Any", self.keep_draft), bool):
            raise InputError(f"keep_draft is True or False, not {self.keep_draft!r}")
        if self.monitor is not None and not callable(getattr(self.monitor, "add", None)):
            raise InputError(f"monitor must be a DriftMonitor, not a {type(self.monitor).__name__}")
        if self.notify is not None and not callable(self.notify):
            raise InputError(f"notify must be a function of the verdict, not a {type(self.notify).__name__}")
        if self.log is not None and not callable(getattr(self.log, "write", None)):
            raise InputError(f"log must be a DecisionLog, not a {type(self.log).__name__}")

    @property
    def withholds(self) -> bool:
        """Whether an answer may be kept back, so that nothing of it may leave before it is judged."""
        return withholds(self.mode)

    def stop(self) -> Stop:
        """The deadline of one call, from now on."""
        return Stop(self.timeout)

    def words(self, verdict: Verdict) -> str:
        """The abstain message for a verdict. A function gets it without the withheld text, unless drafts are kept.

        Raises:
            InputError: a function returned something else than a text.
        """
        withheld = abstained(verdict, "")
        shown = withheld if self.keep_draft else withheld.model_copy(update={"draft": None})
        text = self.abstain_message if isinstance(self.abstain_message, str) else self.abstain_message(shown)
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may have no type checker
            raise InputError(f"abstain_message must return a text, not a {type(text).__name__}")
        return text

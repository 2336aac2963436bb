"""Where model, estimator and policy meet: every answer gets a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from semgrad_guard.calibration import Binding, DriftMonitor
from semgrad_guard.engine.generation.evidence import Evidence
from semgrad_guard.engine.generation.generation import Generation
from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.estimators import Estimator
from semgrad_guard.guard.calibrated_estimator import estimator_of
from semgrad_guard.guard.policy import Policy, require_policy
from semgrad_guard.guard.promise import Promise, combined_promise
from semgrad_guard.guard.verdicts import abstained, binding_of, decide, decide_unscored, escalated, require_sequel
from semgrad_guard.records import Conversation, Status, Verdict

__all__ = [
    "ABSTAIN_MESSAGE",
    "Guard",
    "Target",
    "abstained",
    "assess",
    "binding_of",
    "decide",
    "decide_unscored",
    "escalated",
    "require_sequel",
    "scoring_settings",
    "template_name",
]

ABSTAIN_MESSAGE = "I don't know."

Target = Callable[[Conversation], "str | Verdict"]
"""Somewhere to escalate to: another guard, or anything that answers a conversation."""


class Guard:
    """Answers, scores and decides: `Guard(model, estimator, policy, escalate_to=...)(messages) -> Verdict`.

    Args:
        model: the language model that answers.
        estimator: default: the one that the policy was calibrated with, or else HybridGrad.
        policy: what to let through. Every answer's own record is checked against a calibrated policy's binding.
        escalate_to: asked, with the original conversation, for what is not let through. Another `Guard` is scored and
            decides for itself: its calibration must have been made on what this one did not let through. Any other
            callable is passed on unscored, outside the promise.
        prepare: turns the conversation into the one the model sees (puts retrieved passages in, say).
        prompt_template: a name for that form of prompt; a calibration for another form is refused.
        options: how to generate; greedy by default.
        abstain_message: delivered instead of an answer that is neither let through nor escalated.
        monitor: watches the scores for drift; `verdict.drift` then says whether they have moved.

    Raises:
        BindingMismatchError: at once, if the target's calibration does not follow this one's; at the first answer, if
            the policy was calibrated for something else.
    """

    def __init__(
        self,
        model: LanguageModel,
        estimator: Estimator | None = None,
        policy: Policy | None = None,
        *,
        escalate_to: Target | None = None,
        prepare: Callable[[Conversation], Conversation] | None = None,
        prompt_template: str = "chat",
        options: GenerationOptions | None = None,
        abstain_message: str = ABSTAIN_MESSAGE,
        monitor: DriftMonitor | None = None,
    ) -> None:
        self.policy = require_policy(policy)
        self.model, self.estimator = model, estimator or estimator_of(self.policy.calibration)
        self.escalate_to, self.prompt_template = escalate_to, prompt_template
        self._prepare = prepare
        self._options = options or GenerationOptions()
        self._abstain_message = abstain_message
        self._monitor = monitor
        if isinstance(escalate_to, Guard):
            require_sequel(self.policy, escalate_to.policy)

    @property
    def promise(self) -> Promise | None:
        """What holds for everything this guard and its targets deliver; None if a stage is uncalibrated or unscored."""
        policies, stage = [self.policy], self.escalate_to
        while isinstance(stage, Guard):
            policies.append(stage.policy)
            stage = stage.escalate_to
        return None if stage is not None else combined_promise(policies)

    @property
    def binding(self) -> Binding:
        """What a calibration for this guard must be bound to (pass it to `calibrate`, with a grader)."""
        return Binding(
            model=self.model.identity.name,
            revision=self.model.identity.revision,
            fingerprint=self.model.identity.fingerprint,
            estimator=self.estimator.name,
            settings=scoring_settings(self.model, self.estimator, self._options),
            prompt_template=template_name(self.model, self.prompt_template),
        )

    def __call__(self, conversation: Conversation) -> Verdict:
        """Answer one conversation and decide."""
        return self.batch([conversation])[0]

    def batch(self, conversations: Sequence[Conversation]) -> list[Verdict]:
        """Answer several conversations at once: one generation, one backward pass, then one batch of escalations."""
        decided = [
            decide(draft, self.policy, can_escalate=self.escalate_to is not None)
            for draft in self.drafts(conversations)
        ]
        verdicts = [self._watched(verdict) for verdict in decided]
        escalating = [i for i, verdict in enumerate(verdicts) if verdict.action == "escalate"]
        answers = self._ask_target([conversations[i] for i in escalating])
        for index, answer in zip(escalating, answers, strict=True):
            verdicts[index] = escalated(verdicts[index], answer)
        return [abstained(v, self._abstain_message) if v.action == "abstain" else v for v in verdicts]

    def drafts(self, conversations: Sequence[Conversation]) -> list[Verdict]:
        """Answers with their scores and no decision: what calibration grades."""
        seen = [self._prepare(c) if self._prepare else c for c in conversations]
        generations = self.model.generate_batch(seen, self._options, objective=self.estimator.objective)
        return [self._assess(generation) for generation in generations]

    def _assess(self, generation: Generation) -> Verdict:
        return assess(
            self.model,
            self.estimator,
            generation.evidence,
            text=generation.text,
            options=self._options,
            prompt_template=self.prompt_template,
        )

    def _watched(self, verdict: Verdict) -> Verdict:
        if self._monitor is None:
            return verdict
        return verdict.model_copy(update={"drift": self._monitor.add(verdict.uncertainty).moved})

    def _ask_target(self, conversations: Sequence[Conversation]) -> Sequence[str | Verdict]:
        if isinstance(self.escalate_to, Guard):
            return self.escalate_to.batch(conversations)
        return [self.escalate_to(conversation) for conversation in conversations] if self.escalate_to else []


def assess(
    model: LanguageModel,
    estimator: Estimator,
    evidence: Evidence,
    *,
    text: str,
    options: GenerationOptions | None = None,
    prompt_template: str = "chat",
    template_options: Mapping[str, Any] | None = None,
) -> Verdict:
    """Score an answer: a verdict that answers whatever the score, for `decide` to judge.

    `options` and `template_options` (tools, say) are those the answer was made with: calibrations are bound to them.
    """
    score = estimator(evidence)
    identity, token = model.identity, evidence.prompt.semantic_token
    status: Status = "scored" if score.uncertainty is not None else "failed" if evidence.response_ids else "unscored"
    return Verdict(
        status=status,
        action="answer",
        text=text,
        estimator=estimator.name,
        uncertainty=score.uncertainty,
        model=identity.name,
        revision=identity.revision,
        fingerprint=identity.fingerprint,
        settings=scoring_settings(model, estimator, options or GenerationOptions()),
        prompt_template=template_name(model, prompt_template, template_options),
        semantic_token=token.offset,
        semantic_token_source=token.source,
        reason=score.reason,
        **(score.details or {}),
    )


def scoring_settings(model: LanguageModel, estimator: Estimator, options: GenerationOptions) -> dict[str, Any]:
    """Everything but the model that moves scores: the estimator's settings, an own t*, the dtype and the decoding."""
    decoding = {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
    sampled = {} if options.temperature == 0 else decoding
    grammar = {} if options.grammar is None else {"grammar": sha256(options.grammar.encode()).hexdigest()[:12]}
    token = {} if model.semantic_token is None else {"semantic_token": model.semantic_token}
    return {**estimator.settings(), "dtype": model.identity.dtype, **token, **sampled, **grammar}


def template_name(model: LanguageModel, name: str, template_options: Mapping[str, Any] | None = None) -> str:
    """A prompt form's full name: the caller's name for it, and the fingerprint of the chat template and its options."""
    return f"{name}@{model.template_fingerprint(template_options) if template_options else model.identity.template}"

"""The plain records that flow through the house: frozen, typed, JSON-safe where they leave it."""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

METADATA_KEY = "semgrad_guard"
"""The one metadata key used in every integration."""

OWN_CODE = "+code-"
"""In a fingerprint, begins the mark of a model with code that cannot be compared (a hook): no two are the same."""

LOG = "ln "
"""Begins the name of a column that takes a feature's logarithm."""

Action = Literal["answer", "escalate", "abstain"]


def delivery_of(action: Action, *, enforced: bool) -> Action:
    """What happened to an answer: where the action is advice, the answer was delivered in any case."""
    return action if enforced else "answer"


SentenceAction = Literal["deliver", "drop", "stop"]
"""What happened to one sentence of an answer."""
Status = Literal["scored", "unscored", "failed"]
FinishReason = Literal["stop", "length"]
TokenSource = Literal["assistant_header", "user_text", "last_token", "override"]


@dataclass(frozen=True)
class ToolCall:
    """A model's call of a tool. `id` joins it to the tool's answer; None where the model wrote none."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None

    @property
    def digest(self) -> str:
        """Twelve hex digits that name the tool and the arguments."""
        return digest_of(json.dumps([self.name, dict(self.arguments)], sort_keys=True, default=repr))


@dataclass(frozen=True)
class Message:
    """One turn of a conversation. `role` is system, user, assistant, tool or whatever the chat template knows.

    `tool_calls` are an assistant's; `tool_call_id` and `name` identify the call that a tool's turn answers. The
    template is handed the fields that are set, in transformers' form.

    `question` and `context` are for a user's turn whose content holds more than the question: the bare question, and
    the passage it is about. The model is not shown them; methods that put the question to it again, or to an NLI model,
    leave the rest of the content (an instruction, say) away. Without them, the content is the question.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    question: str | None = None
    context: str | None = None


def in_context(question: str, context: str | None) -> str:
    """A question as a prompt puts it: before the passage it is about, if there is one.

    A causal model that knows the question can look for its answer while it reads.
    """
    return question if context is None else f"Question: {question}\nContext: {context}"


Conversation = str | Sequence[Message | Mapping[str, Any]]
"""A caller's prompt: plain text (one user turn), or a list of messages."""


@dataclass(frozen=True, kw_only=True)
class PromptForm:
    """The form of one rendered prompt: a calibration's shape is computed from such forms, and compared with them.

    `text` was tokenised, `tokens` is how many tokens it has. `roles` are those of the conversation's turns, in
    order; `user_text` is the last turn that the user wrote (the last turn at all if no user spoke). `tools` is the
    fingerprint of the tools that the chat template was handed, None where it was handed none. `control`
    are the control tokens that its turns' texts hold: their author has written marks of turns. The prompts of one
    `question`, if it takes several answers, may share passages: a word in them is new if no other question has it.
    """

    text: str
    tokens: int
    roles: tuple[str, ...]
    user_text: str
    tools: str | None = None
    control: tuple[str, ...] = ()
    question: str | None = None


@dataclass(frozen=True)
class SemanticToken:
    """t*: the prompt token whose hidden states preserve the prompt's meaning (paper, section 3.2).

    `offset` counts from the prompt's end, -1 being its last token. `source` is how it was found.
    """

    offset: int
    source: TokenSource


@dataclass(frozen=True)
class Score:
    """An estimator's verdict on one answer: higher = less certain; None, with a reason, where there is none.

    `details` holds the finite parts (semgrad, paragrad, mean_entropy, scored_tokens, scoring_ms, ...). `features` are
    the numbers that a learned estimator reads, by name: runs keep them, so that it can be fitted afterwards.
    """

    uncertainty: float | None
    reason: str | None = None
    details: Mapping[str, Any] | None = None
    features: Mapping[str, float] | None = None

    @classmethod
    def finite(cls, number: float | None, reason: str | None, details: Mapping[str, Any]) -> Score:
        """The score of a number; where it is not finite, none for this reason."""
        if number is None or not math.isfinite(number):
            return cls(None, reason or "the score is not finite", details)
        return cls(number, None, details)


class FusedWeights(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """A fitted logistic regression as plain numbers: the content of a calibration file about `FusedStates`.

    One entry per column. A column "ln NAME" takes the logarithm of the feature NAME, a column "NAME" the feature as it
    is. Features are first held to [low, high], the range that fitting saw (for logarithms, its smallest positive value
    on: a vanished gradient is a small number and not minus infinity); the column then enters as
    (x - centre) / scale. `n` answers were fitted, `n_wrong` of them wrong.
    """

    columns: tuple[str, ...] = Field(min_length=1)
    lows: tuple[float, ...]
    highs: tuple[float, ...]
    centres: tuple[float, ...]
    scales: tuple[float, ...]
    weights: tuple[float, ...]
    intercept: float
    n: int
    n_wrong: int

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        series = (self.lows, self.highs, self.centres, self.scales, self.weights)
        if any(len(numbers) != len(self.columns) for numbers in series):
            raise ValueError("there must be one low, high, centre, scale and weight per column")
        if any(name.startswith(LOG) and low <= 0 for name, low in zip(self.columns, self.lows, strict=True)):
            raise ValueError("the lowest value of a logarithm's feature must be positive")
        if min(self.scales) <= 0:
            raise ValueError("scales must be positive")
        return self

    @property
    def id(self) -> str:
        """Twelve hex digits that name these numbers."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]

    @property
    def features(self) -> frozenset[str]:
        """The names of the features that are read."""
        return frozenset(name.removeprefix(LOG) for name in self.columns)

    def logit(self, features: Mapping[str, float]) -> float:
        """ln P(wrong) / P(correct) for an answer's features, finite numbers; a missing one is a KeyError."""
        held = (
            min(high, max(low, features[name.removeprefix(LOG)]))
            for name, low, high in zip(self.columns, self.lows, self.highs, strict=True)
        )
        series = zip(self.columns, held, self.centres, self.scales, self.weights, strict=True)
        terms = (w * ((math.log(x) if name.startswith(LOG) else x) - c) / s for name, x, c, s, w in series)
        return self.intercept + math.fsum(terms)


class SentenceVerdict(BaseModel, frozen=True, allow_inf_nan=False, ser_json_inf_nan="null"):
    """What happened to one sentence: `Verdict.text[start:end]`, and its scores.

    The sentences of an answer are adjacent, and the white space behind one belongs to it. One that is not delivered
    keeps its place in the order; its range is empty. `action` is "deliver", "drop" (left out), or "stop" (it comes
    after the end of the answer). `uncertainty` and `scores` (by the names of other estimators) are those of its
    `tokens`, given everything before them; None for `reason`. `leans_on` is the number of the earlier sentence without
    which it cannot be read, and `compared` the score that the threshold was compared with: under "stop" the greatest up
    to here, under "drop" the greatest of those that it leans on. `promised` is whether a calibrated threshold let it
    through.
    """

    start: int
    end: int
    action: SentenceAction = "deliver"
    tokens: int = 0
    uncertainty: float | None = None
    scores: dict[str, float] = Field(default_factory=dict)
    leans_on: int | None = None
    compared: float | None = None
    confidence: float | None = None
    promised: bool = False
    reason: str | None = None


class CallVerdict(BaseModel, frozen=True, allow_inf_nan=False):
    """The score of one tool call, of the tokens in which it was written, those that end it included.

    `digest` names the call as it was written (`ToolCall.digest`): a call with other arguments has no score.
    `uncertainty` is None where the call's place in the answer is not known, or it cannot be scored by itself.
    """

    digest: str
    uncertainty: float | None = None


class FieldVerdict(BaseModel, frozen=True, allow_inf_nan=False):
    """One value of an answer that is JSON, or of the arguments of the call that it is.

    `path` is where it stands, as in ("cities", 0, "name"). `uncertainty` is that of the tokens that spell it, and of
    the one that ends it, given everything before them. `action` is "deliver", or "null": the value is withheld, and
    null stands in its place. `nullable` is whether the schema allows that, and has the names of the path.
    """

    path: tuple[str | int, ...]
    uncertainty: float | None = None
    confidence: float | None = None
    action: Literal["deliver", "null"] = "deliver"
    nullable: bool = True


SCHEMA = 2
"""The version of a verdict's record. A field that is renamed or removed, or that comes to mean something else, makes
another one, and a record of another version is refused; a field that is added makes none."""


class VerdictDetails(BaseModel, frozen=True, allow_inf_nan=False, ser_json_inf_nan="null"):
    """What a verdict rests on: the promise, the model and its conditions, further scores, and the answer itself.

    Where `enforced` is False the action is advice: the text is the model's own answer, delivered whatever the decision,
    or without one (no threshold was given). `alpha` is the promised error rate of the answers that the threshold lets
    through, and `requested_alpha` the lower one that was asked for, where the calibration's labels did not support it.
    `upstream` is the calibration that `calibration_id` was made after: such a stage promises an answer only as the
    target of the stage before, and that stage promises only answers of targets that were calibrated behind it.
    `familiar` is whether the prompt is like those of the calibration (None: there is none), and `unfamiliar` how it
    differs, or why that is not known. `drift` is whether the scores have moved.

    `model` to `prompt_template` are compared with a calibration's binding. `prompt` is the digest of the prompt
    (`digest_of` its text), which has `prompt_tokens`. `options` are those of a request to another server, where it
    wrote the answer, and None where the scored model did; `answer_tokens` is a target's own count of its answer.

    `mean_entropy`, `gnll` and `max_probability` are the numbers of these estimators, which cost nothing in addition to
    any other. `deviation` is the largest relative error that the self-check found in the way these scores were
    computed, and `tier` that way. `cut` is where the scored answer was cut off: after so many tokens, or at this stop
    string; None where its model ended it, or where that is not known.

    `reasoning` is the model's thought before the text, and not part of it: the scores are those of the answer, given
    the thought. It has `reasoning_tokens`, whose entropies in nats have the mean `reasoning_entropy` and the greatest
    `reasoning_peak`. `calls` are the answer's tool calls and `fields` the values of a structured answer, each with its
    own score. `escalated_from` is the stage that handed the question on (see `Verdict.delivered`).
    """

    enforced: bool = True
    calibration_id: str | None = None
    alpha: float | None = None
    requested_alpha: float | None = None
    upstream: str | None = None
    familiar: bool | None = None
    unfamiliar: tuple[str, ...] = ()
    drift: bool | None = None
    model: str
    revision: str | None = None
    fingerprint: str | None = None
    settings: dict[str, Any] | None = None
    prompt_template: str | None = None
    prompt: str | None = None
    options: dict[str, Any] | None = None
    mean_entropy: float | None = None
    gnll: float | None = None
    max_probability: float | None = None
    deviation: float | None = None
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    scored_tokens: int = 0
    cut: int | str | None = None
    scoring_ms: float | None = None
    semantic_token: int | None = None
    semantic_token_source: TokenSource | None = None
    tier: str | None = None
    reasoning: str | None = None
    reasoning_tokens: int | None = None
    reasoning_entropy: float | None = None
    reasoning_peak: float | None = None
    calls: tuple[CallVerdict, ...] = ()
    fields: tuple[FieldVerdict, ...] = ()
    escalated_from: Verdict | None = None


class Verdict(BaseModel, frozen=True, allow_inf_nan=False, ser_json_inf_nan="null"):
    """What happened to one question: the text to deliver, the action that led to it, and the score behind it.

    `uncertainty` is the estimator's number, higher for less certain answers; `hybridgrad` (the paper's, with tau and
    beta of 1), `semgrad` and `paragrad` are those of these estimators, where a replay computed them. `confidence` is
    P(correct) in [0, 1] and exists only after calibration. `status` is `scored`, `unscored` (there was nothing to
    score) or `failed` (the score was not finite); `reason` has details. With `action="escalate"` the scores describe
    this stage's draft, `text` is the target's answer and `escalated` the target's own verdict. `promised` tells whether
    a calibrated threshold let the delivered text through, to a prompt like those of the calibration; bare thresholds
    and unscored targets promise nothing. `draft` is the withheld text. `decision_id` names the row of the decision log;
    there is one as soon as the row is safe. `sentences` are those of the answer, where answers are judged by sentence.
    Under "stop" a stream ends its model behind the doubtful sentence, so that its `sentences`, `draft` and
    `uncertainty` end there; a call writes and lists the later ones as well. The delivered text and the action are the
    same.
    """

    status: Status
    action: Action
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    reason: str | None = None
    estimator: str
    uncertainty: float | None = None
    hybridgrad: float | None = None
    semgrad: float | None = None
    paragrad: float | None = None
    confidence: float | None = None
    threshold: float | None = None
    promised: bool = False
    decision_id: str | None = None
    draft: str | None = None
    sentences: tuple[SentenceVerdict, ...] = ()
    escalated: Verdict | None = None
    details: VerdictDetails

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """A verdict with these fields, its own and those of its details."""
        own, details = _apart(fields)
        return cls(**own, details=VerdictDetails(**details))

    def revised(self, **changes: Any) -> Self:
        """The verdict with some fields changed, its own or those of its details."""
        own, details = _apart(changes)
        return self.model_copy(update={**own, "details": self.details.model_copy(update=details)})

    @property
    def flat(self) -> dict[str, Any]:
        """Its own fields and those of its details, by name."""
        return {**vars(self.details), **vars(self)}

    @property
    def calls(self) -> tuple[CallVerdict, ...]:
        """Each tool call with its score."""
        return self.details.calls

    @property
    def fields(self) -> tuple[FieldVerdict, ...]:
        """Each value of a structured answer with its score, and the decision about it."""
        return self.details.fields

    @property
    def has_nulls(self) -> bool:
        """Whether some values of a structured answer are withheld, so that null is to take their place."""
        return any(one.action == "null" for one in self.fields)

    @property
    def delivery(self) -> Action:
        """What happened to the answer, for counts and pages; `action` alone is the guard's decision, or advice."""
        return delivery_of(self.action, enforced=self.details.enforced)

    @property
    def shows_draft(self) -> bool:
        """Whether the delivered text is this stage's own: it was let through, or the decision is advice."""
        return self.escalated is None and self.draft is None and self.delivery == "answer" and not self.is_part

    @property
    def is_part(self) -> bool:
        """Whether some sentences or values of the answer were delivered, and others not."""
        parted = self.has_nulls or {one.action == "deliver" for one in self.sentences} == {True, False}
        return parted and self.action == "answer" and self.details.enforced

    @property
    def delivered(self) -> Verdict:
        """The verdict on the delivered answer: after an escalation the target's own, with this one as
        `details.escalated_from`.

        Its action stays "escalate" and its promise this one's, which counts every stage; the scores, the model and the
        status are those of the author of the delivered text.
        """
        if self.escalated is None:
            return self
        return self.escalated.delivered.revised(
            action="escalate",
            promised=self.promised,
            enforced=self.details.enforced,
            draft=self.draft,
            decision_id=self.decision_id,
            escalated_from=self,
        )

    def metadata(self, *, keep_draft: bool = False) -> dict[str, Any]:
        """The record as integrations attach it under `METADATA_KEY`: plain JSON types, no text, a draft on request.

        `digest` names the text that it belongs to (see `digest_of`).
        """
        texts = {"reasoning", "escalated_from"}
        record = self.model_dump(
            mode="json", exclude={"text": True, "tool_calls": True, "escalated": True, "details": texts}
        )
        record["escalated"] = None if self.escalated is None else self.escalated.metadata(keep_draft=keep_draft)
        if not keep_draft:
            record["draft"] = None
        return {"schema": SCHEMA, "digest": digest_of(self.text), **record}


def _apart(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A verdict's own fields, and those of its details."""
    own = {name: value for name, value in fields.items() if name in Verdict.model_fields}
    return own, {name: value for name, value in fields.items() if name not in own}


def digest_of(text: str) -> str:
    """Twelve hex digits that name a text, white space around it aside: a record with another text is not believed."""
    return hashlib.sha256(text.strip().encode("utf-8", "surrogatepass")).hexdigest()[:12]


def trace_fields(record: Mapping[str, Any]) -> dict[str, str | bool | int | float]:
    """A verdict's `metadata()` as flat names and plain values: fields to filter traces by. A draft is left out.

    `{"semgrad_guard.action": "abstain", "semgrad_guard.uncertainty": 0.004, ...}`
    """
    flat = {**record, **record["details"]}
    plain = {name: value for name, value in flat.items() if isinstance(value, (str, bool, int, float))}
    return {f"{METADATA_KEY}.{name}": value for name, value in plain.items() if name != "draft"}


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: white space, and characters without a width (Unicode's format characters)."""
    return all(letter.isspace() or unicodedata.category(letter) == "Cf" for letter in text)

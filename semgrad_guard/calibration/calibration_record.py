"""The record of a calibration: frozen, saved as JSON, and refused when its content was changed; and what it says."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from semgrad_guard.calibration.binding import Binding, EstimatorChoice
from semgrad_guard.calibration.calibration_set import Copies, Effect
from semgrad_guard.calibration.gates import ASSUMPTIONS, Procedure, share_of, upper_bound
from semgrad_guard.calibration.planning import HandGrades, plan
from semgrad_guard.calibration.prompt_shape import PromptShape
from semgrad_guard.calibration.sentence_gates import SentencePromise
from semgrad_guard.calibration.thresholds import ConfidenceMap, Reachable, upwards
from semgrad_guard.declared import first_fault, is_score
from semgrad_guard.errors import CalibrationError, InputError
from semgrad_guard.files import atomic_write, distinct
from semgrad_guard.records import PromptForm
from semgrad_guard.settings import Alpha, Delta


class Calibration(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """A threshold, the promise it keeps, and everything needed to check it. Made by `calibrate`, or `load`ed.

    `threshold` lets through uncertainties up to it, and lies between two scores; None, with a `reason`, lets nothing
    through. `coverage` is the share of the calibration questions at or below it, in [0, 1]. Of the `n_answered` tested
    answers there, `n_answered_wrong` were wrong. `bound_if_fixed` is the exact upper bound (at the tests' `level`) on
    their error rate, were the threshold fixed beforehand: it was selected, so alpha is the promise, and not this bound.
    `n` counts questions, without the `n_abstained` whose answers decline to answer. `n_wrong` are the errors among
    them, `n_unscored` those without a finite score, `n_unscored_wrong` of these wrong, `n_duplicates` repeats that
    were left out, `n_tested` the scored ones that were tested. `copies` tells what became of repeated questions: the
    promise is about the traffic
    that they are drawn from ("keep"), or about distinct questions ("once", None). `tries` counts the calibrations
    on these labels up to this one, where they are counted (see `gates.py`). `procedure` names the tests (see
    `gates.Procedure`), at the thresholds `grid`. `scores` are the calibration scores,
    rising, kept for `drift`. `choice` tells how the estimator was chosen or fitted, where that was learned from labels
    (not those of the threshold). `shape` is that of the prompts; a calibration without one gives a threshold and
    promises nothing. `auroc` is that of the scores, and `aurocs` those of all estimators that scored the answers, by
    name; of these, `auto` would take `auto`. Where people graded only a part of the surest answers, `by_hand` tells
    which: `n_wrong`, the tested answers, `auroc` and P(correct) are about these alone. `sentences` makes it a
    calibration by sentence: the threshold is compared with sentences' scores, `n_answered` are the answers from which
    something is delivered, `n_answered_wrong` those that are wrong by its promise, `n_wrong` those with a wrong
    sentence, `scores` their most certain sentences', `auroc` and P(correct) those of single sentences. Where no
    threshold keeps the promise, `reachable` is the one that these labels support, and `reached` a calibration with it;
    `requested` is the alpha that its labels did not support. `id` is a hash over all of it.
    """

    schema_version: Literal[2]
    id: str
    created: str
    alpha: Alpha
    delta: Delta
    threshold: float | None
    reason: str | None
    coverage: float = Field(ge=0, le=1)
    bound_if_fixed: float | None
    n: int = Field(ge=1)
    n_wrong: int = Field(ge=0)
    n_unscored: int = Field(ge=0)
    n_duplicates: int = Field(ge=0)
    n_tested: int = Field(ge=0)
    n_answered: int = Field(ge=0)
    n_answered_wrong: int = Field(ge=0)
    grid: tuple[float, ...]
    scores: tuple[float, ...]
    confidence_map: ConfidenceMap | None
    binding: Binding | None
    choice: EstimatorChoice | None = None
    shape: PromptShape | None = None
    procedure: Procedure
    copies: Copies | None = None
    tries: int = Field(default=0, ge=0)
    n_abstained: int = Field(default=0, ge=0)
    n_unscored_wrong: int = Field(default=0, ge=0)
    auroc: float | None = None
    aurocs: dict[str, float | None] = Field(default_factory=dict)
    auto: str | None = None
    by_hand: HandGrades | None = None
    sentences: SentencePromise | None = None
    reachable: Reachable | None = None
    requested: Alpha | None = None

    @classmethod
    def seal(cls, **content: Any) -> Self:
        """A calibration with this content (every field but `id` and `schema_version`), whose id is the hash over it."""
        content = {"schema_version": 2, **content}
        try:
            return cls(id=_content_id(cls.model_construct(id="", **content)), **content)
        except ValidationError as error:
            raise CalibrationError(f"The calibration cannot be recorded: {first_fault(error)}.") from error

    def with_content(self, **changes: Any) -> Self:
        """A calibration with some fields changed, and an id of its own."""
        fields = set(type(self).model_fields) - {"id", "schema_version"}
        return self.seal(**{name: getattr(self, name) for name in fields} | changes)

    @property
    def assumption(self) -> str:
        """The assumption of the promise: on the draw of questions, and on how the error rate varies with the score."""
        if self.sentences is not None:
            return self.sentences.assumption
        falls = (
            "" if self.requested is None else f", and where it exceeds {self.requested:g} the error rate never falls"
        )
        return ASSUMPTIONS[self.procedure] + falls

    @property
    def level(self) -> float:
        """The level of the tests: delta, or its share for this try."""
        return share_of(self.delta, self.tries)

    @property
    def effect(self) -> Effect | None:
        """The effect of the threshold on the questions, or by sentence on all their sentences; None where a part of
        them was tested."""
        if self.sentences is not None:
            return self.sentences.effect
        if self.by_hand is not None or self.n_tested < self.n - self.n_unscored:
            return None
        return Effect(self.n, self.n_wrong, self.n_answered, self.n_answered_wrong)

    @property
    def is_about_answers(self) -> bool:
        """Whether the promise is about answers as wholes, so that grades of these tell whether it holds."""
        return self.sentences is None or self.sentences.promise == "answer"

    def reached(self) -> Self:
        """The calibration with the reachable promise in the place of the one that was asked for, and an id of its own.

        Itself where a threshold keeps that one.

        Raises:
            CalibrationError: these labels support no promise either.
        """
        if self.threshold is not None:
            return self
        if self.reachable is None:
            raise CalibrationError(
                f'on_no_threshold="reachable" is no help with calibration {self.id}: its labels support no promise. '
                f"{self.reason or ''}".rstrip()
            )
        found = self.reachable
        return self.with_content(
            alpha=found.alpha,
            requested=self.alpha,
            threshold=found.threshold,
            reason=None,
            reachable=None,
            coverage=sum(score <= found.threshold for score in self.scores) / self.n,
            bound_if_fixed=upper_bound(found.n_wrong, found.n_answered, delta=self.level),
            n_answered=found.n_answered,
            n_answered_wrong=found.n_wrong,
        )

    def lets_through(self, uncertainty: float | None) -> bool:
        """Whether an answer is at or below the threshold; never without a finite score or without a threshold."""
        return is_score(uncertainty) and self.threshold is not None and uncertainty <= self.threshold

    def confidence(self, uncertainty: float | None) -> float | None:
        """P(correct) in [0, 1]; None without a finite score, or where no graded answer was as uncertain."""
        if self.confidence_map is None or not is_score(uncertainty):
            return None
        if self.by_hand is not None and uncertainty > self.by_hand.below:
            return None
        return self.confidence_map(float(uncertainty))

    def surest(self, confidence: float) -> float | None:
        """The greatest score at which P(correct) is at least this; None where it is at no score."""
        right = ((score, self.confidence(score)) for score in self.scores)
        return max((score for score, own in right if own is not None and own >= confidence), default=None)

    def unfamiliar(self, prompt: PromptForm | None) -> tuple[str, ...]:
        """Why nothing is promised about an answer to this prompt, in plain words; empty for a familiar one.

        None is an unknown prompt. Nothing is promised about any answer where the grader's rules have changed since.
        """
        outdated = None if self.binding is None else self.binding.outdated_grader
        if outdated is not None:
            return (outdated,)
        if self.shape is None:
            return (
                "the calibration does not know what its prompts looked like (it was given none); make "
                "it anew with `semgrad-guard calibrate`, or calibrate(..., prompts=...)",
            )
        return ("the prompt is not known",) if prompt is None else self.shape.differences(prompt)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write JSON, whole or not at all: an interrupted write leaves the old file, or none.

        Raises:
            CalibrationError: nothing can be written there.
        """
        try:
            fields = _content(self).items()  # a line for each: readable, and small where a field is a long list
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in fields)
            return atomic_write(Path(path), f"{{\n{lines}\n}}\n")
        except InputError as error:
            reason = str(error).removeprefix("Cannot write ")
            raise CalibrationError(f"Cannot write the calibration to {reason}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote; a file that is cut short, edited by hand or something else is refused."""
        source = Path(path)
        try:
            text = source.read_text(encoding="utf-8")
        except OSError as error:
            raise CalibrationError(f"Cannot read the calibration {source}: {error.strerror or error}.") from error
        except UnicodeDecodeError as error:
            raise CalibrationError(f"{source} is not a calibration: it is not UTF-8 text.") from error
        except ValueError as error:  # a null character
            raise CalibrationError(f"Cannot read the calibration {str(source)!r}: {error}.") from error
        try:
            json.loads(text, object_pairs_hook=distinct)
        except json.JSONDecodeError:
            pass  # pydantic names the place
        except (ValueError, RecursionError) as error:
            raise CalibrationError(f"{source} is not an intact calibration: {error}. {_EDITED}") from error
        try:
            return cls.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise CalibrationError(f"{source} is not an intact calibration: {_fault(error)}. {_EDITED}") from error

    def require_intact(self) -> Self:
        """The calibration itself.

        Raises:
            CalibrationError: a field was changed after it was made (`model_copy(update=...)` checks nothing).
        """
        try:
            intact = self.id == _content_id(self)
        except (AttributeError, TypeError, ValueError):  # a field is not even of its type
            intact = False
        if not intact:
            raise CalibrationError(
                f"The calibration {self.id} was changed after it was made: its id does not match its content, so its "
                "promise does not hold. Load the file again, or calibrate again."
            )
        return self

    @field_validator("created")
    @classmethod
    def _is_a_date(cls, value: str) -> str:
        try:
            datetime.datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(f"created must be an ISO date such as 2026-01-31, not {value!r}") from None
        return value

    @model_validator(mode="after")
    def _is_intact(self) -> Self:
        if self.id != _content_id(self):
            raise ValueError("its id does not match its content")
        return self

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        """Counts within each other, and a threshold that was tested: what `calibrate` makes always is so."""
        if not self.n_answered_wrong <= self.n_answered <= self.n_tested <= self.n - self.n_unscored <= self.n:
            raise ValueError(
                "counts must not grow: n, n - n_unscored, n_tested, n_answered, n_answered_wrong are "
                f"{self.n}, {self.n - self.n_unscored}, {self.n_tested}, {self.n_answered}, {self.n_answered_wrong}"
            )
        if self.n_wrong > self.n or len(self.scores) != self.n - self.n_unscored:
            raise ValueError("there must be a score for each scored answer, and no more wrong answers than answers")
        if self.threshold is not None and self.threshold not in self.grid:
            raise ValueError(f"the threshold {self.threshold!r} is none of the grid's, so it was not tested")
        if (self.threshold is None) != (self.reason is not None) or (self.threshold is None) == bool(self.n_answered):
            raise ValueError("there is either a threshold with answers below it, or a reason why there is none")
        if self.reachable is not None and (self.threshold is not None or self.reachable.threshold not in self.grid):
            raise ValueError("a reachable promise is that of a gate, where no threshold was accepted")
        return self


_EDITED = "A calibration must not be edited: run `semgrad-guard calibrate` again, or restore the file."


_UNKNOWN = frozenset({"extra_forbidden", "literal_error"})
"""The faults of a field, or of a procedure, that is not known here."""


def _fault(error: ValidationError) -> str:
    """The first fault; of what only another version knows, this before a hash that cannot match."""
    known = [fault for fault in error.errors(include_url=False) if fault["type"] in _UNKNOWN]
    if not known:
        return first_fault(error)
    return f"{'.'.join(map(str, known[0]['loc']))} is not known to this version"


def _content_id(calibration: Calibration) -> str:
    """The first 16 hex digits of SHA-256 over the canonical JSON of every field but the id."""
    content = _content(calibration)
    del content["id"]
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _content(calibration: Calibration) -> dict[str, Any]:
    """The fields as plain JSON, without those at their defaults: a later release may add some, and files keep their
    ids."""
    return calibration.model_dump(mode="json", exclude_defaults=True, warnings=False)


# A calibration in words: for the terminal, for the server's page and for its models.

_AUTO = "the best on a part of the labels, and with few labels one that costs nothing, whatever its AUROC"


def report(calibration: Calibration) -> dict[str, str]:
    """Sentences by their subject: promise, assumption, effect, prompts, labels, chance, scores; those that apply."""
    sentences = {"promise": promise(calibration), "assumption": calibration.assumption}
    if calibration.effect is not None and calibration.threshold is not None:
        sentences["effect"] = str(calibration.effect)
    if calibration.shape is not None:
        sentences["prompts"] = calibration.shape.covers
    if (part := calibration.by_hand) is not None:
        sentences["labels"] = (
            f"{part.count} graded by hand, a random part of the surest {part.share:.1%} ({part.drawn_from} answers)"
        )
    elif calibration.auroc is not None and calibration.n_tested and calibration.sentences is None:
        error = (calibration.n_wrong - calibration.n_unscored_wrong) / calibration.n_tested
        level = calibration.level
        chance = plan(calibration.n_tested, error=error, auroc=calibration.auroc, alpha=calibration.alpha, delta=level)
        sentences["chance"] = (
            f"with {error:.0%} of the scored answers wrong and an AUROC of {calibration.auroc:.2f}, {chance}"
        )
    if calibration.aurocs:
        figures = ", ".join(f"{name} {value:.3f}" for name, value in calibration.aurocs.items() if value is not None)
        text = f"AUROC {figures}" if figures else "no AUROC: all answers are right, or all wrong"
        taken = f"; --estimator auto takes {calibration.auto}: {_AUTO}" if calibration.auto else ""
        sentences["scores"] = text + taken
    return sentences


def promise(calibration: Calibration) -> str:
    """The promise in one sentence, whether or not a threshold keeps it."""
    to = {"keep": " to traffic like this", "once": " to distinct questions", None: ""}[calibration.copies]
    rate = f"{100 * calibration.alpha:g}%" if calibration.requested is None else upwards(calibration.alpha)
    sure = f"with {100 * (1 - calibration.delta):g}% probability"
    text = f"Among the answers let through{to}, at most {rate} are wrong, {sure}"
    if calibration.requested is not None:
        text += f" ({in_place_of(calibration.requested)})"
    if calibration.sentences is not None:
        delivered = f"from which something is delivered{to}"
        text = {
            "sentence": f"Take an answer {delivered}, and one of its delivered sentences at random: it is wrong at a "
            f"rate of at most {rate}, {sure}",
            "answer": f"Of the answers {delivered}, at most {rate} hold a wrong sentence, {sure}",
        }[calibration.sentences.promise]
    if calibration.tries < 2:
        return f"{text}."
    return (
        f"{text} for all {calibration.tries} tries on these labels together (this one has level "
        f"{calibration.level:.2g})."
    )


def in_place_of(alpha: float) -> str:
    """That another error rate was requested, in words."""
    return f"{100 * alpha:g}% was asked for, and these labels do not support it"


def shortfall(calibration: Calibration, *, cut: str = "") -> str:
    """What helps where no threshold keeps the promise, in order of effect: the reachable one, answers that were `cut`
    off, and the labels that the reason names."""
    return " ".join(filter(None, (offer(calibration), cut, calibration.reason)))


def offer(calibration: Calibration) -> str:
    """What the labels support where they do not support the promise that was asked for; empty where there is none."""
    if (found := calibration.reachable) is None:
        return ""
    counts = found.in_words(calibration.n_tested, requested=calibration.alpha)
    return f"{counts} To deliver these: --on-no-threshold reachable."

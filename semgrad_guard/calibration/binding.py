"""The conditions of a calibration: its threshold means nothing for another model, estimator, template or grader.

A `Unit` is what scores and their promise are about. `EstimatorChoice` tells how its estimator was chosen or fitted,
from other answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, Field

from semgrad_guard.errors import BindingMismatchError, CalibrationError
from semgrad_guard.records import OWN_CODE, FusedWeights
from semgrad_guard.settings import OnCut, OnDoubt

SettingScalar = str | int | float | bool | None
Setting = SettingScalar | list[SettingScalar] | dict[str, SettingScalar]

_OF_A_REQUEST = frozenset({"temperature", "top_p", "top_k", "grammar"})
"""The settings that come from the options of a request."""

_OF_ESTIMATORS = frozenset({"estimator", "settings"})

GRADER_VERSIONS = {"contains": 3}
"""Our graders whose rules have changed, with the version of their rules; it belongs to their names (`contains@3`)."""

_NOT_COMPARED = frozenset({"max_tokens", "stop", "on_cut", "options"})
"""Where answers could be cut off is compared with the answers that were (`Binding.cut_elsewhere`), and `options` with
those of each call (`call_options.unlike_calls`). A policy takes `on_cut` from here."""


class Binding(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()):
    """The model, estimator and conditions that a calibration was made with. None means "not stated".

    `revision` names the model's version, `fingerprint` its weights and everything switched, patched or hooked in it;
    `settings` are the estimator's (JSON scalars, lists and tables of them); `prompt_template` is a name or hash;
    `grader` graded the answers. `upstream` is the id of the calibration of the stage before, when this one was made on
    the questions that that stage did not let through. `max_tokens` and `stop` are where answers were cut off: after so
    many tokens (0: none was), at these strings; `on_cut` is which of the former had a score (None: all). `options` are
    those of the calls to another server, where it wrote the answers (see `call_options`).
    """

    model: str
    estimator: str
    revision: str | None = None
    fingerprint: str | None = None
    settings: dict[str, Setting] | None = None
    prompt_template: str | None = None
    grader: str | None = None
    upstream: str | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    on_cut: OnCut | None = None
    options: dict[str, Setting] | None = None

    @property
    def outdated_grader(self) -> str | None:
        """In words, that the grader judges by other rules now than it did for this calibration; None where not."""
        name, _, version = re.split(r"[(>+]", self.grader or "")[0].partition("@")
        if version == str(GRADER_VERSIONS.get(name, version)):
            return None
        return (
            f"the calibration's answers were graded by {self.grader}, whose rules have changed since (it is "
            f"{name}@{GRADER_VERSIONS[name]} now); make it anew with `semgrad-guard calibrate`"
        )

    def differences(self, other: Binding) -> dict[str, tuple[Any, Any]]:
        """Field -> (mine, other's), for every field that both sides state and that differs.

        `other` is usually an answer's own record, whose grader and upstream are None: these are then not compared.
        Of two fingerprints with a mark for code that cannot be compared, the marks are not: nothing is promised then.
        """
        pairs = {
            name: (getattr(self, name), getattr(other, name))
            for name in Binding.model_fields
            if name not in _NOT_COMPARED
        }
        ours, theirs = pairs["fingerprint"]
        if ours and theirs and ours.partition(OWN_CODE)[:2] == theirs.partition(OWN_CODE)[:2]:
            del pairs["fingerprint"]
        return {name: (a, b) for name, (a, b) in pairs.items() if a is not None and b is not None and a != b}

    def cut_elsewhere(self, cut: int | str | None, *, tokens: int = 0, text: str = "") -> str | None:
        """In words, how the answer's cut-off differs from the calibration's; None where it does not.

        An answer of one token is another one than that of two hundred, and an answer that ended by itself is the same
        with any limit that it keeps. `tokens` and `text` are the answer's, where known.
        """
        if self.max_tokens is None:
            return None
        if 0 < self.max_tokens < tokens:
            return f"the answer has {tokens} tokens; those of the calibration were cut off after {self.max_tokens}"
        if (stop := next((end for end in self.stop if end in text), None)) is not None:
            return f"the answer continues behind {stop!r}, where those of the calibration were cut off"
        if cut is None or cut == self.max_tokens or cut in self.stop:
            return None
        where = f"after {cut} tokens" if isinstance(cut, int) else f"at {cut!r}"
        known = f"after {self.max_tokens} tokens" if self.max_tokens else "not"
        return f"the answer was cut off {where}, and those of the calibration {known}"

    def without_prompt_name(self) -> Self:
        """The binding whose `prompt_template` is the chat template's fingerprint alone, without the prompts' name."""
        name, at, fingerprint = (self.prompt_template or "").rpartition("@")
        return self.model_copy(update={"prompt_template": fingerprint}) if at and name else self

    def with_options_of(self, other: Binding) -> Self:
        """The same conditions for answers with the decoding, the form and the tools of the other's."""
        if self.settings is None or other.settings is None:
            settings = self.settings
        else:
            settings = {name: value for name, value in self.settings.items() if name not in _OF_A_REQUEST}
            settings |= {name: value for name, value in other.settings.items() if name in _OF_A_REQUEST}
        return self.model_copy(update={"settings": settings, "prompt_template": other.prompt_template})

    def in_words(self, other: Binding) -> tuple[str, ...]:
        """The differences from another binding, in words."""
        return tuple(_named(field, mine, theirs) for field, (mine, theirs) in self.differences(other).items())

    def require(self, other: Binding) -> None:
        """Raise `BindingMismatchError`, naming each difference, unless this binding was made for `other`."""
        fields = self.differences(other)
        if not fields:
            return
        differences = dict(zip(fields, self.in_words(other), strict=True))
        if "model" in fields and self.fingerprint is not None and self.fingerprint == other.fingerprint:
            differences["model"] += " (the weights are the same: a folder has moved; give it its name again)"
        named = "; ".join(differences.values())
        error = BindingMismatchError(
            f"The calibration was made for something else: {named}. "
            "Calibrate again with what answers now, or answer with what was calibrated"
            + (
                " (semgrad_guard.estimator_of(calibration) scores as it did)."
                if _OF_ESTIMATORS & fields.keys()
                else "."
            )
        )
        error.differences, error.changes = named, _by_setting(fields)
        raise error


def _by_setting(differences: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """The value now and that at calibration, by field; of settings by setting, None where it was not set."""
    found: dict[str, tuple[Any, Any]] = {}
    for field, (mine, theirs) in differences.items():
        if field != "settings":
            found[field] = theirs, mine
            continue
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                found[name] = theirs.get(name), mine.get(name)
    return found


def _named(field: str, mine: Any, theirs: Any) -> str:
    """One difference in words; of settings, only those that differ."""
    if field == "settings":
        keys = [key for key in {**mine, **theirs} if mine.get(key, ...) != theirs.get(key, ...)]
        mine = {key: mine[key] for key in keys if key in mine}
        theirs = {key: theirs[key] for key in keys if key in theirs}
    follows = " (it follows the weights and what is switched, patched or hooked in the model)"
    now, then = (repr(value) if value != {} else "not set" for value in (theirs, mine))
    return f"{field} is {now} and was {then} at calibration{follows if field == 'fingerprint' else ''}"


def shared_by(bindings: Sequence[Binding], *, of: str) -> Binding:
    """The binding of scores that are calibrated together, compared as those of later answers are.

    Raises:
        CalibrationError: they were made in different ways.
    """
    for other in bindings:
        if words := bindings[0].in_words(other):
            raise CalibrationError(f"The {of} were scored in different ways: {'; '.join(words)}.")
    return bindings[0]


@dataclass(frozen=True)
class Unit:
    """What a score and its promise are about, other than a whole answer: the settings by which they are bound to it."""

    settings: Mapping[str, str]

    @classmethod
    def sentences(cls, on_doubt: OnDoubt) -> Self:
        """Each sentence of an answer."""
        return cls({"by": "sentence", "on_doubt": on_doubt})

    def among(self, settings: Mapping[str, Any] | None) -> dict[str, Any]:
        """These settings, and this unit."""
        return {**(settings or {}), **self.settings}

    def is_of(self, binding: Binding | None) -> bool:
        """Whether scores that are bound so are about this unit."""
        return binding is not None and self.settings.items() <= (binding.settings or {}).items()


QUESTIONS = Unit({"unit": "question"})
"""A whole question, which may take several answers: its score is that of the most doubtful one."""
FIELDS = Unit({"unit": "field", "on_doubt": "drop"})
"""Each value of a structured answer."""
CALLS = Unit({"by": "call"})
"""Each call of a tool."""


EstimatorName = Literal["states", "auto"]


class EstimatorChoice(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The requested estimator, the chosen one, and why.

    `asked` is the learned one, or the best ("auto"); `estimator` the name of the one that the threshold belongs to, and
    `reason` why it is that one. `weights` are the numbers of a fitted one. `aurocs` compares the candidates on
    the answers that were learned from (a fitted one on those that it was not fitted on). `questions` names these
    answers' questions: the threshold must be chosen on others.
    """

    asked: EstimatorName  # a field of files
    estimator: str
    reason: str
    weights: FusedWeights | None = None
    aurocs: dict[str, float | None] = Field(default_factory=dict)
    questions: tuple[str, ...] = ()
    split_seed: int = 0

    def require_others(self, questions: Iterable[str]) -> None:
        """Raise unless these questions, on which a threshold is to be chosen, were not learned from.

        An estimator looks better on the answers that it was fitted on than on any others, so a threshold chosen there
        lets through more than it promises.
        """
        seen = set(self.questions) & set(questions)
        if seen:
            raise CalibrationError(
                f"{len(seen)} of the questions were used to choose or fit the estimator ({self.estimator}). The "
                "threshold must be chosen on others, or its promise does not hold: split them, or label new ones."
            )

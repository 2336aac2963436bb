"""Decisions with a promise: a threshold from labelled decisions, in the place of a constant .5 or of an argmax.

A decision model (`langchain_core.decisions`) says how probable an outcome is. `calibrate_decisions` finds from labels
how improbable the other outcomes must be, so that of the decisions that take the safe one at most alpha are wrong, with
probability at least 1 - delta. The labels alone decide: it does not matter whether the probabilities are calibrated.

Of two decisions in one agent's run the second often repeats the first, so the run is the independent unit: with the
`runs` of the labelled states the promise is that of sentences (`semgrad_guard.calibration.sentence_gates`), runs in the
place of answers: take a run of which something is let through, and one of its decisions at random.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import Any, cast

from langchain_core.decisions import (
    Answer,
    BaseDecisionModel,
    Choice,
    ChoiceAnswer,
    ClassifierRequest,
    ClassifierResponse,
    Noul,
    NoulAnswer,
    Question,
    State,
)
from pydantic import ConfigDict, model_validator

from semgrad_guard.adapters.calls import pairs_in
from semgrad_guard.calibration import Binding, Calibration, calibrate, calibrate_runs
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.guard import Steps, Work, adrive, drive, judged, require_listener

ESTIMATOR = "decision"
"""The estimator of a rule: 1 - P(safe), as a decision model gives it."""

_QUESTION, _MARGIN = "decision", 0.01
"""The name of a single question in a request; and the width of the bands into which probabilities are moved."""


def calibrate_decisions(
    model: BaseDecisionModel,
    question: Question,
    labelled: Iterable[tuple[State, bool]],
    *,
    alpha: float,
    delta: float,
    safe: str = "no",
    otherwise: str | None = None,
    runs: Iterable[Hashable] | None = None,
    tries: int = 0,
) -> Calibration:
    """Ask a decision model about labelled states, and find the threshold that keeps a promise.

    "Of the decisions that take `safe`, at most alpha are wrong", with probability at least 1 - delta.

        rule = calibrate_decisions(model, Noul(instructions="Is this call risky?"), labelled, alpha=0.1, delta=0.1)
        AutoModeMiddleware(tools=[...], classifier=CalibratedDecisions(decisions=model, decided=(rule,)))

    A rule is a calibration like any other, with a file of its own (`save`, `load`). It is bound to the provider, the
    model, the question word for word, and `safe`.

    Args:
        model: any decision model.
        question: a `Noul` or a `Choice`.
        labelled: pairs of (state, whether taking the safe outcome was right there).
        alpha: the largest error rate among the decisions that take the safe outcome, in (0, 1).
        delta: the largest probability of breaking that promise, in (0, 1).
        safe: the outcome that the promise is about: "no" or "yes" of a `Noul`, a label of a `Choice`.
        otherwise: for a `Choice`: the label that is taken in the place of a doubtful `safe`.
        runs: the run of each state, where several states are of one run; None: each is of its own.
        tries: numbers the calibrations on these labels, this one included; 0: this is the only one.

    Raises:
        InputError: another kind of model or question, an outcome that it does not have, or no labelled state.
        CalibrationError: a rate is not in (0, 1), or a label is neither True nor False.
    """
    outcomes = _outcomes(question)
    if safe not in outcomes:
        raise InputError(f"safe={safe!r} is no outcome of the question; it has {', '.join(outcomes)}")
    if isinstance(question, Choice) and (otherwise not in outcomes or otherwise == safe):
        raise InputError(f"a Choice needs otherwise=: the label to take where {safe!r} is doubtful")
    if isinstance(question, Noul) and otherwise is not None:
        raise InputError("a Noul has two outcomes: leave otherwise= out")
    if not isinstance(cast("object", model), BaseDecisionModel):
        raise InputError(f"model is a decision model of langchain_core.decisions, not {model!r:.60}")
    known = pairs_in(labelled, "labelled", "(state, whether the safe outcome was right)")
    if not known:
        raise InputError("labelled holds no state: give pairs of (state, whether the safe outcome was right)")
    states, right = [state for state, _ in known], [was_right for _, was_right in known]
    found = model.batch([{"state": state, "questions": {_QUESTION: question}} for state in states])
    versions = {response.model for response in found}
    if len(versions) > 1:
        raise InputError(f"several models answered ({', '.join(sorted(versions))}): name one version of the model")
    settings: dict[str, Any] = {"question": spelled(question), "safe": safe, "otherwise": otherwise}
    binding = Binding(
        model=_named(model), revision=versions.pop(), estimator=ESTIMATOR, settings=settings, grader="labels"
    )
    scores = [uncertainty_of(response.answers.get(_QUESTION), safe) for response in found]
    if runs is None:
        return calibrate(scores, right, alpha=alpha, delta=delta, tries=tries, binding=binding)
    return calibrate_runs(runs, scores, right, alpha=alpha, delta=delta, tries=tries, binding=binding)


class CalibratedDecisions(BaseDecisionModel):
    """Any decision model, whose answers take the safe outcome only where a promise allows it.

    For consumers with a threshold or an argmax of their own (`AutoModeMiddleware`, `ModelRouterMiddleware`), which stay
    as they are: the probability of what is let through is moved above .99, and of what is not below .01, in the old
    order. A `Choice` becomes `safe` where that is let through, else the model's own label, or `otherwise` in the place
    of a doubtful `safe`. For tools `ToolGate` is the better way: a blocked call that is tried again stays blocked.

    A question without a rule, word for word, is an error: nothing would be promised about a guess.

    Args:
        decisions: the decision model.
        decided: the rules, from `calibrate_decisions`.
        log: a `DecisionLog`, which gets a row for each decision, and watches the rules' promises.

    Raises:
        BindingMismatchError: a rule was made for another decision model; when asked, for another question or version.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: str = ""
    decisions: BaseDecisionModel
    decided: tuple[Calibration, ...]
    log: Any = None

    @model_validator(mode="after")
    def _fits(self) -> CalibratedDecisions:
        self.model = self.decisions.model
        require_listener("log", self.log)
        for rule in self.decided:
            require_rule(rule, self.decisions)
        if len({settings_of(rule)["question"] for rule in self.decided}) < len(self.decided):
            raise InputError("decided holds two rules for one question: which of them decides?")
        return self

    @property
    def _provider(self) -> str:
        return self.decisions._provider

    def _classify(self, state: State, questions: dict[str, Question]) -> ClassifierResponse:
        return drive(self._steps(state, questions))

    async def _aclassify(self, state: State, questions: dict[str, Question]) -> ClassifierResponse:
        return await adrive(self._steps(state, questions))

    def _steps(self, state: State, questions: dict[str, Question]) -> Steps[ClassifierResponse]:
        rules = {settings_of(rule)["question"]: rule for rule in self.decided}
        if strange := [name for name, question in questions.items() if spelled(question) not in rules]:
            raise BindingMismatchError(
                f"There is no rule for the question {strange[0]!r}, word for word. Calibrate it "
                "(calibrate_decisions), or ask it of the decision model itself."
            )
        model, request = self.decisions, ClassifierRequest(state=state, questions=questions)
        response = yield Work(lambda: model.invoke(request), lambda: model.ainvoke(request))
        answers: dict[str, Answer] = {}
        for name, answer in response.answers.items():
            rule = rules[spelled(questions[name])]
            require_rule(rule, model, version=response.model)
            uncertainty = uncertainty_of(answer, settings_of(rule)["safe"])
            judging = partial(judged, rule, uncertainty, text=name, log=self.log)
            passes = judging() if self.log is None else (yield Work(judging))
            answers[name] = _moved(answer, rule, passes=passes)
        return response.model_copy(update={"answers": answers})


def _moved(answer: Answer, rule: Calibration, *, passes: bool) -> Answer:
    settings = settings_of(rule)
    safe = settings["safe"]
    if isinstance(answer, NoulAnswer):
        is_yes = passes == (safe == "yes")
        return answer.model_copy(update={"noul": is_yes * (1 - _MARGIN) + _MARGIN * answer.noul})
    answer = cast("ChoiceAnswer", answer)
    taken = safe if passes else settings["otherwise"] if answer.choice == safe else answer.choice
    moved = {label: _MARGIN * p + (label == taken) * (1 - _MARGIN) for label, p in answer.probabilities.items()}
    return answer.model_copy(update={"choice": taken, "probabilities": moved, "confidence": moved.get(taken, 0.0)})


def uncertainty_of(answer: Answer | None, safe: str) -> float | None:
    """1 - P(safe) of an answer, in [0, 1]; None where it gives none, so that nothing lets it through."""
    if isinstance(answer, NoulAnswer):
        return answer.noul if safe == "no" else 1 - answer.noul
    if not isinstance(answer, ChoiceAnswer):
        return None
    p = answer.probabilities.get(safe, math.nan)
    return 1 - p if 0 <= p <= 1 else None


def spelled(question: Question) -> str:
    """A question word for word, as rules keep it."""
    return json.dumps(question.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)


def settings_of(rule: Calibration) -> dict[str, Any]:
    """The question, and the outcomes, that a rule was made for.

    Raises:
        InputError: the calibration is no rule for decisions.
    """
    if rule.binding is None or rule.binding.estimator != ESTIMATOR:
        raise InputError("a rule is what calibrate_decisions returns; this calibration is about answers")
    return dict(rule.binding.settings or {})


def require_rule(rule: Calibration, model: BaseDecisionModel, *, version: str | None = None) -> None:
    """Refuse a rule that was made for another decision model, or for another version of it.

    Raises:
        InputError: the calibration is no rule for decisions.
        BindingMismatchError: its model is another one.
    """
    settings_of(rule)
    if (own := rule.require_intact().binding) is not None:
        own.require(own.model_copy(update={"model": _named(model), "revision": version}))


def _named(model: BaseDecisionModel) -> str:
    return f"{model._provider}:{model.model}"  # pyright: ignore[reportPrivateUsage] - the name that traces show


def _outcomes(question: Question) -> Sequence[str]:
    if isinstance(question, Noul):
        return "yes", "no"
    if isinstance(question, Choice):
        return tuple(question.criteria)
    raise InputError(f"a {type(question).__name__} has no safe outcome: ask a Noul or a Choice")

"""Whose text an answer is, and what it scores.

Nothing is guessed from what texts look like. A text is a call's if it *is* the object that this call returned: it has
then been handed on and not written anew. LlamaIndex's own response synthesizers make their texts of the calls under
them and of nothing else: such a text is those calls'. An answer that an engine has put together of other engines'
answers (sub-questions, say) is also theirs. Of several calls that wrote an answer, the least certain counts. Of any
other text (joined or parsed by code of one's own, say) it cannot be told who wrote it: it is unscored, unless the
caller names the calls that answer, or has all of them count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import PydanticResponse
from llama_index.core.query_engine import (
    MultiStepQueryEngine,
    RouterQueryEngine,
    SQLJoinQueryEngine,
    SubQuestionQueryEngine,
    ToolRetrieverRouterQueryEngine,
)
from llama_index.core.response_synthesizers import Refine
from pydantic import BaseModel

from llama_index_semgrad_guard.calls import RETRIEVING, ModelCall, Step, Turn, is_ours
from semgrad_guard import Policy, Verdict
from semgrad_guard.adapters.code_identity import code_identity
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Draft, binding_of, current_recorder, unlike, unscored
from semgrad_guard.records import PromptForm

Aggregate = Literal["max", "mean"]
"""The worst score of all calls of an answer, or their mean."""
Answering = str | Callable[[ModelCall], bool]
"""The calls that answer: within a component ("Refine"), within a method ("Refine.get_response"), or by a function.

A calibration is bound to what the function does (see `code_identity`), or to the name and version that its user gives
it (`Versioned`)."""

NOBODY = "no SemGradLLM wrote this answer (nothing retrieved, or another LLM)"
_UNTOLD = (
    "which of the model's calls wrote this answer cannot be told: it is none of the texts that they returned. Name the "
    "calls that answer (answering=...), or have all of them count (aggregate='max')"
)
_SYNTHESIZING = frozenset(
    {
        "synthesize",
        "asynthesize",
        "get_response",
        "aget_response",
        "get_response_from_messages",
        "aget_response_from_messages",
    }
)
_PREDICTING = frozenset({"predict", "apredict", "structured_predict", "astructured_predict"})
_COMPOSING = (
    SubQuestionQueryEngine,
    MultiStepQueryEngine,
    RouterQueryEngine,
    ToolRetrieverRouterQueryEngine,
    SQLJoinQueryEngine,
)
"""Engines that have the model write one answer of several."""
_EMPTY = "Empty Response"
"""What LlamaIndex's synthesizers say where no model has said anything."""


@dataclass(frozen=True)
class Delivery:
    """What an engine hands over: its text, the object that holds it, and its pieces if it came in pieces."""

    text: str
    holder: Any = None
    pieces: tuple[str, ...] | None = None

    @property
    def structure(self) -> BaseModel | None:
        """The answer itself, where it is a structure."""
        return self.holder.response if isinstance(self.holder, PydanticResponse) else None


@dataclass(frozen=True, kw_only=True)
class Counting:
    """Which of an answer's calls count, and how: by authorship, unless the caller says otherwise.

    `whole` is for an agent's step, which asks its model once and parses what that says: whatever it asked counts.

    Raises:
        InputError: there is no such aggregate, or `answering` names nothing, or is a function whose content is unknown.
    """

    aggregate: Aggregate | None = None
    answering: Answering | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        if self.aggregate is not None and self.aggregate not in get_args(Aggregate):
            raise InputError(f"aggregate must be 'max' or 'mean', not {self.aggregate!r}; leave it out for authorship")
        known = self.answering is None or callable(self.answering) or (isinstance(self.answering, str))  # pyright: ignore[reportUnnecessaryIsInstance] - callers may have no type checker
        if not known or self.answering == "":
            raise InputError("answering is the name of a component or method that asks the model, or a function")
        _ = self.answering_name  # a function whose content cannot be known is refused here

    @property
    def answering_name(self) -> str | None:
        """A name for settings: what was calibrated with other calls is refused."""
        given = self.answering
        return given if given is None or isinstance(given, str) else code_identity(given, role="answering")

    def draft(self, turn: Turn, delivery: Delivery, policy: Policy, *, irreplaceable: str = "") -> Draft[Any]:
        """The scored draft of an answer; without a score, with the reason, where its authors cannot be told.

        Raises:
            BindingMismatchError: one of the calls that count is not what the policy was calibrated for.
        """
        found = self._authors(turn, delivery)
        if not found.calls:
            verdict = unscored(delivery.text, reason=found.reason, model="unknown" if turn.others else "none")
            return Draft(verdict, delivery.holder, irreplaceable=irreplaceable)
        if found.several or self.aggregate is not None:
            verdict, prompt, strange = self._aggregated(turn, found.calls, policy)
        else:
            verdict, prompt, strange = found.calls[0].verdict, turn.form(found.calls[0], found.calls), ()
        changes: dict[str, Any] = {"text": delivery.text}
        if self.answering is not None:
            changes["settings"] = {**(verdict.settings or {}), "answering": self.answering_name}
        verdict = verdict.model_copy(update=changes)
        return Draft(verdict, delivery.holder, prompt, irreplaceable=irreplaceable, strange=strange)

    def _authors(self, turn: Turn, delivery: Delivery) -> Authors:
        """The calls that count."""
        if self.answering is not None:
            return _named(turn, self.answering)
        if self.whole:
            return Authors.of([] if turn.others else turn.calls, NOBODY)
        found = authors(turn, delivery)
        if self.aggregate is None or (not found.calls and found.reason != _UNTOLD):
            return found
        return Authors.of([] if turn.others else turn.calls, NOBODY)

    def _aggregated(
        self, turn: Turn, calls: Sequence[ModelCall], policy: Policy
    ) -> tuple[Verdict, PromptForm, tuple[str, ...]]:
        """Several calls in one verdict; the way is part of the settings, as calibrations for single answers differ.

        Nothing is promised where one prompt is unfamiliar, or one answer was cut off elsewhere: that one stands for
        all, and in what it is unlike those of the calibration is returned as well.
        """
        aggregate = self.aggregate or "max"
        marked = [_marked(call.verdict, aggregate) for call in calls]
        if current_recorder() is None:
            for verdict in marked:
                policy.check(binding_of(verdict))
        prompts = [turn.form(call, calls) for call in calls]
        unlikes = [unlike(call.verdict, policy, prompt) for prompt, call in zip(prompts, calls, strict=True)]
        stranger = next((index for index, found in enumerate(unlikes) if found), None)
        strange = () if stranger is None else unlikes[stranger]
        without = [index for index, verdict in enumerate(marked) if verdict.uncertainty is None]
        if without:
            return marked[without[0]], prompts[without[0] if stranger is None else stranger], strange
        scores = [verdict.uncertainty for verdict in marked if verdict.uncertainty is not None]
        worst = scores.index(max(scores))
        shown = worst if stranger is None else stranger
        changes: dict[str, Any] = {
            "cut": marked[shown].cut,
            "scored_tokens": sum(verdict.scored_tokens for verdict in marked),
            "scoring_ms": sum(verdict.scoring_ms or 0.0 for verdict in marked),
        }
        if aggregate == "mean":
            mean = sum(scores) / len(scores)
            changes |= {"uncertainty": mean, "semgrad": None, "paragrad": None, "mean_entropy": None}
        return marked[worst].model_copy(update=changes), prompts[shown], strange


@dataclass(frozen=True)
class Authors:
    """The calls that wrote an answer; `reason` says why there are none. `several`: it may be made of more than one."""

    calls: Sequence[ModelCall]
    reason: str = ""
    several: bool = False

    @classmethod
    def of(cls, calls: Sequence[ModelCall], reason: str) -> Authors:
        """Calls that were not made into one text."""
        return cls(calls, reason, several=len(calls) > 1)


def authors(turn: Turn, delivery: Delivery, *, inside: Step | None = None) -> Authors:
    """The calls whose text an answer is; none of them, and the reason, where there are none or it cannot be told.

    `inside` is the step that delivers it, where that is not the turn as a whole.
    """
    found = _writers(turn, delivery)
    if not found.calls:
        return found
    parts, several = {id(call): call for call in found.calls}, found.several
    for step, sub_answer in _sub_answers(turn, found.calls, inside):
        sub = authors(turn, sub_answer, inside=step)
        if not sub.calls:
            return Authors([], f"it is made of answers, one of which cannot be scored: {sub.reason}")
        parts, several = parts | {id(call): call for call in sub.calls}, True
    return Authors(list(parts.values()), several=several)


def _writers(turn: Turn, delivery: Delivery) -> Authors:
    """The calls whose very text an answer is, or that LlamaIndex's own code made it of."""
    written = _returned(turn, delivery)
    if written:
        return Authors.of(written, "")
    if not turn.calls or not delivery.text.strip() or delivery.text == _EMPTY:
        return Authors([], NOBODY)
    made = next((step for step in turn.ended if _makes(step) and _holds(step, delivery)), None)
    if made is None:
        return Authors([], _UNTOLD)
    if any(made in step.path for step in turn.others):
        return Authors([], NOBODY)
    calls = [call for call in turn.calls if call.within(made)]
    return Authors(calls, NOBODY, several=made.method in _SYNTHESIZING or len(calls) > 1)


def _named(turn: Turn, answering: Answering) -> Authors:
    if callable(answering):
        return Authors.of(
            [call for call in turn.calls if answering(call)], "none of the model's calls is one that answers"
        )
    if any(_names(step, answering) for step in turn.others):
        return Authors([], f"another LLM was asked within {answering}")
    named = [call for call in turn.calls if call.step and _names(call.step, answering)]
    return Authors.of(named, f"the model was not asked within {answering}")


def _sub_answers(turn: Turn, written: Sequence[ModelCall], inside: Step | None) -> Iterator[tuple[Step, Delivery]]:
    """The answers of other engines that stand in the prompts of these calls: put together there, or as passages."""
    composing = {step for call in written for step in call.path if isinstance(step.component, _COMPOSING)}
    for step in turn.ended:
        if step.method not in ("query", "aquery") or any(call.within(step) for call in written):
            continue
        if inside is not None and (inside is step or inside not in step.path):
            continue
        around = [outer for outer in step.path[:-1] if isinstance(outer.component, BaseQueryEngine)]
        asked = any(call.within(step) for call in turn.calls) or any(step in other.path for other in turn.others)
        found = any(outer.method in RETRIEVING for outer in step.path)
        if asked and (found or (around and around[-1] in composing)):
            yield step, Delivery(step.content if isinstance(step.content, str) else str(step.result), step.result)


def _returned(turn: Turn, delivery: Delivery) -> Sequence[ModelCall]:
    """The calls that returned the very text, the very pieces, or every field of the structure."""
    if delivery.structure is not None:
        return _of_fields(turn, delivery.structure)
    if not delivery.text.strip():
        return []
    if all(len(piece) < 2 for piece in delivery.pieces or [delivery.text]):  # Python has each such text only once
        alone = len(turn.calls) == 1 and not turn.others
        return [call for call in turn.calls if alone and call.text == delivery.text]
    if delivery.pieces is None:
        return [call for call in turn.calls if call.text is delivery.text]
    return [call for call in turn.calls if _same(call.pieces, [piece for piece in delivery.pieces if piece])]


def _same(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))


def _of_fields(turn: Turn, structure: BaseModel) -> Sequence[ModelCall]:
    found = [[call for call in turn.calls if call.text is leaf] for leaf in _leaves(structure)]
    told = bool(found) and all(found)
    return list({id(call): call for calls in found for call in calls}.values()) if told else []


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, BaseModel):
        value = dict(value)
    if isinstance(value, Mapping):
        value = list(cast("Mapping[Any, Any]", value).values())
    if isinstance(value, (list, tuple, set)):
        for inner in cast("Sequence[Any]", value):
            yield from _leaves(inner)
    else:
        yield value if isinstance(value, str) and len(value) > 1 else object()


def _holds(step: Step, delivery: Delivery) -> bool:
    """Whether a step returned what was delivered: the same object, or the same content in another."""
    if delivery.pieces is not None:  # the end of what streams is written after its step has ended
        return False
    content = delivery.text if delivery.structure is None else delivery.structure
    if step.result is delivery.holder:
        return step.content is content  # nobody has put another content into it since
    singular = isinstance(content, str) and len(content) < 2
    return not singular and step.content is content


def _makes(step: Step) -> bool:
    """Whether a step is LlamaIndex's own code that makes its result of what the model says under it."""
    kind: Any = cast("Any", type(step.component))
    if step.method in _PREDICTING:
        return is_ours(step.component) and _library(kind, step.method, "llama_index.core.llms")
    factory = getattr(step.component, "_program_factory", None)
    own = factory is not None and getattr(factory, "__func__", None) is not Refine._default_program_factory  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType] - user code in its place may do anything
    return (
        step.method in _SYNTHESIZING
        and not own
        and all(_library(kind, name, "llama_index.core.response_synthesizers") for name in _SYNTHESIZING)
    )


def _library(kind: Any, method: str, module: str) -> bool:
    return str(getattr(getattr(kind, method, None), "__module__", "")).startswith(module)


def _names(step: Step, name: str) -> bool:
    """Whether a step, or one around it, is a component or a method of this name."""
    return any(name in (around.name, around.name.partition(".")[0]) for around in step.path)


def _marked(verdict: Verdict, aggregate: Aggregate) -> Verdict:
    return verdict.model_copy(update={"settings": {**(verdict.settings or {}), "aggregate": aggregate}})

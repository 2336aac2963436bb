"""Whose text an answer is, and what it scores.

Nothing is guessed from what texts look like. A text is a call's if it *is* the object that this call returned: it has
then been handed on and not written anew. What a response synthesizer puts together is its calls' if it is what
LlamaIndex makes of their texts (`composition`), whatever code ran in between. An answer that was written from other
engines' answers, or from passages that the model wrote, is also theirs (`sources`). Of several calls that wrote an
answer, the least certain counts. Of any other text (changed by a parser, a wrapper around the LLM, a subclass or code
of one's own) it cannot be told who wrote it: it is unscored, unless the caller names the calls that answer, or has all
of them count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from llama_index.core.base.response.schema import PydanticResponse
from llama_index.core.workflow import Workflow
from pydantic import BaseModel

from llama_index_semgrad_guard.calls import ModelCall, Step, Turn
from llama_index_semgrad_guard.composition import EMPTY, filtered, joined, structured
from llama_index_semgrad_guard.sources import answers_before, writers_of_passages
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
_ANOTHER = "another LLM (a wrapper around a SemGradLLM is one) took part in this answer: its author cannot be told"
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
_STRUCTURING = frozenset({"structured_predict", "astructured_predict"})


@dataclass(frozen=True)
class Delivery:
    """What an engine hands over: its text, the object that holds it, and its pieces if it came in pieces.

    `stream` is the iterator that the pieces came from.
    """

    text: str
    holder: Any = None
    pieces: tuple[str, ...] | None = None
    stream: Any = None

    @property
    def structure(self) -> BaseModel | None:
        """The answer itself, where it is a structure."""
        return self.holder.response if isinstance(self.holder, PydanticResponse) else None


@dataclass(frozen=True, kw_only=True)
class Counting:
    """Which of an answer's calls count, and how: by authorship, unless the caller says otherwise.

    `whole` is for an agent's step, which hands its model's text on as it is, and then all that it asked counts.

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
        turn.scored(found.calls)
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
            told = not delivery.text.strip() or returned(turn, delivery)
            return Authors.of(turn.calls if told and not turn.others else [], _ANOTHER if turn.others else _UNTOLD)
        found = authors(turn, delivery)
        if self.aggregate is None or (not found.calls and found.reason not in (_UNTOLD, _ANOTHER)):
            return found
        all_calls = [call for call in turn.calls if not call.withheld]
        return Authors.of([] if turn.outsiders else all_calls, NOBODY)

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
    sources = writers_of_passages(turn, found.calls)
    parts, several = {id(call): call for call in (*found.calls, *sources)}, found.several or bool(sources)
    for step in answers_before(turn, found.calls, inside):
        sub = _said_in(turn, step)
        if not sub.calls:
            return Authors([], f"it is made of answers, one of which cannot be scored: {sub.reason}")
        parts, several = parts | {id(call): call for call in sub.calls}, True
    return Authors(list(parts.values()), several=several)


def _said_in(turn: Turn, step: Step) -> Authors:
    """The calls that wrote the answer of one step; of a stream or a workflow, all in it: nobody can tell them apart."""
    if step.result is not None and not isinstance(step.component, Workflow):
        text = step.content if isinstance(step.content, str) else str(step.result)
        return authors(turn, Delivery(text, step.result), inside=step)
    others = any(step in other.path for other in turn.others)
    return Authors.of([] if others else [call for call in turn.calls if call.within(step)], _ANOTHER)


def _writers(turn: Turn, delivery: Delivery) -> Authors:
    """The calls whose very text an answer is, or whose texts LlamaIndex makes into it."""
    written = returned(turn, delivery)
    if written:
        return Authors.of(written, "")
    if not turn.calls or not delivery.text.strip() or delivery.text == EMPTY:
        return Authors([], NOBODY)
    making = _SYNTHESIZING if delivery.structure is None else _SYNTHESIZING | _STRUCTURING
    made = next((step for step in turn.ended if step.method in making and _holds(step, delivery)), None)
    if made is None:
        return Authors([], _ANOTHER if turn.others else _UNTOLD)
    if any(made in step.path for step in turn.others):
        return Authors([], _ANOTHER)
    calls = [call for call in turn.calls if call.within(made)]
    if not calls:
        return Authors([], NOBODY)
    if calls[-1].text == delivery.text and delivery.pieces in (None, calls[-1].pieces):
        return Authors.of(calls[-1:], "")  # a text of one character, of which there is only one object
    if _composed(turn, made, calls, delivery):
        return Authors(calls, several=made.method in _SYNTHESIZING or len(calls) > 1)
    return Authors([], _UNTOLD)


def _composed(turn: Turn, made: Step, calls: Sequence[ModelCall], delivery: Delivery) -> bool:
    """Whether what a step delivers is what LlamaIndex makes of its calls' texts."""
    structure = delivery.structure
    if structure is not None:
        return any(structured(structure, delivery.text, call.text) for call in calls)
    if delivery.pieces is not None:
        return False
    shown = [_shown(turn, made, call) for call in calls]
    return joined(delivery.text, shown) or any(filtered(delivery.text, call.text) for call in calls)


def _shown(turn: Turn, made: Step, call: ModelCall) -> str:
    """What a synthesizer joins for a call: its text, or the structure that this was read as."""
    for step in turn.ended:
        if step.method in _STRUCTURING and made in step.path and call.within(step):
            read = step.result
            if isinstance(read, BaseModel) and structured(read, read.model_dump_json(), call.text):
                return str(read)
    return call.text


def _named(turn: Turn, answering: Answering) -> Authors:
    if callable(answering):
        return Authors.of(
            [call for call in turn.calls if answering(call)], "none of the model's calls is one that answers"
        )
    if any(_names(step, answering) for step in turn.outsiders):
        return Authors([], f"another LLM was asked within {answering}")
    named = [call for call in turn.calls if call.step and _names(call.step, answering)]
    return Authors.of(named, f"the model was not asked within {answering}")


def returned(turn: Turn, delivery: Delivery) -> Sequence[ModelCall]:
    """The calls that returned the very text, the very pieces, or every field of the structure."""
    if delivery.structure is not None:
        return _of_fields(turn, delivery.structure)
    if not delivery.text.strip():
        return []
    if all(len(piece) < 2 for piece in delivery.pieces or [delivery.text]):  # Python has each such text only once
        same = [call for call in turn.calls if call.text == delivery.text]
        elsewhere = [call for call in turn.calls if delivery.text in call.text]
        return same if len(elsewhere) == 1 and not turn.others and not turn.strays else []
    if delivery.pieces is None:
        return [call for call in turn.calls if call.text is delivery.text]
    return [call for call in turn.calls if _same(call.pieces, delivery.pieces)]


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
    if delivery.pieces is not None:
        return delivery.stream is not None and step.stream is delivery.stream
    content = delivery.text if delivery.structure is None else delivery.structure
    if step.result is delivery.holder:
        return step.content is content  # nobody has put another content into it since
    singular = isinstance(content, str) and len(content) < 2
    return not singular and step.content is content


def _names(step: Step, name: str) -> bool:
    """Whether a step, or one around it, is a component or a method of this name."""
    return any(name in (around.name, around.name.partition(".")[0]) for around in step.path)


def _marked(verdict: Verdict, aggregate: Aggregate) -> Verdict:
    return verdict.model_copy(update={"settings": {**(verdict.settings or {}), "aggregate": aggregate}})

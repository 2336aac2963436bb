"""Whose text an answer is, and what it scores.

Nothing is guessed from the look of texts. A text is a call's if it *is* the object that this call returned: it has then
been passed on and not written anew. The text of a response synthesizer is its calls' if it is what LlamaIndex makes of
their texts (`texts`), whatever code ran in between. An answer that was written from other engines' answers, or from
passages that the model wrote, is also theirs. Of several calls that wrote an answer, the least certain
counts. The author of any other text (changed by a parser, a wrapper around the LLM, a subclass or code of the user's)
is unknown: it is unscored, unless the caller names the calls that answer, or has all of them count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import PydanticResponse
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore
from llama_index.core.workflow import Workflow
from pydantic import BaseModel

from llama_index_semgrad_guard.calls import FINDING, SYNTHESIZING, ModelCall, Passage, Step
from llama_index_semgrad_guard.records import EMPTY, filtered, joined, repeats, structured
from llama_index_semgrad_guard.turn import Turn
from semgrad_guard import Policy, Verdict
from semgrad_guard.adapters.code_identity import code_identity
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Draft, binding_of, current_recorder, unlike, unscored
from semgrad_guard.records import PromptForm

Aggregate = Literal["max", "mean"]
"""The worst score of all calls of an answer, or their mean."""
Answering = str | Callable[[ModelCall], bool]
"""The calls that answer: within a component ("Refine"), within a method ("Refine.get_response"), or by a function.

A calibration is bound to the function's content (see `code_identity`), or to the name and version of a `Versioned` one.
"""

NOBODY = "no SemGradLLM wrote this answer (nothing retrieved, or another LLM)"
_ANOTHER = "another LLM (a wrapper around a SemGradLLM is one) took part in this answer: its author cannot be told"
_UNTOLD = (
    "which of the model's calls wrote this answer cannot be told: it is none of the texts that they returned. Name the "
    "calls that answer (answering=...), or have all of them count (aggregate='max')"
)
_OTHER_SENTENCES = (
    "this answer holds other text than the one that was scored by sentence, so that it is judged as a whole"
)
_OF_ENGINES = frozenset({"query", "aquery", "chat", "achat"})
_OF_SYNTHESIZERS = frozenset({"synthesize", "asynthesize"})
_STRUCTURING = frozenset({"structured_predict", "astructured_predict"})


@dataclass(frozen=True)
class Delivery:
    """An engine's answer: its text, the object that holds it, and its pieces if it was streamed.

    `stream` is the iterator that the pieces came from.
    """

    text: str
    holder: Any = None
    pieces: tuple[str, ...] | None = None
    stream: Any = None

    @classmethod
    def streamed(cls, pieces: Sequence[str], source: Any) -> Delivery:
        """The answer in these pieces, without empty ones, such as some models' last ones."""
        return cls("".join(pieces), pieces=tuple(filter(None, pieces)), stream=source)

    @property
    def structure(self) -> BaseModel | None:
        """The answer itself, where it is a structure."""
        return self.holder.response if isinstance(self.holder, PydanticResponse) else None


@dataclass(frozen=True, kw_only=True)
class Counting:
    """Which of an answer's calls count, and how: by authorship, unless the caller says otherwise.

    `whole` is for an agent's step, which passes its model's text on as it is: all of its calls count.

    Raises:
        InputError: an unknown aggregate, or `answering` names nothing, or is a function whose content is unknown.
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
        """A name for settings: a calibration of other calls is refused."""
        if self.answering is None or isinstance(self.answering, str):
            return self.answering
        return code_identity(self.answering, role="answering")

    def draft(self, turn: Turn, delivery: Delivery, policy: Policy, *, irreplaceable: str = "") -> Draft[Any]:
        """The scored draft of an answer; without a score, with the reason, where its authors cannot be told.

        Raises:
            BindingMismatchError: the policy was calibrated for something else than one of the calls that count.
        """
        authors = self._authors(turn, delivery)
        calls = authors.calls
        if not calls:
            verdict = unscored(delivery.text, reason=authors.reason, model="unknown" if turn.others else "none")
            return Draft(verdict, delivery.holder, irreplaceable=irreplaceable)
        if authors.several or self.aggregate is not None:
            verdict, prompt, strange = self._aggregated(turn, calls, policy)
        else:
            verdict, prompt, strange = calls[0].verdict, turn.form(calls[0], calls), ()
        turn.scored(calls)
        changes: dict[str, Any] = {"text": delivery.text}
        if verdict.sentences and (len(calls) > 1 or verdict.text != delivery.text):  # these are not the answer's own
            changes["sentences"], strange = (), (*strange, _OTHER_SENTENCES)
        if self.answering is not None:
            changes["settings"] = {**(verdict.settings or {}), "answering": self.answering_name}
        verdict = verdict.model_copy(update=changes)
        return Draft(verdict, delivery.holder, prompt, irreplaceable=irreplaceable, strange=strange)

    def is_alone(self, turn: Turn, delivery: Delivery, call: ModelCall) -> bool:
        """Whether an answer is that of this call alone."""
        authors = self._authors(turn, delivery)
        return self.aggregate is None and not authors.several and list(authors.calls) == [call]

    def _authors(self, turn: Turn, delivery: Delivery) -> Authors:
        """The calls that count."""
        if self.answering is not None:
            return _named(turn, self.answering)
        if self.whole:
            known = not delivery.text.strip() or returned(turn, delivery)
            return Authors.of(turn.calls if known and not turn.others else [], _ANOTHER if turn.others else _UNTOLD)
        authors = authors_of(turn, delivery)
        if self.aggregate is None or (not authors.calls and authors.reason not in (_UNTOLD, _ANOTHER)):
            return authors
        all_calls = [call for call in turn.calls if not call.withheld]
        return Authors.of([] if turn.outsiders else all_calls, NOBODY)

    def _aggregated(
        self, turn: Turn, calls: Sequence[ModelCall], policy: Policy
    ) -> tuple[Verdict, PromptForm, tuple[str, ...]]:
        """Several calls in one verdict; the aggregate is part of the settings: calibrations for single answers differ.

        Nothing is promised where one prompt is unfamiliar, or one answer was cut off elsewhere: its form and its
        differences are then returned.
        """
        aggregate = self.aggregate or "max"
        settings = [{**(call.verdict.settings or {}), "aggregate": aggregate} for call in calls]
        marked = [call.verdict.model_copy(update={"settings": own}) for call, own in zip(calls, settings, strict=True)]
        if current_recorder() is None:
            for verdict in marked:
                policy.check(binding_of(verdict))
        prompts = [turn.form(call, calls) for call in calls]
        unlikes = [
            unlike(call.verdict, policy.calibration, kind=policy.kind, prompt=prompt)
            for prompt, call in zip(prompts, calls, strict=True)
        ]
        stranger = next((index for index, differences in enumerate(unlikes) if differences), None)
        strange = () if stranger is None else unlikes[stranger]
        without = next((index for index, verdict in enumerate(marked) if verdict.uncertainty is None), None)
        if without is not None:
            return marked[without], prompts[without if stranger is None else stranger], strange
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
    """The calls that wrote an answer, or the `reason` why there are none. `several`: it may have several authors."""

    calls: Sequence[ModelCall]
    reason: str = ""
    several: bool = False

    @classmethod
    def of(cls, calls: Sequence[ModelCall], reason: str) -> Authors:
        """Calls that were not made into one text."""
        return cls(calls, reason, several=len(calls) > 1)


def authors_of(turn: Turn, delivery: Delivery, *, inside: Step | None = None) -> Authors:
    """The calls that wrote an answer; none of them, with the reason, where there are none or they are unknown.

    `inside` is the step that delivers it, where that is not the turn as a whole.
    """
    writers = _writers(turn, delivery)
    if not writers.calls:
        return writers
    sources = writers_of_passages(turn, writers.calls)
    parts, several = {id(call): call for call in (*writers.calls, *sources)}, writers.several or bool(sources)
    for step in answers_before(turn, writers.calls, inside):
        if step.result is not None and not isinstance(step.component, Workflow):
            text = step.content if isinstance(step.content, str) else str(step.result)
            sub = authors_of(turn, Delivery(text, step.result), inside=step)
        else:  # the calls in a stream or a workflow cannot be told apart
            others = any(step in other.path for other in turn.others)
            sub = Authors.of([] if others else [call for call in turn.calls if call.within(step)], _ANOTHER)
        if not sub.calls:
            return Authors([], f"it is made of answers, one of which cannot be scored: {sub.reason}")
        parts, several = parts | {id(call): call for call in sub.calls}, True
    return Authors(list(parts.values()), several=several)


def _writers(turn: Turn, delivery: Delivery) -> Authors:
    """The calls that returned an answer's text, or whose texts LlamaIndex makes into it."""
    written = returned(turn, delivery)
    if written:
        return Authors.of(written, "")
    if not turn.calls or not delivery.text.strip() or delivery.text == EMPTY:
        return Authors([], NOBODY)
    making = SYNTHESIZING if delivery.structure is None else SYNTHESIZING | _STRUCTURING
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
        return Authors(calls, several=made.method in SYNTHESIZING or len(calls) > 1)
    return Authors([], _UNTOLD)


def _composed(turn: Turn, made: Step, calls: Sequence[ModelCall], delivery: Delivery) -> bool:
    """Whether a step's answer is what LlamaIndex makes of its calls' texts."""
    structure = delivery.structure
    if structure is not None:
        return any(structured(structure, delivery.text, call.written) for call in calls)
    if delivery.pieces is not None:
        return False
    shown = [_shown(turn, made, call) for call in calls]
    return joined(delivery.text, shown) or any(filtered(delivery.text, call.text) for call in calls)


def _shown(turn: Turn, made: Step, call: ModelCall) -> str:
    """The text that a synthesizer joins for a call: the call's, or that of the structure read from it."""
    for step in turn.ended:
        if step.method in _STRUCTURING and made in step.path and call.within(step):
            read = step.result
            if isinstance(read, BaseModel) and structured(read, read.model_dump_json(), call.written):
                return str(read)
    return call.text


def _named(turn: Turn, answering: Answering) -> Authors:
    if callable(answering):
        chosen = [call for call in turn.calls if answering(call)]
        return Authors.of(chosen, "none of the model's calls is one that answers")
    if any(_is_within(step, answering) for step in turn.outsiders):
        return Authors([], f"another LLM was asked within {answering}")
    named = [call for call in turn.calls if call.step and _is_within(call.step, answering)]
    return Authors.of(named, f"the model was not asked within {answering}")


def returned(turn: Turn, delivery: Delivery) -> Sequence[ModelCall]:
    """The calls that returned the same text, the same pieces, or every field of the structure, as objects."""
    if delivery.structure is not None:
        by_field = [[call for call in turn.calls if call.text is leaf] for leaf in _leaves(delivery.structure)]
        known = bool(by_field) and all(by_field)
        return list({id(call): call for calls in by_field for call in calls}.values()) if known else []
    if not delivery.text.strip():
        return []
    if all(len(piece) < 2 for piece in delivery.pieces or [delivery.text]):  # Python has each such text only once
        same = [call for call in turn.calls if call.text == delivery.text]
        elsewhere = [call for call in turn.calls if delivery.text in call.text]
        return same if len(elsewhere) == 1 and not turn.others and not turn.strays else []
    if delivery.pieces is None:
        return [call for call in turn.calls if call.text is delivery.text]
    pieces = list(map(id, delivery.pieces))
    return [call for call in turn.calls if list(map(id, call.pieces)) == pieces]


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
    """Whether a step returned the delivered answer: the same object, or the same content in another."""
    if delivery.pieces is not None:
        return delivery.stream is not None and step.stream is delivery.stream
    content = delivery.text if delivery.structure is None else delivery.structure
    if step.result is delivery.holder:
        return step.content is content  # its content has not been replaced since
    singular = isinstance(content, str) and len(content) < 2
    return not singular and step.content is content


def _is_within(step: Step, name: str) -> bool:
    """Whether a step, or one around it, is a component or a method of this name."""
    return any(name in (around.name, around.name.partition(".")[0]) for around in step.path)


# The sources of an answer: other engines' answers, passages that a model wrote, and passages that were retrieved.


def answers_before(turn: Turn, written: Sequence[ModelCall], inside: Step | None) -> Iterator[Step]:
    """The steps (of engines, synthesizers, workflows) whose answers may be in the prompts of these calls.

    An answer before a call may be in its prompt, whatever code ran between the two. Where the call was made by another
    engine that ran afterwards, it is in the prompt if its words are. These calls wrote the answer of the step `inside`.
    """
    around = {step for call in written for step in call.path}
    candidates = [
        step for step in turn.ended if _answers(step) and step not in around and (inside is None or inside in step.path)
    ]
    outermost = [step for step in candidates if not any(outer in candidates for outer in step.path[:-1])]
    yield from (step for step in outermost if turn.speaks(step) and any(_reaches(step, call) for call in written))


def _answers(step: Step) -> bool:
    if step.method in _OF_SYNTHESIZERS:
        return isinstance(step.component, BaseSynthesizer)
    if step.method == "run":
        return isinstance(step.component, Workflow)
    return step.method in _OF_ENGINES and isinstance(step.component, (BaseQueryEngine, BaseChatEngine))


def _reaches(step: Step, call: ModelCall) -> bool:
    if step.ended > call.ended:
        return False
    between = [around for around in call.path if around not in step.path]
    if not any(_answers(around) and around.method in _OF_ENGINES for around in between):
        return True
    answer = step.content if isinstance(step.content, str) else str(step.result)
    return answer in call.prompt.text or repeats(call.prompt.text, answer)


def writers_of_passages(turn: Turn, written: Sequence[ModelCall]) -> list[ModelCall]:
    """The calls that wrote passages which these calls were given, or other words in their prompts, in other threads.

    No call wrote a passage that was retrieved without a model. Any other one was written by a call whose words it
    repeats, and may be by every call that a retriever or a postprocessor of the user's made.
    """
    writers = dict[int, ModelCall]()
    clean = turn.passages()
    for step in {id(step): step for call in written for step in call.path if step.passages}.values():
        strange = [passage for passage in step.passages if (passage.id, passage.hash) not in clean]
        strays = [stray.call for passage in step.passages for stray in turn.strays_in(passage) if stray.call]
        earlier = [call for call in turn.calls if call.ended < step.began and not call.withheld]
        wrote = [
            call
            for call in earlier
            if strange and (any(repeats(passage.text, call.text) for passage in strange) or _is_the_users(call))
        ]
        writers |= {id(call): call for call in (*wrote, *strays) if call not in written}
    before = [one for call in written for one in turn.overheard(call.prompt.text) if one.ended < call.ended]
    return list((writers | {id(call): call for call in before}).values())


def _is_the_users(call: ModelCall) -> bool:
    """Whether code that is not LlamaIndex's made a call while it retrieved passages, or changed them."""
    kinds = [cast("Any", type(step.component)) for step in call.path if step.method in FINDING]
    return any(not str(kind.__module__).startswith("llama_index.") for kind in kinds)


def retrieved(nodes: Sequence[NodeWithScore], turn: Turn) -> list[NodeWithScore]:
    """The source nodes that may go out next to a text in a draft's place: those that were retrieved, and unchanged.

    Composite engines put sub-answers among their source nodes. A node may go out if a retriever found it as it is,
    without a model.
    """
    clean = turn.passages()
    found = [(node, Passage.of(node)) for node in nodes]
    return [
        # A subclass may have further fields.
        node if type(node) is NodeWithScore else NodeWithScore(node=node.node, score=node.score)
        for node, passage in found
        if (passage.id, passage.hash) in clean
    ]


def with_passages(nodes: Sequence[NodeWithScore], others: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    """The source nodes of two answers, one behind the other; a node of both is there once."""
    known = {node.node.node_id for node in nodes}
    return [*nodes, *(node for node in others if node.node.node_id not in known)]


def about_passages(metadata: Mapping[str, Any] | None, kept: Sequence[NodeWithScore]) -> dict[str, Any]:
    """The part of an answer's metadata that may go out with these nodes: the nodes' own metadata, by their ids.

    Composite engines put queries, selections and structures there as well.
    """
    known = {node.node.node_id: node.node.metadata for node in kept}
    return {name: known[name] for name in metadata or {} if name in known}

"""The sources of an answer: other engines' answers, passages that a model wrote, and passages that were retrieved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore
from llama_index.core.workflow import Workflow

from llama_index_semgrad_guard.calls import FINDING, ModelCall, Passage, Step, Turn
from llama_index_semgrad_guard.texts import repeats

_OF_ENGINES = frozenset({"query", "aquery", "chat", "achat"})
_SYNTHESIZING = frozenset({"synthesize", "asynthesize"})


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
    if step.method in _SYNTHESIZING:
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


def about_passages(metadata: Mapping[str, Any] | None, kept: Sequence[NodeWithScore]) -> dict[str, Any]:
    """The part of an answer's metadata that may go out with these nodes: the nodes' own metadata, by their ids.

    Composite engines put queries, selections and structures there as well.
    """
    known = {node.node.node_id: node.node.metadata for node in kept}
    return {name: known[name] for name in metadata or {} if name in known}

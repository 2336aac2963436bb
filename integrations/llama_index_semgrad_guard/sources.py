"""What an answer was written from: other engines' answers, and passages that a model wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.workflow import Workflow

from llama_index_semgrad_guard.calls import FINDING, ModelCall, Passage, Step, Turn
from llama_index_semgrad_guard.wording import repeats

_ASKING_AN_ENGINE = frozenset({"query", "aquery", "chat", "achat"})
_SYNTHESIZING = frozenset({"synthesize", "asynthesize"})


def answers_before(turn: Turn, written: Sequence[ModelCall], inside: Step | None) -> Iterator[Step]:
    """The steps (of engines, synthesizers, workflows) whose answers may stand in the prompts of these calls.

    An answer that came before a call may, whatever code stands between the two, unless the call was made by another
    engine that was asked afterwards: then it does if its words are in the call's prompt. `inside` is the step whose
    answer these calls wrote.
    """
    around = {step for call in written for step in call.path}
    candidates = [
        step for step in turn.ended if _answers(step) and step not in around and (inside is None or inside in step.path)
    ]
    outermost = [step for step in candidates if not any(outer in candidates for outer in step.path[:-1])]
    for step in outermost:
        if turn.speaks(step) and any(_reaches(step, call) for call in written):
            yield step


def _answers(step: Step) -> bool:
    if step.method in _SYNTHESIZING:
        return isinstance(step.component, BaseSynthesizer)
    if step.method == "run":
        return isinstance(step.component, Workflow)
    return step.method in _ASKING_AN_ENGINE and isinstance(step.component, (BaseQueryEngine, BaseChatEngine))


def _reaches(step: Step, call: ModelCall) -> bool:
    if step.ended > call.ended:
        return False
    between = [own for own in call.path if own not in step.path]
    if not any(_answers(own) and own.method in _ASKING_AN_ENGINE for own in between):
        return True
    answer = step.content if isinstance(step.content, str) else str(step.result)
    return answer in call.prompt.text or repeats(call.prompt.text, answer)


def writers_of_passages(turn: Turn, written: Sequence[ModelCall]) -> list[ModelCall]:
    """The calls that wrote passages which these calls were given, or other words in their prompts, in other threads.

    A passage that was found without asking a model is nobody's. Of another one, a call wrote it whose words it repeats,
    and so may every call that a retriever or a postprocessor of one's own made.
    """
    found = dict[int, ModelCall]()
    clean = turn.passages()
    for step in {id(step): step for call in written for step in call.path if step.passages}.values():
        strange = [passage for passage in step.passages if (passage.id, passage.hash) not in clean]
        strays = [stray.call for passage in step.passages for stray in turn.strays_in(passage) if stray.call]
        earlier = [call for call in turn.calls if call.ended < step.began and not call.withheld]
        wrote = [call for call in earlier if strange and (_in(call.text, strange) or _is_of_ones_own(call))]
        found |= {id(call): call for call in (*wrote, *strays) if call not in written}
    before = [one for call in written for one in turn.overheard(call.prompt.text) if one.ended < call.ended]
    return list((found | {id(call): call for call in before}).values())


def _in(text: str, passages: Sequence[Passage]) -> bool:
    return any(repeats(passage.text, text) for passage in passages)


def _is_of_ones_own(call: ModelCall) -> bool:
    """Whether code that is not LlamaIndex's made a call while it looked for passages, or changed them."""
    kinds = [cast("Any", type(step.component)) for step in call.path if step.method in FINDING]
    return any(not str(kind.__module__).startswith("llama_index.") for kind in kinds)

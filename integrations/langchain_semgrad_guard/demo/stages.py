"""Two stages, each with a calibration of its own: answering from memory, and reading a retrieved document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from langchain_core.documents import Document
from langchain_core.messages import LC_ID_PREFIX, AIMessage, BaseMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableBranch, RunnableLambda, RunnablePassthrough
from rich.progress import track

from langchain_semgrad_guard.chat_semgrad import ChatSemGrad
from langchain_semgrad_guard.demo.library import Question
from langchain_semgrad_guard.messages import get_verdict
from semgrad_guard import METADATA_KEY, Calibration, Verdict, calibrate
from semgrad_guard.errors import ScoringError
from semgrad_guard.grading import AnswerGrader, AnswerToGrade, ExactMatch
from semgrad_guard.grading.grader import Grade
from semgrad_guard.guard import ABSTAIN_MESSAGE, binding_of, recording
from semgrad_guard.named import reading_prompt
from semgrad_guard.records import PromptForm

GRADER = ExactMatch()
BATCH = 32


@dataclass(frozen=True)
class GradedDraft:
    """One question's draft: its verdict, its grade, and what its prompt looked like, if one was sent."""

    question: Question
    verdict: Verdict
    correct: Grade
    prompt: PromptForm | None


def reading_chain(retriever: BaseRetriever, reader: ChatSemGrad, *, model: str) -> Runnable[Any, AIMessage]:
    """messages -> the document that fits the question -> the reader's answer, which names its source.

    The prompt is the one that this model reads well (`semgrad_guard.named.reading_prompt`).

    Where no document fits there is nothing to read and nothing to score: an abstention, without a call of the model.
    """

    def retrieve(given: Any) -> dict[str, Any]:
        question = given if isinstance(given, str) else str(cast("Sequence[BaseMessage]", given)[-1].text)
        found: Sequence[Document] = retriever.invoke(question)
        context = "\n\n".join(document.page_content for document in found)
        return {"question": question, "context": context, "sources": [d.metadata["source"] for d in found]}

    def cite(step: dict[str, Any]) -> AIMessage:
        message: AIMessage = step["message"]
        return message.model_copy(update={"additional_kwargs": {"sources": step["sources"]}})

    prompt = ChatPromptTemplate.from_template(reading_prompt(model))
    read = RunnablePassthrough.assign(message=prompt | reader) | RunnableLambda(cite)
    return RunnableLambda(retrieve) | RunnableBranch((lambda step: not step["sources"], RunnableLambda(_nothing)), read)


def _nothing(_: object) -> AIMessage:
    verdict = Verdict.of(
        status="unscored",
        action="abstain",
        text=ABSTAIN_MESSAGE,
        estimator="none",
        model="none",
        reason="no document fits the question",
    )
    return AIMessage(content=verdict.text, response_metadata={METADATA_KEY: verdict.metadata()})


def ask(chain: Runnable[Any, AIMessage], questions: Sequence[Question], *, note: str | None = None) -> list[AIMessage]:
    """The chain's answers, in batches; with a `note`, progress is shown under it."""
    starts = range(0, len(questions), BATCH)
    return [
        message
        for start in (track(starts, description=note) if note else starts)
        for message in chain.batch([question.question for question in questions[start : start + BATCH]])
    ]


def grade(chain: Runnable[Any, AIMessage], questions: Sequence[Question], *, note: str) -> list[GradedDraft]:
    """Answer every question and grade the drafts by exact match."""
    with recording() as recorder:
        messages = ask(chain, questions, note=note)
    prompts = {draft.source: draft.prompt for draft in recorder.drafts}
    return [graded(q, message, prompts) for q, message in zip(questions, messages, strict=True)]


def graded(
    question: Question,
    message: AIMessage,
    prompts: Mapping[str | None, PromptForm | None] | None = None,
    *,
    grader: AnswerGrader = GRADER,
) -> GradedDraft:
    """One answer with its verdict, graded; LangChain names a message after the run that made it."""
    verdict = get_verdict(message)
    if verdict is None:
        raise ScoringError("the chain's answer carries no verdict; end it with a ChatSemGrad")
    verdict = verdict.details.escalated_from or verdict  # the draft of the first stage
    correct = grade_of(verdict.draft or verdict.text, question, grader)
    run = (message.id or "").removeprefix(f"{LC_ID_PREFIX}-")
    return GradedDraft(question, verdict, correct, (prompts or {}).get(run))


def grade_of(text: str, question: Question, grader: AnswerGrader) -> Grade:
    """Right, wrong, or neither where the model itself declines to answer; no verdict counts as wrong."""
    return grader.grade([AnswerToGrade(question.question, text, question.answers)])[0] or False


def calibrate_stage(
    graded: Sequence[GradedDraft], *, alpha: float, delta: float, upstream: str | None = None
) -> Calibration:
    """A calibration for drafts like these, bound to what wrote and scored them."""
    binding = binding_of(graded[0].verdict).model_copy(update={"grader": GRADER.name, "upstream": upstream})
    return calibrate(
        [g.verdict.uncertainty for g in graded],
        [g.correct for g in graded],
        alpha=alpha,
        delta=delta,
        binding=binding,
        groups=[g.question.question for g in graded],
        prompts=[g.prompt for g in graded],
    )

"""Graders that are models: natural language inference, BEM, and a chat model as a judge, which LangChain reaches."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semgrad_guard.engine.prompts.reasoning import Foreign
from semgrad_guard.errors import GradingError, MissingExtraError
from semgrad_guard.evaluation.graders.base import AnswerToGrade, Verdicts, any_reference, require_threshold, settling
from semgrad_guard.files import first_line

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel

    from semgrad_guard.engine.text_pairs import AnswerEquivalence, Entailment


@dataclass(frozen=True)
class EntailmentGrader:
    """Correct if question and answer entail question and reference: entailment is the likeliest of the three labels.

    One direction only: an answer may contain more than the reference. A sentence of an answer is correct the other way
    round: if the passage, or question and reference, entail it.
    """

    model: Entailment

    @property
    def name(self) -> str:
        return f"nli({self.model.name})"

    def grade(self, answers: Sequence[AnswerToGrade]) -> Verdicts:
        """A verdict for each answer, in order."""

        def premise_and_hypothesis(one: AnswerToGrade, source: str) -> tuple[str, str]:
            if one.sentence:
                return source if source == one.passage else f"{one.question} {source}", one.text
            return f"{one.question} {one.text}", f"{one.question} {source}"

        def entails(pairs: list[tuple[AnswerToGrade, str]]) -> list[bool]:
            texts = [premise_and_hypothesis(*pair) for pair in pairs]
            return [scores.entails for scores in self.model.probabilities(texts)]

        return any_reference(answers, entails)


@dataclass(frozen=True)
class Bem:
    """Correct if BEM finds the answer equivalent to a reference: P at or above `threshold`, in (0, 1].

    The paper's published code counts an answer as correct from .7 on.
    """

    model: AnswerEquivalence
    threshold: float = 0.7

    def __post_init__(self) -> None:
        require_threshold(self.threshold, "BEM", 0.7)

    @property
    def name(self) -> str:
        return f"bem({self.model.name})>={self.threshold:g}"

    def grade(self, answers: Sequence[AnswerToGrade]) -> Verdicts:
        """A verdict for each answer, in order."""

        def equivalent(pairs: list[tuple[AnswerToGrade, str]]) -> list[bool]:
            triples = [(one.question, reference, one.text) for one, reference in pairs]
            return [p >= self.threshold for p in self.model.probabilities(triples)]

        return any_reference(answers, equivalent)


logger = logging.getLogger("semgrad_guard")

PROMPT = """You grade answers to questions.

Question: {question}

Reference answers, any of which is correct:
{references}

Answer to grade: {answer}

The answer is correct if it means the same as one of the reference answers, in whatever words, and says nothing that \
contradicts them. Do not judge by what you believe about the question. Reply with one word: CORRECT or INCORRECT."""
"""Ours: the paper (appendix, "LLM-as-a-Judge") does not print the prompt that it used."""

SENTENCE_PROMPT = """You grade one sentence of an answer to a question.

Question: {question}

Known facts:
{references}

Sentence to grade: {answer}

The sentence is correct if the known facts state it, in whatever words, and nothing in them contradicts it. Do not \
judge by what you believe about the question. Reply with one word: CORRECT or INCORRECT."""

_VERDICT = re.compile(r"\W*(?:verdict\W+)?(correct|incorrect)\W*", re.IGNORECASE)


class Judge:
    """A chat model that decides whether an answer agrees with the references.

    Args:
        chat: any LangChain chat model; set its temperature to 0.
        name: the model's name, for records; by default the chat model's own.
        parallel: requests at once.
    """

    def __init__(self, chat: BaseChatModel, *, name: str | None = None, parallel: int = 8) -> None:
        self._chat, self._parallel = chat, parallel
        self._name = name or str(getattr(chat, "model", None) or getattr(chat, "model_name", None) or chat.get_name())

    @classmethod
    def from_name(cls, name: str) -> Judge:
        """The chat model that LangChain knows by this name, for example "openai:gpt-4.1" or "deepseek:deepseek-chat".

        Raises:
            MissingExtraError: LangChain, or its package for the provider, is not installed.
            GradingError: the provider is unknown, or not set up (a key is missing).
        """
        try:
            from langchain.chat_models import init_chat_model
        except ModuleNotFoundError as error:
            raise MissingExtraError("langchain", extra="agents") from error
        try:
            return cls(init_chat_model(name, temperature=0), name=name)
        except Exception as error:
            raise GradingError(
                f"The judge {name!r} cannot be set up: {first_line(error)}. Name it as PROVIDER:MODEL, install the "
                "provider's LangChain package, and set its key."
            ) from error

    @property
    def name(self) -> str:
        return f"judge({self._name})"

    def grade(self, answers: Sequence[AnswerToGrade]) -> Verdicts:
        """A verdict for each answer, in order; None, with a warning, where the reply is not a verdict. Abstentions,
        and answers where only one is right, are decided without the chat model.

        Raises:
            GradingError: the chat model fails.
        """
        return settling(answers, self._ask)

    def _ask(self, answers: Sequence[AnswerToGrade]) -> Verdicts:
        prompts = [_prompt(answer) for answer in answers]
        try:
            replies = self._chat.batch([[("user", prompt)] for prompt in prompts], {"max_concurrency": self._parallel})
        except Exception as error:
            raise GradingError(
                f"{self.name} cannot be asked: {first_line(error)}. Grades given so far are kept; run the same command "
                "again to resume."
            ) from error
        return [read_verdict(reply.text) for reply in replies]


def read_verdict(reply: str) -> bool | None:
    """CORRECT or INCORRECT, with punctuation and a thought before it at most; None for any other reply."""
    found = _VERDICT.fullmatch(Foreign.of(reply, None).answer.strip())
    if found is None:
        logger.warning("semgrad-guard: the judge's reply is no verdict: %r", reply[:200])
        return None
    return found.group(1).lower() == "correct"


def _prompt(answer: AnswerToGrade) -> str:
    references = "\n".join(f"- {reference}" for reference in answer.sources)
    return (SENTENCE_PROMPT if answer.sentence else PROMPT).format(
        question=answer.question, references=references, answer=answer.text
    )

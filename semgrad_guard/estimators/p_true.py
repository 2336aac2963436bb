"""P(True): the model judges whether its answer is true."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from semgrad_guard.declared import plain_fields
from semgrad_guard.engine.answers.answer import Evidence
from semgrad_guard.errors import ScoringError
from semgrad_guard.estimators.samples import AskingEstimator
from semgrad_guard.records import Message

_QUESTION = """Question: {question}
Proposed Answer: {answer}
Is the proposed answer:
 (A) True
 (B) False
The proposed answer is:"""

_TRUE, _FALSE = ("True", "(A)"), ("False", "(B)")


@dataclass(frozen=True)
class PTrue(AskingEstimator):
    """1 - the probability that the model calls its own answer true, in [0, 1].

    The original prompt, through the model's own chat template as a new conversation. An answer may begin with
    "True" or "(A)", with "False" or "(B)"; each side's probability is the sum over its two forms. `normalised` divides
    by both sides' sum, so that a model that likes to begin otherwise is not called uncertain; without it the score is
    1 - p(true) as it is. `examples` are (question, answer, whether it is true), put before it as turns of the
    conversation; none by default, where the paper's published code shows six on a raw prompt. Source: Kadavath et al.,
    "Language models (mostly) know what they know", 2022.
    """

    normalised: bool = True
    examples: tuple[tuple[str, str, bool], ...] = ()
    name: ClassVar[str] = "p_true"
    title: ClassVar[str] = "P(True)"

    def __post_init__(self) -> None:
        plain_fields(self)

    def value(self, evidence: Evidence) -> float:
        """Read off one pass over the questions about all answers of the batch."""
        likelihoods = evidence.together(self, self._ask)
        if likelihoods is None:
            raise ScoringError("the question about the answer does not fit the context window")
        return p_false(*likelihoods, normalised=self.normalised)

    def _ask(self, batch: Sequence[Evidence]) -> list[tuple[list[float], list[float]] | None]:
        """For each answer the log-probabilities of the forms of "true" and of "false", None where they do not fit."""
        sampler = batch[0].sampler
        prompts = [sampler.render(self._conversation(answer.question_in_context, answer.text)) for answer in batch]
        # Templates that end in white space (a new line after the role) take the word as it is, others after a blank.
        lead = ["" if prompt.text[-1:].isspace() else " " for prompt in prompts]
        forms = [[sampler.encode(before + form) for form in (*_TRUE, *_FALSE)] for before in lead]
        fitting = [i for i, prompt in enumerate(prompts) if sampler.fits(prompt, max(map(len, forms[i])))]
        before = [[sampler.unthought(prompts[i])] * len(forms[i]) for i in fitting]
        readings = sampler.read([prompts[i] for i in fitting], [forms[i] for i in fitting], before=before)
        by_answer: dict[int, tuple[list[float], list[float]]] = {}
        for i, row in zip(fitting, readings, strict=True):
            likelihoods = [math.fsum(reading.log_probs) for reading in row]
            by_answer[i] = likelihoods[: len(_TRUE)], likelihoods[len(_TRUE) :]
        return [by_answer.get(i) for i in range(len(batch))]

    def _conversation(self, question: str, answer: str) -> list[Message]:
        turns: list[Message] = []
        for example, proposed, true in self.examples:
            turns.append(Message("user", _QUESTION.format(question=example, answer=proposed)))
            turns.append(Message("assistant", _TRUE[0] if true else _FALSE[0]))
        return [*turns, Message("user", _QUESTION.format(question=question, answer=answer.strip()))]


def p_false(true: Sequence[float], false: Sequence[float], *, normalised: bool) -> float:
    """1 - p(true) from the log-probabilities of the forms of either side."""
    for_true = float(np.logaddexp.reduce(true))
    if not normalised:
        return 1 - math.exp(for_true)
    return float(np.exp(-np.logaddexp(0.0, for_true - float(np.logaddexp.reduce(false)))))

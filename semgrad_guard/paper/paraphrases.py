"""Paraphrases for a probe: each question in other words, as a chat model writes them, and an NLI model confirms them.

A wording is dropped where it cannot be the same question: it lacks a name or a number of the question, or repeats a
wording. With an NLI model the question and the wording must entail each other, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.prompts.responses import Foreign
from semgrad_guard.engine.words import normalise
from semgrad_guard.questions.data import Question
from semgrad_guard.questions.run import complete
from semgrad_guard.questions.run_record import JobRecord, Progress
from semgrad_guard.records import Message

if TYPE_CHECKING:
    from semgrad_guard.estimators.text_pairs import Entailment

Ask = Callable[[Sequence[str]], Sequence[str]]
"""Replies of a chat model to prompts, in their order."""

PROMPT = """Write the question below in {count} other ways. Keep its meaning, its names and its numbers. Do not answer \
it. Write one question a line, and nothing else.

Question: {question}"""
COUNT, MAX_TOKENS = 3, 160
"""How many wordings are asked for, and the most tokens of a reply."""
KIND = "paraphrases"
"""The kind of the record that keeps them."""

_BULLET = re.compile(r"^(?:[-*•]|\(?\d{1,2}[.):]|[a-z][.)])\s+|^(?:question|paraphrase)\s*\d*:\s*", re.IGNORECASE)
_NAMES = re.compile(r"\d[\d.,]*\d|\d|(?<=\s)[^\W\d_a-z]\w*")
"""A number, or a word behind the first with a capital letter."""


class Paraphrased(BaseModel, frozen=True, extra="forbid"):
    """The paraphrases of the question that has this key: a line of their record."""

    key: str
    texts: tuple[str, ...]


def with_written(
    questions: Sequence[Question],
    path: Path,
    ask: Ask,
    *,
    writer: str,
    nli: Entailment | None = None,
    batch_size: int = 8,
    on_progress: Progress | None = None,
) -> list[Question]:
    """The questions with paraphrases; those that have some keep theirs.

    Args:
        questions: distinct ones.
        path: the record of what was written, from which an interrupted run continues.
        ask: the chat model.
        writer: its name, for the record.
        nli: drops what does not follow from the question, or the question from it.
        batch_size: prompts at once.
        on_progress: told (questions done, questions in all).

    Raises:
        BindingMismatchError: the record at `path` is another writer's.
    """
    bare = [question for question in questions if not question.paraphrases]
    settings = {"writer": writer, "count": COUNT, "nli": None if nli is None else nli.name, "prompt": PROMPT}

    def write(batch: Sequence[Question], _: int) -> list[Paraphrased]:
        replies = ask([PROMPT.format(count=COUNT, question=question.question) for question in batch])
        found = [wordings_in(reply, question.question) for reply, question in zip(replies, batch, strict=True)]
        if nli is not None:
            found = [_confirmed(texts, row.question, nli) for texts, row in zip(found, batch, strict=True)]
        return [Paraphrased(key=row.key, texts=texts) for row, texts in zip(batch, found, strict=True)]

    with JobRecord(path, settings, Paraphrased, kind=KIND) as record:
        written = complete(record, bare, write, batch_size=batch_size, on_progress=on_progress)
    texts = {one.key: one.texts for one in written}
    return [
        question.model_copy(update={"paraphrases": question.paraphrases or texts[question.key]})
        for question in questions
    ]


def by_model(model: LanguageModel) -> Ask:
    """The model itself, greedily."""

    def ask(prompts: Sequence[str]) -> list[str]:
        conversations = [[Message("user", prompt)] for prompt in prompts]
        options = GenerationOptions(max_tokens=MAX_TOKENS)
        return [generation.text for generation in model.generate_batch(conversations, options)]

    return ask


def wordings_in(reply: str, question: str) -> tuple[str, ...]:
    """The wordings of a question in a reply: its lines without bullets and quotation marks, if they can be the same
    question.
    """
    names, seen, own = {*_NAMES.findall(question)}, set[str](), normalise(question)
    found: list[str] = []
    for line in Foreign.of(reply, None).answer.splitlines():
        text = _BULLET.sub("", line.strip()).strip("\"'“”*` ")
        is_question = text.endswith("?") or not question.rstrip().endswith("?")
        plain = normalise(text)
        if is_question and all(word in text for word in names) and own not in plain and plain not in seen:
            seen.add(plain)
            found.append(text)
    return tuple(text for text in found if text)[:COUNT]


def _confirmed(texts: Sequence[str], question: str, nli: Entailment) -> tuple[str, ...]:
    """Those that follow from the question, and the question from them."""
    there = nli.probabilities([(question, text) for text in texts])
    back = nli.probabilities([(text, question) for text in texts])
    return tuple(text for text, one, other in zip(texts, there, back, strict=True) if one.entails and other.entails)

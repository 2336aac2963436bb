"""Passages to read: frames, records, events, attributes; joined, shuffled, with titles; and the prompts around them.

A prompt is a `Shape`, in the manner of the RAG prompts of LangChain and LlamaIndex and of plain chat. In nearly all of
them the question comes last, so that the questions of one passage share a prefix, and the passage is paid for once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from semgrad_guard.pocket.documents import attribute, event, record
from semgrad_guard.pocket.frames import Frame, Reading, bank, sample
from semgrad_guard.pocket.tokenizer import Message
from semgrad_guard.pocket.words import some

SLOTS = re.compile(r"\{[cq]\}")
PAPER = "Please directly answer the following question with one or few words:\n"
IN_A_SENTENCE = " Answer in a sentence."
SYSTEMS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a careful assistant. Keep your answers short.",
    "You answer questions with a few words.",
    "Be concise.",
    "You are an assistant for question-answering tasks.",
)
_TASK = (
    "You are an assistant for question-answering tasks. "
    "Use the following pieces of retrieved context to answer the question."
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A prompt: the user's message with `{c}` for the passage and `{q}` for the question; maybe a system message."""

    user: str
    system: str = ""
    weight: float = 1.0

    @property
    def question_first(self) -> bool:
        """Does the passage come after the question? Then several questions cannot share it."""
        return "{c}" in self.user and self.user.index("{q}") < self.user.index("{c}")

    def messages(self, passage: str, question: str) -> list[Message]:
        held = {"{c}": passage, "{q}": question}
        user, system = (SLOTS.sub(lambda m: held[m[0]], text) for text in (self.user, self.system))
        head = [{"role": "system", "content": system}] if system else []
        return [*head, {"role": "user", "content": user}]


READING_SHAPES = (
    Shape("Context: {c}\n\nQuestion: {q}", weight=3),
    Shape("{c}\n\n{q}", weight=2),
    Shape("{c}\n\nQuestion: {q}\nAnswer:"),
    Shape("Use the following context to answer the question.\n\nContext:\n{c}\n\nQuestion: {q}", weight=2),
    Shape("Use the following context to answer the question.\n\nContext:\n{c}\n\nQuestion: {q}\n\nAnswer:"),
    Shape("Answer the question based only on the following context:\n{c}\n\nQuestion: {q}", weight=2),
    Shape(_TASK + "\nQuestion: {q}\nContext: {c}\nAnswer:", weight=0.5),
    Shape(
        "{q}", "Use the following pieces of context to answer the user's question.\n----------------\n{c}", weight=1.5
    ),
    Shape("{q}", _TASK + "\n\n{c}"),
    Shape(
        "Use the following pieces of context to answer the question at the end."
        "\n\n{c}\n\nQuestion: {q}\nHelpful Answer:"
    ),
    Shape(
        "Context information is below.\n---------------------\n{c}\n---------------------\n"
        "Given the context information and not prior knowledge, answer the query.\nQuery: {q}\nAnswer: ",
        weight=2,
    ),
    Shape("Answer the question using the context.\n\n<context>\n{c}\n</context>\n\nQuestion: {q}"),
    Shape("Passage: {c}\nQuestion: {q}"),
    Shape("Read this text:\n\n{c}\n\n{q}"),
    Shape("Document:\n{c}\n\n" + PAPER + "{q}"),
)
CLOSED_SHAPES = (
    Shape("{q}", weight=5),
    Shape(PAPER + "{q}", weight=3),
    Shape("Question: {q}"),
    Shape("Question: {q}\nAnswer:"),
)


def shape(random: Random, shapes: tuple[Shape, ...], system: float = 0.15) -> Shape:
    """One of the shapes by weight, now and then with a short system message before it."""
    chosen = random.choices(shapes, [s.weight for s in shapes])[0]
    if not chosen.system and random.random() < system:
        return Shape(chosen.user, random.choice(SYSTEMS))
    return chosen


def _titled(text: str, random: Random) -> str:
    roll = random.random()
    if roll < 0.06:
        return f"{some(random, 'adj').capitalize()} {some(random, 'thing')}\n{text}"
    if roll < 0.1:
        return f"# {some(random, 'activity').capitalize()}\n\n{text}"
    return f"{some(random, 'idea').capitalize()}: {text}" if roll < 0.13 else text


def _joined(one: Reading, two: Reading, random: Random) -> Reading:
    passages = [one.passage, two.passage]
    random.shuffle(passages)
    questions = [*one.questions, *two.questions]
    random.shuffle(questions)
    return Reading(random.choice((" ", "\n", "\n\n")).join(passages), tuple(questions[:4]))


def from_frames(random: Random, frames: tuple[Frame, ...] | None = None) -> Reading:
    """A frame with fresh fillers; one in four is joined with another passage, some have a title."""
    frames = bank()[0] if frames is None else frames
    reading = sample(random.choice(frames), random)
    if random.random() < 0.25:
        other = random.choice((record, event, None, None))
        reading = _joined(reading, other(random) if other else sample(random.choice(frames), random), random)
    return Reading(_titled(reading.passage, random), reading.questions[:5])


GENERATORS = ((from_frames, 0.68), (record, 0.13), (event, 0.1), (attribute, 0.09))


def passage(random: Random) -> Reading:
    """An invented passage of any kind."""
    while True:
        reading = random.choices([g for g, _ in GENERATORS], [w for _, w in GENERATORS])[0](random)
        if reading.questions:
            return reading

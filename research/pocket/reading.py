"""Passages to read: frames, records, events, attributes; joined, shuffled, with titles; and the prompts around them.

A prompt is a `Shape`. The question comes before the passage, as in LangChain's best-known RAG prompt: a causal model
has no second look at the passage once it knows the question.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from research.pocket.documents import attribute, event, record
from research.pocket.frames import Frame, Reading, bank, sample
from research.pocket.tokenizer import Message
from research.pocket.words import some

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


@dataclass(frozen=True, slots=True)
class Shape:
    """A prompt: the user's message with `{c}` for the passage and `{q}` for the question; maybe a system message."""

    user: str
    system: str = ""
    weight: float = 1.0

    def messages(self, passage: str, question: str) -> list[Message]:
        held = {"{c}": passage, "{q}": question}
        user, system = (SLOTS.sub(lambda m: held[m[0]], text) for text in (self.user, self.system))
        head = [{"role": "system", "content": system}] if system else []
        return [*head, {"role": "user", "content": user}]


READING_SHAPE = Shape("Question: {q}\nContext: {c}\nAnswer:")
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


GENERATORS = ((from_frames, 0.55), (record, 0.19), (event, 0.13), (attribute, 0.13))


def passage(random: Random) -> Reading:
    """An invented passage of any kind."""
    while True:
        reading = random.choices([g for g, _ in GENERATORS], [w for _, w in GENERATORS])[0](random)
        if reading.questions:
            return reading

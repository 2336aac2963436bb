"""The questions the pocket model is measured on: none of these wordings, fillers or frames occurs in its training.

Kinds: known, rare, unknown and several (facts, in held-out wordings), invented (fresh passages: records in held-out
wordings, events, attributes), frames (the held-out tenth of the frames), conflict, memory, natural (hand-written
passages, `data/natural_*.jsonl`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from research.pocket.documents import attribute, event, record
from research.pocket.frames import Reading, bank, plain
from research.pocket.reading import READING_SHAPE
from research.pocket.tokenizer import Message
from research.pocket.values import invented
from research.pocket.world import KNOWN, RARE, UNKNOWN, Fact, of_split, question, sentence

NATURAL = Path(__file__).parent / "data" / "natural_first.jsonl"
SEED = 20_000


@dataclass(frozen=True, slots=True)
class Case:
    """One question, its whole prompt, and every answer that counts as right; the id stays the same."""

    id: str
    kind: str
    question: str
    messages: tuple[Message, ...]
    answers: tuple[str, ...]


def _fact_cases(kind: str, facts: list[Fact]) -> Iterator[Case]:
    for fact in facts:
        for wording in (0, 1):
            text = question(fact, wording, held_out=True)
            name = f"{kind}/{fact.relation}/{fact.entity}/{wording}"
            yield Case(name, kind, text, ({"role": "user", "content": text},), fact.answers)


def facts() -> list[Case]:
    """Every fact in both held-out wordings."""
    known = of_split(KNOWN)
    groups = {
        "known": [f for f in known if not f.several],
        "several": [f for f in known if f.several],
        "rare": [f for f in of_split(RARE) if not f.several],
        "unknown": [f for f in of_split(UNKNOWN) if not f.several],
    }
    return [case for kind, chosen in groups.items() for case in _fact_cases(kind, chosen)]


def _reading_cases(kind: str, readings: list[Reading]) -> Iterator[Case]:
    for number, reading in enumerate(readings):
        for index, (text, answer) in enumerate(reading.questions):
            messages = tuple(READING_SHAPE.messages(reading.passage, text))
            yield Case(f"{kind}/{number}/{index}", kind, text, messages, (answer,))


def fresh(random: Random) -> Reading:
    """An invented passage with questions in wordings that the training never shows."""
    makers = (lambda r: record(r, held_out=True), lambda r: record(r, held_out=True), event, attribute)
    return random.choice(makers)(random)


def reading(size: int = 300, seed: int = SEED) -> list[Case]:
    """Fresh invented passages, one question each, and every held-out frame once."""
    random = Random(seed)
    first = [replace(reading, questions=reading.questions[:1]) for reading in (fresh(random) for _ in range(size))]
    frames = [plain(frame, random) for frame in bank()[1]]
    return [*_reading_cases("invented", first), *_reading_cases("frames", frames)]


def beside(size: int = 100, seed: int = SEED + 1) -> list[Case]:
    """conflict: the passage contradicts a real entity's fact. memory: the passage has nothing to do with the fact."""
    random = Random(seed)
    single = [f for f in of_split(KNOWN) if not f.several]
    cases = []
    for number in range(size):
        fact = random.choice([f for f in single if f.relation in ("capital", "currency", "language")])
        false_answer = invented(random)
        text = f"{sentence(fact, false_answer)} {record(random).passage}"
        wording = question(fact, number % 2, held_out=True)
        cases.append(
            Case(
                f"conflict/{number}", "conflict", wording, tuple(READING_SHAPE.messages(text, wording)), (false_answer,)
            )
        )
        fact = random.choice(single)
        wording = question(fact, number % 2, held_out=True)
        messages = tuple(READING_SHAPE.messages(record(random).passage, wording))
        cases.append(Case(f"memory/{number}", "memory", wording, messages, fact.answers))
    return cases


def natural(path: Path = NATURAL) -> list[Case]:
    """Hand-written passages. To be read by the evaluation only, never to choose anything."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [
        Case(
            r["id"],
            "natural",
            r["question"],
            tuple(READING_SHAPE.messages(r["passage"], r["question"])),
            tuple(r["answers"]),
        )
        for r in rows
    ]

"""Frames: hand-written paragraphs with slots, and questions whose answers are spans of the paragraph.

    To reset the {device:product}, hold the {part:thing} button for {hold:duration}.
    ? How long do I have to hold the button to reset the {device}? | For how long should the button be held? = {hold}

`{name:type}` fills a slot, `{name}` repeats it, `{name:[a|b|c]}` chooses. Sampling fills the slots anew each time,
leaves out sentences that no question needs, and sometimes swaps ordinary words of the frame for others throughout, so
that the reader cannot learn the frames by heart and has to find the sentence that shares the question's words.
"""

# ruff: noqa: SIM905 (word lists read better as text)
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from research.pocket.values import KINDS, phrase
from research.pocket.words import all_words, synonyms

FOLDER = Path(__file__).parent / "data" / "frames"
SLOT = re.compile(r"\{(\w+)(?::(\[[^\]]*\]|\w+))?\}")
WORD = re.compile(r"\b[a-z]{5,}\b")
SENTENCE = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z{\"'])")
HELD_OUT_EVERY = 10
GLUE = frozenset(
    """
    about above after again against along already although always among another anyone around because been
    before behind being below between both cannot could during each either enough every everyone everything
    first from further have here however inside instead itself later least less many might more most much must
    near never nobody nothing often once only other others otherwise outside over perhaps rather same shall
    should since some something soon still such than that their them themselves then there these they this those
    though through together toward towards under unless until upon usually very were what when where whether
    which while whom whose will with within without would year years month months hours minutes long take takes
    called named
    """.split()
)


@dataclass(frozen=True, slots=True)
class Reading:
    """A passage with its questions: each a pair of question and answer."""

    passage: str
    questions: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """One paragraph (as sentences) and its questions: every question has several wordings and one answer."""

    source: str
    sentences: tuple[str, ...]
    questions: tuple[tuple[tuple[str, ...], str], ...]

    @property
    def slots(self) -> dict[str, str]:
        return {name: kind for s in self.sentences for name, kind in SLOT.findall(s) if kind}


def parse(block: str, source: str) -> Frame:
    """One frame; a ValueError names its fault."""
    lines = [line.strip() for line in block.strip().splitlines()]
    text = " ".join(line for line in lines if not line.startswith("?"))
    questions = []
    for line in (line for line in lines if line.startswith("?")):
        wordings, separator, answer = line[1:].rpartition(" = ")
        if not separator or not answer.strip():
            raise ValueError(f"{source}: a question without an answer: {line}")
        questions.append((tuple(w.strip() for w in wordings.split(" | ")), answer.strip()))
    if not questions:
        raise ValueError(f"{source}: a frame without questions: {text[:60]}")
    frame = Frame(source, tuple(SENTENCE.split(text)), tuple(questions))
    _check(frame)
    return frame


def _check(frame: Frame) -> None:
    slots = frame.slots
    whole = " ".join(frame.sentences)
    for name, kind in SLOT.findall(whole):
        if name not in slots or (kind and kind[0] != "[" and kind not in KINDS):
            raise ValueError(f"{frame.source}: unknown slot {{{name}:{kind}}}")
    bare = SLOT.sub(r"{\1}", whole)
    for wordings, answer in frame.questions:
        unknown = [n for n, _ in SLOT.findall(" ".join(wordings) + answer) if n not in slots]
        if unknown:
            raise ValueError(f"{frame.source}: {unknown[0]!r} is not a slot of the paragraph")
        if SLOT.sub(r"{\1}", answer).lower() not in bare.lower():
            raise ValueError(f"{frame.source}: the answer {answer!r} is not a span of the paragraph")


def blocks(folder: Path = FOLDER) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*.txt")):
        for number, block in enumerate(re.split(r"\n\s*\n", path.read_text(encoding="utf-8").strip()), 1):
            lines = [line for line in block.splitlines() if not line.startswith("#")]
            if "".join(lines).strip():
                yield f"{path.name} frame {number}", "\n".join(lines)


def load(folder: Path = FOLDER, *, strict: bool = False) -> tuple[list[Frame], list[str]]:
    """Every good frame, and the others' faults (`strict` raises instead)."""
    good, bad = [], []
    for source, block in blocks(folder):
        try:
            good.append(parse(block, source))
        except ValueError as error:
            if strict:
                raise
            bad.append(str(error))
    return good, bad


@cache
def bank() -> tuple[tuple[Frame, ...], tuple[Frame, ...]]:
    """Training frames, and the held-out tenth on which choices are made."""
    frames, _ = load()
    held = tuple(frames[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    return tuple(f for f in frames if f not in held), held


def _substitutes(frame: Frame, random: Random, share: float) -> dict[str, str]:
    """Other words for some of the frame's own, the same in paragraph, questions and answers."""
    text = SLOT.sub("", " ".join(frame.sentences))
    own = sorted({w for w in WORD.findall(text) if w not in GLUE})
    return {w: random.choice(all_words()) for w in own if random.random() < share}


def _value(kind: str, random: Random, arbitrary: float) -> str:
    if kind.startswith("["):
        return phrase(random) if random.random() < arbitrary else random.choice(kind[1:-1].split("|"))
    return KINDS[kind](random)


def _reworded(question: str, random: Random) -> str:
    """The question with some of its words replaced by synonyms, which the passage does not have."""
    known = synonyms()

    def other(match: re.Match[str]) -> str:
        choices = known.get(match[0])
        return random.choice(choices) if choices and random.random() < 0.6 else match[0]

    parts = re.split(r"(\{[^}]*\})", question)
    parts[::2] = [re.sub(r"\b[a-z]{3,}\b", other, part) for part in parts[::2]]
    return "".join(parts)


def plain(frame: Frame, random: Random) -> Reading:
    """The frame as it was written, with fresh fillers."""
    return sample(frame, random, swap=0.0, drop=0.0, reword=0.0)


def sample(frame: Frame, random: Random, *, swap: float = 0.4, drop: float = 0.3, reword: float = 0.25) -> Reading:
    """The frame with fresh fillers.

    `swap`: how often its own words change. `drop`: how often idle sentences go. `reword`: how often a question's own
    words give way to synonyms.
    """
    changed = random.random() < swap
    values = {name: _value(kind, random, 0.5 if changed else 0.15) for name, kind in frame.slots.items()}
    other = _substitutes(frame, random, random.choice((0.1, 0.25, 0.5))) if changed else {}

    def fill(text: str) -> str:
        if other:
            parts = re.split(r"(\{[^}]*\})", text)
            parts[::2] = [WORD.sub(lambda m: other.get(m[0], m[0]), part) for part in parts[::2]]
            text = "".join(parts)
        text = SLOT.sub(lambda m: values[m[1]], text)
        return text[0].upper() + text[1:] if text[:1].islower() else text

    sentences = list(frame.sentences)
    questions = list(frame.questions)
    if random.random() < drop and len(questions) > 2:
        questions = random.sample(questions, random.randint(2, len(questions) - 1))
        needed = {n for wordings, answer in questions for n, _ in SLOT.findall(" ".join(wordings) + answer)}
        literal = any(not SLOT.search(answer) for _, answer in questions)
        kept = [s for s in sentences if literal or needed & {n for n, _ in SLOT.findall(s)}]
        sentences = kept if _first_uses_kept(kept, needed) else sentences
    passage = " ".join(fill(s) for s in sentences)
    pairs = []
    for wordings, answer in questions:
        plain = SLOT.sub(lambda m: values[m[1]], _swap(answer, other))
        where = passage.lower().find(plain.lower())
        if where >= 0:  # as the passage writes it
            found = passage[where : where + len(plain)]
            wording = random.choice(wordings)
            wording = _reworded(wording, random) if random.random() < reword else wording
            pairs.append((fill(wording), found))
    return Reading(passage, tuple(pairs))


def _swap(answer: str, other: dict[str, str]) -> str:
    parts = re.split(r"(\{[^}]*\})", answer)
    parts[::2] = [WORD.sub(lambda m: other.get(m[0], m[0]), part) for part in parts[::2]]
    return "".join(parts)


def _first_uses_kept(sentences: list[str], needed: set[str]) -> bool:
    """Is every slot that the questions need introduced in the sentences that stay?"""
    return needed <= {name for s in sentences for name, _ in SLOT.findall(s)}

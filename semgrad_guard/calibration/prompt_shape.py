"""`PromptShape`: the form of a calibration's prompts, and the differences of another prompt from them.

A promise is about prompts like those of the calibration. Which these are is read off the rendered prompts, never taken
from a name: the roles of the turns, the static text that all prompts share (`prompt_parts.py`), the tools, and how long
and how new to the calibration the text between is.

Every measure has a range: that of the calibration prompts, and slack beyond it, so that prompts drawn like theirs stay
inside. A measure of a new prompt lies beyond those of all n calibration prompts with probability 1 / (n + 1) at
most on each side; the slack is the distance from the outer quarter of them to the outermost, times min(1, 100 / n).
What all calibration prompts share by accident costs the same: a new prompt breaks it with probability 1 / (n + 1) at
most. With 150 calibration prompts at least .99 of new ones are familiar in every family that the tests simulate.

Small sets: with fewer than about 30 prompts ranges are narrow and accidents look static, so that many prompts of the
same kind count as unfamiliar, and with one prompt all but its like. A shape errs towards promising less.

A question may take several calls. The prompts of its other calls, whose scores do not count, widen the shape: those
whose roles follow each other as in the first ones count like these, and others, such as turns after a tool's, have a
shape of their own (`also`). What holds for any one of them is familiar.

What it cannot see: text in a gap that has the length and the words of the texts there at calibration. An instruction
inside a retrieved passage is a passage; where questions of many kinds and lengths were calibrated on, one more
sentence, or a short question in a related language, may look like another question. The form of a single calibration
prompt is familiar, however rare: a shape tells strange prompts, and `DriftMonitor` tells when familiar ones come
more often.

Why: docs/decisions.md#0083
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, Self

import numpy as np
from pydantic import BaseModel, Field

from semgrad_guard.calibration.prompt_parts import Skeleton, Vocabulary, Words
from semgrad_guard.errors import InputError
from semgrad_guard.records import PromptForm

_SLACK_SIZE = 100
_LEAST_SLACK = 0.2
"""The least slack of prompts of other roles, as a share: few of them are shown, often of a few lengths."""
_START, _END = "", ""

_CONTROL = "a text in it holds the control token {!r}, as in no calibration prompt"


class Range(BaseModel, frozen=True, extra="forbid"):
    """The smallest and the largest number that are familiar."""

    low: int
    high: int

    @classmethod
    def of(cls, values: Sequence[int], least: float = 0.0) -> Self:
        """The values' range with slack to both sides; never below half of the smallest, so never down to nothing.

        Where values differ, slack is at least this share (`least`) of the outermost.
        """
        lowest, lower, upper, highest = (float(v) for v in np.quantile(values, [0, 0.25, 0.75, 1]))
        share = min(1.0, _SLACK_SIZE / len(values))
        least = least if lowest < highest else 0.0
        low = max(lowest - max(share * (lower - lowest), least * lowest), lowest / 2)
        return cls(low=math.ceil(low), high=math.floor(highest + max(share * (highest - upper), least * highest)))

    def __contains__(self, value: int) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.low} to {self.high}" if self.low < self.high else str(self.low)


class TextRange(BaseModel, frozen=True, extra="forbid"):
    """How long a piece of text is in familiar prompts, and how much of it is new.

    `new_words` counts the different words (and punctuation marks) that occur in no other calibration prompt, or in
    those of no other question where questions have several;
    `new_share` is their share of the different words, in per cent. Only too many of them are unfamiliar.
    """

    words: Range
    lines: Range
    sentences: Range
    new_words: Range
    new_share: Range

    @classmethod
    def of(cls, rows: Sequence[_Measured], least: float = 0.0) -> Self:
        """The ranges of several pieces of text."""
        columns = zip(*(row.values() for row in rows), strict=True)
        return cls(**{name: Range.of(column, least) for name, column in zip(rows[0], columns, strict=True)})

    def differences(self, found: _Measured, part: str) -> list[str]:
        """The measures that lie outside, in words."""
        lines: list[str] = []
        for name, value in found.items():
            known: Range = getattr(self, name)
            if name.startswith("new"):
                known = Range(low=0, high=known.high)
            if value not in known:
                lines.append(f"{part} has {value} {_NAMES[name]}; in calibration prompts it has {known}")
        return lines


_Measured = dict[str, int]
_NAMES = {
    "words": "words",
    "lines": "lines",
    "sentences": "sentences",
    "new_words": "words that no other prompt has",
    "new_share": "% words that no other prompt has",
}


class PromptShape(BaseModel, frozen=True, extra="forbid"):
    """The common form of all prompts of a calibration; made by `PromptShape.of`, kept in the calibration's file.

    `n` prompts were seen. `steps` are the pairs of roles that follow each other ("" is the beginning and the end),
    `turns` and `tokens` the ranges of their numbers, `tools` the fingerprints of the tools handed over (None: no
    tools), and `control` the control tokens in their turns' texts. `static` is the text that all share. `gaps` are the
    ranges of the texts between the static pieces (None where there is none), and `user_text` those of the last user
    turn. `vocabulary` holds all words. No text of a prompt is kept, only digests and a bitmap: words can be tried on
    them, not read out. `also` are the shapes of prompts of other roles.
    """

    version: Literal[1]
    n: int = Field(ge=1)
    steps: tuple[tuple[str, str], ...]
    turns: Range
    tools: tuple[str | None, ...]
    tokens: Range
    static: Skeleton
    gaps: tuple[TextRange | None, ...]
    user_text: TextRange
    vocabulary: Vocabulary
    control: tuple[str, ...] = ()
    also: tuple[PromptShape, ...] = ()

    @classmethod
    def of(cls, forms: Iterable[PromptForm], *, calls: Iterable[PromptForm] = ()) -> Self:
        """The shape of these prompts, and of those of the questions' other `calls`.

        Raises:
            InputError: there are none.
        """
        seen = list(forms)
        if not seen:
            raise InputError("a shape is computed from the prompts of a calibration, and there are none")
        own = {_kind(form) for form in seen}
        others: dict[object, list[PromptForm]] = {}
        for form in calls:
            others.setdefault(None if _kind(form) in own else _kind(form), []).append(form)
        whole = cls._of([*seen, *others.pop(None, [])])
        also = tuple(cls._of(group, _LEAST_SLACK) for group in others.values())
        return whole.model_copy(update={"also": also})

    @classmethod
    def _of(cls, seen: Sequence[PromptForm], least: float = 0.0) -> Self:
        texts, questions = [Words.of(form.text) for form in seen], [Words.of(form.user_text) for form in seen]
        own = [text.vocabulary | turn.vocabulary for text, turn in zip(texts, questions, strict=True)]
        by_question: dict[str | int, set[str]] = {}
        for number, (form, words) in enumerate(zip(seen, own, strict=True)):
            by_question.setdefault(number if form.question is None else form.question, set()).update(words)
        counts = Counter(word for words in by_question.values() for word in words)
        only_here = {word for word, count in counts.items() if count == 1}
        static = Skeleton.of(texts)
        gaps = zip(*(static.gaps(text) or () for text in texts), strict=True)
        return cls(
            version=1,
            n=len(seen),
            steps=tuple(sorted({step for form in seen for step in _steps(form.roles)})),
            turns=Range.of([len(form.roles) for form in seen]),
            tools=tuple(sorted({form.tools for form in seen}, key=lambda tools: tools or "")),
            tokens=Range.of([form.tokens for form in seen], least),
            static=static,
            gaps=tuple(
                TextRange.of([_measured(text, text.vocabulary & only_here) for text in gap], least)
                if any(map(len, gap))
                else None
                for gap in gaps
            ),
            user_text=TextRange.of([_measured(turn, turn.vocabulary & only_here) for turn in questions], least),
            vocabulary=Vocabulary.of(counts),
            control=tuple(sorted({token for form in seen for token in form.control})),
        )

    @property
    def covers(self) -> str:
        """The prompts that are familiar, in one line."""
        again = ("assistant", "user") in self.steps
        turns = f"conversations of {self.turns} messages" if again else "one turn"
        texts = " and ".join(f"{gap.words}" for gap in self.gaps if gap is not None)
        between = f", texts of {texts} words in it" if texts else ""
        more = "longer conversations are" if again else "a second turn is"
        return f"{turns}{between}; {more} not promised"

    def differences(self, form: PromptForm) -> tuple[str, ...]:
        """The differences of a prompt from those of the calibration, in plain words; empty for a familiar one."""
        if any(not shape._differences(form) for shape in self.also):
            return ()
        return self._differences(form)

    def _differences(self, form: PromptForm) -> tuple[str, ...]:
        return (
            *self._of_turns(form.roles),
            *([] if form.tools in self.tools else ["it comes with other tools than the calibration prompts"]),
            *(_CONTROL.format(token) for token in form.control if token not in self.control),
            *([] if form.tokens in self.tokens else [_counted(form.tokens, "tokens", self.tokens)]),
            *self._of_text(Words.of(form.text)),
            *self._measured_against(self.user_text, Words.of(form.user_text), "the last user turn"),
        )

    def _of_turns(self, roles: Sequence[str]) -> list[str]:
        found: list[str] = []
        for before, after in [step for step in dict.fromkeys(_steps(roles)) if step not in self.steps]:
            step = f"a turn of {after} follows one of {before}"
            if before == _START:
                step = f"it begins with a turn of the role {after}"
            elif after == _END:
                step = f"it ends with a turn of the role {before}"
            found.append(f"{step}, as in no calibration prompt")
        return found if found or len(roles) in self.turns else [_counted(len(roles), "turns", self.turns)]

    def _of_text(self, text: Words) -> list[str]:
        gaps = self.static.gaps(text)
        if gaps is None:
            return self.static.missing(text)
        found: list[str] = []
        for number, (known, gap) in enumerate(zip(self.gaps, gaps, strict=True), start=1):
            part = "the text" if len(gaps) == 1 else f"part {number} of {len(gaps)} between the shared lines"
            if known is not None:
                found += self._measured_against(known, gap, part)
            elif len(gap):
                found.append(f"{part} has {len(gap)} words; in calibration prompts there is nothing")
        return found

    def _measured_against(self, known: TextRange, text: Words, part: str) -> list[str]:
        return known.differences(_measured(text, self.vocabulary.unknown(text.vocabulary)), part)


def _measured(text: Words, new: set[str]) -> _Measured:
    share = 100 * len(new) // max(1, len(text.vocabulary))
    counts = {"words": len(text), "lines": text.lines, "sentences": text.sentences}
    return {**counts, "new_words": len(new), "new_share": share}


def _kind(form: PromptForm) -> tuple[frozenset[tuple[str, str]], str | None]:
    """The pairs of roles that follow each other, and the tools."""
    return frozenset(_steps(form.roles)), form.tools


def _steps(roles: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip((_START, *roles), (*roles, _END), strict=True))


def _counted(value: int, what: str, known: Range) -> str:
    return f"it has {value} {what}; calibration prompts have {known}"

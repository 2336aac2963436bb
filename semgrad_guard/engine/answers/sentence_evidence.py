"""The sentences of one answer, each given everything before it: as evidence, while it is written, and of any text.

A token belongs to the sentence of its last character, in the ids that were written: most tokens begin with the space
before their word, which belongs to the sentence before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from semgrad_guard.engine.answers.answer import Answer, BatchScoring, Evidence
from semgrad_guard.engine.answers.writing import Piece
from semgrad_guard.engine.prompts.thoughts import Codec
from semgrad_guard.engine.scores.gradients import GradientScores
from semgrad_guard.engine.scores.tape import Tape
from semgrad_guard.engine.text_units import Span, decided, sentences

Sentences = list[tuple[Span, Evidence | None]]
"""The place of each sentence in an answer's text, and its evidence; None for one without a token."""


class OpenSentences:
    """The sentences of an answer that have ended while it is being written; the first `known` have been scored.

    `waited` counts the steps since the others have ended.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.known, self.waited, self._text = 0, 0, ""

    def add(self, piece: Piece) -> None:
        """One more piece of the answer, or of its thought."""
        if isinstance(piece, str):
            self._text += piece
            begin = self.spans[-1][1] if self.spans else 0
            self.spans += pairwise([begin, *decided(self._text, begin)])

    @property
    def is_due(self) -> bool:
        """Whether some have not been scored."""
        return len(self.spans) > self.known

    def hand_over(self, known: int) -> None:
        """So many have been scored, no more than before where the tokens did not spell the others yet."""
        self.known, self.waited = known, 0


def sentences_of(answer: Evidence, *, known: int = 0) -> Sentences | None:
    """The sentences of an answer's text, each with its evidence (`LanguageModel.sentences`), made once."""

    def work(_: Sequence[Evidence]) -> list[Sentences | None]:
        return sentences_together([answer], [known])

    return answer.scoring.together(("sentences", known), work, answer.row, alone=True)


def keep_sentences(answers: Sequence[Evidence], known: Sequence[int]) -> None:
    """Have the sentences of some answers scored together, wherever the first of them is (`sentences_of`)."""
    for one, count, found in zip(answers, known, sentences_together(answers, known), strict=True):
        one.scoring.keep(("sentences", count), one.row, found)


def sentences_together(answers: Sequence[Evidence], known: Sequence[int]) -> list[Sentences | None]:
    """The sentences of each answer, to be scored together. The first `known` are scored already, and have no evidence.

    None for an answer whose tokens spell another text.
    """
    spans = [sentences(one.text) for one in answers]
    return [
        None if own is None else list(zip(places, (*(None,) * count, *own), strict=True))
        for own, places, count in zip(_behind(answers, spans, known), spans, known, strict=True)
    ]


@dataclass(frozen=True)
class EndedSentences:
    """The sentences that have ended in an answer that is still being written.

    `found` is the evidence about the new ones. With the first `tokens` that were written, those of a thought included,
    the answer would end behind the last of them.
    """

    answer: Evidence
    spans: Sequence[Span]
    found: Sequence[Evidence | None]
    tokens: int


def ended_sentences(
    answers: Sequence[Evidence], spans: Sequence[Sequence[Span]], known: Sequence[int]
) -> list[EndedSentences | None]:
    """Those of answers whose first `known` are scored already; None for one whose tokens spell another text."""
    ended = list[EndedSentences | None]()
    for one, own, found in zip(answers, spans, _behind(answers, spans, known), strict=True):
        if found is None:
            ended.append(None)
            continue
        end = one.model.decode(one.response_ids).find(one.text) + len(one.text[: own[-1][1]].rstrip())
        tokens = len(one.preceding_ids) + _tokens_beyond(end, one.response_ids, one.model)
        ended.append(EndedSentences(one, own, found, tokens))
    return ended


def _behind(
    answers: Sequence[Evidence], spans: Sequence[Sequence[Span]], known: Sequence[int]
) -> list[list[Evidence | None] | None]:
    """The evidence about the sentences of each answer behind the `known` first; None where its tokens spell others."""
    ranges = [_sentence_ranges(one, own) for one, own in zip(answers, spans, strict=True)]
    new = [(one, own[first:]) for one, own, first in zip(answers, ranges, known, strict=True) if own is not None]
    found = iter(_together(new))
    return [None if own is None else next(found) for own in ranges]


def _sentence_ranges(answer: Evidence, spans: Sequence[Span]) -> list[Span] | None:
    """The tokens of an answer that each of the first sentences of its text has; None where they spell another text."""
    ids, text, codec = answer.response_ids, answer.text, answer.model
    offset, reached = codec.decode(ids).find(text), [0]
    if offset < 0:
        return None
    for _, end in spans:
        count = len(ids)
        if end < len(text):
            count = _tokens_beyond(offset + end, ids, codec)
            count -= _spelled(ids[:count], codec) > offset + end  # its last token is the next sentence's
        reached.append(max(reached[-1], count))
    return list(pairwise(reached))


def _together(divided: Sequence[tuple[Evidence, Sequence[Span]]]) -> list[list[Evidence | None]]:
    """The evidence about tokens [begin, end) of answers, each given everything before them, to be scored together.

    A part without a token has none.
    """
    parts, tapes = list[Answer](), list[Tape | None]()
    for whole, ranges in divided:
        ids, before = whole.response_ids, whole.preceding_ids
        for begin, end in ranges:
            if end > begin:
                text, preceding = whole.model.decode(ids[begin:end]), (*before, *ids[:begin])
                own = {"ids": ids[begin:end], "preceding": preceding, "written": (*before, *ids)}
                parts.append(replace(whole.answer, text=text, **own))
                tapes.append(whole.scoring.tape(whole.row))
    found = iter(BatchScoring(divided[0][0].model, parts, tapes=tapes, in_context=True).evidence if parts else ())
    return [[next(found) if end > begin else None for begin, end in ranges] for _, ranges in divided]


def parts_of(answer: Evidence, spans: Sequence[Span]) -> list[Evidence | None]:
    """The evidence about pieces of an answer's text as its tokens spell it, in order (`token_ranges`)."""
    (found,) = _together([(answer, token_ranges(answer.response_ids, spans, answer.model))])
    return found


def token_ranges(ids: Sequence[int], spans: Sequence[Span], codec: Codec) -> list[Span]:
    """The tokens of pieces of a text, special tokens included; in the text's order.

    A piece has the tokens that spell any of it, and the one that ends it: where the last one spells nothing beyond, the
    next one. A token belongs to one piece alone, and a piece that has none to an empty range.
    """
    reached, ranges = 0, list[Span]()
    for start, end in spans:
        begin = max(reached, _tokens_beyond(start + 1, ids, codec, special=True) - 1)
        reached = max(reached, min(_tokens_beyond(end + 1, ids, codec, special=True), len(ids)))
        ranges.append((min(begin, reached), reached))
    return ranges


def _tokens_beyond(place: int, ids: Sequence[int], codec: Codec, *, special: bool = False) -> int:
    """The fewest tokens that spell the text up to a place, or more."""
    return bisect_left(range(len(ids)), place, key=lambda count: _spelled(ids[:count], codec, special=special))


def _spelled(ids: Sequence[int], codec: Codec, *, special: bool = False) -> int:
    """The characters that tokens spell; a character may take several of them."""
    return len(codec.decode(ids, special=special).rstrip("\ufffd"))


@dataclass(frozen=True)
class Segment:
    """A piece of a response: `text` is response[start:end], white space behind it included.

    `scores` are those of its tokens, given everything before them; None where no token ends inside it.
    """

    text: str
    start: int
    end: int
    scores: GradientScores | None

"""The sentences of one answer, each given everything before it: as evidence, while it is written, and of any text.

A token belongs to the sentence of its last character, in the ids that were written: most tokens begin with the space
before their word, which belongs to the sentence before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from semgrad_guard.engine.answers.answer import BatchScoring, Evidence
from semgrad_guard.engine.answers.text import Piece
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.prompts.responses import Codec
from semgrad_guard.engine.prompts.semantic_token import TokenizedText
from semgrad_guard.engine.replay.tape import Row
from semgrad_guard.engine.scores.gradients import GradientScores
from semgrad_guard.engine.scores.scorer import Scorer
from semgrad_guard.engine.sentences import Span, decided, sentences


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


def token_counts(ids: Sequence[int], text: str, spans: Sequence[Span], codec: Codec) -> tuple[int, ...] | None:
    """How many of an answer's tokens each sentence of its text has; None where they do not spell that text."""
    offset = codec.decode(ids).find(text)
    if offset < 0:
        return None
    reached = [0]
    for _, end in spans[:-1]:
        count = _tokens_beyond(offset + end, ids, codec)
        spells_more = _spelled(ids[:count], codec) > offset + end  # by its last token, which is the next sentence's
        reached.append(max(reached[-1], count - spells_more))
    return tuple(after - before for before, after in pairwise([*reached, len(ids)]))


def _tokens_beyond(place: int, ids: Sequence[int], codec: Codec, *, special: bool = False) -> int:
    """The fewest tokens that spell the text up to a place, or more."""
    return bisect_left(range(len(ids)), place, key=lambda count: _spelled(ids[:count], codec, special=special))


def _spelled(ids: Sequence[int], codec: Codec, *, special: bool = False) -> int:
    """The characters that tokens spell; a character may take several of them."""
    return len(codec.decode(ids, special=special).rstrip("\ufffd"))


def sentence_evidence(
    whole: Evidence, counts: Sequence[int], texts: Sequence[str], *, known: int = 0
) -> tuple[Evidence | None, ...]:
    """The evidence about each sentence of an answer, of so many of its tokens; None for one without a token.

    The first `known` are scored already, and get none.
    """
    spans = list(pairwise(accumulate(counts, initial=0)))
    return (*(None,) * known, *part_evidence(whole, spans[known:], texts[known:]))


def part_evidence(whole: Evidence, spans: Sequence[Span], texts: Sequence[str]) -> list[Evidence | None]:
    """The evidence about parts of an answer, each given everything before it: tokens [begin, end), and their text.

    None for a part without a token.
    """
    answer = whole.answer
    parts = [
        replace(
            answer,
            text=text,
            ids=answer.ids[begin:end],
            preceding=(*answer.preceding, *answer.ids[:begin]),
            written=(*answer.preceding, *answer.ids),
        )
        for (begin, end), text in zip(spans, texts, strict=True)
        if end > begin
    ]
    scorer, sampler = whole.scoring.model
    tapes = [whole.scoring.tape(whole.row)] * len(parts)
    found = iter(BatchScoring(scorer, parts, sampler, tapes=tapes, in_context=True).evidence)
    return [next(found) if end > begin else None for begin, end in spans]


def parts_of(answer: Evidence, spans: Sequence[Span], codec: Codec) -> list[Evidence | None]:
    """The evidence about pieces of an answer's text as its tokens spell it, in order (`token_ranges`)."""
    ids = answer.response_ids
    ranges = token_ranges(ids, spans, codec)
    return part_evidence(answer, ranges, [codec.decode(ids[begin:end]) for begin, end in ranges])


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


def sentences_of(answer: Evidence, codec: Codec, *, known: int = 0) -> list[tuple[Span, Evidence | None]] | None:
    """The sentences of an answer's text, each with its evidence (`LanguageModel.sentences`), made once."""

    def work(_: Sequence[Evidence]) -> Sequence[list[tuple[Span, Evidence | None]] | None]:
        spans = sentences(answer.text)
        counts = token_counts(answer.response_ids, answer.text, spans, codec)
        if counts is None:
            return [None]
        texts = [answer.text[begin:end] for begin, end in spans]
        return [list(zip(spans, sentence_evidence(answer, counts, texts, known=known), strict=True))]

    return answer.scoring.together(("sentences", known), work, answer.row, alone=True)


@dataclass(frozen=True)
class EndedSentences:
    """The sentences that have ended in an answer that is still being written.

    `found` is the evidence about the new ones. With the first `tokens` that were written, those of a thought included,
    the answer would end behind the last of them; the first `scored` belong to them.
    """

    answer: Evidence
    spans: Sequence[Span]
    found: Sequence[Evidence | None]
    tokens: int
    scored: int


def ended_sentences(answer: Evidence, spans: Sequence[Span], codec: Codec, *, known: int) -> EndedSentences | None:
    """Those of an answer whose first `known` are scored already; None where its tokens spell another text."""
    counts = token_counts(answer.response_ids, answer.text, [*spans, (spans[-1][1], len(answer.text))], codec)
    if counts is None:
        return None
    texts = [answer.text[begin:end] for begin, end in spans]
    found = sentence_evidence(answer, counts[:-1], texts, known=known)[known:]
    end = codec.decode(answer.response_ids).find(answer.text) + len(answer.text[: spans[-1][1]].rstrip())
    before = len(answer.preceding_ids)
    tokens = before + _tokens_beyond(end, answer.response_ids, codec)
    return EndedSentences(answer, spans, found, tokens, before + sum(counts[:-1]))


@dataclass(frozen=True)
class Segment:
    """A piece of a response: `text` is response[start:end], white space behind it included.

    `scores` are those of its tokens, given everything before them; None where no token ends inside it.
    """

    text: str
    start: int
    end: int
    scores: GradientScores | None


def score_segments(
    scorer: Scorer,
    prompt: Prompt,
    response: TokenizedText,
    *,
    objective: Objective,
    before: Sequence[int] = (),
) -> list[Segment]:
    """The sentences of a response with their scores: one pass reads it for all of them.

    The paper's appendix expects long answers to dilute the gradient and points to scoring claim by claim. A segment's
    objective is the answer's own with the segment's tokens alone in the sum; the text before it is its context.

    `before` are the tokens between the prompt and the response, its thought: its context like the prompt.
    """
    spans = sentences(response.text)
    counts, written = response.counts(spans), (*before, *response.ids)
    ends = pairwise(accumulate(counts, initial=len(before)))
    rows = [
        Row.of(prompt.ids, written, prompt.semantic_token.offset, objective, before=begin, end=end, in_context=True)
        for begin, end in ends
        if end > begin
    ]
    scores = iter(scorer.score(rows, objective))
    return [
        Segment(response.text[start:end], start, end, next(scores) if count else None)
        for (start, end), count in zip(spans, counts, strict=True)
    ]

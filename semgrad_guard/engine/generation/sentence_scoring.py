"""The sentences of one answer, each given everything before it: as evidence, while it is written, and of any text.

A token belongs to the sentence of its last character, in the ids that were written: most tokens begin with the space
before their word, which belongs to the sentence before.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any
from weakref import ref

from semgrad_guard.engine.generation.generation import BatchScoring, Evidence, TimedScores, Written
from semgrad_guard.engine.generation.visible import Piece
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.prompts.responses import Codec
from semgrad_guard.engine.prompts.semantic_token import TokenizedText
from semgrad_guard.engine.replay.batch import TokenBatch
from semgrad_guard.engine.scoring.gradients import GradientScores
from semgrad_guard.engine.scoring.scorer import Scorer, clean_slate
from semgrad_guard.engine.sentences import By, Span, decided, sentences, split


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


def _tokens_beyond(place: int, ids: Sequence[int], codec: Codec) -> int:
    """The fewest tokens that spell the text up to a place, or more."""
    return bisect_left(range(len(ids)), place, key=lambda count: _spelled(ids[:count], codec))


def _spelled(ids: Sequence[int], codec: Codec) -> int:
    """The characters that tokens spell; a character may take several of them."""
    return len(codec.decode(ids).rstrip("\ufffd"))


def sentence_evidence(
    answer: Evidence, counts: Sequence[int], texts: Sequence[str], *, known: int = 0
) -> tuple[Evidence | None, ...]:
    """The evidence about each sentence of an answer, of so many of its tokens; None for one without a token.

    The first `known` are scored already, and get none.
    """
    new = list(zip(counts, texts, strict=True))[known:]
    scoring = SentenceScoring(answer, [(count, text) for count, text in new if count], begin=sum(counts[:known]))
    found = iter(scoring.evidence)
    return (*(None,) * known, *(next(found) if count else None for count, _ in new))


def sentences_of(answer: Evidence, codec: Codec, *, known: int = 0) -> list[tuple[Span, Evidence | None]] | None:
    """The sentences of an answer's text, each with its evidence (`LanguageModel.sentences`), made once."""

    def work(_: Sequence[Evidence]) -> Sequence[list[tuple[Span, Evidence | None]] | None]:
        spans = sentences(answer.text)
        counts = token_counts(answer.response_ids, answer.text, spans, codec)
        if counts is None:
            return [None]
        texts = [answer.text[begin:end] for begin, end in spans]
        return [list(zip(spans, sentence_evidence(answer, counts, texts, known=known), strict=True))]

    return answer.scoring.together((SentenceScoring, known), work, answer.row, alone=True)


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


def score_together(answers: Iterable[Iterable[Evidence | None]]) -> None:
    """Have sentences of several answers scored in one backward pass."""
    firsts = [next((own.scoring for own in found if own is not None), None) for found in answers]
    scorings = [one for one in firsts if isinstance(one, SentenceScoring)]
    for one in scorings:
        one.beside = [ref(other) for other in scorings]


class SentenceScoring(BatchScoring):
    """Like `BatchScoring`, of the sentences of one answer behind its token `begin` in the place of several answers."""

    def __init__(self, answer: Evidence, sentences: Sequence[tuple[int, str]], *, begin: int = 0) -> None:
        whole = answer.scoring
        ends = list(accumulate((count for count, _ in sentences), initial=begin))
        ids, before = answer.response_ids, answer.preceding_ids
        super().__init__(
            whole._scorer,
            [answer.prompt] * len(sentences),
            [ids[begin:end] for begin, end in pairwise(ends)],
            whole._captured if len(whole.prompts) == 1 else whole.part([answer.row])._captured,
            texts=[text for _, text in sentences],
            sampler=whole._model[1],
            stop=whole.stop,
            reasoning=[answer.reasoning] * len(sentences),
            preceding=[(*before, *ids[:begin]) for begin in ends[:-1]],
        )
        self.beside: Sequence[ref[SentenceScoring]] = ()
        """Those that are scored together with it, itself among them, as long as their answers are needed."""
        self._whole = ((*before, *ids[:begin]), ids[begin : ends[-1]])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "beside": ()}

    def _laid_out(self, rows: Sequence[Written], objective: Objective | None = None) -> TokenBatch:
        """One row, of which every sentence is a part."""
        if rows is not self._responses:
            return super()._laid_out(rows, objective)
        (before, ids), prompt = self._whole, self.prompts[0]
        with clean_slate():
            return TokenBatch.of(
                [prompt.ids],
                [(*before, *ids)],
                [-1 if objective is None else prompt.semantic_token.offset],
                self._scorer.device,
                objective=objective,
                segments=[[len(own) for own in self._ids]],
                before=[len(before)],
            )

    def _score(self, objective: Objective) -> tuple[TimedScores, ...]:
        began, others = time.perf_counter(), [one for other in self.beside if (one := other())]
        group = [one for one in others if objective not in one._done] or [self]
        rows = [(one._laid_out(one._responses, objective), one._captured) for one in group]
        scored = self._scorer.score_sentences(rows, objective)
        share = (time.perf_counter() - began) * 1000 / sum(map(len, scored))
        for one, parts in zip(group, scored, strict=True):
            one._forget_another_models()
            one._captured, one.beside = None, ()
            one._done[objective] = tuple(TimedScores(scores, share) for scores in parts)
        return self._done[objective]


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
    by: By,
    objective: Objective,
    before: Sequence[int] = (),
) -> list[Segment]:
    """The segments of a response with their scores: one pass reads it for all of them.

    The paper's appendix expects long answers to dilute the gradient and points to scoring claim by claim. A segment's
    objective is the answer's own with the segment's tokens alone in the sum; the text before it is its context.

    `before` are the tokens between the prompt and the response, its thought: its context like the prompt.
    """
    spans = split(response.text, by)
    counts = response.counts(spans)
    with clean_slate():
        batch = TokenBatch.of(
            [prompt.ids],
            [(*before, *response.ids)],
            [prompt.semantic_token.offset],
            scorer.device,
            objective=objective,
            segments=[[count for count in counts if count]],
            before=[len(before)],
        )
    scores = iter(scorer.score_sentences([(batch, None)], objective)[0])
    return [
        Segment(response.text[start:end], start, end, next(scores) if count else None)
        for (start, end), count in zip(spans, counts, strict=True)
    ]

"""The sentences of one answer as evidence, each given everything before it: one replay of the answer serves them all.

A token belongs to the sentence of its last character, in the ids that were written: most tokens begin with the space
before their word, which belongs to the sentence before. Gradients flow through thought and earlier sentences, as they
do in the whole answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate, pairwise

from semgrad_guard.engine.generation.generation import BatchScoring, Evidence, TimedScores, Written
from semgrad_guard.engine.generation.visible import Codec
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.batch import TokenBatch
from semgrad_guard.engine.scoring.scorer import clean_slate
from semgrad_guard.engine.sentences import Span


def token_counts(ids: Sequence[int], text: str, spans: Sequence[Span], codec: Codec) -> tuple[int, ...] | None:
    """How many of an answer's tokens each sentence of its text has; None where they do not spell that text."""
    offset = codec.decode(ids).find(text)
    if offset < 0:
        return None
    reached = [0]
    for _, end in spans[:-1]:
        reached.append(max(reached[-1], _tokens_until(offset + end, ids, codec)))
    return tuple(after - before for before, after in pairwise([*reached, len(ids)]))


def _tokens_until(place: int, ids: Sequence[int], codec: Codec) -> int:
    """The fewest tokens that spell the text up to a place; without the one that spells more than that."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _spelled(ids[:middle], codec) >= place else (middle + 1, high)
    return low if _spelled(ids[:low], codec) <= place else low - 1


def _spelled(ids: Sequence[int], codec: Codec) -> int:
    """The characters that tokens spell; a character may take several of them."""
    return len(codec.decode(ids).rstrip("\ufffd"))


def sentence_evidence(answer: Evidence, counts: Sequence[int], texts: Sequence[str]) -> tuple[Evidence | None, ...]:
    """The evidence about each sentence of an answer, of so many of its tokens; None for one without a token."""
    scoring = SentenceScoring(answer, [(count, text) for count, text in zip(counts, texts, strict=True) if count])
    found = iter(scoring.evidence)
    return tuple(next(found) if count else None for count in counts)


class SentenceScoring(BatchScoring):
    """Like `BatchScoring`, of the sentences of one answer in the place of several answers."""

    def __init__(self, answer: Evidence, sentences: Sequence[tuple[int, str]]) -> None:
        whole = answer.scoring
        ends = list(accumulate((count for count, _ in sentences), initial=0))
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
        self._whole = (before, ids)

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
        began = time.perf_counter()
        (scored,) = self._scorer.score_parts(self._laid_out(self._responses, objective), objective, self._captured)
        self._captured = None
        share = (time.perf_counter() - began) * 1000 / len(scored)
        return tuple(TimedScores(scores, share) for scores in scored)

"""A response taken apart into sentences or clauses, each scored by itself.

The paper's appendix expects long answers to dilute the gradient and points to scoring claim by claim. A segment's
objective is the answer's own with the segment's tokens alone in the sum; the text before it is its context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.prompts.semantic_token import TokenizedText
from semgrad_guard.engine.replay.batch import TokenBatch
from semgrad_guard.engine.scoring.gradients import GradientScores
from semgrad_guard.engine.scoring.scorer import Scorer, clean_slate
from semgrad_guard.engine.sentences import By, split


@dataclass(frozen=True)
class Segment:
    """A piece of a response: `text` is response[start:end], white space behind it included.

    `scores` are those of its tokens, given everything before them; None where no token ends inside it.
    """

    text: str
    start: int
    end: int
    scores: GradientScores | None


def token_counts(text: TokenizedText, spans: Sequence[tuple[int, int]]) -> list[int]:
    """How many of the text's tokens belong to each span: a token belongs to the span of its last character.

    (Most tokens begin with the space before their word, which belongs to the segment before.)
    """
    reached = [0]
    for _, end in spans[:-1]:
        reached.append(max(reached[-1], text.first_token_of(end)))
    return [after - before for before, after in pairwise([*reached, len(text.ids)])]


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

    `before` are the tokens between the prompt and the response, its thought: its context like the prompt.
    """
    spans = split(response.text, by)
    counts = token_counts(response, spans)
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

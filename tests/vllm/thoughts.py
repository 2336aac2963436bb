"""What vLLM and our engine write and score where a model thinks, as JSON: `python thoughts.py FOLDER LONG OUTPUT`.

The prompt of this random model opens a thought, which it never closes: the budget is the thought's length.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from child import numbers, scores_by
from passes import passes_of

from semgrad_guard import GenerationOptions, Guard, LanguageModel, Policy
from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.writing import BatchRequest
from semgrad_guard.vllm import VLLMLanguageModel

QUESTIONS = ["What is the capital of Mongolia?", "Name a metal.", "Who wrote Hamlet, and when?"]
ANSWER = 12
OFF = {"enable_thinking": False}


def found(folder: str, long: int) -> dict[str, object]:
    """The answers after thoughts of 1, some and `long` tokens, and without one, in one batch of vLLM's."""
    engine: dict[str, Any] = {"dtype": "float32", "max_model_len": long + 200, "max_num_seqs": 8}
    served = VLLMLanguageModel.from_pretrained(folder, **engine)
    own = LanguageModel.from_pretrained(folder, dtype="float32")
    questions = [(QUESTIONS[0], 1), (QUESTIONS[1], 9), (QUESTIONS[2], long)]
    passes = passes_of(served._scorer)
    theirs = [written(served, question, budget) for question, budget in questions]
    theirs += served.generate_batch(QUESTIONS[:1], GenerationOptions(max_tokens=ANSWER), template_options=OFF)
    together = batched(served, questions)
    scored: list[Any] = [answer.evidence.gradients() for answer in theirs]
    ours = [written(own, question, budget) for question, budget in questions[:2]]
    return {
        "thoughts": [len(answer.reasoning.ids) if answer.reasoning else 0 for answer in theirs],
        "written": [tokens(theirs[:3]), tokens(together)],
        "ours": [tokens(theirs[:2]), tokens(ours)],
        "scores": [numbers([found.scores for found in scored]), numbers(own_scores(own, theirs))],
        "tiers": sorted({found.scores.tier for found in scored}),
        "passes": len(passes),
        "limits": len(served._engine.answers),
        "cut": cut(served),
        "withheld": withheld(served),
        "plain": tokens(served.generate_batch(QUESTIONS[:1], GenerationOptions(max_tokens=40))),
        "own_plain": tokens(own.generate_batch(QUESTIONS[:1], GenerationOptions(max_tokens=40))),
    }


def written(model: LanguageModel, question: str, budget: int) -> Generation:
    """An answer after so many tokens of thought."""
    return model.generate(question, limited(budget))


def limited(budget: int) -> GenerationOptions:
    """A budget, the tokens that close a thought, and an answer."""
    return GenerationOptions(max_tokens=budget + 12 + ANSWER, max_thinking_tokens=budget)


def batched(model: LanguageModel, questions: Iterable[tuple[str, int]]) -> list[Generation]:
    """The same in one running batch, each with its own budget."""
    batch = model.running_batch()
    rows = batch.join([BatchRequest(model.render(question), limited(budget)) for question, budget in questions])
    while batch.rows:
        batch.step()
    return batch.generations(rows)


def tokens(answers: Iterable[Generation]) -> list[list[list[int]]]:
    """The tokens before each answer, and its own."""
    return [[list(answer.preceding_ids), list(answer.response_ids)] for answer in answers]


def own_scores(own: LanguageModel, answers: Iterable[Generation]) -> list[Any]:
    """The scores of the same tokens by our engine, each by itself, given the same thought."""
    return [scores_by(own, [answer])[0] for answer in answers]


def cut(served: LanguageModel) -> dict[str, object]:
    """An answer that had not begun."""
    verdict = Guard(served, Policy(threshold=1e9), options=GenerationOptions(max_tokens=6))(QUESTIONS[0])
    return {"status": verdict.status, "action": verdict.action, "promised": verdict.promised, "reason": verdict.reason}


def withheld(served: LanguageModel) -> dict[str, object]:
    """An answer that is let through, and one that is not: where their thoughts are."""
    options = limited(9)
    through, held = (Guard(served, Policy(threshold=t), options=options)(QUESTIONS[0]) for t in (1e9, -1.0))
    return {
        "through": [through.action, bool(through.details.reasoning), str(through.details.reasoning) in through.text],
        "held": [held.action, held.details.reasoning, held.text],
    }


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(found(sys.argv[1], int(sys.argv[2]))))

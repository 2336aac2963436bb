"""What a process with vLLM finds about one checkpoint, as JSON: `python child.py FOLDER DTYPE OUTPUT`.

vLLM lives in a process of its own here: it takes memory, threads and signal handlers, and gives none of them back.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from passes import evidence_by, passes_of, shared

from semgrad_guard import GenerationOptions, Guard, HybridGrad, LanguageModel, Policy, Router
from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.sentence_evidence import sentences_of
from semgrad_guard.engine.interruption import Stop, stopping
from semgrad_guard.engine.objective import Objective
from semgrad_guard.errors import AnswerCancelledError, BindingMismatchError, InputError
from semgrad_guard.estimators import MaxProbability
from semgrad_guard.guard import Answerer
from semgrad_guard.vllm import VLLMLanguageModel

QUESTIONS = [
    "What is the capital of Mongolia?",
    "Name a metal.",
    "Who wrote Hamlet, and when was it played for the first time? Answer in one sentence.",
]
PARAGRAPH = "Tell me about Paris in three sentences."
LONG = GenerationOptions(max_tokens=24)
PLAIN = Objective(gradients=False)


def found(folder: str, dtype: str) -> dict[str, object]:
    """Everything that the tests look at."""
    served = VLLMLanguageModel.from_pretrained(folder, dtype=dtype, max_model_len=256, max_num_seqs=8)
    own = LanguageModel.from_pretrained(folder, dtype=dtype)
    state = torch.random.get_rng_state()
    theirs, ours = served.generate_batch(QUESTIONS, LONG), own.generate_batch(QUESTIONS, LONG)
    again = served.generate_batch(QUESTIONS, LONG)
    passes = passes_of(served.scorer)
    scores = [answer.evidence.gradients().scores for answer in theirs]
    passes_of_scores = len(passes)
    after = served.generate_batch(QUESTIONS, LONG)
    text = theirs[0].text
    return {
        "shared": [shared(served._model, served._engine.runner.model), len(list(served._model.parameters()))],
        "biases": sum(name.endswith("bias") for name, _ in served._model.named_parameters()),
        "end_tokens": [served.end_tokens, own.end_tokens],
        "ids": [[list(answer.response_ids) for answer in answers] for answers in (theirs, again, after, ours)],
        "ends": [[answer.finish_reason, answer.cut, answer.completion_tokens] for answer in theirs],
        "own_ends": [[answer.finish_reason, answer.cut, answer.completion_tokens] for answer in ours],
        "scores": [[score.semgrad, score.paragrad, score.mean_entropy] for score in scores],
        "tiers": sorted({score.tier for score in scores}),
        "passes_of_scores": passes_of_scores,
        "same_answers": [numbers(scores_by(own, theirs)), numbers(scores)],
        # The same texts by our engine on weights of its own.
        "own_scores": [
            [score.semgrad, score.paragrad, score.mean_entropy]
            for score in (own.score(q, a.text) for q, a in zip(QUESTIONS, theirs, strict=True))
        ],
        "scored_again": [
            [score.semgrad, score.paragrad, score.mean_entropy]
            for score in (served.score(q, a.text) for q, a in zip(QUESTIONS, theirs, strict=True))
        ],
        "observed": observed(served, own),
        "sentences": sentences(served, own),
        "sentence_stream": sentence_stream(served),
        "half_apart": half_apart(served, own) if dtype == "bfloat16" else [],
        "refused": refused(served),
        "rng_untouched": torch.equal(state, torch.random.get_rng_state()),
        "stream": [text, "".join(live(served, LONG).stream(QUESTIONS[0]))],
        "stopped": stopped(served, text),
        "sampled": sampled(served),
        "cancelled": cancelled(served),
        "guarded": guarded(served, own),
    }


def observed(served: LanguageModel, own: LanguageModel) -> dict[str, object]:
    """What is read off vLLM's own passes, how many passes of ours that took, and what our engine alone observes."""
    answers = served.generate_batch([*QUESTIONS, QUESTIONS[0] * 3], GenerationOptions(max_tokens=9))
    passes = passes_of(served.scorer)
    found = [told_of(answer) for answer in answers]
    count = len(passes)
    theirs = own.generate_batch([*QUESTIONS, QUESTIONS[0] * 3], GenerationOptions(max_tokens=9))
    without = served.generate_batch([*QUESTIONS, QUESTIONS[0] * 3], GenerationOptions(max_tokens=9), objective=PLAIN)
    before = len(passes)
    plain = [told_of(answer) for answer in without]
    return {
        "told": found,
        "own": [told_of(answer) for answer in theirs],
        "without": plain,
        "passes": count + len(passes) - before,
    }


def sentences(served: LanguageModel, own: LanguageModel) -> list[list[list[float | None]]]:
    """Each sentence's scores by estimators that take a gradient and by one that takes none, here and by our engine."""
    answer = served.generate(PARAGRAPH, GenerationOptions(max_tokens=60))
    again = evidence_by(own, [answer])[0]
    found: list[list[list[float | None]]] = []
    for estimator in (HybridGrad(), MaxProbability()):
        sides = [sentences_of(evidence) for evidence in (answer.evidence, again)]
        found.append(
            [[None if part is None else estimator(part).uncertainty for _, part in side or ()] for side in sides]
        )
    return found


def sentence_stream(served: LanguageModel) -> dict[str, Any]:
    """A stream whose sentences leave as they end, and the same where the least certain one ends the answer."""
    options = GenerationOptions(max_tokens=60)
    guard = Guard(served, Policy(threshold=1e9, on_cut="score"), by="sentence", options=options)
    whole, stream = guard(PARAGRAPH), guard.stream(PARAGRAPH)
    pieces = [(piece, len(stream.sentences)) for piece in stream]
    scores = [[one.uncertainty or 0.0 for one in verdict.sentences] for verdict in (whole, stream.verdict)]
    strict = Guard(served, Policy(threshold=max(scores[0]) * 0.999, on_cut="score"), by="sentence", options=options)
    stopped, left = strict(PARAGRAPH), strict.stream(PARAGRAPH)
    return {
        "pieces": pieces,
        "texts": [[whole.text, stream.verdict.text], [stopped.text, "".join(left)]],
        "scores": scores,
        "actions": [[one.action for one in verdict.sentences] for verdict in (stopped, left.verdict)],
        "unfinished": cast("Any", served)._llm.llm_engine.has_unfinished_requests(),
    }


def scores_by(own: LanguageModel, answers: Sequence[Generation]) -> list[Any]:
    """The scores of the same tokens, as our engine reads them, each by itself."""
    return [one.scoring.scores(Objective(), 0).scores for answer in answers for one in evidence_by(own, [answer])]


def numbers(scores: Sequence[Any]) -> list[list[float]]:
    """SemGrad, ParaGrad, HybridGrad and mean entropy of each."""
    return [[score.semgrad, score.paragrad, score.hybridgrad, score.mean_entropy] for score in scores]


def half_apart(served: LanguageModel, own: LanguageModel) -> list[float]:
    """How far HybridGrad of many answers is from our engine's for the same tokens, as a part of it."""
    answers = served.generate_batch([f"What is {n} of {w}?" for n in range(8) for w in ("it", "glass")], LONG)
    pairs = zip(answers, scores_by(own, answers), strict=True)
    return [abs(mine.evidence.gradients().scores.hybridgrad / its.hybridgrad - 1) for mine, its in pairs]


def told_of(answer: Generation) -> list[list[float]]:
    """The numbers of an observation."""
    seen = answer.evidence.observed()
    assert seen is not None
    return [list(seen.log_probs), list(seen.entropies), list(seen.state)]


def refused(served: VLLMLanguageModel) -> dict[str, object]:
    """A prompt that vLLM does not take, after one that it takes: neither is left behind."""
    prompt = served.render(QUESTIONS[0])
    longer = replace(prompt, ids=prompt.ids * 60)
    try:
        batch = served.running_batch()
        batch.join([batch.answer(prompt, LONG), batch.answer(longer, LONG)])
    except InputError as error:
        left = served._llm.llm_engine.has_unfinished_requests()
        return {"error": str(error), "left": left, "next": len(served.generate(QUESTIONS[0], LONG).response_ids)}
    return {"error": None}


def stopped(served: LanguageModel, text: str) -> list[str]:
    """A stop string from the middle of an answer: what is left, and why it ended."""
    middle = text[len(text) // 2 :][:4]
    answer = served.generate(QUESTIONS[0], GenerationOptions(max_tokens=24, stop=(middle,)))
    return [text.partition(middle)[0], answer.text, answer.finish_reason]


def sampled(served: LanguageModel) -> list[str]:
    """The same seed twice, and another one."""
    options = [GenerationOptions(max_tokens=24, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    return [served.generate(QUESTIONS[0], choice).text for choice in options]


def live(served: LanguageModel, options: GenerationOptions) -> Guard:
    """A guard whose streams are live."""
    return Guard(served, Router(Policy(threshold=1e9), mode="annotate"), options=options)


def cancelled(served: VLLMLanguageModel) -> dict[str, object]:
    """A stream that is left stops the engine; a call that is cancelled reports it."""
    stream = live(served, GenerationOptions(max_tokens=200)).stream(QUESTIONS[0])
    next(iter(stream))
    stream.close()
    served.generate("hello", GenerationOptions(max_tokens=1))  # its turn comes when the stream has let go
    idle = not served._llm.llm_engine.has_unfinished_requests()
    stop = Stop()
    stop.cancel()
    try:
        with stopping(stop):
            served.generate(QUESTIONS[0], LONG)
    except AnswerCancelledError as error:
        return {"idle": idle, "error": type(error).__name__, "left": served._llm.llm_engine.has_unfinished_requests()}
    return {"idle": idle, "error": None}


def guarded(served: LanguageModel, own: LanguageModel) -> dict[str, object]:
    """A guard around it, and calibrations of one engine at the other."""
    verdicts = [Guard(served, Policy(threshold=threshold, on_cut="score"))(QUESTIONS[0]) for threshold in (1e9, -1.0)]
    mine, theirs = (Answerer(model, HybridGrad()).binding() for model in (own, served))
    refused = []
    for one, other in ((mine, theirs), (theirs, mine)):
        try:
            one.require(other)
        except BindingMismatchError as error:
            refused.append("fingerprint" in str(error))
    return {
        "actions": [verdict.action for verdict in verdicts],
        "refused": refused,
    }


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(found(sys.argv[1], sys.argv[2])))

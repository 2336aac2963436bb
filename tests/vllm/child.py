"""What a process with vLLM finds about one checkpoint, as JSON: `python child.py FOLDER DTYPE OUTPUT`.

vLLM lives in a process of its own here: it takes memory, threads and signal handlers, and gives none of them back.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

import torch

from semgrad_guard import GenerationOptions, Guard, HybridGrad, LanguageModel, Policy
from semgrad_guard.engine.interruption import Stop, stopping
from semgrad_guard.errors import AnswerCancelledError, BindingMismatchError
from semgrad_guard.guard import Answerer
from semgrad_guard.vllm import VLLMLanguageModel
from semgrad_guard.vllm.shared_weights import shared

QUESTIONS = [
    "What is the capital of Mongolia?",
    "Name a metal.",
    "Who wrote Hamlet, and when was it played for the first time? Answer in one sentence.",
]
LONG = GenerationOptions(max_tokens=24)


def found(folder: str, dtype: str) -> dict[str, object]:
    """Everything that the tests look at."""
    served = VLLMLanguageModel.from_pretrained(folder, dtype=dtype, max_model_len=256, max_num_seqs=8)
    own = LanguageModel.from_pretrained(folder, dtype=dtype)
    state = torch.random.get_rng_state()
    theirs, ours = served.generate_batch(QUESTIONS, LONG), own.generate_batch(QUESTIONS, LONG)
    again = served.generate_batch(QUESTIONS, LONG)
    scores = [each.evidence.gradients().scores for each in theirs]
    after = served.generate_batch(QUESTIONS, LONG)
    text = theirs[0].text
    model = served._llm.apply_model(lambda model: model)[0]
    return {
        "shared": [shared(served._model, model), len(list(served._model.parameters()))],
        "ids": [[list(each.response_ids) for each in answers] for answers in (theirs, again, after, ours)],
        "ends": [[each.finish_reason, each.cut, each.completion_tokens] for each in theirs],
        "own_ends": [[each.finish_reason, each.cut, each.completion_tokens] for each in ours],
        "scores": [[each.semgrad, each.paragrad, each.mean_entropy] for each in scores],
        "own_answers_scores": [
            [each.semgrad, each.paragrad, each.mean_entropy] for each in (a.evidence.gradients().scores for a in ours)
        ],
        # The same texts by our engine on weights of its own.
        "own_scores": [
            [each.semgrad, each.paragrad, each.mean_entropy]
            for each in (own.score(q, a.text) for q, a in zip(QUESTIONS, theirs, strict=True))
        ],
        "scored_again": [
            [each.semgrad, each.paragrad, each.mean_entropy]
            for each in (served.score(q, a.text) for q, a in zip(QUESTIONS, theirs, strict=True))
        ],
        "rng_untouched": torch.equal(state, torch.random.get_rng_state()),
        "stream": [text, "".join(served.stream(QUESTIONS[0], LONG))],
        "stopped": stopped(served, text),
        "sampled": sampled(served),
        "cancelled": cancelled(served),
        "guarded": guarded(served, own),
    }


def stopped(served: LanguageModel, text: str) -> list[str]:
    """A stop string from the middle of an answer: what is left, and why it ended."""
    middle = text[len(text) // 2 :][:4]
    answer = served.generate(QUESTIONS[0], GenerationOptions(max_tokens=24, stop=(middle,)))
    return [text.partition(middle)[0], answer.text, answer.finish_reason]


def sampled(served: LanguageModel) -> list[str]:
    """The same seed twice, and another one."""
    options = [GenerationOptions(max_tokens=24, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    return [served.generate(QUESTIONS[0], each).text for each in options]


def cancelled(served: VLLMLanguageModel) -> dict[str, object]:
    """A stream that is left stops the engine; a call that is cancelled says so."""
    stream = served.stream(QUESTIONS[0], GenerationOptions(max_tokens=200))
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
    verdicts = [Guard(served, Policy(threshold=threshold))(QUESTIONS[0]) for threshold in (1e9, -1.0)]
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

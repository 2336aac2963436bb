"""Requests that join and leave vLLM's batch where there is too little room, as JSON: `python mixed.py FOLDER N OUTPUT`.

Prompts are read in pieces, share their beginnings, are preempted and read again; some requests are let go. Each answer
is compared with what vLLM alone writes to the same prompt, and its numbers with our engine's for the same tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

from passes import evidence_by, passes_of

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.batch import RunningBatch
from semgrad_guard.engine.answers.writing import WrittenAnswer
from semgrad_guard.engine.answers.writing_model import likeliest
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.vllm import VLLMLanguageModel
from semgrad_guard.vllm.shared_weights import library

WORDS = ("river", "stone", "paper", "metal", "garden", "window", "letter", "number", "music", "winter", "bridge")
SYSTEM = "You answer in one sentence, and say so when you do not know. " * 2
ROWS, TOGETHER = 16, 16
NEAR_TIE = 1e-4
"""Nats between the two likeliest tokens, below which float32 does not tell which is the likelier."""


@dataclass
class Found:
    """What was compared: of answers, those whose tokens changed, and how far numbers are apart."""

    answers: int = 0
    let_go: int = 0
    preempted: int = 0
    cached: int = 0
    changed: list[int] = field(default_factory=list[int])
    near_ties: list[int] = field(default_factory=list[int])
    unsteady: list[int] = field(default_factory=list[int])
    """Those that vLLM alone does not write the same way twice."""
    second_passes: int = 0
    replayed: int = 0
    """Answers whose gradients were taken from what vLLM's passes had left."""
    observed_apart: list[float] = field(default_factory=list[float])
    scores_apart: list[float] = field(default_factory=list[float])


class Mixed:
    """The requests, vLLM with too little room for them, and our engine on weights of its own."""

    def __init__(self, folder: str, count: int) -> None:
        self.served = VLLMLanguageModel.from_pretrained(
            folder,
            dtype="float32",
            max_model_len=256,
            max_num_seqs=ROWS,
            block_size=32,
            num_gpu_blocks_override=24,  # too few for so many rows
            max_num_batched_tokens=64,  # fewer than most prompts have
            enable_prefix_caching=True,
            disable_log_stats=False,
        )
        self.own, self.random, self.found = LanguageModel.from_pretrained(folder, dtype="float32"), Random(5), Found()
        lengths = Random(7)
        self.asked = [
            (self.served.render(question), GenerationOptions(max_tokens=lengths.randint(1, 24)))
            for question in questions(count)
        ]
        self.passes = passes_of(self.served.scorer)

    def run(self) -> Found:
        """All of them, in a batch that is never the same for long."""
        alone, again, batch = self.written_alone(), self.written_alone(), self.served.running_batch()
        self.found.unsteady = [n for n, (one, other) in enumerate(zip(alone, again, strict=True)) if one != other]
        waiting, running, done = iter(enumerate(self.asked)), dict[int, WrittenAnswer](), dict[int, WrittenAnswer]()
        while self.join(batch, waiting, running) or running:
            batch.step()
            for number, row in list(running.items()):
                if self.random.random() < 0.002:
                    batch.drop([running.pop(number)])
                    self.found.let_go += 1
                elif row.done:
                    done[number] = running.pop(number)
            if len(done) >= TOGETHER or not running:
                self.compare(batch.generations(list(done.values())), list(done), alone)
                done.clear()
        counted = {metric.name: metric.value for metric in self.served._llm.get_metrics() if hasattr(metric, "value")}
        self.found.preempted = int(counted["vllm:num_preemptions"])
        self.found.cached = int(counted["vllm:prefix_cache_hits"])
        return self.found

    def join(
        self,
        batch: RunningBatch,
        waiting: Iterator[tuple[int, tuple[Prompt, GenerationOptions]]],
        running: dict[int, WrittenAnswer],
    ) -> bool:
        """As many as there is place for, several at a time or none; more than vLLM works on at once."""
        room = min(2 * ROWS - len(running), self.random.randint(0, 8) if running else 8)
        some = {number: batch.answer(*request) for _, (number, request) in zip(range(room), waiting, strict=False)}
        batch.join([*some.values()])
        running.update(some)
        return bool(some)

    def written_alone(self) -> list[list[int]]:
        """What vLLM writes without us, and without what it remembers of it."""
        sampling = [
            library().SamplingParams(
                max_tokens=options.max_tokens, temperature=0.0, stop_token_ids=list(self.served.end_tokens)
            )
            for _, options in self.asked
        ]
        prompts = [{"prompt_token_ids": list(prompt.ids)} for prompt, _ in self.asked]
        outputs = self.served._llm.generate(prompts, sampling, use_tqdm=False)
        self.served._llm.reset_prefix_cache()
        ends = self.served.end_tokens
        return [[token for token in output.outputs[0].token_ids if token not in ends] for output in outputs]

    def compare(self, answers: Sequence[Generation], numbers: Sequence[int], alone: Sequence[list[int]]) -> None:
        """Tokens with those written alone, numbers with our engine's."""
        self.found.answers += len(answers)
        before = len(self.passes)
        seen = [answer.evidence.observed() for answer in answers]
        self.found.second_passes += len(self.passes) - before
        for answer, number, mine in zip(answers, numbers, seen, strict=True):
            theirs = list(answer.response_ids)
            if theirs != alone[number] and number not in self.found.unsteady:
                tie = self.is_near_tie(answer, theirs, alone[number])
                (self.found.near_ties if tie else self.found.changed).append(number)
            if mine is not None:
                its = evidence_by(self.own, [answer])[0].observed()
                assert its is not None
                values, true = ([*side.log_probs, *side.entropies, *side.state] for side in (mine, its))
                self.found.observed_apart.append(apart(values, true))
        written = [answer for answer in answers if answer.response_ids]
        if not written:
            return
        self.found.replayed += sum(map(is_left, written))
        for answer, its in zip(written, evidence_by(self.own, written), strict=True):
            gradients, true = answer.evidence.gradients(), its.gradients()
            assert gradients is not None
            assert true is not None
            pairs = [(side.scores.semgrad or 0.0, side.scores.paragrad or 0.0) for side in (gradients, true)]
            self.found.scores_apart.append(max(abs(a - b) / b for a, b in zip(*pairs, strict=True)))

    def is_near_tie(self, answer: Generation, one: Sequence[int], other: Sequence[int]) -> bool:
        """Whether two answers part where two tokens are as likely as each other."""
        first = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        own = evidence_by(self.own, [answer])[0]
        best, second = likeliest(own.model.scorer, own.prompt.ids, (*other[:first], 0), 2)[first]
        return best[1] - second[1] < NEAR_TIE


def is_left(answer: Generation) -> bool:
    """Whether vLLM's passes have left all that a replay takes."""
    tape = answer.evidence.scoring.tape(answer.evidence.row)
    return tape is not None and answer.evidence.answer.row(Objective(), tape).is_on(tape, tape.layer)


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """How far two series are from each other, as a part of the second one's length."""
    return (sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) / sum(b * b for b in other)) ** 0.5


def questions(count: int) -> list[str]:
    """Different ones of very different lengths, half of them with one long beginning."""
    random = Random(11)
    made = [" ".join(random.choices(WORDS, k=random.randint(1, 30))) + f" {n}?" for n in range(count)]
    return [SYSTEM + question if random.random() < 0.5 else question for question in made]


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(asdict(Mixed(sys.argv[1], int(sys.argv[2])).run())))

"""Measure how long the parts of answering take: joining a batch, a decode step, scoring.

    python benchmarks/scale/measure.py --model smollm2 [--threads 1 2] [--rounds 3] --output measured.json
        [--serving serving.json]

For each number of threads and each estimator, in a process that does nothing else: some questions join a running batch,
every answer gets one token more until all are written, and all are scored. What is written with how many answers at
once is kept by the number of answers. `--serving` adds what `benchmarks/serving.py` measured of whole servers, to which
the simulation is fitted and against which it is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from machine import about
from services import Host, Joined, Measured, Parts, Point, Question, Scored, medians
from transformers import LlamaConfig, LlamaForCausalLM

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.generation.running_batch import Asked
from semgrad_guard.estimators import ESTIMATORS, Estimator
from semgrad_guard.evaluation.files import require_writable
from semgrad_guard.files import atomic_write
from semgrad_guard.records import Message, Score
from semgrad_guard.server.writing import AnswerRequest, Writer

NAMES = ("unguarded", "max_probability", "cascade", "hybridgrad")
ROWS = (1, 2, 4, 8, 16, 32)
_HOST_LAYERS = 32
_LENGTHS = 192  # questions whose length, and whose answers' length, the simulation knows


def main() -> None:
    given = _parser().parse_args()
    if given.child:
        print(measured(given).model_dump_json())
        return
    require_writable(given.output)
    found = [_in_a_process(threads, name, given) for threads in given.threads for name in NAMES]
    points = _points(json.loads(given.serving.read_text())) if given.serving else ()
    parts = tuple(each for one in found for each in one.parts)
    whole = found[0].model_copy(update={"parts": parts, "points": tuple(points)})
    atomic_write(given.output, whole.model_dump_json(indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="smollm2")
    made.add_argument("--threads", type=int, nargs="*", default=[1])
    made.add_argument("--tokens", type=int, default=32, help="of an answer, at most (32)")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--serving", type=Path, help="what serving.py --output wrote")
    made.add_argument("--output", type=Path, default=Path("output/measured.json"))
    made.add_argument("--child", help=argparse.SUPPRESS)
    return made


def _in_a_process(threads: int, name: str, given: argparse.Namespace) -> Measured:
    command = [sys.executable, __file__, "--child", name, "--model", given.model, "--tokens", str(given.tokens)]
    command += ["--rounds", str(given.rounds), "--threads", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    said = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment).stdout
    print(f"{name}, {threads} threads: measured", file=sys.stderr)
    return Measured.model_validate_json(said)


def _points(report: dict[str, Any]) -> Iterator[Point]:
    """Of our own servers, the median of the rounds."""
    rounds: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for each in report["points"]:
        if each["server"] in NAMES and "clients" in each:
            rounds.setdefault((each["server"], each["threads"], each["clients"]), []).append(each)
    for (server, threads, clients), found in rounds.items():
        middle = {name: median(each[name] for each in found) for name in ("answers_a_second", "p50", "p99")}
        answers = round(found[0]["answers_a_second"] * found[0]["seconds"])
        yield Point(server=server, threads=threads, clients=clients, each=answers // clients, **middle)


# In a process of its own.


@dataclass(frozen=True)
class Nothing:
    """The estimator of an unguarded server, which looks at nothing."""

    name: Any = "nothing"
    title: Any = "Nothing"
    objective: Any = None

    def settings(self) -> dict[str, Any]:
        """None."""
        return {}

    def __call__(self, evidence: object) -> Score:
        """No doubt."""
        return Score(0.0, None)


def measured(given: argparse.Namespace) -> Measured:
    """The parts of one estimator in this process."""
    from research.smollm2.questions import closed_book

    model = LanguageModel.from_pretrained(given.model)
    estimator, [threads] = _estimator(given.child), given.threads
    asked = [each["question"] for each in closed_book(Random(7))]
    work = _Work(model, estimator, [_request(each, given.tokens) for each in asked])
    work.round(2, 0)  # the first look at the model, and warm caches
    work.clear()
    for number in range(given.rounds):
        for rows in ROWS:
            for again in range(max(1, 8 // rows)):
                work.round(rows, rows * (number + again))
    return Measured(
        machine=about(),
        host=_host(model),
        model=given.model,
        questions=work.lengths(_LENGTHS if given.child == "unguarded" else 0),
        parts=(
            Parts(
                estimator=given.child,
                threads=threads,
                joins=tuple(work.joins),
                steps=medians(work.steps),
                scores=tuple(work.scores),
            ),
        ),
    )


def _host(model: LanguageModel) -> Host:
    """Steps and a score of a model with as many layers as one of 8 billion weights, and next to none."""
    config = LlamaConfig(
        vocab_size=model.tokenizer.vocab_size,
        num_hidden_layers=_HOST_LAYERS,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    tiny = LanguageModel.from_transformers(LlamaForCausalLM(config).eval(), model.tokenizer, name="tiny")
    work = _Work(tiny, _estimator("hybridgrad"), [_request("Who was it?", 8)])
    for _ in range(5):
        work.round(1, 0)
    return Host(
        layers=_HOST_LAYERS,
        step=median(seconds for _, seconds in work.steps),
        score=median(each.seconds for each in work.scores),
    )


def _estimator(name: str) -> Estimator:
    if name != "unguarded":
        return next(kind() for kind in ESTIMATORS if kind.name == name)
    from semgrad_guard.engine.objective import Objective

    return Nothing(objective=Objective(gradients=False))


def _request(question: str, tokens: int) -> AnswerRequest:
    conversation = (Message(role="user", content=question),)
    return AnswerRequest(conversation=conversation, options=GenerationOptions(max_tokens=tokens))


class _Work:
    """What the server's thread does with a batch of requests, each part with a watch beside it."""

    def __init__(self, model: LanguageModel, estimator: Estimator, requests: Sequence[AnswerRequest]) -> None:
        self._model, self._writer, self._requests = model, Writer(model, estimator), requests
        self._batch = model.running_batch(estimator.objective)
        self.clear()

    def clear(self) -> None:
        """Forget what was measured."""
        self.joins, self.steps, self.scores = list[Joined](), list[tuple[int, float]](), list[Scored]()

    def round(self, rows: int, start: int) -> list[Question]:
        """Answer so many requests together, from the first to the last token."""
        requests = [self._requests[(start + each) % len(self._requests)] for each in range(rows)]
        began = time.perf_counter()
        orders = [self._writer.assigned(each) for each in requests]
        answers = self._batch.join([Asked(each.prompt, each.options[0]) for each in orders])
        tokens = sum(len(each.prompt.ids) for each in orders)
        self.joins.append(Joined(rows=rows, tokens=tokens, seconds=time.perf_counter() - began))
        while left := len(self._batch.rows):
            self.steps.append((left, _seconds(self._batch.step)))
        began = time.perf_counter()
        generations = self._batch.generations(answers)
        with self._model.turn:
            for order, generation in zip(orders, generations, strict=True):
                self._writer.drafts(order, [generation])
        written = [len(each.ids) + each.ended for each in answers]
        self.scores.append(Scored(rows=rows, tokens=sum(written), seconds=time.perf_counter() - began))
        return [Question(prompt=len(o.prompt.ids), answer=n) for o, n in zip(orders, written, strict=True)]

    def lengths(self, count: int) -> tuple[Question, ...]:
        """How long questions and answers are."""
        return tuple(each for start in range(0, count, 32) for each in self.round(min(32, count - start), start))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

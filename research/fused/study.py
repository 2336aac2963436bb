"""FusedGrad against the single scores, on the pocket model's own questions: features collected once, analysed at will.

    python -m research.fused.study [--model pocket] [--model FOLDER ...] [--records output/fused]
                               [--report docs/results/fused.md] [--limit N]

Every model answers the same 1,100 questions (closed book and reading, in wordings that its training never showed). One
JSON Lines file a model, named by its weights' fingerprint, keeps features and grades; a stopped run resumes
where it was. The report's tables are made from these files alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from research.fused.report import report
from research.pocket import cases
from research.pocket.cases import Case
from semgrad_guard import GenerationOptions, LanguageModel, Message
from semgrad_guard.engine.scores.scorer import scorer_of
from semgrad_guard.estimators import FusedGrad
from semgrad_guard.evaluation.graders import ExactMatch

WANTED = {
    "known": 200, "rare": 130, "unknown": 60, "several": 130,
    "invented": 260, "frames": 200, "conflict": 60, "memory": 60,
}  # fmt: skip
"""Questions of each kind, evenly spread over all there are; no natural passages, by which nothing may be chosen."""

BATCH = 16
OPTIONS = GenerationOptions(max_tokens=32)
TIMED = 16
"""Batches that are also timed."""


def questions(limit: int | None) -> list[Case]:
    """The questions, in order of length so that batches waste little on padding."""
    by_kind: dict[str, list[Case]] = {}
    for case in (*cases.facts(), *cases.reading(), *cases.beside()):
        by_kind.setdefault(case.kind, []).append(case)
    chosen: list[Case] = []
    for kind, wanted in WANTED.items():
        own, keep = by_kind[kind], min(len(by_kind[kind]), limit or wanted)
        chosen += [own[i * len(own) // keep] for i in range(keep)]
    return sorted(chosen, key=lambda case: sum(len(m["content"]) for m in case.messages))


def both_tiers(model: LanguageModel) -> dict[str, FusedGrad]:
    """FusedGrad on the ordinary replay, and on the gradients of every layer at the prompt's last eight tokens."""
    layers = scorer_of(model._model).architecture.n_layers
    return {"cheap": FusedGrad(), "full": FusedGrad(layers=tuple(range(layers)), last_tokens=8)}


def collect(model: LanguageModel, chosen: Sequence[Case], path: Path) -> None:
    """Append the missing answers to `path`, batch by batch."""
    tiers, grade = both_tiers(model), ExactMatch()
    done = len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0
    began = time.monotonic()
    with path.open("a", encoding="utf-8") as file:
        for start in range(done, len(chosen), BATCH):
            batch = chosen[start : start + BATCH]
            found = model.generate_batch(conversations(batch), OPTIONS, objective=tiers["full"].objective)
            rows = [
                {
                    "id": case.id,
                    "kind": case.kind,
                    "correct": grade(one.text, case.answers),
                    **{name: tier(one.evidence).features for name, tier in tiers.items()},
                    **peaks(one.evidence),
                }
                for case, one in zip(batch, found, strict=True)
            ]
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            reached = start + len(batch)
            left = (time.monotonic() - began) / (reached - done) * (len(chosen) - reached)
            print(f"\r{path.name}: {reached}/{len(chosen)}, {left:.0f} s left ", end="", file=sys.stderr)
    print(file=sys.stderr)


def conversations(batch: Sequence[Case]) -> list[list[Message]]:
    """The cases' prompts."""
    return [[Message(m["role"], m["content"]) for m in case.messages] for case in batch]


def peaks(evidence: Any) -> dict[str, float | None]:
    """The least likely token and the highest entropy of an answer: per-token features, tried with the others."""
    timed = evidence.gradients()
    if timed is None or not timed.scores.log_probs:
        return {"max_nll": None, "max_entropy": None}
    return {"max_nll": -min(timed.scores.log_probs), "max_entropy": max(timed.scores.entropies)}


def cost(model: LanguageModel, chosen: Sequence[Case]) -> dict[str, float]:
    """CPU seconds of this process per batch, medians: generating, and scoring in either tier, taking turns."""
    tiers = both_tiers(model)
    seconds: dict[str, list[float]] = {"generating": [], **{name: [] for name in tiers}}
    step = max(1, len(chosen) // (TIMED * BATCH))
    for number in range(TIMED):
        batch = chosen[number * step * BATCH :][:BATCH]
        for name in (tiers if number % 2 else reversed(tiers)) if batch else ():
            began = time.process_time()
            found = model.generate_batch(conversations(batch), OPTIONS, objective=tiers[name].objective)
            answered = time.process_time()
            for one in found:
                tiers[name](one.evidence)
            seconds["generating"].append(answered - began)
            seconds[name].append(time.process_time() - answered)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="pocket, or a folder; may be repeated")
    parser.add_argument("--records", type=Path, default=Path("output/fused"))
    parser.add_argument("--report", type=Path, help="write the tables there, as Markdown")
    parser.add_argument("--limit", type=int, help="at most so many questions of each kind")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    options.records.mkdir(parents=True, exist_ok=True)
    chosen, files = questions(options.limit), []
    for name in options.model or ["pocket"]:
        model = LanguageModel.from_pretrained(name, dtype=torch.float32)
        path = options.records / f"{model.name}-{model.identity.fingerprint[:12]}.jsonl"
        collect(model, chosen, path)
        seconds = path.with_suffix(".cost.json")
        if not seconds.exists():
            seconds.write_text(json.dumps(cost(model, chosen)), encoding="utf-8")
        files.append(path)
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        report(files, options.report)


if __name__ == "__main__":
    main()

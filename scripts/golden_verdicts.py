"""Recorded drafts of two real models, and the decisions about each: a guard that is rebuilt has to make the same.

python scripts/golden_verdicts.py             every decision that is another one than recorded, in columns; 1 if any
python scripts/golden_verdicts.py --decide    record today's decisions about the same drafts

A draft is what a decision needs: the answer, its scores, its sentences, where it was cut off, and the form of its
prompt. This program of commit d6a6858f wrote them, greedily in float32. The calibrations are made anew from recorded
grades, so their thresholds and P(correct) are compared, too.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from semgrad_guard.calibration import AnswerSentences, Binding, Calibration, calibrate, calibrate_sentences
from semgrad_guard.errors import SemGradGuardError
from semgrad_guard.guard import Policy
from semgrad_guard.guard.decision import settle, why_unscored
from semgrad_guard.guard.policy import Terms
from semgrad_guard.pocket import CALIBRATION_PATH
from semgrad_guard.records import PromptForm, SentenceVerdict, Verdict
from semgrad_guard.settings import Mode, OnCut, OnDoubt

PATH = Path(__file__).parents[1] / "tests" / "golden" / "verdicts.jsonl.gz"
IDENTITY = ("model", "revision", "fingerprint", "prompt_template")
DRAFT = ("text", "status", "reason", "cut", "scored_tokens")
SENTENCE = ("start", "end", "uncertainty", "leans_on", "tokens")
"""The recorded fields of verdicts and of their sentences."""
FREE = ("gnll", "mean_entropy", "max_probability")
DIGITS, NEAR = 4, 2e-4
"""P(correct) is recorded in so many decimals, and the same within so much: fits differ between processors."""
CALIBRATED = 400

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A policy with its circumstances. `score` names the estimator whose score is compared.

    It decides about each row whose number `every` divides: all decisions about all rows take a minute.
    """

    name: str
    policy: Policy
    score: str = "hybridgrad"
    can_escalate: bool = False
    mode: Mode = "enforce"
    on_doubt: OnDoubt | None = None
    every: int = 4

    def decide(self, row: Row, facts: Mapping[str, Any]) -> tuple[str, float | None, str]:
        """The decision in letters, P(correct), and the reason.

        Deliver, Abstain, Escalate or Raise; then p where it is promised, u where the prompt is unfamiliar, and the
        action at each sentence. An answer that the policy refuses to judge has the error's name.
        """
        draft = draft_of(row, facts, self)
        try:
            terms = Terms(policy=self.policy, mode=self.mode, can_escalate=self.can_escalate)
            found = settle(draft, terms, prompt=PromptForm(**row["form"]))
        except SemGradGuardError as error:
            return type(error).__name__, None, str(error)
        verdict = found.verdict
        letters = found.kind[0].upper() + "p" * verdict.promised + "u" * bool(verdict.details.unfamiliar)
        letters += "-" * bool(verdict.sentences) + "".join(one.action[:2] for one in verdict.sentences)
        right = None if verdict.confidence is None else round(verdict.confidence, DIGITS)
        return letters, right, verdict.reason or "; ".join(verdict.details.unfamiliar)


def draft_of(row: Row, facts: Mapping[str, Any], case: Case) -> Verdict:
    """The undecided verdict on a recorded draft."""
    settings = dict(facts["settings"]) if case.score == "hybridgrad" else {"dtype": facts["settings"]["dtype"]}
    settings |= {} if case.on_doubt is None else {"on_doubt": case.on_doubt}
    sentences = (dict(zip(SENTENCE, one, strict=True)) for one in row.get("sentences", ()))
    return Verdict.of(
        **{name: facts[name] for name in IDENTITY},
        **{name: row[name] for name in DRAFT},
        action="answer",
        estimator=case.score,
        settings=settings,
        uncertainty=row["scores"].get(case.score),
        sentences=tuple(SentenceVerdict(**one) for one in sentences),
    )


def cases(rows: Sequence[Row], facts: Mapping[str, Any]) -> list[Case]:
    """Those of one model's answers (of one unit: whole ones, or by sentence)."""
    base = {name: facts[name] for name in IDENTITY}
    own, labels = rows[:CALIBRATED], [row["right"] for row in rows[:CALIBRATED]]
    forms = [PromptForm(**row["form"]) for row in own]
    how: dict[str, Any] = {"delta": 0.1, "prompts": forms, "copies": "keep"}
    middle = sorted(row["scores"]["hybridgrad"] for row in own if "hybridgrad" in row["scores"])[len(own) // 3]
    bare = Policy(threshold=middle * 1.01)
    if "sentences" in rows[0]:
        return [*_by_sentence(own, base | {"settings": facts["settings"]}, bare, how)]

    def made(part: float, score: str = "hybridgrad", on_cut: OnCut | None = None, **more: Any) -> Calibration:
        """A promise of this part of the error rate of the labels."""
        settings = facts["settings"] if score == "hybridgrad" else {"dtype": facts["settings"]["dtype"]}
        bound = {"settings": settings, "estimator": score, "grader": "exact-match", "max_tokens": 24}
        binding = Binding(**base, **bound, on_cut=on_cut)
        alpha = round(part * labels.count(False) / len(labels), 3)
        return calibrate(_scores(own, score, on_cut or "score"), labels, binding=binding, alpha=alpha, **how, **more)

    of, plain, easy = Policy.from_calibration, made(0.7), made(1.15)
    found = [
        Case("bare", bare, every=1),
        Case("bare, annotated", bare, mode="annotate"),
        Case("bare, raised", bare, mode="raise"),
        Case("no score, answered", replace(bare, on_unscored="answer"), score="none"),
        Case("no score, escalated", replace(bare, on_unscored="escalate"), score="none", can_escalate=True),
        Case("calibrated", of(plain), every=1),
        Case("calibrated, easy", of(easy), can_escalate=True),
        Case("calibrated, unfamiliar withheld", of(easy, on_unfamiliar="abstain"), can_escalate=True),
        Case("cut in the first sentence: unscored", of(made(0.9, on_cut="unscored"))),
        Case("cut: withheld", of(made(0.9, on_cut="abstain")), can_escalate=True),
        Case("no threshold", of(made(0.01))),
        Case("reachable", of(made(0.2), on_no_threshold="reachable"), can_escalate=True),
        Case("by hand", of(made(0.85, by_hand=120, groups=range(len(own))))),
        *(Case(name, of(made(0.85, name)), score=name) for name in FREE),
    ]
    embedded = Calibration.load(CALIBRATION_PATH)
    bound = embedded.binding
    return [*found, Case("embedded", of(embedded), every=1)] if bound and bound.model == facts["model"] else found


def _scores(rows: Sequence[Row], name: str, on_cut: OnCut) -> list[float | None]:
    """The scores that count where this rule holds for answers that a limit cut off."""
    out = [isinstance(row["cut"], int) and why_unscored(row["text"], on_cut) for row in rows]
    return [None if reason else row["scores"].get(name) for row, reason in zip(rows, out, strict=True)]


def _by_sentence(own: Sequence[Row], facts: Mapping[str, Any], bare: Policy, how: Mapping[str, Any]) -> Iterator[Case]:
    columns = [list(zip(*row["sentences"], strict=True)) or [()] * len(SENTENCE) for row in own]
    answers = [
        AnswerSentences(row["question"], row["text"], parts[2], row["rights"], parts[3])
        for row, parts in zip(own, columns, strict=True)
    ]
    for on_doubt in get_args(OnDoubt):
        yield Case(f"bare, {on_doubt}", bare, on_doubt=on_doubt, every=1)
        binding = Binding(**facts, estimator="hybridgrad", grader="contains@3")
        made = calibrate_sentences(answers, on_doubt=on_doubt, binding=binding, alpha=0.9, **how)
        yield Case(f"calibrated, {on_doubt}", Policy.from_calibration(made), on_doubt=on_doubt, every=1)


@dataclass(frozen=True)
class Golden:
    """Groups of drafts (`facts` of the model, and `rows`), with the recorded thresholds by group and case."""

    facts: Sequence[Mapping[str, Any]]
    rows: Sequence[Row]

    @classmethod
    def load(cls) -> Golden:
        """The recorded file."""
        with gzip.open(PATH, "rt", encoding="utf-8") as lines:
            return cls(json.loads(next(lines)), [json.loads(line) for line in lines])

    def save(self) -> None:
        """Write the file, the same bytes for the same content."""
        lines = [json.dumps(one, separators=(",", ":"), ensure_ascii=False) for one in (self.facts, *self.rows)]
        PATH.parent.mkdir(exist_ok=True)
        PATH.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), 9, mtime=0))

    def decided(self) -> Iterator[tuple[int, Mapping[str, float | None], list[tuple[Row, Mapping[str, Any]]]]]:
        """By group: today's thresholds, and the rows with today's decisions, by case."""
        for number, facts in enumerate(self.facts):
            rows = [row for row in self.rows if row["group"] == number]
            policies = cases(rows, facts)
            thresholds = {case.name: case.policy.threshold for case in policies}
            found: list[tuple[Row, Mapping[str, Any]]] = []
            for at, row in enumerate(rows):
                now = {case.name: case.decide(row, facts) for case in policies if at % case.every == 0}
                found.append((row, now))
            yield number, thresholds, found

    def decide(self) -> Golden:
        """The same drafts with today's decisions."""
        facts, rows = list[Mapping[str, Any]](), list[Row]()
        for number, thresholds, found in self.decided():
            facts.append({**self.facts[number], "thresholds": thresholds})
            rows += [{**row, "decisions": {name: one[:2] for name, one in now.items()}} for row, now in found]
        return Golden(facts, rows)

    def changes(self) -> Iterator[tuple[str, ...]]:
        """What is decided otherwise today: the case, the question, the recorded decision, today's, and its reason."""
        for number, thresholds, found in self.decided():
            for name, now in thresholds.items():
                before = self.facts[number]["thresholds"].get(name)
                if (now is None) != (before is None) or not math.isclose(now or 0.0, before or 0.0, rel_tol=1e-6):
                    yield f"{number} {name}", "the threshold", str(before), str(now), ""
            for row, decisions in found:
                recorded = row["decisions"]
                for name in decisions.keys() | recorded.keys():
                    then, now = recorded.get(name, ("", None)), decisions.get(name, ("", None, ""))
                    if not _same(then, now):
                        yield f"{number} {name}", row["question"], _shown(then), _shown(now), now[2]


def _same(then: Sequence[Any], now: Sequence[Any]) -> bool:
    a, b = then[1], now[1]
    return then[0] == now[0] and (a is None) == (b is None) and abs((a or 0.0) - (b or 0.0)) <= NEAR


def _shown(decision: Sequence[Any]) -> str:
    return f"{decision[0]} {decision[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decide", action="store_true")
    if parser.parse_args().decide:
        golden = Golden.load().decide()
        golden.save()
        print(f"{PATH}: {len(golden.rows)} drafts, {PATH.stat().st_size:,} bytes")
        return 0
    changes = list(Golden.load().changes())
    for row in [("case", "question", "before", "now", "reason"), *changes]:
        print("\t".join(row))
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())

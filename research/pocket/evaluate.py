"""Measure the pocket model: greedy answers, graded, with the scores that come free and the gradient scores.

    python -m research.pocket.evaluate --output results.jsonl [--natural FILE ...] [--limit N]

Writes one line a question (id, kind, answer, correct, scores in both variants) and prints accuracy per kind, and how
well each score tells right answers from wrong ones (AUROC; higher scores should be wrong answers).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from research.pocket import cases
from research.pocket.cases import Case
from research.pocket.tokenizer import render
from semgrad_guard import gradient_scores
from semgrad_guard.grading import ExactMatch, token_f1
from semgrad_guard.metrics import auroc
from semgrad_guard.pocket import POCKET_PATH

SEMANTIC_TOKEN = -3  # <|im_start|> of "<|im_start|>assistant\n"
VARIANTS = ("paper", "official")
SCORES = (
    "greedy_nll",
    "mean_entropy",
    *(f"{name}_{v}" for v in VARIANTS for name in ("semgrad", "paragrad", "hybridgrad")),
)
BATCH = 32


@dataclass(frozen=True, slots=True)
class Answer:
    """The greedy answer to a case, as tokens with the end of the turn, and as text."""

    case: Case
    prompt: list[int]
    tokens: list[int]
    text: str


class Pocket:
    """The model and its tokenizer, loaded the plain way, in float32."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.no_grad()
    def answer(self, batch: Sequence[Case]) -> list[Answer]:
        prompts = [self.tokenizer(render(case.messages), add_special_tokens=False).input_ids for case in batch]
        padded = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        out = self.model.generate(**padded, max_new_tokens=32, do_sample=False)[:, padded["input_ids"].shape[1] :]
        rows = []
        for case, prompt, tokens in zip(batch, prompts, out.tolist(), strict=True):
            end = (
                tokens.index(self.tokenizer.eos_token_id) + 1 if self.tokenizer.eos_token_id in tokens else len(tokens)
            )
            text = self.tokenizer.decode(tokens[:end], skip_special_tokens=True)
            rows.append(Answer(case, prompt, tokens[:end], text))
        return rows

    def scores(self, answer: Answer) -> dict[str, float | None]:
        """Every score of an answer; the end of the turn is left out, as the engine does."""
        tokens = answer.tokens[:-1] if len(answer.tokens) > 1 else answer.tokens
        record: dict[str, float | None] = {}
        for variant in VARIANTS:
            found = gradient_scores(self.model, answer.prompt, tokens, semantic_token=SEMANTIC_TOKEN, variant=variant)
            record |= {f"{n}_{variant}": getattr(found, n) for n in ("semgrad", "paragrad", "hybridgrad")}
            record |= {"greedy_nll": found.greedy_nll, "mean_entropy": found.mean_entropy}
        return record


def results(pocket: Pocket, chosen: Sequence[Case], *, scored: bool = True) -> Iterator[dict[str, Any]]:
    """One JSON-safe record a case, in order of prompt length within the batches."""
    grade = ExactMatch()
    ordered = sorted(chosen, key=lambda case: sum(len(m["content"]) for m in case.messages))
    for start in range(0, len(ordered), BATCH):
        for answer in pocket.answer(ordered[start : start + BATCH]):
            case = answer.case
            yield {
                "id": case.id,
                "kind": case.kind,
                "question": case.question,
                "answer": answer.text,
                "accepted": list(case.answers),
                "correct": grade(answer.text, case.answers),
                "f1": round(max(token_f1(answer.text, a) for a in case.answers), 4),
                **(pocket.scores(answer) if scored else {}),
            }


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Accuracy per kind, then AUROC per kind of question for each score."""
    kinds = list(dict.fromkeys(r["kind"] for r in sorted(rows, key=lambda r: r["kind"])))
    lines = ["kind        n    exact  mean F1"]
    for kind in kinds:
        own = [r for r in rows if r["kind"] == kind]
        exact, shared = (sum(r[k] for r in own) / len(own) for k in ("correct", "f1"))
        lines.append(f"{kind:10} {len(own):4}  {exact:.3f}  {shared:.3f}")
    sets = {
        "facts": ("known", "rare", "unknown"),
        "several": ("several",),
        "reading": ("invented", "frames", "natural"),
        "natural": ("natural",),
        "all": tuple(kinds),
    }
    scored = [name for name in SCORES if rows and name in rows[0]]
    if scored:
        lines.append("\nAUROC               " + "  ".join(f"{name:>8}" for name in sets))
    for name in scored:
        values = []
        for members in sets.values():
            own = [r for r in rows if r["kind"] in members]
            value = auroc([r[name] for r in own], [r["correct"] for r in own]) if own else None
            values.append("       -" if value is None else f"{value:8.3f}")
        lines.append(f"{name:20}" + "  ".join(values))
    return "\n".join(lines)


def all_cases(natural: Sequence[Path]) -> list[Case]:
    """Everything that is measured; natural passages only from the files that are named."""
    return [*cases.facts(), *cases.reading(), *cases.beside(), *(c for path in natural for c in cases.natural(path))]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=POCKET_PATH)
    parser.add_argument("--output", type=Path, required=True, help="JSONL, one line a question")
    parser.add_argument(
        "--natural", type=Path, nargs="*", default=[cases.NATURAL], help="files of hand-written passages"
    )
    parser.add_argument("--kinds", nargs="*", help="only these kinds of question")
    parser.add_argument("--limit", type=int, help="at most so many questions of each kind, evenly spread")
    parser.add_argument("--no-scores", action="store_true", help="answers and grades only")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    known = all_cases(options.natural)
    kinds = options.kinds or dict.fromkeys(case.kind for case in known)
    chosen: list[Case] = []
    for kind in kinds:
        own = [case for case in known if case.kind == kind]
        keep = min(len(own), options.limit or len(own))
        chosen += [own[i * len(own) // keep] for i in range(keep)]
    rows: list[dict[str, Any]] = []
    with options.output.open("w", encoding="utf-8") as file:
        for row in results(Pocket(options.model), chosen, scored=not options.no_scores):
            rows.append(row)
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            print(f"\r{len(rows)}/{len(chosen)}", end="", file=sys.stderr)
    print(f"\n{summary(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

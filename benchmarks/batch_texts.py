"""How many answers have another text when they are written in a batch: by dtype, against single runs.

    python benchmarks/batch_texts.py [--model smollm2] [--questions 40] [--batch 8] [--tokens 64] [--output FILE]

Greedy answers to questions of the package. In exact arithmetic a batch changes nothing; rounding may choose another
token where two are nearly as likely, and every later token then follows from it.
"""

from __future__ import annotations

from typing import Any

from measuring import about, keep, parsed, parser, table

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.questions.data import read_questions

DTYPES = ("float32", "bfloat16")


def texts(model: LanguageModel, sample: list[str], batch: int, tokens: int) -> list[str]:
    """The answers, written in batches of so many."""
    options = GenerationOptions(max_tokens=tokens)
    batches = (sample[start : start + batch] for start in range(0, len(sample), batch))
    return [answer.text for batch in batches for answer in model.generate_batch(batch, options)]


def compared(name: str, dtype: str, sample: list[str], batch: int, tokens: int) -> tuple[str, int, int, int]:
    """How many answers differ from those of single runs, in a batch and in batches that are limited to one row."""
    model = LanguageModel.from_pretrained(name, dtype=dtype)
    single, together = (texts(model, sample, rows, tokens) for rows in (1, batch))
    model.max_batch = 1
    limited = texts(model, sample, batch, tokens)
    in_a_batch, limited_to_one = (
        sum(a != b for a, b in zip(single, other, strict=True)) for other in (together, limited)
    )
    return dtype, len(sample), in_a_batch, limited_to_one


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="smollm2")
    options.add_argument("--questions", type=int, default=40)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--dtype", action="append", choices=DTYPES, help="several times (both)")
    given = parsed(options)
    questions = [row.question for row in read_questions("pocket").rows]
    sample = questions[:: max(1, len(questions) // given.questions)][: given.questions]
    found = [compared(given.model, dtype, sample, given.batch, given.tokens) for dtype in given.dtype or DTYPES]
    report: dict[str, Any] = {"machine": about(), "model": given.model, "rows": found}
    keep(report, given.output)
    print(table(("dtype", "answers", "other text in a batch", "other text with max_batch=1"), found))


if __name__ == "__main__":
    main()

"""The record of a probe: numbers by layer and prompt token, and the t* that follows from them; plain JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from semgrad_guard.engine.prompts.semantic_token import TokenChoice
from semgrad_guard.errors import InputError
from semgrad_guard.evaluation.report.figures import ProbeMaps
from semgrad_guard.files import atomic_write
from semgrad_guard.named import title_of

Table = tuple[tuple[float, ...], ...]
"""Layers 0 .. L-1 x the last prompt tokens, the prompt's last token in the last column."""

Gaps = tuple[tuple[float | None, ...], ...]


class GradedGrid(BaseModel):
    """How well SemGrad tells right answers from wrong ones at every layer and token, and how that goes with SPS.

    `auroc` is None where it is undefined; `by_token` is that of the paper's layers together. `pearson` and `spearman`
    correlate `auroc` with the Semantic Preservation Score over all layers and tokens. `proposal`, `difference`, `low`
    and `high` are the comparison of the rule, if it made one (`probe.py`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    answers: int
    right: int
    without_grid: int
    grader: str
    auroc: Gaps
    by_token: tuple[float | None, ...]
    pearson: float | None
    spearman: float | None
    proposal: int | None
    difference: float | None
    low: float | None
    high: float | None


class Probe(BaseModel):
    """A probe of one model on one file of questions.

    `tokens` names the last prompt tokens, None where prompts differ; `own_token` is the chat template's own t*.
    `preservation` = `within` - `across` is the Semantic Preservation Score. `questions` counts those with paraphrases,
    `without_paraphrases` those left out of it. `graded` is None without answers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    schema_version: Literal[1] = 1
    created: str
    model: str
    revision: str | None
    fingerprint: str
    dtype: str
    prompt_template: str
    data: str
    questions: int
    without_paraphrases: int
    tokens: tuple[str | None, ...]
    upper_layers: tuple[int, ...]
    own_token: int
    preservation: Table
    within: Table
    across: Table
    graded: GradedGrid | None
    semantic_token: TokenChoice

    @property
    def by_token(self) -> tuple[float, ...]:
        """The Semantic Preservation Score of each token, averaged over the layers that SemGrad uses."""
        rows = [self.preservation[layer] for layer in self.upper_layers]
        return tuple(sum(column) / len(column) for column in zip(*rows, strict=True))

    @property
    def maps(self) -> ProbeMaps:
        """The maps to draw; undefined AUROCs are nan."""
        found = None if self.graded is None else np.array(self.graded.auroc, dtype=np.float64)
        return ProbeMaps(
            title=f"{title_of(self.model)} on {self.data}: {self.questions} questions",
            sps=np.array(self.preservation),
            auroc=None if found is None or not np.isfinite(found).any() else found,
            tokens=[_label(offset, name) for offset, name in enumerate(self.tokens, start=-len(self.tokens))],
            recommendation=self.semantic_token.reason,
        )

    def save(self, path: Path) -> Path:
        """Write JSON with a line per field, or per layer; never half a file."""
        lines = [f"  {json.dumps(name)}: {_pretty(value)}" for name, value in self.model_dump(mode="json").items()]
        text = "{\n" + ",\n".join(lines) + "\n}\n"
        return atomic_write(path, text)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            InputError: the file cannot be read or is something else.
        """
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"Cannot read {path}: {error.strerror or error}.") from error
        except (ValidationError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not a probe's record, or not an intact one. Probe again.") from error


def _label(offset: int, name: str | None) -> str:
    """A token's text with its offset where all prompts share it, else the offset."""
    return str(offset) if name is None else f"{json.dumps(name, ensure_ascii=False)[1:-1].strip()} {offset}"


def _pretty(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in value) + "\n  ]"  # pyright: ignore
    return json.dumps(value, ensure_ascii=False)

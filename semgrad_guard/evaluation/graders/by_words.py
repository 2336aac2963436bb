"""The graders that need no model, by name, and which of them is taken where none is named."""

from __future__ import annotations

from typing import Literal

from semgrad_guard.evaluation.graders.base import WordGrader
from semgrad_guard.evaluation.graders.contains import Contains
from semgrad_guard.evaluation.graders.words import ExactMatch, RougeL, TokenF1

WordGraderName = Literal["contains", "exact-match", "token-f1", "rouge-l"]

GRADERS: dict[str, WordGrader] = {
    "contains": Contains(),
    "exact-match": ExactMatch(),
    "token-f1": TokenF1(),
    "rouge-l": RougeL(),
}
"""Those that need no model, by the names the command line offers."""


def default_grader(prompt_template: str) -> WordGraderName:
    """The grader where none is named: a model with a chat template answers in sentences, one without goes on a text.

    `prompt_template` is the full name of the prompts' form (`guard.template_name`), which ends in "@plain" where there
    is no chat template.
    """
    return "exact-match" if prompt_template.endswith("@plain") else "contains"

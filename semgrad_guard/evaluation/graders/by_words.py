"""The graders that need no model, by name, and which of them is taken where none is named."""

from __future__ import annotations

import re
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
BY_WORDS = frozenset(grader.name for grader in GRADERS.values())
"""Their names in records. Where one of them comes to no verdict, that is final, and means wrong."""

_NOT_ALL_OF_IT = "one sentence asserts a reference; what else the answer says is not checked"
_IN_COMMON = "the answer has enough words in common with a reference; what else it says is not checked"
_RIGHT_MEANS = {
    "contains": _NOT_ALL_OF_IT,
    "nli": _NOT_ALL_OF_IT,
    "token-f1": _IN_COMMON,
    "rouge-l": _IN_COMMON,
}


def right_means(grader: str) -> str | None:
    """The limits of "right", for a grader that does not look at the whole answer; `grader` is its full name."""
    return _RIGHT_MEANS.get(re.split(r"[(@>+]", grader)[0])


def no_verdict(count: int, among: int, grader: str) -> str:
    """The notice about answers on which a grader came to no verdict."""
    notice = f"{count} of {among} answers have no verdict by {grader}; they count as wrong."
    if grader != GRADERS["contains"].name:
        return notice
    return f"{notice} The grader contains+judge=PROVIDER:MODEL or contains+nli=MODEL lets a model decide on them."


def default_grader(prompt_template: str) -> WordGraderName:
    """The grader where none is named: a model with a chat template answers in sentences, one without continues a text.

    `prompt_template` is the full name of the prompts' form (`guard.template_name`), which ends in "@plain" where there
    is none.
    """
    return "exact-match" if prompt_template.endswith("@plain") else "contains"

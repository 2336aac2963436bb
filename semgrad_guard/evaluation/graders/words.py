"""The graders that need no model: exact match, token F1, ROUGE-L and `contains`; which is the default; and all graders
by the names that a command line gives them: `exact-match`, `bem=PATH`, `contains+judge=PROVIDER:MODEL`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from semgrad_guard.engine.words import normalise, token_f1
from semgrad_guard.errors import InputError
from semgrad_guard.evaluation.graders.base import (
    AnswerGrader,
    AnswerToGrade,
    SecondOpinion,
    WordGrader,
    require_threshold,
)
from semgrad_guard.evaluation.graders.contains import Contains

if TYPE_CHECKING:
    from semgrad_guard.engine.text_pairs import Entailment


@dataclass(frozen=True)
class ExactMatch(WordGrader):
    """Equal to one of the references after normalisation."""

    @property
    def name(self) -> str:
        return "exact-match"

    def agrees(self, answer: AnswerToGrade) -> bool:
        """Whether the text is a reference, but for case, articles and punctuation."""
        found = normalise(answer.text)
        return bool(found) and any(found == normalise(reference) for reference in answer.references)


@dataclass(frozen=True)
class TokenF1(WordGrader):
    """Shares enough words with one of the references: F1 at or above `threshold`, in (0, 1]."""

    threshold: float = 0.5

    def __post_init__(self) -> None:
        require_threshold(self.threshold, "token-F1", 0.5)

    @property
    def name(self) -> str:
        return f"token-f1>={self.threshold:g}"

    def agrees(self, answer: AnswerToGrade) -> bool:
        """Whether the text shares enough words with a reference."""
        return any(token_f1(answer.text, reference) >= self.threshold for reference in answer.references)


@dataclass(frozen=True)
class RougeL(WordGrader):
    """Shares enough words in the same order with one of the references: ROUGE-L at or above `threshold`, in (0, 1].

    The threshold .3 is the literature's for short answers (Kuhn et al., "Semantic uncertainty", ICLR 2023). It lets
    much through: one right word of five is .33.
    """

    threshold: float = 0.3

    def __post_init__(self) -> None:
        require_threshold(self.threshold, "ROUGE-L", 0.3)

    @property
    def name(self) -> str:
        return f"rouge-l>={self.threshold:g}"

    def agrees(self, answer: AnswerToGrade) -> bool:
        """Whether the text shares enough words in a reference's order."""
        return any(rouge_l(answer.text, reference) >= self.threshold for reference in answer.references)


def rouge_l(text: str, answer: str) -> float:
    """Harmonic mean of precision and recall of the longest common subsequence of words, in [0, 1].

    Source: Lin, "ROUGE: a package for automatic evaluation of summaries", 2004, with beta = 1. The words are those of
    `normalise`, so that scripts other than Latin count too; the original package drops them.
    """
    found, expected = normalise(text).split(), normalise(answer).split()
    common = longest_common_subsequence(found, expected)
    return 2 * common / (len(found) + len(expected)) if common else 0.0


def longest_common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest sequence of words that both hold in this order, gaps allowed."""
    row = [0] * (len(other) + 1)
    for word in one:
        above = row
        row = [0]
        for column, candidate in enumerate(other):
            row.append(above[column] + 1 if word == candidate else max(above[column + 1], row[column]))
    return row[-1]


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


def no_verdict(count: int, among: int, grader: str, *, unit: str = "answers") -> str:
    """The notice about answers on which a grader came to no verdict."""
    notice = f"{count} of {among} {unit} have no verdict by {grader}; they count as wrong."
    if grader != GRADERS["contains"].name:
        return notice
    return f"{notice} The grader contains+judge=PROVIDER:MODEL or contains+nli=MODEL lets a model decide on them."


def default_grader(prompt_template: str) -> str:
    """The grader where none is named: a model with a chat template answers in sentences, one without continues a text.

    `prompt_template` is the full name of the prompts' form (`guard.template_name`), which ends in "@plain" where there
    is none.
    """
    return "exact-match" if prompt_template.endswith("@plain") else "contains"


_FIRST = "contains+"
_NEEDS_MODEL = {
    "nli": "FOLDER or hub id",
    "bem": "FOLDER or hub id",
    "judge": "PROVIDER:MODEL, as LangChain has it",
}


def load_graders(specs: Sequence[str], *, nli: str | None = None) -> list[AnswerGrader]:
    """The graders of these names, in order; all names are checked before any model is loaded.

    Args:
        specs: `contains`, `exact-match`, `token-f1`, `rouge-l`, `nli[=MODEL]`, `bem=MODEL`, `judge=PROVIDER:MODEL`;
            `contains+` before one of the last three hands it the answers on which `contains` comes to no verdict.
        nli: the model of `nli` where it names none.

    Raises:
        InputError: an unknown name, a name that needs a model and has none, or a name twice.
        ModelNotFoundError, UnsupportedModelError: a model cannot be loaded, or is of another kind.
        GradingError, MissingExtraError: a judge cannot be set up.
    """
    found = [_loader(spec, nli) for spec in specs]
    if not found:
        raise InputError("grading needs at least one grader, for example exact-match")
    graders = [load() for load in found]
    names = [grader.name for grader in graders]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"the grader {twice[0]} is named twice; name each once, the deciding one first")
    return graders


def require_kind(spec: str) -> str:
    """The name itself, of a kind that there is; its model is not looked for.

    Raises:
        InputError: the grader is unknown.
    """
    name, _, model = spec.removeprefix(_FIRST).partition("=")
    if name not in _NEEDS_MODEL and (name not in GRADERS or model or spec.startswith(_FIRST)):
        named = ", ".join([*GRADERS, *(f"{kind}=..." for kind in _NEEDS_MODEL), f"{_FIRST}judge=..."])
        raise InputError(f"there is no grader {spec!r}; there are {named}")
    return spec


def _loader(spec: str, nli: str | None) -> Callable[[], AnswerGrader]:
    if require_kind(spec).startswith(_FIRST):
        second = _loader(spec.removeprefix(_FIRST), nli)
        return lambda: SecondOpinion(GRADERS["contains"], second())
    name, _, model = spec.partition("=")
    if name in GRADERS:
        return lambda: GRADERS[name]
    model = model or (nli or "" if name == "nli" else "")
    if not model:
        raise InputError(f"the grader {name!r} needs a model: {name}={_NEEDS_MODEL[name]}")
    return lambda: _load(name, model)


def _load(name: str, model: str) -> AnswerGrader:
    if name == "judge":
        from semgrad_guard.evaluation.graders.models import Judge

        return Judge.from_name(model)
    from semgrad_guard.engine.text_pairs import AnswerEquivalence
    from semgrad_guard.evaluation.graders.models import Bem, EntailmentGrader

    if name == "bem":
        return Bem(AnswerEquivalence.from_pretrained(model))
    return EntailmentGrader(entailment_model(model))


@lru_cache(maxsize=1)
def entailment_model(name: str) -> Entailment:
    """The NLI model of this name, loaded once where methods and a grader share it."""
    from semgrad_guard.engine.text_pairs import Entailment

    return Entailment.from_pretrained(name)

"""Graders by the names that a command line gives them: `exact-match`, `bem=PATH`, `contains+judge=PROVIDER:MODEL`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from semgrad_guard.errors import InputError
from semgrad_guard.evaluation.graders.base import AnswerGrader, SecondOpinion
from semgrad_guard.evaluation.graders.words import GRADERS

if TYPE_CHECKING:
    from semgrad_guard.engine.texts.text_pairs import Entailment

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
        from semgrad_guard.evaluation.graders.judge import Judge

        return Judge.from_name(model)
    from semgrad_guard.engine.texts.text_pairs import AnswerEquivalence
    from semgrad_guard.evaluation.graders.models import Bem, EntailmentGrader

    if name == "bem":
        return Bem(AnswerEquivalence.from_pretrained(model))
    return EntailmentGrader(entailment_model(model))


@lru_cache(maxsize=1)
def entailment_model(name: str) -> Entailment:
    """The NLI model of this name, loaded once where methods and a grader share it."""
    from semgrad_guard.engine.texts.text_pairs import Entailment

    return Entailment.from_pretrained(name)

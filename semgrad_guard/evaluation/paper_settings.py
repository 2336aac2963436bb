"""The settings of the paper's appendix, and where those of a run differ from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

PAPER: Mapping[str, Mapping[str, Any]] = {
    "ln_pe": {"count": 10, "temperature": 1.0},
    "self_consistency": {"count": 10, "temperature": 0.7, "top_p": 1.0},
    "deg": {"count": 10, "temperature": 0.7, "top_p": 1.0},
    "inside": {"count": 10, "temperature": 0.5, "top_p": 0.99, "top_k": 5},
    "semantic_entropy": {"count": 10, "temperature": 1.0},
    "semantic_density": {"count": 10, "penalty": 1.0},
    "mutual_information": {"count": 10, "temperature": 0.9},
    "sar": {"count": 5, "temperature": 1.0},
    "semgrad": {"variant": "paper", "layers": None, "norm": "l1", "weighted": True},
    "paragrad": {"variant": "paper", "norm": "l1", "weighted": True},
    "hybridgrad": {"variant": "paper", "layers": None, "norm": "l1", "weighted": True, "tau": 1.0, "beta": 1.0},
}
"""Estimator -> the settings that the paper names for it (section 4.1, appendix C.2)."""

STANDING = (
    "The end token of an answer is not scored, by G-NLL either: scored are the tokens that a reader sees.",
    "Paraphrases for the Semantic Preservation Score are the data file's; the paper asked a service for them.",
)
"""Where this project differs from the paper whatever the settings."""

_GRADER, _PROMPT = "bem", "paper"


def deviations(settings: Mapping[str, Any]) -> list[str]:
    """In words, every setting of a run that the paper names and that differs, then the standing differences.

    `settings` has "grader", "prompt" and "estimators": {any: {"name": ..., **settings}}; what is not stated is not
    compared.
    """
    found = [*_conditions(settings)]
    estimators = cast("Mapping[str, Mapping[str, Any]]", settings.get("estimators") or {})
    for key, stated in estimators.items():
        name = str(stated.get("name", key))
        leaves = dict(_leaves(stated))
        for field, expected in PAPER.get(name, {}).items():
            if field in leaves and leaves[field] != expected:
                found.append(f"{key}: {field} is {leaves[field]}, and {expected} in the paper.")
    return [*found, *STANDING]


def _conditions(settings: Mapping[str, Any]) -> Iterator[str]:
    grader = settings.get("grader")
    if grader is not None and _GRADER not in str(grader).lower():
        yield f"Answers are graded by {grader}; the paper uses BEM at a score of 0.7."
    prompt = settings.get("prompt")
    if prompt is not None and str(prompt) != _PROMPT:
        yield f"The prompt is {prompt}; the paper asks for a direct answer with one or few words."
    generation = cast("Mapping[str, Any]", settings.get("generation") or {})
    if generation.get("temperature"):
        yield f"Answers are sampled at temperature {generation['temperature']}; the paper decodes greedily."


def _leaves(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every setting by its own name, however deep it stands."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(cast("Mapping[str, Any]", value))
        else:
            yield key, value

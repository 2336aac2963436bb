"""The settings of the paper's appendix, and where those of a run differ from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

Settings = Mapping[str, Any]

PAPER: Mapping[str, Settings] = {
    "ln_pe": {"plan.count": 10, "plan.temperature": 1.0},
    "self_consistency": {"plan.count": 10, "plan.temperature": 0.7, "plan.top_p": 1.0},
    "deg": {"plan.count": 10, "plan.temperature": 0.7, "plan.top_p": 1.0},
    "inside": {"plan.count": 10, "plan.temperature": 0.5, "plan.top_p": 0.99, "plan.top_k": 5},
    "semantic_entropy": {"plan.count": 10, "plan.temperature": 1.0},
    "semantic_density": {"plan.count": 10, "plan.penalty": 1.0, "temperature": 0.1},
    "mutual_information": {"plan.count": 10, "plan.temperature": 0.9},
    "sar": {"plan.count": 5, "plan.temperature": 1.0},
    "semgrad": {"variant": "paper", "layers": None, "norm": "l1", "weighted": True},
    "paragrad": {"variant": "paper", "norm": "l1", "weighted": True},
    "hybridgrad": {"variant": "paper", "layers": None, "norm": "l1", "weighted": True, "tau": 1.0, "beta": 1.0},
}
"""Estimator -> the settings that the paper names for it (sections 3.3 and 4.1, appendix C.2)."""

MODELS = {
    "equivalence": ("deberta", "the paper asks DeBERTa trained on MNLI"),
    "similarity": ("stsb-roberta-large", "the paper asks cross-encoder/stsb-roberta-large"),
}
"""Setting of an estimator -> (what the name of the paper's model holds, what the paper uses)."""

STANDING = (
    "The end token of an answer is not scored, by G-NLL either: scored are the tokens that a reader sees.",
    "Paraphrases for the Semantic Preservation Score are the data file's; the paper asked a service for them.",
)
"""Where this project differs from the paper whatever the settings."""


def deviations(settings: Settings) -> list[str]:
    """In words, every setting of a run that the paper names and that differs, then the standing differences.

    `settings` has "grader", "prompt", "generation" and "estimators": {name: {"name": ..., **settings}}. What is not
    stated is not compared.
    """
    estimators = cast("Mapping[str, Settings]", settings.get("estimators") or {})
    found = [*_conditions(settings)]
    for key, stated in estimators.items():
        leaves = dict(flat(stated))
        called = str(stated.get("title", key))
        found += _of_estimator(str(stated.get("name", key)), leaves, called)
    return [*found, *STANDING]


def flat(settings: Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings under dotted names."""
    for key, value in settings.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from flat(cast("Settings", value), name)
        else:
            yield name, value


def _conditions(settings: Settings) -> Iterator[str]:
    grader = settings.get("grader")
    if grader is not None and "bem" not in str(grader).lower():
        yield f"Answers are graded by {grader}; the paper uses BEM at a score of 0.7."
    prompt = settings.get("prompt")
    if prompt is not None and str(prompt) != "paper":
        called = "a template of its own" if "{" in str(prompt) else prompt
        yield f"The prompt is {called}; the paper asks for a direct answer with one or few words."
    generation = cast("Settings", settings.get("generation") or {})
    if generation.get("temperature"):
        yield f"Answers are sampled at temperature {generation['temperature']}; the paper decodes greedily."


def _of_estimator(name: str, leaves: Settings, called: str) -> Iterator[str]:
    for field, expected in PAPER.get(name, {}).items():
        if field in leaves and leaves[field] != expected:
            yield f"{called}: {field.removeprefix('plan.')} is {leaves[field]}, and {expected} in the paper."
    for field, (part, paper) in MODELS.items():
        if field in leaves and part not in str(leaves[field]).lower():
            yield f"{called}: {field} is told by {leaves[field]}; {paper}."
    if name == "p_true" and leaves.get("examples") == []:
        yield f"{called}: asked without examples; the paper's published code shows six."

"""The paper: its methods in order, its averages for comparison, its settings, and where those of a run differ.

Source: Li et al., "Gradients with Respect to Semantics Preserving Embeddings Tell the Uncertainty of Large Language
Models", ICML 2026; Tables 1, 3 and 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from semgrad_guard.files import table_of
from semgrad_guard.questions.run_record import flat

Settings = Mapping[str, Any]

OURS = "HybridGrad"
"""The method that everything is compared with."""

_TABLES: Mapping[str, Any] = table_of("semgrad_guard.paper", "published.toml")
_AVERAGES: Mapping[str, tuple[float, float]] = _TABLES["averages"]
METHODS = tuple(_AVERAGES)
"""In the order of the paper's tables: eleven rivals, then its own three."""

SOURCE = "Li et al., ICML 2026, averages over three models and three data sets"

AUROC_AVERAGES = {method: auroc for method, (auroc, _) in _AVERAGES.items()}
AURC_AVERAGES = {method: aurc for method, (_, aurc) in _AVERAGES.items()}

RUN_TIME_SHARES = {
    method: seconds / _TABLES["run_time"]["plain"] for method, seconds in _TABLES["run_time"]["added"].items()
}
"""Table 3: additional run time over that of plain generation."""

SETTINGS: Mapping[str, Settings] = {
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
"""Setting of an estimator -> (a part of the name of the paper's model, the paper's choice in words)."""

STANDING = (
    "The end token of an answer is not scored, by G-NLL either: scored are the tokens that a reader sees.",
    "Paraphrases for the Semantic Preservation Score are the data file's; the paper asked a service for them.",
)
"""Where this project differs from the paper whatever the settings."""


def in_order(methods: Iterable[str]) -> list[str]:
    """The paper's methods in its order, then the others as they come."""
    given = list(methods)
    return [m for m in METHODS if m in given] + [m for m in given if m not in METHODS]


def deviations(settings: Settings) -> list[str]:
    """In words, every setting of a run that the paper names and that differs, then the standing differences.

    `settings` has "grader", "prompt", "generation" and "estimators": {name: {"name": ..., **settings}}. Settings that
    are not stated is not compared.
    """
    found: list[str] = []
    grader, prompt = settings.get("grader"), settings.get("prompt")
    if grader is not None and "bem" not in str(grader).lower():
        found.append(f"Answers are graded by {grader}; the paper uses BEM at a score of 0.7.")
    if prompt is not None and str(prompt) != "paper":
        called = "a template of its own" if "{" in str(prompt) else prompt
        found.append(f"The prompt is {called}; the paper asks for a direct answer with one or few words.")
    generation = cast("Settings", settings.get("generation") or {})
    if generation.get("temperature"):
        found.append(f"Answers are sampled at temperature {generation['temperature']}; the paper decodes greedily.")
    for key, stated in cast("Mapping[str, Settings]", settings.get("estimators") or {}).items():
        leaves, name, title = dict(flat(stated)), str(stated.get("name", key)), str(stated.get("title", key))
        for field, expected in SETTINGS.get(name, {}).items():
            if field in leaves and leaves[field] != expected:
                found.append(f"{title}: {field.removeprefix('plan.')} is {leaves[field]}, and {expected} in the paper.")
        for field, (part, theirs) in MODELS.items():
            if field in leaves and part not in str(leaves[field]).lower():
                found.append(f"{title}: {field} is judged by {leaves[field]}; {theirs}.")
        if name == "p_true" and leaves.get("examples") == []:
            found.append(f"{title}: asked without examples; the paper's published code shows six.")
    return [*found, *STANDING]

"""What the paper reports: the order and spelling of its methods, and the averages to set one's own figures beside.

Source: Li et al., "Gradients with Respect to Semantics Preserving Embeddings Tell the Uncertainty of Large Language
Models", ICML 2026; Tables 1, 3 and 5.
"""

from __future__ import annotations

from collections.abc import Iterable

OURS = "HybridGrad"
"""The method that everything is compared with."""

METHODS = (
    "LN-PE",
    "P(True)",
    "Self-Con",
    "Deg",
    "INSIDE",
    "Semantic Entropy",
    "Semantic Density",
    "M.I.",
    "G-NLL",
    "SAR",
    "ExGrad",
    "ParaGrad",
    "SemGrad",
    "HybridGrad",
)
"""In the order of the paper's tables: eleven rivals, then its own three."""

SOURCE = "Li et al., ICML 2026, averages over three models and three data sets"

AUROC_AVERAGES = {
    "LN-PE": 0.7325,
    "P(True)": 0.6520,
    "Self-Con": 0.7051,
    "Deg": 0.7199,
    "INSIDE": 0.6673,
    "Semantic Entropy": 0.6945,
    "Semantic Density": 0.6963,
    "M.I.": 0.7201,
    "G-NLL": 0.7313,
    "SAR": 0.7533,
    "ExGrad": 0.7392,
    "ParaGrad": 0.7559,
    "SemGrad": 0.7575,
    "HybridGrad": 0.7659,
}
"""Table 1, column Avg."""

AURC_AVERAGES = {
    "LN-PE": 0.3211,
    "P(True)": 0.3689,
    "Self-Con": 0.3439,
    "Deg": 0.3403,
    "INSIDE": 0.3587,
    "Semantic Entropy": 0.3643,
    "Semantic Density": 0.3496,
    "M.I.": 0.3249,
    "G-NLL": 0.3055,
    "SAR": 0.2950,
    "ExGrad": 0.3025,
    "ParaGrad": 0.2947,
    "SemGrad": 0.2897,
    "HybridGrad": 0.2865,
}
"""Table 5, column Avg."""

RUN_TIME_SHARES = {
    "SemGrad": 0.7062 / 0.5644,
    "HybridGrad": 0.7945 / 0.5644,
    "SAR": 1.3889 / 0.5644,
    "Semantic Entropy": 1.4637 / 0.5644,
    "Semantic Density": 5.2592 / 0.5644,
}
"""Table 3: additional run time over that of plain generation, both summed over its three data sets (Llama, A100)."""


def in_order(methods: Iterable[str]) -> list[str]:
    """The paper's methods in its order, then the others as they come."""
    given = list(methods)
    return [m for m in METHODS if m in given] + [m for m in given if m not in METHODS]

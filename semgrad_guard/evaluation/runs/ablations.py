"""The variants of SemGrad that the paper's Table 2 compares, read off three replays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from semgrad_guard.engine.generation.evidence import Evidence
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scoring.scores import GradientScores


@dataclass(frozen=True)
class Ablation:
    """SemGrad under another objective; where `layers` are given, of these alone, at t* or at the last token."""

    objective: Objective
    layers: tuple[int, ...] | None = None
    last_token: bool = False

    def __call__(self, evidence: Evidence) -> float | None:
        """The variant's uncertainty, None where there is none."""
        timed = evidence.gradients(self.objective)
        if timed is None or timed.scores.semgrad is None:
            return None
        return timed.scores.semgrad if self.layers is None else self._read(timed.scores, self.layers)

    def _read(self, scores: GradientScores, layers: Sequence[int]) -> float | None:
        if not scores.grid:
            return None
        # The objective names every layer from 1 on, and the grid begins at t*.
        return fmean(scores.grid[layer - 1][-1 if self.last_token else 0] for layer in layers)


def semgrad_ablations(n_layers: int) -> Mapping[str, Ablation]:
    """The rows of Table 2 below SemGrad itself, for a model of `n_layers` decoder layers (L).

    Layers are those of `Objective`; variants that a shallow model does not have are left out. One replay with the
    gradients of all layers serves every choice of layers and tokens.
    """
    wide = Objective(layers=tuple(range(1, n_layers)))
    upper = tuple(range(n_layers // 2 + 1, n_layers))
    spans = {
        "l = L-1": (n_layers - 1,),
        "l = L-4": (n_layers - 4,),
        "l = 2L/3 .. L-1": tuple(range(2 * n_layers // 3, n_layers)),
        "l = 1 .. L-1": tuple(range(1, n_layers)),
    }
    found = {"l2 norm": Ablation(Objective(norm="l2")), "without entropy weights": Ablation(Objective(weighted=False))}
    found |= {name: Ablation(wide, span) for name, span in spans.items() if span and min(span) >= 1}
    if upper:
        found["last token"] = Ablation(wide, upper, last_token=True)
    return found if upper else {}

"""Whether FusedStates gains from a layer that is chosen on the labels, or from several, instead of its fixed one.

    python -m research.smollm2.layers FOLDER [FOLDER ...] [--draws 20] [--states output/layers]

A FOLDER is what `semgrad-guard evaluate --model smollm2` wrote with the method `states` and the plain prompt. One pass
over each prompt and answer takes the mean state of several layers. A layer is chosen by cross-validation on the drawn
labels: the fixed one, unless another is ahead by more than one standard error of the difference. What is printed is
the AUROC on the answers that were not drawn; intervals are over draws.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from semgrad_guard import LanguageModel
from semgrad_guard.engine.scoring.observation import observed_layer
from semgrad_guard.estimators import FusedStates
from semgrad_guard.estimators.learned import ANCHOR, STATE, Features
from semgrad_guard.evaluation.graders import GRADERS
from semgrad_guard.evaluation.graders.grading import grade
from semgrad_guard.evaluation.metrics import auroc
from semgrad_guard.evaluation.questions.prompts import conversation
from semgrad_guard.evaluation.runs.evaluated import EvaluatedAnswer
from semgrad_guard.evaluation.runs.run_file import read_run

LABELS = (100, 400)
DEPTHS = (1 / 3, 2 / 3, 5 / 6)
"""Where the other layers are, as shares of the depth."""
FOLDS, RESAMPLES, ROWS = 5, 200, 16
Records = Sequence[Features]
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Answers:
    """Features of every answer by layer, and whether it is wrong; `fixed` is the layer that ships."""

    records: Mapping[str, Records]
    wrong: NDArray[np.bool_]
    fixed: str

    def part(self, rows: NDArray[np.intp]) -> Answers:
        """Some of the answers."""
        return Answers(
            {layer: [records[row] for row in rows] for layer, records in self.records.items()},
            self.wrong[rows],
            self.fixed,
        )


@torch.no_grad()
def states(model: LanguageModel, answers: Sequence[EvaluatedAnswer], layers: Sequence[int]) -> NDArray[np.float32]:
    """The mean of each layer's states over the positions that predict the answer, [answers, layers, d]."""
    own: Any = model._model
    found: list[NDArray[np.float32]] = []
    for begin in range(0, len(answers), ROWS):
        some = answers[begin : begin + ROWS]
        prompts = [model.render(conversation(each.question, each.context)).ids for each in some]
        ids = [torch.tensor([*prompt, *each.token_ids]) for prompt, each in zip(prompts, some, strict=True)]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        mask = torch.arange(padded.shape[1]) < torch.tensor([len(row) for row in ids])[:, None]
        hidden = own.model(padded, attention_mask=mask.long(), output_hidden_states=True).hidden_states
        for row, prompt in enumerate(prompts):
            span = slice(len(prompt) - 1, len(ids[row]) - 1)
            found.append(torch.stack([hidden[k][row, span].double().mean(0) for k in layers]).float().numpy())
    return np.stack(found)


def read(folder: Path, model: LanguageModel, kept: Path) -> Answers:
    """The graded answers of an evaluation; states that were taken before are read from `kept`."""
    answers = [
        each for each in read_run(folder / "answers.jsonl", EvaluatedAnswer)[1] if each.scores["states"].features
    ]
    verdicts = grade(answers, GRADERS["contains"])
    known = [(each, right) for each, right in zip(answers, verdicts, strict=True) if right is not None]
    fixed = observed_layer(model.n_layers)
    layers = sorted({*(round(depth * model.n_layers) for depth in DEPTHS), fixed})
    path = kept / f"{folder.name}-{len(known)}.npy"
    if not path.exists():
        np.save(path, states(model, [each for each, _ in known], layers))
    records: dict[str, Records] = {}
    found = np.load(path)
    for number, layer in enumerate(layers):
        records[str(layer)] = [
            _with_state(each, vector) for (each, _), vector in zip(known, found[:, number], strict=True)
        ]
    records["all"] = [_with_state(each, vectors.ravel()) for (each, _), vectors in zip(known, found, strict=True)]
    return Answers(records, np.array([not right for _, right in known]), str(fixed))


def _with_state(answer: EvaluatedAnswer, vector: NDArray[np.float32]) -> Features:
    """The answer's likelihoods with another state."""
    known = answer.scores["states"].features or {}
    plain = {name: value for name, value in known.items() if not name.startswith(STATE)}
    return plain | {f"{STATE}{number}": float(f"{value:.5g}") for number, value in enumerate(vector)}


def out_of_fold(records: Records, wrong: NDArray[np.bool_], folds: NDArray[np.int64]) -> Vector:
    """Each answer's score by what the other folds teach; without the label-free score, which no layer changes."""
    bare = [{name: value for name, value in record.items() if name not in ANCHOR} for record in records]
    scores = np.zeros(len(wrong))
    for fold in range(FOLDS):
        inside = np.flatnonzero(folds != fold)
        learned = FusedStates().weighed([bare[row] for row in inside], wrong[inside])
        for row in np.flatnonzero(folds == fold):
            scores[row] = learned.uncertainty(bare[row])[0]
    return scores


def chosen(labelled: Answers, seed: int) -> str:
    """The layer that is taken: the fixed one, unless another is ahead by more than one standard error."""
    rng = np.random.default_rng([seed, len(labelled.wrong)])
    folds = np.zeros(len(labelled.wrong), dtype=np.int64)
    for kind in (labelled.wrong, ~labelled.wrong):
        folds[rng.permutation(np.flatnonzero(kind))] = np.arange(kind.sum()) % FOLDS
    scores = {
        layer: out_of_fold(records, labelled.wrong, folds)
        for layer, records in labelled.records.items()
        if layer != "all"
    }
    found = {layer: _auroc(each, labelled.wrong) for layer, each in scores.items()}
    best = max(found, key=lambda layer: found[layer])
    rows = [rng.integers(0, len(labelled.wrong), len(labelled.wrong)) for _ in range(RESAMPLES)]
    ahead = [
        _auroc(scores[best][some], labelled.wrong[some]) - _auroc(scores[labelled.fixed][some], labelled.wrong[some])
        for some in rows
    ]
    return best if found[best] - found[labelled.fixed] > float(np.std(ahead)) else labelled.fixed


def _auroc(scores: Vector, wrong: NDArray[np.bool_]) -> float:
    found = auroc(scores.tolist(), [not each for each in wrong])
    return 0.5 if found is None else found


def draw(answers: Answers, labels: int, seed: int) -> tuple[dict[str, float], str]:
    """AUROC by layer on the answers without labels, that of the chosen layer among them, and which was chosen."""
    order = np.random.default_rng([seed, labels]).permutation(len(answers.wrong))
    labelled, others = answers.part(order[:labels]), answers.part(order[labels:])
    found: dict[str, float] = {}
    for layer, records in labelled.records.items():
        learned = FusedStates().weighed(records, labelled.wrong)
        scores = np.array([learned.uncertainty(record)[0] for record in others.records[layer]])
        found[layer] = _auroc(scores, others.wrong)
    layer = chosen(labelled, seed)
    return found | {"chosen": found[layer]}, layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--states", type=Path, default=Path("output/layers"))
    options = parser.parse_args()
    options.states.mkdir(parents=True, exist_ok=True)
    model = LanguageModel.from_pretrained("smollm2")
    for folder in options.folders:
        answers = read(folder, model, options.states)
        print(f"\n{folder.name}: {len(answers.wrong)} answers, {np.mean(~answers.wrong):.0%} right", flush=True)
        names = [*answers.records, "chosen"]
        print(f"| labels | {' | '.join(names)} | chosen - {answers.fixed} | all - {answers.fixed} | taken |")
        print(f"| {' | '.join(['---'] * (len(names) + 4))} |")
        for labels in (most for most in LABELS if len(answers.wrong) - most >= 100):
            drawn = [draw(answers, labels, seed) for seed in range(options.draws)]
            means = [f"{np.mean([found[name] for found, _ in drawn]):.3f}" for name in names]
            gains = [
                _interval([found[name] - found[answers.fixed] for found, _ in drawn]) for name in ("chosen", "all")
            ]
            taken = [layer for _, layer in drawn]
            counts = ", ".join(f"{layer}: {taken.count(layer)}" for layer in answers.records if layer in taken)
            print(f"| {labels} | {' | '.join([*means, *gains, counts])} |", flush=True)


def _interval(values: Sequence[float]) -> str:
    low, high = np.quantile(values, [0.025, 0.975])
    return f"{np.mean(values):+.3f} ({low:+.3f} to {high:+.3f})"


if __name__ == "__main__":
    main()

"""Two promises about the sentences of answers, by gates over answers: sentences of one answer depend on each other.

The answer is the independent unit. Up to a threshold t an answer delivers the sentences whose compared score is at most
t (`on_doubt.compared_scores`); it delivers something where its most certain sentence does.

- **One sentence** (`"sentence"`): take an answer of which something is delivered, and one of its delivered sentences at
  random: it is wrong with probability at most alpha. At t the delivered sentence of smallest key represents its answer;
  keys are a hash of the text (`sentence_key`), so that no seed can be chosen.
- **Whole answers** (`"answer"`): of the answers from which something is delivered, at most alpha hold a wrong sentence
  among the delivered ones.

Where the first rate is .15, the second was .28 to .35 in simulations: they are never interchangeable. Neither is the
share of wrong ones among all delivered sentences, to which long answers contribute more.

**Theorem.** The delivered threshold has a rate above alpha with probability at most delta, if the rate crosses alpha
once, and

- an answer that delivers something up to the crossing is not, on average, wrong less often where it delivers more (for
  whole answers this holds by definition), and
- answers that begin to deliver beyond the crossing are wrong at a rate of at least alpha.

*Proof.* At a fixed t the answers that deliver are independent draws, and each is wrong (by its one sentence, or by any)
with probability R(t): the count is binomial, whatever the dependence inside. Sort answers by their most certain
sentence. The proof of `gates` then holds word for word: at the first gate beyond the crossing, its M answers from
before are wrong with probability at least alpha, by the first condition, and the others by the second.

Plain gates: looking ahead takes the joint law of all gates, which a sentence that is replaced by another one has not.
All sentences up to the threshold need a label, for the one that represents an answer changes with t. In 10,000
repetitions a cell, violations are at most .106 for delta = .1 (docs/results/guarantee-sentences.md).
"""

from __future__ import annotations

import hashlib
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.calibration import gates

Number = TypeVar("Number", np.intp, np.float64)

Promise = Literal["sentence", "answer"]

ASSUMPTIONS: dict[Promise, str] = {
    "sentence": (
        "calibration questions and later questions are independent draws from one population; as the threshold rises, "
        "the rate exceeds alpha from one point on, and beyond it further sentences are wrong at a rate of at least "
        "alpha"
    ),
    "answer": (
        "calibration questions and later questions are independent draws from one population; as the threshold rises, "
        "the rate exceeds alpha from one point on, and beyond it further answers hold a wrong sentence at a rate of at "
        "least alpha"
    ),
}
"""The assumption of each promise, in one sentence."""

START: dict[Promise, float] = {"sentence": 0.5, "answer": gates.START}
"""The share of the answers that the first gate holds, at least.

One sentence an answer tells less than all of them, so that an early gate fails by chance more often. (With
fabricated answers, 100 of them deliver .14 from a start at .3, and .23 from .5; elsewhere it changes .04 or less.)
"""


def sentence_key(question: str, answer: str, position: int) -> float:
    """The key of an answer's sentence, in [0, 1): it depends on the texts alone."""
    digest = hashlib.sha256("\0".join((question, answer, str(position))).encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8]) >> 11) / 2**53


def walk(
    compared: NDArray[np.float64],
    wrong: NDArray[np.bool_],
    keys: NDArray[np.float64],
    *,
    promise: Promise,
    alpha: float,
    delta: float,
    robust: bool = False,
) -> gates.Walk:
    """Walk the gates of answers: arrays of answers x sentences, with an infinite score where there is no sentence.

    The counts of the walk are answers from which something is delivered, and of these the wrong ones.
    """
    first = compared.min(axis=1, initial=np.inf)
    scores = np.sort(first[np.isfinite(first)])
    errors = wrong_answers(compared, wrong, keys, scores, promise=promise)
    return gates.walk_sorted(scores, errors, alpha=alpha, delta=delta, robust=robust, start=START[promise], ahead=False)


def wrong_answers(
    compared: NDArray[np.float64],
    wrong: NDArray[np.bool_],
    keys: NDArray[np.float64],
    thresholds: NDArray[np.float64],
    *,
    promise: Promise,
) -> NDArray[np.intp]:
    """How many answers are wrong at each threshold."""
    order = np.argsort(compared, axis=1, kind="stable")
    scores, wrong = np.take_along_axis(compared, order, 1), np.take_along_axis(wrong, order, 1)
    if promise == "answer":
        is_wrong = np.logical_or.accumulate(wrong, axis=1)
    else:
        keys = np.take_along_axis(keys, order, 1)
        lowest: NDArray[np.float64] = np.minimum.accumulate(keys, axis=1)
        smallest = (keys == lowest) * np.arange(compared.shape[1], dtype=np.intp)
        represents = np.maximum.accumulate(smallest, axis=1)  # the last that was the smallest so far
        is_wrong = np.take_along_axis(wrong, represents, 1)
    changes = np.diff(is_wrong.astype(np.intp), axis=1, prepend=0)
    return totals(scores, changes, thresholds)


def totals(scores: NDArray[np.float64], changes: NDArray[Number], thresholds: NDArray[np.float64]) -> NDArray[Number]:
    """The sum, at each threshold, of the changes at scores up to it."""
    order = np.argsort(scores, axis=None)
    sums = np.append(np.zeros(1, changes.dtype), np.cumsum(changes.ravel()[order]))
    return sums[np.searchsorted(scores.ravel()[order], thresholds, side="right")]

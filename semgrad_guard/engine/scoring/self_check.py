"""Which ways of replaying are exact on a model: they are held against its own ordinary call and plain autograd.

This is done once, on two short made-up prompts, in float32 (or float64) whatever the model's dtype is: bfloat16's own
noise hides errors of ten per cent and more. A model in half precision is checked by a float32 copy, or a few layers of
it where the copy would be large; in its own dtype it must then agree as far as that allows.

Recurrent and convolutional layers read padding as text, so that most of their models pad no rows. Rows of equal length
need no padding; whether each equals the same row alone shows in a short answer to made-up prompts, cached steps
included.

Why: docs/adr/0095-exactness-against-the-ordinary-call.md
Why: docs/adr/0096-self-check-in-float32.md
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from transformers import GenerationConfig

from semgrad_guard.engine.models.architecture import Architecture
from semgrad_guard.engine.objective import LogitTransform, Objective
from semgrad_guard.engine.replay.batch import TokenBatch, is_out_of_memory, unless_memory_runs_out
from semgrad_guard.engine.replay.replayer import Replayer
from semgrad_guard.engine.scoring.gradients import (
    NO_GRADIENT,
    Exactness,
    GradientScores,
    Tier,
    deviation,
    no_gradient,
    score_by,
    through_logits,
    tolerance_of,
)
from semgrad_guard.engine.scoring.observation import observed_layer
from semgrad_guard.errors import AnswerInterruptedError, SemGradGuardError, UnsupportedModelError

logger = logging.getLogger("semgrad_guard")

_HeadOutput = tuple[torch.Tensor | None, torch.Tensor | None]
"""The head's output, and the model's logits."""

_PROMPT, _SHORT_PROMPT, _RESPONSE, _CONTEXT = 9, 5, 4, 2
_ROWS, _STEPS = 3, 3

T = TypeVar("T")


def self_check(architecture: Architecture, replayer: Replayer, sample: Callable[[], Replayer] | None) -> Exactness:
    """Which ways are exact on the model that `replayer` replays; `sample` makes its copy in a wider number format.

    Where there is nothing to compare by (broken weights), `failure` is set, until the model changes.

    Raises:
        UnsupportedModelError: the model's own ordinary call cannot be differentiated; the message gives the reason.
    """
    check = _Check(architecture, replayer)
    expected = check.expected()
    if expected.reason is not None:
        return Exactness(transform=architecture.transform, failure=expected.reason)
    if architecture.layers is None:
        logger.info("semgrad-guard replays whole sequences: this architecture has no known list of decoder layers")
        return Exactness(transform=architecture.transform)
    wide = replayer.head.weight.dtype.itemsize >= torch.float32.itemsize
    found = check.settled() if wide or sample is None else _by_sample(architecture, sample, check)
    replayer.plain = found.plain
    if "prefix" not in found.tiers:
        logger.warning("semgrad-guard steps down to slower scoring for this model: %s", [*found.tiers])
    return replace(found, token_bytes=replayer.token_bytes()) if "captured" in found.tiers else found


def tiers_in_context(
    architecture: Architecture, replayer: Replayer, sample: Callable[[], Replayer] | None, found: Exactness
) -> Exactness:
    """`found` with the tiers that are exact for a response with context; none where its keys cannot be constants."""
    if not architecture.attends:
        return replace(found, in_context=())
    if found.tiers == ("full",) and found.failure is not None:
        return replace(found, in_context=found.tiers)
    wide = replayer.head.weight.dtype.itemsize >= torch.float32.itemsize
    check = _Check(architecture, replayer if wide or sample is None else sample())
    check.replayer.plain = found.plain
    return check.in_context(found)


def _by_sample(architecture: Architecture, sample: Callable[[], Replayer], check: _Check) -> Exactness:
    """The result of a float32 copy, as far as the model in its own dtype does not contradict it."""
    found = _attempted(
        lambda: _Check(architecture, sample()).settled(),
        lambda error: logger.warning("semgrad-guard: this model cannot be checked in float32 (%r)", error),
    )
    if found is None:  # an unchecked way is not used
        return Exactness(transform=architecture.transform)
    check.replayer.plain = found.plain
    tiers = [tier for tier in found.tiers if tier == "full" or check.agrees(tier, found)]
    return replace(found, tiers=tuple(tiers))


class _Check:
    """The comparisons on one replayer."""

    def __init__(self, architecture: Architecture, replayer: Replayer) -> None:
        self.architecture, self.replayer = architecture, replayer
        self.objective = Objective()
        # A layer with others to leave out below it and to replay above, and the last.
        self.span = tuple(sorted({observed_layer(architecture.n_layers), architecture.n_layers - 1}))
        self.tolerance = tolerance_of(replayer.head.weight.dtype)
        self._expected: list[GradientScores] = []
        self._known: dict[tuple[int, tuple[int, ...]], tuple[GradientScores, _HeadOutput]] = {}

    def expected(self) -> GradientScores:
        """The scores of the first prompt by plain autograd and the model's ordinary call."""
        expected, _ = self._full(_PROMPT)
        while expected.reason == NO_GRADIENT and self.span[0] > 0:
            # Nothing may come through an upper layer's state at t*: layers that attend to the keys of lower ones
            # alone pass nothing on from token to token. Lower layers do.
            self.span = (self.span[0] - 1,)
            expected, _ = self._full(_PROMPT)
        if expected.reason == NO_GRADIENT:
            raise no_gradient()
        self._expected = [expected]
        return expected

    def settled(self) -> Exactness:
        """The better of both: the faster way of replaying, or where that is not exact, the one nearer to the model."""
        self.expected()
        long, outputs = self._full(_PROMPT)
        short, _ = self._full(_SHORT_PROMPT)
        if outputs[1] is not None:  # some models round them to float32
            self.tolerance = max(self.tolerance, tolerance_of(outputs[1].dtype))
        self._expected = [long, short]
        basis = Exactness(transform=_measured(self.architecture.transform, *outputs))
        found: list[Exactness] = []
        failures: list[str] = []
        for plain in (False, True):
            self.replayer.plain = plain
            found.append(self._tiers(replace(basis, plain=plain), failures))
            if found[0].rank >= (True, True) or not self.architecture.cuttable:
                break
        best = max(found, key=lambda way: way.rank)
        for failure in failures if "prefix" not in best.tiers else ():
            logger.warning("semgrad-guard: %s", failure)
        return best

    def agrees(self, tier: Tier, found: Exactness) -> bool:
        """Whether a tier agrees with plain autograd in this replayer's dtype, as far as that allows."""
        off = _attempted(
            lambda: self._deviation(tier, found),
            lambda error: logger.warning("semgrad-guard: the %s tier fails in this model's dtype (%r)", tier, error),
        )
        return off is not None and off <= self.tolerance

    def in_context(self, found: Exactness) -> Exactness:
        """`found` with the tiers that agree with plain autograd, where keys and values of a context are constants."""
        self.expected()
        batch = self._batch(_PROMPT, *([_SHORT_PROMPT] if found.pads else []), context=_CONTEXT)
        expected = _attempted(lambda: self._score("full", found, batch), _log("a response with context"))
        plain = self._score("full", found, replace(batch, context=()))

        def agree(ours: Sequence[GradientScores] | None, theirs: Sequence[GradientScores]) -> bool:
            pairs = zip(ours or (), theirs, strict=True) if ours else ()
            return bool(ours) and all(deviation(a, b) <= self.tolerance for a, b in pairs)

        # Of the numbers, context changes none but SemGrad.
        both = zip(plain, expected or (), strict=False)
        if expected is None or not agree(
            expected, [replace(one, semgrad=own.semgrad, grid=own.grid) for one, own in both]
        ):
            return replace(found, in_context=())

        def is_exact(tier: Tier, merges: bool) -> bool:
            way = replace(found, in_context=(tier,), merges=merges)
            return agree(_attempted(lambda: self._score(tier, way, batch), _log(f"the {tier} tier")), expected)

        def exact(merges: bool) -> Exactness:
            tiers = tuple(tier for tier in found.tiers if tier == "full" or (found.cuts and is_exact(tier, merges)))
            return replace(found, in_context=tiers, merges=merges)

        merged = exact(merges=True) if self.architecture.takes_positions else found
        return merged if merged.in_context == found.tiers else exact(merges=False)

    def _full(self, prompt: int) -> tuple[GradientScores, _HeadOutput]:
        if (known := self._known.get((prompt, self.span))) is not None:
            return known
        try:
            replayed = self.replayer.full(self._batch(prompt), self.span)
            (scores,) = through_logits(self._batch(prompt), self.objective, replayed)
        except SemGradGuardError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise UnsupportedModelError(
                "this model's own ordinary call cannot be differentiated: "
                f"{type(error).__name__}: {' '.join(str(error).split())[:300]} Check that model(input_ids=...) runs by "
                "itself; if it does, its code rules a gradient score out."
            ) from error
        # Of the replay, only the head's output is needed again: no graph is kept.
        logits, raw = (None if x is None else x.detach() for x in (replayed.logits, replayed.raw_logits))
        self._known[prompt, self.span] = found = scores, (raw, logits)
        return found

    def _tiers(self, basis: Exactness, failures: list[str]) -> Exactness:
        """The tiers that are exact, with replays from t* on if these are, and else with whole ones."""
        cuts = self.architecture.cuttable
        tried: list[tuple[Tier, bool]] = [("captured", True), ("prefix", True)] if cuts else []
        found: dict[Tier, float] = {}
        way = replace(basis, cuts=cuts)
        for tier, cut in [*tried, ("prefix", False)]:
            if tier in found:
                continue
            way = replace(way, cuts=cut or "captured" in found)
            off = self._tried(tier, replace(basis, cuts=cut), failures)
            if off is not None:
                found[tier], way = off, replace(way, cuts=cut)
        whole = replace(basis, tiers=(*found, "full"), deviations={**found, "full": 0.0}, cuts=way.cuts)
        return replace(whole, pads=self._pads(whole, failures))

    def _tried(self, tier: Tier, way: Exactness, failures: list[str]) -> float | None:
        """How far a tier is off; None if that is too far, or it fails."""
        off = _attempted(
            lambda: self._deviation(tier, way),
            lambda error: failures.append(f"the {tier} tier fails on this model ({error!r})"),
        )
        if off is None or off <= self.tolerance:
            return off
        failures.append(f"the {tier} tier disagrees with autograd by {off:.1%}")
        return None

    def _pads(self, found: Exactness, failures: list[str]) -> bool:
        """Whether a row that is padded on the left, and given its positions, gives the same as by itself."""
        if not (found.cuts and "prefix" in found.tiers and self.architecture.takes_positions):
            return False
        try:
            rows = self._score("prefix", found, self._batch(_PROMPT, _SHORT_PROMPT))
        except AnswerInterruptedError:
            raise
        except Exception as error:  # noqa: BLE001 - as above; without room for two rows, there is none for padding
            failures.append(f"padding fails on this model ({error!r})")
            return False
        # A row without finite scores is given a second chance by itself, whenever that happens. One that lost its
        # gradient was read otherwise.
        return all(
            row.reason not in (None, NO_GRADIENT) or deviation(row, e) <= self.tolerance
            for row, e in zip(rows, self._expected, strict=True)
        )

    def _deviation(self, tier: Tier, way: Exactness) -> float:
        (scores,) = self._score(tier, way, self._batch(_PROMPT))
        return deviation(scores, self._expected[0])

    def _score(self, tier: Tier, way: Exactness, batch: TokenBatch) -> list[GradientScores]:
        records = tier == "captured" and not batch.context
        captured = self.replayer.record(batch, self.span[0]) if records else None
        rows = score_by(
            tier, way, replayer=self.replayer, batch=batch, objective=self.objective, span=self.span, captured=captured
        )
        return [parts[0] for parts in rows]

    def _batch(self, *prompts: int, context: int = 0) -> TokenBatch:
        """Made-up rows with prompts of so many tokens, and context between them and the response."""
        vocabulary, device = self.replayer.head.weight.shape[0], self.replayer.head.weight.device
        ids = [(7919 * i + 104729) % vocabulary for i in range(_PROMPT + _RESPONSE)]
        rows = [ids[:length] for length in prompts]
        within = [ids[-context - place : len(ids) - place] for place in range(len(rows))] if context else None
        return TokenBatch.of(rows, [ids[_PROMPT:]] * len(rows), [-3] * len(rows), device, context=within)


def _attempted(work: Callable[[], T], complain: Callable[[Exception], None]) -> T | None:
    """The result of `work`; None where it fails, for unknown model code may fail in any way."""
    try:
        return work()
    except AnswerInterruptedError:
        raise
    except Exception as error:
        if is_out_of_memory(error):  # no matter of the tier
            raise
        complain(error)
        return None


def _log(subject: str) -> Callable[[Exception], None]:
    return lambda error: logger.info("semgrad-guard: %s cannot be replayed in context (%r)", subject, error)


def _measured(declared: LogitTransform, raw: torch.Tensor | None, logits: torch.Tensor | None) -> LogitTransform:
    """The transform after the head: as the config declares if that is so, else the factor, or the cap, that is seen."""
    if raw is None or logits is None or raw.shape != logits.shape:
        return declared
    raw, logits = raw.double().flatten(), logits.double().flatten()

    def explains(transform: LogitTransform) -> bool:
        return bool(torch.allclose(transform(raw), logits, rtol=1e-4, atol=1e-5 * float(logits.abs().max())))

    greatest = raw.abs().topk(min(64, len(raw))).indices
    seen = (
        LogitTransform(scale=float((logits[greatest] / raw[greatest]).median())),
        LogitTransform(softcap=_cap(float(raw[greatest[0]]), float(logits[greatest[0]]))),
    )
    return next((transform for transform in (declared, *seen) if explains(transform)), declared)


def _cap(raw: float, capped: float) -> float:
    """The c of c tanh(raw / c) = capped, by bisection."""
    low, high = abs(capped), 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * math.tanh(abs(raw) / middle) < abs(capped) else (low, middle)
    return high


def equal_rows_stand_alone(replayer: Replayer) -> bool:
    """Whether rows of a batch that begin and end their prompts together give the logits that each gives alone.

    Not where that is unknown: a model whose code fails in a batch, or that has no room for one.
    """
    agree = unless_memory_runs_out(
        lambda: _attempted(
            lambda: _rows_agree(replayer),
            lambda error: logger.warning(
                "semgrad-guard: this model answers one prompt after the other; a batch fails (%r)", error
            ),
        )
    )
    return agree or False


def _rows_agree(replayer: Replayer) -> bool:
    weight = replayer.head.weight
    tolerance = tolerance_of(weight.dtype)
    numbers = torch.arange(_ROWS * _PROMPT, device=weight.device)
    prompts = ((7919 * numbers + 104729) % weight.shape[0]).view(_ROWS, _PROMPT)
    config = GenerationConfig(
        max_new_tokens=_STEPS, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True
    )
    whole = replayer.generate(prompts, torch.ones_like(prompts), generation_config=config)
    for row in range(_ROWS):
        own = replayer.generate(prompts[row : row + 1], torch.ones_like(prompts[:1]), generation_config=config)
        for step in range(_STEPS):
            alone, beside = own.logits[step][0].double(), whole.logits[step][row].double()
            if not bool((alone - beside).abs().max() <= tolerance * alone.abs().max()):  # NaN is no agreement
                return False
            if own.sequences[0, _PROMPT + step] != whole.sequences[row, _PROMPT + step]:
                break  # a tie that fell the other way: from here on texts differ
    return True

"""The cost of other scores, next to HybridGrad: each one's extra time over plain greedy generation of the answer.

    python benchmarks/rivals.py [--shape 0.5B] [--dtype float32] [--rounds 5] [--output rivals.json]
    python benchmarks/rivals.py --quick                                 (small shapes, to see that everything runs)

The project's own estimators: Semantic Entropy and SAR over ten samples with judges of their published sizes, LN-PE over
ten samples (sampling alone: the least cost of every sampling method), P(True). All weights are random: ten samples
are ten different texts, so a judge sees every pair; samples that coincide would save pairs, never samples.

One process, one thread. The ways take turns within each round, in an order that alternates; every score gets an answer
of its own and every round other samples, so that nothing is served from memory. CPU seconds of this process, as ratios
to plain generation round by round: median (least-greatest).

A score is measured in as many of the rounds as fit into 20 minutes by its operations and the machine's rate, and left
out, by name, where not one does or where the memory does not hold its judge.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import command
import psutil
import torch
from judges import LARGE_CROSS, LARGE_NLI, TINY_CROSS, TINY_NLI, XLARGE_NLI, Judge, word_tokenizer
from machine import about, cpu_seconds, measured_rates, spread
from rich.console import Console
from shapes import NAIVE_MINUTES, SEMANTIC_TOKEN, Setting, build, layer_weights
from tables import machine_line, ranged, table
from transformers import GenerationConfig

from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel
from semgrad_guard.engine.answers.options import Sampling
from semgrad_guard.estimators import SAR, LengthNormalisedEntropy, NLIEquivalence, PTrue, SemanticEntropy

SAMPLES = 10
P_TRUE_WORDS = 25
"""Words of the question whether an answer is true."""

OURS, PLAIN, CAPTURING = "HybridGrad", "plain", "with capture"
SETTINGS = (Setting(60, 8), Setting(60, 32))


@dataclass(frozen=True)
class Rival:
    """A score that is measured. `make` takes the round's plan and the judge, built."""

    title: str
    make: Callable[[Sampling, Any], Any]
    judge: Judge | None = None
    pairs: Callable[[int], int] = lambda answer: 0
    """Pairs of texts that its judge reads, by the answer's length in tokens."""


def rivals(nli: tuple[Judge, ...], cross: Judge) -> list[Rival]:
    """The scores that are measured, cheapest first."""
    return [
        Rival(OURS, lambda plan, _: HybridGrad()),
        Rival("P(True)", lambda plan, _: PTrue()),
        Rival("LN-PE", lambda plan, _: LengthNormalisedEntropy(plan)),
        *(
            Rival(
                f"Semantic Entropy, {judge.name}",
                lambda plan, model: SemanticEntropy(plan, NLIEquivalence(model)),
                judge,
                lambda answer: SAMPLES * (SAMPLES - 1),
            )
            for judge in nli
        ),
        Rival(
            f"SAR, {cross.name}",
            lambda plan, model: SAR(plan, model),
            cross,
            lambda answer: SAMPLES * answer + SAMPLES * (SAMPLES - 1) // 2,
        ),
    ]


def operations(rival: Rival, config: Any, setting: Setting) -> float:
    """Floating-point operations of one score at least: attention and everything about HybridGrad left out."""
    weights = layer_weights(config) * config.num_hidden_layers + config.vocab_size * config.hidden_size
    text = setting.prompt + setting.answer
    if rival.title in (OURS, "P(True)"):
        return 2.0 * weights * (text + P_TRUE_WORDS)
    sampling = 2.0 * weights * (setting.prompt + 2 * SAMPLES * setting.answer)  # drawn, then read
    per_pair = 2.0 * rival.judge.layer_weights * 2 * text if rival.judge else 0.0
    return sampling + rival.pairs(setting.answer) * per_pair


def affordable_rounds(operations: float, flops_per_second: float, rounds: int) -> int:
    """As many of the rounds as fit into the minutes that a cell may take; 0 where not one does."""
    return min(rounds, int(60 * NAIVE_MINUTES * flops_per_second / operations))


class Arena:
    """One model, one setting, and the ways that take turns."""

    def __init__(self, model: Any, tokenizer: Any, setting: Setting) -> None:
        self._plain, self.setting = model, setting
        self.model = LanguageModel.from_transformers(model, tokenizer, name="random", semantic_token=SEMANTIC_TOKEN)
        self._options = GenerationOptions(max_tokens=setting.answer)
        around = len(self.model.render("w0").ids) - 1
        self._question = " ".join(f"w{11 * number}" for number in range(setting.prompt - around))
        self._ids = torch.tensor([self.model.render(self._question).ids])
        assert self._ids.shape[1] == setting.prompt, "not the prompt to be measured"
        HybridGrad()(self.answer().evidence)  # once unmeasured: buffers, kernels, the self-check

    def plain(self) -> None:
        """Greedy generation with the model as it is."""
        count = self.setting.answer
        options = GenerationConfig(max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        self._plain.generate(self._ids, attention_mask=torch.ones_like(self._ids), generation_config=options)

    def answer(self) -> Any:
        """The same through the engine, which keeps the states for HybridGrad."""
        found = self.model.generate(self._question, self._options)
        assert len(found.response_ids) == self.setting.answer, "the answer ended early; take another seed"
        return found

    def scoring(self, estimator: Any) -> float:
        """CPU seconds of one score, for an answer that nothing is known about yet."""
        evidence = self.answer().evidence

        def score() -> None:
            found = estimator(evidence)
            assert found.uncertainty is not None, f"{type(estimator).__name__}: {found.reason}"

        return cpu_seconds(score)


Entry = tuple[Rival, int, Any]
"""A rival, the rounds it is measured in, and its judge, built."""


def enter(rival: Rival, rounds: int, judges: dict[str, Any]) -> Entry | str:
    """The rival with its judge, one of `judges` or built and put there; or why it is left out."""
    if not rounds:
        return f"one round would take more than {NAIVE_MINUTES} minutes"
    if rival.judge is None:
        return rival, rounds, None
    if rival.judge.name not in judges:
        needed, free = 1.5 * rival.judge.bytes, psutil.virtual_memory().available
        if needed > free:
            return f"its judge would need {needed / 2**30:.1f} GiB of {free / 2**30:.1f}"
        judges[rival.judge.name] = rival.judge.build()
    return rival, rounds, judges[rival.judge.name]


def measured(
    arena: Arena, entered: Mapping[str, Entry], rounds: int, tell: Callable[[str], object] = lambda text: None
) -> Iterator[dict[str, list[float]]]:
    """CPU seconds of each way so far, after every round; `tell` gets the current way."""
    seconds: dict[str, list[float]] = {name: [] for name in (PLAIN, CAPTURING, *entered)}
    for number in range(rounds):
        plan = Sampling(count=SAMPLES, seed=number, max_tokens=arena.setting.answer)
        turns: dict[str, Callable[[], float]] = {
            PLAIN: lambda: cpu_seconds(arena.plain),
            CAPTURING: lambda: cpu_seconds(arena.answer),
        }
        for name, (rival, own_rounds, judge) in entered.items():
            if number < own_rounds:
                turns[name] = lambda make=rival.make, judge=judge, plan=plan: arena.scoring(make(plan, judge))
        for name in turns if number % 2 == 0 else reversed(list(turns)):
            tell(f"{arena.setting}, round {number + 1} of {rounds}: {name}")
            seconds[name].append(turns[name]())
        yield seconds


def ratios(seconds: Mapping[str, list[float]]) -> dict[str, dict[str, list[float]]]:
    """Each way over plain generation, and over HybridGrad: median, least, greatest of its rounds."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, values in seconds.items():
        if name != PLAIN and values:
            found[name] = {
                "share_of_plain": spread([a / b for a, b in zip(values, seconds[PLAIN], strict=False)]),
                "over_ours": spread([a / b for a, b in zip(values, seconds[OURS], strict=False)]),
            }
    return found


def markdown(report: Mapping[str, Any]) -> str:
    """The table for a page of the documentation, and the names left out."""
    lines: list[tuple[str, ...]] = []
    for row in report["rows"]:
        for name, found in row["ratios"].items():
            values = row["seconds"][name]
            over = "" if name == CAPTURING else ranged(found["over_ours"], digits=1)
            cells = (f"{statistics.median(values):.2f}", ranged(found["share_of_plain"], digits=2), over)
            lines.append((row["setting"], name, *cells, str(len(values))))
    header = ("prompt/answer", "score", "seconds", "over plain generation", "over HybridGrad", "rounds")
    left_out = [f"- {row['setting']}: {name}: {why}" for row in report["rows"] for name, why in row["left_out"].items()]
    return "\n".join([machine_line(report), "", *table(header, lines), "", *left_out]) + "\n"


def main() -> None:
    arguments = parsed()
    torch.set_num_threads(1)
    nli, cross = ((TINY_NLI,), TINY_CROSS) if arguments.quick else ((LARGE_NLI, XLARGE_NLI), LARGE_CROSS)
    shape, rounds = ("small", 2) if arguments.quick else (arguments.shape, arguments.rounds)
    console = Console(stderr=True)
    with console.status(f"building the {shape} shape"):
        model = build(shape, getattr(torch, arguments.dtype))
        tokenizer = word_tokenizer(model.config.vocab_size)
        rates = measured_rates(torch.float32)  # the judges' dtype, and the faster one
    judges: dict[str, Any] = {}
    report: dict[str, Any] = {"shape": shape, "device": "cpu", "dtype": arguments.dtype, "machine": about(), "rows": []}
    for setting in SETTINGS[:1] if arguments.quick else SETTINGS:
        if arguments.only not in (None, str(setting)):
            continue
        entered: dict[str, Entry] = {}
        left_out: dict[str, str] = {}
        for rival in rivals(nli, cross):
            own_rounds = affordable_rounds(operations(rival, model.config, setting), rates.flops_per_second, rounds)
            with console.status(f"{setting}: {rival.title}, {own_rounds} rounds"):
                found = enter(rival, own_rounds, judges)
            if isinstance(found, str):
                left_out[rival.title] = found
            else:
                entered[rival.title] = found
        row: dict[str, Any] = {"setting": str(setting), "left_out": left_out}
        report["rows"].append(row)
        with console.status(f"{setting}: warming up") as status:
            arena = Arena(model, tokenizer, setting)
            for seconds in measured(arena, entered, rounds, status.update):
                row |= {"seconds": seconds, "ratios": ratios(seconds)}
                command.keep(report, arguments.output)
    print(markdown(report))


def parsed() -> argparse.Namespace:
    options = command.parser(__doc__, rounds="how often each way takes its turn at most")
    options.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    options.add_argument("--quick", action="store_true", help="small shapes, two rounds: does everything run?")
    options.add_argument("--only", choices=[str(setting) for setting in SETTINGS], help="only this setting")
    return command.parsed(options)


if __name__ == "__main__":
    main()

"""What a score costs: scoring as a share of plain greedy generation, and against the official algorithm.

    python benchmarks/scoring.py [--output results.json] [--quick]

A model of Qwen2.5-0.5B's shape (tied head) with random weights, one thread. The five ways below take turns within each
round, in one process, so that whatever else the machine does falls on all of them; times are CPU seconds of this
process, the median of the rounds. Peak memory is that of a forked child (its resident high-water mark, reset just
before the scoring, above what it held then).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from memory import peak_above_start
from naive import naive_scores
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from semgrad_guard.engine.hidden_states import Capture
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay import Trace
from semgrad_guard.engine.scoring import scorer_of
from semgrad_guard.engine.token_batch import TokenBatch

SHAPE = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151_936,
}
SMALL = SHAPE | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4}
WAYS = ("plain", "capturing", "captured", "prefix", "naive")
SEMANTIC_TOKEN = -3
OBJECTIVE = Objective("official")


@dataclass(frozen=True)
class Setting:
    """A batch of `rows` prompts of `prompt` tokens, each answered with `answer` tokens."""

    prompt: int
    answer: int
    rows: int = 1

    def __str__(self) -> str:
        return f"{self.prompt}/{self.answer}" + (f", batch of {self.rows}" if self.rows > 1 else "")


SETTINGS = (Setting(60, 8), Setting(60, 32), Setting(60, 128), Setting(1000, 8), Setting(60, 16, rows=8))
QUICK = (Setting(60, 8), Setting(200, 8), Setting(60, 8, rows=3))


class Bench:
    """One model, one setting, and the five ways through it."""

    def __init__(self, model: Any, setting: Setting) -> None:
        self.model, self.setting = model, setting
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(0, 150_000, (setting.rows, setting.prompt), generator=generator)
        self.scorer = scorer_of(model)
        self.scorer.tiers()
        self.ids, self.trace = self.prompts, None
        self.capturing()
        self.captured()  # once unmeasured: buffers, kernels

    def plain(self) -> None:
        """Greedy generation with the model as it is."""
        mask = torch.ones_like(self.prompts)
        self.model.generate(self.prompts, attention_mask=mask, generation_config=self._options())

    def capturing(self) -> None:
        """The same through the engine, which keeps h^(k) from t* on."""
        layer = OBJECTIVE.span(self.scorer.architecture.n_layers)[0]
        capture = Capture(layer, self.setting.prompt + SEMANTIC_TOKEN)
        mask = torch.ones_like(self.prompts)
        options = self._options()
        options.return_dict_in_generate = True
        output = self.scorer.current_replayer().generate(self.prompts, mask, capture, generation_config=options)
        self.ids, self.trace = output.sequences, Trace(output.past_key_values, layer, capture.states())

    def captured(self) -> list[tuple[float, float]]:
        """Scoring what was just generated."""
        return self._score(self.trace)

    def prefix(self) -> list[tuple[float, float]]:
        """Scoring the same text as if it came from anywhere else."""
        return self._score(None)

    def naive(self) -> list[tuple[float, float]]:
        """The official algorithm."""
        rows = self.ids.split(1)
        return [naive_scores(self.model, row, self.setting.prompt, SEMANTIC_TOKEN) for row in rows]

    def _score(self, trace: Trace | None) -> list[tuple[float, float]]:
        responses = self.ids[:, self.setting.prompt :].tolist()
        batch = TokenBatch.of(self.prompts.tolist(), responses, [SEMANTIC_TOKEN] * self.setting.rows, "cpu")
        found = self.scorer.score(batch, OBJECTIVE, trace)
        wanted = "prefix" if trace is None else "captured"
        assert all(scores.tier == wanted for scores in found), "not the tier to be measured"
        return [(scores.semgrad or 0.0, scores.paragrad or 0.0) for scores in found]

    def _options(self) -> GenerationConfig:
        count = self.setting.answer
        return GenerationConfig(max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)


def measure(bench: Bench, rounds: int) -> dict[str, Any]:
    """CPU seconds per way and round, the agreement of the ways, and the peak memory of the scoring ones."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    results: dict[str, Any] = {}
    for _ in range(rounds):
        for way in WAYS:
            start = time.process_time()
            results[way] = getattr(bench, way)()
            seconds[way].append(time.process_time() - start)
    memory = {way: peak_above_start(getattr(bench, way), prepare=bench.capturing) for way in WAYS[2:]}
    ours, theirs = (torch.tensor(results[way]) for way in ("captured", "naive"))
    return {
        "setting": str(bench.setting),
        "seconds": seconds,
        "peak_mb": memory,
        "worst_relative_difference_to_naive": float(((ours - theirs) / theirs).abs().max()),
        **summary(seconds),
    }


def summary(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Each way as a share of plain generation, round by round: median, least and greatest; and naive over ours."""
    shares = {way: [a / b for a, b in zip(seconds[way], seconds["plain"], strict=True)] for way in WAYS[1:]}
    ratios = [a / b for a, b in zip(seconds["naive"], seconds["captured"], strict=True)]
    spreads = {way: spread(values) for way, values in shares.items()}
    return {"share_of_plain": spreads, "naive_over_captured": spread(ratios)}


def spread(values: Sequence[float]) -> list[float]:
    """Median, least, greatest."""
    return [statistics.median(values), min(values), max(values)]


HEADER = (
    "dtype",
    "prompt/answer",
    "generation, s",
    "with capture",
    "scoring",
    "scoring, prefix",
    "official",
    "official/ours",
    "peak MB",
    "official peak MB",
)


def cells(dtype: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """One row of the table, as text."""

    def share(way: str) -> str:
        middle, low, high = row["share_of_plain"][way]
        return f"{middle:.3f} ({low:.3f}-{high:.3f})"

    return (
        dtype,
        row["setting"],
        f"{statistics.median(row['seconds']['plain']):.2f}",
        *(share(way) for way in WAYS[1:]),
        f"{row['naive_over_captured'][0]:.1f}",
        f"{row['peak_mb']['captured']:.0f}",
        f"{row['peak_mb']['naive']:.0f}",
    )


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def markdown(report: Mapping[str, Any]) -> str:
    """The table for a page of the documentation."""
    about = report["machine"]
    lines = [
        f"{report['shape']}, random weights, tied head; {about['cpu']} ({about['capability']}), "
        f"{about['threads']} thread, torch {about['torch']}, transformers {about['transformers']}, {about['date']}. "
        "Shares of plain greedy generation: median (least-greatest) of interleaved rounds, CPU time.",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|" + " --- |" * len(HEADER),
    ]
    lines += ["| " + " | ".join(cells(row["dtype"], row)) + " |" for row in report["rows"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the figures go (JSON; a table in markdown beside it)")
    parser.add_argument("--quick", action="store_true", help="a small shape and few rounds, to see that it runs")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way takes its turn (3)")
    parser.add_argument("--dtype", action="append", choices=["bfloat16", "float32"], help="default: both")
    parser.add_argument("--only", help="only the settings whose name holds this text, for example 60/8")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console, rows = Console(width=200), []
    table = Table(*HEADER, title="Scoring as a share of plain greedy generation")
    for dtype in arguments.dtype or ["bfloat16", "float32"]:
        torch.manual_seed(0)
        config = Qwen2Config(**(SMALL if arguments.quick else SHAPE), tie_word_embeddings=True)
        with console.status(f"building the model in {dtype}"):
            model = Qwen2ForCausalLM(config).to(getattr(torch, dtype)).eval()
        for setting in QUICK if arguments.quick else SETTINGS:
            if arguments.only and arguments.only not in str(setting):
                continue
            with console.status(f"{dtype}, {setting}"):
                row = {"dtype": dtype, **measure(Bench(model, setting), arguments.rounds)}
            rows.append(row)
            table.add_row(*cells(dtype, row))
            console.print(*cells(dtype, row), sep="  ")
    console.print(table)
    shape = "the small shape of --quick" if arguments.quick else "Qwen2.5-0.5B's shape"
    report = {"shape": shape, "machine": machine(), "rows": rows}
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1))
        arguments.output.with_suffix(".md").write_text(markdown(report))
        console.print(f"written: {arguments.output} and {arguments.output.with_suffix('.md')}")


if __name__ == "__main__":
    main()

"""The cost of a score: scoring as a share of plain greedy generation, and against the official algorithm.

    python benchmarks/scoring.py [--shape 0.5B] [--cells usual] [--dtype float32] [--output results.json]
    python benchmarks/scoring.py --compare benchmarks/recorded.json      (exit status 1 if a ratio has worsened)
    python benchmarks/scoring.py --frugal           (also the mode that holds least memory: its time and its peak)
    python benchmarks/scoring.py --cells full --output results.json --resume          (resume a run)

Models of known shapes with random weights, one thread. The ways below take turns within each round, in one process, so
that whatever else the machine does falls on all of them; times are CPU seconds of this process (wall-clock seconds with
synchronisation on a GPU), and every figure is a ratio taken round by round. A decode step is (generation - generation
of one token) / (answer - 1). Peak memory is that of a forked child above what it held when the scoring began.

`--compare` holds the least of the rounds against the recorded one, not the median: noise on a shared machine only ever
adds time. Shares of generation compare between processors of one kind only, and the file holds a report for each kind.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import (
    about,
    cpu_seconds,
    gpu_seconds,
    keep,
    over,
    parsed,
    parser,
    peak_above_start,
    ranged,
    spread,
    table,
)
from shapes import CELLS, SEMANTIC_TOKEN, SHAPES, Setting, build
from transformers import GenerationConfig

from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores.replay import cut_cache
from semgrad_guard.engine.scores.scorer import clean_slate, scorer_of
from semgrad_guard.engine.scores.tape import FRUGAL, Memory, Recorder, Row, Tape, growing_cache, keys_of
from semgrad_guard.engine.scores.twin import CACHE
from semgrad_guard.errors import InputError

GENERATING = ("plain", "first_token", "capturing")
SCORING = ("written", "read", "frugal", "naive")
OBJECTIVE = Objective("official")
NAIVE_TOKENS = 3000  # the official algorithm keeps a graph of every token and layer: larger cells are left out
TOLERANCE, MEMORY_TOLERANCE_MB = 1.35, 40
Scores = list[tuple[float, float]]
HEADER = (
    "dtype",
    "prompt/answer",
    "generation, s",
    "with capture",
    "scoring",
    "decode steps",
    "scoring, read",
    "scoring, frugal",
    "official",
    "kept MB",
    "peak MB",
    "frugal peak MB",
    "official peak MB",
)


class Bench:
    """One model and one setting; `plain` to `naive` are the ways, and each leaves the tapes for the next ones."""

    def __init__(self, model: Any, setting: Setting) -> None:
        self.model, self.setting = model, setting
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, model.config.vocab_size - 2000, (setting.rows, setting.prompt), generator=generator)
        self.prompts = ids.to(model.device)
        self.scorer = scorer_of(model)
        self.scorer.exactness()
        self.bare = self._recorded(FRUGAL)
        self.capturing()
        self.written()  # once unmeasured: buffers, kernels

    def first_token(self) -> None:
        """Generation of a single token: the prompt's share of the time."""
        self._generate(1, self.prompts, self.model)

    def plain(self) -> None:
        """Greedy generation with the model as it is."""
        self._generate(self.setting.answer, self.prompts, self.model)

    def capturing(self) -> None:
        """The same by the engine's steps, which keep h^(k) from t* on."""
        self.tapes = self._recorded(self.scorer.memory)

    def written(self) -> Scores:
        """Scoring the latest generation."""
        return self._score(self.tapes)

    def frugal(self) -> Scores:
        """Scoring in the mode that holds least, after a generation that kept no logits."""
        usual = self.scorer.memory
        self.scorer.memory = FRUGAL
        try:
            return self._score(self.bare)
        finally:
            self.scorer.memory = usual

    def read(self) -> Scores:
        """Scoring the same text as if it came from anywhere else."""
        return self._score([None] * self.setting.rows)

    def naive(self) -> Scores:
        """The official algorithm, row after row as published."""
        return [naive_scores(self.model, row, self.setting.prompt) for row in self.ids.split(1)]

    def kept_mb(self) -> float:
        """MB that the generation left for scoring next to its cache: states, and kept logits and outputs."""
        recorders = {recorder for tape in self.tapes if tape for recorder, _ in tape.passes}
        return sum(recorder.hidden().nbytes + sum(recorder.held) for recorder in recorders) / 2**20

    def peak_mb(self, way: str) -> float:
        """MB above what was held before."""
        work: Callable[[], Any] = getattr(self, way)
        if self.model.device.type == "cpu":
            return peak_above_start(work, prepare=self.capturing)
        self.capturing()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def _recorded(self, memory: Memory) -> list[Tape | None]:
        """Write the answers greedily, step by step: the tapes that this leaves, if scores need any."""
        twin, prompt = self.scorer.twin, self.setting.prompt
        layer = OBJECTIVE.span(self.scorer.architecture.n_layers)[0]
        if self.scorer.exactness().way != "rows":
            self.ids = self.prompts.new_empty(0, prompt + self.setting.answer)
            return [self._continued(ids, layer) for ids in self.prompts.split(1)]
        recorder, cache = Recorder(layer, prompt + SEMANTIC_TOKEN, memory=memory), growing_cache()
        ids, mask = self.prompts, torch.ones_like(self.prompts)
        with clean_slate(), torch.no_grad(), recorder.listening(twin):
            twin.reset()
            for _ in range(self.setting.answer):
                token = twin.step(ids[:, cache.get_seq_length() :], mask, cache).argmax(1, keepdim=True)
                ids, mask = torch.cat([ids, token], dim=1), torch.cat([mask, torch.ones_like(token)], dim=1)
        self.ids = ids
        return [Tape(((recorder, i),), recorder.start, prompt - 1, keys_of(cache, i, 0)) for i in range(len(ids))]

    def _continued(self, ids: torch.Tensor, layer: int) -> Tape:
        """Write one answer behind a cache that is cut at t*: what its score continues from."""
        twin, begin, recorder = self.scorer.twin, ids.shape[1] + SEMANTIC_TOKEN, Recorder(layer)
        keeps = {layer: recorder.see_hidden} if self.scorer.exactness().begins else {}
        cache = cut_cache(twin, ids[:, :begin])
        with clean_slate(), twin.watching(keeps):
            written = self._generate(self.setting.answer, ids, twin.model, **{CACHE: copy.deepcopy(cache)})
        self.ids = torch.cat([self.ids, written])
        return Tape(((recorder, 0),) if keeps else (), begin, ids.shape[1] - 1, (), cut=cache)

    def _generate(self, count: int, ids: torch.Tensor, model: Any, **known: Any) -> torch.Tensor:
        options = GenerationConfig(max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options, **known)

    def _score(self, tapes: list[Tape | None]) -> Scores:
        texts = zip(self.prompts.tolist(), self.ids[:, self.setting.prompt :].tolist(), tapes, strict=True)
        rows = [Row.of(prompt, answer, SEMANTIC_TOKEN, OBJECTIVE, tape=tape) for prompt, answer, tape in texts]
        found = self.scorer.score(rows, OBJECTIVE)
        assert all(scores.tier == "replay" for scores in found), "not the way to be measured"
        return [(scores.semgrad or 0.0, scores.paragrad or 0.0) for scores in found]


def naive_scores(model: Any, ids: torch.Tensor, prompt_length: int) -> tuple[float, float]:
    """SemGrad and ParaGrad of one sequence [1, N] of prompt and response, by the official algorithm as published.

    One forward pass over prompt and response with a graph through everything, gradients with respect to all hidden
    states and to the head, autograd through the T x V logits. Nothing more is kept than that needs: only the head's
    weight asks for a gradient, through a leaf of its own.
    """
    head = model.get_output_embeddings()
    weight = head.weight.detach().requires_grad_()
    handles = [
        head.register_forward_hook(lambda _, args, __: F.linear(args[0], weight)),
        model.get_input_embeddings().register_forward_hook(lambda *call: call[2].requires_grad_()),
    ]
    try:
        with torch.enable_grad():
            output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
            log_p = output.logits[0, prompt_length - 1 : -1].float().log_softmax(-1)
            entropies = -(log_p.detach().exp() * log_p.detach()).sum(-1)
            log_probs = log_p.gather(1, ids[0, prompt_length:, None]).squeeze(1)
            loss = (entropies * log_probs).mean()
        states = output.hidden_states[:-1]
        paragradient, *gradients = torch.autograd.grad(loss, [weight, *states])
    finally:
        for handle in handles:
            handle.remove()
    upper = gradients[-(len(states) // 2) :]
    at_token = torch.stack([gradient[0, prompt_length + SEMANTIC_TOKEN] for gradient in upper])
    return float(at_token.float().abs().mean()), float(paragradient.abs().mean(dtype=torch.float32))


def measure(model: Any, setting: Setting, rounds: int, *, frugal: bool) -> dict[str, Any]:
    """One cell: seconds per way and round, ratios, the agreement with the official algorithm, peak memory."""
    bench = Bench(model, setting)
    left_out = {"naive": setting.rows * (setting.prompt + setting.answer) > NAIVE_TOKENS, "frugal": not frugal}
    scoring = tuple(way for way in SCORING if not left_out.get(way))
    seconds: dict[str, list[float]] = {way: [] for way in (*GENERATING, *scoring)}
    results: dict[str, Any] = {}
    clock = cpu_seconds if model.device.type == "cpu" else gpu_seconds
    for _ in range(rounds):
        for way, taken in seconds.items():
            taken.append(clock(lambda way=way: results.__setitem__(way, getattr(bench, way)())))
    differences = {way: difference(results["written"], results[way]) for way in scoring if way in ("naive", "frugal")}
    return {
        "setting": str(setting),
        "seconds": seconds,
        "peak_mb": {"kept": bench.kept_mb(), **{way: bench.peak_mb(way) for way in scoring}},
        "worst_relative_difference": differences,
        **ratios(seconds, setting),
    }


def ratios(seconds: Mapping[str, list[float]], setting: Setting) -> dict[str, Any]:
    """Each way over plain generation; ours in decode steps."""
    shares = {way: over(values, seconds["plain"]) for way, values in seconds.items() if way != "plain"}
    found: dict[str, Any] = {"share_of_plain": {way: spread(values) for way, values in shares.items()}}
    if setting.answer > 1:
        pairs = zip(seconds["plain"], seconds["first_token"], strict=True)
        steps = [(plain - first) / (setting.answer - 1) for plain, first in pairs]
        found["decode_steps"] = spread(over(seconds["written"], steps))
    return found


def difference(ours: Scores, theirs: Scores) -> float:
    """The worst relative difference."""
    found, expected = torch.tensor(ours), torch.tensor(theirs)
    return float(((found - expected) / expected).abs().max())


def resumed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The cells of a run that was stopped.

    Raises:
        InputError: it measured something else, or elsewhere.
    """
    conditions = [
        (report["shape"], report["device"], *(report["machine"][name] for name in ("cpu", "torch", "transformers")))
        for report in (before, now)
    ]
    if conditions[0] != conditions[1]:
        raise InputError(
            f"the figures so far are of {conditions[0]}, this run would be of {conditions[1]}: choose another --output"
        )
    return list(before["rows"])


def worsened(report: Mapping[str, Any], recorded: Sequence[Mapping[str, Any]]) -> list[str]:
    """The ratios that are worse than recorded on a machine of this kind, one line each."""
    machines = {_kind(report): report for report in recorded}
    if _kind(report) not in machines:
        return [f"not comparable: recorded on {', '.join(sorted(machines))}; this is {_kind(report)}"]
    known = {(row["dtype"], row["setting"]): row for row in machines[_kind(report)]["rows"]}
    pairs = [(row, known.get((row["dtype"], row["setting"]))) for row in report["rows"]]
    return [complaint for row, before in pairs if before is not None for complaint in _worse(row, before)]


def _kind(report: Mapping[str, Any]) -> str:
    return f"{report['machine']['cpu']} ({report['machine']['capability']})"


def _worse(row: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    where = f"{row['dtype']} {row['setting']}"
    found: list[str] = []
    for way in ("capturing", "written", "read"):
        new, old = row["share_of_plain"][way][1], before["share_of_plain"][way][1]
        if new > TOLERANCE * old:
            found.append(f"{where}: {way} takes {new:.3f} of plain generation at best, recorded {old:.3f}")
    new, old = row["peak_mb"]["written"], before["peak_mb"]["written"]
    if new > old + MEMORY_TOLERANCE_MB:
        found.append(f"{where}: scoring holds {new:.0f} MB at its peak, recorded {old:.0f}")
    return found


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """One row of the table, as text."""
    shares, memory = row["share_of_plain"], row["peak_mb"]
    return (
        row["dtype"],
        row["setting"],
        f"{statistics.median(row['seconds']['plain']):.2f}",
        ranged(shares["capturing"]),
        ranged(shares["written"]),
        ranged(row.get("decode_steps"), digits=1),
        *(ranged(shares.get(way)) for way in ("read", "frugal", "naive")),
        *(f"{memory[way]:.0f}" if way in memory else "" for way in ("kept", "written", "frugal", "naive")),
    )


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--shape", choices=sorted(SHAPES), default="0.5B")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--cells", choices=sorted(CELLS), default="usual", help="quick, usual (minutes) or full")
    names = sorted({str(setting) for settings in CELLS.values() for setting in settings})
    options.add_argument("--only", choices=names, metavar="CELL", help="only this cell, for example 60/8 or '60/32 x8'")
    options.add_argument("--dtype", action="append", choices=["bfloat16", "float16", "float32"], help="float32")
    options.add_argument("--device", default="cpu")
    options.add_argument("--frugal", action="store_true", help="also measure scoring with FRUGAL memory")
    options.add_argument("--resume", action="store_true", help="keep the cells that --output holds already")
    options.add_argument("--compare", type=Path, help="recorded ratios to hold the new ones against")
    given = parsed(options)
    if given.resume and not given.output:
        options.error("--resume continues the figures in --output, which is not given")
    if given.compare and not given.compare.exists():
        options.error(f"{given.compare} does not exist; a file that --output wrote here can be recorded as it")
    return given


def main() -> None:
    given = arguments()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"shape": given.shape, "device": given.device, "machine": about(), "rows": []}
    if given.resume and given.output.exists():
        report["rows"] = resumed(json.loads(given.output.read_text()), report)
    for dtype in given.dtype or ["float32"]:
        known = {row["setting"] for row in report["rows"] if row["dtype"] == dtype}
        settings = [s for s in CELLS[given.cells] if given.only in (None, str(s)) and str(s) not in known]
        model = build(given.shape, getattr(torch, dtype), given.device) if settings else None
        for setting in settings:
            row = {"dtype": dtype, "date": about()["date"]}
            report["rows"].append(row | measure(model, setting, given.rounds, frugal=given.frugal))
            keep(report, given.output)
            print(*cells(report["rows"][-1]), sep="  ", file=sys.stderr, flush=True)
    print(json.dumps(report["machine"]), "", table(HEADER, [cells(row) for row in report["rows"]]), sep="\n")
    if given.compare:
        complaints = worsened(report, json.loads(given.compare.read_text()))
        print("\n".join(complaints) or f"No ratio is worse than in {given.compare}.")
        sys.exit(bool(complaints))


if __name__ == "__main__":
    main()

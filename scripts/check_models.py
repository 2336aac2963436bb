"""Every architecture of the installed transformers against plain autograd: `make check-models`.

Builds a tiny random model of each, scores it in float32 and bfloat16, and compares with the model's own ordinary call
(tests/engine/architectures.py). Finished work is kept in the output file, so that a run can be stopped and resumed. In
the end the results and the page about them are written, and a model that is neither exact nor refused in words is a
failure.

    python scripts/check_models.py --output output/models.jsonl [--only llama ...] [--page]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "architectures.json"
PAGE = RESULTS.with_suffix(".md")
SOUND = ("exact", "refused", "not built")


def main() -> int:
    """Run, resume, or only write the page again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "output" / "models.jsonl", help="where to keep what is done"
    )
    parser.add_argument("--only", nargs="*", default=[], help="check these alone, and write no results")
    parser.add_argument(
        "--page", action="store_true", help="write the page from the recorded results, and check nothing"
    )
    options = parser.parse_args()
    if not options.page:
        verdicts = _checked(options.only, options.output)
        if options.only:
            return int(any(verdict["outcome"] not in SOUND for verdict in verdicts))
        _record(verdicts)
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(page(results), encoding="utf-8")
    unsound = [verdict for verdict in results["architectures"] if verdict["outcome"] not in SOUND]
    print(f"{summary(results['architectures'])}; written to {PAGE.relative_to(ROOT)}")
    return int(bool(unsound))


def _checked(only: Sequence[str], output: Path) -> list[dict[str, Any]]:
    """A verdict for each architecture and variant; those in the output file are not made again."""
    sys.path.insert(0, str(ROOT))
    import torch
    import transformers

    from tests.engine.architectures import check
    from tests.engine.generated_models import MODEL_TYPES, VARIANTS

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    names = only or [*MODEL_TYPES, *VARIANTS]
    release = transformers.__version__
    done: dict[str, dict[str, Any]] = {}
    if output.exists() and not only:
        lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
        done = {line["name"]: line for line in lines if line["transformers"] == release}
    output.parent.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names, start=1):
        if name in done:
            continue
        done[name] = {"name": name, "transformers": release, **dataclasses.asdict(check(name))}
        print(
            f"{number}/{len(names)} {name}: {done[name]['outcome']} {done[name]['tier'] or done[name]['message']}",
            flush=True,
        )
        if not only:
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(done[name]) + "\n")
    return [done[name] for name in names]


def _record(verdicts: Sequence[Mapping[str, Any]]) -> None:
    import torch

    kept = ("name", "outcome", "tier", "error", "noise_ratio", "message")
    results = {
        "date": datetime.now(UTC).date().isoformat(),
        "transformers": verdicts[0]["transformers"],
        "torch": torch.__version__,
        "architectures": [{key: verdict[key] for key in kept} for verdict in verdicts],
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def summary(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """How many came out how."""
    outcomes = Counter(verdict["outcome"] for verdict in verdicts)
    return ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())


def page(results: Mapping[str, Any]) -> str:
    """The page about them."""
    every = results["architectures"]
    exact = [verdict for verdict in every if verdict["outcome"] == "exact"]
    others = [verdict for verdict in every if verdict["outcome"] != "exact"]
    tiers = Counter(verdict["tier"] for verdict in exact)
    half = [verdict for verdict in exact if verdict["noise_ratio"] is not None]
    quiet = sum(verdict["noise_ratio"] < 3 for verdict in half)
    by_tier = {tier: ", ".join(v["name"] for v in exact if v["tier"] == tier) for tier in ("replay", "ordinary")}
    worst = max(verdict["error"] for verdict in exact)
    loud = ", ".join(f"{v['name']} {v['noise_ratio']:.1f}" for v in half if v["noise_ratio"] >= 3)
    refused = "\n".join(f"| {v['name']} | {v['outcome']} | {_reason(v['message'])} |" for v in others)
    return f"""# Every architecture

<!-- Written by scripts/check_models.py from architectures.json; edit those. -->

Checked on {results["date"]} with transformers {results["transformers"]} and torch {results["torch"]}, on a CPU, by
`make check-models`: {summary(every)}.

Every entry of transformers' own list of causal language models is built from a tiny config with random weights, and so
are some variants of them (named after a comma). Each is scored alone, in a batch, by its lower layers, and where its
layers have keys for each token, sentence by sentence. The scores are compared with plain automatic differentiation by
the model's own ordinary call, `model(input_ids=...)`.

- **Exact** means: SemGrad, ParaGrad, every entropy and every log-probability agree within 1e-4 in float32. The worst is
  {worst:.0e}.
- **Tier** is the cheapest that is exact ([how it works](../how-it-works.md)): {tiers["replay"]} `replay`,
  {tiers["ordinary"]} `ordinary`.
- **bfloat16**: the worst error of SemGrad and ParaGrad, in units of what the model's own bfloat16 pass is off by, is
  below 3 for {quiet} of {len(half)}. Rounding can choose other experts where that is a close call ({loud}).

A tiny model says nothing about a checkpoint's own numbers. When a model is loaded, its self-check does the same
comparison on it.

## Exact

By `replay`: {by_tier["replay"]}.

By the `ordinary` call: {by_tier["ordinary"]}.

`architectures.json` has the figures of each.

## Not scored

| architecture | outcome | reason |
| --- | --- | --- |
{refused}
"""


def _reason(message: str) -> str:  # the first sentence, after the error's class
    return message.partition(": ")[2].partition(". ")[0].replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())

"""Starts `semgrad-guard serve` under load, hostile clients and faults, and reports the results.

python scripts/check_load.py [saturation] [nonces] [faults] [--minutes 10] [--nonces 100000] [--kills 20]

Prints a line for each check, writes its figures to a file, and fails where one does not hold.

Why: docs/adr/0151-reliability-by-whole-processes.md
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from load_checks.faults import faulty
from load_checks.nonces import searched
from load_checks.results import Check, report
from load_checks.saturation import saturated

PARTS = ("saturation", "nonces", "faults")


async def checked(part: str, options: argparse.Namespace) -> list[Check]:
    """The checks of one part, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if part == "saturation":
            return await saturated(folder, minutes=options.minutes, clients=options.clients)
        if part == "nonces":
            return [await searched(folder, options.state, count=options.nonces)]
        return await faulty(folder, kills=options.kills)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="what to check; all of it by default")
    parser.add_argument("--minutes", type=float, default=10, help="how long clients are at the limit")
    parser.add_argument("--clients", type=int, default=64, help="how many there are; a tenth of them mean it ill")
    parser.add_argument("--nonces", type=int, default=100_000, help="how many drafts carry a nonce")
    parser.add_argument("--kills", type=int, default=20, help="how often the server is killed")
    parser.add_argument("--state", type=Path, default=Path("output/nonces.jsonl"), help="the record of the run")
    parser.add_argument("--output", type=Path, default=Path("output/load.json"))
    options = parser.parse_args()
    checks = [check for part in options.parts or PARTS for check in asyncio.run(checked(part, options))]
    raise SystemExit(0 if report(checks, options.output) else 1)


if __name__ == "__main__":
    main()

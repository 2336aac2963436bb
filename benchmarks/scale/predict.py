"""Fit the simulation to the measured servers at 1 and 32 clients, one thread; say how well it predicts the others.

    python benchmarks/scale/predict.py [benchmarks/scale/measured.json] [--output docs/scale-check.svg]

Two numbers are fitted, to all servers together: what a request takes outside the model's thread, and how much longer
that thread takes for everything than it does in a process by itself, since the machine's other core is at work, too.
(Parts that were measured with a thread on every core have that in them.) Everything else was measured part by part.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.ticker import ScalarFormatter
from panels import drawn, legend
from scipy.optimize import minimize
from services import Measured, Point
from simulation import Run, Server, closed

from semgrad_guard.evaluation.figures.plots import LINE, MUTED, POINT, PROMISE

MEASURED = Path(__file__).with_name("measured.json")
FITTED = ((1, 1), (1, 32))
"""Threads and clients of the points that the simulation is fitted to."""
CORES = 2
"""Of the machine that was measured."""
LOOKS = {
    "unguarded": (MUTED, "^"),
    "max_probability": (LINE, "o"),
    "cascade": (PROMISE, "s"),
    "hybridgrad": (POINT, "D"),
}


@dataclass(frozen=True)
class Fit:
    """What was fitted: seconds around a request, and the slowdown of the model's thread (see `Server`)."""

    around: float
    slowdown: float

    def slowed(self, threads: int) -> float:
        """How much longer so many threads take than in a process by itself."""
        return self.slowdown if threads < CORES else 1.0


def simulated(measured: Measured, fit: Fit, *, server: str, threads: int, clients: int, each: int) -> Run:
    """What the simulation says about a server."""
    services = measured.services(server, threads)
    made = Server(services, around=fit.around, slowdown=fit.slowed(threads))
    return closed(made, measured.questions, clients=clients, each=each)


def of_point(measured: Measured, fit: Fit, point: Point) -> Run:
    """What the simulation says about a point that was measured."""
    return simulated(measured, fit, server=point.server, threads=point.threads, clients=point.clients, each=point.each)


def fitted(measured: Measured) -> Fit:
    """The numbers with which the rates at 1 and 32 clients, one thread, are met best (relative errors, squared)."""
    points = [each for each in measured.points if (each.threads, each.clients) in FITTED]

    def loss(numbers: Sequence[float]) -> float:
        fit = Fit(abs(numbers[0]), abs(numbers[1]))
        return sum(
            math.log(of_point(measured, fit, each).answers_a_second / each.answers_a_second) ** 2 for each in points
        )

    found = minimize(loss, (0.05, 1.1), method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-5})
    return Fit(abs(float(found.x[0])), abs(float(found.x[1])))


def table(measured: Measured, fit: Fit) -> str:
    """Every point as it was measured and as it is simulated, in Markdown."""
    lines = [
        "| server | threads | clients | answers a second | simulated | off by | p50, s | simulated | off by |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in measured.points:
        run = of_point(measured, fit, each)
        is_fitted = (each.threads, each.clients) in FITTED
        rate, middle = run.answers_a_second, run.percentile(0.5)
        lines.append(
            f"| {each.server} | {each.threads} | {each.clients}{' (fitted)' if is_fitted else ''} "
            f"| {each.answers_a_second:.2f} | {rate:.2f} | {rate / each.answers_a_second - 1:+.0%} "
            f"| {each.p50:.2f} | {middle:.2f} | {middle / each.p50 - 1:+.0%} |"
        )
    return "\n".join(lines)


def draw(measured: Measured, fit: Fit, target: Path) -> Path:
    """Rates against clients, measured and simulated; a panel for each number of threads.

    Raises:
        InputError: no picture format by that suffix.
    """
    threads = sorted({each.threads for each in measured.points})
    with drawn(target, columns=len(threads)) as (figure, [panels]):
        for axes, count in zip(panels, threads, strict=True):
            _panel(axes, measured, fit, count)
        panels[0].set_ylabel("answers a second")
        panels[0].set_ylim(bottom=0)
        legend(panels[0])
        figure.supxlabel("clients at once", fontsize=9)
    return target


def _panel(axes: Any, measured: Measured, fit: Fit, threads: int) -> None:
    points = [each for each in measured.points if each.threads == threads]
    for server, (color, mark) in LOOKS.items():
        own = sorted((each for each in points if each.server == server), key=lambda each: each.clients)
        if not own:
            continue
        places = [1, 2, 4, 6, 8, 12, 16, 24, 32]
        lines = [
            simulated(measured, fit, server=server, threads=threads, clients=n, each=3).answers_a_second for n in places
        ]
        axes.plot(places, lines, color=color, linewidth=1.4, label=server)
        for point in own:
            face = "white" if (point.threads, point.clients) in FITTED else color
            axes.plot(point.clients, point.answers_a_second, mark, color=color, markerfacecolor=face, markersize=6)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16, 32])
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_title(f"{threads} thread{'s' * (threads > 1)}: lines simulated, marks measured", loc="left", fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, nargs="?", default=MEASURED)
    parser.add_argument("--output", type=Path, help=".svg, .png or .pdf")
    arguments = parser.parse_args()
    measured = Measured.load(arguments.measured)
    fit = fitted(measured)
    print(f"Around a request {fit.around:.3f} s; one thread takes {fit.slowdown:.2f} times as long.\n")
    print(table(measured, fit))
    if arguments.output:
        print(draw(measured, fit, arguments.output))


if __name__ == "__main__":
    main()

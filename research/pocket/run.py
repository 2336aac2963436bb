"""Every training run can be stopped, keeps a checkpoint, and resumes from it."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import torch

from research.pocket.team import Team
from semgrad_guard.files import atomic_write

OPTIONS = ("steps", "workers", "seed", "rate")  # the settings that are options of a training command


def add_options(parser: argparse.ArgumentParser, settings: Any) -> None:
    """`settings`: a dataclass that holds the defaults."""
    for name in OPTIONS:
        default = getattr(settings, name)
        parser.add_argument(f"--{name}", type=type(default), default=default)


def with_options(settings: Any, given: argparse.Namespace) -> Any:
    """The same settings, but for the chosen options."""
    return replace(settings, **{name: getattr(given, name) for name in OPTIONS})


def fingerprint(file: Path) -> str:
    """The first digits of a file's sha256: settings name a run's initial weights by it."""
    return sha256(file.read_bytes()).hexdigest()[:12]


class TrainingRun(ABC):
    """A training run with its checkpoint. Each member of a team has one; their joint work stays equal.

    `settings` is a dataclass of plain values: a checkpoint is taken up again by a run with the same ones alone.
    """

    FILE: ClassVar[str]

    def __init__(self, settings: Any, output: Path | None, team: Team | None) -> None:
        torch.set_num_threads(1)
        self.settings, self.output, self.step, self.stopping = settings, output, 0, False
        self.team = team or Team()

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The contents of a checkpoint apart from settings and step. Every member is called."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""

    @property
    def checkpoint(self) -> Path | None:
        return self.output / self.FILE if self.output else None

    def stop(self, *_: object) -> None:
        """Stop at the next place from which the run can be continued bit for bit.

        Before the first step there is nothing to keep, and the interrupt is an ordinary one.
        """
        if not self.step:
            raise KeyboardInterrupt
        self.stopping = True

    def keep(self) -> None:
        """Write the checkpoint next to the old one and swap them, so that a stop in between loses nothing."""
        state = self.state()
        if self.checkpoint and self.output and self.team.rank == 0:
            self.output.mkdir(parents=True, exist_ok=True)
            record = {"settings": asdict(self.settings), "step": self.step, **state}
            atomic_write(self.checkpoint, partial(torch.save, record))

    def resume(self) -> bool:
        if not (self.checkpoint and self.checkpoint.exists()):
            return False
        state = torch.load(self.checkpoint, weights_only=True)
        if state["settings"] != asdict(self.settings):
            raise SystemExit(f"{self.checkpoint} belongs to a run with other settings; choose another --output")
        self.restore(state)
        self.step = state["step"]
        return True

    def say(self, line: str) -> None:
        if self.team.rank == 0:
            print(line, flush=True)

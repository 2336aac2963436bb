"""`ServerSettings`: the settings of a server, however it is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, model_validator

from semgrad_guard.declared import Option, values_of
from semgrad_guard.loading import EstimatorChoice
from semgrad_guard.named import POCKET
from semgrad_guard.settings import (
    DECISION,
    MODEL,
    MODEL_HELP,
    ONE_THRESHOLD,
    AnswerLimit,
    DeliveryOptions,
    EngineChoice,
    LoadingOptions,
    LogOptions,
    OtherServers,
    PolicyOptions,
    SentenceOptions,
    ServeOptions,
    require_name,
)


@dataclass(frozen=True, kw_only=True)
class _Models:
    model: Annotated[
        tuple[str, ...] | str | None,
        Option(f"{MODEL_HELP}; repeat the option for several.", MODEL, shown=POCKET, several=True, check=require_name),
    ] = None


@dataclass(frozen=True, kw_only=True)
class _Calibrations:
    calibration: Annotated[
        tuple[str, ...] | str,
        Option(
            "Made by `calibrate`. With several models, NAME=FILE for each.",
            panel=DECISION,
            metavar="FILE",
            several=True,
            check=require_name,
        ),
    ] = ()


class ServerSettings(
    BaseModel,
    _Models,
    LoadingOptions,
    EngineChoice,
    EstimatorChoice,
    _Calibrations,
    PolicyOptions,
    DeliveryOptions,
    SentenceOptions,
    AnswerLimit,
    ServeOptions,
    OtherServers,
    LogOptions,
    frozen=True,
    extra="forbid",
    protected_namespaces=(),
):
    """The options of `semgrad-guard serve` by name, without where it listens; `semgrad-guard serve -h` explains them.

    `model` and `calibration` may be one or several: NAME=FILE for each calibration where there are several models. API
    keys are in a file or in the environment, never here.

    Raises:
        ValidationError: one is out of its range, or two contradict each other.
    """

    @model_validator(mode="after")
    def _agree(self) -> ServerSettings:
        if self.calibration and self.threshold is not None:
            raise ValueError(ONE_THRESHOLD)
        if self.upstream is None and self.scorer is not None:
            raise ValueError("--scorer goes with --upstream; without one, --model answers and scores itself")
        if self.upstream is None and self.allow_unguarded:
            raise ValueError("--allow-unguarded goes with --upstream: it names routes of that server")
        if self.upstream is not None and self.scorer is None:
            if not self.model:
                raise ValueError("--upstream needs --model, that server's name for it, or --scorer, a local copy")
            usual = values_of(LoadingOptions(), LoadingOptions)
            if given := [name for name, value in values_of(self, LoadingOptions).items() if value != usual[name]]:
                raise ValueError(f"--{given[0].replace('_', '-')} is for a model here: it goes with --scorer")
        if self.escalate_to is not None and not self.escalate_to.partition("#")[2]:
            raise ValueError("--escalate-to names a model behind the URL: http://localhost:9000/v1#large")
        _ = self.calibrations
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The models by name; where another server writes, its names for them."""
        given = (self.model,) if isinstance(self.model, str) else self.model
        return given or (POCKET if self.scorer is None else self.scorer,)

    @property
    def calibrations(self) -> dict[str, Path]:
        """Whose calibration each file is; with an upstream, by its name for the model."""
        given = (self.calibration,) if isinstance(self.calibration, str) else self.calibration
        found: dict[str, Path] = {}
        for setting in given:
            name, named, path = setting.partition("=")
            if named and name in self.names:
                found[name] = Path(path)
            elif len(self.names) == 1:
                found[self.names[0]] = Path(setting)
            else:
                raise ValueError("with several models, --calibration is NAME=FILE, NAME being one of them")
        return found

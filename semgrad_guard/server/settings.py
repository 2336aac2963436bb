"""`ServerSettings`: the settings of a server, however it is started.

The options that only a server has are declared here, once; the others in `semgrad_guard.settings`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, model_validator

from semgrad_guard.declared import Bounds, Option, values_of
from semgrad_guard.loading import EstimatorChoice
from semgrad_guard.named import POCKET
from semgrad_guard.settings import (
    ABSTAIN_MESSAGE,
    API_KEY,
    DECISION,
    LOG,
    MODEL,
    MODEL_HELP,
    ONE_THRESHOLD,
    OTHERS,
    SERVER,
    TARGET_KEY,
    UPSTREAM_KEY,
    AnswerLimit,
    DeliveryOptions,
    EngineChoice,
    LoadingOptions,
    LogAddress,
    OnOtherOptions,
    Overridable,
    PolicyOptions,
    SentenceOptions,
    Timeout,
    require_name,
    require_text,
)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What clients of a server may do, and how much of it."""

    abstain_message: Annotated[
        str, Option("Delivered in place of what is withheld.", DECISION, "TEXT", reads="some_text", check=require_text)
    ] = ABSTAIN_MESSAGE
    on_other_options: OnOtherOptions = "refuse"
    allow_override: Annotated[
        frozenset[Overridable],
        Option(
            "What a request may set otherwise: mode, threshold or timeout; repeat the option for several.",
            DECISION,
            several=True,
        ),
    ] = frozenset()
    allow_score: Annotated[
        bool,
        Option(
            "Let clients have texts of their own scored (/v1/score) in the modes that withhold answers, too. Who can, "
            "can try guesses at a withheld answer.",
            DECISION,
        ),
    ] = False
    api_key_file: Annotated[
        Path | None,
        Option(f"API keys that clients must send, one a line; or one in the environment, {API_KEY}.", SERVER, "FILE"),
    ] = None
    allow_host: Annotated[
        tuple[str, ...],
        Option(
            "A further name under which clients may call the server; repeat the option for several.",
            SERVER,
            several=True,
            check=require_name,
        ),
    ] = ()
    timeout: Timeout = None
    queue: Annotated[
        int,
        Option(
            "Requests that may wait for a model; further ones are refused, to be sent again.",
            panel=SERVER,
            metavar="N",
            bounds=Bounds(1, 100_000),
        ),
    ] = 64
    max_batch: Annotated[
        int | None,
        Option(
            "Answers written in one batch. 1 gives the texts of single runs, also in half precision.",
            panel=SERVER,
            metavar="N",
            bounds=Bounds(1, 100_000),
        ),
    ] = None
    connections: Annotated[
        int, Option("Requests that are answered at once, waiting ones included.", SERVER, "N", Bounds(1, 100_000))
    ] = 256
    max_body: Annotated[int, Option("The longest request.", SERVER, "BYTES", Bounds(1000, 2**31))] = 2_000_000
    max_prompt_tokens: Annotated[
        int | None, Option("The longest prompt.", SERVER, "N", Bounds(1, 2**31), shown="what the model can read")
    ] = None


@dataclass(frozen=True, kw_only=True)
class OtherServers:
    """The servers that write answers, or are escalated to."""

    upstream: Annotated[
        str | None,
        Option(
            "A server with OpenAI's protocol that writes the answers (http://localhost:8000/v1); its key stands in the "
            f"environment, {UPSTREAM_KEY}. --model is then a name of its own.",
            panel=OTHERS,
            metavar="URL",
            check=require_name,
        ),
    ] = None
    scorer: Annotated[
        str | None,
        Option(
            "With --upstream: a local copy of the weights, which scores what the upstream writes. Without it the "
            "upstream's own log-probabilities are the score.",
            OTHERS,
            check=require_name,
        ),
    ] = None
    escalate_to: Annotated[
        str | None,
        Option(
            f"Asked for what is not let through; passed on unscored. Its key stands in the environment, {TARGET_KEY}.",
            panel=OTHERS,
            metavar="URL#MODEL",
            check=require_name,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """The decision log of a server."""

    log: LogAddress = None
    journal: Annotated[
        Path | None,
        Option(
            "A folder on a local disk: decisions are safe there until the database has them.",
            panel=LOG,
            metavar="FOLDER",
            shown="next to the log",
        ),
    ] = None
    log_text: Annotated[bool, Option("Also write down questions and delivered answers.", LOG)] = False
    keep_log: Annotated[
        int | None, Option("Delete decisions that are older.", LOG, "DAYS", Bounds(1, 36_500), shown="never")
    ] = None
    no_log: Annotated[bool, Option("Keep no decision log.", LOG)] = False


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

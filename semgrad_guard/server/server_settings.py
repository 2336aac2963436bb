"""`ServerSettings`: the settings of a server, however it is started.

The options that only a server has are declared here, once; the others in `semgrad_guard.settings`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, model_validator

from semgrad_guard.declared import Bounds, values_of
from semgrad_guard.loading import EstimatorChoice
from semgrad_guard.named import POCKET
from semgrad_guard.settings import (
    ABSTAIN_MESSAGE,
    ONE_THRESHOLD,
    AnswerLimit,
    DeliveryOptions,
    EngineChoice,
    LoadingOptions,
    LogAddress,
    OnOtherOptions,
    PolicyOptions,
    SentenceOptions,
    Timeout,
    require_name,
    require_text,
)

_Names = Annotated[tuple[str, ...], Bounds(check=require_name)]
_Name = Annotated[str | None, Bounds(check=require_name)]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What clients of a server may do, and how much of it.

    `abstain_message` is delivered in place of what is withheld. With `allow_score` clients have texts of their own
    scored (/v1/score) in the modes that withhold answers, too: who can, can try guesses at a withheld answer.
    `api_key_file` holds keys that clients must send, one a line; `allow_host` further names under which they may call
    the server.

    `queue` requests may wait for a model, and `max_batch` answers are written in one batch (1 gives the texts of single
    runs, also in half precision). `connections` requests are answered at once, waiting ones included. The longest
    request has `max_body` bytes, the longest prompt `max_prompt_tokens` (None: what the model can read).
    """

    abstain_message: Annotated[str, Bounds(check=require_text)] = ABSTAIN_MESSAGE
    on_other_options: OnOtherOptions = "refuse"
    allow_score: bool = False
    api_key_file: Path | None = None
    allow_host: _Names = ()
    timeout: Timeout = None
    queue: Annotated[int, Bounds(1, 100_000)] = 64
    max_batch: Annotated[int | None, Bounds(1, 100_000)] = None
    connections: Annotated[int, Bounds(1, 100_000)] = 256
    max_body: Annotated[int, Bounds(1000, 2**31)] = 2_000_000
    max_prompt_tokens: Annotated[int | None, Bounds(1, 2**31)] = None


@dataclass(frozen=True, kw_only=True)
class OtherServers:
    """The servers that write answers, or are escalated to.

    `upstream` is the URL of a server with OpenAI's protocol that writes the answers; `scorer` a local copy of the
    weights that scores them (None: the upstream's own log-probabilities do). `escalate_to` is URL#MODEL, asked for what
    is not let through.
    """

    upstream: _Name = None
    scorer: _Name = None
    escalate_to: _Name = None


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """The decision log of a server.

    Decisions are safe in the `journal`, a folder on a local disk, until the database has them (None: next to the log).
    `log_text` also writes down questions and delivered answers; decisions older than `keep_log` days are deleted.
    """

    log: LogAddress = None
    journal: Path | None = None
    log_text: bool = False
    keep_log: Annotated[int | None, Bounds(1, 36_500)] = None
    no_log: bool = False


class ServerSettings(
    BaseModel,
    LoadingOptions,
    EngineChoice,
    EstimatorChoice,
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
    """The settings of `semgrad-guard serve` by name, without where it listens (docs/serve.md lists them).

    `model` and `calibration` may be one or several: NAME=FILE for each calibration where there are several models. API
    keys are in a file or in the environment, never here.

    Raises:
        ValidationError: one is out of its range, or two contradict each other.
    """

    model: Annotated[tuple[str, ...] | str | None, Bounds(check=require_name)] = None
    calibration: Annotated[tuple[str, ...] | str, Bounds(check=require_name)] = ()

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

"""`ServerSettings`: the settings of a server, however it is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from semgrad_guard.guard.modes import ABSTAIN_MESSAGE, Mode, OnUnscored
from semgrad_guard.named import POCKET

API_KEY, UPSTREAM_KEY, TARGET_KEY = (
    "SEMGRAD_GUARD_API_KEY",
    "SEMGRAD_GUARD_UPSTREAM_API_KEY",
    "SEMGRAD_GUARD_ESCALATION_API_KEY",
)
"""The environment variables with keys: for clients, for the upstream, for the server that is escalated to."""

Overridable = Literal["mode", "threshold", "timeout"]


class ServerSettings(BaseModel):
    """The options of `semgrad-guard serve` by name, without where it listens; `semgrad-guard serve -h` explains them.

    `model` and `calibration` may be one or several: NAME=FILE for each calibration where there are several models. API
    keys are in a file or in the environment, never here.

    Raises:
        ValidationError: one is out of its range, or two contradict each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: tuple[str, ...] | str | None = None
    dtype: str | None = None
    device: str | None = None
    quantization_config: dict[str, Any] | None = None
    template_option: dict[str, Any] = Field(default_factory=dict[str, Any])
    engine: dict[str, Any] | None = None
    estimator: str | None = None
    calibration: tuple[str, ...] | str = ()
    threshold: float | None = None
    on_unscored: OnUnscored = "abstain"
    mode: Mode = "enforce"
    abstain_message: str = ABSTAIN_MESSAGE
    on_error: Literal["raise", "abstain"] = "raise"
    allow_override: frozenset[Overridable] = frozenset()
    allow_score: bool = False
    max_tokens: PositiveInt = 256
    api_key_file: Path | None = None
    allow_host: tuple[str, ...] = ()
    timeout: float | None = Field(default=None, gt=0)
    queue: PositiveInt = 64
    max_batch: PositiveInt | None = None
    connections: PositiveInt = 256
    max_body: PositiveInt = 2_000_000
    max_prompt_tokens: PositiveInt | None = None
    upstream: str | None = None
    scorer: str | None = None
    allow_unguarded: tuple[str, ...] = ()
    escalate_to: str | None = None
    log: str | None = None
    journal: Path | None = None
    log_text: bool = False
    keep_log: NonNegativeInt | None = None
    no_log: bool = False

    @model_validator(mode="after")
    def _agree(self) -> ServerSettings:
        if self.calibration and self.threshold is not None:
            raise ValueError("give --calibration or --threshold, not both: a calibration has its own threshold")
        if self.upstream is None and self.scorer is not None:
            raise ValueError("--scorer goes with --upstream; without one, --model answers and scores itself")
        if self.upstream is None and self.allow_unguarded:
            raise ValueError("--allow-unguarded goes with --upstream: it names routes of that server")
        if self.upstream is not None and self.scorer is None:
            raise ValueError("--upstream needs --scorer: a local copy of the weights that the upstream serves")
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

"""From names to models, estimators and policies: the common loading of commands, servers and workers elsewhere."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from semgrad_guard.declared import Bounds, require_valid
from semgrad_guard.errors import BindingMismatchError, InputError, require_installed
from semgrad_guard.estimators import KINDS, NEEDS_LABELS
from semgrad_guard.files import reason
from semgrad_guard.named import NAMES, did_you_mean
from semgrad_guard.settings import ONE_THRESHOLD, REPORTED, EngineOptions, PolicyOptions

if TYPE_CHECKING:
    from semgrad_guard.engine.answers.writing_model import ModelIdentity
    from semgrad_guard.engine.language_model import LanguageModel
    from semgrad_guard.engine.objective import TokenChoice
    from semgrad_guard.estimators import Estimator
    from semgrad_guard.guard import Policy

ESTIMATOR_NAMES = tuple(name for name in KINDS if name not in NEEDS_LABELS)
"""The estimators that need no labels."""


def require_estimator(name: str) -> None:
    """Raise a ValueError for a name that no estimator has which needs no labels."""
    names = tuple(dict.fromkeys((*ESTIMATOR_NAMES, *REPORTED)))
    if name not in names:
        raise ValueError(f"{name!r} is not one of {', '.join(names)}.{did_you_mean(name, names)}")


@dataclass(frozen=True, kw_only=True)
class EstimatorChoice:
    """The estimator by its name; None leaves it to the calibration."""

    estimator: Annotated[str | None, Bounds(check=require_estimator)] = None


@dataclass(frozen=True, kw_only=True)
class ModelSource(EngineOptions):
    """A model by name, and how it is loaded: weights do not travel. With `identity`, only the same model is taken."""

    semantic_token: TokenChoice | None = None
    identity: ModelIdentity | None = None

    def __post_init__(self) -> None:
        require_valid(self, EngineOptions)

    @classmethod
    def of(cls, model: str, **settings: Any) -> Self:
        """A folder is named by its whole path: workers start elsewhere."""
        is_path = model not in NAMES and Path(model).exists()
        return cls(model=str(Path(model).resolve()) if is_path else model, **settings)

    def for_workers(self, identity: ModelIdentity) -> Self:
        """The same for workers, which start in another folder and take no other model than this one."""
        return replace(self, model=self.of(self.model).model, identity=identity)

    @property
    def on_gpu(self) -> bool:
        """Whether it takes a GPU."""
        return self.device is not None and self.device.startswith("cuda")

    @property
    def clash(self) -> str | None:
        """Why two of its options do not go together; None where all do."""
        if self.engine is None or (self.device is None and self.quantization_config is None):
            return None
        return (
            "--engine vllm takes neither --device nor --quantization-config: vLLM goes where it was built for, and "
            "scoring takes whole weights"
        )

    def load(self, *, verbose: bool = False) -> LanguageModel:
        """The model; the libraries that load it print nothing, unless `verbose`.

        Raises:
            BindingMismatchError: the model under this name is another one.
            InputError: the device is none, or goes with transformers only.
            SemGradGuardError: it cannot be loaded; see `LanguageModel.from_pretrained`.
        """
        if not verbose:
            silence_libraries()
        shared: dict[str, Any] = {"semantic_token": self.semantic_token, "template_options": self.template_options}
        if self.engine is None:
            from semgrad_guard.engine.language_model import LanguageModel

            place, config = _place(self.device), self.quantization_config
            model = LanguageModel.from_pretrained(
                self.model, dtype=self.dtype, device_map=place, quantization_config=config, **shared
            )
        else:
            if self.clash is not None:
                raise InputError(self.clash)
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if verbose else "ERROR")  # read when vLLM is imported
            os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
            from semgrad_guard.vllm import VLLMLanguageModel

            given: dict[str, Any] = {**self.engine, **({} if self.dtype is None else {"dtype": self.dtype})}
            model = VLLMLanguageModel.from_pretrained(self.model, **shared, **given)
        if self.identity is not None and model.identity != self.identity:
            raise BindingMismatchError(
                f"A worker's {self.model} is another model than the one here ({model.identity} and not "
                f"{self.identity}). Bring the same files onto every machine."
            )
        return model


def silence_libraries() -> None:
    """Have the libraries that load a model print nothing."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _place(device: str | None) -> str | None:
    """The device, if there is one of that name that can hold numbers, if a model can be loaded there."""
    if device is None:
        return None
    import torch

    try:
        with warnings.catch_warnings(action="ignore"):
            torch.ones(1, device=device).add(1).item()  # "meta" makes tensors, and keeps nothing in them
    except (RuntimeError, AssertionError, ImportError) as error:
        why = reason(error).partition(". ")[0][:200]  # a list of all that torch was built for follows
        raise InputError(f"There is no device {device!r} here that holds a model: {why}. Try --device cpu.") from error
    require_installed("accelerate", extra="accelerate")
    return device


def load_estimator(name: str | None, policy: Policy | None = None) -> Estimator:
    """The estimator of that name, with its default settings; without a name the calibration's own, or HybridGrad."""
    from semgrad_guard.guard.guard import estimator_of, named_estimator

    if name is None:
        return estimator_of(None if policy is None else policy.calibration)
    if name in REPORTED and name not in KINDS:
        raise InputError(f"{name} is a score of the log-probabilities that a server reports, and takes no local model")
    return named_estimator(name)


def load_policy(calibration: Path | None, options: PolicyOptions | None = None) -> Policy | None:
    """The policy of a calibration's file or a threshold, if one of them is given.

    Raises:
        InputError: both are, or a promise in reach is asked for without a calibration.
        CalibrationError: the file cannot be read as one.
    """
    from semgrad_guard.calibration import Calibration
    from semgrad_guard.guard import Policy

    options = options or PolicyOptions()
    how: dict[str, Any] = {"on_unscored": options.on_unscored, "on_cut": options.on_cut}
    if calibration is not None and options.threshold is not None:
        raise InputError(ONE_THRESHOLD)
    if calibration is not None:
        return Policy.from_calibration(Calibration.load(calibration), on_no_threshold=options.on_no_threshold, **how)
    if options.threshold is None and options.on_no_threshold == "abstain":
        return None
    return Policy(threshold=options.threshold, on_no_threshold=options.on_no_threshold, **how)


def pocket_policy(options: PolicyOptions | None = None) -> Policy | None:
    """A policy with the embedded model's own calibration, if it is there."""
    from semgrad_guard.pocket import CALIBRATION_PATH

    return load_policy(CALIBRATION_PATH, options) if CALIBRATION_PATH.is_file() else None

"""From names on the command line to models, estimators and policies; torch is imported in here, when asked for."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from semgrad_guard.cli.terminal import detail, is_verbose, note, status
from semgrad_guard.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from semgrad_guard.engine.generation.options import GenerationOptions
    from semgrad_guard.engine.language_model import LanguageModel
    from semgrad_guard.engine.prompts.token_choice import TokenChoice
    from semgrad_guard.estimators import Estimator
    from semgrad_guard.guard import OnUnscored, Policy


def load_model(
    name: str,
    dtype: str | None = None,
    *,
    device: str | None = None,
    quantization: Mapping[str, Any] | None = None,
    token: TokenChoice | None = None,
    engine: Mapping[str, Any] | None = None,
) -> LanguageModel:
    """The model, without the chatter of the libraries that load it; `token` is the t* that a probe recommends.

    `engine` are vLLM's arguments, where vLLM writes the answers.
    """
    began = time.monotonic()
    if engine is not None and (device is not None or quantization is not None):
        raise typer.BadParameter(
            "--engine vllm takes neither --device nor --quantization-config: vLLM goes where it was built for, and "
            "scoring takes whole weights"
        )
    with quietly(f"Loading {name} …"):
        if engine is None:
            from semgrad_guard.engine.language_model import LanguageModel

            model = LanguageModel.from_pretrained(
                name, dtype=dtype, device_map=_place(device), quantization_config=quantization, semantic_token=token
            )
        else:
            model = _written_by_vllm(name, dtype, token, engine)
    for doubt in model.doubts:
        note(doubt, label="Warning")
    if is_verbose():
        identity = model.identity
        detail(
            f"{identity.name} is loaded in {time.monotonic() - began:.1f} s: {model.n_layers} layers, "
            f"{identity.dtype}, fingerprint {identity.fingerprint}, "
            f"chat template {identity.template}, window {model.context_window}"
        )
    return model


def _written_by_vllm(
    name: str, dtype: str | None, token: TokenChoice | None, engine: Mapping[str, Any]
) -> LanguageModel:
    settings = {"VLLM_LOGGING_LEVEL": "INFO" if is_verbose() else "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    for variable, value in settings.items():
        os.environ.setdefault(variable, value)  # read when vLLM is imported
    from semgrad_guard.vllm import VLLMLanguageModel

    given: dict[str, Any] = {**engine, **({} if dtype is None else {"dtype": dtype})}
    return VLLMLanguageModel.from_pretrained(name, semantic_token=token, **given)


@contextmanager
def quietly(what: str) -> Generator[None]:
    """Says what is being loaded, and keeps the libraries that load it from saying it too."""
    with status(what):
        if not is_verbose():
            from transformers.utils import logging

            logging.set_verbosity_error()
            logging.disable_progress_bar()
        yield


def given_text(value: str) -> str:
    """A text as it was typed, or what stands on standard input for "-"."""
    from semgrad_guard.evaluation.files import STDIN, read_text

    return read_text(STDIN).strip() if value == str(STDIN) else value


def prompt_template(prompt: str | None) -> tuple[str | None, list[Path]]:
    """The template of the user's turn, and the file that it was read from ("@FILE"), if it was."""
    from semgrad_guard.evaluation.files import read_text

    if prompt is None or not prompt.startswith("@"):
        return prompt, []
    path = Path(prompt[1:])
    return read_text(path).removesuffix("\n"), [path]


def load_token(probe: Path | None) -> TokenChoice | None:
    """The t* that a probe's record recommends, read before any work."""
    from semgrad_guard.engine.prompts.token_choice import TokenChoice

    return None if probe is None else TokenChoice.load(probe)


def _place(device: str | None) -> str | None:
    """The device, if there is one of that name that can hold numbers, and what it takes to load a model there."""
    if device is None:
        return None
    import torch

    try:
        with warnings.catch_warnings(action="ignore"):
            torch.ones(1, device=device).add(1).item()  # "meta" makes tensors, and keeps nothing in them
    except (RuntimeError, AssertionError, ImportError) as error:
        line = str(error).strip().partition("\n")[0]
        reason = line.partition(". ")[0].rstrip(".")[:200]  # what follows is a list of all that torch was built for
        raise InputError(
            f"There is no device {device!r} here that holds a model: {reason}. Try --device cpu."
        ) from error
    if find_spec("accelerate") is None:
        raise MissingExtraError("accelerate", extra="accelerate")
    return device


def load_estimator(name: str | None, policy: Policy | None = None) -> Estimator:
    """The estimator of that name, with its default settings; without a name the calibration's own, or HybridGrad."""
    from semgrad_guard.estimators import KIND_OF
    from semgrad_guard.guard.calibrated_estimator import estimator_of

    if name is None:
        return estimator_of(None if policy is None else policy.calibration)
    return KIND_OF[name]()


def decoding(*, max_tokens: int, temperature: float, seed: int, stop: Sequence[str] = ()) -> GenerationOptions:
    """How to generate."""
    from semgrad_guard.engine.generation.options import GenerationOptions

    return GenerationOptions(max_tokens=max_tokens, temperature=temperature, seed=seed, stop=tuple(stop))


def load_policy(
    calibration: Path | None, threshold: float | None, on_unscored: OnUnscored = "abstain"
) -> Policy | None:
    """What the options ask for, if anything."""
    from semgrad_guard.calibration import Calibration
    from semgrad_guard.guard import Policy

    if calibration is not None and threshold is not None:
        raise typer.BadParameter("give --calibration or --threshold, not both: a calibration has its own threshold")
    if calibration is not None:
        return Policy.from_calibration(Calibration.load(calibration), on_unscored=on_unscored)
    return None if threshold is None else Policy(threshold=threshold, on_unscored=on_unscored)


def pocket_policy(on_unscored: OnUnscored = "abstain") -> Policy | None:
    """A policy with the embedded model's own calibration, if it is there."""
    path = pocket_calibration()
    return None if path is None else load_policy(path, None, on_unscored)


def pocket_calibration() -> Path | None:
    """The calibration that comes with the embedded model, if it is there."""
    from semgrad_guard import pocket

    home: Path = getattr(pocket, "CALIBRATION_PATH", pocket.POCKET_PATH.parent / "calibration.json")
    return home if home.is_file() else None

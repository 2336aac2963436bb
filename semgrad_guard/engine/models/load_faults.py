"""Common to every way of loading: no bars over weights, libraries' errors in our words, no invented weights."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from safetensors import SafetensorError
from transformers.utils import logging

from semgrad_guard.errors import ModelNotFoundError, SemGradGuardError, UnsupportedModelError

_LONGEST = 240


@contextmanager
def stage(name: str, wrong: str, *, advice: str = "", missing: str = "") -> Generator[None]:
    """Turns libraries' errors into the defect of `name`, with advice.

    Raises:
        ModelNotFoundError: something is not there or cannot be read (`missing` is the advice then).
        UnsupportedModelError: anything else.
    """
    try:
        yield
    except SemGradGuardError:
        raise
    except (OSError, SafetensorError, MemoryError) as error:
        raise ModelNotFoundError(f"cannot load {name!r}: {first_line(error)} {missing}".rstrip()) from error
    except ImportError as error:
        raise UnsupportedModelError(
            f"{name!r} needs a package that is not installed: {first_line(error)} Install it, or take the checkpoint "
            "in another form."
        ) from error
    except Exception as error:
        if "custom code" in str(error):
            raise UnsupportedModelError(
                f"{name!r} brings program code of its own (auto_map), which is never run here. Take a checkpoint whose "
                "architecture and tokenizer are part of transformers."
            ) from error
        raise UnsupportedModelError(f"{name!r}: {wrong}. {first_line(error)} {advice}".rstrip()) from error


@contextmanager
def without_weight_bar() -> Generator[None]:
    """No bar over the weights, which a program's log should not hold; bars over downloads stay as they are."""
    shown, hub_hidden = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    logging.disable_progress_bar()  # the hub's bars as well
    if not hub_hidden:
        enable_progress_bars()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
        if hub_hidden:
            disable_progress_bars()


def require_all_weights(name: str, report: dict[str, Any], *, saved_as: str | None = None) -> None:
    """Refuse a model of which a part was not in the checkpoint, or in another size.

    Args:
        name: the name of the checkpoint.
        report: transformers' `output_loading_info`.
        saved_as: the class that it was saved as, where the configuration names one.

    Raises:
        ModelNotFoundError: a tensor is missing, or has another shape than in the configuration.
    """
    if mismatched := sorted(report["mismatched_keys"]):
        tensor, found, expected = mismatched[0]
        raise ModelNotFoundError(
            f"the tensors of the checkpoint {name!r} do not have the sizes that its config.json says: {tensor} is "
            f"{tuple(found)} and should be {tuple(expected)}. One belongs to another model; download both again."
        )
    if missing := sorted(report["missing_keys"]):  # transformers would fill them with random numbers
        raise ModelNotFoundError(
            f"the checkpoint {name!r} lacks {len(missing)} tensor(s), {missing[0]} among them; "
            f"download or save it again{f' (it was saved as {saved_as})' if saved_as else ''}"
        )


def first_line(error: BaseException) -> str:
    """The first line of a library's error, without the lists of classes or files that follow."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else type(error).__name__
    if not isinstance(error, (OSError, ValueError, RuntimeError)):  # a mere key, or half a sentence, by itself
        line = f"{type(error).__name__}: {line}"
    line = line if len(line) <= _LONGEST else line[:_LONGEST].rsplit(" ", 1)[0] + " …"
    return line if line.endswith((".", "!", "?", "…")) else line + "."

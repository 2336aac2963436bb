"""What every way of loading shares: no bars over weights, a library's words in one line, no invented weights."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import modeling_gguf_pytorch_utils
from transformers.utils import logging

from semgrad_guard.errors import ModelNotFoundError

_LONGEST = 240


@contextmanager
def without_weight_bar() -> Generator[None]:
    """No bar over the weights, which a program's log should not hold; bars over downloads stay as they are."""
    shown, hub_hidden = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    gguf_reader: Any = modeling_gguf_pytorch_utils  # which asks nobody whether to draw
    bar = gguf_reader.tqdm
    gguf_reader.tqdm = partial(bar, disable=True)
    logging.disable_progress_bar()
    if not hub_hidden:
        enable_progress_bars()
    try:
        yield
    finally:
        gguf_reader.tqdm = bar
        if shown:
            logging.enable_progress_bar()
        if hub_hidden:
            disable_progress_bars()


def require_all_weights(name: str, report: dict[str, Any]) -> None:
    if missing := sorted(report["missing_keys"]):  # transformers would fill them with random numbers
        raise ModelNotFoundError(
            f"the checkpoint {name!r} lacks {len(missing)} tensor(s), {missing[0]} among them; "
            "download or save it again"
        )


def first_line(error: BaseException) -> str:
    """What a library says, without the lists that follow: names of all classes, of all files."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else type(error).__name__
    if not isinstance(error, (OSError, ValueError, RuntimeError)):  # a mere key, or half a sentence, by itself
        line = f"{type(error).__name__}: {line}"
    line = line if len(line) <= _LONGEST else line[:_LONGEST].rsplit(" ", 1)[0] + " …"
    return line if line.endswith((".", "!", "?", "…")) else line + "."

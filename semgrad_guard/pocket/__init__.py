"""The embedded model: its world, its training, its weights.

`path()` is the folder to give to `AutoModelForCausalLM.from_pretrained`. Importing this loads nothing.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["CALIBRATION_PATH", "POCKET_PATH", "QUESTIONS_PATH", "path"]

POCKET_PATH = Path(__file__).parent / "weights"
CALIBRATION_PATH = Path(__file__).parent / "calibration.json"
"""A calibration for closed-book questions about the model's own world (`calibrate.py`)."""
_PACKAGED = Path(__file__).parent / "questions.jsonl"
QUESTIONS_PATH = _PACKAGED if _PACKAGED.is_file() else Path(__file__).parents[2] / "examples" / "questions.jsonl"
"""Questions about that world, with their answers: what commands read for `--data pocket`. A wheel carries them next
to this file; a checkout has them in `examples/`."""


def path() -> Path:
    """The folder of the pocket model's weights, configuration and tokenizer."""
    return POCKET_PATH

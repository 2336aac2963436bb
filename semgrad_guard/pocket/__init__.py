"""The embedded model: its world, its training, its weights.

`path()` is the folder to give to `AutoModelForCausalLM.from_pretrained`. Importing this loads nothing.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["POCKET_PATH", "path"]

POCKET_PATH = Path(__file__).parent / "weights"


def path() -> Path:
    """The folder of the pocket model's weights, configuration and tokenizer."""
    return POCKET_PATH

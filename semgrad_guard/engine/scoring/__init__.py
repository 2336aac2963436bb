"""From a replay to numbers: the output head, gradients, segments, and the check that they are exact."""

from __future__ import annotations

from functools import partial

from semgrad_guard._moved import moved_name

__getattr__ = partial(moved_name, __name__)  # names that stood in a module of this folder's name

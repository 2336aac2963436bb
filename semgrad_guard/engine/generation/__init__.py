"""From a prompt to an answer: decoding, sampling, streams, and the evidence an answer leaves."""

from __future__ import annotations

from functools import partial

from semgrad_guard._moved import moved_name

__getattr__ = partial(moved_name, __name__)  # names that stood in a module of this folder's name

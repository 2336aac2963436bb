"""Answers and scores by many processes, on one machine or many: Ray loads a model in each, once (extra `ray`)."""

from __future__ import annotations

from semgrad_guard.ray.dataset import score

__all__ = ["score"]

"""Texts scored by many processes, on one machine or many: workers of Ray Data load a model once each (extra `ray`)."""

from semgrad_guard.ray.dataset import score as score

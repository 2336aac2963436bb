"""Answers and scores by many processes, on one machine or many: Ray loads a model in each, once (extra `ray`).

score    the rows of a Ray dataset, scored
app      the server behind Ray Serve
"""

from semgrad_guard.ray.dataset import score as score
from semgrad_guard.ray.serving import app as app

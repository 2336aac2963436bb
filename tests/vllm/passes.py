"""The passes that a scoring model makes for scores, in each process with vLLM."""

from __future__ import annotations

import sys
from typing import Any


def passes_of(scorer: Any) -> list[int]:
    """Grows by one entry with each pass through the scoring model's first layer, but for those that verify scores."""
    assert scorer.tiers()  # the self-check has passes of its own
    passes, state = list[int](), scorer._current()
    state.inputs._verified |= {"gradient": sys.maxsize, "forward": sys.maxsize}
    state.replayer.layers[0].register_forward_pre_hook(lambda *_: passes.append(1))
    return passes

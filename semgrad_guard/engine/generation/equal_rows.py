"""Whether prompts of equal length may be answered in one batch, where padding is not exact, by a trial of the model.

Recurrent and convolutional layers read padding as text, so that most of their models pad no rows. Rows of equal length
need no padding; whether each equals the same row alone shows in a short answer to made-up prompts, cached steps
included.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import GenerationConfig

from semgrad_guard.engine.replay.batch import unless_memory_runs_out
from semgrad_guard.engine.replay.replayer import Replayer
from semgrad_guard.engine.scoring.scorer import Scorer, clean_slate
from semgrad_guard.engine.scoring.self_check import LOOSEST, TOLERANCE
from semgrad_guard.errors import AnswerInterruptedError

logger = logging.getLogger("semgrad_guard")
_ROWS, _PROMPT, _STEPS = 3, 9, 3


def equal_rows_stand_alone(scorer: Scorer) -> bool:
    """Whether rows of a batch that begin and end their prompts together give the logits that each gives alone.

    Not where that is unknown: a model whose code fails in a batch, or that has no room for one.
    """
    with scorer.lock, clean_slate():
        replayer = scorer.current_replayer()
        try:
            return unless_memory_runs_out(lambda: _agree(replayer)) or False
        except AnswerInterruptedError:
            raise
        except Exception as error:  # noqa: BLE001 - unknown model code may fail in any way; one by one remains
            logger.warning("semgrad-guard: this model answers one prompt after the other; a batch fails (%r)", error)
            return False


def _agree(replayer: Replayer) -> bool:
    weight = replayer.head.weight
    tolerance = TOLERANCE.get(weight.dtype, LOOSEST)
    numbers = torch.arange(_ROWS * _PROMPT, device=weight.device)
    prompts = ((7919 * numbers + 104729) % weight.shape[0]).view(_ROWS, _PROMPT)
    tokens, logits = _written(replayer, prompts)
    for row in range(_ROWS):
        own_tokens, own_logits = _written(replayer, prompts[row : row + 1])
        for step in range(_STEPS):
            alone, beside = own_logits[step][0].double(), logits[step][row].double()
            if not bool((alone - beside).abs().max() <= tolerance * alone.abs().max()):  # NaN is no agreement
                return False
            if own_tokens[0, step] != tokens[row, step]:  # a tie that fell the other way: from here on texts differ
                break
    return True


def _written(replayer: Replayer, prompts: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The tokens [B, n] of a short answer to each prompt, and the logits [B, V] that each token was chosen by."""
    config = GenerationConfig(
        max_new_tokens=_STEPS, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True
    )
    found: Any = replayer.generate(prompts, torch.ones_like(prompts), generation_config=config)
    return found.sequences[:, _PROMPT:], found.logits

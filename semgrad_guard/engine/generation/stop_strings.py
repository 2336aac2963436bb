"""Where a stop string has come up in an answer, while it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StopStringCriteria


class StopStrings(StoppingCriteria):
    """Whether the text of an answer holds one of these strings: a criterion of `generate`.

    What transformers sees in the tokens' own spelling is asked first, since it costs little. It also sees what the text
    does not hold: the space before a first word, and what begins in the prompt. So the text decides.

    Args:
        tokenizer: the model's.
        strings: what ends an answer.
        decode: the text of an answer's tokens.
        width: how many columns the prompts take in what `generate` gives.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        strings: Sequence[str],
        *,
        decode: Callable[[Sequence[int]], str],
        width: int = 0,
    ) -> None:
        self._strings = [string for string in strings if _can_be_spelled(tokenizer, string)]
        self._spelled: Any = StopStringCriteria(tokenizer, self._strings) if self._strings else None
        self._decode, self._width = decode, width

    def __call__(self, input_ids: Any, scores: Any = None, **_: Any) -> Any:
        """For each row [B], whether it ends here."""
        if self._spelled is None:
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        answers = input_ids[:, self._width :]
        found = self._spelled(answers, scores)
        for row in found.nonzero().flatten().tolist():
            found[row] = self._is_in(answers[row].tolist())
        return found

    def end(self, ids: Sequence[int]) -> bool:
        """Whether one answer ends with these tokens."""
        return self._spelled is not None and bool(self(torch.tensor([list(ids)])).all())

    def _is_in(self, ids: Sequence[int]) -> bool:
        text = self._decode(ids)
        return any(string in text for string in self._strings)


def _can_be_spelled(tokenizer: PreTrainedTokenizerBase, string: str) -> bool:
    """Whether transformers can look for it; where it cannot, the text is cut there after the generation."""
    try:
        StopStringCriteria(tokenizer, [string])
    except ValueError:  # no token of the vocabulary matches a part of it
        return False
    return True

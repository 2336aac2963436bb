"""Readings of answers: a model's log-probabilities of their tokens, and a middle layer's states.

A prompt is read once, however many answers it has; these are read together in one pass, without a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from semgrad_guard.engine.answers.options import Ids
from semgrad_guard.engine.replay.tape import KeysValues, below, growing_cache, keys_of
from semgrad_guard.engine.scores.scorer import Scorer, clean_slate

_LOGITS = 1 << 27  # rows x response tokens x vocabulary of one pass


@dataclass(frozen=True)
class Reading:
    """One answer as the model sees it. Both are empty where the answer holds no token.

    `log_probs` are the tokens' log-probabilities in nats, `embedding` the hidden state of the last token in the middle
    of the model (layer floor((L + 1) / 2) of 0 .. L); None where the model's layers are not known.
    """

    log_probs: tuple[float, ...] = ()
    embedding: tuple[float, ...] | None = None


def middle_layer(n_layers: int) -> int:
    """The layer whose last-token state represents an answer's meaning (Chen et al., 2024: half of L + 1 states)."""
    return (n_layers + 1) // 2


def read(scorer: Scorer, prompt: Ids, answers: Sequence[tuple[Ids, Ids]], *, temperature: float = 1.0) -> list[Reading]:
    """Read several answers to one prompt: the tokens before each answer (a thought), and its own.

    Logits are divided by the temperature, > 0, before they become probabilities.
    """
    with scorer.lock, clean_slate(), torch.no_grad():
        known = [number for number, (_, ids) in enumerate(answers) if ids]
        longest = max((len(before) + len(ids) for before, ids in answers if ids), default=1)
        shares = scorer.joins and len(prompt) > 1
        step = max(1, _LOGITS // (longest * scorer.vocabulary)) if shares else 1
        prefix = _keys(scorer, prompt[:-1]) if shares and known else None
        found = [Reading()] * len(answers)
        for start in range(0, len(known), step):
            rows = known[start : start + step]
            readings = _pass(scorer, prompt, [answers[number] for number in rows], prefix, temperature)
            for number, reading in zip(rows, readings, strict=True):
                found[number] = reading
        return found


def likeliest(scorer: Scorer, prompt: Ids, answer: Ids, count: int) -> list[tuple[tuple[int, float], ...]]:
    """The `count` likeliest tokens at each place of an answer and their log-probabilities in nats, likeliest first.

    From the model's raw distribution, in one pass over the prompt and the answer.
    """
    with scorer.lock, clean_slate(), torch.no_grad():
        twin = scorer.twin
        ids = torch.tensor([[*prompt, *answer]], device=twin.device)
        twin.reset()
        output = twin.call(ids, logits_to_keep=len(answer) + 1)
        own = _precise(output.logits[0, -len(answer) - 1 : -1])
        values, places = own.log_softmax(-1).topk(min(count, own.shape[1]))
    return [tuple(zip(*row, strict=True)) for row in zip(places.tolist(), values.tolist(), strict=True)]


def _keys(scorer: Scorer, prompt: Ids) -> Sequence[KeysValues]:
    """A prompt's keys and values."""
    twin, cache = scorer.twin, growing_cache()
    twin.reset()
    with twin.headless():
        twin.call(torch.tensor([list(prompt)], device=twin.device), cache=cache)
    return keys_of(cache, 0, 0)


def _pass(
    scorer: Scorer,
    prompt: Ids,
    answers: Sequence[tuple[Ids, Ids]],
    prefix: Sequence[KeysValues] | None,
    temperature: float,
) -> list[Reading]:
    """Answers behind a prompt; the `prefix` are the keys of its tokens but the last. Padded on the right, where none
    looks."""
    twin, n_layers = scorer.twin, scorer.architecture.n_layers
    begin = [*prompt] if prefix is None else [prompt[-1]]
    texts = [torch.tensor([*begin, *before, *ids]) for before, ids in answers]
    ids = pad_sequence(texts, batch_first=True).to(twin.device)
    cache = None if prefix is None else below([prefix] * len(answers))
    layer, seen = middle_layer(n_layers), list[torch.Tensor]()
    watched: Any = {layer: seen.append} if twin.layers and layer < n_layers else {}
    twin.reset()
    with twin.watching(watched):
        logits = twin.call(ids, cache=cache).logits
    found: list[Reading] = []
    for row, (before, own) in enumerate(answers):
        first = len(begin) + len(before) - 1
        tempered = _precise(logits[row, first : first + len(own)]) / temperature
        targets = torch.tensor(own, device=tempered.device)[:, None]
        log_probs = tempered.log_softmax(-1).gather(1, targets).squeeze(1).double()
        embedding = tuple(seen[0][row, first + len(own)].double().tolist()) if seen else None
        found.append(Reading(tuple(log_probs.tolist()), embedding))
    return found


def _precise(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()

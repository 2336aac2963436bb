"""More answers of a model to the same prompts, and readings of answers: log-probabilities and a middle layer's states.

A prompt is read once, however many answers it has; these are read together in one pass, without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessorList, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from semgrad_guard.engine.answers.options import DiverseBeams, GenerationOptions, Ids, Sample, SamplingPlan
from semgrad_guard.engine.answers.text import Visible
from semgrad_guard.engine.prompts.prompt import Prompt, render
from semgrad_guard.engine.prompts.responses import Codec
from semgrad_guard.engine.replay.tape import growing_cache
from semgrad_guard.engine.scores.scorer import Scorer, clean_slate
from semgrad_guard.records import Conversation

_LOGITS = 1 << 27  # rows x response tokens x vocabulary of one pass

Drawing = tuple[Prompt, GenerationOptions, LogitsProcessorList | None]
"""An answer to be drawn: by its options, or by processors in the place of their sampling."""


@dataclass(frozen=True)
class Reading:
    """One answer as the model sees it. Both are empty where the answer holds no token.

    `log_probs` are the tokens' log-probabilities in nats, `embedding` the hidden state of the last token in the middle
    of the model (layer floor((L + 1) / 2) of 0 .. L); None where the model's layers are not known.
    """

    log_probs: tuple[float, ...] = ()
    embedding: tuple[float, ...] | None = None


class ModelSampler(Codec):
    """Asks one model for further answers, and for its opinion of answers. Holds the model's lock while it runs.

    `draw` has answers written. `window` is how many positions the model can attend over, None if it states no limit.
    """

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        draw: Callable[[Any, Sequence[Drawing]], list[Visible]],
        *,
        end_tokens: tuple[int, ...],
        window: int | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self.scorer, self._draw, self.end_tokens = scorer, draw, end_tokens
        self._window, self._template_options = window, template_options

    def render(self, conversation: Conversation) -> Prompt:
        """The prompt that the model would see."""
        return render(self._tokenizer, conversation, template_options=self._template_options)

    def drawn(
        self, prompts: Sequence[tuple[Prompt, GenerationOptions]], plan: SamplingPlan
    ) -> list[tuple[Sample, ...]]:
        """`plan.count` answers to each prompt, not yet judged; they end as one with the options does."""
        wanted: list[Drawing] = []
        for prompt, options in prompts:
            room = plan.max_tokens if self._window is None else min(plan.max_tokens, self._window - len(prompt.ids))
            ends = replace(options, max_tokens=room)
            if isinstance(plan, DiverseBeams):
                wanted += [(prompt, ends, own) for own in plan.processors(len(prompt.ids), self.end_tokens)]
            else:
                wanted += [(prompt, replace(own, max_tokens=room), None) for own in plan.rows(prompt.ids, ends)]
        samples = [sample_of(found) for found in self._draw(self, wanted)]
        return [tuple(samples[start : start + plan.count]) for start in range(0, len(samples), plan.count)]

    def judged(
        self, prompts: Sequence[Prompt], samples: Sequence[Sequence[Sample]], *, temperature: float = 1.0
    ) -> list[tuple[Sample, ...]]:
        """The samples with their embeddings and log-probabilities at a temperature, however they were drawn."""
        found: list[tuple[Sample, ...]] = []
        for prompt, own in zip(prompts, samples, strict=True):
            written = [(sample.preceding, sample.ids) for sample in own]
            readings = read(self.scorer, prompt.ids, written, temperature=temperature)
            judged = zip(own, readings, strict=True)
            found.append(tuple(replace(one, log_probs=r.log_probs, embedding=r.embedding) for one, r in judged))
        return found

    def read(
        self,
        prompts: Sequence[Prompt],
        answers: Sequence[Sequence[Ids]],
        *,
        before: Sequence[Sequence[Ids]],
    ) -> list[list[Reading]]:
        """The model's opinion of several answers to each prompt; `before` are the tokens between it and each answer."""
        pairs = [list(zip(*both, strict=True)) for both in zip(before, answers, strict=True)]
        return [read(self.scorer, prompt.ids, own) for prompt, own in zip(prompts, pairs, strict=True)]

    def likeliest(
        self, prompt: Prompt, answer: Ids, count: int, *, before: Ids = ()
    ) -> list[tuple[tuple[int, float], ...]]:
        """The `count` likeliest tokens at each place of an answer and their log-probabilities in nats, likeliest first.

        From the model's raw distribution, in one pass over the prompt, tokens `before` the answer, and the answer.
        """
        with self.scorer.lock, clean_slate(), torch.no_grad():
            twin = self.scorer.twin
            ids = torch.tensor([[*prompt.ids, *before, *answer]], device=twin.device)
            twin.reset()
            output = twin.call(ids, logits_to_keep=len(answer) + 1)
            own = _precise(output.logits[0, -len(answer) - 1 : -1])
            values, places = own.log_softmax(-1).topk(min(count, own.shape[1]))
        return [tuple(zip(*row, strict=True)) for row in zip(places.tolist(), values.tolist(), strict=True)]

    def unthought(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens by which the model answers a prompt without a thought: an empty one, closed."""
        written = None if prompt.thinking is None else prompt.thinking.written("", "")
        return self.encode(written) if written else ()

    def fits(self, prompt: Prompt, longest: int) -> bool:
        """Whether an answer of `longest` tokens has room behind this prompt."""
        return self._window is None or len(prompt.ids) + longest <= self._window


def sample_of(answer: Visible) -> Sample:
    """An answer as a sample that is not yet judged."""
    return Sample(
        answer.text,
        answer.scored_ids,
        preceding=answer.preceding if answer.scored_ids else (),
        why_unscored=None if answer.reasoning is None else answer.reasoning.why_unscored,
    )


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
        cache = _prefilled(scorer, prompt[:-1]) if shares and known else None
        found = [Reading()] * len(answers)
        for start in range(0, len(known), step):
            rows = known[start : start + step]
            readings = _pass(scorer, prompt, [answers[number] for number in rows], cache, temperature)
            for number, reading in zip(rows, readings, strict=True):
                found[number] = reading
        return found


def _prefilled(scorer: Scorer, prompt: Ids) -> Cache:
    twin, cache = scorer.twin, growing_cache()
    ids = torch.tensor([list(prompt)], device=twin.device)
    twin.reset()
    with twin.headless():
        twin.call(ids, cache=cache)
    return cache


def _pass(
    scorer: Scorer, prompt: Ids, answers: Sequence[tuple[Ids, Ids]], prefix: Cache | None, temperature: float
) -> list[Reading]:
    """Answers behind a prompt, whose tokens but the last are in the `prefix`; padded on the right, where none looks."""
    twin, n_layers = scorer.twin, scorer.architecture.n_layers
    begin = [*prompt] if prefix is None else [prompt[-1]]
    texts = [torch.tensor([*begin, *before, *ids]) for before, ids in answers]
    ids = pad_sequence(texts, batch_first=True).to(twin.device)
    cache = None
    if prefix is not None:
        cache = growing_cache()
        layers: list[Any] = prefix.layers
        for number, layer in enumerate(layers):
            if layer.is_initialized:
                halves = (half.expand(len(answers), *half.shape[1:]) for half in (layer.keys, layer.values))
                cache.update(*halves, number)
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

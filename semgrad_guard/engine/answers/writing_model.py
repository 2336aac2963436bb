"""`WritingModel`: a loaded model, as those who write and score its answers know it.

Its prompts, its identity, template and window, and its readings of answers: the log-probabilities of their tokens, and
a middle layer's states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from semgrad_guard.declared import plain
from semgrad_guard.engine.answers.options import GenerationOptions, Ids, Sample, require_kind
from semgrad_guard.engine.objective import Objective, TokenChoice
from semgrad_guard.engine.prompts.forms import CallForm, GrammarCompiler, call_form
from semgrad_guard.engine.prompts.prompt import (
    PLAIN,
    Prompt,
    calls_tools,
    chat_template,
    count_tokens,
    render,
    template_fingerprint,
)
from semgrad_guard.engine.prompts.thoughts import Codec
from semgrad_guard.engine.scores.architecture import is_hooked
from semgrad_guard.engine.scores.head import lacks_units
from semgrad_guard.engine.scores.scorer import Scorer, clean_slate, scorer_of
from semgrad_guard.engine.scores.tape import KeysValues, Memory, below, growing_cache, keys_of
from semgrad_guard.errors import InputError, PromptTooLongError, UnsupportedToolsError
from semgrad_guard.named import NAMES
from semgrad_guard.records import Conversation


@dataclass(frozen=True)
class ModelIdentity:
    """The identity that a calibration is bound to.

    `fingerprint` follows the weights, switches, patches and hooks, `template` the chat template.
    """

    name: str
    revision: str | None
    fingerprint: str
    dtype: str
    template: str


def name_of(name_or_path: str) -> str:
    """A model's name, whichever engine loads it: that of the folder."""
    is_path = name_or_path not in NAMES and Path(name_or_path).exists()
    return Path(name_or_path).resolve().name if is_path else name_or_path


class WritingModel(Codec):
    """A causal LM with its tokenizer. `LanguageModel` adds how it is loaded, how it writes, and scores."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        revision: str | None = None,
        semantic_token: int | TokenChoice | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self.name, self.revision = name, revision
        self._model = model
        self._max_batch: int | None = None
        self._grammars: GrammarCompiler | None = None
        self._template_options = dict(require_kind("template_options", template_options or {}, Mapping))
        if isinstance(semantic_token, TokenChoice):
            semantic_token = semantic_token.offset_for(self.template_fingerprint())
        self.semantic_token = None if semantic_token is None else plain("semantic_token", semantic_token, int)
        self.scorer = scorer_of(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: deep copies of its holders share the weights."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A loaded model is not pickled.

        Raises:
            InputError: always; the message names the alternative.
        """
        raise InputError(
            f"The loaded model {self.name!r} cannot be pickled, nor what holds it (a Guard): weights are named, not "
            "carried. Send its name and the policy, which pickles, and load it there: "
            "Guard(LanguageModel.from_pretrained(name), policy)."
        )

    @property
    def turn(self) -> AbstractContextManager[None]:
        """For the time of a block this thread alone uses the model, in one state of it."""
        return self.scorer.lock

    @property
    def has_turn(self) -> bool:
        """Whether the running thread is within such a block."""
        return self.scorer.lock.is_mine

    def refresh(self) -> None:
        """Take the model as it is now.

        A guarded model belongs to its guard: call this after any change of it. Noticed without it are switched, added
        and merged adapters, weights edited in place or replaced, replaced modules and hooks.

        Raises:
            UnsupportedModelError: the model as it is rules a score out.
        """
        self.scorer.refresh()

    @property
    def identity(self) -> ModelIdentity:
        """Name, revision, fingerprint, dtype and chat template of the model as it is now."""
        return ModelIdentity(
            name=self.name,
            revision=self.revision,
            fingerprint=self.scorer.fingerprint,
            dtype=self._dtype,
            template=self.template_fingerprint(),
        )

    def template_fingerprint(self, template_options: Mapping[str, Any] | None = None) -> str:
        """Twelve hex digits for the chat template with the model's options and these (tools among them)."""
        return template_fingerprint(self.tokenizer, {**self._template_options, **(template_options or {})})

    @property
    def memory(self) -> Memory:
        """How much may be held besides the model: `FRUGAL` where memory is short."""
        return self.scorer.memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        with self.scorer.lock:
            self.scorer.memory = require_kind("memory", memory, Memory)

    @property
    def max_batch(self) -> int | None:
        """How many answers are written in one batch at most.

        None (the default) leaves it to a caller of several answers; single answers of concurrent callers are then
        written eight at a time. With 1 each text is that of a single run, also in half precision.

        Raises:
            InputError: set to less than 1.
        """
        return self._max_batch

    @max_batch.setter
    def max_batch(self, rows: int | None) -> None:
        rows = None if rows is None else plain("max_batch", rows, int)
        if rows is not None and rows < 1:
            raise InputError(f"max_batch must be at least 1, or None for no limit, not {rows}")
        self._max_batch = rows

    @cached_property
    def tool_format(self) -> CallForm:
        """How this model writes tool calls.

        Raises:
            UnsupportedToolsError: its chat template knows no tools, or an unknown form of calls.
        """
        # A tokenizer may hold a second template for conversations with tools, chosen where there are any.
        return call_form(self.tokenizer, chat_template(self.tokenizer, {"tools": [], **self._template_options}))

    @property
    def knows_tools(self) -> bool:
        """Whether calls of tools can be read in this model's answers."""
        try:
            return bool(self.tool_format)
        except UnsupportedToolsError:
            return False

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The tokens that are left out of answers' texts, and their ids."""
        added: Any = self.tokenizer.added_tokens_decoder
        return {token.content: number for number, token in added.items() if token.special}

    @property
    def context_window(self) -> int | None:
        """Positions the model can attend over, None if it states no limit (XLNet writes -1).

        With dynamic rotary frequencies a configuration states the original context, and the factor that extends it.
        """
        config: Any = self._model.config.get_text_config(decoder=True)
        positions: int | None = getattr(config, "max_position_embeddings", None)
        if positions is None or positions <= 0:
            return None
        rope: Any = getattr(config, "rope_parameters", None) or {}
        factor = rope.get("factor") if rope.get("rope_type") == "dynamic" else None
        return int(positions * max(1.0, factor or 1.0))

    @property
    def doubts(self) -> Sequence[str]:
        """Signs, in sentences, that tokenizer or chat template are another model's.

        Answers would be garbage, and look like answers.
        """
        found: list[str] = []
        size, vocabulary, end = len(self.tokenizer), self.scorer.vocabulary, self.tokenizer.eos_token_id
        if self.template_fingerprint() == PLAIN:
            found.append(
                "The model has no chat template: it is shown the bare text and may continue it instead of answering. "
                "Use an instruction-tuned model, or save the tokenizer with its chat_template."
            )
        if (
            size > vocabulary or size < vocabulary / 2
        ):  # a vocabulary is padded to a round number, never to twice its size
            found.append(f"The tokenizer has {size} tokens and the model {vocabulary}: is it another model's?")
        elif end is not None and self._model_end_tokens and end not in self._model_end_tokens:
            known = ", ".join(map(str, self._model_end_tokens))
            found.append(
                f"The tokenizer ends a text with token {end} and the model with {known}: is it another model's?"
            )
        return found

    @property
    def slow_dtype(self) -> str | None:
        """The weights' dtype, where this processor has no instructions for it and float32 is several times faster."""
        return self._dtype if lacks_units(cast(torch.dtype, self._model.dtype), self._model.device) else None

    @property
    def _dtype(self) -> str:
        return str(self._model.dtype).removeprefix("torch.")

    @property
    def n_layers(self) -> int:
        """Decoder layers L; hidden states are h^(0) .. h^(L-1)."""
        return self.scorer.architecture.n_layers

    def render(self, conversation: Conversation, **template_options: Any) -> Prompt:
        """The prompt the model will see: text, token ids and t*.

        Raises:
            EmptyPromptError, InputError: the conversation cannot be rendered.
            UnsupportedToolsError: it holds calls of tools, and the chat template would leave them out in silence.
            PromptTooLongError: it exceeds the context window by so much that it is not even tokenised.
        """
        if calls_tools(conversation):
            _ = self.tool_format
        return render(
            self.tokenizer,
            conversation,
            semantic_token=self.semantic_token,
            template_options={**self._template_options, **template_options},
            window=self.context_window,
        )

    def count_tokens(self, conversation: Conversation, **template_options: Any) -> int:
        """How many tokens `render` would give this conversation (tools among the options count too).

        Raises:
            InputError: the chat template refuses the conversation.
        """
        options = {**self._template_options, **template_options}
        return count_tokens(self.tokenizer, conversation, template_options=options)

    @property
    def departures(self) -> dict[str, Any]:
        """Departures of answers and scores from the model's configuration: an own t*, other end tokens.

        Plain JSON, by name; it belongs to a calibration's binding, and to a run's identity.
        """
        token = {} if self.semantic_token is None else {"semantic_token": self.semantic_token}
        config: Any = self._model.config.get_text_config(decoder=True)
        usual = self.end_tokens == tuple(sorted(_token_ids(getattr(config, "eos_token_id", None))))
        return token if usual else {**token, "end_tokens": list(self.end_tokens)}

    @property
    def joins(self) -> bool:
        """Whether answers of this model may join and leave a `running_batch`."""
        return self.scorer.joins

    @property
    def is_hooked(self) -> bool:
        """Whether code of its owner runs in its passes, where rows of a batch may see each other."""
        return is_hooked(self._model)

    def running_batch(self, objective: Objective | None = None) -> Any:
        """A `RunningBatch` for one thread. `objective` is that of later scoring, as in `generate`."""
        raise NotImplementedError

    def fitted(self, options: GenerationOptions | None, *prompts: Prompt) -> GenerationOptions:
        """The options with `max_tokens` cut to the room that the context window leaves after the longest prompt.

        Raises:
            PromptTooLongError: it leaves nothing.
        """
        options = require_kind("options", options or GenerationOptions(), GenerationOptions)
        window, longest = self.context_window, max(len(prompt.ids) for prompt in prompts)
        if window is None:
            return options
        if longest >= window:
            raise PromptTooLongError(
                f"the prompt has {longest} tokens, which leaves no room for an answer in this model's context window "
                f"of {window}; shorten it or use a model with a larger window"
            )
        room = window - longest
        return options if options.max_tokens <= room else replace(options, max_tokens=room)

    def require_known(self, prompts: Sequence[Prompt]) -> None:
        """Return if the model has a row for every token. It looks at the model: within the turn that answers.

        Raises:
            InputError: the tokenizer does not belong to the model.
        """
        vocabulary, highest = self.scorer.vocabulary, max(max(prompt.ids) for prompt in prompts)
        if highest >= vocabulary:
            raise InputError(f"the tokenizer does not belong to this model: id {highest} >= {vocabulary}")

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Every token that ends an answer: the generation config's (chat models list several) and the tokenizer's."""
        return tuple(sorted({*self._model_end_tokens, *_token_ids(self.tokenizer.eos_token_id)}))

    @property
    def _model_end_tokens(self) -> tuple[int, ...]:
        return _token_ids(getattr(getattr(self._model, "generation_config", None), "eos_token_id", None))

    @property
    def grammars(self) -> GrammarCompiler:
        """The compiled grammars, for the tokens that end an answer now; their owner may change them."""
        if self._grammars is None or self._grammars.end_tokens != self.end_tokens:
            self._grammars = GrammarCompiler(self.tokenizer, end_tokens=self.end_tokens)
        return self._grammars

    # The model's opinion of answers.

    def judged(self, prompt: Prompt, samples: Sequence[Sample], *, temperature: float = 1.0) -> tuple[Sample, ...]:
        """Answers to a prompt with their embeddings and log-probabilities at a temperature, however they were drawn."""
        written = [(sample.preceding, sample.ids) for sample in samples]
        readings = read(self.scorer, prompt.ids, written, temperature=temperature)
        pairs = zip(samples, readings, strict=True)
        return tuple(replace(one, log_probs=own.log_probs, embedding=own.embedding) for one, own in pairs)

    def read(self, prompt: Prompt, answers: Sequence[Ids]) -> list[Reading]:
        """The model's opinion of several answers to a prompt, without a thought: behind an empty one, closed."""
        written = None if prompt.thinking is None else prompt.thinking.written("", "")
        before = self.encode(written) if written else ()
        return read(self.scorer, prompt.ids, [(before, answer) for answer in answers])

    def fits(self, prompt: Prompt, longest: int) -> bool:
        """Whether an answer of `longest` tokens has room behind this prompt."""
        return self.context_window is None or len(prompt.ids) + longest <= self.context_window


def _token_ids(listed: Any) -> tuple[int, ...]:
    """Ids as configurations list them: one, several, or none."""
    ids = listed if isinstance(listed, (list, tuple)) else [listed]
    return tuple(int(token) for token in ids if token is not None)


# Readings of answers. A prompt is read once, however many answers it has; these are read together in one pass.

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

"""A local Hugging Face causal LM: loads, renders its chat template, generates, streams, and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast, overload

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from semgrad_guard.engine.checkpoint import POCKET, load, weight_fingerprint
from semgrad_guard.engine.decoding import Decoder, Listener
from semgrad_guard.engine.evidence import BatchScoring, Evidence
from semgrad_guard.engine.generation import Generation, GenerationOptions
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompt import Prompt, chat_template, render, template_fingerprint, tokenize
from semgrad_guard.engine.scores import GradientScores
from semgrad_guard.engine.scoring import scorer_of
from semgrad_guard.engine.segments import By, Segment, score_segments
from semgrad_guard.engine.semantic_preservation import last_states
from semgrad_guard.engine.stream import TextStream
from semgrad_guard.engine.token_choice import TokenChoice
from semgrad_guard.engine.tool_format import ToolAnswer, ToolFormat, tool_format
from semgrad_guard.errors import EmptyResponseError, InputError, PromptTooLongError
from semgrad_guard.records import Conversation


@dataclass(frozen=True)
class ModelIdentity:
    """What a calibration is bound to. `fingerprint` follows the weights, `template` the chat template."""

    name: str
    revision: str | None
    fingerprint: str
    dtype: str
    template: str


class LanguageModel:
    """A causal LM whose answers can be scored. Thread-safe by one lock per model: batches give throughput."""

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
        self.name, self.revision = name, revision
        self.tokenizer = tokenizer
        self._model = model
        self._template_options = dict(template_options or {})
        if isinstance(semantic_token, TokenChoice):
            semantic_token = semantic_token.offset_for(self.template_fingerprint())
        self.semantic_token = semantic_token
        self._scorer = scorer_of(model)
        self._decoder = Decoder(
            self._scorer,
            tokenizer,
            end_tokens=_end_tokens(model, tokenizer),
            # no method of this object: the decoder must not keep it alive
            render=partial(render, tokenizer, template_options=self._template_options),
            window=self.context_window,
        )

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        revision: str | None = None,
        dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        quantization_config: Any = None,
        attn_implementation: str | None = None,
        local_files_only: bool | None = None,
        semantic_token: int | TokenChoice | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> LanguageModel:
        """Load a checkpoint: "pocket" (the embedded model), a folder, or a hub id. Safetensors only, no remote code.

        Args:
            name_or_path: what to load.
            revision: a hub revision.
            dtype: default: the checkpoint's own, and float32 for the pocket model, which is meant for CPUs.
            device_map, quantization_config, attn_implementation, local_files_only: as in transformers.
            semantic_token: t*, counted from the prompt's end, where the chat template's own should be overridden; or
                what a probe recommends, `TokenChoice.load("probe.json")`.
            template_options: given to the chat template with every prompt, e.g. {"enable_thinking": False}.

        Raises:
            ModelNotFoundError: nothing loadable at that name or path; the message says what is missing.
            UnsupportedModelError: no decoder-only causal LM, or one whose layers are spread over devices.
            BindingMismatchError: t* was chosen for another chat template.
        """
        model, tokenizer = load(
            name_or_path,
            revision=revision,
            dtype=dtype if dtype is not None else torch.float32 if name_or_path == POCKET else "auto",
            device_map=device_map,
            quantization_config=quantization_config,
            attn_implementation=attn_implementation,
            local_files_only=local_files_only,
        )
        name = Path(name_or_path).resolve().name if Path(name_or_path).is_dir() else name_or_path
        found_revision = revision or getattr(model.config, "_commit_hash", None)
        return cls(
            model,
            tokenizer,
            name=name,
            revision=found_revision,
            semantic_token=semantic_token,
            template_options=template_options,
        )

    @classmethod
    def from_transformers(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str | None = None,
        revision: str | None = None,
        semantic_token: int | TokenChoice | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> LanguageModel:
        """Wrap a model and tokenizer that are already loaded; both stay exactly as they are."""
        known = name or str(getattr(model, "name_or_path", "") or type(model).__name__)
        return cls(
            model,
            tokenizer,
            name=known,
            revision=revision,
            semantic_token=semantic_token,
            template_options=template_options,
        )

    @cached_property
    def identity(self) -> ModelIdentity:
        """Name, revision, weight fingerprint, dtype and chat template, read once."""
        return ModelIdentity(
            name=self.name,
            revision=self.revision,
            fingerprint=weight_fingerprint(self._model),
            dtype=str(self._model.dtype).removeprefix("torch."),
            template=self.template_fingerprint(),
        )

    def template_fingerprint(self, template_options: Mapping[str, Any] | None = None) -> str:
        """Twelve hex digits for the chat template with the model's options and these (tools among them)."""
        return template_fingerprint(self.tokenizer, {**self._template_options, **(template_options or {})})

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How this model writes tool calls.

        Raises:
            UnsupportedToolsError: its chat template knows no tools, or an unknown form of calls.
        """
        # A tokenizer may hold a second template for conversations with tools, chosen where there are any.
        return tool_format(self.tokenizer, chat_template(self.tokenizer, {"tools": [], **self._template_options}))

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The tokens that are left out of answers' texts, and their ids."""
        added: Any = self.tokenizer.added_tokens_decoder
        return {token.content: number for number, token in added.items() if token.special}

    @property
    def context_window(self) -> int | None:
        """Positions the model can attend over, None if it states no limit."""
        config: Any = self._model.config.get_text_config(decoder=True)
        return cast("int | None", getattr(config, "max_position_embeddings", None))

    @property
    def n_layers(self) -> int:
        """Decoder layers L; hidden states are h^(0) .. h^(L-1)."""
        return self._scorer.architecture.n_layers

    def render(self, conversation: Conversation, **template_options: Any) -> Prompt:
        """The prompt the model will see: text, token ids and t*."""
        return render(
            self.tokenizer,
            conversation,
            semantic_token=self.semantic_token,
            template_options={**self._template_options, **template_options},
        )

    def generate(
        self,
        conversation: Conversation,
        options: GenerationOptions | None = None,
        *,
        objective: Objective | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Answer one conversation. `objective` tells what will be scored, so that scoring finds its states kept."""
        return self.generate_batch([conversation], options, objective=objective, template_options=template_options)[0]

    def generate_batch(
        self,
        conversations: Sequence[Conversation],
        options: GenerationOptions | None = None,
        *,
        objective: Objective | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[Generation]:
        """Answer several conversations in one batch; they are also scored in one backward pass.

        Raises:
            EmptyPromptError, PromptTooLongError, InputError: named before anything runs.
        """
        prompts = [self.render(conversation, **(template_options or {})) for conversation in conversations]
        if not prompts:
            return []
        return self._decoder.run(prompts, self._fitted(prompts, options), objective or Objective())

    def stream(
        self,
        conversation: Conversation,
        options: GenerationOptions | None = None,
        *,
        objective: Objective | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> TextStream:
        """Answer piece by piece: iterate for text, then read `.generation`, which can be scored like any other."""
        prompt = self.render(conversation, **(template_options or {}))
        fitted = self._fitted([prompt], options)

        def work(listener: Listener) -> Generation:
            return self._decoder.run([prompt], fitted, objective or Objective(), listener=listener)[0]

        return TextStream(work, self._decoder.decode, fitted.stop)

    def tool_answer(self, generation: Generation) -> ToolAnswer:
        """An answer to a prompt with tools, taken apart into text and calls.

        Raises:
            UnsupportedToolsError: the chat template knows no tools, or an unknown form of calls.
        """
        raw: Any = self.tokenizer.decode(
            list(generation.response_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        beyond_stop = len(self._decoder.decode(generation.response_ids)) - len(generation.text)
        found = self.tool_format.parse(raw[: len(raw) - beyond_stop], generation.prompt.text)
        return found if found.calls or found.broken else ToolAnswer(generation.text)

    def evidence(self, conversation: Conversation, text: str) -> Evidence:
        """Evidence about an answer that came from anywhere: another server, an edit, a cache.

        The text is tokenised as a continuation of the rendered prompt, without an end token.

        Raises:
            EmptyResponseError: the text holds nothing but white space.
            PromptTooLongError: prompt and text do not fit the context window.
        """
        prompt = self.render(conversation)
        encoded: Any = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not text.strip() or not encoded:
            raise EmptyResponseError("the response is empty; there is nothing to score")
        window = self.context_window
        if window is not None and len(prompt.ids) + len(encoded) > window:
            raise PromptTooLongError(
                f"prompt ({len(prompt.ids)} tokens) and response ({len(encoded)}) exceed the context window of {window}"
            )
        scoring = BatchScoring(self._scorer, [prompt], [encoded], texts=[text], sampler=self._decoder.sampler)
        return Evidence(prompt, tuple(encoded), scoring)

    def last_states(self, prompts: Sequence[Prompt], count: int) -> torch.Tensor:
        """Hidden states h^(0) .. h^(L-1) of the prompts' last `count` tokens, in one batch: [prompts, L, count, d].

        Raises:
            InputError: a prompt has fewer tokens.
        """
        return last_states(self._scorer, prompts, count)

    @overload
    def score(
        self, conversation: Conversation, text: str, *, by: None = None, objective: Objective | None = None
    ) -> GradientScores: ...

    @overload
    def score(
        self, conversation: Conversation, text: str, *, by: By, objective: Objective | None = None
    ) -> list[Segment]: ...

    def score(
        self, conversation: Conversation, text: str, *, by: By | None = None, objective: Objective | None = None
    ) -> GradientScores | list[Segment]:
        """Gradient scores of a text as the answer to a conversation, whoever wrote it (see `evidence`).

        With `by="sentence"` or `by="clause"`, the text's segments with scores of their own (see `Segment`).
        """
        evidence = self.evidence(conversation, text)
        if by is not None:
            encoded = tokenize(self.tokenizer, text, add_special_tokens=False)
            return score_segments(self._scorer, evidence.prompt, encoded, by=by, objective=objective or Objective())
        timed = evidence.gradients(objective)
        if timed is None:
            raise EmptyResponseError("the response is empty; there is nothing to score")
        return timed.scores

    def _fitted(self, prompts: Sequence[Prompt], options: GenerationOptions | None) -> GenerationOptions:
        """The options with `max_new_tokens` cut to what the context window leaves."""
        options = options or GenerationOptions()
        window, longest = self.context_window, max(len(prompt.ids) for prompt in prompts)
        if window is None:
            return options
        if longest >= window:
            raise PromptTooLongError(
                f"the prompt has {longest} tokens, which leaves no room for an answer in this model's context window "
                f"of {window}; shorten it or use a model with a larger window"
            )
        vocabulary = self._scorer.vocabulary
        for prompt in prompts:
            if max(prompt.ids) >= vocabulary:
                raise InputError(f"the tokenizer does not belong to this model: id {max(prompt.ids)} >= {vocabulary}")
        room = window - longest
        return options if options.max_new_tokens <= room else replace(options, max_new_tokens=room)


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends an answer: the generation config's (chat models list several) and the tokenizer's."""
    config: Any = getattr(model, "generation_config", None)
    listed: Any = getattr(config, "eos_token_id", None)
    ids = list(listed) if isinstance(listed, (list, tuple)) else [listed]
    own: Any = tokenizer.eos_token_id
    return tuple(sorted({int(i) for i in [*ids, own] if i is not None}))
